//! Tests of prompts, and of the element types and dimensions of vectors.

use gemmule::serve::DefaultPrompt;

use super::{bodies::is_ok, *};

/// Serves the checkpoint `st-mean`, whose prompts are `find: ` for queries and `text: ` for documents, with a default prompt.
fn prompted(prompt: DefaultPrompt) -> Server {
    let model = Model::open(ModelChoice {
        default_prompt: prompt,
        cache: Some(cache()),
        ..choice("st-mean", true, Duration::from_secs(10))
    });
    serving_models(vec![model.unwrap()], quick())
}

#[test]
fn a_prompt_is_a_name_or_a_text_or_the_default_of_the_server() {
    let plain = serving(&["st-mean"], quick());
    let by_name = prompted(DefaultPrompt::Named("query".to_owned()));
    let by_text = prompted(DefaultPrompt::Text("text: ".to_owned()));
    let embed = |server: &Server, body: Value| is_ok(server.address(), "/embed", &body);
    let text = |text: &str| json!({"inputs": text});
    let (query, document) = (
        embed(&plain, text("find: rain")),
        embed(&plain, text("text: rain")),
    );
    assert_ne!(query, document);
    assert_eq!(embed(&by_name, text("rain")), query);
    assert_eq!(embed(&by_text, text("rain")), document);
    for server in [&plain, &by_name, &by_text] {
        let named = json!({"inputs": "rain", "prompt_name": "document"});
        assert_eq!(embed(server, named), document);
        let given = json!({"inputs": ["rain"], "prompt": "find: "});
        assert_eq!(embed(server, given), query);
        // An empty prompt replaces the default prompt.
        let none = json!({"inputs": "rain", "prompt": ""});
        assert_eq!(embed(server, none), embed(&plain, text("rain")));
    }
    let to = plain.address();
    let vector = |body: Value| is_ok(to, "/v1/embeddings", &body)["data"][0]["embedding"].clone();
    for (field, value) in [("prompt", "find: "), ("prompt_name", "query")] {
        assert_eq!(
            vector(json!({"input": "rain", field: value})),
            vector(json!({"input": "find: rain"}))
        );
        assert_eq!(
            is_ok(to, "/tokenize", &json!({"inputs": "rain", field: value})),
            is_ok(to, "/tokenize", &json!({"inputs": "find: rain"}))
        );
        let compared = |source: &str, other: &str, parameters: Value| {
            let inputs = json!({"source_sentence": source, "sentences": [other]});
            let body = json!({"inputs": inputs, "parameters": parameters});
            is_ok(to, "/similarity", &body)
        };
        assert_eq!(
            compared("rain", "a tower", json!({field: value})),
            compared("find: rain", "find: a tower", json!(null))
        );
    }
    let told = |path: &str, body: Value| {
        let (status, told) = post(to, path, &body);
        assert!([400, 422].contains(&status), "{told}");
        let message = told["error"]["message"].as_str();
        message
            .or(told["error"].as_str())
            .unwrap_or_default()
            .to_owned()
    };
    let both = json!({"inputs": "rain", "prompt": "a", "prompt_name": "query"});
    let expected = "`prompt_name` and `prompt` both give a prompt; send one of them";
    assert_eq!(told("/embed", both.clone()), expected);
    assert_eq!(told("/tokenize", both), expected);
    assert_eq!(
        told(
            "/v1/embeddings",
            json!({"input": "rain", "prompt": "a", "task": "query"})
        ),
        "`task` and `prompt` both give a prompt; send one of them"
    );
    assert_eq!(
        told("/embed", json!({"inputs": [5, 6], "prompt": "a"})),
        "`prompt` puts a prompt before texts, but the input has token ids, to which no prompt can be added; send texts, or leave `prompt` out"
    );
    for server in [plain, by_name, by_text] {
        server.shut_down(Duration::ZERO);
    }
}

