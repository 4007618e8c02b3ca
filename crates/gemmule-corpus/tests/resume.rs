//! Interrupted runs and concurrent runs.

mod common;

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use common::{Known, Place, column, embed, read_lines, read_parquet, results};
use gemmule_corpus::{
    CorpusError, Function, Hooks, Job, Keep, Limits, Model as _, ModelError, Progress, Results,
    Texts, Vectors, run,
};
use proptest::prelude::*;

const OUTPUTS: [&str; 4] = ["out.parquet", "out.arrow", "out.npy", "out.jsonl"];

/// Returns lines of JSON, some of which are refused.
fn lines(n: usize) -> String {
    let line = |i: usize| match i % 7 {
        3 => "{\"id\": 1}\n".to_owned(),
        5 => "{\"id\": 2, \"text\": \"too long\"}\n".to_owned(),
        _ => format!(
            "{{\"id\": {i}, \"text\": \"text {i} {}\"}}\n",
            "x".repeat(i % 40)
        ),
    };
    (0..n).map(line).collect()
}

fn job(place: &Place, output: &str) -> Job {
    let mut job = place.job("in.jsonl", lines(100), output);
    job.limits.window_rows = 10;
    if !output.ends_with("npy") {
        job.keep = Keep::All;
    }
    job
}

/// Writes the rows of [`lines`] in the given format.
fn input(place: &Place, format: &str) -> Job {
    let rows = || lines(100);
    let rows = rows();
    let rows = rows
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    let texts = rows.map(|row: serde_json::Value| row["text"].as_str().map(str::to_owned));
    let texts: Vec<Option<String>> = texts.collect();
    let mut job = match format {
        "csv" => {
            let rows = texts.iter().zip(0..).map(|(text, i)| match text {
                Some(text) => format!("\"{text}\r\n\",{i}\r\n"),
                None => format!("{i}\n\n"),
            });
            place.job(
                "in.csv",
                "text,id\n".to_owned() + &rows.collect::<String>(),
                "out.parquet",
            )
        }
        "csv.gz" => {
            let plain = input(place, "csv");
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            let bytes = fs::read(&plain.input).expect("read");
            std::io::Write::write_all(&mut encoder, &bytes).expect("compressed");
            place.job(
                "in.csv.gz",
                encoder.finish().expect("compressed"),
                "out.parquet",
            )
        }
        "txt" => {
            let texts = texts
                .into_iter()
                .map(|text| text.unwrap_or_default() + "\n");
            place.job("in.txt", texts.collect::<String>(), "out.parquet")
        }
        _ => {
            let job = Job::new(place.path("in.parquet"), place.path("out.parquet"));
            let ids = arrow_array::Int64Array::from_iter_values(0..100);
            let text = arrow_array::StringArray::from(texts);
            let batch = arrow_array::RecordBatch::try_from_iter([
                ("id", std::sync::Arc::new(ids) as arrow_array::ArrayRef),
                ("text", std::sync::Arc::new(text) as _),
            ]);
            let batch = batch.expect("a batch");
            let properties = parquet::file::properties::WriterProperties::builder()
                .set_max_row_group_row_count(Some(33))
                .build();
            let file = fs::File::create(&job.input).expect("created");
            let writer =
                parquet::arrow::ArrowWriter::try_new(file, batch.schema(), Some(properties));
            let mut writer = writer.expect("a writer");
            writer.write(&batch).expect("written");
            writer.close().expect("closed");
            job
        }
    };
    job.limits.window_rows = 10;
    if format != "txt" {
        job.keep = Keep::All;
    }
    job
}

