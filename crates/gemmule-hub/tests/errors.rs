//! Tests errors of fetching from a local hub.

mod fixture;
mod server;

use std::{
    fs,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use fixture::{WEIGHTS, blob, check, client, fetch, files, folder, hub_where, id, incomplete};
use gemmule_hub::{HubError, Token};
use server::{COMMIT, MODEL, Response, Server, listing};

#[test]
fn attempts_are_bounded() {
    let (server, cdn) = hub_where(|r| {
        r.target.starts_with("/blob/").then(|| Response {
            cut: Some(0),
            ..Response::ranged(r, &files()[WEIGHTS])
        })
    });
    let cache = folder();
    let error = fetch(&client(&server.url, &cache)).unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    assert_eq!(cdn.requests().len(), 3);
    assert!(!cache.path().join("models--org--tiny/refs/main").exists());
}

#[test]
fn a_busy_server_is_asked_again() {
    for status in [429, 500, 503] {
        let n = AtomicUsize::new(0);
        let (server, _) = hub_where(move |r| {
            let is_list = r.target.starts_with("/api/");
            (is_list && n.fetch_add(1, Ordering::SeqCst) == 0)
                .then(|| Response::new(status, "").with("Retry-After", 0))
        });
        let cache = folder();
        check(&fetch(&client(&server.url, &cache)).unwrap(), &files());
    }
    let busy = Server::start(|_| Response::new(429, "").with("Retry-After", 3600));
    let error = fetch(&client(&busy.url, &folder())).unwrap_err();
    assert_eq!(busy.requests().len(), 1);
    assert!(
        matches!(
            error,
            HubError::TooManyRequests {
                seconds: Some(3600),
                ..
            }
        ),
        "{error}"
    );
    let down = Server::start(|_| Response::new(502, ""));
    let error = fetch(&client(&down.url, &folder())).unwrap_err();
    assert_eq!(down.requests().len(), 3);
    assert!(
        matches!(error, HubError::Status { status: 502, .. }),
        "{error}"
    );
}

#[test]
fn damaged_contents_are_refused() {
    let damaged = |change: fn(&mut Vec<u8>)| {
        let (server, _) = hub_where(move |r| {
            let mut bytes = files()[WEIGHTS].clone();
            change(&mut bytes);
            r.target
                .starts_with("/blob/")
                .then(|| Response::new(200, bytes))
        });
        let cache = folder();
        let error = fetch(&client(&server.url, &cache)).unwrap_err();
        assert!(!blob(&cache, WEIGHTS).exists());
        (error, incomplete(&cache, WEIGHTS).exists())
    };
    let (error, is_left) = damaged(|bytes| bytes[7] ^= 1);
    assert!(matches!(error, HubError::WrongHash { .. }), "{error}");
    assert!(!is_left);
    let (error, is_left) = damaged(|bytes| bytes.push(1));
    assert!(matches!(error, HubError::WrongSize { .. }), "{error}");
    assert!(!is_left);
    let (error, _) = damaged(|bytes| bytes.truncate(5));
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    // The hashes of files outside of Git LFS are verified, too.
    let (server, _) = hub_where(|r| {
        r.target
            .ends_with(&format!("{COMMIT}/config.json"))
            .then(|| Response::new(200, "[\"model_type\", \"bert\"]"))
    });
    let error = fetch(&client(&server.url, &folder())).unwrap_err();
    assert!(matches!(error, HubError::WrongHash { .. }), "{error}");
}

#[test]
fn hostile_names_are_refused_before_anything_is_written() {
    for name in ["../../../evil", "/tmp/evil", "a\\..\\b", "a\u{1b}[2Jb"] {
        let (server, _) = hub_where(move |r| {
            let mut files = files();
            files.insert(name.to_owned(), b"evil".to_vec());
            r.target
                .starts_with("/api/")
                .then(|| Response::new(200, listing(MODEL, &files).to_string()))
        });
        let cache = folder();
        let error = fetch(&client(&server.url, &cache)).unwrap_err();
        assert!(matches!(error, HubError::BadName { .. }), "{error}");
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0);
    }
}

/// Writing to `/dev/full` fails as on a full disk.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_named() {
    let (server, _) = server::hub(files());
    let cache = folder();
    fs::create_dir_all(cache.path().join("models--org--tiny/blobs")).unwrap();
    std::os::unix::fs::symlink("/dev/full", incomplete(&cache, WEIGHTS)).unwrap();
    let error = fetch(&client(&server.url, &cache)).unwrap_err();
    assert!(matches!(error, HubError::DiskFull { .. }), "{error}");
    let left = "of which 3000000 bytes are left; free some space";
    assert!(error.to_string().contains(left), "{error}");
    assert!(!cache.path().join("models--org--tiny/refs/main").exists());
}