#[test]
fn a_default_prompt_that_a_model_does_not_have_is_refused_at_the_start() {
    let refused = |name: &str, prompt: DefaultPrompt| {
        let opened = Model::open(ModelChoice {
            default_prompt: prompt,
            ..choice(name, true, Duration::from_secs(10))
        });
        let told = opened.err().expect("it is refused").to_string();
        let folder = checkpoint(name).display().to_string();
        told.replace(&folder, "[dir]")
    };
    let named = |name: &str| DefaultPrompt::Named(name.to_owned());
    assert_eq!(
        refused("st-mean", named("querry")),
        "there is no prompt `querry` (did you mean `query`?); the folder has document, query"
    );
    assert_eq!(
        refused("st-cls", named("query")),
        "there is no prompt `query`; the folder has no prompts"
    );
    assert_eq!(
        refused("writer", DefaultPrompt::Text("a".to_owned())),
        "`[dir]` generates text, but default prompts are only for models that embed or score; omit the default prompt for this model"
    );
}

/// Serves a folder that has a Router (different modules for queries and documents) as two models, one for each route.
fn routed(name: &str) -> Server {
    let queries = ModelChoice {
        name: format!("{name}:query"),
        task: Some("query".to_owned()),
        route_of: Some(name.to_owned()),
        all_tokens: false,
        ..choice(name, true, Duration::from_secs(10))
    };
    let documents = ModelChoice {
        all_tokens: false,
        ..choice(name, true, Duration::from_secs(10))
    };
    let models = [documents, queries].map(|choice| Model::open(choice).unwrap());
    serving_models(models.into(), quick())
}

#[test]
fn a_purpose_chooses_the_route_of_a_router() {
    let runs = |name: &str| {
        let text = std::fs::read_to_string(checkpoint(name).join("expected.json")).unwrap();
        let all: Value = serde_json::from_str(&text).unwrap();
        let all = all["runs"].as_array().unwrap().clone();
        let (queries, documents): (Vec<Value>, Vec<Value>) =
            all.into_iter().partition(|run| run["task"] == "query");
        (queries, documents)
    };
    let server = routed("st-asym");
    let to = server.address();
    let (queries, documents) = runs("st-asym");
    let [plain, prompted] = queries.as_slice() else {
        panic!("there are two runs of queries");
    };
    let close = |found: &[f32], run: &Value| {
        let wanted = floats(&run["values"]);
        assert_eq!(found.len(), wanted.len());
        let distance = |(a, b): (&f32, &f32)| (a - b).abs();
        let far = found.iter().zip(&wanted).map(distance).fold(0.0, f32::max);
        assert!(far < 1e-4, "{far}");
    };
    let vectors = |body: &Value| -> Vec<f32> {
        let told = is_ok(to, "/v1/embeddings", body);
        let data = told["data"].as_array().unwrap();
        data.iter()
            .flat_map(|one| floats(&one["embedding"]))
            .collect()
    };
    let texts = &prompted["texts"];
    for field in ["input_type", "task", "prompt_name"] {
        close(&vectors(&json!({"input": texts, field: "query"})), prompted);
    }
    for purpose in ["search_query", "retrieval.query"] {
        let asked = json!({"model": "st-asym", "input": texts, "input_type": purpose});
        close(&vectors(&asked), prompted);
    }
    // A request that names the model of a route uses no prompt.
    close(
        &vectors(&json!({"model": "st-asym:query", "input": texts})),
        plain,
    );
    // A request may name the model of one route (for queries) and the task of the other route (for documents). The task then determines the
    // route.
    let asked = json!({"model": "st-asym:query", "input": documents[1]["texts"], "task": "document", "truncate": true});
    close(&vectors(&asked), &documents[1]);
    close(
        &vectors(&json!({"input": documents[0]["texts"]})),
        &documents[0],
    );
    let tei = is_ok(
        to,
        "/embed",
        &json!({"inputs": texts, "prompt_name": "query"}),
    );
    let rows = tei.as_array().unwrap().iter().flat_map(floats);
    close(&rows.collect::<Vec<f32>>(), prompted);
    let cohere = json!({"model": "st-asym", "texts": texts, "input_type": "search_query"});
    let told = is_ok(to, "/v2/embed", &cohere);
    let rows = told["embeddings"]["float"].as_array().unwrap().iter();
    close(&rows.flat_map(floats).collect::<Vec<f32>>(), prompted);
    server.shut_down(Duration::ZERO);
    // This folder has no prompts. Its outputs are the weights of a query's tokens, and the weights of vocabulary entries for a document.
    let server = routed("st-router");
    let to = server.address();
    let (queries, documents) = runs("st-router");
    for (run, name) in [(&queries[0], json!("query")), (&documents[0], Value::Null)] {
        let asked = json!({"inputs": run["texts"], "prompt_name": name, "truncate": true});
        let told = is_ok(to, "/embed_sparse", &asked);
        let width = run["shape"][1].as_u64().unwrap() as usize;
        let rows = told.as_array().unwrap().iter().flat_map(|row| {
            let mut values = vec![0.0; width];
            for entry in row.as_array().unwrap() {
                let at = entry["index"].as_u64().unwrap() as usize;
                values[at] = entry["value"].as_f64().unwrap() as f32;
            }
            values
        });
        close(&rows.collect::<Vec<f32>>(), run);
    }
    server.shut_down(Duration::ZERO);
    let alone = serving(&["st-router"], quick());
    let asked = json!({"inputs": "rain", "prompt_name": "query"});
    let (status, told) = post(alone.address(), "/embed_sparse", &asked);
    assert_eq!(status, 422, "{told}");
    assert_eq!(
        told["error"],
        "the route `query` of the Router of `st-router` is not loaded; the server's log has the reason"
    );
    alone.shut_down(Duration::ZERO);
}