/// Interrupts a job after each number of windows, resumes it, and compares the output with that of an uninterrupted run.
fn check_resumed(job: &Job) {
    let mut whole = Known::new();
    let report = run(job, &mut whole, Hooks::default()).expect("embedded");
    let expected = fs::read(&job.output).expect("read");
    let refused = fs::read(job.errors()).expect("read");
    assert_eq!(report.rows, 100);
    for windows in 0..=9 {
        fs::remove_file(&job.output).expect("removed");
        fs::remove_file(job.errors()).expect("removed");
        let mut failing = Known::failing_after(windows);
        let error = run(job, &mut failing, Hooks::default()).expect_err("a failure");
        assert!(error.to_string().contains("the device is gone"), "{error}");
        match error {
            CorpusError::Stopped { rows, .. } => assert_eq!(rows, 10 * windows as u64),
            _ => assert_eq!((windows, job.partial().exists()), (0, false)),
        }
        assert!(!job.output.exists());
        let mut last = Known::new();
        let resumed = run(job, &mut last, Hooks::default()).expect("resumed");
        assert_eq!(resumed.resumed, 10 * windows as u64);
        assert_eq!(
            (resumed.rows, resumed.written),
            (report.rows, report.written)
        );
        assert_eq!(
            (resumed.tokens, resumed.refused),
            (report.tokens, report.refused)
        );
        // Every text is embedded exactly once.
        assert_eq!([failing.texts, last.texts].concat(), whole.texts);
        assert!(
            fs::read(&job.output).expect("read") == expected,
            "after {windows} windows"
        );
        assert!(fs::read(job.errors()).expect("read") == refused);
        assert!(!job.partial().exists());
    }
}

#[test]
fn a_failure_after_each_window_of_each_output() {
    for output in OUTPUTS {
        let place = Place::new();
        let mut job = job(&place, output);
        check_resumed(&job);
        if output.ends_with("parquet") {
            fs::remove_file(&job.output).expect("removed");
            job.vectors = Vectors::Int8;
            check_resumed(&job);
        }
    }
}

#[test]
fn a_failure_after_each_window_of_each_input() {
    for format in ["csv", "csv.gz", "txt", "parquet"] {
        let place = Place::new();
        check_resumed(&input(&place, format));
    }
}

/// The process that the next test kills.
#[test]
fn child() {
    let Ok(folder) = std::env::var("GEMMULE_CORPUS_TEST") else {
        return;
    };
    let (folder, output) = folder.split_once('|').expect("two parts");
    let (output, millis) = output.split_once('|').expect("two parts");
    let mut job = Job::new(
        Path::new(folder).join("in.jsonl"),
        Path::new(folder).join(output),
    );
    job.limits.window_rows = 10;
    if !output.ends_with("npy") {
        job.keep = Keep::All;
    }
    let millis: u64 = millis.parse().expect("a number");
    let mut known = Known::new();
    let mut slow = Function::new("known", column(common::WIDTH), |rows: &[Texts]| {
        std::thread::sleep(std::time::Duration::from_millis(millis));
        known.begin(rows.to_vec());
        known.finish()
    });
    if let Err(error) = run(&job, &mut slow, Hooks::default()) {
        println!("error: {error}");
        std::process::exit(3);
    }
}

fn child_of(job: &Job, millis: u64, shell: &str) -> std::process::Command {
    let folder = job.input.parent().expect("a folder").display();
    let output = job.output.file_name().expect("a name").to_string_lossy();
    let mut command = std::process::Command::new("sh");
    command
        .args([
            "-c",
            &format!("{shell} exec \"$0\" --exact child --nocapture"),
        ])
        .arg(std::env::current_exe().expect("a path"))
        .env("GEMMULE_CORPUS_TEST", format!("{folder}|{output}|{millis}"))
        .stdout(std::process::Stdio::piped());
    command
}

#[cfg(unix)]
#[test]
fn processes_that_are_killed() {
    for output in OUTPUTS {
        let place = Place::new();
        let job = job(&place, output);
        embed(&job).expect("embedded");
        let expected = fs::read(&job.output).expect("read");
        fs::remove_file(&job.output).expect("removed");
        let mut n_killed = 0;
        for _ in 0..200 {
            let mut child = child_of(&job, 4, "").spawn().expect("started");
            std::thread::sleep(std::time::Duration::from_millis(40 + 7 * (n_killed % 5)));
            child.kill().expect("killed");
            let status = child.wait().expect("waited");
            // The child may be killed after it published the output.
            if job.output.exists() {
                break;
            }
            assert_eq!(status.code(), None, "{status}");
            n_killed += 1;
        }
        let report = embed(&job);
        assert!(
            matches!(report, Ok(_) | Err(CorpusError::Exists { .. })),
            "{report:?}"
        );
        assert!(n_killed > 0);
        assert!(fs::read(&job.output).expect("read") == expected, "{output}");
        assert!(!job.partial().exists());
    }
}

