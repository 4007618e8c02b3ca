//! Tests the status page in headless Chromium, if it is installed.
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use gemmule::{
    DeviceChoice,
    http::{HttpChoice, Server},
    schedule::{CostTable, Settings, scheduler},
    serve::{Model, ModelChoice, Models},
};

fn chromium() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folders = std::env::split_paths(&path);
    let mut programs =
        folders.flat_map(|f| ["chromium", "chromium-browser"].map(|name| f.join(name)));
    programs.find(|program| program.is_file())
}

#[test]
fn a_browser_shows_model_load_and_latency() {
    let Some(chromium) = chromium() else {
        // Write to standard error directly, because the test harness captures what `eprintln!` writes.
        let _ = writeln!(
            std::io::stderr(),
            "the status page was not tried in a browser: there is no chromium on the path"
        );
        return;
    };
    let costs = CostTable::parse(include_str!("../../examples/costs.ron")).unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints/st-mean");
    let model = Model::open(ModelChoice {
        folder,
        name: "a model <b>of</b> words".to_owned(),
        devices: vec![DeviceChoice::Cpu],
        dtype: None,
        kv_dtype: Default::default(),
        max_context: None,
        invariant: false,
        scheduler: scheduler("packed", &Settings::default()).unwrap(),
        costs: Some(costs),
        batch_bytes: 1 << 30,
        cache_bytes: None,
        queue: Duration::from_secs(10),
        tokenizers: 1,
        all_tokens: false,
        sparse: false,
        token_vectors: false,
        fill_mask: false,
        default_prompt: Default::default(),
        task: None,
        route_of: None,
        share: None,
        previous: None,
        trace: None,
        cache: None,
    });
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::start(
        socket,
        Models::new(vec![model.unwrap()]),
        HttpChoice::default(),
    )
    .unwrap();
    let to = server.address();
    let is_over = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&is_over);
    let load = thread::spawn(move || {
        while !over.load(Ordering::Relaxed) {
            let body = "{\"input\": [\"some words\", \"more of them\"]}";
            let head =
                "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: ";
            let mut stream = TcpStream::connect(to).unwrap();
            write!(stream, "{head}{}\r\n\r\n{body}", body.len()).unwrap();
            stream.read_to_end(&mut Vec::new()).unwrap();
            thread::sleep(Duration::from_millis(5));
        }
    });
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new(chromium)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--virtual-time-budget=6000",
            "--dump-dom",
        ])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("http://{to}/"))
        .output()
        .unwrap();
    is_over.store(true, Ordering::Relaxed);
    load.join().unwrap();
    let page = String::from_utf8_lossy(&output.stdout);
    for part in [
        "<span class=\"badge good\" id=\"state\">ready</span>",
        // HTML in a model's name is escaped.
        "a model &lt;b&gt;of&lt;/b&gt; words",
        "embeds texts · f32 on CPU",
        "<h3>Batch fill</h3>",
        "<polyline points=",
        "200: ",
    ] {
        assert!(page.contains(part), "there is no {part} in\n{page}");
    }
    let between = |from: &str| {
        page.split(from)
            .nth(1)
            .and_then(|rest| rest.split('<').next())
    };
    for id in ["rate", "latency"] {
        let shown = page
            .split(&format!("id=\"{id}\">"))
            .nth(1)
            .unwrap_or_default();
        let number = shown
            .trim_start_matches("<span class=\"\">")
            .trim_start_matches("<span>");
        assert!(
            number.starts_with(|c: char| c.is_ascii_digit()),
            "{id}: {}",
            &shown[..40]
        );
    }
    let tokens = between("<h3>Tokens per second</h3><b>");
    assert!(tokens.is_some_and(|n| n != "0"), "{tokens:?}");
    server.shut_down(Duration::ZERO);
}
