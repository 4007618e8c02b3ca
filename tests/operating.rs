//! What those who run a server need: traces, the cache of responses, and replicas behind a balancer. On the CPU, with the small
//! checkpoints of `tests/checkpoints`.
#![cfg(feature = "server")]

#[path = "operating/bench.rs"]
mod bench;
#[path = "operating/cache.rs"]
mod cache;
#[path = "operating/fairness.rs"]
mod fairness;
#[path = "operating/memory.rs"]
mod memory;
#[path = "operating/replicas.rs"]
mod replicas;
#[path = "operating/trace.rs"]
mod trace;

use std::{
    io::Write,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::{Duration, Instant},
};

use gemmule::{
    DeviceChoice,
    schedule::{CostTable, Settings, scheduler},
    serve::{Kind, Model, ModelChoice, Service, Submit},
};

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/checkpoints")
        .join(name)
}

/// About what the small models take.
fn costs() -> CostTable {
    let text = include_str!("../examples/costs.ron");
    let mut table = CostTable::parse(text).expect("the example is sound");
    table.overhead = 100.0;
    for value in table.packed.values.iter_mut().flatten() {
        *value /= 100.0;
    }
    table
}

fn choice(scheduler_name: &str) -> ModelChoice {
    ModelChoice {
        folder: checkpoint("st-mean"),
        name: "st-mean".to_owned(),
        devices: vec![DeviceChoice::Cpu],
        all_tokens: false,
        sparse: false,
        share: None,
        previous: None,
        dtype: None,
        invariant: true,
        scheduler: scheduler(scheduler_name, &Settings::default()).unwrap(),
        costs: Some(costs()),
        batch_bytes: 1 << 30,
        cache_bytes: None,
        queue: Duration::from_secs(10),
        tokenizers: 1,
        trace: None,
        cache: None,
    }
}

fn service(model: &Model) -> &Service {
    match &model.kind {
        Kind::Service(service) => service,
        Kind::Writer(_) => panic!("the model embeds"),
    }
}

fn within(ms: u64) -> Submit {
    Submit {
        within: Some(Duration::from_millis(ms)),
        ..Submit::default()
    }
}

/// What a test says though it passes.
fn say(line: &str) {
    // Not by a macro, whose text the test harness keeps.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// A program that is to be found here, as Debian's packages put it.
fn found(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin"].map(PathBuf::from);
    let mut folders = std::env::split_paths(&path).chain(usual);
    let folder = folders.find(|folder| folder.join(program).is_file())?;
    Some(folder.join(program))
}

/// A program that ends with the test.
struct Child(std::process::Child);

impl Child {
    fn start(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::null()).stdout(Stdio::null());
        Self(command.spawn().expect("it starts"))
    }

    fn signal(&self, name: &str) {
        let pid = self.0.id().to_string();
        let sent = Command::new("kill").args([name, &pid]).status();
        assert!(sent.expect("there is `kill`").success());
    }

    #[cfg(feature = "shared-cache")]
    fn stop(&self) {
        self.signal("-STOP");
    }

    #[cfg(feature = "shared-cache")]
    fn go_on(&self) {
        self.signal("-CONT");
    }

    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A port for a program that is to listen on it. It is below those that the system gives to connections, of which one might have it
/// before the program does.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id() as u16 % 997 * 11;
    for _ in 0..1000 {
        let port = 18_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no port is free");
}

fn wait_for_port(port: u16) {
    let began = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(
            began.elapsed() < Duration::from_secs(30),
            "nobody answers on port {port}"
        );
        thread::sleep(Duration::from_millis(20));
    }
}
