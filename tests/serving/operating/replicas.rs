//! Tests of replicas behind HAProxy with the configuration `deploy/haproxy.cfg`. Under load, one replica is killed and another is drained.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use gemmule::{DeviceChoice, Engine, text::TextEncoder};
use serde_json::{Value, json};

use super::{Child, checkpoint, costs, found, free_port, say, wait_for_port};

const CLIENTS: usize = 6;
const TEXTS: usize = 40;

fn text(number: usize) -> String {
    format!("{}rain {number}", "a ".repeat(number % 5))
}

/// Returns the expected vectors, computed by a session of the engine.
fn expected() -> Vec<Vec<f32>> {
    let engine = Engine::from_checkpoint(checkpoint("st-mean"))
        .device(DeviceChoice::Cpu)
        .invariant(true)
        .build()
        .unwrap();
    let encoder = TextEncoder::open(&checkpoint("st-mean")).unwrap();
    let texts: Vec<String> = (0..TEXTS).map(text).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let outputs = engine
        .session()
        .unwrap()
        .run(&encoder.encode(&texts).unwrap())
        .unwrap();
    let values = &outputs.get("sentence_embedding").unwrap().values;
    let rows = values.chunks_exact(values.len() / TEXTS);
    rows.map(<[f32]>::to_vec).collect()
}