#[cfg(unix)]
#[test]
fn a_full_disk() {
    let place = Place::new();
    let job = job(&place, "out.jsonl");
    embed(&job).expect("embedded");
    let expected = fs::read(&job.output).expect("read");
    fs::remove_file(&job.output).expect("removed");
    // A file size limit, in blocks of 512 bytes, simulates a full disk.
    let full = child_of(&job, 0, "trap '' XFSZ; ulimit -f 6;")
        .output()
        .expect("run");
    assert_eq!(full.status.code(), Some(3));
    let text = String::from_utf8_lossy(&full.stdout);
    let parts = [
        "the disk is full",
        "0 rows are finished",
        "run the same command again",
    ];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    let report = embed(&job).expect("resumed");
    assert!(report.resumed > 0);
    assert!(fs::read(&job.output).expect("read") == expected);
}

#[test]
fn a_crash_at_each_step_of_the_end() {
    for output in OUTPUTS {
        let place = Place::new();
        let mut job = job(&place, output);
        embed(&job).expect("embedded");
        let data = fs::read(&job.output).expect("read");
        let errors = fs::read(job.errors()).expect("read");
        fs::remove_file(&job.output).expect("removed");
        // A folder that appears at the output's path during the run makes publishing fail.
        let place = job.output.clone();
        let mut appear = |progress: &Progress| {
            if progress.rows == 100 {
                fs::create_dir(&place).expect("created");
                fs::write(place.join("file"), "").expect("written");
            }
        };
        let hooks = Hooks {
            progress: Some(&mut appear),
            ..Hooks::default()
        };
        job.overwrite = true;
        let failed = run(&job, &mut Known::new(), hooks);
        assert!(matches!(failed, Err(CorpusError::Io { .. })), "{failed:?}");
        fs::remove_dir_all(&job.output).expect("removed");
        job.overwrite = false;
        // The list of errors is published, the output is not.
        let saved = [job.partial().join("journal"), job.partial().join("data")]
            .map(|path| (fs::read(&path).expect("read"), path));
        let mut idle = Known::failing_after(0);
        let report = run(&job, &mut idle, Hooks::default()).expect("published");
        assert_eq!((report.rows, report.resumed), (100, 100));
        assert!(fs::read(&job.output).expect("read") == data);
        assert!(fs::read(job.errors()).expect("read") == errors);
        // The output and the list of errors are published, and the partial folder still exists.
        fs::create_dir(job.partial()).expect("created");
        fs::write(&saved[0].1, &saved[0].0).expect("written");
        let again = run(&job, &mut idle, Hooks::default()).expect("published");
        assert_eq!(again, report);
        assert!(!job.partial().exists());
        assert!(matches!(embed(&job), Err(CorpusError::Exists { .. })));
        // The output no longer exists, so the journal cannot be used.
        fs::create_dir(job.partial()).expect("created");
        fs::write(&saved[0].1, &saved[0].0).expect("written");
        fs::remove_file(&job.output).expect("removed");
        assert_eq!(embed(&job).expect("embedded").resumed, 0);
        assert!(fs::read(&job.output).expect("read") == data);
    }
}

#[test]
fn two_writers() {
    let place = Place::new();
    let job = job(&place, "out.parquet");
    let mut met = None;
    let other = job.clone();
    let mut known = Known::new();
    let mut meeting = Function::new("known", column(common::WIDTH), |rows: &[Texts]| {
        met.get_or_insert_with(|| embed(&other));
        known.begin(rows.to_vec());
        known.finish()
    });
    run(&job, &mut meeting, Hooks::default()).expect("embedded");
    let error = met.expect("met").expect_err("locked").to_string();
    let holder = format!("is being written by process {}", std::process::id());
    assert!(error.contains(&holder), "{error}");
    assert_eq!(
        read_parquet(&job.output)
            .iter()
            .map(|b| b.num_rows())
            .sum::<usize>(),
        72
    );
}

