//! Tests of the HTTP server through real connections, with the small checkpoints of `tests/checkpoints` on the CPU.
mod bodies;
mod errors;
mod heads;
mod late;
mod translation;
mod vectors;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use gemmule::{
    DeviceChoice, Engine,
    engine::KvCacheChoice,
    generate::{SamplingParams, generation_config},
    http::{HttpChoice, Keys, Server},
    schedule::{CostTable, Settings, scheduler},
    search::Rules,
    serve::{Devices, Model, ModelChoice, Models},
    tensor::Format,
    text::{Folder, TextEncoder},
};
use serde_json::{Value, json};

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/checkpoints")
        .join(name)
}

fn costs() -> CostTable {
    let text = include_str!("../../examples/costs.ron");
    let mut table = CostTable::parse(text).expect("the example is sound");
    // Make the costs similar to those of the small models, so that the server estimates realistic times.
    table.overhead = 100.0;
    for value in table.packed.values.iter_mut().flatten() {
        *value /= 100.0;
    }
    table
}

fn choice(name: &str, invariant: bool, queue: Duration) -> ModelChoice {
    ModelChoice {
        folder: checkpoint(name),
        name: name.to_owned(),
        devices: vec![DeviceChoice::Cpu],
        dtype: None,
        kv_dtype: Default::default(),
        max_context: None,
        invariant,
        scheduler: scheduler("packed", &Settings::default()).unwrap(),
        costs: Some(costs()),
        batch_bytes: 1 << 30,
        cache_bytes: None,
        queue,
        tokenizers: 1,
        all_tokens: true,
        sparse: false,
        token_vectors: false,
        fill_mask: false,
        default_prompt: Default::default(),
        task: None,
        route_of: None,
        share: None,
        previous: None,
        trace: None,
        cache: None,
    }
}

fn model(name: &str, invariant: bool, queue: Duration) -> Model {
    Model::open(choice(name, invariant, queue)).unwrap()
}

fn serving(models: &[&str], choice: HttpChoice) -> Server {
    let models = models
        .iter()
        .map(|name| model(name, true, Duration::from_secs(10)));
    serving_models(models.collect(), choice)
}

fn serving_models(models: Vec<Model>, choice: HttpChoice) -> Server {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    Server::start(socket, Models::new(models), choice).unwrap()
}

fn quick() -> HttpChoice {
    HttpChoice {
        drain_delay: Duration::ZERO,
        drain_limit: Duration::from_secs(5),
        ..HttpChoice::default()
    }
}

fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    stream
}

/// Reads a response until the server closes the connection. Returns its status, headers and body.
fn read(mut stream: TcpStream) -> (u16, String, String) {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    let body = match head.to_lowercase().contains("transfer-encoding: chunked") {
        true => unchunked(body),
        false => body.to_owned(),
    };
    (status.unwrap_or(0), head.to_owned(), body)
}

fn unchunked(mut rest: &str) -> String {
    let mut text = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let n = usize::from_str_radix(size, 16).unwrap();
        text += &after[..n];
        rest = &after[(n + 2).min(after.len())..];
    }
    text
}

fn ask_with(
    to: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> (u16, String, String) {
    let mut stream = connect(to);
    let n = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {to}\r\nconnection: close\r\n{headers}content-length: {n}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    read(stream)
}

fn post(to: SocketAddr, path: &str, body: &Value) -> (u16, Value) {
    let (status, _, text) = ask_with(to, "POST", path, "", &body.to_string());
    (status, serde_json::from_str(&text).unwrap_or(Value::Null))
}

fn get(to: SocketAddr, path: &str) -> (u16, String) {
    let (status, _, text) = ask_with(to, "GET", path, "", "");
    (status, text)
}

fn floats(value: &Value) -> Vec<f32> {
    let list = value.as_array().unwrap().iter();
    list.map(|v| v.as_f64().unwrap() as f32).collect()
}

const TEXTS: [&str; 3] = ["a small bird", "the tower is high", "rain"];

#[test]
fn vectors_are_those_of_a_session_by_bits_alone_and_beside_others() {
    let server = serving(&["st-mean"], quick());
    let engine = Engine::from_checkpoint(checkpoint("st-mean"))
        .device(DeviceChoice::Cpu)
        .invariant(true)
        .build()
        .unwrap();
    let encoder = TextEncoder::open(&checkpoint("st-mean")).unwrap();
    let batch = encoder.encode(&TEXTS).unwrap();
    let outputs = engine.session().unwrap().run(&batch).unwrap();
    let expected = &outputs.get("sentence_embedding").unwrap().values;
    let expected: Vec<&[f32]> = expected.chunks_exact(expected.len() / 3).collect();

    let (status, all) = post(server.address(), "/v1/embeddings", &json!({"input": TEXTS}));
    assert_eq!(status, 200, "{all}");
    for (at, row) in expected.iter().enumerate() {
        assert_eq!(all["data"][at]["index"], at);
        assert_eq!(&floats(&all["data"][at]["embedding"]), row);
        let (_, alone) = post(
            server.address(),
            "/v1/embeddings",
            &json!({"input": TEXTS[at]}),
        );
        assert_eq!(&floats(&alone["data"][0]["embedding"]), row);
        // A request with the token ids of a text returns the same vector as a request with the text, here encoded in base64.
        let ids = encoder.encode(&[TEXTS[at]]).unwrap().token_ids();
        let asked = json!({"input": ids, "encoding_format": "base64"});
        let (_, coded) = post(server.address(), "/v1/embeddings", &asked);
        let coded = coded["data"][0]["embedding"].as_str().unwrap();
        assert_eq!(decoded(coded), *row);
    }
    assert_eq!(
        all["usage"]["total_tokens"],
        batch.lens().iter().sum::<u32>()
    );
    let (_, tei) = post(
        server.address(),
        "/embed",
        &json!({"inputs": TEXTS, "normalize": false}),
    );
    assert_eq!(floats(&tei[1]), expected[1]);
    let asked = json!({"input": TEXTS[0], "dimensions": 5});
    let (_, short) = post(server.address(), "/v1/embeddings", &asked);
    let short = floats(&short["data"][0]["embedding"]);
    let length: f32 = short.iter().map(|v| v * v).sum();
    assert!(short.len() == 5 && (length - 1.0).abs() < 1e-6);
    server.shut_down(Duration::ZERO);
}

#[test]
fn ids_that_are_padded_with_the_end_of_a_text_embed_as_without() {
    let server = serving(&["hf-clip"], quick());
    let ask = |input: Value| {
        let body = json!({"model": "hf-clip", "input": input});
        let (status, answer) = post(server.address(), "/v1/embeddings", &body);
        assert_eq!(status, 200, "{answer}");
        floats(&answer["data"][0]["embedding"])
    };
    // config.json has no id of an end token. The embedding is then that of the first token with the highest id in a sequence, and later
    // tokens have no effect.
    let right = ask(json!([[0, 40, 30, 340]]));
    assert_eq!(ask(json!([[0, 40, 30, 340, 340, 340]])), right);
    assert_ne!(ask(json!([[0, 40, 31, 340, 340, 340]])), right);
}

fn decoded(base64: &str) -> Vec<f32> {
    const DIGITS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = base64.trim_end_matches('=').chars();
    let bits: String = digits
        .map(|c| format!("{:06b}", DIGITS.find(c).unwrap()))
        .collect();
    let bytes: Vec<u8> = (0..bits.len() / 8)
        .map(|at| u8::from_str_radix(&bits[8 * at..8 * at + 8], 2).unwrap())
        .collect();
    let four = bytes.chunks_exact(4);
    four.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}

#[test]
fn each_error_has_its_status_and_says_what_to_do() {
    let server = serving(&["st-mean", "writer", "ce-one"], quick());
    let to = server.address();
    let deep = format!("{{\"input\": {}1", "[".repeat(1_000_000));
    let long = format!(
        "{{\"model\": \"st-mean\", \"input\": \"{}\"}}",
        "word ".repeat(2_000)
    );
    let cases = [
        ("/v1/embeddings", "{"),
        ("/v1/embeddings", deep.as_str()),
        ("/v1/embeddings", "{\"input\": \"x\", \"dimensions\": -1}"),
        ("/v1/embeddings", "{}"),
        ("/v1/embeddings", "{\"input\": []}"),
        ("/v1/embeddings", "{\"input\": [\"x\", \"\"]}"),
        ("/v1/embeddings", "{\"input\": [1, \"x\"]}"),
        ("/v1/embeddings", "{\"input\": [\"x\", 1]}"),
        ("/v1/embeddings", "{\"input\": [[1], [-1]]}"),
        ("/v1/embeddings", "{\"input\": [[]]}"),
        ("/v1/embeddings", "{\"input\": [4000000]}"),
        (
            "/v1/embeddings",
            "{\"input\": \"x\", \"encoding_format\": \"hex\"}",
        ),
        ("/v1/embeddings", "{\"input\": \"x\", \"dimensions\": 33}"),
        ("/v1/embeddings", "{\"input\": \"x\", \"model\": \"gpt-9\"}"),
        (
            "/v1/embeddings",
            "{\"input\": \"x\", \"model\": \"writer\"}",
        ),
        ("/v1/embeddings", long.as_str()),
        ("/embed", "{\"inputs\": {}}"),
        ("/embed", "{\"inputs\": \"x\", \"prompt_name\": \"query\"}"),
        ("/similarity", "{\"inputs\": {\"sentences\": [\"x\"]}}"),
        (
            "/similarity",
            "{\"inputs\": {\"source_sentence\": \"x\", \"sentences\": []}}",
        ),
        ("/tokenize", "{\"inputs\": [1, 2]}"),
        ("/decode", "{\"ids\": [4000000]}"),
        ("/decode", "{\"ids\": \"x\"}"),
        ("/v2/rerank", "{\"query\": \"x\", \"documents\": [\"x\"]}"),
        (
            "/v2/rerank",
            "{\"model\": \"ce-one\", \"query\": \"x\", \"documents\": [\"x\"], \"top_n\": 0}",
        ),
        ("/predict", "{\"inputs\": [[\"a\", \"b\", \"c\"]]}"),
        ("/rerank", "{\"query\": \"x\", \"texts\": []}"),
        ("/v1/completions", "{\"prompt\": \"x\", \"n\": 0}"),
        ("/v1/completions", "{\"prompt\": \"x\", \"best_of\": 2}"),
        ("/v1/completions", "{\"prompt\": \"x\", \"logprobs\": true}"),
        ("/v1/completions", "{\"prompt\": \"x\", \"logprobs\": 21}"),
        (
            "/v1/completions",
            "{\"prompt\": \"x\", \"top_logprobs\": 2}",
        ),
        ("/v1/completions", "{\"prompt\": \"\"}"),
        (
            "/v1/completions",
            "{\"prompt\": \"One\", \"max_tokens\": 100000}",
        ),
        (
            "/v1/completions",
            "{\"prompt\": \"One\", \"max_tokens\": 0}",
        ),
        (
            "/v1/completions",
            "{\"prompt\": \"One\", \"temperature\": -3}",
        ),
        ("/v1/completions", "{\"prompt\": \"One\", \"stop\": [\"\"]}"),
        ("/v1/completions", "{\"prompt\": \"One\", \"stop\": 7}"),
        (
            "/v1/completions",
            "{\"prompt\": \"One\", \"frequency_penalty\": 3}",
        ),
        (
            "/v1/completions",
            "{\"prompt\": \"One\", \"presence_penalty\": -2.5}",
        ),
        (
            "/v1/completions",
            "{\"prompt\": \"One\", \"logit_bias\": {\"x\": 1}}",
        ),
        (
            "/v1/completions",
            "{\"prompt\": \"One\", \"logit_bias\": {\"3\": 101}}",
        ),
        (
            "/v1/completions",
            "{\"prompt\": \"One\", \"logit_bias\": {\"4000000\": 1}}",
        ),
        ("/v1/completions", "{\"prompt\": \"One\", \"top_p\": 7}"),
        ("/v1/completions", "{\"prompt\": \"One\", \"top_k\": 7}"),
        (
            "/v1/completions",
            "{\"prompt\": \"One\", \"tools\": [{\"type\": \"function\"}]}",
        ),
        ("/v1/chat/completions", "{\"messages\": [], \"tools\": [3]}"),
        (
            "/v1/chat/completions",
            "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"tool_choice\": \"required\"}",
        ),
        (
            "/v1/completions",
            "{\"prompt\": [\"One\", \"Two\"], \"stream\": true}",
        ),
        ("/v1/chat/completions", "{\"messages\": []}"),
        (
            "/v1/chat/completions",
            "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}",
        ),
        ("/v2/nothing", "{}"),
        ("/health", "{}"),
    ];
    let mut shown = String::new();
    for (path, body) in cases {
        let (status, _, text) = ask_with(to, "POST", path, "", body);
        let body: String = body.chars().take(70).collect();
        shown += &format!("{path} {body}\n{status} {text}\n\n");
    }
    for header in ["x-request-timeout-ms: soon", "x-priority: 300"] {
        let (status, _, text) = ask_with(
            to,
            "POST",
            "/v1/embeddings",
            &format!("{header}\r\n"),
            "{\"input\": \"x\"}",
        );
        shown += &format!("{header}\n{status} {text}\n\n");
    }
    insta::assert_snapshot!(shown);
    // The server still answers.
    assert_eq!(post(to, "/v1/embeddings", &json!({"input": "x"})).0, 200);
    server.shut_down(Duration::ZERO);
}

#[test]
fn texts_come_whole_and_as_events_and_end_before_a_stop() {
    let server = serving(&["writer"], quick());
    let to = server.address();
    let prompt = "One cold morning Ben walked to the f";
    let (status, whole) = post(
        to,
        "/v1/completions",
        &json!({"prompt": prompt, "max_tokens": 24}),
    );
    assert_eq!(status, 200, "{whole}");
    let text = whole["choices"][0]["text"].as_str().unwrap();
    assert!(text.starts_with("orest."), "{text}");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["usage"]["completion_tokens"], 24);

    let asked = json!({
        "prompt": prompt, "max_tokens": 24, "stream": true, "stream_options": {"include_usage": true},
    });
    let (status, head, body) = ask_with(to, "POST", "/v1/completions", "", &asked.to_string());
    assert_eq!(status, 200);
    assert!(head.contains("text/event-stream"));
    let events: Vec<&str> = body.split("\n\n").filter(|e| !e.is_empty()).collect();
    let events: Vec<&str> = events
        .iter()
        .map(|e| e.strip_prefix("data: ").unwrap())
        .collect();
    assert_eq!(events.last(), Some(&"[DONE]"));
    let parsed: Vec<Value> = events[..events.len() - 1]
        .iter()
        .map(|event| serde_json::from_str(event).unwrap())
        .collect();
    let parts = parsed
        .iter()
        .filter_map(|e| e["choices"][0]["text"].as_str());
    assert_eq!(parts.collect::<String>(), text);
    assert_eq!(parsed.last().unwrap()["usage"], whole["usage"]);

    let (_, stopped) = post(
        to,
        "/v1/completions",
        &json!({"prompt": prompt, "max_tokens": 24, "stop": ["st."]}),
    );
    assert_eq!(stopped["choices"][0]["text"], "ore");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    // The same seed gives the same random draws.
    let drawn = json!({"prompt": prompt, "max_tokens": 24, "temperature": 1.5, "seed": 3});
    let first = post(to, "/v1/completions", &drawn).1["choices"].clone();
    assert_eq!(post(to, "/v1/completions", &drawn).1["choices"], first);
    server.shut_down(Duration::ZERO);
}

