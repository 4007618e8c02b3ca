//! Compares translations over HTTP with transformers (`scripts/translations.py`) and with `gemmule translate`.

use std::process::Output;

use super::{bodies::is_ok, *};

const PATH: &str = "/v1/translate";

/// Returns the translations that transformers computed, which are stored in the checkpoint folder.
fn cases(folder: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(checkpoint(folder).join("translations.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn command(folder: &str, source: &str, more: &[&str]) -> Output {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), source).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_gemmule"))
        .args(["translate", "--device", "cpu", "--weights"])
        .arg(checkpoint(folder))
        .arg("--source-file")
        .arg(file.path())
        .args(more)
        .output();
    output.unwrap()
}

/// Returns the JSON documents that `gemmule translate --json` prints, one per line.
fn documents(folder: &str, source: &str, more: &[&str]) -> Vec<Value> {
    let output = command(folder, source, &[more, &["--json"]].concat());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Returns the texts and scores of all hypotheses of a translation in a response, best first.
fn all_of(translation: &Value) -> (Vec<Value>, Vec<f64>) {
    let others = translation["alternatives"].as_array().unwrap();
    let all = [translation].into_iter().chain(others);
    let scores = all
        .clone()
        .filter_map(|one| one["score"].as_f64())
        .collect();
    (all.map(|one| one["text"].clone()).collect(), scores)
}

#[test]
fn languages_prefixes_and_hypotheses_are_those_of_transformers() {
    let server = serving(&["hf-m2m", "hf-marian"], quick());
    let to = server.address();
    for folder in ["hf-m2m", "hf-marian"] {
        for case in cases(folder) {
            let mut body = json!({
                "model": folder, "text": case["text"], "source_lang": case["source_lang"], "target_lang": case["target_lang"],
            });
            let is_search = case["scores"].is_array();
            match is_search {
                true => {
                    body["max_tokens"] = json!(12);
                    (body["num_beams"], body["num_hypotheses"]) = (json!(4), json!(3));
                }
                false => {
                    body["max_tokens"] = case["n"].clone();
                    (body["num_beams"], body["target_prefix"]) = (json!(1), case["prefix"].clone());
                }
            }
            let told = is_ok(to, PATH, &body);
            let (texts, scores) = all_of(&told["translations"][0]);
            assert_eq!(json!(texts), case["texts"], "{body}");
            for (score, wanted) in scores.iter().zip(floats_or_none(&case["scores"])) {
                assert!((score - wanted).abs() < 1e-4, "{score} {wanted}");
            }
            assert_eq!(scores.len(), if is_search { 3 } else { 0 });
            let n = case["ids"].as_array().unwrap().len();
            assert_eq!(told["usage"]["prompt_tokens"], n);
            if !is_search {
                // Send the same prefix in the form of tokens, first without and then with the language token.
                body["target_prefix"] = json!([case["prefix_tokens"]]);
                assert_eq!(is_ok(to, PATH, &body)["translations"], told["translations"]);
                if let Some(language) = case["target_lang"].as_str() {
                    body["target_lang"] = Value::Null;
                    let tokens = case["prefix_tokens"].as_array().unwrap().clone();
                    let language = json!(format!("__{language}__"));
                    let all: Value = [language].into_iter().chain(tokens).collect();
                    body["target_prefix"] = json!([all]);
                    assert_eq!(is_ok(to, PATH, &body)["translations"], told["translations"]);
                }
            }
        }
    }
    server.shut_down(Duration::ZERO);
}

fn floats_or_none(value: &Value) -> Vec<f64> {
    let list = value.as_array().into_iter().flatten();
    list.filter_map(Value::as_f64).collect()
}

#[test]
fn a_batch_is_that_of_the_command_whole_and_as_events() {
    let server = serving(&["hf-m2m"], quick());
    let to = server.address();
    let texts = [
        "The river runs to the sea.",
        " ",
        "El niño",
        "Das Wetter ist schön",
    ];
    let options = [
        "--source-lang",
        "en",
        "--target-lang",
        "DE",
        "--target-prefix",
        "El",
    ];
    let search = [
        "--beams",
        "3",
        "--num-hypotheses",
        "2",
        "--length-penalty",
        "0.7",
    ];
    let own = documents(
        "hf-m2m",
        &texts.join("\n"),
        &[&options[..], &search].concat(),
    );
    let body = json!({
        "text": texts, "source_lang": "en", "target_lang": "de", "target_prefix": "El", "num_beams": 3, "n": 2,
        "length_penalty": 0.7, "max_tokens": 2 * 16 + 16 + 2,
    });
    let told = is_ok(to, PATH, &body);
    let translations = told["translations"].as_array().unwrap();
    assert_eq!(translations.len(), 4);
    for (index, (told, own)) in translations.iter().zip(&own).enumerate() {
        let own = own["translations"].as_array().unwrap();
        let texts: Vec<Value> = own.iter().map(|one| one["text"].clone()).collect();
        assert_eq!(
            (told["index"].as_u64(), all_of(told).0),
            (Some(index as u64), texts)
        );
        assert_eq!(told["score"].is_null(), index == 1);
    }
    assert_eq!(translations[1]["text"], "");
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let (parts, ends, usage) = events(to, &streamed);
    for (index, told) in translations.iter().enumerate() {
        assert_eq!(json!(parts[index]), told["text"]);
        for key in ["score", "alternatives", "finish_reason"] {
            assert_eq!(ends[index][key], told[key]);
        }
    }
    assert_eq!(usage, told["usage"]);
    let counts = get(to, "/metrics").1;
    let line = "gemmule_requests_total{route=\"/v1/translate\",code=\"200\",model=\"hf-m2m\"} 2";
    assert!(counts.contains(line), "{counts}");
    // With greedy search, a stream contains the parts of a text as they are generated.
    let greedy = json!({"text": texts, "num_beams": 1, "stream": true, "max_tokens": 20});
    let (parts, _, usage) = events(to, &greedy);
    assert_eq!(usage, Value::Null);
    let command = command(
        "hf-m2m",
        &texts.join("\n"),
        &["--beams", "1", "--max-new", "20"],
    );
    let own = String::from_utf8(command.stdout).unwrap();
    assert_eq!(parts, own.lines().collect::<Vec<_>>());
    let (_, _, body) = ask_with(
        to,
        "POST",
        PATH,
        "",
        &json!({"text": "", "stream": true}).to_string(),
    );
    assert!(
        body.ends_with("data: [DONE]\n\n") && body.contains("\"stop\""),
        "{body}"
    );
    server.shut_down(Duration::ZERO);
}

/// Sends a request for a stream. Returns the text of each translation (the joined texts of its events), the last event of each translation,
/// and the usage.
fn events(to: SocketAddr, body: &Value) -> (Vec<String>, Vec<Value>, Value) {
    let (status, head, text) = ask_with(to, "POST", PATH, "", &body.to_string());
    assert!(
        status == 200 && head.contains("text/event-stream"),
        "{text}"
    );
    let n = body["text"].as_array().unwrap().len();
    let (mut parts, mut ends, mut usage) =
        (vec![String::new(); n], vec![Value::Null; n], Value::Null);
    let all: Vec<&str> = text
        .split("\n\n")
        .filter(|event| !event.is_empty())
        .collect();
    assert_eq!(all.last(), Some(&"data: [DONE]"));
    for event in &all[..all.len() - 1] {
        let event: Value = serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
        for part in event["translations"].as_array().unwrap() {
            let index = part["index"].as_u64().unwrap() as usize;
            parts[index] += part["text"].as_str().unwrap();
            if part["finish_reason"].is_string() {
                ends[index] = part.clone();
            }
        }
        usage = event["usage"].clone();
    }
    (parts, ends, usage)
}

#[test]
fn refusals_of_translations_name_the_field_and_what_is_near() {
    let server = serving(&["hf-m2m", "hf-marian", "hf-t5", "writer"], quick());
    let to = server.address();
    let mut told = String::new();
    let mut refused = |body: Value| {
        let (status, answer) = post(to, PATH, &body);
        let error = &answer["error"];
        let asked: String = body.to_string().chars().take(100).collect();
        told += &format!(
            "{asked}\n{status} {}: {}\n\n",
            error["param"], error["message"]
        );
    };
    let of = |name: &str, value: Value| json!({"text": "a", name: value});
    refused(of("target_lang", json!("eng")));
    refused(of("source_lang", json!("x".repeat(1000))));
    refused(json!({"text": "a", "model": "hf-t5", "target_lang": "de"}));
    refused(json!({"text": "a", "model": "hf-marian", "source_lang": "de", "target_lang": "fra"}));
    refused(json!({"text": "a", "model": "hf-marian", "target_lang": "spa"}));
    refused(of("target_prefix", json!([["__xx__"]])));
    refused(json!({"text": "a", "target_lang": "de", "target_prefix": [["__fr__"]]}));
    refused(of("target_prefix", json!(["a", "b"])));
    refused(of("target_prefix", json!([7])));
    refused(json!({"text": "a", "num_beams": 2, "num_hypotheses": 3}));
    refused(json!({"text": "a", "num_beams": 1, "length_penalty": 2.0}));
    refused(json!({"text": "a", "n": 2, "num_hypotheses": 3}));
    refused(json!({"text": []}));
    refused(json!({"text": ["a", 7]}));
    refused(json!({}));
    refused(json!({"text": ["a", "The river ".repeat(99)]}));
    refused(json!({"text": vec![""; 1025]}));
    refused(json!({"text": "a", "max_tokens": 500}));
    refused(json!({"text": "a", "model": "writer"}));
    refused(json!({"text": "a", "temperature": 0.5}));
    refused(json!({"text": "a", "target_language": "de"}));
    // The KV cache has no room for 256 beams.
    refused(json!({"text": "a", "num_beams": 256}));
    insta::assert_snapshot!(told);
    // All texts have the same prefix, so its length is checked first and only once.
    let prefix = "The river ".repeat(10_000);
    let (status, answer) = post(
        to,
        PATH,
        &json!({"text": vec!["a"; 1000], "target_prefix": prefix}),
    );
    let message = answer["error"]["message"].as_str().unwrap();
    assert_eq!(
        (status, &answer["error"]["param"]),
        (400, &json!("target_prefix"))
    );
    assert!(message.contains("text 0: the prefix has"), "{message}");
    let output = command("hf-m2m", "a", &["--target-lang", "eng"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("the target language `eng`"), "{errors}");
    let output = command("hf-m2m", "a", &["--json", "--num-hypotheses", "9"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("expected a number from 1 to 5"), "{errors}");
    server.shut_down(Duration::ZERO);
}

#[test]
fn a_translation_has_a_deadline_and_models_with_a_source_complete_prompts() {
    let server = serving(&["translator"], quick());
    let to = server.address();
    let body = json!({"text": "4217"});
    let told = is_ok(to, PATH, &body);
    let text = "four thousand two hundred seventeen";
    assert_eq!(told["translations"][0]["text"], text);
    let completed = is_ok(
        to,
        "/v1/completions",
        &json!({"prompt": "4217", "max_tokens": 30}),
    );
    assert_eq!(completed["choices"][0]["text"], text);
    let many = json!({"text": vec!["777777777777"; 300]});
    let late = "x-request-timeout-ms: 1\r\n";
    let (status, _, body) = ask_with(to, "POST", PATH, late, &many.to_string());
    assert_eq!(status, 504, "{body}");
    server.shut_down(Duration::ZERO);
}

/// The folder of `translator` forces an end token at the max length (`forced_eos_token_id`). A translation that `max_tokens` shortens also
/// ends with this token, but its finish reason must be `length`.
#[test]
fn a_shortened_translation_has_reached_its_length() {
    let server = serving(&["translator"], quick());
    let to = server.address();
    for num_beams in [1, 4] {
        let body = json!({"text": "9876", "num_beams": num_beams});
        let reason = |body: &Value| {
            let told = is_ok(to, PATH, body);
            told["translations"][0]["finish_reason"].clone()
        };
        assert_eq!(reason(&body), "stop");
        let mut shortened = body;
        shortened["max_tokens"] = json!(3);
        assert_eq!(reason(&shortened), "length");
    }
    server.shut_down(Duration::ZERO);
}
