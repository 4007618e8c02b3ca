//! Output paths that do not refer to regular files.
#![cfg(unix)]

mod common;

use std::fs;

use common::{Known, Place, WIDTH, column, embed};
use gemmule_corpus::{CorpusError, Hooks, Job, run};

#[test]
fn outputs_that_are_no_files() {
    let place = Place::new();
    let mut job = place.job("in.txt", "a\ntoo long\n", "out.jsonl");
    let refused = |job: &Job, part: &str| {
        for overwrite in [false, true] {
            let job = Job {
                overwrite,
                ..job.clone()
            };
            let mut known = Known::new();
            let error = run(&job, &mut known, Hooks::default()).expect_err("refused");
            assert!(error.to_string().contains(part), "{error}");
            assert!(known.texts.is_empty() && !job.partial().exists());
            let columns = column(WIDTH);
            assert!(
                job.check(&columns)
                    .expect_err("refused")
                    .to_string()
                    .contains(part)
            );
        }
    };
    fs::create_dir(&job.output).expect("created");
    refused(&job, "out.jsonl` is a folder");
    fs::remove_dir(&job.output).expect("removed");
    fs::create_dir(job.errors()).expect("created");
    refused(&job, "out.jsonl.errors.jsonl` is a folder");
    fs::remove_dir(job.errors()).expect("removed");
    let made = std::process::Command::new("mkfifo")
        .arg(&job.output)
        .status();
    assert!(made.expect("it starts").success());
    refused(&job, "neither a file nor a folder");
    assert!(fs::symlink_metadata(&job.output).is_ok());
    fs::remove_file(&job.output).expect("removed");
    // A link is followed, and its name determines the format.
    let (link, target) = (place.path("link.jsonl"), place.path("target"));
    std::os::unix::fs::symlink(&target, &link).expect("created");
    job.output = link.clone();
    refused(&job, "link.jsonl` is a symbolic link to a missing file");
    fs::write(&target, "before").expect("written");
    assert!(matches!(embed(&job), Err(CorpusError::Exists { .. })));
    job.overwrite = true;
    let report = embed(&job).expect("embedded");
    assert_eq!(report.output, fs::canonicalize(&target).expect("there"));
    assert!(fs::symlink_metadata(&link).expect("there").is_symlink());
    assert!(
        fs::read_to_string(&target)
            .expect("read")
            .contains("embedding")
    );
    assert_eq!(
        place.names(),
        ["in.txt", "link.jsonl", "target", "target.errors.jsonl"]
    );
}