#[test]
fn options_that_changed() {
    let place = Place::new();
    let job = job(&place, "out.parquet");
    let stop = |job: &Job| run(job, &mut Known::failing_after(3), Hooks::default());
    assert!(stop(&job).is_err());
    let differing = |job: &Job, known: &mut Known| {
        let error = run(job, known, Hooks::default())
            .expect_err("differs")
            .to_string();
        assert!(error.contains("start over with overwrite"), "{error}");
        error
    };
    let mut other = job.clone();
    other.vectors = Vectors::F16;
    other.limits = Limits::default();
    let error = differing(&other, &mut Known::new());
    assert!(
        error.contains("rows of a window was `10` and is `16384`"),
        "{error}"
    );
    assert!(error.contains("vectors was `f32` and is `f16`"), "{error}");
    let mut model = Known::new();
    model.identity = "other".to_owned();
    let error = differing(&job, &mut model);
    assert!(
        error.contains("model was `known` and is `other`"),
        "{error}"
    );
    let before = fs::metadata(&job.input)
        .and_then(|m| m.modified())
        .expect("a time");
    fs::write(&job.input, lines(101)).expect("written");
    let error = differing(&job, &mut Known::new());
    assert!(error.contains("size of the input"), "{error}");
    // The file keeps its size, but its modification time changes.
    fs::write(&job.input, lines(100)).expect("written");
    let error = differing(&job, &mut Known::new());
    assert!(error.contains("modification time"), "{error}");
    let file = fs::File::options()
        .write(true)
        .open(&job.input)
        .expect("opened");
    file.set_modified(before).expect("set");
    assert_eq!(embed(&job).expect("resumed").resumed, 30);
    // An existing output is an error without `overwrite`. With `overwrite`, a run that replaces the output can be interrupted and resumed.
    assert!(matches!(embed(&job), Err(CorpusError::Exists { .. })));
    let mut other = job.clone();
    other.overwrite = true;
    assert!(stop(&other).is_err());
    assert!(matches!(embed(&job), Err(CorpusError::Exists { .. })));
    assert_eq!(embed(&other).expect("resumed").resumed, 30);
    // Another run with overwrite starts over.
    assert!(stop(&other).is_err());
    other.vectors = Vectors::Binary;
    assert_eq!(embed(&other).expect("embedded").resumed, 0);
}

#[test]
fn an_overwritten_list_goes_away() {
    let place = Place::new();
    let mut job = place.job("in.txt", "too long\n", "out.npy");
    assert!(embed(&job).expect("embedded").errors.is_some());
    fs::write(&job.input, "short\n").expect("written");
    job.overwrite = true;
    assert!(embed(&job).expect("embedded").errors.is_none());
    assert_eq!(place.names(), ["in.txt", "out.npy"]);
}

#[test]
fn damaged_folders() {
    let place = Place::new();
    let mut job = job(&place, "out.parquet");
    assert!(run(&job, &mut Known::failing_after(3), Hooks::default()).is_err());
    let data = job.partial().join("data");
    let whole = fs::read(&data).expect("read");
    fs::write(&data, &whole[..whole.len() - 1]).expect("written");
    assert!(matches!(embed(&job), Err(CorpusError::Damaged { .. })));
    let mut changed = whole.clone();
    *changed.last_mut().expect("bytes") ^= 1;
    fs::write(&data, &changed).expect("written");
    let error = embed(&job).expect_err("changed").to_string();
    assert!(
        error.contains("have changed since they were written"),
        "{error}"
    );
    fs::write(&data, &whole).expect("written");
    let list = job.partial().join("errors");
    let listed = fs::read(&list).expect("read");
    let swapped: Vec<u8> = listed.iter().rev().copied().collect();
    assert_ne!(swapped, listed);
    fs::write(&list, &swapped).expect("written");
    assert!(matches!(embed(&job), Err(CorpusError::Damaged { .. })));
    fs::write(job.partial().join("journal"), "x\ny\n").expect("written");
    let error = embed(&job).expect_err("damaged").to_string();
    assert!(error.contains("start over with overwrite"), "{error}");
    job.overwrite = true;
    assert_eq!(embed(&job).expect("embedded").rows, 100);
}

#[test]
fn cancelled_runs_and_progress() {
    let place = Place::new();
    let job = job(&place, "out.jsonl");
    let cancel = AtomicBool::new(false);
    let mut seen = Vec::new();
    let mut progress = |progress: &Progress| {
        seen.push(*progress);
        if progress.rows == 40 {
            cancel.store(true, Ordering::Relaxed);
        }
    };
    let hooks = Hooks {
        progress: Some(&mut progress),
        cancel: Some(&cancel),
    };
    let error = run(&job, &mut Known::new(), hooks).expect_err("cancelled");
    assert!(
        matches!(&error, CorpusError::Stopped { error, rows: 40, .. }
        if matches!(**error, CorpusError::Cancelled))
    );
    assert_eq!(seen.len(), 4);
    assert_eq!(
        seen[3].total_bytes,
        fs::metadata(&job.input).map(|m| m.len()).ok()
    );
    assert!(seen[3].bytes > 0 && seen[3].refused > 0 && seen[3].tokens > Some(0));
    assert_eq!(embed(&job).expect("resumed").resumed, 40);
}

