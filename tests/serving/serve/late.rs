//! Compares late interaction over HTTP (token vectors and MaxSim ranking) with PyLate.

use base64::{Engine as _, engine::general_purpose::STANDARD};

use super::{bodies::is_ok, *};

/// Returns PyLate's results for the checkpoint `name`. `scripts/late_interaction.py` stored them in its folder.
fn expected(name: &str) -> Value {
    let text = std::fs::read_to_string(checkpoint(name).join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn texts(runs: &Value) -> Vec<&str> {
    let runs = runs.as_array().unwrap().iter();
    runs.map(|run| run["text"].as_str().unwrap()).collect()
}

fn late(name: &str) -> Server {
    let choice = ModelChoice {
        cache: Some(cache()),
        ..choice(name, false, Duration::from_secs(10))
    };
    serving_models(vec![Model::open(choice).unwrap()], quick())
}

#[track_caller]
fn close(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    let far = got.iter().zip(want).find(|(a, b)| (*a - *b).abs() > 1e-4);
    assert!(far.is_none(), "{far:?}");
}

fn told(to: SocketAddr, path: &str, body: &Value) -> (u16, String) {
    let (status, told) = post(to, path, body);
    let message = told["error"]["message"].as_str().or(told["error"].as_str());
    let message = message.or(told["message"].as_str()).unwrap_or_default();
    (status, message.to_owned())
}

#[test]
fn vectors_of_tokens_are_those_of_pylate() {
    let server = late("late-bert");
    let to = server.address();
    let expected = expected("late-bert");
    for (side, input_type) in [("queries", "query"), ("documents", "document")] {
        let runs = &expected[side];
        // Documents that are too long are truncated only on request. Queries are always truncated.
        let body = json!({"input": texts(runs), "input_type": input_type, "truncate": side == "documents"});
        let told = is_ok(to, "/v1/multi-vector", &body);
        let mut n_tokens = 0;
        for (index, run) in runs.as_array().unwrap().iter().enumerate() {
            let data = &told["data"][index];
            assert_eq!(
                (&data["index"], &data["object"]),
                (&json!(index), &json!("embeddings"))
            );
            let rows: Vec<Vec<f32>> = data["embeddings"]
                .as_array()
                .unwrap()
                .iter()
                .map(floats)
                .collect();
            assert_eq!(json!(rows.len()), run["rows"], "{side} {index}");
            close(&rows.concat(), &floats(&run["values"]));
            n_tokens += run["ids"].as_array().unwrap().len();
        }
        assert_eq!(
            told["usage"],
            json!({"prompt_tokens": n_tokens, "total_tokens": n_tokens})
        );
        assert_eq!(
            (&told["model"], &told["object"]),
            (&json!("late-bert"), &json!("list"))
        );
        // TEI's route `/embed_all` returns the same vectors. Its `prompt_name` distinguishes queries and documents.
        let body = json!({"inputs": texts(runs), "prompt_name": input_type, "truncate": true});
        let all = is_ok(to, "/embed_all", &body);
        for (index, rows) in all.as_array().unwrap().iter().enumerate() {
            assert_eq!(rows, &told["data"][index]["embeddings"]);
        }
    }
    server.shut_down(Duration::ZERO);
}

#[test]
fn vectors_of_tokens_have_types_and_dimensions() {
    let server = late("late-plain");
    let to = server.address();
    let rows = |body: Value| {
        let told = is_ok(to, "/v1/multi-vector", &body);
        told["data"][0]["embeddings"].as_array().unwrap().clone()
    };
    let floats_of = |row: &Value| floats(row);
    // Without `input_type`, a text is a document.
    let plain = rows(json!({"input": "bread, and rain"}));
    assert_eq!(
        plain,
        rows(json!({"input": ["bread, and rain"], "input_type": "passage"}))
    );
    assert_ne!(
        plain,
        rows(json!({"input": "bread, and rain", "input_type": "search_query"}))
    );
    for field in ["embedding_type", "encoding_format"] {
        for (row, encoded) in plain
            .iter()
            .zip(rows(json!({"input": "bread, and rain", field: "base64"})))
        {
            let bytes = STANDARD.decode(encoded.as_str().unwrap()).unwrap();
            let values = bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            assert_eq!(values.collect::<Vec<f32>>(), floats_of(row));
        }
    }
    for (row, short) in plain
        .iter()
        .zip(rows(json!({"input": "bread, and rain", "dimensions": 4})))
    {
        let first = &floats_of(row)[..4];
        let length = first.iter().map(|v| v * v).sum::<f32>().sqrt();
        close(
            &floats_of(&short),
            &first.iter().map(|v| v / length).collect::<Vec<f32>>(),
        );
    }
    let signs = rows(json!({"input": "bread, and rain", "embedding_type": "ubinary"}));
    assert_eq!(signs[0].as_array().unwrap().len(), 2);
    let refused = |body: Value| told(to, "/v1/multi-vector", &body);
    let input_type = json!({"input": "a", "input_type": "image"});
    assert_eq!(
        refused(input_type),
        (
            400,
            "`input_type` is `image`; expected query or document".to_owned()
        )
    );
    let (status, message) = refused(json!({"input": "a", "dimensions": 17}));
    assert_eq!(
        (status, message.as_str()),
        (
            400,
            "`dimensions` is 17; expected from 1 to 16, the model's own"
        )
    );
    let (status, message) = refused(json!({"input": "a", "embedding_type": "flaot"}));
    assert!(
        status == 400 && message.contains("did you mean `float`"),
        "{message}"
    );
    let long = json!({"input": ["a", "bread ".repeat(70)]});
    let (status, message) = refused(long);
    assert!(
        status == 413 && message.contains("input 1"),
        "{status} {message}"
    );
    assert_eq!(
        refused(json!({"input": "a", "task": "retrieval.query"})).0,
        400
    );
    let (status, message) = told(
        to,
        "/v1/embeddings",
        &json!({"input": "a", "model": "late-plain"}),
    );
    assert_eq!(
        (status, message.as_str()),
        (
            404,
            "the model `late-plain` computes vectors of tokens, but the request is for embeddings; use another model"
        )
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn documents_are_ranked_by_the_vectors_of_their_tokens() {
    let server = late("late-bert");
    let to = server.address();
    let expected = expected("late-bert");
    let documents = texts(&expected["documents"]);
    for (query, scores) in texts(&expected["queries"])
        .iter()
        .zip(expected["scores"].as_array().unwrap())
    {
        let scores = floats(scores);
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        for (path, key, score) in [
            ("/rerank", "texts", "score"),
            ("/v1/rerank", "documents", "relevance_score"),
            ("/v2/rerank", "documents", "relevance_score"),
        ] {
            let mut body = json!({"query": query, key: documents, "model": "late-bert"});
            if path != "/v2/rerank" {
                body["truncate"] = json!(true);
            }
            let told = is_ok(to, path, &body);
            let ranks = told.get("results").unwrap_or(&told).as_array().unwrap();
            let got: Vec<usize> = ranks
                .iter()
                .map(|rank| rank["index"].as_u64().unwrap() as usize)
                .collect();
            assert_eq!(got, order, "{path}");
            let got: Vec<f32> = ranks
                .iter()
                .map(|rank| rank[score].as_f64().unwrap() as f32)
                .collect();
            close(
                &got,
                &order.iter().map(|&at| scores[at]).collect::<Vec<f32>>(),
            );
        }
    }
    // The model has computed each document and each query only once, although several requests contain them.
    let (_, metrics) = get(to, "/metrics");
    let n_computed = documents.len() + expected["queries"].as_array().unwrap().len();
    let line = format!("gemmule_batch_sequences_total{{model=\"late-bert\"}} {n_computed}");
    assert!(
        metrics.lines().any(|found| found == line),
        "{line}: {metrics}"
    );
    let base = is_ok(
        to,
        "/",
        &json!({"query": "bread", "texts": ["rain", "bread"]}),
    );
    assert_eq!(base.as_array().unwrap().len(), 2);
    let none = json!({"query": "bread", "documents": []});
    assert_eq!(
        told(to, "/v1/rerank", &none),
        (
            400,
            "there is no document; expected at least one".to_owned()
        )
    );
    let empty = json!({"query": "bread", "documents": ["rain", ""]});
    let (status, message) = told(to, "/v1/rerank", &empty);
    assert!(
        status == 400 && message.contains("document 1 is an empty text"),
        "{message}"
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn vectors_of_tokens_beside_embeddings() {
    let folder = checkpoint("st-m3");
    let mut choice = choice("st-m3", true, Duration::from_secs(10));
    (choice.all_tokens, choice.sparse, choice.token_vectors) = (false, true, true);
    choice.cache = Some(cache());
    let models = vec![
        Model::open(choice).unwrap(),
        model("st-mean", true, Duration::from_secs(10)),
    ];
    let server = serving_models(models, quick());
    let to = server.address();
    let engine = Engine::from_checkpoint(&folder).device(DeviceChoice::Cpu);
    let engine = engine.invariant(true).outputs(["colbert"]).build().unwrap();
    let texts = ["the train to the sea", "rain", "bread at the market"];
    let scores = engine.rerank("a train to the market", &texts).unwrap();
    let body = json!({"query": "a train to the market", "documents": texts});
    for rank in is_ok(to, "/v1/rerank", &body)["results"]
        .as_array()
        .unwrap()
    {
        let score = scores[rank["index"].as_u64().unwrap() as usize];
        close(
            &[rank["relevance_score"].as_f64().unwrap() as f32],
            &[score],
        );
    }
    let vectors = is_ok(
        to,
        "/v1/embeddings",
        &json!({"input": texts, "model": "st-m3"}),
    );
    assert_eq!(vectors["data"].as_array().unwrap().len(), 3);
    let rows = is_ok(to, "/v1/multi-vector", &json!({"input": "rain"}));
    let own = engine
        .token_vectors(gemmule::text::TextRole::Document, &["rain"])
        .unwrap();
    let rows: Vec<Vec<f32>> = rows["data"][0]["embeddings"]
        .as_array()
        .unwrap()
        .iter()
        .map(floats)
        .collect();
    close(&rows.concat(), &own[0].values);
    // One request can ask for all three outputs, which one run computes. They equal those of the separate routes.
    let whole = |more: Value| {
        let mut body = json!({"input": texts, "model": "st-m3"});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        is_ok(to, "/v1/embeddings", &body)["data"].clone()
    };
    let all = whole(json!({"return_sparse": true, "return_multivector": true}));
    let sparse = is_ok(to, "/embed_sparse", &json!({"inputs": texts}));
    let late = is_ok(to, "/v1/multi-vector", &json!({"input": texts}));
    for at in 0..texts.len() {
        assert_eq!(all[at]["embedding"], vectors["data"][at]["embedding"]);
        assert_eq!(all[at]["sparse_embedding"], sparse[at]);
        assert_eq!(all[at]["embeddings"], late["data"][at]["embeddings"]);
    }
    assert!(!sparse[0].as_array().unwrap().is_empty());
    let one = whole(json!({"return_sparse": true, "dimensions": 4}));
    assert_eq!(
        (&one[1]["sparse_embedding"], &one[1]["embeddings"]),
        (&sparse[1], &Value::Null)
    );
    assert_eq!(one[1]["embedding"].as_array().unwrap().len(), 4);
    assert_eq!(whole(json!({"return_multivector": false})), vectors["data"]);
    let without = json!({"input": "a", "model": "st-mean", "return_multivector": true});
    let (status, message) = told(to, "/v1/embeddings", &without);
    assert!(
        status == 400 && message.contains("start the server with --token-vectors"),
        "{message}"
    );
    let (status, message) = told(
        to,
        "/v1/multi-vector",
        &json!({"input": "rain", "model": "st-mean"}),
    );
    assert_eq!(
        (status, message.as_str()),
        (
            404,
            "the model `st-mean` embeds texts, but the request is for vectors of tokens; use another model"
        )
    );
    let ranked = json!({"query": "a", "documents": ["b"], "model": "st-mean"});
    assert_eq!(
        told(to, "/v1/rerank", &ranked).1,
        "the model `st-mean` embeds texts, but the request is for scores; use another model"
    );
    server.shut_down(Duration::ZERO);
}
