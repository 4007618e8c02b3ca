//! Tests of clients that send the body or the headers of a request slowly.

use std::{
    io::{BufReader, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use gemmule::{
    http::{HttpChoice, Server},
    serve::{Model, Models},
};

use super::{Response, choice, connect, embedding, exchange, read_response};

fn started(http: HttpChoice) -> Server {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let http = HttpChoice {
        drain_delay: Duration::ZERO,
        ..http
    };
    let models = Models::new(vec![Model::open(choice("packed")).unwrap()]);
    Server::start(socket, models, http).unwrap()
}

/// Sends the headers of a request with a body of `length` bytes, and the first `n` bytes of the body.
fn begin(to: SocketAddr, length: usize, n: usize) -> BufReader<TcpStream> {
    let mut stream = connect(to);
    let head =
        format!("POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
    stream.get_mut().write_all(head.as_bytes()).unwrap();
    stream
        .get_mut()
        .write_all(" ".repeat(n).as_bytes())
        .unwrap();
    stream
}

#[test]
fn idle_uploads_take_no_memory_from_others() {
    let server = started(HttpChoice {
        body_pause: Duration::from_secs(20),
        ..HttpChoice::default()
    });
    let to = server.address();
    let idle: Vec<_> = (0..200).map(|at| begin(to, 8 << 20, at % 2)).collect();
    thread::sleep(Duration::from_millis(200));
    let began = Instant::now();
    // This request is too large to skip the queue of requests that wait for memory.
    let body = format!("{{\"input\": \"rain\"{}}}", " ".repeat(1 << 20));
    let head = format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let done = exchange(to, &format!("{head}{body}"));
    assert_eq!(done.status, 200, "{}", done.body);
    assert!(began.elapsed() < Duration::from_secs(10));
    drop(idle);
    server.shut_down(Duration::ZERO);
}

#[test]
fn a_stalled_upload_ends_before_one_that_progresses() {
    let server = started(HttpChoice {
        body_pause: Duration::from_millis(400),
        ..HttpChoice::default()
    });
    let to = server.address();
    let told =
        |mut stream: BufReader<TcpStream>| -> Response { read_response(&mut stream).unwrap() };
    let began = Instant::now();
    let stalled = told(begin(to, 1000, 10));
    assert_eq!(stalled.status, 408);
    assert!(
        stalled
            .body
            .contains("no byte of the body arrived within 0.4 s; send it faster"),
        "{}",
        stalled.body
    );
    assert!(began.elapsed() < Duration::from_secs(10));
    // A body that arrives steadily may take longer in total than the max pause between two parts.
    let body = format!("{{\"input\": \"rain\"{}}}", " ".repeat(20));
    let mut steady = begin(to, body.len(), 0);
    for byte in body.bytes() {
        steady.get_mut().write_all(&[byte]).unwrap();
        thread::sleep(Duration::from_millis(30));
    }
    let steady = told(steady);
    assert_eq!(steady.status, 200, "{}", steady.body);
    // A large body must arrive at a higher rate.
    let mut slow = begin(to, 8 << 20, 300 << 10);
    let mut writes = slow.get_ref().try_clone().unwrap();
    let trickle = thread::spawn(move || {
        while writes.write_all(b" ").is_ok() {
            thread::sleep(Duration::from_millis(20));
        }
    });
    let answer = read_response(&mut slow).unwrap();
    assert_eq!(answer.status, 408);
    assert!(
        answer
            .body
            .contains("fewer than 65536 bytes of the body arrived within 0.4 s"),
        "{}",
        answer.body
    );
    // Close the connection to end the thread `trickle`. Otherwise, the server would read further bytes for a while after the response.
    slow.get_ref().shutdown(Shutdown::Both).unwrap();
    let _ = trickle.join();
    server.shut_down(Duration::ZERO);
}

#[test]
fn a_part_of_a_second_request_has_the_time_limit_of_headers() {
    let server = started(HttpChoice {
        header_time: Duration::from_millis(300),
        ..HttpChoice::default()
    });
    let to = server.address();
    let get = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n".to_owned();
    let body = r#"{"input": "rain"}"#;
    let chunked = format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
        body.len()
    );
    let check = |first: &str, rest: &str, is_kept: bool| {
        let mut stream = connect(to);
        let both = format!("{first}{rest}");
        stream.get_mut().write_all(both.as_bytes()).unwrap();
        assert_eq!(read_response(&mut stream).unwrap().status, 200);
        // An idle connection must stay open for longer than `header_time`. A connection with a part of a second request must be closed.
        let limit = Duration::from_millis(if is_kept { 1000 } else { 20_000 });
        stream.get_ref().set_read_timeout(Some(limit)).unwrap();
        let mut byte = [0];
        let closed = match stream.read(&mut byte) {
            Ok(n) => n == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        };
        assert_eq!(closed, !is_kept, "{both}");
    };
    let firsts = [get, embedding("rain"), chunked];
    thread::scope(|scope| {
        for first in &firsts {
            for (rest, is_kept) in [("", true), ("GET /hea", false), ("G", false)] {
                scope.spawn(move || check(first, rest, is_kept));
            }
        }
    });
    // Several complete requests that arrive at once are all answered.
    let mut stream = connect(to);
    let three = embedding("rain").repeat(3);
    stream.get_mut().write_all(three.as_bytes()).unwrap();
    for _ in 0..3 {
        assert_eq!(read_response(&mut stream).unwrap().status, 200);
    }
    server.shut_down(Duration::ZERO);
}