#[test]
fn several_texts_of_a_prompt_come_with_their_log_probabilities() {
    let server = serving(&["writer"], quick());
    let to = server.address();
    let prompt = "One cold morning Ben walked to the f";
    let asked = json!({
        "prompt": prompt, "max_tokens": 12, "n": 2, "temperature": 0.9, "seed": 5, "logprobs": 3,
    });
    let (status, whole) = post(to, "/v1/completions", &asked);
    assert_eq!(status, 200, "{whole}");
    assert_eq!(whole["choices"].as_array().unwrap().len(), 2);
    assert_ne!(whole["choices"][0]["text"], whole["choices"][1]["text"]);
    // `usage` counts the tokens of the prompt once, and the new tokens of both texts.
    let alone =
        json!({"prompt": prompt, "max_tokens": 12, "temperature": 0.9, "seed": 6, "logprobs": 0});
    let (_, second) = post(to, "/v1/completions", &alone);
    assert_eq!(second["choices"][0]["text"], whole["choices"][1]["text"]);
    let usage = |of: &Value, what: &str| of["usage"][what].as_u64().unwrap();
    assert_eq!(
        usage(&whole, "prompt_tokens"),
        usage(&second, "prompt_tokens")
    );
    assert_eq!(usage(&whole, "completion_tokens"), 24);
    for choice in whole["choices"].as_array().unwrap() {
        let scores = &choice["logprobs"];
        let tokens: Vec<&str> = scores["tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|t| t.as_str().unwrap())
            .collect();
        assert_eq!(tokens.concat(), choice["text"].as_str().unwrap());
        let values = floats(&scores["token_logprobs"]);
        let mut offset = 0;
        for (at, token) in tokens.iter().enumerate() {
            assert_eq!(scores["text_offset"][at], offset);
            offset += token.chars().count();
            let most = scores["top_logprobs"][at].as_object().unwrap();
            assert!((3..=4).contains(&most.len()), "{most:?}");
            assert_eq!(most[*token].as_f64().unwrap() as f32, values[at]);
            let sum: f64 = most.values().map(|v| v.as_f64().unwrap().exp()).sum();
            assert!(sum <= 1.0 + 1e-4 && values[at] <= 0.0);
        }
    }
    let only = second["choices"][0]["logprobs"]["top_logprobs"][0].as_object();
    assert_eq!(only.unwrap().len(), 1);
    // The engine itself computes the same log-probabilities as the server.
    let engine = Engine::from_checkpoint(checkpoint("writer")).device(DeviceChoice::Cpu);
    let engine = engine.invariant(true).generating().build().unwrap();
    let encoder = TextEncoder::open(&checkpoint("writer")).unwrap();
    let options = SamplingParams {
        rules: Rules {
            max_new_tokens: 12,
            ..Rules::default()
        },
        log_probabilities: true,
        ..SamplingParams::default()
    };
    let on = |_, _: &_| std::ops::ControlFlow::Continue(());
    let written = engine
        .generate(&encoder.prompts(&[prompt]).unwrap(), &options, on)
        .unwrap();
    let asked = json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 0});
    let (_, greedy) = post(to, "/v1/completions", &asked);
    let values = floats(&greedy["choices"][0]["logprobs"]["token_logprobs"]);
    assert_eq!(values, written[0].log_probabilities);
    // The events of a stream, joined by their index, give the same texts and log-probabilities as the complete response.
    let mut asked = json!({
        "prompt": prompt, "max_tokens": 12, "n": 2, "temperature": 0.9, "seed": 5, "logprobs": 3, "stream": true,
    });
    for with_usage in [false, true] {
        asked["stream_options"] = json!({"include_usage": with_usage});
        let (_, _, body) = ask_with(to, "POST", "/v1/completions", "", &asked.to_string());
        let events: Vec<Value> = body
            .split("\n\n")
            .filter_map(|e| serde_json::from_str(e.strip_prefix("data: ")?).ok())
            .collect();
        for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
            let own = || events.iter().filter(|e| e["choices"][0]["index"] == index);
            let text: String = own()
                .map(|e| e["choices"][0]["text"].as_str().unwrap())
                .collect();
            assert_eq!(text, choice["text"]);
            let values =
                own().filter_map(|e| e["choices"][0]["logprobs"]["token_logprobs"].as_array());
            let values: Vec<Value> = values.flatten().cloned().collect();
            assert_eq!(Value::Array(values), choice["logprobs"]["token_logprobs"]);
        }
        assert_eq!(events[0].get("usage").is_some(), with_usage);
        let last = events.last().unwrap();
        assert_eq!(last["usage"] == whole["usage"], with_usage);
    }
    server.shut_down(Duration::ZERO);
}

/// Returns a copy of the checkpoint `writer`, which generates text, with a chat template.
fn chatting() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(checkpoint("writer")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let template = "{% for message in messages %}{{ message.content }} {% endfor %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    folder
}

#[test]
fn conversations_are_answered_with_scores_and_in_several_ways() {
    let folder = chatting();
    let mut choice = choice("writer", true, Duration::from_secs(10));
    choice.folder = folder.path().to_owned();
    let server = serving_models(vec![Model::open(choice).unwrap()], quick());
    let to = server.address();
    let mut asked = json!({
        "messages": [{"role": "user", "content": "One cold morning Ben walked to"}],
        "max_tokens": 8, "logprobs": true, "top_logprobs": 2, "n": 2, "temperature": 0,
    });
    let (status, whole) = post(to, "/v1/chat/completions", &asked);
    assert_eq!(status, 200, "{whole}");
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(
        (choices.len(), &choices[0]["message"]),
        (2, &choices[1]["message"])
    );
    let content = choices[0]["logprobs"]["content"].as_array().unwrap();
    let text: String = content
        .iter()
        .map(|t| t["token"].as_str().unwrap())
        .collect();
    assert_eq!(text, choices[0]["message"]["content"]);
    for token in content {
        // Greedy decoding chose the most probable token.
        assert_eq!(token["top_logprobs"][0]["token"], token["token"]);
        assert_eq!(token["top_logprobs"][0]["logprob"], token["logprob"]);
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        let bytes: Vec<u8> = serde_json::from_value(token["bytes"].clone()).unwrap();
        assert_eq!(bytes, token["token"].as_str().unwrap().as_bytes());
    }
    asked["stream"] = json!(true);
    let (_, _, body) = ask_with(to, "POST", "/v1/chat/completions", "", &asked.to_string());
    let events: Vec<Value> = body
        .split("\n\n")
        .filter_map(|e| serde_json::from_str(e.strip_prefix("data: ")?).ok())
        .collect();
    for index in 0..2 {
        let own = || events.iter().filter(|e| e["choices"][0]["index"] == index);
        let text: String = own()
            .filter_map(|e| e["choices"][0]["delta"]["content"].as_str())
            .collect();
        assert_eq!(text, choices[0]["message"]["content"]);
        assert_eq!(
            own().next().unwrap()["choices"][0]["delta"]["role"],
            "assistant"
        );
        assert_eq!(
            own().next_back().unwrap()["choices"][0]["finish_reason"],
            "length"
        );
    }
    server.shut_down(Duration::ZERO);
}

#[test]
fn tools_are_the_affair_of_templates_that_take_them() {
    let folder = chatting();
    let open = || {
        let mut choice = choice("writer", true, Duration::from_secs(10));
        choice.folder = folder.path().to_owned();
        serving_models(vec![Model::open(choice).unwrap()], quick())
    };
    let tools = json!([{"type": "function", "function": {"name": "walk"}}]);
    let asked = |tools: &Value, choice: &str| {
        json!({
            "messages": [{"role": "user", "content": "One cold morning"}], "max_tokens": 4, "temperature": 0,
            "tools": tools, "tool_choice": choice,
        })
    };
    let server = open();
    let to = server.address();
    let (status, refused) = post(to, "/v1/chat/completions", &asked(&tools, "auto"));
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("tools")));
    assert_eq!(
        refused["error"]["message"],
        "the model's chat template does not support tools; leave `tools` out, or use another model"
    );
    let plain = post(to, "/v1/chat/completions", &asked(&tools, "none"));
    assert_eq!(plain.0, 200, "{}", plain.1);
    let plain_tokens = plain.1["usage"]["prompt_tokens"].as_u64().unwrap();
    server.shut_down(Duration::ZERO);
    let template =
        "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }} ";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let server = open();
    let to = server.address();
    let (status, told) = post(to, "/v1/chat/completions", &asked(&tools, "auto"));
    assert_eq!(status, 200, "{told}");
    assert!(told["usage"]["prompt_tokens"].as_u64().unwrap() > plain_tokens);
    let (_, none) = post(to, "/v1/chat/completions", &asked(&json!([]), "auto"));
    assert_eq!(none["usage"]["prompt_tokens"], plain_tokens);
    server.shut_down(Duration::ZERO);
}

/// Returns a copy of `ce-qwen` as a text generator: a small Qwen3 with random weights, 128 positions and no end token.
fn qwen(change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        std::fs::copy(checkpoint("ce-qwen").join(name), folder.path().join(name)).unwrap();
    }
    let template = "{% for message in messages %}{{ message.content }} {% endfor %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let file = folder.path().join("config.json");
    let mut config = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(file, config.to_string()).unwrap();
    folder
}

fn serving_folder(folder: &Path, cache_bytes: Option<u64>) -> Server {
    let mut choice = choice("qwen", false, Duration::from_secs(10));
    choice.folder = folder.to_owned();
    choice.cache_bytes = cache_bytes;
    serving_models(vec![Model::open(choice).unwrap()], quick())
}

/// Sends a request for generation. Returns the number of prompt tokens, the number of new tokens, and the finish reason.
fn lengths(to: SocketAddr, path: &str, asked: &Value) -> (u64, u64, Value) {
    let (status, told) = post(to, path, asked);
    assert_eq!(status, 200, "{told}");
    let count = |key: &str| told["usage"][key].as_u64().unwrap();
    (
        count("prompt_tokens"),
        count("completion_tokens"),
        told["choices"][0]["finish_reason"].clone(),
    )
}

