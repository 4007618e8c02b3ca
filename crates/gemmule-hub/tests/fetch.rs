//! Tests fetching from a local hub.

mod fixture;
mod server;

use std::{
    fs,
    path::Path,
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use fixture::{
    WEIGHTS, blob, check, client, fetch, fetch_told, files, folder, hub_where, id, incomplete,
    wanted,
};
use gemmule_hub::{Hub, HubError, ModelId, Proxies, Token};
use server::{COMMIT, Request, Response, Server, answer, etag, sha256};

#[test]
fn a_model_is_fetched_into_the_layout_of_python() {
    let (server, cdn) = server::hub(files());
    let cache = folder();
    let hub = Hub {
        token: Token::new("hf_secret"),
        ..client(&server.url, &cache)
    };
    let root = cache.path().join("models--org--tiny");
    let found = fetch(&hub).unwrap();
    assert_eq!(found, root.join("snapshots").join(COMMIT));
    check(&found, &files());
    assert_eq!(fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    let link = |name: &str| fs::read_link(found.join(name)).unwrap();
    let config = etag("config.json", &files()["config.json"]);
    assert_eq!(link("config.json"), Path::new("../../blobs").join(&config));
    let pooling = etag("x", b"{}");
    assert_eq!(
        link("1_Pooling/config.json"),
        Path::new("../../../blobs").join(pooling)
    );
    let weights = sha256(&files()[WEIGHTS]);
    assert_eq!(link(WEIGHTS), Path::new("../../blobs").join(&weights));
    let lock = format!(".locks/models--org--tiny/{weights}.lock");
    assert!(cache.path().join(lock).is_file());
    let left = fs::read_dir(root.join("blobs")).unwrap().flatten();
    let left = left.filter(|e| e.path().extension().is_some()).count();
    assert_eq!(left, 0, "nothing incomplete is left");
    // Every request to the hub has the token, and no other request does.
    let token = |r: &Request| r.header("authorization").map(str::to_owned);
    assert!(
        server
            .requests()
            .iter()
            .all(|r| token(r).as_deref() == Some("Bearer hf_secret"))
    );
    assert_eq!(cdn.requests().len(), 1);
    assert!(cdn.requests().iter().all(|r| token(r).is_none()));
}

#[test]
fn a_second_fetch_asks_for_the_list_alone() {
    let (server, cdn) = server::hub(files());
    let cache = folder();
    let hub = client(&server.url, &cache);
    let found = fetch(&hub).unwrap();
    server.forget();
    cdn.forget();
    let (again, lines) = fetch_told(&hub);
    assert_eq!((again.unwrap(), lines), (found, vec![]));
    assert_eq!((server.requests().len(), cdn.requests().len()), (1, 0));
    let target = &server.requests()[0].target;
    assert_eq!(target, "/api/models/org/tiny/revision/main?blobs=true");
}

#[test]
fn offline_uses_the_cache_alone() {
    let (server, _) = server::hub(files());
    let cache = folder();
    let hub = client(&server.url, &cache);
    let offline = Hub {
        offline: true,
        ..hub.clone()
    };
    let error = fetch(&offline).unwrap_err();
    assert!(matches!(error, HubError::Offline { .. }), "{error}");
    assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
    let found = fetch(&hub).unwrap();
    server.forget();
    assert_eq!(fetch(&offline).unwrap(), found);
    let tag = ModelId::parse("org/tiny@v1").unwrap();
    let error = offline.snapshot(&tag, wanted, &|_| ()).unwrap_err();
    assert!(matches!(error, HubError::Offline { .. }), "{error}");
    let commit = ModelId::parse(&format!("org/tiny@{COMMIT}")).unwrap();
    assert_eq!(offline.snapshot(&commit, wanted, &|_| ()).unwrap(), found);
    // A file list in the cache shows that a file is missing.
    let trees = cache.path().join("models--org--tiny/trees");
    fs::create_dir(&trees).unwrap();
    let tree = r#"{"format_version": 1, "files": {"config.json": {}, "vocab.txt": {}}}"#;
    fs::write(trees.join(format!("{COMMIT}.json")), tree).unwrap();
    let error = fetch(&offline).unwrap_err();
    assert!(
        matches!(&error, HubError::OfflineFile { file, .. } if file == "vocab.txt"),
        "{error}"
    );
    assert_eq!(server.requests().len(), 0);
}

#[test]
fn a_cached_snapshot_is_used_if_the_hub_is_gone() {
    let (server, _) = server::hub(files());
    let cache = folder();
    let found = fetch(&client(&server.url, &cache)).unwrap();
    let busy = Server::start(|_| Response::new(503, ""));
    // The listener is closed, so its port refuses connections.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let gone = format!("http://{}", closed.local_addr().unwrap());
    drop(closed);
    for endpoint in [&busy.url, &gone] {
        let (again, lines) = fetch_told(&client(endpoint, &cache));
        assert_eq!(again.unwrap(), found);
        let last = lines.last().unwrap();
        assert!(last.contains("as it is in the cache"), "{last}");
        assert!(last.contains(COMMIT), "{last}");
    }
    // An incomplete snapshot is not used.
    fs::remove_file(found.join(WEIGHTS)).unwrap();
    let trees = cache.path().join("models--org--tiny/trees");
    fs::create_dir(&trees).unwrap();
    let tree = r#"{"format_version": 1, "files": {"model.safetensors": {}}}"#;
    fs::write(trees.join(format!("{COMMIT}.json")), tree).unwrap();
    let error = fetch(&client(&gone, &cache)).unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
}

#[test]
fn an_interrupted_fetch_is_continued() {
    let (server, cdn) = server::hub(files());
    let cache = folder();
    fs::create_dir_all(cache.path().join("models--org--tiny/blobs")).unwrap();
    let weights = &files()[WEIGHTS];
    fs::write(incomplete(&cache, WEIGHTS), &weights[..1_000_000]).unwrap();
    check(&fetch(&client(&server.url, &cache)).unwrap(), &files());
    let ranges: Vec<_> = cdn.requests().iter().map(Request::from).collect();
    assert_eq!(ranges, [Some(1_000_000)]);
}

#[test]
fn a_complete_part_needs_no_request_and_a_longer_one_starts_again() {
    for (extra, n_requests) in [(0, 0), (1, 1)] {
        let (server, cdn) = server::hub(files());
        let cache = folder();
        fs::create_dir_all(cache.path().join("models--org--tiny/blobs")).unwrap();
        let mut bytes = files()[WEIGHTS].clone();
        bytes.extend(vec![7; extra]);
        fs::write(incomplete(&cache, WEIGHTS), bytes).unwrap();
        check(&fetch(&client(&server.url, &cache)).unwrap(), &files());
        assert_eq!(cdn.requests().len(), n_requests);
    }
}

#[test]
fn a_part_of_other_contents_starts_again() {
    let (server, cdn) = server::hub(files());
    let cache = folder();
    fs::create_dir_all(cache.path().join("models--org--tiny/blobs")).unwrap();
    fs::write(incomplete(&cache, WEIGHTS), vec![9; 1000]).unwrap();
    check(&fetch(&client(&server.url, &cache)).unwrap(), &files());
    let ranges: Vec<_> = cdn.requests().iter().map(Request::from).collect();
    assert_eq!(ranges, [Some(1000), None]);
}

#[test]
fn a_server_without_ranges_starts_again() {
    for wrong_range in [false, true] {
        let (server, _) = hub_where(move |r| {
            let is_blob = r.target.starts_with("/blob/") && r.from().is_some();
            let whole = files()[WEIGHTS].clone();
            match (is_blob, wrong_range) {
                (false, _) => None,
                (true, false) => Some(Response::new(200, whole)),
                (true, true) => {
                    let range = "bytes 0-2999999/3000000";
                    Some(Response::new(206, whole).with("Content-Range", range))
                }
            }
        });
        let cache = folder();
        fs::create_dir_all(cache.path().join("models--org--tiny/blobs")).unwrap();
        let weights = &files()[WEIGHTS];
        fs::write(incomplete(&cache, WEIGHTS), &weights[..1000]).unwrap();
        check(&fetch(&client(&server.url, &cache)).unwrap(), &files());
    }
}

#[test]
fn a_broken_connection_is_continued() {
    let n = AtomicUsize::new(0);
    let (server, cdn) = hub_where(move |r| {
        let is_blob = r.target.starts_with("/blob/");
        (is_blob && n.fetch_add(1, Ordering::SeqCst) < 2).then(|| Response {
            cut: Some(500_000),
            ..Response::ranged(r, &files()[WEIGHTS])
        })
    });
    let cache = folder();
    let (found, lines) = fetch_told(&client(&server.url, &cache));
    check(&found.unwrap(), &files());
    let ranges: Vec<_> = cdn.requests().iter().map(Request::from).collect();
    assert_eq!(ranges, [None, Some(500_000), Some(1_000_000)]);
    assert!(
        lines.iter().any(|line| line.contains("trying again")),
        "{lines:?}"
    );
}

#[test]
fn a_damaged_blob_in_the_cache_is_fetched_again() {
    let (server, _) = server::hub(files());
    let cache = folder();
    let hub = client(&server.url, &cache);
    fetch(&hub).unwrap();
    fs::write(blob(&cache, WEIGHTS), b"short").unwrap();
    check(&fetch(&hub).unwrap(), &files());
}

#[test]
fn revisions_are_asked_for() {
    let (server, _) = server::hub(files());
    let cache = folder();
    let hub = client(&server.url, &cache);
    let fetch = |id: &str| hub.snapshot(&ModelId::parse(id).unwrap(), wanted, &|_| ());
    let error = fetch("org/tiny@v9").unwrap_err();
    assert!(
        matches!(&error, HubError::NoRevision { revision, .. } if revision == "v9"),
        "{error}"
    );
    check(&fetch("org/tiny@v1").unwrap(), &files());
    fetch("org/tiny@refs/pr/1").unwrap();
    fetch(&format!("org/tiny@{COMMIT}")).unwrap();
    let refs = cache.path().join("models--org--tiny/refs");
    let refs = |name: &str| fs::read_to_string(refs.join(name)).ok();
    assert_eq!(refs("v1").as_deref(), Some(COMMIT));
    assert_eq!(refs("refs/pr/1").as_deref(), Some(COMMIT));
    assert_eq!((refs(COMMIT), refs("main"), refs("v9")), (None, None, None));
}

#[test]
fn a_renamed_model_is_followed() {
    let (server, _) = server::hub(files());
    let cache = folder();
    let hub = client(&server.url, &cache);
    let at = server.url.clone();
    let front = Server::start(move |r| {
        let to = r.target.replace("org/old", "org/tiny");
        Response::new(307, "").with("Location", format!("{at}{to}"))
    });
    // The token is not sent to another port.
    let hub = Hub {
        endpoint: front.url.clone(),
        token: Token::new("hf_secret"),
        ..hub
    };
    let old = ModelId::parse("org/old").unwrap();
    let lines = Mutex::new(Vec::new());
    let found = hub.snapshot(&old, wanted, &|event| {
        lines.lock().unwrap().push(event.to_string());
    });
    check(&found.unwrap(), &files());
    assert!(cache.path().join("models--org--old/refs/main").is_file());
    assert_eq!(
        lines.into_inner().unwrap()[0],
        "`org/old` is called `org/tiny` now; use the new name"
    );
    let tokens = |server: &Server| {
        let requests = server.requests();
        let n = requests
            .iter()
            .filter(|r| r.header("authorization").is_some());
        (n.count(), requests.len())
    };
    assert_eq!(tokens(&front).0, tokens(&front).1);
    assert_eq!(tokens(&server).0, 0);
}

#[test]
fn files_that_name_others_are_fetched_first() {
    let (server, cdn) = server::hub(files());
    let cache = folder();
    let hub = client(&server.url, &cache);
    let wanted = |names: &[&str], folder: &Path| {
        assert!(names.contains(&WEIGHTS) || !folder.join(WEIGHTS).exists());
        let mut wanted = vec!["config.json".to_owned()];
        if folder.join("config.json").is_file() {
            wanted.push(WEIGHTS.to_owned());
        }
        wanted
    };
    let found = hub.snapshot_by(&id(), wanted, &|_| ()).unwrap();
    assert!(found.join(WEIGHTS).is_file());
    assert!(!found.join("1_Pooling").exists());
    assert_eq!(cdn.requests().len(), 1);
    let offline = Hub {
        offline: true,
        ..hub
    };
    assert_eq!(offline.snapshot_by(&id(), wanted, &|_| ()).unwrap(), found);
}

#[test]
fn threads_fetch_a_file_once() {
    let (server, cdn) = hub_where(|r| {
        if r.target.starts_with("/blob/") {
            thread::sleep(Duration::from_millis(200));
        }
        None
    });
    let cache = folder();
    let hub = client(&server.url, &cache);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| check(&fetch(&hub).unwrap(), &files()));
        }
    });
    assert_eq!(cdn.requests().len(), 1);
}

