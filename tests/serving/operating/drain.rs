//! Tests of shutting down a server whose clients have persistent connections.

use std::{
    io::{self, BufReader, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{Response, Serving, connect, embedding, read_response};

fn ask(stream: &mut BufReader<TcpStream>, text: &str) -> io::Result<Response> {
    stream.get_mut().write_all(embedding(text).as_bytes())?;
    read_response(stream)
}

/// Starts a server, and shuts it down with `signal` while clients send requests one after another on persistent connections. A client stops
/// when a response announces that the connection will be closed. Returns the total number of responses.
fn hammer(drain_delay: &str, signal: &str, pause: Duration) -> u64 {
    let mut server = Serving::start("", &["--drain-delay-ms", drain_delay]);
    let (to, answered) = (server.to, Arc::new(AtomicU64::new(0)));
    let clients: Vec<_> = (0..16)
        .map(|client| {
            let answered = Arc::clone(&answered);
            thread::spawn(move || {
                let mut stream = connect(to);
                for i in 0.. {
                    let response = ask(&mut stream, &format!("rain {client} {i}"));
                    let response = response.unwrap_or_else(|e| panic!("client {client}, {i}: {e}"));
                    assert_eq!(response.status, 200, "{response:?}");
                    answered.fetch_add(1, Ordering::Relaxed);
                    if response.head.contains("connection: close") {
                        return;
                    }
                    thread::sleep(pause);
                }
            })
        })
        .collect();
    while answered.load(Ordering::Relaxed) < 200 {
        assert!(clients.iter().all(|client| !client.is_finished()));
        thread::sleep(Duration::from_millis(5));
    }
    server.child.signal(signal);
    for client in clients {
        client.join().unwrap();
    }
    let began = Instant::now();
    assert!(server.child.0.wait().unwrap().success());
    assert!(began.elapsed() < Duration::from_secs(5));
    answered.load(Ordering::Relaxed)
}

#[test]
fn a_drain_loses_no_request_of_clients_that_keep_their_connections() {
    for (drain_delay, signal) in [("0", "-TERM"), ("300", "-TERM"), ("5000", "-INT")] {
        for pause in [0, 20] {
            let n = hammer(drain_delay, signal, Duration::from_millis(pause));
            assert!(n >= 200);
        }
    }
}

#[test]
fn idle_connections_end_and_a_request_that_comes_before_is_answered() {
    let mut server = Serving::start("", &["--drain-delay-ms", "0"]);
    let mut idle = connect(server.to);
    let mut late = connect(server.to);
    for stream in [&mut idle, &mut late] {
        let response = ask(stream, "rain").unwrap();
        assert!(!response.head.contains("connection: close"), "{response:?}");
    }
    server.child.signal("-TERM");
    server.hears("shutting down");
    thread::sleep(Duration::from_millis(100));
    let response = ask(&mut late, "rain").unwrap();
    assert_eq!(response.status, 200);
    assert!(response.head.contains("connection: close"), "{response:?}");
    assert!(read_response(&mut late).is_err());
    assert!(read_response(&mut idle).is_err());
    assert!(server.child.0.wait().unwrap().success());
}
