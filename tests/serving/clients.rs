//! Tests the server with popular Python clients. `make test` installs their packages (`tests/clients/requirements.txt`) into a separate
//! environment.
use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the Python of the clients' environment, and the checkpoint folder of all-MiniLM-L6-v2. If one of them is missing, prints a
/// message and returns `None`, or panics in CI.
fn installed() -> Option<(PathBuf, PathBuf)> {
    let set = std::env::var_os("GEMMULE_CLIENTS").map(PathBuf::from);
    let clients = set.unwrap_or_else(|| root().join(".gemmule/clients"));
    let python = clients.join("bin/python");
    let checkpoint = std::env::var_os("GEMMULE_CHECKPOINT_MINILM").map(PathBuf::from);
    let checkpoint = checkpoint.filter(|folder| folder.is_dir());
    let missing = match (python.is_file(), &checkpoint) {
        (true, Some(_)) => return checkpoint.map(|checkpoint| (python, checkpoint)),
        (false, _) => format!("there is no {}", python.display()),
        (true, None) => "GEMMULE_CHECKPOINT_MINILM names no folder".to_owned(),
    };
    let said = format!(
        "the server was not asked by real clients: {missing}; `make test` installs what they need"
    );
    assert!(std::env::var_os("CI").is_none(), "{said}");
    // Write to standard error directly, because the test harness captures and hides what `eprintln!` writes in tests that pass.
    let _ = writeln!(std::io::stderr(), "{said}");
    None
}

/// A server in a separate process, which is killed on drop.
struct Served {
    child: Child,
    url: String,
}

impl Served {
    fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_gemmule"))
            .args(["serve", "--port", "0", "--device", "cpu"])
            .args(arguments)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let url = loop {
            let before = said.len();
            assert!(lines.read_line(&mut said).unwrap() > 0, "{said}");
            if let Some((_, url)) = said[before..].split_once("listening on ") {
                break url.trim().to_owned();
            }
        };
        // Read and drop further output, so that the server does not block on a full pipe.
        std::thread::spawn(move || lines.lines().count());
        Self { child, url }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn succeeds(command: &mut Command) {
    let output = command.output().unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{command:?}\n{out}\n{err}");
}

#[test]
fn the_clients_of_openai_hugging_face_langchain_and_cohere_work_and_the_document_is_true() {
    let Some((python, checkpoint)) = installed() else {
        return;
    };
    // A copy of the checkpoint `writer`, which generates text, with a chat template.
    let folder = tempfile::tempdir().unwrap();
    let writer = folder.path().join("writer");
    std::fs::create_dir(&writer).unwrap();
    for file in std::fs::read_dir(root().join("tests/checkpoints/writer")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), writer.join(file.file_name())).unwrap();
    }
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    std::fs::write(writer.join("chat_template.jinja"), template).unwrap();
    let keys = folder.path().join("keys");
    // The SHA-256 digest of the key `secret`.
    let digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
    std::fs::write(&keys, format!("me {digest}\n")).unwrap();
    let ranker = root().join("tests/checkpoints/ce-one");
    let server = Served::start(&[
        "--weights",
        checkpoint.to_str().unwrap(),
        "--name",
        "embedder",
        "--weights",
        writer.to_str().unwrap(),
        "--name",
        "writer",
        "--weights",
        ranker.to_str().unwrap(),
        "--name",
        "ranker",
        "--api-keys",
        keys.to_str().unwrap(),
    ]);
    let clients = root().join("tests/clients");
    succeeds(
        Command::new(&python)
            .arg(clients.join("clients.py"))
            .args([&server.url, "secret", "embedder", "writer", "ranker"])
            .env("HF_HUB_DISABLE_TELEMETRY", "1")
            .env("LANGSMITH_TRACING", "false"),
    );
    // Schemathesis checks that responses match the OpenAPI document, and that requests which violate it are refused. The server may also
    // refuse requests that match the document, because the document does not contain a model's limits, such as its number of positions.
    succeeds(
        Command::new(python.with_file_name("st"))
            .arg("--config-file")
            .arg(clients.join("schemathesis.toml"))
            .args(["run", &format!("{}/openapi.json", server.url)])
            .args(["-H", "Authorization: Bearer secret"])
            .args([
                "--checks",
                "all",
                "--exclude-checks",
                "positive_data_acceptance",
            ])
            .args([
                "--phases",
                "coverage,fuzzing",
                "--max-examples",
                "8",
                "--max-time",
                "20",
            ])
            .args([
                "--seed",
                "1",
                "--no-shrink",
                "--warnings",
                "off",
                "--request-timeout",
                "60",
            ])
            .env("HYPOTHESIS_STORAGE_DIRECTORY", folder.path())
            .current_dir(folder.path()),
    );
}
