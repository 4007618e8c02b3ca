//! Tests of the response cache: cached responses are bitwise equal to computed ones, and damaged or lost storage of the cache never changes
//! a response.

use std::{
    fs,
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use gemmule::serve::{
    Answer, Cache, CacheChoice, Lookup, Model, ModelChoice, ServeError, Submit, Text, Tier,
};

use super::{Serving, choice, embedding, exchange, service, within};

fn with(cache: &CacheChoice) -> (Model, Arc<Cache>) {
    let cache = Arc::new(Cache::open(cache).unwrap());
    let model = Model::open(ModelChoice {
        cache: Some(Arc::clone(&cache)),
        ..choice("packed")
    });
    (model.unwrap(), cache)
}

fn in_memory() -> CacheChoice {
    CacheChoice {
        memory_bytes: 1 << 20,
        ..CacheChoice::default()
    }
}

fn in_file(file: &Path) -> CacheChoice {
    CacheChoice {
        memory_bytes: 1 << 20,
        file: Some((file.to_owned(), 1 << 20)),
        ..CacheChoice::default()
    }
}

fn texts() -> Vec<Text> {
    let one = |text: &str| Text::One(text.to_owned());
    let mut texts = vec![one("a small bird"), one("rain"), Text::Ids(vec![5, 9, 11])];
    texts.extend((0..20).map(|i| one(&format!("the tower is {i} metres high"))));
    texts
}

fn ask(model: &Model, texts: Vec<Text>) -> Vec<Answer> {
    let replies = service(model).submit(texts, within(60_000)).unwrap();
    replies.into_iter().map(|r| r.wait().unwrap()).collect()
}

/// Returns the responses of a model without a cache to [`texts`].
fn computed() -> Vec<Answer> {
    let model = Model::open(choice("packed")).unwrap();
    ask(&model, texts())
}

fn assert_equal(found: &[Answer], expected: &[Answer]) {
    let bits = |answers: &[Answer]| -> Vec<(usize, Vec<u32>)> {
        let of = |a: &Answer| (a.tokens, a.values.iter().map(|v| v.to_bits()).collect());
        answers.iter().map(of).collect()
    };
    assert_eq!(bits(found), bits(expected));
}

fn count(model: &Model, tier: Tier, lookup: Lookup) -> u64 {
    model.metrics().cache.read(tier, lookup)
}

#[test]
fn what_is_kept_is_what_was_computed_by_bits() {
    let expected = computed();
    let n = expected.len() as u64;
    let (model, cache) = with(&in_memory());
    for round in 0..3 {
        assert_equal(&ask(&model, texts()), &expected);
        assert_eq!(count(&model, Tier::Memory, Lookup::Hit), round * n);
        assert_eq!(count(&model, Tier::Memory, Lookup::Miss), n);
    }
    assert_eq!(model.metrics().batch_sequences.load(Ordering::Relaxed), n);
    assert!(cache.bytes(Tier::Memory) > n * 128);
    // A cache that is too small for all responses stays within its size, and all requests are still answered.
    let small = CacheChoice {
        memory_bytes: 2_000,
        ..CacheChoice::default()
    };
    let (model, cache) = with(&small);
    for _ in 0..3 {
        assert_equal(&ask(&model, texts()), &expected);
        assert!(cache.bytes(Tier::Memory) <= 2_000);
    }
}

#[test]
fn equal_requests_in_flight_are_computed_once_and_outlive_the_first() {
    let (model, _) = with(&in_memory());
    let service = service(&model);
    // Keep the model busy with other requests, so that the next requests wait together.
    let busy = service.submit(
        (0..400)
            .map(|i| Text::One(format!("other words {i}")))
            .collect(),
        Submit::default(),
    );
    let equal = || vec![Text::One("the same words".to_owned()); 8];
    let mut replies = Vec::new();
    for _ in 0..5 {
        replies.extend(service.submit(equal(), Submit::default()).unwrap());
    }
    // Equal requests share the computation of the first request. Dropping the first reply and the last reply does not affect the others.
    drop(replies.remove(0));
    drop(replies.pop());
    let answers: Vec<Answer> = replies.into_iter().map(|r| r.wait().unwrap()).collect();
    for reply in busy.unwrap() {
        reply.wait().unwrap();
    }
    assert_eq!(answers.len(), 38);
    assert!(answers.iter().all(|answer| *answer == answers[0]));
    let computed = model.metrics().batch_sequences.load(Ordering::Relaxed);
    assert_eq!(computed, 401);
    let joined = count(&model, Tier::Memory, Lookup::Joined);
    assert_eq!(joined + count(&model, Tier::Memory, Lookup::Hit), 39);
    assert!(joined > 0);
    // If all replies of equal requests are dropped, their response is not computed.
    let left = service.submit(
        vec![Text::One("nobody waits".to_owned()); 3],
        within(60_000),
    );
    drop(left);
    let again = ask(&model, vec![Text::One("nobody waits".to_owned())]);
    assert_eq!(again.len(), 1);
}

#[test]
fn a_request_that_joined_a_hasty_one_is_computed_in_its_own_time() {
    let (model, _) = with(&in_memory());
    let service = service(&model);
    let text = |i: usize| vec![Text::One(format!("words of number {i}"))];
    for i in 0..200 {
        // The deadline of the next request passes while these requests are computed.
        let busy = service.submit(
            (0..30)
                .map(|j| Text::One(format!("before {i} {j}")))
                .collect(),
            Submit::default(),
        );
        let hasty = service.submit(text(i), within(0)).unwrap();
        let patient = service.submit(text(i), within(60_000)).unwrap();
        for reply in patient {
            reply.wait().unwrap();
        }
        for reply in hasty {
            match reply.wait() {
                Ok(_) | Err(ServeError::Deadline | ServeError::Hopeless { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        drop(busy);
    }
    let metrics = model.metrics();
    let refused = &[&metrics.expired, &metrics.hopeless];
    assert!(refused.iter().any(|n| n.load(Ordering::Relaxed) > 0));
}

#[test]
fn errors_are_not_kept_and_tell_each_its_own_place() {
    let (model, cache) = with(&in_memory());
    let long = || Text::One("word ".repeat(2_000));
    let short = || Text::One("word".to_owned());
    for _ in 0..2 {
        let asked = vec![short(), long(), short(), long()];
        let replies = service(&model).submit(asked, Submit::default()).unwrap();
        let answers: Vec<_> = replies.into_iter().map(|r| r.wait()).collect();
        for at in [1, 3] {
            match &answers[at] {
                Err(ServeError::TooLong { index, .. }) => assert_eq!(*index, at),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(answers[0].as_ref().unwrap(), answers[2].as_ref().unwrap());
    }
    // The cache has only one response: two of the inputs are equal, and errors are not cached.
    let weight = cache.bytes(Tier::Memory);
    assert!(weight > 0 && weight < 1_000, "{weight}");
}

#[test]
fn a_file_keeps_answers_over_a_restart_and_within_its_size() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("answers.cache");
    let expected = computed();
    let n = expected.len() as u64;
    let (model, cache) = with(&in_file(&file));
    assert_equal(&ask(&model, texts()), &expected);
    // Only one process can open a cache file.
    let taken = Cache::open(&in_file(&file)).err().unwrap();
    let taken = format!("{taken}: {:?}", std::error::Error::source(&taken));
    assert!(taken.contains("another process has it open"), "{taken}");
    drop((model, cache));
    let (model, cache) = with(&in_file(&file));
    assert_equal(&ask(&model, texts()), &expected);
    assert_eq!(count(&model, Tier::File, Lookup::Hit), n);
    assert_eq!(model.metrics().batches.load(Ordering::Relaxed), 0);
    assert!(cache.bytes(Tier::File) > n * 128);
    drop((model, cache));
    // Another model with the same cache file does not use the cached responses of the first model.
    let cache = Arc::new(Cache::open(&in_file(&file)).unwrap());
    let other = Model::open(ModelChoice {
        folder: super::checkpoint("st-cls"),
        cache: Some(Arc::clone(&cache)),
        ..choice("packed")
    })
    .unwrap();
    ask(&other, vec![Text::One("rain".to_owned())]);
    assert_eq!(count(&other, Tier::File, Lookup::Hit), 0);
    drop((other, cache));
    let small = CacheChoice {
        file: Some((file, 3_000)),
        ..in_memory()
    };
    let (model, cache) = with(&small);
    let many = (0..100).map(|i| Text::One(format!("text {i}"))).collect();
    ask(&model, many);
    drop(model);
    let deadline = Instant::now() + Duration::from_secs(10);
    // A separate thread writes the file, so wait for it.
    let has_fit = || (1..=3_000).contains(&cache.bytes(Tier::File));
    while !has_fit() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(has_fit());
}

#[test]
fn a_damaged_file_gives_no_wrong_answer_and_is_used_again() {
    let folder = tempfile::tempdir().unwrap();
    let expected = computed();
    let n = expected.len() as u64;
    let sound = folder.path().join("sound.cache");
    let (model, cache) = with(&in_file(&sound));
    ask(&model, texts());
    drop((model, cache));
    let bytes = fs::read(&sound).unwrap();
    let torn = bytes[..bytes.len() / 3].to_vec();
    let mut scratched = bytes.clone();
    for at in (4096..scratched.len()).step_by(97) {
        scratched[at] ^= 0x55;
    }
    let mut segment = bytes.clone();
    segment[64..128].fill(0xaa);
    let mut header = bytes.clone();
    header[..64].fill(0xaa);
    let damaged = [
        ("no cache", b"what is this?".repeat(1_000), true),
        ("short", b"what?".to_vec(), true),
        ("header", header, true),
        ("torn", torn, false),
        ("scratched", scratched, false),
        ("segment", segment, false),
    ];
    for (name, bytes, is_renamed) in damaged {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("answers.cache");
        fs::write(&file, &bytes).unwrap();
        let (model, cache) = with(&in_file(&file));
        assert_equal(&ask(&model, texts()), &expected);
        let hits = count(&model, Tier::File, Lookup::Hit);
        assert!(hits < n, "{name}");
        assert_eq!(hits > 0, ["torn", "scratched"].contains(&name), "{name}");
        drop((model, cache));
        // After the file is opened again, all responses are found.
        let (model, cache) = with(&in_file(&file));
        assert_equal(&ask(&model, texts()), &expected);
        assert_eq!(count(&model, Tier::File, Lookup::Hit), n, "{name}");
        drop((model, cache));
        let names: Vec<String> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        let away = names
            .iter()
            .find(|n| n.starts_with("answers.cache.damaged-"));
        assert_eq!(away.is_some(), is_renamed, "{name}: {names:?}");
        if let Some(away) = away {
            assert_eq!(fs::read(folder.path().join(away)).unwrap(), bytes);
        }
    }
}

#[test]
fn a_file_never_exceeds_its_size_and_keeps_the_newest_answers() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("answers.cache");
    let most = 40_000;
    let choice = CacheChoice {
        file: Some((file.clone(), most)),
        ..CacheChoice::default()
    };
    let text = |i: usize| Text::One(format!("text {i}"));
    for round in 0..4 {
        let (model, cache) = with(&choice);
        for first in (0..400).step_by(20) {
            let some = (first..first + 20).map(|i| text(round * 400 + i));
            ask(&model, some.collect());
            assert!(fs::metadata(&file).unwrap().len() <= most);
            assert!(cache.bytes(Tier::File) <= most);
        }
        drop((model, cache));
        assert!(fs::metadata(&file).unwrap().len() > most * 3 / 4);
        let (model, cache) = with(&choice);
        let newest = (0..80).map(|i| text(round * 400 + 399 - i));
        ask(&model, newest.collect());
        assert_eq!(count(&model, Tier::File, Lookup::Hit), 80, "{round}");
        assert!(cache.bytes(Tier::File) > most / 2);
    }
    // Opening the file with a smaller max size shrinks the file.
    let smaller = CacheChoice {
        file: Some((file.clone(), most / 2)),
        ..CacheChoice::default()
    };
    drop(Cache::open(&smaller).unwrap());
    assert!(fs::metadata(&file).unwrap().len() <= most / 2);
    let tiny = CacheChoice {
        file: Some((file, 1_000)),
        ..CacheChoice::default()
    };
    let error = Cache::open(&tiny).err().unwrap();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(
        cause,
        "a cache file needs 1344 bytes or more, but its max size is 1000; raise --cache-file-bytes"
    );
}

#[test]
fn a_full_disk_is_told_and_the_file_is_used_again_when_there_is_room() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("answers.cache");
    let name = file.to_str().unwrap();
    // Simulate a full disk by a limit on the size of files that the server writes.
    let args = ["--cache-file", name, "--cache-file-bytes", "1048576"];
    let server = Serving::start("ulimit -S -f 8;", &args);
    let ask = |from: usize, to: usize| {
        for i in from..to {
            let response = exchange(server.to, &embedding(&format!("text {i}")));
            assert_eq!(response.status, 200, "{response:?}");
        }
    };
    let hits = || {
        let page = exchange(server.to, "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").body;
        let line = "gemmule_cache_requests_total{model=\"birds\",tier=\"file\",result=\"hit\"} ";
        let (_, rest) = page.split_once(line).unwrap();
        rest.lines().next().unwrap().parse::<usize>().unwrap()
    };
    ask(0, 100);
    let told = server.hears("cannot be written: ");
    assert!(told.starts_with("File too large"), "{told}");
    let full = fs::metadata(&file).unwrap().len();
    assert!((2_000..=8_192).contains(&full), "{full}");
    // Responses that were cached before the disk was full are still found.
    ask(0, 5);
    assert_eq!(hits(), 5);
    let child = Pid::from_child(&server.child.0);
    let room = Rlimit {
        current: None,
        maximum: None,
    };
    let no_limit = prlimit(Some(child), Resource::Fsize, room);
    no_limit.unwrap();
    std::thread::sleep(Duration::from_millis(1_200));
    ask(200, 260);
    server.hears("is written again");
    ask(200, 260);
    assert!(hits() >= 60, "{}", hits());
    assert_eq!(server.count("cannot be written: "), 1);
    let names = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(names, 1, "a sound file was renamed");
    assert!(fs::metadata(&file).unwrap().len() > full);
}

/// Tests of a shared cache in a Redis server. They are skipped if `redis-server` is not installed.
#[cfg(feature = "shared-cache")]
mod shared {
    use super::*;
    use crate::operating::{Child, found, free_port};

    fn redis() -> Option<(Child, String)> {
        let program = found("redis-server")?;
        let port = free_port();
        let child = Child::start(
            std::process::Command::new(program)
                .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
                .args(["--save", "", "--appendonly", "no"])
                .current_dir(std::env::temp_dir()),
        );
        crate::operating::wait_for_port(port);
        Some((child, format!("redis://127.0.0.1:{port}/0")))
    }

    fn sharing(url: &str) -> CacheChoice {
        CacheChoice {
            shared: Some(url.to_owned()),
            ..CacheChoice::default()
        }
    }

    /// Requests new texts until the model is connected to the Redis server.
    fn is_connected(model: &Model) {
        let began = Instant::now();
        for i in 0.. {
            ask(model, vec![Text::One(format!("are you there? {i}"))]);
            if count(model, Tier::Shared, Lookup::Miss) > 0 {
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn servers_share_answers_and_go_on_when_the_one_between_them_dies() {
        let Some((mut redis, url)) = redis() else {
            crate::operating::say(
                "there is no redis-server here (Debian: apt-get install redis-server): the shared cache is not tested",
            );
            return;
        };
        let expected = computed();
        let n = expected.len() as u64;
        let (first, _first_cache) = with(&sharing(&url));
        is_connected(&first);
        assert_equal(&ask(&first, texts()), &expected);
        let (second, _second_cache) = with(&sharing(&url));
        is_connected(&second);
        std::thread::sleep(Duration::from_millis(50));
        // Request the texts one at a time and repeatedly, because on a busy machine a lookup may exceed its limit of two milliseconds.
        let before = second.metrics().batch_sequences.load(Ordering::Relaxed);
        let hits_before = count(&second, Tier::Shared, Lookup::Hit);
        let hits = || count(&second, Tier::Shared, Lookup::Hit) - hits_before;
        let (mut asked, began) = (0, Instant::now());
        while hits() < n {
            assert!(
                began.elapsed() < Duration::from_secs(20),
                "{} of {n}",
                hits()
            );
            for (text, expected) in texts().into_iter().zip(&expected) {
                assert_equal(&ask(&second, vec![text]), std::slice::from_ref(expected));
                asked += 1;
            }
        }
        let computed = second.metrics().batch_sequences.load(Ordering::Relaxed) - before;
        assert_eq!(computed, asked - hits());

        // A Redis server that does not respond delays a request only up to the limit of a lookup.
        redis.stop();
        let (third, _third_cache) = with(&sharing(&url));
        let began = Instant::now();
        assert_equal(&ask(&third, texts()), &expected);
        assert!(began.elapsed() < Duration::from_secs(2));
        redis.go_on();
        redis.kill();
        for _ in 0..3 {
            let more = (0..50).map(|i| Text::One(format!("after {i}"))).collect();
            let began = Instant::now();
            assert_eq!(ask(&second, more).len(), 50);
            assert!(began.elapsed() < Duration::from_secs(2));
        }
        assert_equal(&ask(&second, texts()), &expected);
        assert!(count(&second, Tier::Shared, Lookup::Error) > 0);
    }

    #[test]
    fn an_address_that_is_none_is_an_error() {
        let error = Cache::open(&sharing("memcached:11211")).err().unwrap();
        assert!(
            error
                .to_string()
                .contains("expected, for example, redis://127.0.0.1:6379/0"),
            "{error}"
        );
    }
}
