//! Tests of old clients, hostile clients, clients that are still sending when the response arrives, and files that other users must not
//! read.

use std::{
    fs,
    io::{BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use gemmule::{
    http::{HttpChoice, Keys, Public, Server},
    serve::{Cache, CacheChoice, Model, Models, Recorder},
};
use serde_json::{Value, json};

use super::{Serving, choice, connect, embedding, exchange, read_response};

fn started(http: HttpChoice) -> Server {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let models = Models::new(vec![Model::open(choice("packed")).unwrap()]);
    let http = HttpChoice {
        drain_delay: Duration::ZERO,
        ..http
    };
    Server::start(socket, models, http).unwrap()
}

/// Returns API keys of one user, `alice`, whose key is `secret`.
fn keys() -> Keys {
    let text = "alice 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\n";
    Keys::parse(text).unwrap()
}

fn message(body: &str) -> String {
    let body: Value = serde_json::from_str(body).unwrap();
    let message = body["error"]["message"].as_str().or(body["error"].as_str());
    message.unwrap().to_owned()
}

#[test]
fn a_request_has_one_host_unless_it_is_http_1_0() {
    let server = started(HttpChoice::default());
    let to = server.address();
    for path in ["/health", "/info", "/v1/models"] {
        for (version, hosts, problem) in [
            (
                "1.1",
                "",
                Some("the request has no Host header, which HTTP/1.1 requires"),
            ),
            (
                "1.1",
                "host: a\r\nhost: a\r\n",
                Some("the request has more than one Host header; send one"),
            ),
            (
                "1.0",
                "host: a\r\nHost: b\r\n",
                Some("the request has more than one Host header; send one"),
            ),
            (
                "1.1",
                "host: a b\r\n",
                Some(
                    "the Host header is not valid; expected a name or an address with an optional port, such as 127.0.0.1:8080",
                ),
            ),
            ("1.1", "host: birds.example:80\r\n", None),
            ("1.0", "", None),
        ] {
            let response = exchange(to, &format!("GET {path} HTTP/{version}\r\n{hosts}\r\n"));
            let is_closed = response.head.contains("connection: close");
            match problem {
                None => assert_eq!(response.status, 200, "{response:?}"),
                Some(problem) => {
                    assert_eq!((response.status, is_closed), (400, true), "{response:?}");
                    assert_eq!(message(&response.body), problem);
                }
            }
        }
    }
    server.shut_down(Duration::ZERO);
}

#[test]
fn http_1_0_gets_no_interim_response() {
    let server = started(HttpChoice::default());
    let body = json!({"input": vec!["some words"; 3_000], "dimensions": 1}).to_string();
    let n = body.len();
    for (version, has_interim) in [("1.0", false), ("1.1", true)] {
        for expect in ["", "expect: 100-continue\r\n"] {
            let mut stream = TcpStream::connect(server.address()).unwrap();
            let head = format!(
                "POST /v1/embeddings HTTP/{version}\r\nhost: x\r\nconnection: close\r\n{expect}content-length: {n}\r\n\r\n{body}"
            );
            stream.write_all(head.as_bytes()).unwrap();
            // Close the sending half of the connection. While the server computes the response, it probes the client with `100 Continue`.
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            let interim = answer.starts_with("HTTP/1.1 100 Continue\r\n\r\n");
            assert_eq!(interim, has_interim, "{version} {expect}");
            let last = answer.replace("HTTP/1.1 100 Continue\r\n\r\n", "");
            assert!(
                last.starts_with(&format!("HTTP/{version} 200")),
                "{version}"
            );
        }
    }
    server.shut_down(Duration::ZERO);
}

/// Sends a request with a body of `n` bytes, and reads the response only after the whole body is sent.
fn send_all(to: SocketAddr, head: &str, n: usize) -> std::io::Result<super::Response> {
    let stream = TcpStream::connect(to)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let mut stream = BufReader::new(stream);
    let head = format!("{head}host: x\r\ncontent-length: {n}\r\n\r\n");
    stream.get_mut().write_all(head.as_bytes())?;
    let piece = vec![b' '; 1 << 16];
    for _ in 0..n / piece.len() {
        stream.get_mut().write_all(&piece)?;
    }
    let response = read_response(&mut stream)?;
    // The server closes the connection after the response.
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
    Ok(response)
}

#[test]
fn a_client_that_is_still_sending_reads_why_it_is_refused() {
    let http = HttpChoice {
        max_body: 1 << 16,
        keys: Some(keys()),
        ..HttpChoice::default()
    };
    let server = started(http);
    let to = server.address();
    let key = "authorization: bearer secret\r\n";
    for (head, status) in [
        (format!("POST /v1/embeddings HTTP/1.1\r\n{key}"), 413),
        (format!("POST /embed HTTP/1.0\r\n{key}"), 413),
        (format!("POST /nothing HTTP/1.1\r\n{key}"), 404),
        (format!("DELETE /embed HTTP/1.1\r\n{key}"), 405),
        ("POST /v1/embeddings HTTP/1.1\r\n".to_owned(), 401),
        (format!("POST /embed HTTP/1.1\r\n{key}host: y\r\n"), 400),
        (
            format!("POST /embed HTTP/1.1\r\n{key}x-priority: no\r\n"),
            422,
        ),
    ] {
        let response = send_all(to, &head, 32 << 20);
        let response = response.unwrap_or_else(|e| panic!("{head}: {e}"));
        assert_eq!(response.status, status, "{head}");
    }
    // The server reads and discards the body of a refused request only up to a limit, and then closes the connection.
    let head = format!("POST /v1/embeddings HTTP/1.1\r\n{key}");
    assert!(send_all(to, &head, 1 << 30).is_err());
    // A client that waits for `100 Continue` gets the refusal instead.
    let mut stream = connect(to);
    let head = format!("{head}host: x\r\nexpect: 100-continue\r\ncontent-length: 1000000\r\n\r\n");
    stream.get_mut().write_all(head.as_bytes()).unwrap();
    let response = read_response(&mut stream).unwrap();
    assert_eq!(response.status, 413, "{response:?}");
    assert!(response.head.contains("connection: close"));
    // If a client announces a body but sends none of it, the server soon closes the connection.
    let began = Instant::now();
    let head =
        format!("POST /v1/embeddings HTTP/1.1\r\n{key}host: x\r\ncontent-length: 1000000\r\n\r\n");
    let mut stream = connect(to);
    stream.get_mut().write_all(head.as_bytes()).unwrap();
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all);
    assert!(all.starts_with(b"HTTP/1.1 413"));
    assert!(began.elapsed() < Duration::from_secs(8));
    server.shut_down(Duration::ZERO);
}

#[test]
fn commands_are_refused_to_web_pages() {
    let server = started(HttpChoice::default());
    let admin = TcpListener::bind("127.0.0.1:0").unwrap();
    let admin = server.listen_admin(admin).unwrap();
    let command = |headers: &str| {
        let text = format!("POST /admin/reload HTTP/1.1\r\n{headers}content-length: 0\r\n\r\n");
        let response = exchange(admin, &text);
        (response.status, message(&response.body))
    };
    let fixed = "this server was started with models that it cannot load again";
    let foreign = "commands are accepted only if the Host header is an IP address or localhost";
    let page = "commands from web pages are refused; send the request without an Origin header";
    for (headers, status, told) in [
        (format!("host: {admin}\r\n"), 404, fixed),
        ("host: localhost:9\r\n".to_owned(), 404, fixed),
        ("host: rebound.example\r\n".to_owned(), 403, foreign),
        (
            format!("host: {admin}\r\norigin: https://evil.example\r\n"),
            403,
            page,
        ),
        (format!("host: {admin}\r\norigin: null\r\n"), 403, page),
        (
            String::new(),
            400,
            "the request has no Host header, which HTTP/1.1 requires",
        ),
    ] {
        assert_eq!(command(&headers), (status, told.to_owned()), "{headers}");
    }
    server.shut_down(Duration::ZERO);
}

#[test]
fn routes_of_monitors_can_be_closed() {
    const HEALTH: [&str; 2] = ["/health", "/ready"];
    const MONITORS: [&str; 4] = ["/metrics", "/openapi.json", "/", "/status.json"];
    for (public, [health, monitors]) in [
        (Public::None, [401, 401]),
        (Public::Health, [200, 401]),
        (Public::All, [200, 200]),
    ] {
        let http = HttpChoice {
            keys: Some(keys()),
            public,
            ..HttpChoice::default()
        };
        let server = started(http);
        let get = |path: &str, key: &str| {
            let text = format!("GET {path} HTTP/1.1\r\nhost: x\r\n{key}\r\n");
            exchange(server.address(), &text)
        };
        let key = "authorization: Bearer secret\r\n";
        let document: Value = serde_json::from_str(&get("/openapi.json", key).body).unwrap();
        for (paths, status) in [(&HEALTH[..], health), (&MONITORS, monitors)] {
            for path in paths {
                assert_eq!(get(path, "").status, status, "{public:?} {path}");
                assert_eq!(get(path, key).status, 200, "{public:?} {path}");
                let told = &document["paths"][path]["get"];
                assert_eq!(told["security"].is_array(), status == 401, "{path}");
                assert_eq!(
                    told["responses"]["401"].is_object(),
                    status == 401,
                    "{path}"
                );
            }
        }
        assert_eq!(get("/v1/models", "").status, 401);
        server.shut_down(Duration::ZERO);
    }
}

#[test]
fn arguments_that_would_close_or_hide_everything_are_refused() {
    let weights = super::checkpoint("st-mean");
    let refused = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_gemmule"))
            .args(["serve", "--port", "0", "--device", "cpu", "--weights"])
            .arg(&weights)
            .args(args)
            .output()
            .unwrap();
        assert!(!output.status.success());
        let text = String::from_utf8(output.stderr).unwrap();
        // Join lines that miette has wrapped.
        text.replace('│', " ")
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    for public in ["none", "health"] {
        let text = refused(&["--public", public]);
        let expected = "--public closes routes to requests without a key, but the server has no keys; give --api-keys, or leave --public out";
        assert!(text.contains(expected), "{text}");
    }
    for (name, problem) in [
        (
            "",
            "it is empty; expected a name, or no `name` to use that of the folder",
        ),
        (
            "  ",
            "it is empty; expected a name, or no `name` to use that of the folder",
        ),
        (
            "birds ",
            "it begins or ends with white space; remove the white space",
        ),
        ("a\nb", "it has control characters; leave them out"),
    ] {
        let text = refused(&["--name", name]);
        assert!(text.contains(problem), "{text}");
    }
}

#[test]
fn a_process_without_descriptors_warns_once_and_goes_on() {
    let server = Serving::start("ulimit -n 64;", &["--drain-delay-ms", "0"]);
    // The server can only open 64 files. Other connections wait in the backlog of the listening socket, which has room for 128.
    let connections: Vec<TcpStream> = (0..150)
        .map_while(|_| TcpStream::connect(server.to).ok())
        .collect();
    assert_eq!(connections.len(), 150);
    server.hears("connections are not accepted: Too many open files");
    thread::sleep(Duration::from_secs(2));
    assert_eq!(server.count("connections are not accepted"), 1);
    drop(connections);
    assert_eq!(exchange(server.to, &embedding("rain")).status, 200);
}

#[test]
fn the_limit_of_open_files_is_raised_as_far_as_it_may() {
    let server = Serving::start("ulimit -S -n 64;", &["--drain-delay-ms", "0"]);
    let mut connections: Vec<_> = (0..150).map(|_| connect(server.to)).collect();
    for stream in &mut connections {
        let health = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
        stream.get_mut().write_all(health.as_bytes()).unwrap();
        assert_eq!(read_response(stream).unwrap().status, 200);
    }
    assert_eq!(server.count("connections are not accepted"), 0);
}

#[test]
fn files_with_data_of_requests_are_their_owners_alone() {
    let folder = tempfile::tempdir().unwrap();
    let mode = |name: &str| {
        let metadata = fs::metadata(folder.path().join(name)).unwrap();
        metadata.permissions().mode() & 0o777
    };
    // Test new files, and existing files that other users can read.
    for name in ["old trace", "old cache"] {
        let file = folder.path().join(name);
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    }
    for age in ["new", "old"] {
        let [trace, cache] = ["trace", "cache"].map(|kind| format!("{age} {kind}"));
        let recorder = Recorder::create(&folder.path().join(&trace), 1 << 20).unwrap();
        let open = Cache::open(&CacheChoice {
            file: Some((folder.path().join(&cache), 1 << 20)),
            ..CacheChoice::default()
        });
        open.unwrap();
        drop(recorder);
        assert_eq!((mode(&trace), mode(&cache)), (0o600, 0o600), "{age}");
    }
}
