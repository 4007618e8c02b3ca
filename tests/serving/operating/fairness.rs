//! Tests of the admission of requests. A small number of clients is always admitted. While one tenant overloads the server, requests of a
//! tenant that uses less than its share are still admitted.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use gemmule::{
    http::{HttpChoice, Keys, Server},
    schedule::CostTable,
    serve::{Model, ModelChoice, Models, ServeError, Text},
};
use serde_json::json;

use super::{choice, costs, exchange, say, service};

/// Returns costs with which the estimated time of a single request exceeds the queue limit.
fn far_too_slow() -> CostTable {
    let mut table = costs();
    table.overhead = 1e7;
    table
}

/// Runs `clients` concurrent clients. Each client sends `rounds` requests one after another, and waits for each response. Returns the
/// number of refused requests.
fn refusals(model: &Model, clients: usize, rounds: usize) -> usize {
    let refused = AtomicUsize::new(0);
    let text = "the tower is high and it rains ".repeat(30);
    thread::scope(|scope| {
        for _ in 0..clients {
            scope.spawn(|| {
                for _ in 0..rounds {
                    let inputs = vec![Text::One(text.clone())];
                    let submit = gemmule::serve::Submit {
                        truncate: true,
                        ..Default::default()
                    };
                    match service(model).submit(inputs, submit) {
                        Ok(replies) => {
                            for reply in replies {
                                reply.wait().unwrap();
                            }
                        }
                        Err(ServeError::Overloaded { .. }) => {
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    refused.into_inner()
}

#[test]
fn up_to_32_clients_are_never_refused_however_slow_the_device_seems() {
    let slow = || ModelChoice {
        costs: Some(far_too_slow()),
        queue: Duration::from_secs(2),
        ..choice("packed")
    };
    for clients in [8, 32] {
        let model = Model::open(slow()).unwrap();
        assert_eq!(refusals(&model, clients, 20), 0, "{clients} clients");
    }
}

/// Sends a request on a new connection, and returns the status.
fn ask(to: SocketAddr, key: &str, headers: &str, body: &str) -> u16 {
    let Ok(mut stream) = TcpStream::connect(to) else {
        return 0;
    };
    let request = format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {key}\r\n{headers}content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut answer = Vec::new();
    let sent = stream.write_all(request.as_bytes());
    let read = sent.and_then(|()| stream.read_to_end(&mut answer));
    let head = String::from_utf8_lossy(&answer[..answer.len().min(32)]).into_owned();
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    read.ok().and(status).unwrap_or(0)
}

/// Starts a server with two tenants, whose keys are `secret` and `password`. Neither key has a `max-priority`.
fn of_two_tenants(model: Model) -> Server {
    let keys = Keys::parse(
        "many 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\n\
         few 5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8\n",
    );
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let choice = HttpChoice {
        keys: Some(keys.unwrap()),
        drain_delay: Duration::ZERO,
        ..HttpChoice::default()
    };
    Server::start(socket, Models::new(vec![model]), choice).unwrap()
}

/// Sends requests from several clients for some time. Returns the numbers of successful and refused requests.
fn load(
    to: SocketAddr,
    clients: usize,
    key: &str,
    headers: &str,
    inputs: usize,
    time: Duration,
    is_over: &AtomicBool,
) -> (usize, usize) {
    let (answered, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let text = "the tower is high and it rains ".repeat(2);
    let body = json!({"input": vec![text; inputs], "truncate": true}).to_string();
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..clients {
            scope.spawn(|| {
                while began.elapsed() < time && !is_over.load(Ordering::Relaxed) {
                    match ask(to, key, headers, &body) {
                        200 => _ = answered.fetch_add(1, Ordering::Relaxed),
                        429 => {
                            refused.fetch_add(1, Ordering::Relaxed);
                            thread::sleep(Duration::from_millis(50));
                        }
                        status => panic!("{status}"),
                    }
                }
            });
        }
    });
    (answered.into_inner(), refused.into_inner())
}

#[test]
fn a_tenant_with_few_clients_is_answered_beside_one_with_many() {
    let model = Model::open(ModelChoice {
        queue: Duration::from_secs(1),
        ..choice("packed")
    });
    let server = of_two_tenants(model.unwrap());
    let to = server.address();
    let never = AtomicBool::new(false);
    let alone = load(to, 4, "password", "", 20, Duration::from_secs(1), &never);
    assert_eq!(alone.1, 0);
    let is_over = AtomicBool::new(false);
    let (few, many) = thread::scope(|scope| {
        let many = scope.spawn(|| {
            // This priority has no effect, because the key has no `max-priority`.
            let urgent = "x-priority: 255\r\n";
            let time = Duration::from_secs(60);
            load(to, 96, "secret", urgent, 400, time, &is_over)
        });
        thread::sleep(Duration::from_millis(1500));
        let few = load(to, 4, "password", "", 20, Duration::from_secs(3), &never);
        is_over.store(true, Ordering::Relaxed);
        (few, many.join().unwrap())
    });
    say(&format!(
        "alone {alone:?}, beside the other {few:?}, of the other {many:?}"
    ));
    assert!(many.1 > 0, "{many:?}");
    assert_eq!(few.1, 0, "{few:?}");
    // Check only that some requests succeed. Their number depends on the speed of the machine, and on other programs that run on it.
    assert!(few.0 > 0, "{few:?} of {alone:?}");
    server.shut_down(Duration::ZERO);
}

#[test]
fn a_deadline_counts_from_the_headers_on() {
    let model = Model::open(choice("packed")).unwrap();
    let server = of_two_tenants(model);
    let head = "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer secret\r\nx-request-timeout-ms: 300\r\ncontent-length: 100\r\n\r\n{";
    let began = Instant::now();
    let answer = exchange(server.address(), head);
    let took = began.elapsed();
    assert_eq!(answer.status, 504, "{}", answer.body);
    assert!(answer.body.contains("deadline_exceeded"), "{}", answer.body);
    assert!(
        (Duration::from_millis(250)..Duration::from_secs(5)).contains(&took),
        "{took:?}"
    );
    // A body whose announced length is too large is refused before it is sent.
    let head = "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer secret\r\ncontent-length: 8388609\r\n\r\n";
    let answer = exchange(server.address(), head);
    assert_eq!(answer.status, 413, "{}", answer.body);
    assert!(
        answer
            .body
            .contains("the body has more than 8388608 bytes; split the request"),
        "{}",
        answer.body
    );
    server.shut_down(Duration::ZERO);
}