/// Environment variables of the process that `processes_fetch_a_file_once` starts.
const CHILD: [&str; 2] = ["GEMMULE_HUB_TEST_ENDPOINT", "GEMMULE_HUB_TEST_CACHE"];

#[test]
#[ignore = "the process that another test starts"]
fn child() {
    let [endpoint, cache] = CHILD.map(|name| std::env::var(name).expect(name));
    let hub = Hub {
        cache: cache.into(),
        ..client(&endpoint, &folder())
    };
    check(&fetch(&hub).unwrap(), &files());
}

#[test]
fn processes_fetch_a_file_once() {
    let (server, cdn) = hub_where(|r| {
        if r.target.starts_with("/blob/") {
            thread::sleep(Duration::from_millis(500));
        }
        None
    });
    let cache = folder();
    let start = || {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--ignored"])
            .env(CHILD[0], &server.url)
            .env(CHILD[1], cache.path())
            .spawn()
            .unwrap()
    };
    let mut children = [start(), start()];
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(cdn.requests().len(), 1);
    // Both processes fetched the model: each requested the list.
    let lists = server.requests();
    let lists = lists.iter().filter(|r| r.target.starts_with("/api/"));
    assert_eq!(lists.count(), 2);
}

#[test]
fn a_proxy_is_used() {
    let files = files();
    let own = files.clone();
    let server = Server::start(move |r| answer(&own, "http://cdn.test", r));
    let proxy = server::proxy(&server.url);
    let cache = folder();
    let mut hub = client("http://hub.test", &cache);
    hub.network.proxies =
        Proxies::from_variables(|name| (name == "http_proxy").then(|| proxy.url.clone())).unwrap();
    let found = hub.snapshot(&id(), |name| name == "config.json", &|_| ());
    let config = fs::read(found.unwrap().join("config.json")).unwrap();
    assert_eq!(config, files["config.json"]);
    let asked = proxy.requests();
    assert!(
        asked
            .iter()
            .all(|r| r.method == "CONNECT" && r.target == "hub.test:80")
    );
    assert!(!asked.is_empty());
}
