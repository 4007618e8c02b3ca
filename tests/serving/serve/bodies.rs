//! Tests of the fields of request bodies, of compressed bodies, and of CORS.

use flate2::{Compression, write::GzEncoder};
use gemmule::http::Origin;

use super::*;

pub fn is_ok(to: SocketAddr, path: &str, body: &Value) -> Value {
    let (status, told) = post(to, path, body);
    assert_eq!(status, 200, "{path} {body} {told}");
    told
}

/// Returns `body` with the additional fields `more`.
fn with(body: &Value, more: &Value) -> Value {
    let mut body = body.clone();
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[test]
fn the_model_of_a_body_is_the_one_that_answers_on_every_route() {
    let server = serving(
        &[
            "st-mean",
            "st-max",
            "ce-one",
            "ce-identity",
            "ce-nli",
            "writer",
        ],
        quick(),
    );
    let to = server.address();
    let similar = json!({"inputs": {"source_sentence": "rain", "sentences": ["a tower"]}});
    let rank = json!({"query": "tower", "texts": ["rain", "a high tower"], "raw_scores": true});
    let cases = [
        ("/embed", json!({"inputs": "rain"}), ["st-mean", "st-max"]),
        (
            "/embed_all",
            json!({"inputs": "rain"}),
            ["st-mean", "st-max"],
        ),
        ("/similarity", similar, ["st-mean", "st-max"]),
        (
            "/predict",
            json!({"inputs": ["a", "b"]}),
            ["ce-one", "ce-nli"],
        ),
        ("/rerank", rank, ["ce-one", "ce-identity"]),
        (
            "/tokenize",
            json!({"inputs": "rain falls"}),
            ["st-mean", "writer"],
        ),
        ("/decode", json!({"ids": [20, 21]}), ["st-mean", "writer"]),
    ];
    for (path, body, [first, second]) in cases {
        let of = |name: &str| is_ok(to, path, &with(&body, &json!({"model": name})));
        // A request without `model` uses the first model that supports the route.
        assert_eq!(is_ok(to, path, &body), of(first), "{path}");
        assert_eq!(
            is_ok(to, path, &with(&body, &json!({"model": null}))),
            of(first)
        );
        assert_ne!(of(first), of(second), "{path}");
        let (status, told) = post(to, path, &with(&body, &json!({"model": "none"})));
        assert_eq!(status, 404, "{path} {told}");
        let told = told["error"].as_str().unwrap();
        assert!(
            told.contains("there is no model `none`; the models are st-mean"),
            "{told}"
        );
    }
    let (status, told) = post(
        to,
        "/embed_sparse",
        &json!({"inputs": "x", "model": "none"}),
    );
    assert_eq!(status, 404, "{told}");
    // A model for another task is refused.
    let (status, told) = post(to, "/embed", &json!({"inputs": "x", "model": "writer"}));
    assert_eq!(
        (status, &told["error_type"]),
        (404, &json!("unsupported_task")),
        "{told}"
    );
    server.shut_down(Duration::ZERO);
}

/// Returns a copy of the checkpoint `ce-nli`, a classifier with three labels, with `problem_type` set in its config.json. Also returns the
/// settings to serve this copy.
fn classifier(problem_type: &str) -> (tempfile::TempDir, ModelChoice) {
    let folder = tempfile::tempdir().unwrap();
    copy(&checkpoint("ce-nli"), folder.path());
    let file = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config["problem_type"] = json!(problem_type);
    std::fs::write(file, config.to_string()).unwrap();
    let choice = ModelChoice {
        folder: folder.path().to_owned(),
        ..choice("ce-nli", true, Duration::from_secs(10))
    };
    (folder, choice)
}

#[test]
fn predictions_go_through_the_function_of_the_problem_type() {
    let scores = |to: SocketAddr, raw: bool| -> Vec<f64> {
        let body = json!({"inputs": ["a premise", "a hypothesis"], "raw_scores": raw});
        let told = is_ok(to, "/predict", &body);
        let all = told.as_array().unwrap().iter();
        all.map(|one| one["score"].as_f64().unwrap()).collect()
    };
    let sigmoid = |x: &f64| 1.0 / (1.0 + (-x).exp());
    let softmax = |all: &[f64]| -> Vec<f64> {
        let sum: f64 = all.iter().map(|x| x.exp()).sum();
        all.iter().map(|x| x.exp() / sum).collect()
    };
    // The scores are those of transformers' text-classification pipeline.
    for (kind, tei) in [
        ("multi_label_classification", false),
        ("regression", false),
        ("single_label_classification", false),
        ("multi_label_classification", true),
        ("regression", true),
    ] {
        let (_folder, choice) = classifier(kind);
        let http = HttpChoice {
            tei_scores: tei,
            ..quick()
        };
        let server = serving_models(vec![Model::open(choice).unwrap()], http);
        let (raw, found) = (
            scores(server.address(), true),
            scores(server.address(), false),
        );
        let right: Vec<f64> = match (tei, kind) {
            (false, "multi_label_classification") => raw.iter().map(sigmoid).collect(),
            (false, "regression") => raw.clone(),
            _ => softmax(&raw),
        };
        for (found, right) in found.iter().zip(&right) {
            assert!((found - right).abs() < 1e-6, "{kind} {tei} {found} {right}");
        }
        server.shut_down(Duration::ZERO);
    }
    let (_folder, choice) = classifier("multilabel");
    let error = Model::open(choice).err().unwrap().to_string();
    let right = "`problem_type` is \"multilabel\"; expected regression, single_label_classification or multi_label_classification";
    assert!(error.ends_with(right), "{error}");
}

#[test]
fn numbers_nulls_and_neutral_values_are_taken_as_other_servers_take_them() {
    let server = serving(&["writer"], quick());
    let to = server.address();
    let body = json!({"prompt": "One cold morning Ben", "max_tokens": 5, "temperature": 0});
    let written =
        |more: Value| is_ok(to, "/v1/completions", &with(&body, &more))["choices"].clone();
    let plain = written(json!({}));
    for more in [
        json!({"max_tokens": 5.0}),
        json!({"max_tokens": 500, "max_completion_tokens": 5}),
        json!({"stream_options": {"include_usage": null}}),
        json!({"stream_options": {}, "stream": null}),
        json!({"logprobs": false}),
        json!({"logprobs": null, "top_logprobs": 0}),
        json!({"suffix": "", "echo": false, "best_of": 1}),
        json!({"function_call": "auto", "functions": [], "tools": [], "tool_choice": "auto"}),
        json!({"n": 1.0, "best_of": 1.0, "seed": 3.0}),
        json!({"n": null, "seed": null, "stop": null, "logit_bias": null, "user": null}),
        json!({"stop": [], "logit_bias": []}),
        json!({"frequency_penalty": 0, "presence_penalty": null}),
        json!({"user": "me", "metadata": {"a": 1}, "store": true, "service_tier": "auto"}),
        json!({"repeat_penalty": 1, "typical_p": 1.0, "mirostat": 0, "mirostat_tau": 5}),
        json!({"temperature": 1, "top_p": 0}),
        json!({"temperature": 1.5, "top_p": 0.0, "seed": 4}),
    ] {
        assert_eq!(written(more.clone()), plain, "{more}");
    }
    // `max_tokens: -1` allows new tokens up to the model's number of positions.
    let rest = is_ok(
        to,
        "/v1/completions",
        &with(&body, &json!({"max_tokens": -1})),
    );
    assert!(
        rest["usage"]["completion_tokens"].as_u64().unwrap() > 16,
        "{rest}"
    );
    // With `max_tokens`, the `max_new_tokens` of generation_config.json does not apply.
    let never_ends = json!({"max_tokens": -1, "min_tokens": 0, "logit_bias": {"0": -100}});
    let all = is_ok(to, "/v1/completions", &with(&body, &never_ends));
    assert_eq!(all["usage"]["total_tokens"], 256, "{all}");
    let cases = [
        json!({"max_tokens": 4.5}),
        json!({"max_tokens": 0}),
        json!({"max_tokens": -2}),
        json!({"max_tokens": "5"}),
        json!({"temperature": -1}),
        json!({"temperature": "hot"}),
        json!({"temperature": 1e60}),
        json!({"top_p": 1.5}),
        json!({"top_p": -0.5}),
        json!({"n": 0}),
        json!({"n": 129}),
        json!({"n": 1.5}),
        json!({"best_of": 4}),
        json!({"seed": 1.5}),
        json!({"seed": 1e19}),
        json!({"frequency_penalty": 2.5}),
        json!({"presence_penalty": [1]}),
        json!({"logit_bias": {"5": "much"}}),
        json!({"logit_bias": {"x": 1}}),
        json!({"logit_bias": [[5, 1]]}),
        json!({"logprobs": 21}),
        json!({"logprobs": true}),
        json!({"top_logprobs": 2}),
        json!({"stop": 7}),
        json!({"stop": ["a", null]}),
        json!({"stream": "yes"}),
        json!({"stream_options": true}),
        json!({"stream_options": {"include_usage": 1}}),
        json!({"stream_options": {"usage": true}}),
        json!({"stream_options": {"continuous_usage_stats": true}}),
        json!({"suffix": "end"}),
        json!({"tools": [{"type": "function"}]}),
        json!({"model": 7}),
    ];
    let mut shown = String::new();
    for more in cases {
        let (status, told) = post(to, "/v1/completions", &with(&body, &more));
        let (message, param) = (&told["error"]["message"], &told["error"]["param"]);
        shown += &format!("{more}\n{status} {param} {}\n\n", message.as_str().unwrap());
    }
    insta::assert_snapshot!(shown);
    server.shut_down(Duration::ZERO);
}

#[test]
fn chat_and_rerank_fields_are_named_where_they_are_wrong() {
    let server = serving(&["st-mean", "ce-one", "writer"], quick());
    let to = server.address();
    let message = json!({"role": "user", "content": "x"});
    let chat = |more: Value| {
        (
            "/v1/chat/completions",
            with(&json!({"messages": [message]}), &more),
        )
    };
    let rank = |documents: Value| {
        (
            "/v1/rerank",
            json!({"query": "tower", "documents": documents}),
        )
    };
    let cases = [
        chat(json!({"logprobs": 2})),
        chat(json!({"top_logprobs": 2})),
        chat(json!({"logprobs": true, "top_logprobs": 21})),
        chat(json!({"tool_choice": "required"})),
        chat(json!({"best_of": 2})),
        chat(json!({"messages": [{"content": "x"}]})),
        chat(json!({"messages": "x"})),
        rank(json!([{"title": "x"}])),
        rank(json!(["x", {"text": 3}])),
        rank(json!(["x", ["y"]])),
        rank(json!("x")),
        rank(json!([])),
        (
            "/rerank",
            json!({"query": "tower", "documents": [{"title": "x"}]}),
        ),
        (
            "/rerank",
            json!({"query": "tower", "texts": [{"title": "x"}]}),
        ),
        ("/rerank", json!({"query": "tower"})),
        (
            "/v2/rerank",
            json!({"model": "ce-one", "query": "x", "documents": [{"text": "x"}]}),
        ),
        (
            "/v2/rerank",
            json!({"model": null, "query": "x", "documents": ["x"]}),
        ),
        ("/v1/embeddings", json!({"input": "x", "dimensions": 1.5})),
        ("/v1/embeddings", json!({"input": "x", "truncate": 1})),
        ("/embed", json!({"inputs": "x", "normalize": "yes"})),
        (
            "/embed",
            json!({"inputs": "x", "truncation_direction": "Middle"}),
        ),
        (
            "/similarity",
            json!({"inputs": {"source_sentence": "x", "sentence": ["x"]}}),
        ),
        (
            "/similarity",
            json!({"inputs": {"source_sentence": "x", "sentences": ["x", 1]}}),
        ),
        (
            "/similarity",
            json!({"inputs": {"source_sentence": "x", "sentences": ["x"]}, "parameters": {"top_k": 3}}),
        ),
    ];
    let mut shown = String::new();
    for (path, body) in cases {
        let (status, told) = post(to, path, &body);
        shown += &format!("{path} {body}\n{status} {told}\n\n");
    }
    insta::assert_snapshot!(shown);
    // Clients of vLLM send `top_n: 0` to get all documents.
    let all = json!({"query": "tower", "documents": ["rain", {"text": "a tower"}], "top_n": 0});
    assert_eq!(
        is_ok(to, "/v1/rerank", &all)["results"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn web_pages_of_allowed_origins_may_read_answers_errors_and_streams() {
    let choice = |origins: &[&str]| HttpChoice {
        cors: origins
            .iter()
            .map(|origin| origin.parse().unwrap())
            .collect::<Vec<Origin>>(),
        ..quick()
    };
    let server = serving(
        &["writer"],
        choice(&["https://a.example", "http://localhost:3000"]),
    );
    let to = server.address();
    let origin = "origin: https://a.example\r\n";
    let asks = format!(
        "{origin}access-control-request-method: POST\r\naccess-control-request-headers: authorization,content-type,x-stainless-os\r\n"
    );
    let lines = |head: &str, name: &str| -> Vec<String> {
        let lines = head.lines().filter_map(|line| line.split_once(": "));
        let lines = lines.filter(|(own, _)| own.eq_ignore_ascii_case(name));
        lines.map(|(_, value)| value.to_owned()).collect()
    };
    let (status, head, body) = ask_with(to, "OPTIONS", "/v1/completions", &asks, "");
    assert_eq!((status, body.as_str()), (204, ""), "{head}");
    assert_eq!(
        lines(&head, "access-control-allow-origin"),
        ["https://a.example"]
    );
    assert_eq!(
        lines(&head, "access-control-allow-methods"),
        ["POST, OPTIONS"]
    );
    assert_eq!(
        lines(&head, "access-control-allow-headers"),
        ["authorization,content-type,x-stainless-os"]
    );
    assert_eq!(lines(&head, "access-control-max-age"), ["600"]);
    let (_, head, _) = ask_with(to, "OPTIONS", "/", &asks, "");
    assert_eq!(
        lines(&head, "access-control-allow-methods"),
        ["GET, POST, OPTIONS"]
    );
    // Preflight requests are refused for another host, for another scheme with the allowed host, and for a path that does not exist.
    for other in ["https://b.example", "http://a.example"] {
        let headers = format!("origin: {other}\r\naccess-control-request-method: POST\r\n");
        let (status, head, body) = ask_with(to, "OPTIONS", "/v1/completions", &headers, "");
        assert_eq!(status, 403);
        assert!(body.contains(&format!("--cors-origin {other}")), "{body}");
        assert!(lines(&head, "access-control-allow-origin").is_empty());
    }
    assert_eq!(ask_with(to, "OPTIONS", "/nothing", &asks, "").0, 404);
    let sound = json!({"prompt": "One", "max_tokens": 2}).to_string();
    let stream = json!({"prompt": "One", "max_tokens": 2, "stream": true}).to_string();
    for (path, body, right) in [
        ("/v1/completions", sound.as_str(), 200),
        ("/v1/completions", stream.as_str(), 200),
        ("/v1/completions", "{", 400),
        ("/nothing", "{}", 404),
        ("/health", "{}", 405),
    ] {
        let (status, head, text) = ask_with(to, "POST", path, origin, body);
        assert_eq!(status, right, "{text}");
        assert_eq!(
            lines(&head, "access-control-allow-origin"),
            ["https://a.example"],
            "{head}"
        );
        assert!(lines(&head, "access-control-expose-headers")[0].contains("x-request-id"));
        assert_eq!(lines(&head, "vary"), ["origin"]);
        // Requests from other origins get a response, but without the header that allows a browser to pass it to the page.
        let (status, head, _) = ask_with(to, "POST", path, "origin: https://b.example\r\n", body);
        assert_eq!(status, right);
        assert!(
            lines(&head, "access-control-allow-origin").is_empty(),
            "{head}"
        );
        assert_eq!(lines(&head, "vary"), ["origin"]);
    }
    server.shut_down(Duration::ZERO);
    // A preflight request needs no API key.
    let digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
    let keyed = HttpChoice {
        keys: Some(Keys::parse(&format!("me {digest}")).unwrap()),
        ..choice(&["*"])
    };
    let server = serving(&["writer"], keyed);
    let to = server.address();
    let (status, head, _) = ask_with(to, "OPTIONS", "/v1/completions", &asks, "");
    assert_eq!(
        (status, lines(&head, "access-control-allow-origin")),
        (204, vec!["*".to_owned()])
    );
    let (status, head, _) = ask_with(to, "POST", "/v1/completions", origin, &sound);
    assert_eq!(
        (status, lines(&head, "access-control-allow-origin")),
        (401, vec!["*".to_owned()])
    );
    let headers = format!("{origin}authorization: Bearer secret\r\n");
    assert_eq!(
        ask_with(to, "POST", "/v1/completions", &headers, &sound).0,
        200
    );
    server.shut_down(Duration::ZERO);
    // Without `--cors-origin`, preflight requests are refused, and the error explains why.
    let server = serving(&["writer"], quick());
    let (status, head, body) = ask_with(server.address(), "OPTIONS", "/v1/completions", &asks, "");
    assert_eq!(
        (status, lines(&head, "allow")),
        (405, vec!["POST".to_owned()])
    );
    assert!(
        body.contains("for web pages, start the server with --cors-origin"),
        "{body}"
    );
    assert!(!head.to_lowercase().contains("access-control"), "{head}");
    server.shut_down(Duration::ZERO);
}

fn gzipped(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn gzip_bodies_are_read_within_the_limit_and_other_encodings_are_refused() {
    let server = serving(&["st-mean"], quick());
    let to = server.address();
    let send = |path: &str, encoding: &str, body: &[u8]| {
        let mut stream = connect(to);
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-encoding: {encoding}\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        read(stream)
    };
    let body = json!({"input": TEXTS}).to_string();
    let plain = is_ok(to, "/v1/embeddings", &json!({"input": TEXTS}));
    for (encoding, bytes) in [
        ("gzip", gzipped(body.as_bytes())),
        ("GZIP", gzipped(body.as_bytes())),
        ("x-gzip", gzipped(body.as_bytes())),
        ("identity", body.clone().into_bytes()),
        // A gzip body may consist of several members.
        (
            "gzip",
            [
                gzipped(&body.as_bytes()[..9]),
                gzipped(&body.as_bytes()[9..]),
            ]
            .concat(),
        ),
    ] {
        let (status, _, text) = send("/v1/embeddings", encoding, &bytes);
        assert_eq!(status, 200, "{encoding} {text}");
        assert_eq!(
            serde_json::from_str::<Value>(&text).unwrap()["data"],
            plain["data"]
        );
    }
    let whole = gzipped(body.as_bytes());
    let (status, _, text) = send("/v1/embeddings", "gzip", &whole[..whole.len() - 6]);
    assert_eq!(status, 400);
    assert!(
        text.contains("`content-encoding` declares gzip, but the body is not valid gzip data"),
        "{text}"
    );
    assert_eq!(send("/v1/embeddings", "gzip", body.as_bytes()).0, 400);
    // This body is small, but its decompressed size exceeds the limit of 8 MiB.
    let bomb = gzipped(&vec![b' '; 9 << 20]);
    assert!(bomb.len() < 1 << 20);
    let (status, _, text) = send("/v1/embeddings", "gzip", &bomb);
    assert_eq!(status, 413);
    assert!(
        text.contains("the body has more than 8388608 bytes decompressed"),
        "{text}"
    );
    for (path, encoding) in [
        ("/v1/embeddings", "br"),
        ("/embed", "deflate"),
        ("/embed", "gzip, gzip"),
    ] {
        let (status, head, text) = send(path, encoding, &whole);
        assert_eq!(status, 415, "{text}");
        let right = format!("`content-encoding` is `{encoding}`; expected gzip or identity");
        assert!(text.contains(&right), "{text}");
        assert!(head.contains("accept-encoding: gzip, identity"), "{head}");
    }
    server.shut_down(Duration::ZERO);
}

#[test]
fn the_base_address_answers_as_the_tei_route_that_fits() {
    let server = serving(&["st-mean", "ce-one", "ce-nli", "writer"], quick());
    let to = server.address();
    let similar = json!({"inputs": {"source_sentence": "rain", "sentences": TEXTS}});
    for (path, body) in [
        ("/embed", json!({"inputs": TEXTS})),
        (
            "/embed",
            json!({"inputs": "rain", "normalize": false, "model": "st-mean"}),
        ),
        ("/similarity", similar),
        ("/predict", json!({"inputs": ["a", "b"], "model": "ce-nli"})),
        (
            "/predict",
            json!({"inputs": "a text", "model": "ce-one", "parameters": {}}),
        ),
        (
            "/rerank",
            json!({"query": "tower", "texts": ["rain", "a tower"]}),
        ),
    ] {
        assert_eq!(is_ok(to, "/", &body), is_ok(to, path, &body), "{path}");
    }
    let (status, told) = post(to, "/", &json!({"inputs": "x", "raw_scores": true}));
    assert_eq!(status, 422);
    let told = told["error"].as_str().unwrap();
    assert_eq!(
        told,
        "`raw_scores` is not a field of /embed, but of /predict, /rerank, /predict_tokens; leave it out"
    );
    let (status, told) = post(to, "/", &json!({"inputs": "x", "model": "writer"}));
    assert_eq!(
        (status, &told["error_type"]),
        (404, &json!("unsupported_task"))
    );
    assert_eq!(
        post(to, "/", &json!({"inputs": "x", "model": "none"})).0,
        404
    );
    assert!(get(to, "/").1.contains("<html"));
    let (status, head, _) = ask_with(to, "PUT", "/", "", "{}");
    assert_eq!(status, 405);
    assert!(head.contains("allow: GET, POST"), "{head}");
    let metrics = get(to, "/metrics").1;
    assert!(
        metrics.contains("gemmule_requests_total{route=\"POST /\",code=\"200\""),
        "{metrics}"
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn a_text_that_is_too_long_is_cut_where_and_on_the_side_that_is_asked_for() {
    let cutting = HttpChoice {
        auto_truncate: true,
        ..quick()
    };
    let cuts = serving(&["st-mean", "ce-one"], cutting);
    let server = serving(&["st-mean", "ce-one"], quick());
    let to = server.address();
    let info: Value = serde_json::from_str(&get(to, "/info").1).unwrap();
    // The limit for token ids is the model's number of positions, 64. The limit for texts is `max_seq_length` of the folder, 16.
    let (positions, limit) = (64, 16);
    assert_eq!(info["max_input_length"], limit);
    let text = (0..2 * positions)
        .map(|i| TEXTS[i % 3])
        .collect::<Vec<_>>()
        .join(" ");
    let tokens = is_ok(to, "/tokenize", &json!({"inputs": text}));
    let ids: Vec<u64> = tokens[0]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["id"].as_u64().unwrap())
        .collect();
    assert!(ids.len() > positions);
    let (first, last) = (ids[0], ids[ids.len() - 1]);
    let own = &ids[1..ids.len() - 1];
    let kept = limit - 2;
    let around = |own: &[u64]| [&[first], own, &[last]].concat();
    let of_ids = |ids: Vec<u64>| {
        let told = is_ok(to, "/v1/embeddings", &json!({"input": ids}));
        told["data"][0]["embedding"].clone()
    };
    let right = of_ids(around(&own[..kept]));
    let left = of_ids(around(&own[own.len() - kept..]));
    assert_ne!(right, left);
    let body = json!({"inputs": text, "normalize": false});
    let cut = |to: SocketAddr, more: Value| is_ok(to, "/embed", &with(&body, &more))[0].clone();
    for (side, vector) in [
        (json!(null), &right),
        (json!("Right"), &right),
        (json!("Left"), &left),
        (json!("left"), &left),
    ] {
        let more = json!({"truncate": true, "truncation_direction": side});
        assert_eq!(&cut(to, more), vector, "{side}");
        let more = json!({"truncation_direction": side});
        assert_eq!(&cut(cuts.address(), more), vector, "{side}");
    }
    // Truncated token ids get no special tokens.
    let more = json!({"inputs": ids, "truncate": true, "truncation_direction": "Left"});
    assert_eq!(cut(to, more), of_ids(ids[ids.len() - positions..].to_vec()));
    let more = json!({"inputs": ids, "truncate": true});
    assert_eq!(cut(to, more), of_ids(ids[..positions].to_vec()));
    // If a request does not say whether texts are truncated, the option of the server applies.
    let all = cuts.address();
    for (path, body) in [
        ("/embed", json!({"inputs": text})),
        ("/embed_all", json!({"inputs": text})),
        (
            "/similarity",
            json!({"inputs": {"source_sentence": text, "sentences": ["x"]}}),
        ),
        ("/v1/embeddings", json!({"input": text})),
        ("/predict", json!({"inputs": text})),
        ("/rerank", json!({"query": "x", "texts": [text]})),
        ("/v1/rerank", json!({"query": "x", "documents": [text]})),
    ] {
        let (status, told) = post(to, path, &body);
        assert_eq!(status, 413, "{path} {told}");
        assert_eq!(post(all, path, &body).0, 200, "{path}");
        let never = match path {
            "/similarity" => json!({"parameters": {"truncate": false}}),
            _ => json!({"truncate": false}),
        };
        assert_eq!(post(all, path, &with(&body, &never)).0, 413, "{path}");
    }
    // In a pair, only the longer text is truncated. It is truncated on the side that the request names.
    let pair = |side: &str| {
        let body = json!({
            "query": "tower", "texts": [text], "raw_scores": true, "truncate": true, "truncation_direction": side,
        });
        is_ok(to, "/rerank", &body)[0]["score"].clone()
    };
    assert_ne!(pair("Left"), pair("Right"));
    let more = json!({"truncate": true, "truncation_direction": "Middle"});
    let (status, told) = post(to, "/embed", &with(&body, &more));
    assert_eq!(status, 422);
    assert_eq!(
        told["error"],
        "`truncation_direction` is `Middle`; expected Left or Right"
    );
    server.shut_down(Duration::ZERO);
    cuts.shut_down(Duration::ZERO);
}

#[test]
fn prompts_of_the_folder_stand_before_texts_of_a_kind() {
    let server = serving(&["st-mean", "st-cls"], quick());
    let to = server.address();
    let vector = |body: Value| is_ok(to, "/v1/embeddings", &body)["data"][0]["embedding"].clone();
    // The prompts of the folder are `find: ` for queries and `text: ` for documents.
    let query = vector(json!({"input": "find: rain"}));
    let document = vector(json!({"input": "text: rain"}));
    assert_ne!(query, document);
    for (field, name, right) in [
        ("input_type", "query", &query),
        ("input_type", "search_query", &query),
        ("task", "retrieval.query", &query),
        ("input_type", "document", &document),
        ("input_type", "passage", &document),
        ("input_type", "search_document", &document),
        ("task", "retrieval.passage", &document),
    ] {
        assert_eq!(
            &vector(json!({"input": "rain", field: name})),
            right,
            "{field} {name}"
        );
    }
    let both = json!({"input": "rain", "task": "retrieval.query", "input_type": "query"});
    assert_eq!(vector(both), query);
    assert_eq!(
        vector(json!({"input": "rain", "input_type": null})),
        vector(json!({"input": "rain"}))
    );
    let refused = |body: Value, param: &str, message: &str| {
        let (status, told) = post(to, "/v1/embeddings", &body);
        assert_eq!(status, 400, "{told}");
        assert_eq!(told["error"]["param"], param);
        assert_eq!(told["error"]["message"], message);
    };
    refused(
        json!({"input": "rain", "input_type": "clustering"}),
        "input_type",
        "`input_type` is `clustering`, and the model's folder has the prompts document, query; leave `input_type` out to use the text without a prompt",
    );
    refused(
        json!({"input": "rain", "task": "text-matching", "model": "st-cls"}),
        "task",
        "`task` is `text-matching`, and the model's folder has no prompts; leave `task` out to use the text without a prompt",
    );
    refused(
        json!({"input": "rain", "input_type": "query", "model": "st-cls"}),
        "input_type",
        "`input_type` is `query`, and the model's folder has no prompts; leave `input_type` out to use the text without a prompt",
    );
    refused(
        json!({"input": "rain", "input_type": "query", "task": "retrieval.passage"}),
        "task",
        "`input_type` and `task` name different prompts; send one of them",
    );
    refused(
        json!({"input": [5, 6], "input_type": "query"}),
        "input_type",
        "`input_type` puts a prompt before texts, but the input has token ids, to which no prompt can be added; send texts, or leave `input_type` out",
    );
    refused(
        json!({"input": "rain", "input_type": 3}),
        "input_type",
        "`input_type` is 3; expected a text",
    );
    // TEI's field for the name of a prompt.
    let embed = |body: Value| is_ok(to, "/embed", &body);
    assert_eq!(
        embed(json!({"inputs": "rain", "prompt_name": "query"})),
        embed(json!({"inputs": "find: rain"}))
    );
    let all = |body: Value| is_ok(to, "/embed_all", &body);
    assert_eq!(
        all(json!({"inputs": "rain", "prompt_name": "document"})),
        all(json!({"inputs": "text: rain"}))
    );
    let compared = |source: &str, other: &str, parameters: Value| {
        let inputs = json!({"source_sentence": source, "sentences": [other]});
        is_ok(
            to,
            "/similarity",
            &json!({"inputs": inputs, "parameters": parameters}),
        )
    };
    assert_eq!(
        compared("rain", "a tower", json!({"prompt_name": "query"})),
        compared("find: rain", "find: a tower", json!(null))
    );
    let tokens = |body: Value| is_ok(to, "/tokenize", &body);
    assert_eq!(
        tokens(json!({"inputs": ["rain"], "prompt_name": "query"})),
        tokens(json!({"inputs": ["find: rain"]}))
    );
    for path in ["/embed", "/embed_all", "/tokenize"] {
        let (status, told) = post(
            to,
            path,
            &json!({"inputs": "rain", "prompt_name": "querry"}),
        );
        assert_eq!(status, 422);
        let told = told["error"].as_str().unwrap();
        assert!(
            told.starts_with(
                "`prompt_name` is `querry`, and the model's folder has the prompts document, query"
            ),
            "{told}"
        );
    }
    server.shut_down(Duration::ZERO);
}
