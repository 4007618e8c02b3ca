//! Tests of the operation of a server: traces, the response cache, hostile and old clients, shutdown, and replicas behind a load balancer.
//! They run on the CPU with the small checkpoints of `tests/checkpoints`.
mod bench;
mod cache;
mod deploy;
mod drain;
mod fairness;
mod lists;
mod memory;
mod protocol;
mod reload;
mod replicas;
mod trace;
mod uploads;

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU16, Ordering},
    },
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

/// Returns a table of batch times that are similar to those of the small models.
fn costs() -> CostTable {
    let text = include_str!("../../examples/costs.ron");
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
        token_vectors: false,
        fill_mask: false,
        default_prompt: Default::default(),
        task: None,
        route_of: None,
        share: None,
        previous: None,
        dtype: None,
        kv_dtype: Default::default(),
        max_context: None,
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
        Kind::Generation(_) => panic!("the model embeds"),
    }
}

fn within(ms: u64) -> Submit {
    Submit {
        within: Some(Duration::from_millis(ms)),
        ..Submit::default()
    }
}

/// A server in a separate process.
struct Serving {
    child: Child,
    to: SocketAddr,
    /// Lines that the server has written to standard error.
    lines: Arc<Mutex<Vec<String>>>,
    /// Folder of the cost table. It must exist as long as the server, which reads the table again when it reloads.
    _folder: tempfile::TempDir,
}

impl Serving {
    /// Starts `gemmule serve` with a small model in a shell that first runs the commands `before`, such as `ulimit`.
    fn start(before: &str, args: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let table = folder.path().join("costs.ron");
        std::fs::write(&table, costs().to_ron().unwrap()).unwrap();
        let mut command = Command::new("sh");
        command
            .args(["-c", &format!("{before} exec \"$0\" \"$@\"")])
            .arg(env!("CARGO_BIN_EXE_gemmule"))
            .args(["serve", "--device", "cpu", "--port", "0", "--name", "birds"])
            .arg("--weights")
            .arg(checkpoint("st-mean"))
            .arg("--costs")
            .arg(&table)
            .args(args)
            .stderr(Stdio::piped());
        let mut child = Child::start(&mut command);
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (said, error) = (Arc::clone(&lines), child.0.stderr.take().unwrap());
        thread::spawn(move || {
            for line in BufReader::new(error).lines().map_while(Result::ok) {
                said.lock().unwrap().push(line);
            }
        });
        let mut serving = Self {
            child,
            to: ([127, 0, 0, 1], 0).into(),
            lines,
            _folder: folder,
        };
        let told = serving.hears("listening on http://");
        serving.to = told.parse().unwrap();
        serving
    }

    /// Waits until the server has written a line that contains `words`, and returns the rest of the line.
    fn hears(&self, words: &str) -> String {
        let began = Instant::now();
        loop {
            let lines = self.lines.lock().unwrap().clone();
            if let Some((_, rest)) = lines.iter().find_map(|line| line.split_once(words)) {
                return rest.trim().to_owned();
            }
            let is_late = began.elapsed() > Duration::from_secs(60);
            assert!(!is_late, "not heard: {words}\n{lines:#?}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns the number of lines on standard error that contain `words`.
    fn count(&self, words: &str) -> usize {
        let lines = self.lines.lock().unwrap();
        lines.iter().filter(|line| line.contains(words)).count()
    }
}

/// An HTTP response. `head` contains the status line and the headers, in lower case.
#[derive(Debug)]
struct Response {
    status: u16,
    head: String,
    body: String,
}

/// Reads a response with a `content-length`.
fn read_response(stream: &mut BufReader<TcpStream>) -> io::Result<Response> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head)? == 0 {
            let problem = format!("the connection ended after {head:?}");
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, problem));
        }
    }
    let head = head.to_lowercase();
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    let length = head.split_once("content-length: ");
    let length = length.and_then(|(_, rest)| rest.lines().next()?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body)?;
    Ok(Response {
        status: status.unwrap_or(0),
        head,
        body: String::from_utf8_lossy(&body).into_owned(),
    })
}

fn connect(to: SocketAddr) -> BufReader<TcpStream> {
    let stream = TcpStream::connect(to).unwrap();
    let limit = Some(Duration::from_secs(60));
    stream.set_read_timeout(limit).unwrap();
    BufReader::new(stream)
}

/// Sends a request on a new connection, and reads the response.
fn exchange(to: SocketAddr, request: &str) -> Response {
    let mut stream = connect(to);
    stream.get_mut().write_all(request.as_bytes()).unwrap();
    read_response(&mut stream).unwrap()
}

/// Returns an HTTP request for the embedding of `text`.
fn embedding(text: &str) -> String {
    let body = serde_json::json!({"input": text}).to_string();
    format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Prints a line even if the test passes.
fn say(line: &str) {
    // `eprintln!` is not used, because the test harness captures its output.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Returns the path of an installed program. Searches `PATH` and the folders in which Debian installs programs.
fn found(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin"].map(PathBuf::from);
    let mut folders = std::env::split_paths(&path).chain(usual);
    let folder = folders.find(|folder| folder.join(program).is_file())?;
    Some(folder.join(program))
}

/// A process that is killed at the end of the test.
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

/// Returns a free port for a program. It is below the range of ephemeral ports, because the system could assign an ephemeral port to
/// another connection at any time.
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
