//! Tests of the deadlines of lists of texts.

use std::{
    net::TcpListener,
    time::{Duration, Instant},
};

use gemmule::{
    http::{HttpChoice, Server},
    schedule::CostTable,
    serve::{Model, ModelChoice, Models},
};
use serde_json::{Value, json};

use super::{Response, choice, costs, exchange};

/// Returns costs with which a batch takes `seconds` for each of its tokens.
fn slow(seconds: f64) -> CostTable {
    let mut table = costs();
    table.overhead = 1.0;
    for (row, tokens) in table.packed.values.iter_mut().zip(&table.packed.x) {
        row.fill(1e6 * seconds * tokens);
    }
    table
}

fn started(choice: ModelChoice) -> Server {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let http = HttpChoice {
        drain_delay: Duration::ZERO,
        ..HttpChoice::default()
    };
    let models = Models::new(vec![Model::open(choice).unwrap()]);
    Server::start(socket, models, http).unwrap()
}

fn list(server: &Server, headers: &str, n: usize) -> Response {
    let texts: Vec<String> = (0..n).map(|at| format!("text {at} of many")).collect();
    let body = json!({"input": texts, "dimensions": 1}).to_string();
    let request = format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\n{headers}content-length: {}\r\n\r\n{body}",
        body.len()
    );
    exchange(server.address(), &request)
}

fn counter(server: &Server, name: &str) -> f64 {
    let text = exchange(server.address(), "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").body;
    let mut lines = text.lines().filter(|line| line.starts_with(name));
    let value = lines.next().and_then(|line| line.rsplit(' ').next());
    value.map_or(0.0, |value| value.parse().unwrap())
}

#[test]
fn a_list_that_cannot_meet_its_deadline_is_not_computed() {
    let server = started(ModelChoice {
        costs: Some(slow(1.0)),
        ..choice("packed")
    });
    let began = Instant::now();
    let refused = list(&server, "x-request-timeout-ms: 20000\r\n", 10_000);
    assert_eq!(refused.status, 429, "{}", refused.body);
    assert!(began.elapsed() < Duration::from_secs(15));
    assert_eq!(counter(&server, "gemmule_batches_total"), 0.0);
    assert_eq!(
        counter(
            &server,
            "gemmule_refused_total{model=\"st-mean\",reason=\"hopeless\"}"
        ),
        10_000.0
    );
    let body: Value = serde_json::from_str(&refused.body).unwrap();
    let message = body["error"]["message"].as_str().unwrap();
    assert_eq!(body["error"]["code"], "deadline_too_short");
    let begins = message.starts_with("the request alone takes about ");
    let ends = message.ends_with(" ms; split it, or send it with a later deadline");
    assert!(begins && ends, "{message}");
    // There is no `retry-after`, because the same request would be refused again.
    assert!(!refused.head.contains("retry-after"), "{}", refused.head);
    // A shorter list can meet its deadline.
    assert_eq!(
        list(&server, "x-request-timeout-ms: 20000\r\n", 2).status,
        200
    );
    server.shut_down(Duration::ZERO);
}
