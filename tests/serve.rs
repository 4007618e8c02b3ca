//! The server as its clients see it: real connections to the small checkpoints of `tests/checkpoints`, on the CPU.
#![cfg(feature = "server")]

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use gemmule::{
    DeviceChoice, Engine,
    engine::TextEncoder,
    http::{HttpChoice, Keys, Server},
    schedule::{CostTable, Settings, scheduler},
    serve::{Model, ModelChoice, Models},
};
use serde_json::{Value, json};

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/checkpoints")
        .join(name)
}

fn costs() -> CostTable {
    let text = include_str!("../examples/costs.ron");
    let mut table = CostTable::parse(text).expect("the example is sound");
    // What the small models take: deadlines are then as far off as they look.
    table.overhead = 100.0;
    for value in table.packed.values.iter_mut().flatten() {
        *value /= 100.0;
    }
    table
}

fn model(name: &str, invariant: bool, queue: Duration) -> Model {
    Model::open(ModelChoice {
        folder: checkpoint(name),
        name: name.to_owned(),
        device: DeviceChoice::Cpu,
        dtype: None,
        invariant,
        scheduler: scheduler("packed", &Settings::default()).unwrap(),
        costs: Some(costs()),
        batch_bytes: 1 << 30,
        cache_bytes: None,
        queue,
        tokenizers: 1,
        trace: None,
        cache: None,
    })
    .unwrap()
}

fn serving(models: &[&str], choice: HttpChoice) -> Server {
    let models = models
        .iter()
        .map(|name| model(name, true, Duration::from_secs(10)));
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    Server::start(socket, Models::new(models.collect()), choice).unwrap()
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
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream
}

/// Status, head and body of an answer, after which the server closes.
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
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {n}\r\n\r\n"
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
        // Token ids are what the text becomes, and base64 holds the same bits.
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
    let deep = format!("{{\"input\": {}1", "[".repeat(100_000));
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
        ("/predict", "{\"inputs\": [[\"a\", \"b\", \"c\"]]}"),
        ("/rerank", "{\"query\": \"x\", \"texts\": []}"),
        ("/v1/completions", "{\"prompt\": \"x\", \"n\": 2}"),
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
    // And it still answers.
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
    // A seed gives the same draws again.
    let drawn = json!({"prompt": prompt, "max_tokens": 24, "temperature": 1.5, "seed": 3});
    let first = post(to, "/v1/completions", &drawn).1["choices"].clone();
    assert_eq!(post(to, "/v1/completions", &drawn).1["choices"], first);
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
    let pairs: Vec<[&str; 2]> = documents.iter().map(|d| ["tower", *d]).collect();
    let (_, predicted) = post(to, "/predict", &json!({"inputs": pairs}));
    for row in tei.as_array().unwrap() {
        let index = row["index"].as_u64().unwrap() as usize;
        assert_eq!(predicted[index][0]["score"], row["score"]);
    }
    server.shut_down(Duration::ZERO);
}

#[test]
fn slow_half_closed_and_oversized_clients_do_not_keep_others_waiting() {
    let choice = HttpChoice {
        header_time: Duration::from_millis(300),
        body_time: Duration::from_millis(300),
        most_body: 1 << 16,
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
        text.contains("the body did not come within 0.3 s"),
        "{text}"
    );
    let (status, _, text) = read(large);
    assert_eq!(status, 413, "{text}");
    assert!(
        text.contains("the body has more than 65536 bytes; split the request"),
        "{text}"
    );
    // These have no request to answer, and end.
    for mut stream in [headers, half, junk] {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    assert!(began.elapsed() < Duration::from_secs(10));
    // What is sent in chunks has a limit, too.
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
fn keys_let_those_in_who_have_one_and_balancers() {
    // The SHA-256 of `secret`.
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
    assert_eq!(ask("authorization: Bearer secret\r\n").0, 200);
    let (status, _, text) = ask("authorization: Bearer other\r\n");
    assert_eq!(status, 401);
    assert!(text.contains("invalid_api_key"), "{text}");
    assert_eq!(ask("").0, 401);
    for path in ["/health", "/ready", "/metrics"] {
        assert_eq!(get(to, path).0, 200);
    }
    assert_eq!(get(to, "/v1/models").0, 401);
    for (text, error) in [
        ("", "there is no key in it, so that nobody could ask"),
        (
            "alice",
            "line 1 is no key; expected a name and the SHA-256 of the key in 64 hexadecimal digits, as `printf %s KEY | sha256sum` writes it",
        ),
    ] {
        assert_eq!(Keys::parse(text).unwrap_err().to_string(), error);
    }
    server.shut_down(Duration::ZERO);
}

#[test]
fn a_full_queue_and_a_late_deadline_are_told_at_once() {
    let models = Models::new(vec![model("st-mean", false, Duration::ZERO)]);
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::start(socket, models, quick()).unwrap();
    let to = server.address();
    // A queue of no time takes requests only while nothing waits: the large one asks until it finds that, and while it runs
    // others are refused.
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
    // A deadline that no batch can meet: the first millisecond goes into tokenizing a long list.
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
    let body = json!({"input": vec!["some words that take a while"; 2_000]}).to_string();
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
    // The server has seen all of them.
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