/// Sends a request on a persistent connection. Returns the request id of the response, the status, and the body.
fn ask(
    stream: &mut BufReader<TcpStream>,
    id: &str,
    body: &str,
) -> std::io::Result<(String, u16, Vec<u8>)> {
    let request = format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nx-request-id: {id}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.get_mut().write_all(request.as_bytes())?;
    let (mut status, mut length, mut echoed) = (0, 0, String::new());
    for at in 0.. {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let line = line.trim_end();
        if at == 0 {
            status = line
                .split(' ')
                .nth(1)
                .and_then(|s| s.parse().ok())
                .unwrap_or(0);
        } else if line.is_empty() {
            break;
        } else if let Some((name, value)) = line.split_once(':') {
            match name.to_ascii_lowercase().as_str() {
                "content-length" => length = value.trim().parse().unwrap_or(0),
                "x-request-id" => echoed = value.trim().to_owned(),
                _ => {}
            }
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok((echoed, status, body))
}

#[test]
fn every_request_is_answered_once_and_right_while_replicas_are_killed_and_drained() {
    let Some(haproxy) = found("haproxy") else {
        say("there is no haproxy here (Debian: apt-get install haproxy): replicas are not tested");
        return;
    };
    let redis = found("redis-server");
    if redis.is_none() {
        say("there is no redis-server here: replicas are tested without a shared cache");
    }
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("costs.ron");
    fs::write(&table, costs().to_ron().unwrap()).unwrap();
    let redis_port = free_port();
    let _redis = redis
        .filter(|_| cfg!(feature = "shared-cache"))
        .map(|program| {
            let child = Child::start(
                Command::new(program)
                    .args(["--port", &redis_port.to_string(), "--bind", "127.0.0.1"])
                    .args(["--save", "", "--appendonly", "no"])
                    .current_dir(folder.path()),
            );
            wait_for_port(redis_port);
            child
        });
    let ports: [u16; 3] = std::array::from_fn(|_| free_port());
    let mut replicas = ports.map(|port| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gemmule"));
        command
            .args(["serve", "--device", "cpu", "--invariant", "--name", "birds"])
            .args(["--drain-delay-ms", "1000", "--drain-limit-ms", "10000"])
            .args(["--port", &port.to_string()])
            .arg("--weights")
            .arg(checkpoint("st-mean"))
            .arg("--costs")
            .arg(&table);
        if _redis.is_some() {
            let url = format!("redis://127.0.0.1:{redis_port}/0");
            command.args(["--cache-redis", &url]);
        }
        Child::start(&mut command)
    });
    ports.into_iter().for_each(wait_for_port);

    // Use the shipped configuration with the addresses of the test's replicas.
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/haproxy.cfg");
    let front = free_port();
    let mut config = fs::read_to_string(shipped).unwrap();
    config = config.replace("bind :8080", &format!("bind 127.0.0.1:{front}"));
    // The machine's limit of open files may be too low for 4000 connections.
    config = config.replace("maxconn 4000", "maxconn 200");
    for (at, port) in ports.iter().enumerate() {
        let address = format!("10.0.0.{}:8080", at + 1);
        assert!(config.contains(&address));
        config = config.replace(&address, &format!("127.0.0.1:{port}"));
    }
    let file = folder.path().join("haproxy.cfg");
    fs::write(&file, config).unwrap();
    let _haproxy = Child::start(Command::new(haproxy).arg("-db").arg("-f").arg(&file));
    wait_for_port(front);

    let expected = Arc::new(expected());
    let (is_over, answered) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let (expected, is_over) = (Arc::clone(&expected), Arc::clone(&is_over));
            let answered = Arc::clone(&answered);
            thread::spawn(move || {
                let mut problems = Vec::new();
                let mut sent = 0_u64;
                let connect = || {
                    let stream = TcpStream::connect(("127.0.0.1", front)).unwrap();
                    let limit = Some(Duration::from_secs(20));
                    stream.set_read_timeout(limit).unwrap();
                    BufReader::new(stream)
                };
                let mut stream = connect();
                while !is_over.load(Ordering::Relaxed) {
                    let number = (sent as usize * CLIENTS + client) % TEXTS;
                    let id = format!("client-{client}-{sent}");
                    let body = json!({"model": "birds", "input": text(number)}).to_string();
                    sent += 1;
                    match ask(&mut stream, &id, &body) {
                        Ok((echoed, 200, body)) => {
                            let answer: Value = serde_json::from_slice(&body).unwrap();
                            let data = answer["data"].as_array().unwrap();
                            let values: Vec<f32> = data[0]["embedding"]
                                .as_array()
                                .unwrap()
                                .iter()
                                .map(|v| v.as_f64().unwrap() as f32)
                                .collect();
                            assert_eq!((data.len(), echoed), (1, id));
                            assert!(values == expected[number], "the vector of another text");
                            answered.fetch_add(1, Ordering::Relaxed);
                        }
                        Ok((_, status, body)) => {
                            let body = String::from_utf8_lossy(&body).into_owned();
                            problems.push(format!("{id}: {status} {body}"));
                        }
                        Err(error) => {
                            problems.push(format!("{id}: {error}"));
                            stream = connect();
                        }
                    }
                }
                (sent, problems)
            })
        })
        .collect();
    let until = |n: u64| {
        let began = Instant::now();
        while answered.load(Ordering::Relaxed) < n {
            let is_stuck = began.elapsed() > Duration::from_secs(20);
            assert!(
                !is_stuck,
                "{} of {n} answered",
                answered.load(Ordering::Relaxed)
            );
            thread::sleep(Duration::from_millis(5));
        }
    };
    until(300);
    thread::sleep(Duration::from_millis(500));
    replicas[0].kill();
    thread::sleep(Duration::from_millis(1500));
    until(900);
    replicas[1].signal("-TERM");
    // The replica answers its requests, and then exits.
    let began = Instant::now();
    let status = loop {
        if let Some(status) = replicas[1].0.try_wait().unwrap() {
            break status;
        }
        assert!(began.elapsed() < Duration::from_secs(15), "it does not end");
        thread::sleep(Duration::from_millis(20));
    };
    assert!(status.success() && began.elapsed() >= Duration::from_secs(1));
    let now = answered.load(Ordering::Relaxed);
    until(now + 300);
    is_over.store(true, Ordering::Relaxed);
    let (mut sent, mut problems) = (0, Vec::new());
    for client in clients {
        let (n, of_client) = client.join().unwrap();
        sent += n;
        problems.extend(of_client);
    }
    assert!(problems.is_empty(), "{problems:#?}");
    assert_eq!(answered.load(Ordering::Relaxed), sent);
}
