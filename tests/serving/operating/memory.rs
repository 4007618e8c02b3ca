//! Tests of a server's memory under requests whose bodies have the maximum size. The server is a separate process, whose memory is
//! read from `/proc`.
#![cfg(target_os = "linux")]

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use super::{Child, checkpoint, free_port, say};

/// The default max size of a request body, in bytes.
const BODY: usize = 8 << 20;
/// Max memory in bytes that the server may use while requests run, in addition to that of the idle server.
const MAX_PEAK: u64 = 1 << 30;
/// Max memory in bytes that the server may keep after all requests, in addition to that of the idle server.
const MAX_KEPT: u64 = 512 << 20;

/// A request of max size, and the number of such requests that are sent at the same time.
struct Sent {
    name: &'static str,
    path: &'static str,
    body: Vec<u8>,
    at_once: usize,
}

fn sent(name: &'static str, path: &'static str, body: String, at_once: usize) -> Sent {
    assert!(body.len() <= BODY, "{name} has {} bytes", body.len());
    Sent {
        name,
        path,
        body: body.into_bytes(),
        at_once,
    }
}

/// Returns a request body that consists of `begin`, copies of `part`, and `end`. The number of copies fills the max size of a body.
fn filled(begin: &str, part: &str, end: &str) -> String {
    let n = (BODY - begin.len() - end.len()) / part.len();
    format!("{begin}{}{end}", part.repeat(n))
}

/// Returns a request body of the max size that contains a JSON list of copies of `value` between `begin` and `end`.
fn list(begin: &str, value: &str, end: &str) -> String {
    let begin = format!("{begin}[{value}");
    filled(&begin, &format!(",{value}"), &format!("]{end}"))
}

fn all() -> Vec<Sent> {
    let story = "One cold morning ";
    let completion = "{\"model\":\"writer\",\"max_tokens\":4,\"prompt\":\"";
    let prompts = vec![story.trim(); 128];
    let scored = json!({"model": "writer", "prompt": prompts, "max_tokens": 100, "logprobs": 20, "temperature": 1});
    let streamed = json!({"model": "writer", "prompt": story.trim(), "max_tokens": 100, "n": 64, "logprobs": 20, "temperature": 1, "stream": true});
    let embeddings = "{\"model\":\"st-mean\",\"truncate\":true,\"input\":";
    let chat = "{\"model\":\"writer\",\"messages\":[{\"role\":\"user\",\"content\":\"";
    let query = "small bird ".repeat(1 << 18);
    let pairs = list(
        &format!("{{\"query\":\"{query}\",\"truncate\":true,\"texts\":"),
        "\"a\"",
        "}",
    );
    let text = format!("\"{}\"", "the tower is high ".repeat(28));
    vec![
        sent(
            "one long prompt",
            "/v1/completions",
            filled(completion, story, "\"}"),
            1,
        ),
        sent(
            "four long prompts",
            "/v1/completions",
            filled(completion, story, "\"}"),
            4,
        ),
        sent(
            "a prompt of one word",
            "/v1/completions",
            filled(completion, "a", "\"}"),
            4,
        ),
        sent(
            "a long message",
            "/v1/chat/completions",
            filled(chat, story, "\"}]}"),
            4,
        ),
        sent(
            "texts with alternatives",
            "/v1/completions",
            scored.to_string(),
            2,
        ),
        sent(
            "streams with alternatives",
            "/v1/completions",
            streamed.to_string(),
            2,
        ),
        sent(
            "tokens of words",
            "/tokenize",
            filled("{\"inputs\":\"", "small bird ", "\"}"),
            2,
        ),
        sent(
            "tokens of letters",
            "/tokenize",
            filled("{\"inputs\":\"", "a ", "\"}"),
            2,
        ),
        sent(
            "tokens of many texts",
            "/tokenize",
            list("{\"inputs\":", "\"a\"", "}"),
            4,
        ),
        sent(
            "text of tokens",
            "/decode",
            list("{\"model\":\"st-mean\",\"ids\":", "100", "}"),
            4,
        ),
        sent(
            "tiny inputs",
            "/v1/embeddings",
            list(embeddings, "\"a\"", "}"),
            4,
        ),
        sent(
            "a long input",
            "/v1/embeddings",
            filled(&format!("{embeddings}\""), "small bird ", "\"}"),
            8,
        ),
        sent("texts", "/v1/embeddings", list(embeddings, &text, "}"), 16),
        sent(
            "vectors of tokens",
            "/embed_all",
            list("{\"truncate\":true,\"inputs\":", &text, "}"),
            8,
        ),
        sent("ids", "/v1/embeddings", list(embeddings, "7", "}"), 4),
        sent(
            "lists of ids",
            "/v1/embeddings",
            list(embeddings, "[7]", "}"),
            4,
        ),
        sent(
            "objects",
            "/v1/embeddings",
            list(embeddings, "{\"a\":1}", "}"),
            4,
        ),
        sent("deep lists", "/embed", filled("{\"inputs\":", "[", ""), 4),
        sent("a long query of many pairs", "/rerank", pairs, 4),
    ]
}