#[test]
fn a_text_without_max_tokens_has_all_positions_that_are_left() {
    let folder = qwen(|_| {});
    let server = serving_folder(folder.path(), None);
    let to = server.address();
    let chat = json!({"messages": [{"role": "user", "content": "the river runs to the sea"}]});
    let (prompt, new, reason) = lengths(to, "/v1/chat/completions", &chat);
    assert!(prompt > 3);
    assert_eq!((prompt + new, reason), (128, json!("length")));
    server.shut_down(Duration::ZERO);

    // The KV cache may have room for fewer tokens than the model has positions. This cache has 64 positions, enough for 65 tokens, because
    // the last new token is not stored.
    let engine = Engine::from_checkpoint(folder.path()).device(DeviceChoice::Cpu);
    let engine = engine.generating().build().unwrap();
    let mut options = generation_config(folder.path()).unwrap();
    options.rules.max_new_tokens = 64;
    let bytes = engine.cache_bytes_needed(&[1], &options).unwrap();
    let server = serving_folder(folder.path(), Some(bytes));
    let (prompt, new, reason) = lengths(server.address(), "/v1/chat/completions", &chat);
    assert_eq!((prompt + new, reason), (65, json!("length")));
    server.shut_down(Duration::ZERO);

    // The checkpoint's generation_config.json may set a smaller max number of new tokens. Prompt tokens do not count.
    let file = folder.path().join("generation_config.json");
    std::fs::write(&file, r#"{"max_new_tokens": 7}"#).unwrap();
    let server = serving_folder(folder.path(), None);
    let to = server.address();
    assert_eq!(lengths(to, "/v1/chat/completions", &chat).1, 7);
    server.shut_down(Duration::ZERO);
    std::fs::write(&file, r#"{"max_new_tokens": 500}"#).unwrap();
    let server = serving_folder(folder.path(), None);
    let (prompt, new, _) = lengths(server.address(), "/v1/chat/completions", &chat);
    assert_eq!(prompt + new, 128);
    server.shut_down(Duration::ZERO);
    std::fs::write(&file, r#"{"max_length": 40}"#).unwrap();
    let server = serving_folder(folder.path(), None);
    let (prompt, new, _) = lengths(server.address(), "/v1/chat/completions", &chat);
    assert_eq!(prompt + new, 40);
    server.shut_down(Duration::ZERO);
}

#[test]
fn the_library_and_the_command_line_write_as_far_as_there_are_positions() {
    let folder = qwen(|_| {});
    let engine = Engine::from_checkpoint(folder.path()).device(DeviceChoice::Cpu);
    let engine = engine.generating().build().unwrap();
    for options in [
        SamplingParams::default(),
        generation_config(folder.path()).unwrap(),
    ] {
        let go_on = |_, _: &_| std::ops::ControlFlow::Continue(());
        let written = engine.generate(&[vec![5; 9], vec![6; 127]], &options, go_on);
        let lens = written.unwrap().into_iter().map(|w| w.tokens.len());
        assert_eq!(lens.collect::<Vec<_>>(), [119, 1]);
    }
    let output = Command::new(env!("CARGO_BIN_EXE_gemmule"))
        .args([
            "generate",
            "--prompt",
            "the river",
            "--device",
            "cpu",
            "--json",
            "--weights",
        ])
        .arg(folder.path())
        .output()
        .unwrap();
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["texts"][0]["reason"], "length");
    let new = told["texts"][0]["tokens"].as_array().unwrap().len();
    assert!((100..128).contains(&new), "{new}");
}

#[test]
fn what_is_longer_than_the_positions_of_a_rotary_model_is_refused_with_the_figures() {
    let linear = |config: &mut Value| {
        config["rope_parameters"] =
            json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 1_000_000.0});
    };
    let yarn = |config: &mut Value| {
        config["rope_parameters"] = json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "rope_theta": 1_000_000.0,
        });
    };
    type Change<'a> = &'a dyn Fn(&mut Value);
    let scalings: [(Change<'_>, usize); 3] = [(&|_| {}, 128), (&linear, 256), (&yarn, 160)];
    for (change, positions) in scalings {
        let folder = qwen(change);
        let server = serving_folder(folder.path(), None);
        let to = server.address();
        let ids = |n: usize| vec![5; n];
        let refused = |path: &str, asked: Value, param: &str, figures: &str| {
            for stream in [false, true] {
                let mut asked = asked.clone();
                asked["stream"] = json!(stream);
                let (status, told) = post(to, path, &asked);
                let error = &told["error"];
                assert_eq!(
                    (status, &error["code"]),
                    (400, &json!("context_length_exceeded")),
                    "{told}"
                );
                assert_eq!(error["type"], "invalid_request_error");
                assert_eq!(error["param"], param, "{told}");
                let message = error["message"].as_str().unwrap();
                assert!(message.contains(figures), "{message}");
                assert!(
                    message.contains(&format!("the model's {positions} positions")),
                    "{message}"
                );
            }
        };
        let (n, path) = (positions, "/v1/completions");
        let asked = json!({"prompt": ids(n - 10), "max_tokens": 10});
        assert_eq!(
            lengths(to, path, &asked),
            (n as u64 - 10, 10, json!("length"))
        );
        let asked = json!({"prompt": ids(n - 10), "max_tokens": 11});
        refused(
            path,
            asked,
            "max_tokens",
            &format!("the prompt's {} tokens and 11 new ones", n - 10),
        );
        // The default of 16 new tokens is lowered to the remaining positions.
        let asked = json!({"prompt": ids(n - 10)});
        assert_eq!(
            lengths(to, path, &asked),
            (n as u64 - 10, 10, json!("length"))
        );
        let info: Value = serde_json::from_str(&get(to, "/info").1).unwrap();
        assert_eq!(info["max_input_length"], n - 1);
        refused(
            path,
            json!({"prompt": ids(n)}),
            "prompt",
            &format!("the prompt's {n} tokens"),
        );
        let asked = json!({"prompt": ids(n + 1), "max_tokens": 1});
        refused(
            path,
            asked,
            "prompt",
            &format!("the prompt's {} tokens", n + 1),
        );
        let long = "rain ".repeat(n + 8);
        let messages = json!([{"role": "user", "content": long}]);
        for more in [json!(null), json!(1)] {
            let asked = json!({"messages": messages, "max_tokens": more});
            refused("/v1/chat/completions", asked, "messages", "the prompt's");
        }
        let messages = json!([{"role": "user", "content": "rain"}]);
        let asked = json!({"messages": messages, "max_completion_tokens": n});
        refused(
            "/v1/chat/completions",
            asked,
            "max_tokens",
            &format!("and {n} new ones"),
        );
        server.shut_down(Duration::ZERO);

        // The engine has the same limit as the server: a prompt and its new tokens together have at most as many tokens as the model has
        // positions.
        let build = || Engine::from_checkpoint(folder.path()).device(DeviceChoice::Cpu);
        let engine = build().generating().build().unwrap();
        let mut options = SamplingParams::default();
        options.rules.max_new_tokens = 2;
        let go_on = |_, _: &_| std::ops::ControlFlow::Continue(());
        let written = engine
            .generate(&[ids(n - 1), ids(n - 2)], &options, go_on)
            .unwrap();
        let problem = written[0].problem.as_ref().unwrap().to_string();
        assert!(
            problem.contains(&format!("the model's {n} positions")),
            "{problem}"
        );
        assert_eq!(written[1].tokens.len(), 2);
    }
    // Token ids are also not truncated for encoders with rotary embeddings.
    let server = serving(&["st-qwen"], quick());
    let to = server.address();
    assert_eq!(
        post(to, "/v1/embeddings", &json!({"input": vec![5; 64]})).0,
        200
    );
    let (status, told) = post(to, "/v1/embeddings", &json!({"input": vec![5; 65]}));
    assert_eq!(status, 413, "{told}");
    server.shut_down(Duration::ZERO);
}

#[test]
fn parts_of_characters_have_entries_with_their_bytes() {
    let folder = qwen(|_| {});
    let server = serving_folder(folder.path(), None);
    let to = server.address();
    let asked = json!({
        "messages": [{"role": "user", "content": "東京 ﬁne"}], "logprobs": true, "top_logprobs": 3, "temperature": 2, "seed": 4,
    });
    let (status, told) = post(to, "/v1/chat/completions", &asked);
    assert_eq!(status, 200, "{told}");
    let choice = &told["choices"][0];
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(
        entries.len() as u64,
        told["usage"]["completion_tokens"].as_u64().unwrap()
    );
    let bytes =
        |entry: &Value| -> Vec<u8> { serde_json::from_value(entry["bytes"].clone()).unwrap() };
    let all: Vec<u8> = entries.iter().flat_map(bytes).collect();
    assert_eq!(
        String::from_utf8_lossy(&all),
        choice["message"]["content"].as_str().unwrap()
    );
    let mut n_parts = 0;
    for entry in entries {
        let alternatives = entry["top_logprobs"].as_array().unwrap();
        for one in alternatives.iter().chain([entry]) {
            let (bytes, token) = (bytes(one), one["token"].as_str().unwrap());
            match String::from_utf8(bytes.clone()) {
                Ok(text) => assert_eq!(token, text),
                Err(_) => {
                    n_parts += 1;
                    let last = format!("\\x{:02x}", bytes[bytes.len() - 1]);
                    assert!(
                        token.contains("\\x") && (token.ends_with(&last) || bytes.len() > 1),
                        "{token}"
                    );
                }
            }
        }
        // Different tokens may have equal texts, such as parts of characters. They have separate entries, and their bytes differ.
        let mut names: Vec<_> = alternatives.iter().map(bytes).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), alternatives.len());
    }
    assert!(n_parts > 5, "{n_parts}");
    let asked =
        json!({"prompt": "東", "max_tokens": 60, "logprobs": 4, "temperature": 2, "seed": 4});
    let (_, told) = post(to, "/v1/completions", &asked);
    let scores = &told["choices"][0]["logprobs"];
    assert_eq!(scores["tokens"].as_array().unwrap().len(), 60);
    assert!(
        scores["tokens"].to_string().contains("bytes:\\\\x"),
        "{scores}"
    );
    for alternatives in scores["top_logprobs"].as_array().unwrap() {
        assert!(
            alternatives.as_object().unwrap().len() >= 4,
            "{alternatives}"
        );
    }
    server.shut_down(Duration::ZERO);
}

#[test]
fn several_texts_differ_unless_the_temperature_says_otherwise() {
    let folder = qwen(|_| {});
    let server = serving_folder(folder.path(), None);
    let to = server.address();
    let texts = |more: Value| {
        let mut asked = json!({"prompt": "rain", "max_tokens": 12, "n": 3, "seed": 1});
        asked
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let (status, told) = post(to, "/v1/completions", &asked);
        assert_eq!(status, 200, "{told}");
        let all = told["choices"].as_array().unwrap().iter();
        let mut all: Vec<String> = all.map(|c| c["text"].to_string()).collect();
        all.sort();
        all.dedup();
        all.len()
    };
    assert_eq!(texts(json!({})), 3);
    assert_eq!(texts(json!({"temperature": 1})), 3);
    assert_eq!(texts(json!({"temperature": 0})), 1);
    assert_eq!(texts(json!({"n": 1})), 1);
    server.shut_down(Duration::ZERO);
}

#[test]
fn requests_of_clients_that_leave_are_counted() {
    let folder = qwen(|config| config["max_position_embeddings"] = json!(16_384));
    let server = serving_folder(folder.path(), None);
    let to = server.address();
    let cancelled = || {
        let counts = get(to, "/metrics").1;
        let (_, n) = counts
            .split_once("gemmule_cancelled_total{model=\"qwen\"} ")
            .unwrap();
        n.lines().next().unwrap().parse::<u64>().unwrap()
    };
    // The metrics do not count a text as canceled if it ends at its max length or at a stop string.
    let mut asked = json!({"prompt": "rain", "max_tokens": 5});
    assert_eq!(post(to, "/v1/completions", &asked).0, 200);
    asked["stop"] = json!(["a", "e", "i", "o", " ", "\n", "\u{fffd}"]);
    asked["max_tokens"] = json!(400);
    for stream in [true, false] {
        asked["stream"] = json!(stream);
        assert_eq!(
            ask_with(to, "POST", "/v1/completions", "", &asked.to_string()).0,
            200
        );
    }
    assert_eq!(cancelled(), 0);
    for (nth, stream) in [(1, true), (2, false)] {
        let body = json!({"prompt": "rain", "max_tokens": 16_000, "stream": stream}).to_string();
        let mut client = connect(to);
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        client.write_all(head.as_bytes()).unwrap();
        thread::sleep(Duration::from_millis(300));
        drop(client);
        let began = Instant::now();
        while cancelled() < nth {
            assert!(began.elapsed() < Duration::from_secs(20), "{nth}");
            thread::sleep(Duration::from_millis(10));
        }
    }
    assert_eq!(cancelled(), 2);
    server.shut_down(Duration::ZERO);
}

