//! Tests of error messages: for texts that are too long, for long values, and for models that do not support a route.

use gemmule::serve::DefaultPrompt;

use super::*;

fn too_long(to: SocketAddr, path: &str, body: &Value) -> (String, Value) {
    let (status, answer) = post(to, path, body);
    assert_eq!(status, 413, "{path} {answer}");
    let error = &answer["error"];
    let message = error["message"]
        .as_str()
        .or(error.as_str())
        .or(answer["message"].as_str());
    (message.unwrap().to_owned(), error["param"].clone())
}

#[test]
fn a_text_that_is_too_long_is_named_as_the_route_does() {
    let server = serving(&["st-mean", "ce-one"], quick());
    let to = server.address();
    let long = "rain ".repeat(3000);
    let limit = |path: &str, body: Value, subject: &str, param: Value, or: &str| {
        let (message, found) = too_long(to, path, &body);
        let begin = format!("{subject} has more than ");
        assert!(message.starts_with(&begin), "{path} {message}");
        let end = format!(" tokens, the model's maximum; shorten it{or}");
        assert!(message.ends_with(&end), "{path} {message}");
        assert_eq!(found, param, "{path}");
    };
    let truncate = ", or send \"truncate\": true to truncate it";
    limit(
        "/v1/embeddings",
        json!({"model": "st-mean", "input": ["rain", long]}),
        "input 1",
        json!("input"),
        truncate,
    );
    limit(
        "/embed",
        json!({"inputs": long}),
        "input 0",
        Value::Null,
        truncate,
    );
    limit(
        "/",
        json!({"inputs": ["x", long], "model": "st-mean"}),
        "input 1",
        Value::Null,
        truncate,
    );
    let parameters = ", or send \"parameters\": {\"truncate\": true} to truncate it";
    for (source, other, subject) in [
        (&*long, "rain", "`inputs.source_sentence`"),
        ("rain", &*long, "item 1 of `inputs.sentences`"),
    ] {
        let body = json!({"inputs": {"source_sentence": source, "sentences": ["rain", other]}});
        limit("/similarity", body, subject, Value::Null, parameters);
    }
    let body = json!({"inputs": {"source_sentence": long, "sentences": ["x"]}, "parameters": {"truncate": true}});
    assert_eq!(post(to, "/similarity", &body).0, 200);
    limit(
        "/v2/embed",
        json!({"model": "st-mean", "texts": ["x", long], "truncate": "NONE"}),
        "text 1",
        Value::Null,
        ", or send \"truncate\": \"END\" to truncate it",
    );
    limit(
        "/v1/rerank",
        json!({"query": "rain", "documents": ["x", "y", long]}),
        "the query together with document 2",
        json!("documents"),
        truncate,
    );
    limit(
        "/rerank",
        json!({"query": long, "texts": ["x"]}),
        "the query together with text 0",
        Value::Null,
        truncate,
    );
    limit(
        "/predict",
        json!({"inputs": [["a", long]]}),
        "input 0",
        Value::Null,
        truncate,
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn an_empty_text_is_named_as_the_route_does() {
    // Use no invariant programs, because the late-interaction model does not support them.
    let models = ["st-mean", "late-bert", "writer"];
    let models = models.map(|name| model(name, false, Duration::from_secs(10)));
    let server = serving_models(models.into(), quick());
    let to = server.address();
    let problem = " is an empty text; expected at least one character";
    let ranked = |query: &str, documents: [&str; 2]| json!({"model": "late-bert", "query": query, "documents": documents});
    let compared = |source: &str, other: &str| json!({"model": "st-mean", "inputs": {"source_sentence": source, "sentences": ["x", other]}});
    for (path, body, name, param) in [
        (
            "/v1/embeddings",
            json!({"model": "st-mean", "input": ["x", ""]}),
            "input 1",
            json!("input"),
        ),
        (
            "/embed",
            json!({"model": "st-mean", "inputs": ""}),
            "input 0",
            Value::Null,
        ),
        (
            "/v2/embed",
            json!({"model": "st-mean", "texts": ["x", ""]}),
            "text 1",
            Value::Null,
        ),
        (
            "/similarity",
            compared("x", ""),
            "item 1 of `inputs.sentences`",
            Value::Null,
        ),
        (
            "/similarity",
            compared("", "x"),
            "`inputs.source_sentence`",
            Value::Null,
        ),
        (
            "/v1/rerank",
            ranked("x", ["x", ""]),
            "document 1",
            json!("documents"),
        ),
        (
            "/v1/rerank",
            ranked("", ["x", "x"]),
            "the query",
            json!("query"),
        ),
    ] {
        let (status, answer) = post(to, path, &body);
        assert!([400, 422].contains(&status), "{path} {answer}");
        let error = &answer["error"];
        let message = error["message"]
            .as_str()
            .or(error.as_str())
            .or(answer["message"].as_str());
        assert_eq!(message.unwrap(), format!("{name}{problem}"), "{path}");
        assert_eq!(error["param"], param, "{path}");
    }
    let prompts = json!({"model": "writer", "prompt": ["One", ""]});
    let (status, answer) = post(to, "/v1/completions", &prompts);
    assert_eq!(status, 400);
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(
        message.starts_with("prompt 1: the prompt has no tokens"),
        "{message}"
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn errors_do_not_repeat_long_values() {
    let server = serving(&["st-mean", "ce-one", "writer", "translator"], quick());
    let to = server.address();
    let document: Value = serde_json::from_str(&get(to, "/openapi.json").1).unwrap();
    let long = "é".repeat(20_000);
    let check = |path: &str, body: &Value| {
        let (status, _, text) = ask_with(to, "POST", path, "", &body.to_string());
        if status >= 400 {
            assert!(text.len() < 6000, "{path} {status} {} bytes", text.len());
        }
        status
    };
    let mut n = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let schema = &methods["post"]["requestBody"]["content"]["application/json"]["schema"];
        let known = schema["anyOf"].get(0).unwrap_or(schema)["properties"].clone();
        let Some(known) = known.as_object() else {
            continue;
        };
        // Send a long text in each field of a request that is otherwise valid.
        for name in known.keys().chain([&long]) {
            for model in ["st-mean", "ce-one", "writer", "translator"] {
                let mut body = json!({
                    "model": model, "input": "x", "inputs": "x", "prompt": "x", "query": "x", "texts": ["x"], "documents": ["x"],
                    "messages": [{"role": "user", "content": "x"}], "ids": [5], "text": "7", "max_tokens": 1,
                });
                body.as_object_mut()
                    .unwrap()
                    .retain(|name, _| known.contains_key(name));
                body[name] = json!(long);
                check(path, &body);
                body[name] = json!([long]);
                n += u32::from(check(path, &body) >= 400);
                body[name] = json!({&*long: &*long});
                check(path, &body);
            }
        }
        check(path, &json!(long));
        check(path, &json!([long]));
    }
    assert!(n > 100, "{n}");
    let message = |body: &Value, path: &str| post(to, path, body).1.to_string();
    let unknown = message(&json!({"model": long, "input": "x"}), "/v1/embeddings");
    assert!(
        unknown.contains(" bytes left out)`; the models are st-mean"),
        "{unknown}"
    );
    let path = format!("/{}", "x".repeat(10_000));
    let (status, text) = get(to, &path);
    assert!(
        status == 404 && text.contains("… (9921 bytes left out)"),
        "{text}"
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn tokens_are_those_that_an_embedding_computes() {
    let prompt = "query: ";
    let with_prompt = ModelChoice {
        default_prompt: DefaultPrompt::Text(prompt.to_owned()),
        ..choice("st-mean", false, Duration::from_secs(10))
    };
    let models = vec![
        Model::open(with_prompt).unwrap(),
        model("st-default-prompt", false, Duration::from_secs(10)),
    ];
    let server = serving_models(models, quick());
    let to = server.address();
    let tokens = |body: Value| {
        let (status, answer) = post(to, "/tokenize", &body);
        assert_eq!(status, 200, "{answer}");
        answer[0].as_array().unwrap().clone()
    };
    for name in ["st-mean", "st-default-prompt"] {
        let own = tokens(json!({"model": name, "inputs": "rain"}));
        let embedded = json!({"model": name, "input": "rain"});
        let (_, embedded) = post(to, "/v1/embeddings", &embedded);
        assert_eq!(embedded["usage"]["prompt_tokens"], own.len());
        // An empty prompt replaces the default prompt, so the text has fewer tokens.
        let bare = tokens(json!({"model": name, "inputs": "rain", "prompt": ""}));
        assert!(bare.len() < own.len(), "{name}");
    }
    let own = tokens(json!({"model": "st-mean", "inputs": "rain"}));
    let given = tokens(json!({"model": "st-mean", "inputs": "rain", "prompt": prompt}));
    assert_eq!(own, given);
    server.shut_down(Duration::ZERO);
}

#[test]
fn the_base_address_names_the_tasks_that_it_has() {
    let server = serving(&["hf-xlmr-token", "writer"], quick());
    for model in ["hf-xlmr-token", "writer"] {
        let (status, answer) = post(
            server.address(),
            "/",
            &json!({"model": model, "inputs": "x"}),
        );
        assert_eq!(status, 404, "{answer}");
        let message = answer["error"].as_str().unwrap();
        let asked = "but the request is for embeddings or scores; use another model";
        assert!(message.contains(asked), "{message}");
    }
    server.shut_down(Duration::ZERO);
}

#[test]
fn a_model_has_the_name_of_its_link() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("birds-v2");
    std::os::unix::fs::symlink(checkpoint("st-mean"), &link).unwrap();
    assert_eq!(Model::name_of(&link), "birds-v2");
    assert_eq!(Model::name_of(&link.join("")), "birds-v2");
    assert_eq!(Model::name_of(&checkpoint("st-mean")), "st-mean");
    assert_eq!(
        Model::name_of(&checkpoint("st-mean").join("..")),
        "checkpoints"
    );
    let blob = folder.path().join("0123");
    std::fs::write(&blob, "GGUF").unwrap();
    let file = folder.path().join("small.gguf");
    std::os::unix::fs::symlink(&blob, &file).unwrap();
    assert_eq!(Model::name_of(&file), "small");
}
