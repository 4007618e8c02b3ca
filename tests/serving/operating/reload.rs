//! Tests of signals that make a server reload its files.

use std::{
    fmt::Write as _,
    io::Write,
    thread,
    time::{Duration, Instant},
};

use sha2::{Digest, Sha256};

use super::{Serving, connect, embedding, read_response};

/// Sends a request with an API key, and returns the status of the response.
fn status(server: &Serving, key: &str) -> u16 {
    let mut stream = connect(server.to);
    let authorized = format!("\r\nauthorization: Bearer {key}\r\n");
    let request = embedding("rain").replacen("\r\n", &authorized, 1);
    stream.get_mut().write_all(request.as_bytes()).unwrap();
    read_response(&mut stream).unwrap().status
}

/// Returns the contents of a file of API keys with one key.
fn keys(key: &str) -> String {
    let digest = Sha256::digest(key.as_bytes());
    let digest = digest.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    });
    format!("birds {digest}\n")
}

/// Some signals arrive during a reload that has already read the previous file of keys. The server must then reload again.
#[test]
fn every_signal_has_a_reload_that_begins_after_it() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let key = |n: u32| format!("a-key-of-the-{n}th-file");
    std::fs::write(file.path(), keys(&key(0))).unwrap();
    let server = Serving::start("", &["--api-keys", file.path().to_str().unwrap()]);
    let began = Instant::now();
    while status(&server, &key(0)) != 200 {
        assert!(began.elapsed() < Duration::from_secs(30));
        thread::sleep(Duration::from_millis(20));
    }
    let last = 20;
    for n in 1..=last {
        std::fs::write(file.path(), keys(&key(n))).unwrap();
        server.child.signal("-HUP");
    }
    let began = Instant::now();
    while status(&server, &key(last)) != 200 {
        assert!(
            began.elapsed() < Duration::from_secs(30),
            "{:#?}",
            server.lines.lock().unwrap()
        );
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(status(&server, &key(0)), 401);
    assert_eq!(status(&server, &key(last - 1)), 401);
}