#[test]
fn templates_take_options_and_their_refusals_are_plain() {
    let folder = chatting();
    let template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
        {% if messages[0].role == 'robot' %}{% set x = 'x' * 10**9 %}{% endif %}\
        {% for m in messages %}{{ m.content }}{% for t in m.tool_calls %}{% for name in t.function.arguments %}{{ name }}{% endfor %}{% endfor %} {% endfor %}\
        {% if enable_thinking is defined and not enable_thinking %}no thoughts at all {% endif %}\
        {% if add_generation_prompt %}Ben said {% endif %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let mut choice = choice("writer", true, Duration::from_secs(10));
    choice.folder = folder.path().to_owned();
    let server = serving_models(vec![Model::open(choice).unwrap()], quick());
    let to = server.address();
    let ask = |role: &str, more: Value| {
        let mut body = json!({
            "messages": [{"role": role, "content": "One cold morning"}], "max_tokens": 2, "temperature": 0,
        });
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        post(to, "/v1/chat/completions", &body)
    };
    let tokens = |more: Value| {
        let (status, told) = ask("user", more);
        assert_eq!(status, 200, "{told}");
        told["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let usual = tokens(json!({}));
    assert!(tokens(json!({"chat_template_kwargs": {"enable_thinking": false}})) > usual);
    assert_eq!(
        tokens(json!({"chat_template_kwargs": {"enable_thinking": true}})),
        usual
    );
    assert_eq!(
        tokens(json!({"chat_template_kwargs": null, "continue_final_message": false})),
        usual
    );
    assert!(tokens(json!({"add_generation_prompt": false})) < usual);
    let continued = tokens(json!({"continue_final_message": true}));
    assert!(continued < usual);
    assert_eq!(
        tokens(json!({"continue_final_message": true, "add_generation_prompt": false})),
        continued
    );
    let call = |calls: Value| json!({"messages": [{"role": "assistant", "content": null, "tool_calls": calls}]});
    assert!(tokens(call(json!([]))) < usual);
    let calls =
        json!([{"type": "function", "function": {"name": "f", "arguments": "{\"cold\": 1}"}}]);
    let as_text = tokens(call(calls));
    let calls = json!([{"type": "function", "function": {"name": "f", "arguments": {"cold": 1}}}]);
    assert_eq!(tokens(call(calls)), as_text);
    let broken = json!([{"type": "function", "function": {"name": "f", "arguments": "{"}}]);
    for (role, more, param, message) in [
        (
            "system",
            json!({}),
            "messages",
            "the model's chat template refuses the conversation: System role not supported",
        ),
        (
            "robot",
            json!({}),
            "messages",
            "the model's chat template: rendering takes more than 8388608 steps, the limit for one conversation (line 1 of the template)",
        ),
        (
            "user",
            json!({"chat_template_kwargs": 3}),
            "chat_template_kwargs",
            "`chat_template_kwargs` is a number; expected an object",
        ),
        (
            "user",
            json!({"chat_template_kwargs": {"messages": []}}),
            "chat_template_kwargs",
            "`messages` is a request parameter, not a variable of the chat template; give it outside of `chat_template_kwargs`",
        ),
        (
            "user",
            json!({"continue_final_message": true, "add_generation_prompt": true}),
            "continue_final_message",
            "`continue_final_message` and `add_generation_prompt` cannot both be true: the first continues the last message, the second begins a new one",
        ),
        (
            "user",
            call(broken),
            "messages",
            "`messages[0].tool_calls[0].function.arguments` is a string that is not JSON (EOF while parsing an object at line 1 column 1); expected the arguments of the tool call as a JSON object",
        ),
    ] {
        let (status, told) = ask(role, more);
        assert_eq!(status, 400, "{told}");
        assert_eq!(told["error"]["param"], param, "{told}");
        assert_eq!(told["error"]["message"], message);
    }
    let prompt = json!({"prompt": "One", "continue_final_message": true});
    let (status, told) = post(to, "/v1/completions", &prompt);
    assert_eq!(
        (status, &told["error"]["param"]),
        (400, &json!("continue_final_message"))
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn penalties_and_a_bias_change_what_is_written() {
    let server = serving(&["writer"], quick());
    let to = server.address();
    let write = |more: Value| {
        let mut asked = json!({
            "prompt": "One cold morning Ben walked to", "max_tokens": 120, "temperature": 0, "logprobs": 1,
        });
        let more = more.as_object().unwrap().clone();
        asked.as_object_mut().unwrap().extend(more);
        let (status, told) = post(to, "/v1/completions", &asked);
        assert_eq!(status, 200, "{told}");
        let tokens = told["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
        tokens
            .iter()
            .map(|token| token.as_str().unwrap().to_owned())
            .collect::<Vec<String>>()
    };
    let usual = write(json!({}));
    // The neutral value of each parameter does not change the text.
    let neutral = json!({"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "top_k": -1, "repetition_penalty": 1});
    assert_eq!(write(neutral), usual);
    let mut texts = vec![usual.clone()];
    for penalty in ["frequency_penalty", "presence_penalty"] {
        texts.extend([2, -2].map(|by| write(json!({penalty: by}))));
    }
    // A negative frequency penalty rewards each occurrence of a token, so the text repeats the same token.
    let rewarded = &texts[2];
    let last = rewarded.last().unwrap();
    assert!(
        rewarded.iter().filter(|token| *token == last).count() > 60,
        "{rewarded:?}"
    );
    let n = texts.len();
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), n, "{texts:?}");
    let encoder = TextEncoder::for_prompts(Folder::open(&checkpoint("writer")).unwrap());
    let first = encoder.unwrap().prompts(&[usual[0].as_str()]).unwrap()[0][0].to_string();
    let never = write(json!({"logit_bias": {first.clone(): -100}}));
    assert!(!never.contains(&usual[0]), "{never:?}");
    let always = write(json!({"logit_bias": {first: 100}}));
    assert_eq!(always, vec![usual[0].clone(); 120]);
    server.shut_down(Duration::ZERO);
}

#[test]
fn raw_rows_all_tokens_cosines_and_tokens_are_those_of_the_engine() {
    let server = serving(&["st-mean"], quick());
    let to = server.address();
    let (_, all) = post(to, "/v1/embeddings", &json!({"input": TEXTS}));
    let rows: Vec<Vec<f32>> = (0..3)
        .map(|at| floats(&all["data"][at]["embedding"]))
        .collect();
    let mut stream = connect(to);
    let body = json!({"input": TEXTS}).to_string();
    let head = format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\naccept: application/octet-stream\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let end = bytes
        .windows(4)
        .position(|four| four == b"\r\n\r\n")
        .unwrap();
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let four = bytes[end + 4..].chunks_exact(4);
    let raw: Vec<f32> = four
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    assert_eq!(raw, rows.concat());
    let tokens = all["usage"]["total_tokens"].as_u64().unwrap();
    for line in [
        "x-rows: 3".to_owned(),
        format!("x-width: {}", rows[0].len()),
        format!("x-tokens: {tokens}"),
    ] {
        assert!(head.contains(&line), "{head}");
    }

    let engine = Engine::from_checkpoint(checkpoint("st-mean")).device(DeviceChoice::Cpu);
    let engine = engine
        .invariant(true)
        .outputs(["last_hidden_state"])
        .build()
        .unwrap();
    let encoder = TextEncoder::open(&checkpoint("st-mean")).unwrap();
    let batch = encoder.encode(&TEXTS).unwrap();
    let outputs = engine.session().unwrap().run(&batch).unwrap();
    let (status, states) = post(to, "/embed_all", &json!({"inputs": TEXTS}));
    assert_eq!(status, 200, "{states}");
    for (at, len) in batch.lens().iter().enumerate() {
        let own: Vec<f32> = states[at]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(floats)
            .collect();
        assert_eq!(states[at].as_array().unwrap().len(), *len as usize);
        assert_eq!(own, outputs.sequence("last_hidden_state", at).unwrap());
    }

    let asked = json!({"inputs": {"source_sentence": TEXTS[0], "sentences": [TEXTS[1], TEXTS[0]]}});
    let (status, cosines) = post(to, "/similarity", &asked);
    assert_eq!(status, 200, "{cosines}");
    let dot: f32 = rows[0].iter().zip(&rows[1]).map(|(a, b)| a * b).sum();
    let cosines = floats(&cosines);
    assert!((cosines[0] - dot).abs() < 1e-5 && (cosines[1] - 1.0).abs() < 1e-6);

    let text = "The Tower, is high é";
    let (_, cut) = post(to, "/tokenize", &json!({"inputs": [text]}));
    let cut = cut[0].as_array().unwrap();
    let ids: Vec<u64> = cut.iter().map(|t| t["id"].as_u64().unwrap()).collect();
    let expected: Vec<u64> = encoder
        .encode(&[text])
        .unwrap()
        .token_ids()
        .iter()
        .map(|&id| id as u64)
        .collect();
    assert_eq!(ids, expected);
    assert!(cut[0]["special"] == true && cut[0]["start"].is_null());
    let token = &cut[1];
    let (start, stop) = (
        token["start"].as_u64().unwrap(),
        token["stop"].as_u64().unwrap(),
    );
    assert_eq!(token["text"], text[start as usize..stop as usize]);
    let (_, bare) = post(
        to,
        "/tokenize",
        &json!({"inputs": text, "add_special_tokens": false}),
    );
    assert_eq!(bare[0].as_array().unwrap().len(), cut.len() - 2);
    // A long text is not truncated.
    let (_, long) = post(to, "/tokenize", &json!({"inputs": "word ".repeat(2000)}));
    assert!(long[0].as_array().unwrap().len() > 2000);
    let ids = encoder.prompts(&["the tower is high"]).unwrap().remove(0);
    let (_, texts) = post(to, "/decode", &json!({"ids": [ids]}));
    assert_eq!(texts, json!([encoder.decode(&ids).unwrap()]));
    let (_, texts) = post(
        to,
        "/decode",
        &json!({"ids": ids, "skip_special_tokens": false}),
    );
    assert!(texts[0].as_str().unwrap().contains("[CLS]"), "{texts}");
    let (status, one) = get(to, "/v1/models/st%2Dmean");
    assert!(status == 200 && one.contains("\"id\":\"st-mean\""), "{one}");
    let (status, head, text) = ask_with(to, "HEAD", "/health", "", "");
    assert_eq!((status, text.as_str()), (200, ""), "{head}");
    server.shut_down(Duration::ZERO);
}

#[test]
fn pairs_that_are_conversations_score_as_the_folder_says() {
    let server = serving(&["ce-qwen"], quick());
    let file = checkpoint("ce-qwen").join("expected.json");
    let expected: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let run = &expected["runs"][0];
    let (pairs, scores) = (
        run["pairs"].as_array().unwrap(),
        run["values"].as_array().unwrap(),
    );
    // Send the first two pairs in one request, because they have the same query.
    let asked = json!({"query": pairs[0][0], "texts": [pairs[0][1], pairs[1][1]]});
    let (status, ranked) = post(server.address(), "/rerank", &asked);
    assert_eq!(status, 200, "{ranked}");
    assert_eq!(ranked.as_array().unwrap().len(), 2);
    for one in ranked.as_array().unwrap() {
        let want = scores[one["index"].as_u64().unwrap() as usize]
            .as_f64()
            .unwrap();
        assert!(
            (one["score"].as_f64().unwrap() - want).abs() < 1e-4,
            "{ranked} of {scores:?}"
        );
    }
    server.shut_down(Duration::ZERO);
}

#[test]
fn scores_of_text_embeddings_inference_are_its_own_and_have_the_labels_names() {
    let server = serving(&["ce-nli"], quick());
    let to = server.address();
    let pair = json!(["a premise", "a hypothesis"]);
    let scores = |raw: bool| {
        let asked = json!({"inputs": pair, "raw_scores": raw, "truncate": null});
        let (status, told) = post(to, "/predict", &asked);
        assert_eq!(status, 200, "{told}");
        let all = told.as_array().unwrap().iter();
        let all = all.map(|one| {
            let label = one["label"].as_str().unwrap().to_owned();
            (label, one["score"].as_f64().unwrap())
        });
        all.collect::<Vec<_>>()
    };
    let (raw, usual) = (scores(true), scores(false));
    let mut names: Vec<&str> = raw.iter().map(|(label, _)| label.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["contradiction", "entailment", "neutral"]);
    let sum: f64 = raw.iter().map(|(_, logit)| logit.exp()).sum();
    for ((label, logit), (same, score)) in raw.iter().zip(&usual) {
        assert_eq!(label, same);
        assert!(
            (logit.exp() / sum - score).abs() < 1e-6,
            "{raw:?} {usual:?}"
        );
    }
    server.shut_down(Duration::ZERO);
    // A model with one label, whose folder defines the logit itself as the score. TEI's route `/rerank` still applies the sigmoid, unless
    // `raw_scores` is true.
    let server = serving(&["ce-identity"], quick());
    let to = server.address();
    let ranked = |raw: bool| {
        let asked = json!({"query": "tower", "texts": ["rain", "a high tower"], "raw_scores": raw});
        let told = post(to, "/rerank", &asked).1;
        let score = |at: usize| told[at]["score"].as_f64().unwrap();
        [score(0), score(1)]
    };
    for (logit, score) in ranked(true).into_iter().zip(ranked(false)) {
        assert!((1.0 / (1.0 + (-logit).exp()) - score).abs() < 1e-6);
    }
    let cohere =
        json!({"model": "ce-identity", "query": "tower", "documents": ["rain", "a high tower"]});
    let cohere = post(to, "/v2/rerank", &cohere).1;
    let best = cohere["results"][0]["relevance_score"].as_f64().unwrap();
    assert!((best - ranked(true)[0]).abs() < 1e-6);
    server.shut_down(Duration::ZERO);
}

#[test]
fn a_connection_may_be_idle_for_longer_than_a_request_may_take_to_come() {
    let choice = HttpChoice {
        header_time: Duration::from_millis(200),
        ..quick()
    };
    let server = serving(&["st-mean"], choice);
    let to = server.address();
    let mut stream = connect(to);
    let asked = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
    let answered = |stream: &mut TcpStream| {
        let (mut all, mut part) = (Vec::new(), [0; 512]);
        while !all.ends_with(b"}") && !all.ends_with(b"ok") {
            match stream.read(&mut part).unwrap() {
                0 => return false,
                n => all.extend(&part[..n]),
            }
        }
        all.starts_with(b"HTTP/1.1 200")
    };
    for _ in 0..2 {
        stream.write_all(asked.as_bytes()).unwrap();
        assert!(answered(&mut stream));
        thread::sleep(Duration::from_millis(700));
    }
    // Begin another request on this connection, but never complete it. The server closes the connection after a time limit.
    let began = Instant::now();
    stream.write_all(b"GET /hea").unwrap();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(began.elapsed() < Duration::from_secs(10));
    server.shut_down(Duration::ZERO);
}

#[test]
fn large_bodies_leave_the_thread_to_others() {
    let choice = HttpChoice {
        threads: 1,
        ..quick()
    };
    let server = serving(&["st-mean"], choice);
    let to = server.address();
    // The error is in the last input, so the server must parse the whole body. A list with more inputs would be refused for its length.
    let mut inputs = vec![json!("a".repeat(60)); 100_000];
    inputs.push(json!(true));
    let body = json!({"input": inputs}).to_string();
    let clients: Vec<_> = (0..3)
        .map(|_| {
            let body = body.clone();
            thread::spawn(move || ask_with(to, "POST", "/v1/embeddings", "", &body).0)
        })
        .collect();
    let mut slowest = Duration::ZERO;
    while clients.iter().any(|client| !client.is_finished()) {
        let began = Instant::now();
        assert_eq!(get(to, "/health").0, 200);
        slowest = slowest.max(began.elapsed());
        thread::sleep(Duration::from_millis(5));
    }
    for client in clients {
        assert_eq!(client.join().unwrap(), 400);
    }
    assert!(slowest < Duration::from_millis(500), "{slowest:?}");
    server.shut_down(Duration::ZERO);
}

#[test]
fn pairs_are_ranked_as_they_score() {
    let server = serving(&["ce-one"], quick());
    let to = server.address();
    let documents = ["rain", "a high tower", "a small bird"];
    let (status, tei) = post(
        to,
        "/rerank",
        &json!({"query": "tower", "texts": documents}),
    );
    assert_eq!(status, 200, "{tei}");
    let scores: Vec<f64> = tei
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["score"].as_f64().unwrap())
        .collect();
    assert!(scores.is_sorted_by(|a, b| a >= b));
    let asked =
        json!({"query": "tower", "documents": documents, "top_n": 2, "return_documents": true});
    let (_, jina) = post(to, "/v1/rerank", &asked);
    let results = jina["results"].as_array().unwrap();
    assert_eq!(results.len(), 2);
    for (ours, theirs) in results.iter().zip(tei.as_array().unwrap()) {
        assert_eq!(ours["index"], theirs["index"]);
        assert_eq!(ours["relevance_score"], theirs["score"]);
        let index = ours["index"].as_u64().unwrap() as usize;
        assert_eq!(ours["document"]["text"], documents[index]);
    }
    let asked = json!({"model": "ce-one", "query": "tower", "documents": documents, "top_n": 2});
    let (_, cohere) = post(to, "/v2/rerank", &asked);
    for (ours, jina) in cohere["results"].as_array().unwrap().iter().zip(results) {
        assert_eq!(ours["relevance_score"], jina["relevance_score"]);
        assert_eq!(ours["index"], jina["index"]);
    }
    assert_eq!(cohere["meta"]["api_version"]["version"], "2");
    // A document that is truncated to one token has the same score as the text of that token.
    let text = "tower of stone";
    let (_, cut) = post(
        to,
        "/tokenize",
        &json!({"inputs": text, "add_special_tokens": false}),
    );
    let end = cut[0][0]["stop"].as_u64().unwrap() as usize;
    let one =
        json!({"model": "ce-one", "query": "tower", "documents": [text], "max_tokens_per_doc": 1});
    let short = json!({"model": "ce-one", "query": "tower", "documents": [&text[..end]]});
    let (one, short) = (
        post(to, "/v2/rerank", &one).1,
        post(to, "/v2/rerank", &short).1,
    );
    assert_eq!(one["results"], short["results"]);
    let pairs: Vec<[&str; 2]> = documents.iter().map(|d| ["tower", *d]).collect();
    let (_, predicted) = post(to, "/predict", &json!({"inputs": pairs}));
    for row in tei.as_array().unwrap() {
        let index = row["index"].as_u64().unwrap() as usize;
        assert_eq!(predicted[index][0]["score"], row["score"]);
        assert_eq!(predicted[index][0]["label"], "LABEL_0");
    }
    server.shut_down(Duration::ZERO);
}

#[test]
fn slow_half_closed_and_oversized_clients_do_not_keep_others_waiting() {
    let choice = HttpChoice {
        header_time: Duration::from_millis(300),
        body_time: Duration::from_millis(300),
        max_body: 1 << 16,
        ..quick()
    };
    let server = serving(&["st-mean"], choice);
    let to = server.address();
    let begun = |text: &str| {
        let mut stream = connect(to);
        stream.write_all(text.as_bytes()).unwrap();
        stream
    };
    let headers = begun("POST /v1/embeddings HTTP/1.1\r\nhost: x\r\n");
    let body = begun(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 50\r\n\r\n{",
    );
    let half = begun("POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{");
    half.shutdown(std::net::Shutdown::Write).unwrap();
    let large = begun(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 1000000000\r\n\r\n",
    );
    let junk = begun("\x00\x01\x02\r\n\r\n");
    assert_eq!(post(to, "/v1/embeddings", &json!({"input": "x"})).0, 200);
    let began = Instant::now();
    let (status, _, text) = read(body);
    assert_eq!(status, 408, "{text}");
    assert!(
        text.contains("the body did not arrive within 0.3 s"),
        "{text}"
    );
    let (status, _, text) = read(large);
    assert_eq!(status, 413, "{text}");
    assert!(
        text.contains("the body has more than 65536 bytes; split the request"),
        "{text}"
    );
    // The server closes these connections, because they have no complete request.
    for mut stream in [headers, half, junk] {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    assert!(began.elapsed() < Duration::from_secs(10));
    // The limit also applies to bodies that are sent in chunks.
    let chunk = "x".repeat(1 << 17);
    let text = format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{chunk}\r\n0\r\n\r\n",
        chunk.len()
    );
    let mut stream = connect(to);
    let _ = stream.write_all(text.as_bytes());
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
    server.shut_down(Duration::ZERO);
}

#[test]
fn who_sends_no_more_is_answered_and_who_reads_nothing_is_let_go() {
    let choice = HttpChoice {
        write_time: Duration::from_millis(300),
        ..quick()
    };
    let server = serving(&["st-mean", "writer"], choice);
    let to = server.address();
    for (path, body) in [
        (
            "/v1/embeddings",
            json!({"input": vec!["some words"; 2_000]}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "One", "max_tokens": 40, "n": 8}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "One", "max_tokens": 40, "n": 8, "stream": true}),
        ),
    ] {
        let (mut stream, text) = (connect(to), body.to_string());
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{text}",
            text.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        // Ignore `100 Continue`, which the server may send before the response to probe the connection.
        let answer = answer.replace("HTTP/1.1 100 Continue\r\n\r\n", "");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let end = match body["stream"] == true {
            true => "data: [DONE]\n\n\r\n0\r\n\r\n",
            false => "}",
        };
        assert!(answer.ends_with(end), "{answer}");
    }
    // Request many responses. Together they are larger than the socket buffers.
    let mut stream = connect(to);
    let n = 1_000;
    let asked = "GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n".repeat(n);
    stream.write_all(asked.as_bytes()).unwrap();
    let size = get(to, "/openapi.json").1.len();
    assert!(n * size > 20 << 20, "{size}");
    // The client reads none of the responses. The server must close the connection, which makes further writes fail.
    let began = Instant::now();
    while stream.write_all(b"x").is_ok() {
        assert!(began.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(50));
    }
    server.shut_down(Duration::ZERO);
}

/// Returns a model whose KV cache has room for two texts of 40 tokens at a time. `queue` limits the estimated time of the waiting texts.
fn narrow(queue: Duration) -> Model {
    let choice = ModelChoice {
        cache_bytes: Some(400_000),
        ..choice("writer", false, queue)
    };
    Model::open(choice).unwrap()
}

fn texts_wait(to: SocketAddr) -> bool {
    let none = "gemmule_queue_requests{model=\"writer\"} 0\n";
    !get(to, "/metrics").1.contains(none)
}

/// Waits until texts of the running thread `client` are in the queue.
fn until_texts_wait<T>(to: SocketAddr, client: &thread::JoinHandle<T>) {
    while !texts_wait(to) {
        assert!(!client.is_finished());
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_outlives_a_drain_is_told_so() {
    let choice = HttpChoice {
        drain_limit: Duration::from_millis(1),
        ..quick()
    };
    let server = serving_models(vec![narrow(Duration::from_secs(10))], choice);
    let to = server.address();
    let body = json!({"prompt": "One", "max_tokens": 40, "n": 128}).to_string();
    let client = thread::spawn(move || ask_with(to, "POST", "/v1/completions", "", &body));
    until_texts_wait(to, &client);
    server.shut_down(Duration::ZERO);
    let (status, _, text) = client.join().unwrap();
    assert_eq!(status, 503, "{text}");
    assert!(
        text.contains("the server is not ready: it is shutting down; another server may answer"),
        "{text}"
    );
}

#[test]
fn while_models_are_loaded_probes_are_answered_and_a_signal_ends_it() {
    for is_ended in [true, false] {
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = port.local_addr().unwrap();
        drop(port);
        // Without a cost table, the server measures the costs of batches for several seconds when it starts.
        let weights = checkpoint("st-mean");
        let mut child = Command::new(env!("CARGO_BIN_EXE_gemmule"))
            .args([
                "serve",
                "--device",
                "cpu",
                "--drain-delay-ms",
                "0",
                "--weights",
            ])
            .arg(weights)
            .args(["--port", &to.port().to_string()])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let began = Instant::now();
        while TcpStream::connect(to).is_err() {
            assert!(began.elapsed() < Duration::from_secs(30));
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(get(to, "/health").0, 200);
        let loading =
            "the server is not ready: its models are being loaded; another server may answer";
        let (status, text) = get(to, "/ready");
        assert!(status == 503 && text.contains(loading), "{text}");
        let (status, told) = post(to, "/v1/embeddings", &json!({"input": "x"}));
        assert_eq!((status, &told["error"]["message"]), (503, &json!(loading)));
        if !is_ended {
            while get(to, "/ready").0 != 200 {
                assert!(began.elapsed() < Duration::from_secs(60));
                thread::sleep(Duration::from_millis(20));
            }
            assert_eq!(post(to, "/v1/embeddings", &json!({"input": "x"})).0, 200);
        }
        let sent = Command::new("kill").arg(child.id().to_string()).status();
        assert!(sent.unwrap().success());
        let ended = child.wait().unwrap();
        assert!(ended.success(), "{ended}");
    }
}

#[test]
fn a_stream_has_a_deadline_and_texts_that_would_wait_long_are_refused() {
    let server = serving_models(vec![narrow(Duration::ZERO)], quick());
    let to = server.address();
    let body = |stream: bool| {
        json!({"prompt": "One", "max_tokens": 40, "n": 64, "temperature": 1, "seed": 1, "stream": stream})
            .to_string()
    };
    let began = Instant::now();
    let ask = |headers: &str, stream: bool| {
        ask_with(to, "POST", "/v1/completions", headers, &body(stream))
    };
    assert_eq!(ask("", true).0, 200);
    let part = began.elapsed().as_millis() / 4;
    let (status, _, text) = ask(&format!("x-request-timeout-ms: {part}\r\n"), true);
    assert_eq!(status, 200, "{text}");
    assert!(
        text.contains(
            "the request's deadline passed before its response was ready; send it with a later deadline"
        ),
        "{text}"
    );
    // Texts whose deadline has passed leave the queue at the next step. Wait for that.
    while texts_wait(to) {
        thread::sleep(Duration::from_millis(1));
    }
    // The server now knows its generation rate. It can therefore estimate waiting times, and refuses requests while other requests wait.
    let body = body(false);
    let busy = thread::spawn(move || ask_with(to, "POST", "/v1/completions", "", &body).0);
    until_texts_wait(to, &busy);
    let mut refused = 0;
    while !busy.is_finished() {
        let asked = "{\"prompt\": \"One\", \"max_tokens\": 1}";
        // A request may also be admitted instead of refused. Its deadline ensures that the client does not wait until all other texts are
        // complete.
        let soon = "x-request-timeout-ms: 50\r\n";
        let (status, head, text) = ask_with(to, "POST", "/v1/completions", soon, asked);
        match status {
            200 | 504 => {}
            429 => {
                assert!(head.contains("retry-after-ms: "), "{head}");
                refused += 1;
            }
            other => panic!("{other} {text}"),
        }
    }
    assert_eq!((busy.join().unwrap(), refused > 0), (200, true));
    server.shut_down(Duration::ZERO);
}

#[test]
fn texts_that_have_room_do_not_wait_however_short_the_queue_may_be() {
    let writer = Model::open(ModelChoice {
        // The cache has room for all texts at once.
        cache_bytes: Some(64 << 20),
        ..choice("writer", false, Duration::ZERO)
    });
    let server = serving_models(vec![writer.unwrap()], quick());
    let to = server.address();
    let ask = move |n: usize| {
        let body = json!({"prompt": "One", "max_tokens": 40, "n": n, "temperature": 1});
        ask_with(to, "POST", "/v1/completions", "", &body.to_string())
    };
    // Until now, the server has measured only steps with a single text. A step with many texts takes little longer, so the server must
    // admit all of these texts.
    assert_eq!(ask(1).0, 200);
    let clients: Vec<_> = (0..24).map(|_| thread::spawn(move || ask(4))).collect();
    for client in clients {
        let (status, _, text) = client.join().unwrap();
        assert_eq!(status, 200, "{text}");
    }
    server.shut_down(Duration::ZERO);
}

#[test]
fn a_writer_is_served_with_a_cache_in_fp8() {
    let writer = Model::open(ModelChoice {
        kv_dtype: KvCacheChoice::Fp8,
        ..choice("writer", true, Duration::from_secs(10))
    });
    let writer = writer.unwrap();
    assert_eq!(writer.kv_format, Some(Format::E4m3));
    let server = serving_models(vec![writer], quick());
    let prompt = "Lily was bored, so";
    let body = json!({"prompt": prompt, "max_tokens": 20, "temperature": 0}).to_string();
    let (status, _, answer) = ask_with(server.address(), "POST", "/v1/completions", "", &body);
    assert_eq!(status, 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let text = answer["choices"][0]["text"].as_str().unwrap();
    let engine = Engine::from_checkpoint(checkpoint("writer"))
        .device(DeviceChoice::Cpu)
        .kv_cache(Format::E4m3)
        .generating();
    let all = engine.build().unwrap().generate_text(prompt).unwrap();
    assert!(!text.is_empty() && all.starts_with(text), "{text}: {all}");
    server.shut_down(Duration::ZERO);
}

#[test]
fn metrics_are_those_that_the_documentation_has() {
    let embeds = Model::open(ModelChoice {
        cache: Some(cache()),
        ..choice("st-mean", true, Duration::from_secs(10))
    });
    let models = vec![
        embeds.unwrap(),
        model("writer", true, Duration::from_secs(10)),
    ];
    let device = models[0].device.clone();
    let server = serving_models(models, quick());
    let to = server.address();
    let asked = json!({"input": ["one", "two"]});
    assert_eq!(post(to, "/v1/embeddings", &asked).0, 200);
    let asked = json!({"prompt": "One", "max_tokens": 2});
    assert_eq!(post(to, "/v1/completions", &asked).0, 200);
    assert_eq!(post(to, "/v1/embeddings", &json!({"input": []})).0, 400);
    let counts = get(to, "/metrics").1;
    let page = include_str!("../../docs/metrics.md");
    let mut told: Vec<(&str, &str)> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `gemmule_")?.split_once("` | "))
        .map(|(name, rest)| (name, rest.split(" |").next().unwrap()))
        .collect();
    let types = counts.lines().filter_map(|line| {
        let line = line.strip_prefix("# TYPE gemmule_")?;
        line.split_once(' ')
    });
    let mut found: Vec<(&str, &str)> = types.collect();
    told.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, told);
    let counts = counts.replace(&device, "cpu");
    for line in [
        "requests_total{route=\"/v1/embeddings\",code=\"200\",model=\"st-mean\"} 1",
        "requests_total{route=\"/v1/completions\",code=\"200\",model=\"writer\"} 1",
        "requests_total{route=\"/v1/embeddings\",code=\"400\",model=\"st-mean\"} 1",
        "stage_seconds_count{model=\"st-mean\",stage=\"serialize\"} 1",
        "batch_seconds_count{model=\"st-mean\",device=\"cpu\"} ",
        "batch_tokens_count{model=\"st-mean\"} ",
        "memory_bytes{model=\"writer\",device=\"cpu\",kind=\"weights\"} ",
        "memory_bytes{model=\"st-mean\",device=\"cpu\",kind=\"batch\"} 1073741824",
        "ready 1",
    ] {
        assert!(
            counts.contains(&format!("\ngemmule_{line}")),
            "{line}\n{counts}"
        );
    }
    server.shut_down(Duration::ZERO);
}

fn cache() -> Arc<gemmule::serve::Cache> {
    let choice = gemmule::serve::CacheChoice {
        memory_bytes: 1 << 20,
        file: None,
        #[cfg(feature = "shared-cache")]
        shared: None,
    };
    Arc::new(gemmule::serve::Cache::open(&choice).unwrap())
}

#[test]
fn keys_let_those_in_who_have_one_and_balancers() {
    // The SHA-256 digest of the key `secret`.
    let keys = Keys::parse(
        "# comment\nalice 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\n",
    );
    let choice = HttpChoice {
        keys: Some(keys.unwrap()),
        ..quick()
    };
    let server = serving(&["st-mean"], choice);
    let to = server.address();
    let ask = |headers: &str| ask_with(to, "POST", "/v1/embeddings", headers, "{\"input\": \"x\"}");
    for scheme in ["Bearer", "bearer", "BEARER", "Bearer  ", "bearer\t"] {
        let header = format!("authorization: {scheme} secret\r\n");
        assert_eq!(ask(&header).0, 200, "{scheme}");
    }
    for wrong in ["secret", "Basic secret", "Bearersecret", "Bearer"] {
        let header = format!("authorization: {wrong}\r\n");
        assert_eq!(ask(&header).0, 401, "{wrong}");
    }
    let (status, _, text) = ask("authorization: Bearer other\r\n");
    assert_eq!(status, 401);
    assert!(text.contains("invalid_api_key"), "{text}");
    assert_eq!(ask("").0, 401);
    for path in ["/health", "/ready", "/metrics"] {
        assert_eq!(get(to, path).0, 200);
    }
    assert_eq!(get(to, "/v1/models").0, 401);
    server.shut_down(Duration::ZERO);
    for (text, error) in [
        (
            "",
            "there is no key in it, so every request would be refused; add at least one",
        ),
        (
            "alice",
            "line 1 is not a key; expected a name and the SHA-256 of the key in 64 hexadecimal digits, as `printf %s KEY | sha256sum` writes it",
        ),
        (
            "alice 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b priority=3",
            "line 1 has `priority=3` after the key; expected `max-priority=N`, with N from 0 to 255, the max `x-priority` of requests with this key",
        ),
        (
            "alice 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b max-priority=256",
            "line 1 has `max-priority=256` after the key; expected `max-priority=N`, with N from 0 to 255, the max `x-priority` of requests with this key",
        ),
    ] {
        assert_eq!(Keys::parse(text).unwrap_err().to_string(), error);
    }
}

#[test]
fn keys_and_models_are_reloaded_together_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    // The SHA-256 digests of the keys `secret` and `password`.
    let secret = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
    let password = "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8";
    std::fs::write(&file, format!("alice {secret}\n")).unwrap();
    let choice = HttpChoice {
        keys: Some(Keys::open(&file).unwrap()),
        ..quick()
    };
    let open = || vec![model("st-mean", true, Duration::from_secs(10))];
    let is_broken = Arc::new(AtomicBool::new(false));
    let breaks = Arc::clone(&is_broken);
    let models = Models::reloadable(open(), move |_| match breaks.load(Ordering::Relaxed) {
        true => Err("its folder is gone".to_owned()),
        false => Ok(open()),
    });
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::start(socket, models, choice).unwrap();
    let to = server.address();
    let admin = TcpListener::bind("127.0.0.1:0").unwrap();
    let admin = server.listen_admin(admin).unwrap();
    let status = |key: &str| {
        let header = format!("authorization: Bearer {key}\r\n");
        ask_with(to, "POST", "/v1/embeddings", &header, "{\"input\": \"x\"}").0
    };
    assert_eq!((status("secret"), status("password")), (200, 401));
    std::fs::write(&file, format!("alice {password}\n")).unwrap();
    assert_eq!((status("secret"), status("password")), (200, 401));
    // The models cannot be loaded, so the reload fails, although the file of keys is valid.
    is_broken.store(true, Ordering::Relaxed);
    let (code, told) = post(admin, "/admin/reload", &json!({}));
    let expected = "the reload failed and changed nothing: its folder is gone";
    assert_eq!((code, &told["error"]["message"]), (500, &json!(expected)));
    assert_eq!((status("secret"), status("password")), (200, 401));
    is_broken.store(false, Ordering::Relaxed);
    assert_eq!(post(admin, "/admin/reload", &json!({})).0, 200);
    assert_eq!((status("secret"), status("password")), (401, 200));
    std::fs::write(&file, "# nobody\n").unwrap();
    let (code, told) = post(admin, "/admin/reload", &json!({}));
    let expected = format!(
        "the reload failed and changed nothing: `{}`: there is no key in it, so every request would be refused; add at least one",
        file.display()
    );
    assert_eq!((code, &told["error"]["message"]), (500, &json!(expected)));
    assert_eq!((status("secret"), status("password")), (401, 200));
    let (code, told) = post(admin, "/admin/nothing", &json!({}));
    assert_eq!(code, 404);
    assert_eq!(
        told["error"]["message"],
        "there is no such command; there is POST /admin/reload"
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn a_full_queue_and_a_late_deadline_are_told_at_once() {
    let models = Models::new(vec![model("st-mean", false, Duration::ZERO)]);
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::start(socket, models, quick()).unwrap();
    let to = server.address();
    // With a queue limit of zero, requests are admitted only if no other request waits. Repeat a large request until it is admitted. While
    // it runs, other requests are refused.
    let many: Vec<String> = (0..3_000).map(|i| format!("text {i} of many")).collect();
    let busy = thread::spawn(move || {
        let asked = json!({"input": many});
        loop {
            let (status, answer) = post(to, "/v1/embeddings", &asked);
            if status != 429 {
                return (status, answer);
            }
        }
    });
    let mut refused = 0;
    while !busy.is_finished() {
        let (status, head, text) = ask_with(to, "POST", "/v1/embeddings", "", "{\"input\": \"x\"}");
        match status {
            200 => {}
            429 => {
                refused += 1;
                assert!(head.contains("retry-after: ") && head.contains("retry-after-ms: "));
                assert!(text.contains("\"code\":\"overloaded\""), "{text}");
            }
            other => panic!("{other} {text}"),
        }
    }
    let (status, answer) = busy.join().unwrap();
    assert_eq!(
        (status, answer["data"].as_array().unwrap().len()),
        (200, 3_000)
    );
    assert!(refused > 0);
    let counts = get(to, "/metrics").1;
    assert!(counts.contains("gemmule_refused_total{model=\"st-mean\",reason=\"overloaded\"}"));
    server.shut_down(Duration::ZERO);
    // No batch can meet this deadline, because tokenizing the long list takes longer than a millisecond.
    let server = serving(&["st-mean"], quick());
    let many: Vec<String> = (0..3_000).map(|i| format!("text {i} of many")).collect();
    let (status, _, text) = ask_with(
        server.address(),
        "POST",
        "/v1/embeddings",
        "x-request-timeout-ms: 1\r\n",
        &json!({"input": many}).to_string(),
    );
    assert!([429, 504].contains(&status), "{status} {text}");
    server.shut_down(Duration::ZERO);
}

#[test]
fn clients_that_leave_are_forgotten_and_a_drain_answers_all_that_came() {
    let server = serving(&["st-mean"], quick());
    let to = server.address();
    let body = json!({"input": vec!["some words"; 20_000]}).to_string();
    for _ in 0..3 {
        let mut stream = connect(to);
        let head = format!(
            "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        thread::sleep(Duration::from_millis(30));
        drop(stream);
    }
    let began = Instant::now();
    let cancelled = || {
        let counts = get(to, "/metrics").1;
        let (_, n) = counts
            .split_once("gemmule_cancelled_total{model=\"st-mean\"} ")
            .unwrap();
        n.lines().next().unwrap().parse::<u64>().unwrap()
    };
    while cancelled() == 0 {
        assert!(began.elapsed() < Duration::from_secs(20));
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(post(to, "/v1/embeddings", &json!({"input": "x"})).0, 200);
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let body = json!({"input": vec!["words"; 200]});
            let mut stream = connect(to);
            let text = body.to_string();
            let head = format!(
                "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{text}",
                text.len()
            );
            stream.write_all(head.as_bytes()).unwrap();
            thread::spawn(move || read(stream))
        })
        .collect();
    // Wait until the server has received all requests.
    thread::sleep(Duration::from_millis(100));
    server.shut_down(Duration::ZERO);
    for client in clients {
        let (status, _, text) = client.join().unwrap();
        assert_eq!(status, 200, "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(answer["data"].as_array().unwrap().len(), 200);
    }
    assert!(TcpStream::connect(to).is_err());
}

/// Returns a copy of a checkpoint with a NaN in the embedding of the token `token`.
fn poisoned(name: &str, token: u32) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy(&checkpoint(name), folder.path());
    let file = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let table = header
        .as_object()
        .unwrap()
        .iter()
        .find(|(name, _)| name.ends_with("word_embeddings.weight"));
    let table = table.unwrap().1;
    let at = 8 + n + table["data_offsets"][0].as_u64().unwrap() as usize;
    assert_eq!(table["dtype"], "F16");
    let row = 2 * table["shape"][1].as_u64().unwrap() as usize;
    let at = at + token as usize * row;
    // A NaN in f16.
    bytes[at..at + 2].copy_from_slice(&0x7e00_u16.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    folder
}

fn copy(from: &Path, to: &Path) {
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        let target = to.join(file.file_name());
        match file.file_type().unwrap().is_dir() {
            true => {
                std::fs::create_dir_all(&target).unwrap();
                copy(&file.path(), &target);
            }
            false => drop(std::fs::copy(file.path(), target).unwrap()),
        }
    }
}

#[test]
fn a_poisonous_member_fails_alone() {
    let encoder = TextEncoder::open(&checkpoint("st-mean")).unwrap();
    let texts = ["a small bird", "the tower is high", "a high tower", "words"];
    let ids = |texts: &[&str]| encoder.prompts(texts).unwrap().concat();
    // Poison a token of `rain` that occurs in no other text.
    let others = [ids(&texts), ids(&["some words"])].concat();
    let own = ids(&["rain"]).into_iter().find(|id| !others.contains(id));
    let folder = poisoned("st-mean", own.unwrap());
    let mut choice = choice("st-mean", true, Duration::from_secs(10));
    choice.folder = folder.path().to_owned();
    let server = serving_models(vec![Model::open(choice).unwrap()], quick());
    let to = server.address();
    let good = |text: &str| {
        floats(&post(to, "/v1/embeddings", &json!({"input": text})).1["data"][0]["embedding"])
    };
    let expected: Vec<Vec<f32>> = texts.iter().map(|text| good(text)).collect();
    // While this large list runs, the next requests wait, and then form one batch.
    let large = thread::spawn(move || {
        post(
            to,
            "/v1/embeddings",
            &json!({"input": vec!["some words"; 2_000]}),
        )
        .0
    });
    thread::sleep(Duration::from_millis(20));
    let bad = thread::spawn(move || {
        let openai = ask_with(to, "POST", "/v1/embeddings", "", "{\"input\": \"rain\"}");
        let tei = ask_with(to, "POST", "/embed", "", "{\"inputs\": \"rain\"}");
        let similar = "{\"inputs\": {\"source_sentence\": \"rain\", \"sentences\": [\"words\"]}}";
        let similar = ask_with(to, "POST", "/similarity", "", similar);
        [openai, tei, similar]
    });
    let others: Vec<_> = texts
        .iter()
        .map(|text| {
            let text = text.to_string();
            thread::spawn(move || post(to, "/v1/embeddings", &json!({"input": text})))
        })
        .collect();
    for (other, expected) in others.into_iter().zip(&expected) {
        let (status, answer) = other.join().unwrap();
        assert_eq!(status, 200, "{answer}");
        assert_eq!(&floats(&answer["data"][0]["embedding"]), expected);
    }
    assert_eq!(large.join().unwrap(), 200);
    let [openai, tei, similar] = bad.join().unwrap();
    let problem = "a batch failed: the output `sentence_embedding` contains ";
    assert!(
        openai.0 == 500 && openai.2.contains(problem),
        "{}",
        openai.2
    );
    assert!(openai.2.contains("\"code\":\"internal\""), "{}", openai.2);
    assert!(
        tei.0 == 424 && tei.2.contains("\"error_type\":\"backend\""),
        "{}",
        tei.2
    );
    assert_eq!(similar.0, 424);
    // Token vectors are also checked for NaN.
    let (status, _, text) = ask_with(to, "POST", "/embed_all", "", "{\"inputs\": \"rain\"}");
    assert_eq!(status, 424, "{text}");
    server.shut_down(Duration::ZERO);
}

#[test]
fn clients_of_a_byte_now_and_then_and_lists_of_any_length_are_answered() {
    let choice = HttpChoice {
        header_time: Duration::from_millis(400),
        body_time: Duration::from_millis(400),
        ..quick()
    };
    let models = vec![model("st-mean", false, Duration::from_secs(60))];
    let server = serving_models(models, choice);
    let to = server.address();
    // A client that sends one byte at a time, so that its request takes far longer than the time limits of the server.
    let slow = |head: &'static str, rest: &'static str| {
        let mut stream = connect(to);
        stream.write_all(head.as_bytes()).unwrap();
        let answer = stream.try_clone().unwrap();
        thread::spawn(move || {
            for byte in rest.bytes().cycle().take(400) {
                if stream.write_all(&[byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_millis(50));
            }
        });
        answer
    };
    let headers = slow("POST /v1/embeddings HTTP/1.1\r\n", "x");
    let body = slow(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 1000\r\n\r\n",
        " ",
    );
    let tei = slow(
        "POST /embed HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 1000\r\n\r\n",
        " ",
    );
    let many = json!({"input": vec!["x"; 100_000], "dimensions": 1});
    let (status, answer) = post(to, "/v1/embeddings", &many);
    assert_eq!(status, 200, "{answer}");
    let data = answer["data"].as_array().unwrap();
    assert_eq!(data.len(), 100_000);
    assert!(
        data.iter()
            .all(|row| row["embedding"] == data[0]["embedding"])
    );
    let mut answer = [0; 12];
    for mut stream in [body, tei] {
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.1 408");
    }
    let mut rest = Vec::new();
    let mut headers = headers;
    let _ = headers.read_to_end(&mut rest);
    assert!(
        rest.is_empty() || rest.starts_with(b"HTTP/1.1 408"),
        "{rest:?}"
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn every_status_that_the_document_has_is_one_that_is_given() {
    let server = serving(&["st-mean", "ce-one", "writer", "translator"], quick());
    let to = server.address();
    let document: Value = serde_json::from_str(&get(to, "/openapi.json").1).unwrap();
    // Any route may return these errors. Other tests provoke them.
    let anywhere: [&str; 9] = [
        "401", "408", "413", "415", "424", "429", "500", "503", "504",
    ];
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let statuses = operation["responses"].as_object().unwrap();
            let asked = |path: &str, body: &str| {
                ask_with(to, &method.to_uppercase(), path, "", body)
                    .0
                    .to_string()
            };
            let mut seen = vec![asked(path, "[")];
            if path.ends_with("{model}") {
                seen.push(asked("/v1/models/st-mean", ""));
            }
            // No route supports all of these models, so at least one of the requests is refused because of its model.
            for model in ["st-mean", "ce-one", "writer", "translator", "none"] {
                let mut body = json!({
                    "model": model, "input": "x", "inputs": "x", "prompt": "x", "query": "x", "texts": ["x"], "documents": ["x"],
                    "messages": [{"role": "user", "content": "x"}], "ids": [5], "text": "7", "max_tokens": 1,
                });
                let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
                let known = schema["anyOf"].get(0).unwrap_or(schema)["properties"].clone();
                let fields = body.as_object_mut().unwrap();
                fields.retain(|name, _| !known[name.as_str()].is_null());
                seen.push(asked(path, &body.to_string()));
            }
            let similar = json!({"inputs": {"source_sentence": "x", "sentences": ["x"]}});
            seen.push(asked(path, &similar.to_string()));
            let mut other = similar;
            other["model"] = json!("none");
            seen.push(asked(path, &other.to_string()));
            for status in &seen {
                assert!(statuses.contains_key(status), "{path} gave {status}");
            }
            for status in statuses.keys() {
                let is_given = seen.contains(status) || anywhere.contains(&status.as_str());
                // This server cannot return all documented statuses of these routes. Conversations need a chat template, and no model of
                // this server has sparse weights, token vectors, or a head for entities, masked tokens, labels or answers.
                let unknown = [
                    "/v1/chat/completions",
                    "/embed_sparse",
                    "/v1/multi-vector",
                    "/v1/token-classification",
                    "/predict_tokens",
                    "/v1/fill-mask",
                    "/v1/zero-shot-classification",
                    "/v1/question-answering",
                ];
                let is_known = unknown.contains(&path.as_str());
                assert!(is_given || is_known, "{path} {status} {seen:?}");
            }
        }
    }
    server.shut_down(Duration::ZERO);
}

#[test]
fn models_are_replaced_without_a_lost_request() {
    let open = |folder: &str| {
        let mut choice = choice(folder, true, Duration::from_secs(10));
        choice.name = "served".to_owned();
        Model::open(choice).unwrap()
    };
    let vector = |folder: &str| {
        let server = serving_models(vec![open(folder)], quick());
        let (_, answer) = post(
            server.address(),
            "/v1/embeddings",
            &json!({"input": TEXTS[1]}),
        );
        server.shut_down(Duration::ZERO);
        floats(&answer["data"][0]["embedding"])
    };
    let [first, second] = ["st-mean", "st-cls"].map(vector);
    assert_ne!(first, second);
    let is_broken = Arc::new(AtomicBool::new(false));
    let breaks = Arc::clone(&is_broken);
    let models = Models::reloadable(vec![open("st-mean")], move |previous| {
        assert_eq!(previous[0].name, "served");
        match breaks.load(Ordering::Relaxed) {
            true => Err("its folder is gone".to_owned()),
            false => Ok(vec![open("st-cls")]),
        }
    });
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::start(socket, models, quick()).unwrap();
    let admin = server
        .listen_admin(TcpListener::bind("127.0.0.1:0").unwrap())
        .unwrap();
    let to = server.address();
    let (is_over, was_replaced) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicBool::new(false)),
    );
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (is_over, was_replaced) = (Arc::clone(&is_over), Arc::clone(&was_replaced));
            let (first, second) = (first.clone(), second.clone());
            thread::spawn(move || {
                let mut n = [0; 2];
                while !is_over.load(Ordering::Relaxed) {
                    let was_new = was_replaced.load(Ordering::SeqCst);
                    let (status, answer) = post(
                        to,
                        "/v1/embeddings",
                        &json!({"input": TEXTS, "model": "served"}),
                    );
                    assert_eq!(status, 200, "{answer}");
                    let row = floats(&answer["data"][1]["embedding"]);
                    let is_new = row == second;
                    assert!(is_new || row == first && !was_new);
                    n[usize::from(is_new)] += 1;
                }
                n
            })
        })
        .collect();
    thread::sleep(Duration::from_millis(200));
    is_broken.store(true, Ordering::Relaxed);
    let (status, refused) = post(admin, "/admin/reload", &json!({}));
    assert_eq!(status, 500);
    assert_eq!(
        refused["error"]["message"],
        "the reload failed and changed nothing: its folder is gone"
    );
    is_broken.store(false, Ordering::Relaxed);
    let (status, reloaded) = post(admin, "/admin/reload", &json!({}));
    assert_eq!((status, &reloaded["models"]), (200, &json!(["served"])));
    was_replaced.store(true, Ordering::SeqCst);
    thread::sleep(Duration::from_millis(200));
    is_over.store(true, Ordering::Relaxed);
    let counts = clients.into_iter().map(|client| client.join().unwrap());
    let sum = counts.fold([0, 0], |a, b| [a[0] + b[0], a[1] + b[1]]);
    assert!(sum[0] > 0 && sum[1] > 0, "{sum:?}");
    // Admin commands are only available on the admin port, and the admin port has no other routes.
    assert_eq!(post(to, "/admin/reload", &json!({})).0, 404);
    assert_eq!(get(admin, "/admin/reload").0, 405);
    assert_eq!(get(admin, "/v1/models").0, 404);
    server.shut_down(Duration::ZERO);
    let server = serving(&["st-mean"], quick());
    let admin = server
        .listen_admin(TcpListener::bind("127.0.0.1:0").unwrap())
        .unwrap();
    let (status, fixed) = post(admin, "/admin/reload", &json!({}));
    assert_eq!(status, 404);
    assert_eq!(
        fixed["error"]["message"],
        "this server was started with models that it cannot load again"
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn models_take_turns_and_a_model_takes_several_devices() {
    let devices = Arc::new(Devices::default());
    let mut models = Vec::new();
    for (name, n) in [("st-mean", 2), ("ce-one", 1), ("writer", 1)] {
        let mut choice = choice(name, true, Duration::from_secs(10));
        choice.devices = vec![DeviceChoice::Cpu; n];
        choice.share = Some((Arc::clone(&devices), 1.0));
        models.push(Model::open(choice).unwrap());
    }
    let server = serving_models(models, quick());
    let to = server.address();
    let asked = [
        ("/v1/embeddings", json!({"input": vec!["some words"; 500]})),
        (
            "/rerank",
            json!({"query": "tower", "texts": vec!["a high tower"; 200]}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "One", "max_tokens": 20, "temperature": 0}),
        ),
    ];
    let alone = asked.clone().map(|(path, body)| post(to, path, &body).1);
    let clients: Vec<_> = (0..9)
        .map(|at| {
            let (path, body) = asked[at % 3].clone();
            thread::spawn(move || post(to, path, &body))
        })
        .collect();
    for (at, client) in clients.into_iter().enumerate() {
        let (status, answer) = client.join().unwrap();
        assert_eq!(status, 200, "{answer}");
        match at % 3 {
            0 => assert_eq!(answer["data"], alone[0]["data"]),
            1 => assert_eq!(answer, alone[1]),
            _ => assert_eq!(answer["choices"], alone[2]["choices"]),
        }
    }
    server.shut_down(Duration::ZERO);
    let mut choice = choice("writer", true, Duration::from_secs(10));
    choice.devices = vec![DeviceChoice::Cpu; 2];
    let error = Model::open(choice).map(|_| ()).unwrap_err().to_string();
    assert!(
        error.ends_with("generates text, which uses one device; name only one device for it"),
        "{error}"
    );
}

#[test]
fn the_status_page_asks_for_counts_that_are_there() {
    let server = serving(&["st-mean", "writer"], quick());
    let to = server.address();
    assert_eq!(post(to, "/v1/embeddings", &json!({"input": TEXTS})).0, 200);
    assert_eq!(post(to, "/v1/embeddings", &json!({})).0, 400);
    let (status, head, page) = ask_with(to, "GET", "/", "", "");
    assert!(
        status == 200 && head.contains("text/html") && head.contains("content-security-policy")
    );
    assert!(!page.contains("http://") && !page.contains("https://"));
    let counts: Value = serde_json::from_str(&get(to, "/status.json").1).unwrap();
    assert_eq!(counts["answers"], json!({"200": 1, "400": 1}));
    assert_eq!(
        (&counts["seconds"]["count"], &counts["ready"]),
        (&json!(2), &json!(true))
    );
    assert_eq!(counts["models"][0]["sequences"], 3);
    assert_eq!(counts["models"][1]["does"], "generates text");
    assert!(counts["models"][1]["full_batch"].is_null());
    assert!(counts["models"][0]["full_batch"].as_u64().unwrap() >= 32);
    server.shut_down(Duration::ZERO);
}

/// A server in a separate process, which is killed on drop.
struct Process {
    child: Child,
    to: SocketAddr,
    said: Arc<Mutex<String>>,
}

impl Process {
    fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_gemmule"))
            .args(["serve", "--port", "0"])
            .args(arguments)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said = Arc::new(Mutex::new(String::new()));
        let (lines, heard) = (
            BufReader::new(child.stderr.take().unwrap()),
            Arc::clone(&said),
        );
        thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                *heard.lock().unwrap() += &(line + "\n");
            }
        });
        let mut process = Self {
            child,
            to: SocketAddr::from(([127, 0, 0, 1], 0)),
            said,
        };
        let url = process.hears("listening on http://");
        process.to = url.parse().unwrap();
        process
    }

    /// Waits until the server has written a line that contains `words`, and returns the rest of the line.
    fn hears(&self, words: &str) -> String {
        let began = Instant::now();
        loop {
            let said = self.said.lock().unwrap().clone();
            if let Some((_, rest)) = said.split_once(words)
                && rest.contains('\n')
            {
                return rest.lines().next().unwrap_or_default().to_owned();
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{said}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill")
            .args([&format!("-{name}"), &pid])
            .status();
        assert!(sent.unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_file_of_models_is_read_again_on_sighup_and_sigterm_loses_no_request() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("serve.ron");
    std::fs::write(folder.path().join("costs.ron"), costs().to_ron().unwrap()).unwrap();
    let write = |checkpoints: &[&str]| {
        let models = checkpoints.iter().map(|name| {
            let weights = checkpoint(name);
            format!("(weights: {weights:?}, devices: [\"cpu\"], invariant: true, costs: \"costs.ron\"),\n")
        });
        std::fs::write(
            &file,
            format!("(models: [\n{}])", models.collect::<String>()),
        )
        .unwrap();
    };
    write(&["st-mean"]);
    let file = file.to_str().unwrap();
    let process = Process::start(&[
        "--config",
        file,
        "--drain-delay-ms",
        "2000",
        "--admin-port",
        "0",
    ]);
    let to = process.to;
    let names = || -> Vec<String> {
        let models: Value = serde_json::from_str(&get(to, "/v1/models").1).unwrap();
        let models = models["data"].as_array().unwrap().iter();
        models
            .map(|model| model["id"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(names(), ["st-mean"]);
    write(&["st-mean", "ce-one"]);
    process.signal("HUP");
    process.hears("the models are reloaded");
    let began = Instant::now();
    while names() != ["st-mean", "ce-one"] {
        assert!(began.elapsed() < Duration::from_secs(20));
        thread::sleep(Duration::from_millis(10));
    }
    // If the file of models is invalid, a reload changes nothing.
    std::fs::write(file, "(models: [\n  (weight: \"x\")])").unwrap();
    let admin = process.hears("commands on http://");
    let admin = admin.trim_end_matches("/admin/reload").parse().unwrap();
    // Repeat the request while the previous reload is still running (status 409).
    let (status, refused) = loop {
        let answer = post(admin, "/admin/reload", &json!({}));
        if answer.0 != 409 {
            break answer;
        }
        assert!(began.elapsed() < Duration::from_secs(20));
        thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(status, 500);
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("serve.ron`: line 2, column ") && message.contains("`weight`"),
        "{message}"
    );
    assert_eq!(names(), ["st-mean", "ce-one"]);

    // During a shutdown, admitted requests are answered. A connection that arrives too late gets a response before it sends anything.
    let ask = move |text: &str| {
        let mut stream = TcpStream::connect(to).ok()?;
        stream.write_all(text.as_bytes()).unwrap();
        Some(read(stream))
    };
    let clients: Vec<_> = (0..6)
        .map(|_| {
            thread::spawn(move || {
                let body = json!({"input": vec!["words"; 100]}).to_string();
                let length = body.len();
                let asked = format!(
                    "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
                );
                let ready = "GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
                let mut n = 0;
                // Like a load balancer, the client stops sending when the server is not ready.
                while ask(ready).is_some_and(|(status, ..)| status == 200) {
                    let Some((status, _, answer)) = ask(&asked) else {
                        break;
                    };
                    assert_eq!(status, 200, "{answer}");
                    let answer: Value = serde_json::from_str(&answer).unwrap();
                    assert_eq!(answer["data"].as_array().unwrap().len(), 100);
                    n += 1;
                }
                n
            })
        })
        .collect();
    thread::sleep(Duration::from_millis(300));
    process.signal("TERM");
    let n: usize = clients
        .into_iter()
        .map(|client| client.join().unwrap())
        .sum();
    assert!(n > 0);
    process.hears("shut down");
}

#[test]
fn a_deadline_that_no_batch_meets_and_one_that_passes_are_told_apart_and_writers_refuse_what_is_too_much()
 {
    let mut slow = choice("st-mean", false, Duration::from_secs(100));
    let mut table = costs();
    table.overhead = 1e6;
    slow.costs = Some(table);
    let models = vec![
        Model::open(slow).unwrap(),
        model("writer", false, Duration::from_secs(10)),
    ];
    let server = serving_models(models, quick());
    let to = server.address();
    let header = "x-request-timeout-ms: 300\r\n";
    for (path, body, text) in [
        (
            "/v1/embeddings",
            "{\"input\": \"x\"}",
            "\"code\":\"overloaded\"",
        ),
        (
            "/embed",
            "{\"inputs\": \"x\"}",
            "\"error_type\":\"overloaded\"",
        ),
    ] {
        let (status, head, told) = ask_with(to, "POST", path, header, body);
        assert_eq!(status, 429, "{told}");
        assert!(head.contains("retry-after: 1"), "{head}");
        assert!(told.contains("the request cannot be answered before its deadline; send it with a later deadline, or to another server"), "{told}");
        assert!(told.contains(text), "{told}");
    }
    let body = json!({"prompt": "One", "n": 128, "max_tokens": 40, "temperature": 1});
    let (status, _, told) = ask_with(
        to,
        "POST",
        "/v1/completions",
        "x-request-timeout-ms: 2\r\n",
        &body.to_string(),
    );
    assert_eq!(status, 504, "{told}");
    assert!(
        told.contains(
            "the request's deadline passed before its response was ready; send it with a later deadline"
        ),
        "{told}"
    );
    assert!(told.contains("\"code\":\"deadline_exceeded\""), "{told}");
    // A request with more texts than the queue can hold is refused immediately.
    for (prompts, n) in [(1_100, 1), (9, 128)] {
        let many =
            json!({"prompt": vec!["One"; prompts], "n": n, "max_tokens": 40, "temperature": 1});
        let (status, _, told) = ask_with(to, "POST", "/v1/completions", "", &many.to_string());
        assert_eq!(status, 400, "{told}");
        let text = format!(
            "the request is for {} texts (prompts times `n`); expected at most 1024, so send several requests",
            prompts * n
        );
        assert!(told.contains(&text), "{told}");
    }
    // Requests of disconnected clients leave the queue.
    let began = Instant::now();
    while !get(to, "/metrics")
        .1
        .contains("gemmule_queue_requests{model=\"writer\"} 0\n")
    {
        assert!(began.elapsed() < Duration::from_secs(30));
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(
        post(
            to,
            "/v1/completions",
            &json!({"prompt": "One", "max_tokens": 2})
        )
        .0,
        200
    );
    server.shut_down(Duration::ZERO);
}

#[test]
fn words_are_weighed_where_a_model_does_that() {
    let server = serving(&["st-mean"], quick());
    let (status, _, told) = ask_with(
        server.address(),
        "POST",
        "/embed_sparse",
        "",
        "{\"inputs\": \"x\"}",
    );
    assert_eq!(status, 404);
    let expected = "the model `st-mean` embeds texts, but the request is for sparse embeddings; use another model";
    assert!(
        told.contains(expected) && told.contains("\"error_type\":\"unsupported_task\""),
        "{told}"
    );
    server.shut_down(Duration::ZERO);
    let folder = checkpoint("st-splade");
    let mut choice = choice("st-splade", true, Duration::from_secs(10));
    choice.all_tokens = false;
    let server = serving_models(vec![Model::open(choice).unwrap()], quick());
    let to = server.address();
    let engine = Engine::from_checkpoint(&folder).device(DeviceChoice::Cpu);
    let engine = engine.invariant(true).build().unwrap();
    let batch = TextEncoder::open(&folder).unwrap().encode(&TEXTS).unwrap();
    let outputs = engine.session().unwrap().run(&batch).unwrap();
    let (status, rows) = post(to, "/embed_sparse", &json!({"inputs": TEXTS}));
    assert_eq!(status, 200, "{rows}");
    for at in 0..TEXTS.len() {
        let expected = outputs.sequence("sparse", at).unwrap().iter().enumerate();
        let expected = expected.filter(|&(_, &value)| value != 0.0);
        let expected: Vec<(u64, f32)> = expected
            .map(|(index, &value)| (index as u64, value))
            .collect();
        assert!(!expected.is_empty());
        let told = rows[at].as_array().unwrap().iter();
        let told = told.map(|entry| {
            (
                entry["index"].as_u64().unwrap(),
                entry["value"].as_f64().unwrap() as f32,
            )
        });
        assert_eq!(told.collect::<Vec<(u64, f32)>>(), expected);
    }
    assert_eq!(post(to, "/v1/embeddings", &json!({"input": "x"})).0, 404);
    server.shut_down(Duration::ZERO);
}

#[test]
fn tokens_are_weighed_beside_embeddings_where_that_is_asked_for() {
    let folder = checkpoint("st-m3");
    let mut choice = choice("st-m3", true, Duration::from_secs(10));
    (choice.all_tokens, choice.sparse) = (false, true);
    let server = serving_models(vec![Model::open(choice).unwrap()], quick());
    let to = server.address();
    let engine = Engine::from_checkpoint(&folder).device(DeviceChoice::Cpu);
    let engine = engine.invariant(true).outputs(["sparse"]).build().unwrap();
    let texts = ["a small bird, a bird", "the tower is high", "x"];
    let encoder = TextEncoder::open(&folder).unwrap();
    let batch = encoder.encode(&texts).unwrap();
    let outputs = engine.session().unwrap().run(&batch).unwrap();
    let (status, rows) = post(to, "/embed_sparse", &json!({"inputs": texts}));
    assert_eq!(status, 200, "{rows}");
    let mut n_weights = 0;
    for (at, text) in texts.iter().enumerate() {
        let ids = encoder.prompts(&[text]).unwrap().remove(0);
        // The expected weight of an id is the largest weight of its occurrences. Like in FlagEmbedding, <s>, </s>, <pad> and <unk> have no
        // weight.
        let mut expected = std::collections::BTreeMap::<u64, f32>::new();
        for (&id, &weight) in ids.iter().zip(outputs.sequence("sparse", at).unwrap()) {
            if ![0, 1, 2, 3].contains(&id) && weight > 0.0 {
                let most = expected.entry(u64::from(id)).or_default();
                *most = most.max(weight);
            }
        }
        let told = rows[at].as_array().unwrap().iter().map(|entry| {
            let value = entry["value"].as_f64().unwrap() as f32;
            (entry["index"].as_u64().unwrap(), value)
        });
        assert_eq!(
            told.collect::<Vec<_>>(),
            expected.into_iter().collect::<Vec<_>>()
        );
        n_weights += rows[at].as_array().unwrap().len();
    }
    assert!(n_weights > 0);
    let (status, vectors) = post(to, "/v1/embeddings", &json!({"input": texts}));
    assert_eq!(
        (status, vectors["data"].as_array().unwrap().len()),
        (200, 3)
    );
    server.shut_down(Duration::ZERO);
}
