//! A local hub: its API, its files, and a second server that stores the files in Git LFS.

#![allow(dead_code)]

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::{Arc, Mutex},
    thread,
};

use sha1::Digest as _;

/// The model of the hub, and its commit.
pub const MODEL: &str = "org/tiny";
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

pub type Files = BTreeMap<String, Vec<u8>>;

#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    /// Path and query of the URL.
    pub target: String,
    /// Headers by their names in lower case.
    pub headers: BTreeMap<String, String>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// Returns the first requested byte.
    pub fn from(&self) -> Option<usize> {
        let range = self.header("range")?.strip_prefix("bytes=")?;
        range.split_once('-')?.0.parse().ok()
    }
}

pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Number of bytes of the body after which the connection is closed.
    pub cut: Option<usize>,
}

impl Response {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: body.into(),
            cut: None,
        }
    }

    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.headers.push((name.to_owned(), value.to_string()));
        self
    }

    pub fn error(status: u16, code: &str, message: &str) -> Self {
        let response = Self::new(status, "{\"error\": \"x\"}");
        let response = match code {
            "" => response,
            _ => response.with("X-Error-Code", code),
        };
        response.with("X-Error-Message", message)
    }

    /// Returns the bytes, or the range that the request asks for.
    pub fn ranged(request: &Request, bytes: &[u8]) -> Self {
        match request.from() {
            Some(from) if from >= bytes.len() => {
                Self::new(416, "").with("Content-Range", format!("bytes */{}", bytes.len()))
            }
            Some(from) => {
                let (last, n) = (bytes.len() - 1, bytes.len());
                Self::new(206, &bytes[from..])
                    .with("Content-Range", format!("bytes {from}-{last}/{n}"))
            }
            None => Self::new(200, bytes),
        }
    }
}

type Handler = dyn Fn(&Request) -> Response + Send + Sync;

/// A server on a free port. It runs until the process ends.
#[derive(Clone)]
pub struct Server {
    pub url: String,
    log: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub fn start(handler: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let log = Arc::<Mutex<Vec<Request>>>::default();
        let handler: Arc<Handler> = Arc::new(handler);
        let server = Self {
            url,
            log: Arc::clone(&log),
        };
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (handler, log) = (Arc::clone(&handler), Arc::clone(&log));
                thread::spawn(move || serve(stream, &*handler, &log));
            }
        });
        server
    }

    /// Returns the requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.log.lock().expect("the log").clone()
    }

    pub fn forget(&self) {
        self.log.lock().expect("the log").clear();
    }
}

fn serve(stream: TcpStream, handler: &Handler, log: &Mutex<Vec<Request>>) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let mut words = line.split_whitespace();
        let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim_end().split_once(':') else {
                break;
            };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let request = Request {
            method,
            target,
            headers,
        };
        log.lock().ok()?.push(request.clone());
        let response = handler(&request);
        let mut head = format!("HTTP/1.1 {} X\r\n", response.status);
        for (name, value) in &response.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("Content-Length: {}\r\n\r\n", response.body.len());
        let mut stream = &stream;
        stream.write_all(head.as_bytes()).ok()?;
        if request.method == "HEAD" {
            continue;
        }
        let n = response.cut.unwrap_or(response.body.len());
        stream.write_all(&response.body[..n]).ok()?;
        if response.cut.is_some() {
            return None;
        }
    }
}

/// Starts a proxy that forwards every host name to `to`.
pub fn proxy(to: &str) -> Server {
    let to = to.trim_start_matches("http://").to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let log = Arc::<Mutex<Vec<Request>>>::default();
    let server = Server {
        url,
        log: Arc::clone(&log),
    };
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let (to, log) = (to.clone(), Arc::clone(&log));
            thread::spawn(move || relay(client, &to, &log));
        }
    });
    server
}

fn relay(mut client: TcpStream, to: &str, log: &Mutex<Vec<Request>>) -> Option<()> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        client.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).ok()?;
    let mut words = head.split_whitespace();
    log.lock().ok()?.push(Request {
        method: words.next()?.to_owned(),
        target: words.next()?.to_owned(),
        headers: BTreeMap::new(),
    });
    let server = TcpStream::connect(to).ok()?;
    client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").ok()?;
    let (mut from_client, mut to_server) = (client.try_clone().ok()?, server.try_clone().ok()?);
    thread::spawn(move || std::io::copy(&mut from_client, &mut to_server));
    let (mut from_server, mut to_client) = (server, client);
    std::io::copy(&mut from_server, &mut to_client).ok()?;
    Some(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(&sha2::Sha256::digest(bytes))
}

pub fn git_sha1(bytes: &[u8]) -> String {
    let mut hasher = sha1::Sha1::new();
    hasher.update(format!("blob {}\0", bytes.len()));
    hasher.update(bytes);
    hex(&hasher.finalize())
}