#[test]
fn broken_models_and_inputs() {
    let place = Place::new();
    let mut job = place.job("in.txt", "a\nb\n", "out.npy");
    let model = |vectors: Vec<Vec<f32>>| {
        let compute = |_: &[Texts]| Ok(results(vectors.clone()));
        let mut function = Function::new("", column(1), compute);
        run(&job, &mut function, Hooks::default())
    };
    let found = [
        model(vec![vec![1.0]]),
        model(vec![vec![1.0], vec![1.0, 2.0]]),
    ];
    for result in found {
        assert!(matches!(result, Err(CorpusError::BadModel { .. })));
    }
    let input = job.input.clone();
    let changing = |rows: &[Texts]| -> Result<Results, ModelError> {
        fs::write(&input, "c\n").expect("written");
        Ok(results(vec![vec![1.0]; rows.len()]))
    };
    let mut changing = Function::new("", column(1), changing);
    let error = run(&job, &mut changing, Hooks::default());
    assert!(
        matches!(error, Err(CorpusError::InputChanged { .. })),
        "{error:?}"
    );
    job.overwrite = true;
    assert_eq!(embed(&job).expect("embedded").rows, 1);
    job.output = job.input.clone();
    job.output_format = Some(gemmule_corpus::OutputFormat::Npy);
    assert!(matches!(embed(&job), Err(CorpusError::SameFile { .. })));
    job.output = place.path("none/out.npy");
    assert!(matches!(embed(&job), Err(CorpusError::Io { .. })));
    assert_eq!(place.names(), ["in.txt", "out.npy"]);
    job.input = place.path("none.txt");
    assert!(matches!(embed(&job), Err(CorpusError::Io { .. })));
    job.input = place.folder.path().to_owned();
    job.input_format = Some(gemmule_corpus::InputFormat::Lines);
    assert!(matches!(embed(&job), Err(CorpusError::NotAFile { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Windows contain every row once and in order, and respect their limits, regardless of where a run stops.
    #[test]
    fn windows(
        texts in prop::collection::vec("[a-z]{0,12}", 0..60),
        window_rows in 1usize..9,
        window_bytes in 1usize..60,
        stop in 0usize..20,
    ) {
        let place = Place::new();
        let content: String = texts.iter().map(|text| text.clone() + "\n").collect();
        let mut job = place.job("in.txt", content, "out.jsonl");
        job.limits = Limits { window_rows, window_bytes, row_bytes: 100 };
        let mut given: Vec<Vec<String>> = Vec::new();
        for windows in [stop, usize::MAX] {
            let mut left = windows;
            let mut lengths = Function::new("", column(1), |rows: &[Texts]| {
                if left == 0 {
                    return Err("stopped".into());
                }
                left -= 1;
                given.push(rows.concat());
                Ok(results(rows.iter().map(|texts| vec![texts[0].len() as f32])))
            });
            if run(&job, &mut lengths, Hooks::default()).is_ok() {
                break;
            }
        }
        prop_assert_eq!(given.concat(), texts.clone());
        for window in &given {
            prop_assert!(window.len() <= window_rows);
            let bytes = window[..window.len() - 1].iter().map(String::len).sum::<usize>();
            prop_assert!(bytes < window_bytes);
        }
        for (window, next) in given.iter().zip(given.iter().skip(1)) {
            let bytes = window.iter().map(String::len).sum::<usize>();
            prop_assert!(window.len() == window_rows || bytes >= window_bytes, "{:?}", next);
        }
        let rows = read_lines(&job.output);
        prop_assert_eq!(rows.len(), texts.len());
        for (i, (row, text)) in rows.iter().zip(&texts).enumerate() {
            prop_assert_eq!(row["row"].as_u64(), Some(i as u64));
            prop_assert_eq!(row["embedding"][0].as_f64(), Some(text.len() as f64));
        }
    }
}
