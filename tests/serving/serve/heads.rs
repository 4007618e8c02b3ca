//! Tests of the routes for task heads: their responses contain the results of the engine, in the form of transformers' pipelines.

use gemmule::heads::{
    Aggregation, AnswerOptions, EntityOptions, MASK_LOGITS, MaskOptions, TOKEN_LOGITS,
    ZeroShotOptions,
};

use super::{bodies::is_ok, *};

fn folder(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    match ["ner", "qa"].contains(&name) {
        true => root.join("pipelines").join(name),
        false => root.join("checkpoints").join(name),
    }
}

fn engine(name: &str, output: &str) -> Engine {
    let builder = Engine::from_checkpoint(folder(name)).outputs([output]);
    builder.device(DeviceChoice::Cpu).build().unwrap()
}

fn serving_heads() -> Server {
    let models = ["ner", "qa", "hf-electra-mlm", "ce-nli", "st-mean"].map(|name| {
        let choice = ModelChoice {
            folder: folder(name),
            fill_mask: name == "hf-electra-mlm",
            cache: Some(cache()),
            ..choice(name, true, Duration::from_secs(10))
        };
        Model::open(choice).unwrap()
    });
    serving_models(models.into(), quick())
}

/// Returns a value after it is written to JSON and parsed by a client, which may round the last digit of a number.
fn sent(value: Value) -> Value {
    serde_json::from_str(&value.to_string()).unwrap()
}

const TEXT: &str = "The  café in Montréal sells bread,\ncheese (and 日本 apples) near the harbour.";

#[test]
fn tasks_of_heads_are_those_of_the_engine() {
    let server = serving_heads();
    let to = server.address();
    let ner = engine("ner", TOKEN_LOGITS);
    for (name, aggregation) in Aggregation::NAMES {
        let options = EntityOptions {
            aggregation,
            ..EntityOptions::default()
        };
        let own = ner.classify_tokens(&[TEXT, "rain"], &options).unwrap();
        let path = "/v1/token-classification";
        let one = json!({"inputs": TEXT, "aggregation_strategy": name});
        assert_eq!(is_ok(to, path, &one), sent(json!(own[0])));
        let both = json!({"inputs": [TEXT, "rain"], "aggregation_strategy": name.to_uppercase()});
        assert_eq!(is_ok(to, path, &both), sent(json!(own)));
        if aggregation != Aggregation::None {
            let told = is_ok(to, "/predict_tokens", &both);
            let first = own[0].first().unwrap();
            assert_eq!(told[0].as_array().unwrap().len(), own[0].len());
            assert_eq!(told[0][0]["token"], json!(first.word));
            assert_eq!(told[0][0]["end"], json!(first.end));
            assert_eq!(
                told[0][0]["results"],
                sent(json!({first.label.clone(): first.score}))
            );
        }
    }
    // TEI's response has all tokens, including special tokens, with the scores of all labels. TEI's clients send each text in a list.
    let all = is_ok(to, "/predict_tokens", &json!({"inputs": [["rain"]]}));
    let tokens = all[0].as_array().unwrap();
    assert_eq!(tokens[0]["token"], "[CLS]");
    for token in tokens {
        let scores = token["results"].as_object().unwrap();
        assert_eq!(scores.len(), 5);
        let sum: f64 = scores.values().filter_map(Value::as_f64).sum();
        assert!((sum - 1.0).abs() < 1e-5, "{token}");
    }
    let raw = is_ok(
        to,
        "/predict_tokens",
        &json!({"inputs": "rain", "raw_scores": true}),
    );
    assert_ne!(raw[0][1]["results"], tokens[1]["results"]);
    assert_eq!(raw[0][1]["token_id"], tokens[1]["token_id"]);

    let mask = engine("hf-electra-mlm", MASK_LOGITS);
    let texts = ["The [MASK] was found.", "A [MASK] by the [MASK]."];
    let options = MaskOptions {
        top_k: 3,
        ..MaskOptions::default()
    };
    let own = mask.fill_masks(&texts, &options).unwrap();
    let filled = is_ok(to, "/v1/fill-mask", &json!({"inputs": texts, "top_k": 3}));
    assert_eq!(filled, sent(json!([own[0][0], own[1]])));
    let options = MaskOptions {
        targets: vec!["river".to_owned(), "town".to_owned()],
        ..MaskOptions::default()
    };
    let own = mask.fill_masks(&texts[..1], &options).unwrap();
    let body = json!({"inputs": texts[0], "targets": options.targets});
    assert_eq!(is_ok(to, "/v1/fill-mask", &body), sent(json!(own[0][0])));

    let nli = engine("ce-nli", "sequence_logits");
    let labels = ["travel", "food"];
    for multi_label in [false, true] {
        let options = ZeroShotOptions {
            template: "It is about {}.".to_owned(),
            multi_label,
        };
        let own = nli.classify_zero_shot("The train leaves.", &labels, &options);
        let own = own.unwrap();
        let names: Vec<&str> = own.iter().map(|label| label.label.as_str()).collect();
        let scores: Vec<f32> = own.iter().map(|label| label.score).collect();
        let expected = json!({"sequence": "The train leaves.", "labels": names, "scores": scores});
        for labels in [json!(labels), json!("travel, food,")] {
            let body = json!({
                "inputs": ["The train leaves."], "candidate_labels": labels, "multi_label": multi_label,
                "hypothesis_template": options.template,
            });
            assert_eq!(
                is_ok(to, "/v1/zero-shot-classification", &body),
                sent(json!([expected]))
            );
        }
    }

    let questions = engine("qa", TOKEN_LOGITS);
    let context = "It rained all afternoon, so the picnic was moved indoors. ".repeat(8);
    let question = "Where was it?";
    let best = questions.answer(question, &context, &AnswerOptions::default());
    let path = "/v1/question-answering";
    let body = json!({"question": question, "context": context});
    assert_eq!(is_ok(to, path, &body), sent(json!(best.unwrap()[0])));
    let options = AnswerOptions {
        top_k: 3,
        max_tokens: Some(40),
        stride: Some(5),
        allows_none: true,
        ..AnswerOptions::default()
    };
    let own = questions.answer(question, &context, &options).unwrap();
    let body = json!({
        "question": question, "context": context, "top_k": 3, "max_seq_len": 40, "doc_stride": 5,
        "handle_impossible_answer": true,
    });
    assert_eq!(is_ok(to, path, &body), sent(json!(own)));
    // Repeated inputs are served from the cache, and requests are counted by route.
    assert_eq!(is_ok(to, path, &body), sent(json!(own)));
    let (_, metrics) = get(to, "/metrics");
    let counted = metrics
        .lines()
        .any(|line| line.contains(path) && line.ends_with(" 3"));
    assert!(counted, "{metrics}");
    server.shut_down(Duration::ZERO);
}