#[test]
fn a_server_has_the_adapter_of_its_task() {
    let cache = cache();
    let opened = ["separation", "text-matching"].map(|task| {
        let choice = ModelChoice {
            name: task.to_owned(),
            task: Some(task.to_owned()),
            cache: Some(std::sync::Arc::clone(&cache)),
            ..choice("st-adapters", true, Duration::from_secs(10))
        };
        Model::open(choice).unwrap()
    });
    let server = serving_models(opened.into(), quick());
    let to = server.address();
    let text = std::fs::read_to_string(checkpoint("st-adapters").join("expected.json")).unwrap();
    let expected: Value = serde_json::from_str(&text).unwrap();
    let run = &expected["runs"][2];
    assert_eq!(run["task"], "text-matching");
    let vectors = |body: Value| -> Vec<f32> {
        let told = is_ok(to, "/v1/embeddings", &body);
        let data = told["data"].as_array().unwrap();
        data.iter()
            .flat_map(|one| floats(&one["embedding"]))
            .collect()
    };
    let other = vectors(json!({"model": "separation", "input": run["texts"]}));
    let found = vectors(json!({"model": "text-matching", "input": run["texts"]}));
    let wanted = floats(&run["values"]);
    assert!(found.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-4));
    assert_ne!(found, other);
    let named = json!({"model": "text-matching", "input": run["texts"], "task": "text-matching"});
    assert_eq!(vectors(named), found);
    let asked = json!({"model": "separation", "input": "rain", "input_type": "query"});
    let (status, told) = post(to, "/v1/embeddings", &asked);
    assert_eq!(status, 400, "{told}");
    assert_eq!(
        told["error"]["message"],
        "`input_type` is `query`, whose adapter is `retrieval.query`, and the model was loaded with the adapter for `separation`; start the server with --task retrieval.query"
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn chunks_of_a_text_are_embedded_together() {
    let server = serving(&["st-mean"], quick());
    let to = server.address();
    let text = std::fs::read_to_string(checkpoint("st-mean").join("chunks.json")).unwrap();
    let expected: Value = serde_json::from_str(&text).unwrap();
    let mut asked = json!({"input": expected["texts"], "late_chunking": true});
    let told = is_ok(to, "/v1/embeddings", &asked);
    let ids = expected["ids"].as_array().unwrap();
    assert_eq!(told["usage"]["total_tokens"], ids.len());
    for (found, wanted) in told["data"]
        .as_array()
        .unwrap()
        .iter()
        .zip(expected["rows"].as_array().unwrap())
    {
        let (found, wanted) = (floats(&found["embedding"]), floats(wanted));
        assert_eq!(found.len(), wanted.len());
        assert!(found.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-4));
    }
    asked["late_chunking"] = json!(false);
    assert_ne!(is_ok(to, "/v1/embeddings", &asked)["data"], told["data"]);
    let told = |body: Value| {
        let (status, told) = post(to, "/v1/embeddings", &body);
        assert_eq!(status, 400, "{told}");
        assert_eq!(told["error"]["param"], "late_chunking");
        told["error"]["message"].as_str().unwrap().to_owned()
    };
    assert_eq!(
        told(json!({"input": [[5, 6]], "late_chunking": true})),
        "`late_chunking` joins texts, and the input has token ids; send texts"
    );
    let many = vec!["rain and wind"; 20];
    assert_eq!(
        told(json!({"input": many, "late_chunking": true})),
        "late chunking processes all chunks as one text, but together they have more than 16 tokens, the model's maximum; give fewer or shorter chunks"
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn vectors_come_in_the_types_and_dimensions_that_are_asked_for() {
    let server = serving(&["st-mean", "st-cls"], quick());
    let to = server.address();
    let vector = |body: Value| is_ok(to, "/v1/embeddings", &body)["data"][0]["embedding"].clone();
    let whole = floats(&vector(json!({"input": "rain"})));
    // Returns the first `n` values of the vector, normalized to length 1.
    let first = |n: usize| -> Vec<f32> {
        let square: f64 = whole[..n].iter().map(|&v| f64::from(v).powi(2)).sum();
        let scaled = whole[..n].iter().map(|&v| f64::from(v) / square.sqrt());
        scaled.map(|v| v as f32).collect()
    };
    let short = first(5);
    for body in [
        json!({"input": "rain", "dimensions": 5}),
        json!({"input": "rain", "output_dimension": 5}),
        json!({"input": "rain", "dimensions": 5, "output_dimension": 5, "normalized": true}),
    ] {
        assert_eq!(floats(&vector(body)), short);
    }
    let cohere = json!({
        "model": "st-mean", "texts": ["rain"], "output_dimension": 5,
        "embedding_types": ["ubinary", "float", "int8", "uint8", "binary", "base64", "float"],
    });
    let told = is_ok(to, "/v2/embed", &cohere);
    assert_eq!(told["response_type"], "embeddings_by_type");
    assert_eq!(told["texts"], json!(["rain"]));
    assert!(told["meta"]["billed_units"]["input_tokens"].as_u64() > Some(0));
    let all = &told["embeddings"];
    assert_eq!(floats(&all["float"][0]), short);
    assert_eq!(decoded(all["base64"][0].as_str().unwrap()), short);
    let largest = short.iter().fold(0f32, |most, v| most.max(v.abs()));
    let scaled = short.iter().map(|v| (v * 127.0 / largest).round() as i64);
    let integers: Vec<i64> = scaled.collect();
    assert_eq!(all["int8"][0], json!(integers));
    let shifted: Vec<i64> = integers.iter().map(|v| v + 128).collect();
    assert_eq!(all["uint8"][0], json!(shifted));
    let bits = short.iter().enumerate();
    let byte = bits.fold(0, |byte, (at, &v)| byte | (i64::from(v > 0.0) << (7 - at)));
    assert_eq!(all["ubinary"][0], json!([byte]));
    assert_eq!(all["binary"][0], json!([byte - 128]));
    // The APIs of Jina and Voyage have a field for a single element type. Base64 encodes the bytes of any element type.
    for of in ["int8", "uint8", "binary", "ubinary", "base64"] {
        for field in ["embedding_type", "output_dtype"] {
            let body = json!({"input": "rain", "dimensions": 5, field: of});
            assert_eq!(vector(body), all[of][0], "{field} {of}");
        }
    }
    let coded = json!({"input": "rain", "dimensions": 5, "output_dtype": "ubinary", "encoding_format": "base64"});
    let byte = byte as u8;
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |at: u8| char::from(digits[usize::from(at)]);
    let expected: String = [digit(byte >> 2), digit((byte & 3) << 4), '=', '=']
        .iter()
        .collect();
    assert_eq!(vector(coded), json!(expected));
    // `dimensions` also applies to the vectors that `/similarity` compares.
    let parameters = json!({"dimensions": 5});
    let inputs = json!({"source_sentence": "rain", "sentences": ["a high tower"]});
    let body = json!({"inputs": inputs, "parameters": parameters});
    let cosine = is_ok(to, "/similarity", &body)[0].as_f64().unwrap();
    let other = floats(&vector(json!({"input": "a high tower", "dimensions": 5})));
    let expected: f32 = short.iter().zip(&other).map(|(a, b)| a * b).sum();
    assert!((cosine - f64::from(expected)).abs() < 1e-5);
    let refused = |path: &str, body: Value, message: &str| {
        let (status, told) = post(to, path, &body);
        assert!([400, 422].contains(&status), "{told}");
        let own = [&told["error"]["message"], &told["message"], &told["error"]];
        let own = own.into_iter().find_map(Value::as_str);
        assert_eq!(own, Some(message));
    };
    refused(
        "/v1/embeddings",
        json!({"input": "rain", "embedding_type": "int16"}),
        "`embedding_type` has the type `int16` (did you mean `int8`?); expected one of float, int8, uint8, binary, ubinary, base64",
    );
    refused(
        "/v1/embeddings",
        json!({"input": "rain", "embedding_type": "int8", "output_dtype": "uint8"}),
        "`embedding_type` and `output_dtype` differ; send one of them",
    );
    refused(
        "/v1/embeddings",
        json!({"input": "rain", "output_dimension": 1000}),
        &format!(
            "`output_dimension` is 1000; expected from 1 to {}, the model's own",
            whole.len()
        ),
    );
    refused(
        "/v2/embed",
        json!({"model": "st-mean", "texts": ["rain"], "embedding_types": []}),
        "`embedding_types` is an empty list; expected at least one type",
    );
    refused(
        "/v2/embed",
        json!({"model": "st-mean", "texts": ["rain"], "truncate": "RIGHT"}),
        "`truncate` is `RIGHT`; expected NONE, START or END",
    );
    let raw = "accept: application/octet-stream\r\n";
    let body = json!({"input": "rain", "output_dtype": "int8"}).to_string();
    let (status, _, told) = ask_with(to, "POST", "/v1/embeddings", raw, &body);
    assert_eq!(status, 400);
    assert!(
        told.contains("`output_dtype` is `int8`, and `Accept` requests raw f32"),
        "{told}"
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn cohere_embeds_by_purpose_and_cuts_as_it_is_told() {
    let server = serving(&["st-mean", "st-cls"], quick());
    let to = server.address();
    let embed = |body: Value| {
        let told = is_ok(to, "/v2/embed", &body);
        told["embeddings"]["float"].clone()
    };
    let of = |text: &str| embed(json!({"model": "st-mean", "texts": [text]}));
    for (purpose, text) in [
        ("search_query", "find: rain"),
        ("search_document", "text: rain"),
    ] {
        let body = json!({"model": "st-mean", "texts": ["rain"], "input_type": purpose});
        assert_eq!(embed(body), of(text));
    }
    // Cohere's clients always send an `input_type`. A model without prompts ignores the values of Cohere's API.
    let plain = json!({"model": "st-cls", "texts": ["rain"]});
    let mut named = plain.clone();
    named["input_type"] = json!("search_query");
    assert_eq!(embed(named.clone()), embed(plain));
    named["input_type"] = json!("find");
    let (status, told) = post(to, "/v2/embed", &named);
    assert_eq!(status, 400);
    assert_eq!(
        told["message"],
        "`input_type` is `find`, and the model's folder has no prompts; leave `input_type` out to use the text without a prompt"
    );
    named = json!({"model": "st-mean", "texts": ["rain"], "input_type": "clustering"});
    let (status, told) = post(to, "/v2/embed", &named);
    assert_eq!(status, 400);
    assert_eq!(
        told["message"],
        "`input_type` is `clustering`, and the model's folder has the prompts document, query; leave `input_type` out to use the text without a prompt"
    );
    // By default, a text that exceeds the model's limit is truncated at its end.
    let long = format!("tower {}", "rain ".repeat(400));
    let cut = |side: Value| {
        post(
            to,
            "/v2/embed",
            &json!({"model": "st-mean", "texts": [long], "truncate": side}),
        )
    };
    let [usual, end, start] = [json!(null), json!("END"), json!("START")].map(cut);
    assert_eq!(usual.0, 200, "{}", usual.1);
    assert_eq!(usual.1["embeddings"], end.1["embeddings"]);
    assert_ne!(end.1["embeddings"], start.1["embeddings"]);
    assert_eq!(cut(json!("NONE")).0, 413);
    server.shut_down(Duration::ZERO);
}