/// Returns the value `name` of `/proc/PID/status` in bytes.
fn memory(pid: u32, name: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    let kib = line.split_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() << 10
}

/// Sends a request, and returns the status of the response. The response may arrive before the whole body is sent.
fn ask(port: u16, sent: &Sent) -> u16 {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let wait = Some(Duration::from_secs(120));
    stream.set_read_timeout(wait).unwrap();
    let head = format!(
        "POST {} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-timeout-ms: 20000\r\ncontent-length: {}\r\n\r\n",
        sent.path,
        sent.body.len()
    );
    let _ = stream.write_all(head.as_bytes());
    let _ = stream.write_all(&sent.body);
    let mut answer = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    while let Ok(n) = stream.read(&mut buffer) {
        if n == 0 {
            break;
        }
        answer.truncate(64);
        answer.extend_from_slice(&buffer[..n.min(64)]);
    }
    let head = String::from_utf8_lossy(&answer);
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    status.unwrap_or(0)
}

#[test]
fn a_server_holds_a_gibibyte_at_most_whatever_is_sent_and_gives_it_back() {
    let port = free_port();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gemmule"));
    command.args(["serve", "--device", "cpu", "--all-tokens"]);
    for name in ["writer", "st-mean", "ce-one"] {
        command.arg("--weights").arg(checkpoint(name));
    }
    command.args(["--port", &port.to_string()]);
    let server = Child::start(&mut command);
    let pid = server.0.id();
    let ready = || {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
        stream
            .write_all(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            .ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.starts_with("HTTP/1.1 200").then_some(())
    };
    let began = Instant::now();
    while ready().is_none() {
        assert!(began.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(50));
    }
    let idle = memory(pid, "VmRSS:");
    let mut answered = 0;
    for sent in all() {
        let began = Instant::now();
        let statuses = thread::scope(|scope| {
            let clients: Vec<_> = (0..sent.at_once)
                .map(|_| scope.spawn(|| ask(port, &sent)))
                .collect();
            let statuses = clients.into_iter().map(|client| client.join().unwrap());
            statuses.collect::<Vec<u16>>()
        });
        let peak = memory(pid, "VmHWM:").saturating_sub(idle);
        let now = memory(pid, "VmRSS:").saturating_sub(idle);
        let (name, seconds) = (sent.name, began.elapsed().as_secs_f64());
        say(&format!(
            "{name}: {statuses:?} after {seconds:.1} s, peak {} MiB, now {} MiB",
            peak >> 20,
            now >> 20
        ));
        let expected = [200, 400, 404, 413, 422, 429, 504];
        assert!(
            statuses.iter().all(|status| expected.contains(status)),
            "{name}: {statuses:?}"
        );
        assert!(peak <= MAX_PEAK, "{name}: {} MiB", peak >> 20);
        answered += statuses.iter().filter(|&&status| status == 200).count();
    }
    // Several of these requests must be answered, not refused.
    assert!(answered >= 8, "{answered}");
    let began = Instant::now();
    while memory(pid, "VmRSS:").saturating_sub(idle) > MAX_KEPT {
        let kept = memory(pid, "VmRSS:").saturating_sub(idle);
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "{} MiB",
            kept >> 20
        );
        thread::sleep(Duration::from_millis(100));
    }
}