#[test]
fn requests_that_heads_cannot_answer_are_told_why() {
    let server = serving_heads();
    let to = server.address();
    let refused = |path: &str, body: Value| {
        let (status, told) = post(to, path, &body);
        let message = told["error"]["message"].as_str().or(told["error"].as_str());
        format!("{status} {}", message.unwrap_or_default())
    };
    let tokens = "/v1/token-classification";
    assert_eq!(
        refused(
            tokens,
            json!({"inputs": "rain", "aggregation_strategy": "mean"})
        ),
        "400 there is no aggregation `mean`; expected none, simple, first, average or max"
    );
    assert_eq!(
        refused(tokens, json!({"inputs": "rain", "model": "st-mean"})),
        "404 the model `st-mean` embeds texts, but the request is for labels of tokens; use another model"
    );
    assert_eq!(
        refused(tokens, json!({"inputs": "rain", "model": "qa"})),
        "404 the model `qa` answers questions about texts, but the request is for labels of tokens; use another model"
    );
    assert_eq!(
        refused(tokens, json!({"inputs": "x".repeat(70_000)})),
        "400 text 0 cannot be tokenized: it has 70000 bytes; expected at most 65536, so split it"
    );
    // A text that is too long is truncated on request.
    let long = "rain ".repeat(200);
    let told = refused(tokens, json!({"inputs": long}));
    assert!(
        told.starts_with("413 input 0 has more than 64 tokens"),
        "{told}"
    );
    is_ok(to, tokens, &json!({"inputs": long, "truncate": true}));
    assert_eq!(
        refused(
            "/predict_tokens",
            json!({"inputs": "rain", "raw_scores": true, "aggregation_strategy": "max"})
        ),
        "422 `raw_scores` requests the logits of single tokens, but `aggregation_strategy` combines tokens by their probabilities; leave one of them out"
    );
    assert_eq!(
        refused("/v1/fill-mask", json!({"inputs": "rain"})),
        "400 text 0 has no mask; put `[MASK]` where a token is missing"
    );
    assert_eq!(
        refused("/v1/fill-mask", json!({"inputs": "[MASK]", "top_k": 0})),
        "400 `top_k` is 0; expected a whole number from 1 to 1000"
    );
    let zero_shot = "/v1/zero-shot-classification";
    assert_eq!(
        refused(
            zero_shot,
            json!({"inputs": "rain", "candidate_labels": " , "})
        ),
        "400 there is no label; expected at least one"
    );
    assert_eq!(
        refused(
            zero_shot,
            json!({"inputs": "rain", "candidate_labels": ["a"], "hypothesis_template": "it is"})
        ),
        "400 the template `it is` has no `{}`; put `{}` in the place of the label"
    );
    let questions = "/v1/question-answering";
    assert_eq!(
        refused(questions, json!({"question": "who?", "context": ""})),
        "400 text 1 cannot be tokenized: it is empty; expected at least one character"
    );
    assert_eq!(
        refused(
            questions,
            json!({"question": "who?", "context": "rain", "max_seq_len": 1000})
        ),
        "400 `max_seq_len` is 1000; expected a number from 1 to 64"
    );
    assert_eq!(
        refused(questions, json!({"context": "rain"})),
        "400 `question` is missing; expected a text"
    );
    server.shut_down(Duration::ZERO);
}