/// Returns whether a file is in Git LFS.
pub fn is_lfs(name: &str) -> bool {
    [".safetensors", ".bin", ".pt", ".onnx", ".h5"]
        .iter()
        .any(|end| name.ends_with(end))
}

/// Returns the ETag of a file, which is the name of its blob.
pub fn etag(name: &str, bytes: &[u8]) -> String {
    match is_lfs(name) {
        true => sha256(bytes),
        false => git_sha1(bytes),
    }
}

pub fn listing(model: &str, files: &Files) -> serde_json::Value {
    let siblings = files.iter().map(|(name, bytes)| {
        let n = bytes.len();
        let mut file =
            serde_json::json!({ "rfilename": name, "size": n, "blobId": git_sha1(bytes) });
        if is_lfs(name) {
            file["lfs"] =
                serde_json::json!({ "sha256": sha256(bytes), "size": n, "pointerSize": 134 });
        }
        file
    });
    let siblings: Vec<_> = siblings.collect();
    serde_json::json!({ "_id": "x", "id": model, "sha": COMMIT, "gated": false, "siblings": siblings })
}

/// Returns the file tree in the form that Python's huggingface_hub requests.
fn tree(files: &Files) -> serde_json::Value {
    let entries = files.iter().map(|(name, bytes)| {
        let n = bytes.len();
        let mut file =
            serde_json::json!({ "type": "file", "path": name, "size": n, "oid": git_sha1(bytes) });
        if is_lfs(name) {
            file["lfs"] =
                serde_json::json!({ "oid": sha256(bytes), "size": n, "pointerSize": 134 });
        }
        file
    });
    entries.collect()
}

/// Responds like the hub for `MODEL` with these files. Files in Git LFS are redirected to `cdn`.
pub fn answer(files: &Files, cdn: &str, request: &Request) -> Response {
    let path = request.target.split('?').next().unwrap_or_default();
    if let Some(rest) = path.strip_prefix(&format!("/api/models/{MODEL}/revision/")) {
        return match rest {
            "main" | "v1" | COMMIT | "refs%2Fpr%2F1" => {
                Response::new(200, listing(MODEL, files).to_string())
            }
            _ => Response::error(404, "RevisionNotFound", "Invalid rev id: x"),
        };
    }
    if path == format!("/api/models/{MODEL}/tree/{COMMIT}") {
        return Response::new(200, tree(files).to_string())
            .with("Content-Type", "application/json");
    }
    let Some(name) = path.strip_prefix(&format!("/{MODEL}/resolve/{COMMIT}/")) else {
        return Response::error(401, "", "Invalid username or password.");
    };
    let Some(bytes) = files.get(name) else {
        return Response::error(404, "EntryNotFound", "Entry not found");
    };
    let tag = etag(name, bytes);
    match is_lfs(name) {
        true => Response::new(302, "")
            .with("Location", format!("{cdn}/blob/{tag}?Signature=secret"))
            .with("X-Linked-Etag", format!("\"{tag}\""))
            .with("X-Linked-Size", bytes.len())
            .with("X-Repo-Commit", COMMIT),
        false => Response::ranged(request, bytes)
            .with("ETag", format!("\"{tag}\""))
            .with("X-Repo-Commit", COMMIT),
    }
}

/// Responds like the Git LFS store.
pub fn stored(files: &Files, request: &Request) -> Response {
    let path = request.target.split('?').next().unwrap_or_default();
    let found = files
        .values()
        .find(|bytes| path == format!("/blob/{}", sha256(bytes)));
    match found {
        // The store's ETags differ from the hub's.
        Some(bytes) => Response::ranged(request, bytes).with("ETag", "\"multipart-7\""),
        None => Response::error(404, "", "not found"),
    }
}

/// Starts a hub with these files, and a store for the files in Git LFS.
pub fn hub(files: Files) -> (Server, Server) {
    let own = files.clone();
    let cdn = Server::start(move |request| stored(&own, request));
    let at = cdn.url.clone();
    let hub = Server::start(move |request| answer(&files, &at, request));
    (hub, cdn)
}

/// Reads the files of a folder. Symbolic links to folders are skipped.
pub fn files_of(folder: &Path) -> Files {
    let mut files = Files::new();
    read(folder, "", &mut files);
    files
}

fn read(folder: &Path, prefix: &str, files: &mut Files) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let entry = entry.expect("an entry");
        let name = entry.file_name().into_string().expect("a name");
        let name = format!("{prefix}{name}");
        match entry.path().is_dir() {
            true => read(&entry.path(), &format!("{name}/"), files),
            false => {
                files.insert(name, std::fs::read(entry.path()).expect("a file"));
            }
        }
    }
}