#[test]
fn sizes_of_a_hostile_list_do_not_overflow() {
    let server = Server::start(|r| {
        let file = |name: &str| {
            format!(
                r#"{{"rfilename": "{name}", "size": {}, "blobId": "{COMMIT}"}}"#,
                u64::MAX
            )
        };
        let files = format!("{}, {}", file("a"), file("b"));
        let json = format!(r#"{{"sha": "{COMMIT}", "siblings": [{files}]}}"#);
        match r.target.starts_with("/api/") {
            true => Response::new(200, json),
            false => Response::new(404, ""),
        }
    });
    let error = fetch(&client(&server.url, &folder())).unwrap_err();
    assert!(matches!(error, HubError::NoFile { .. }), "{error}");
}

#[test]
fn a_list_is_limited() {
    let server = Server::start(|_| Response::new(200, vec![b' '; (32 << 20) + 1]));
    let error = fetch(&client(&server.url, &folder())).unwrap_err();
    assert!(matches!(error, HubError::TooLarge { .. }), "{error}");
    let server = Server::start(|_| Response::new(200, "<html>"));
    let error = fetch(&client(&server.url, &folder())).unwrap_err();
    assert!(matches!(error, HubError::BadListing { .. }), "{error}");
}

#[test]
fn refusals_say_what_to_do() {
    let refused = |list: bool, token: bool, status: u16, code: &'static str, text: &'static str| {
        let (server, _) = hub_where(move |r| {
            (r.target.starts_with("/api/") == list).then(|| Response::error(status, code, text))
        });
        let cache = folder();
        let mut hub = client(&server.url, &cache);
        hub.token = token.then(|| Token::new("hf_x").unwrap());
        hub.network.connections = 1;
        let error = fetch(&hub).unwrap_err();
        error.to_string().replace(&server.url, "[hub]")
    };
    let missing =
        "there is no model `org/tiny` at [hub]; check the name; private repositories need HF_TOKEN";
    let user = "Invalid username or password.";
    assert_eq!(refused(true, false, 401, "", user), missing);
    assert_eq!(
        refused(true, true, 404, "RepoNotFound", "Repository not found"),
        missing
    );
    assert_eq!(
        refused(
            true,
            true,
            401,
            "",
            "Invalid credentials in Authorization header"
        ),
        "the hub does not accept the access token; make a new one at [hub]/settings/tokens and set HF_TOKEN, or remove the old one if the model is public"
    );
    let text = "Access to model org/tiny is restricted";
    assert_eq!(
        refused(false, false, 401, "GatedRepo", text),
        "`org/tiny` is gated; accept its conditions at [hub]/org/tiny while signed in, and set HF_TOKEN to a token of that account"
    );
    assert_eq!(
        refused(false, true, 403, "GatedRepo", text),
        "`org/tiny` is gated; accept its conditions at [hub]/org/tiny while signed in, with the account of the token"
    );
    assert_eq!(
        refused(true, true, 403, "", "Access to this resource is disabled."),
        "the hub forbids access to `org/tiny`: Access to this resource is disabled.; set HF_TOKEN to a token that may read the model"
    );
    assert_eq!(
        refused(false, true, 404, "EntryNotFound", ""),
        format!(
            "the hub lists `1_Pooling/config.json` of `org/tiny` at commit {COMMIT}, and does not have it; try again, and report it to the owner of the model if it stays"
        )
    );
}

#[test]
fn redirects_are_bounded() {
    let server = Server::start(|r| Response::new(302, "").with("Location", &r.target));
    let error = fetch(&client(&server.url, &folder())).unwrap_err();
    assert!(matches!(error, HubError::BadRedirect { .. }), "{error}");
    assert_eq!(server.requests().len(), 11);
}

#[test]
fn a_bad_endpoint_is_named() {
    for bad in [
        "",
        "hub.test",
        "ftp://hub.test",
        "http://",
        "http://u:p@hub.test",
        "x y",
    ] {
        let error = fetch(&client(bad, &folder())).unwrap_err();
        assert!(
            matches!(error, HubError::BadEndpoint { .. }),
            "{bad}: {error}"
        );
    }
}

#[test]
fn a_file_without_a_hash_is_refused_if_it_is_wanted() {
    let server = Server::start(|_| {
        let json = format!(r#"{{"sha": "{COMMIT}", "siblings": [{{"rfilename": "x.json"}}]}}"#);
        Response::new(200, json)
    });
    let hub = client(&server.url, &folder());
    let error = fetch(&hub).unwrap_err();
    assert!(matches!(error, HubError::NoHash { .. }), "{error}");
    hub.snapshot(&id(), |_| false, &|_| ()).unwrap();
}

#[test]
fn a_silent_server_is_left() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut hub = client(&url, &folder());
    hub.network.timeout = Duration::from_millis(50);
    let error = fetch(&hub).unwrap_err();
    assert!(
        error.to_string().contains("does not answer in time"),
        "{error}"
    );
}
