//! Tests of `gemmule rerank`, `gemmule classify` and late interaction on files of texts.
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use gemmule::{
    DeviceChoice, Engine,
    heads::{EntityOptions, TOKEN_LOGITS, ZeroShotOptions},
    text::TextRole,
};
use serde_json::{Value, json};

const PAIRS: [(&str, &str); 4] = [
    ("the cat", "a cat sat on the mat"),
    ("the dog", "a dog ran"),
    ("the cat", ""),
    ("rain", "water that falls from clouds, and more water"),
];

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/checkpoints")
        .join(name)
}

fn engine(name: &str, output: Option<&str>) -> Engine {
    let engine = Engine::from_checkpoint(checkpoint(name)).device(DeviceChoice::Cpu);
    let engine = match output {
        Some(output) => engine.outputs([output]),
        None => engine,
    };
    engine.build().expect("the checkpoint is valid")
}

/// Returns a command that runs in a folder, and reads two rows of its input file at a time (a window).
fn command(folder: &Path, name: &str, model: &str, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gemmule"));
    command
        .arg(name)
        .arg("--weights")
        .arg(checkpoint(model))
        .args(["--window-rows", "2"])
        .args(args)
        .current_dir(folder);
    if !args.contains(&"--devices") {
        command.args(["--device", "cpu"]);
    }
    command
}

fn run(folder: &Path, name: &str, model: &str, args: &[&str]) -> Output {
    let output = command(folder, name, model, args).output();
    output.expect("it starts")
}

/// Runs a command that fails, and returns its error on one line.
fn refusal(folder: &Path, name: &str, model: &str, args: &[&str]) -> String {
    let output = run(folder, name, model, args);
    assert!(!output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).replace('│', " ");
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("it was written");
    let parse = |line| serde_json::from_str(line).expect("it is JSON");
    text.lines().map(parse).collect()
}

fn write(folder: &Path, name: &str, rows: impl IntoIterator<Item = Value>) {
    let rows = rows.into_iter().map(|row| row.to_string() + "\n");
    fs::write(folder.join(name), rows.collect::<String>()).expect("room");
}

/// Creates a folder with `pairs.jsonl`, which contains numbered pairs, a row without a query, and a row with a number instead of a
/// document.
fn pairs() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("room for a folder");
    let pair = |(id, (query, document)): (usize, &(&str, &str))| json!({"id": id, "query": query, "document": document});
    let bad = [
        json!({"id": 8, "query": null, "document": "a"}),
        json!({"id": 9, "query": "a", "document": 5}),
    ];
    let rows = PAIRS.iter().enumerate().map(pair).chain(bad);
    write(folder.path(), "pairs.jsonl", rows);
    folder
}

/// Creates a folder with `texts.jsonl`, which has a row for each text.
fn texts(texts: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("room for a folder");
    let rows = texts.iter().map(|text| json!({"text": text}));
    write(folder.path(), "texts.jsonl", rows);
    folder
}

fn near(found: &Value, expected: f32) -> bool {
    let found = found.as_f64().expect("a number") as f32;
    (found - expected).abs() < 1e-5 * expected.abs().max(1.0)
}

#[test]
fn scores_of_pairs_are_those_of_the_library() {
    for model in ["ce-one", "late-bert"] {
        let folder = pairs();
        let args = [
            "--input",
            "pairs.jsonl",
            "--output",
            "s.jsonl",
            "--keep",
            "id",
        ];
        let out = run(folder.path(), "rerank", model, &args);
        assert_eq!(out.status.code(), Some(1), "{out:?}");
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(said.contains("4 scores of 6 rows"), "{said}");
        let engine = engine(model, None);
        let rows = lines(&folder.path().join("s.jsonl"));
        assert_eq!(rows.len(), PAIRS.len());
        for (row, (id, (query, document))) in rows.iter().zip(PAIRS.iter().enumerate()) {
            let expected = engine.rerank(query, &[document]).expect("it is scored");
            assert_eq!(row["id"], id);
            assert!(near(&row["score"], expected[0]), "{row} {expected:?}");
        }
        let refused = lines(&folder.path().join("s.jsonl.errors.jsonl"));
        let reason = |at: usize| refused[at]["reason"].as_str().expect("a reason").to_owned();
        assert!(reason(0).contains("`query` is of type null"));
        assert!(reason(1).contains("`document` is of type number"));
    }
}

#[test]
fn a_score_is_a_number_of_an_array_and_columns_have_names() {
    let folder = tempfile::tempdir().expect("room for a folder");
    let csv = "title,q\na cat sat on the mat,the cat\na dog ran,the dog\n";
    fs::write(folder.path().join("p.csv"), csv).expect("room");
    let columns = ["--query-column", "q", "--document-column", "title"];
    let args = [&["--input", "p.csv", "--output", "s.npy"][..], &columns].concat();
    let out = run(folder.path(), "rerank", "ce-one", &args);
    assert!(out.status.success(), "{out:?}");
    let bytes = fs::read(folder.path().join("s.npy")).expect("it was written");
    assert!(String::from_utf8_lossy(&bytes[..128]).contains("'shape': (2,), }"));
    let first = f32::from_le_bytes(bytes[128..132].try_into().expect("4 bytes"));
    let expected = engine("ce-one", None).rerank("the cat", &["a cat sat on the mat"]);
    assert!((first - expected.expect("it is scored")[0]).abs() < 1e-5);
    // An existing output file is not replaced.
    let said = refusal(folder.path(), "rerank", "ce-one", &args);
    assert!(said.contains("`s.npy` exists"), "{said}");
    let args = ["--input", "p.csv", "--output", "t.npy"];
    let said = refusal(folder.path(), "rerank", "ce-one", &args);
    assert!(
        said.contains("has no column `query`; it has `title`, `q`"),
        "{said}"
    );
    let args = ["--input", "p.txt", "--output", "t.npy"];
    let said = refusal(folder.path(), "rerank", "ce-one", &args);
    assert!(said.contains("plain lines have one text"), "{said}");
    let said = refusal(
        folder.path(),
        "rerank",
        "hf-distil-seq",
        &[&["--input", "p.csv", "--output", "t.npy"][..], &columns].concat(),
    );
    assert!(said.contains("3"), "{said}");
}

#[test]
fn labels_are_those_of_the_library() {
    let own = ["a cat sat on the mat", "", "the dog ran"];
    let folder = texts(&own);
    let args = ["--input", "texts.jsonl", "--output", "l.jsonl"];
    let out = run(folder.path(), "classify", "hf-distil-seq", &args);
    assert!(out.status.success(), "{out:?}");
    let expected = engine("hf-distil-seq", None)
        .classify(&own)
        .expect("labels");
    for (row, ranked) in lines(&folder.path().join("l.jsonl")).iter().zip(&expected) {
        assert_eq!(row["label"], ranked[0].label.as_str());
        assert!(near(&row["score"], ranked[0].score));
        assert!(row.get("labels").is_none());
    }
    let args = [
        "--input",
        "texts.jsonl",
        "--output",
        "a.jsonl",
        "--all-scores",
    ];
    run(folder.path(), "classify", "hf-distil-seq", &args);
    let args = [
        "--input",
        "texts.jsonl",
        "--output",
        "b.jsonl",
        "--top-k",
        "2",
    ];
    run(folder.path(), "classify", "hf-distil-seq", &args);
    let (all, best) = (
        lines(&folder.path().join("a.jsonl")),
        lines(&folder.path().join("b.jsonl")),
    );
    for ((all, best), ranked) in all.iter().zip(&best).zip(&expected) {
        let list = all["labels"].as_array().expect("a list");
        assert_eq!(list.len(), 3);
        assert_eq!(best["labels"].as_array().expect("a list"), &list[..2]);
        for (found, expected) in list.iter().zip(ranked) {
            assert_eq!(found["label"], expected.label.as_str());
            assert!(near(&found["score"], expected.score));
        }
    }
    let args = ["--input", "texts.jsonl", "--output", "l.npy"];
    let said = refusal(folder.path(), "classify", "hf-distil-seq", &args);
    assert!(
        said.contains("cannot hold several columns (`label`, `score`)"),
        "{said}"
    );
    // An option that is only for files is an error without `--input`.
    let args = ["--text", "a", "--keep-all"];
    let said = refusal(folder.path(), "classify", "hf-distil-seq", &args);
    assert!(said.contains("--input"), "{said}");
}

#[test]
fn entities_and_any_labels_are_those_of_the_library() {
    let own = ["a cat sat on the mat", "the dog"];
    let folder = texts(&own);
    let args = ["--input", "texts.jsonl", "--output", "e.jsonl", "--tokens"];
    let out = run(folder.path(), "classify", "hf-electra-token", &args);
    assert!(out.status.success(), "{out:?}");
    let options = EntityOptions::default();
    let tokens = engine("hf-electra-token", Some(TOKEN_LOGITS));
    let expected = tokens.classify_tokens(&own, &options).expect("entities");
    for (row, expected) in lines(&folder.path().join("e.jsonl")).iter().zip(&expected) {
        let found = row["entities"].as_array().expect("a list");
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!(found["word"], expected.word.as_str());
            assert_eq!(found["entity"], expected.label.as_str());
            assert_eq!(
                (&found["start"], &found["end"]),
                (&json!(expected.start), &json!(expected.end))
            );
            assert!(near(&found["score"], expected.score));
        }
    }
    let args = [
        "--input",
        "texts.jsonl",
        "--output",
        "z.jsonl",
        "--label",
        "animal",
        "--label",
        "rain",
    ];
    // With this limit, a batch has only one sequence. Each pair of a text and a label is a sequence, so the pairs of a text are in different
    // batches.
    let args = [&args[..], &["--batch-tokens", "8"]].concat();
    let out = run(folder.path(), "classify", "ce-nli", &args);
    assert!(out.status.success(), "{out:?}");
    let nli = engine("ce-nli", None);
    for (row, text) in lines(&folder.path().join("z.jsonl")).iter().zip(own) {
        let options = ZeroShotOptions::default();
        let ranked = nli.classify_zero_shot(text, &["animal", "rain"], &options);
        let ranked = ranked.expect("labels");
        assert_eq!(row["label"], ranked[0].label.as_str());
        assert!(near(&row["score"], ranked[0].score));
    }
}

#[test]
fn vectors_of_tokens_are_those_of_the_library() {
    let own = ["a cat sat on the mat.", "the dog"];
    let folder = texts(&own);
    let late = engine("late-bert", None);
    for (role, name) in [(TextRole::Query, "query"), (TextRole::Document, "document")] {
        let file = format!("{name}.jsonl");
        let args = ["--input", "texts.jsonl", "--output", &file, "--role", name];
        let out = run(folder.path(), "embed", "late-bert", &args);
        assert!(out.status.success(), "{out:?}");
        let expected = late.token_vectors(role, &own).expect("vectors");
        let rows = lines(&folder.path().join(&file));
        assert_eq!(rows.len(), own.len());
        for (row, expected) in rows.iter().zip(&expected) {
            let found: Vec<Vec<f32>> =
                serde_json::from_value(row["embedding"].clone()).expect("lists of numbers");
            assert_eq!(found.len(), expected.rows().len());
            for (found, expected) in found.iter().zip(expected.rows()) {
                assert!(
                    found
                        .iter()
                        .zip(expected)
                        .all(|(a, b)| (a - b).abs() < 1e-5)
                );
            }
        }
    }
    let args = [
        "--input",
        "texts.jsonl",
        "--output",
        "v.npy",
        "--role",
        "query",
    ];
    let said = refusal(folder.path(), "embed", "late-bert", &args);
    assert!(said.contains("`embedding` has several"), "{said}");
    let args = ["--input", "texts.jsonl", "--output", "v.parquet"];
    let said = refusal(folder.path(), "embed", "late-bert", &args);
    assert!(said.contains("--role document"), "{said}");
    let args = [&args[..], &["--role", "document", "--vectors", "int8"]].concat();
    let out = run(folder.path(), "embed", "late-bert", &args);
    assert!(out.status.success(), "{out:?}");
    let args = [
        "--input",
        "texts.jsonl",
        "--output",
        "w.jsonl",
        "--role",
        "query",
    ];
    let said = refusal(folder.path(), "embed", "st-mean", &args);
    assert!(said.contains("--role is for models"), "{said}");
    // BGE-M3 is not only a late-interaction model: it computes token vectors in addition to other outputs.
    let args = [
        "--input",
        "texts.jsonl",
        "--output",
        "m.arrow",
        "--role",
        "document",
    ];
    let out = run(folder.path(), "embed", "st-m3", &args);
    assert!(out.status.success(), "{out:?}");
}

/// Writes a file with `n` rows of texts of several lengths. Some rows have no text, and are refused.
fn many(folder: &Path, n: usize) {
    let words = "the cat sat on a mat and the dog ran into the rain";
    let row = |at: usize| match at % 11 {
        7 => json!({"text": null, "query": "a", "document": null}),
        _ => {
            let text: Vec<&str> = words
                .split(' ')
                .cycle()
                .skip(at % 5)
                .take(1 + at % 13)
                .collect();
            json!({"id": at, "text": text.join(" "), "query": "the cat", "document": text.join(" ")})
        }
    };
    write(folder, "many.jsonl", (0..n).map(row));
}

#[test]
fn several_devices_write_what_one_writes() {
    let folder = tempfile::tempdir().expect("room for a folder");
    many(folder.path(), 60);
    let common = [
        "--input",
        "many.jsonl",
        "--batch-tokens",
        "20",
        "--window-rows",
        "16",
        "--keep",
        "id",
    ];
    // Build the command here instead of with `command`, which already sets `--window-rows`.
    let start = |devices: &str, output: &str| {
        let out = Command::new(env!("CARGO_BIN_EXE_gemmule"))
            .args(["embed", "--weights"])
            .arg(checkpoint("st-mean"))
            .args(["--output", output, "--devices", devices])
            .args(common)
            .current_dir(folder.path())
            .output()
            .expect("it starts");
        assert_eq!(out.status.code(), Some(1), "{out:?}");
        fs::read(folder.path().join(output)).expect("it was written")
    };
    for output in ["parquet", "jsonl"] {
        let one = start("cpu", &format!("one.{output}"));
        let three = start("cpu,cpu,cpu", &format!("three.{output}"));
        assert!(one == three, "{output}");
        assert!(one.len() > 1000);
    }
    let said = refusal(
        folder.path(),
        "embed",
        "st-mean",
        &[
            "--input",
            "many.jsonl",
            "--output",
            "x.npy",
            "--devices",
            "gpu",
        ],
    );
    assert!(said.contains("gpu"), "{said}");
}

#[test]
fn texts_that_are_too_long_are_cut_or_refused() {
    let long = "the cat sat on the mat and ".repeat(10);
    let folder = texts(&["a cat", &long]);
    let args = ["--input", "texts.jsonl", "--output", "cut.jsonl"];
    let out = run(folder.path(), "embed", "st-mean", &args);
    assert!(out.status.success(), "{out:?}");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(said.contains("1 rows had more tokens"), "{said}");
    let args = [
        "--input",
        "texts.jsonl",
        "--output",
        "v.jsonl",
        "--too-long",
        "refuse",
    ];
    let out = run(folder.path(), "embed", "st-mean", &args);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    let refused = lines(&folder.path().join("v.jsonl.errors.jsonl"));
    assert_eq!(refused.len(), 1);
    let reason = refused[0]["reason"].as_str().expect("a reason");
    assert_eq!(
        reason,
        "the text has more tokens than the 16 that the model takes"
    );
    assert_eq!(lines(&folder.path().join("v.jsonl")).len(), 1);
}

/// Starts a command three times, and kills it each time after some windows (two rows of input each). Then lets the command finish, and
/// compares its output with that of an uninterrupted run.
#[test]
fn killed_runs_of_scores_and_labels_resume() {
    let folder = tempfile::tempdir().expect("room for a folder");
    many(folder.path(), 60);
    for (name, model, output) in [
        ("rerank", "ce-one", "scores.parquet"),
        ("classify", "hf-distil-seq", "labels.arrow"),
    ] {
        let whole = format!("whole-{output}");
        run(
            folder.path(),
            name,
            model,
            &["--input", "many.jsonl", "--output", &whole],
        );
        let whole = fs::read(folder.path().join(whole)).expect("it was written");
        let args = ["--input", "many.jsonl", "--output", output];
        let journal = folder.path().join(format!("{output}.partial/journal"));
        let finished =
            || fs::read(&journal).map_or(0, |j| j.iter().filter(|b| **b == b'\n').count());
        let mut n_killed = 0;
        for _ in 0..3 {
            let before = finished();
            let child = command(folder.path(), name, model, &args);
            let mut child = { child }
                .stdout(std::process::Stdio::null())
                .stderr(std::process::Stdio::null())
                .spawn()
                .expect("it starts");
            while finished() < before + 3 && child.try_wait().expect("its state").is_none() {
                std::thread::sleep(Duration::from_millis(2));
            }
            child.kill().expect("it is killed, or has ended");
            let status = child.wait().expect("it ends");
            n_killed += usize::from(status.code().is_none());
        }
        if !folder.path().join(output).exists() {
            let out = run(folder.path(), name, model, &args);
            assert_eq!(out.status.code(), Some(1), "{out:?}");
        }
        assert!(n_killed > 0, "a run was interrupted");
        assert!(fs::read(folder.path().join(output)).expect("it was written") == whole);
    }
}

/// Returns the number and the reason of the only refused row.
fn only_refused(folder: &Path, output: &str) -> (Value, String) {
    let refused = lines(&folder.join(format!("{output}.errors.jsonl")));
    assert_eq!(refused.len(), 1, "{refused:?}");
    let reason = refused[0]["reason"].as_str().expect("a reason");
    (refused[0]["row"].clone(), reason.to_owned())
}

#[test]
fn a_text_that_the_model_does_not_accept_is_listed_with_its_reason() {
    let folder = texts(&["the cat sat on a mat", "a <pad> b", "the dog"]);
    let input = [
        "--input",
        "texts.jsonl",
        "--output",
        "out.jsonl",
        "--overwrite",
    ];
    for (name, model, more) in [
        ("embed", "st-xlmr", &[][..]),
        ("classify", "hf-xlmr-token", &["--tokens"]),
        ("classify", "ce-one", &[]),
    ] {
        let out = run(folder.path(), name, model, &[&input[..], more].concat());
        assert_eq!(out.status.code(), Some(1), "{out:?}");
        assert_eq!(lines(&folder.path().join("out.jsonl")).len(), 2);
        let (row, reason) = only_refused(folder.path(), "out.jsonl");
        assert_eq!(row, 1);
        insta::allow_duplicates! {
            insta::assert_snapshot!(reason, @"sequence 0, token 2: the id 1 is the model's padding token, which has no position; remove it from the sequence");
        }
    }
    // The row of a refused sequence is found by counting the sequences of the rows before it. A cross-encoder has one sequence per row.
    let pairs = [("a", "b"), ("a", "b <pad>"), ("c", "d")];
    let pair = |(query, document)| json!({"query": query, "document": document});
    write(folder.path(), "pairs.jsonl", pairs.map(pair));
    let args = ["--input", "pairs.jsonl", "--output", "scores.jsonl"];
    let out = run(folder.path(), "rerank", "ce-one", &args);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    assert_eq!(lines(&folder.path().join("scores.jsonl")).len(), 2);
    assert_eq!(only_refused(folder.path(), "scores.jsonl").0, 1);
    // A text without tokens has no static embedding.
    let blank = texts(&["the cat", " ", "the dog"]);
    let out = run(blank.path(), "embed", "st-static", &input);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    assert_eq!(lines(&blank.path().join("out.jsonl")).len(), 2);
    let (row, reason) = only_refused(blank.path(), "out.jsonl");
    assert_eq!(row, 1);
    assert!(reason.contains("has no tokens"), "{reason}");
}

/// Parquet files contain the identity of the run: its model and options. Checks that the file is the same for any number of threads and for
/// any form of the model's path.
#[test]
fn threads_and_the_form_of_a_path_make_no_other_run() {
    let folder = texts(&["the cat sat on a mat", "a dog"]);
    let linked = folder.path().join("linked");
    #[cfg(unix)]
    std::os::unix::fs::symlink(checkpoint("st-mean"), &linked).expect("a link");
    let start = |model: &Path, threads: &str, more: &[&str]| {
        let out = Command::new(env!("CARGO_BIN_EXE_gemmule"))
            .args(["embed", "--input", "texts.jsonl", "--output", "v.parquet"])
            .args(["--device", "cpu", "--overwrite", "--threads", threads])
            .args(more)
            .arg("--weights")
            .arg(model)
            .current_dir(folder.path())
            .output()
            .expect("it starts");
        assert!(out.status.success(), "{out:?}");
        fs::read(folder.path().join("v.parquet")).expect("it was written")
    };
    let first = start(&checkpoint("st-mean"), "1", &[]);
    assert!(first == start(&checkpoint("st-mean"), "3", &[]));
    if linked.exists() {
        assert!(first == start(Path::new("./linked"), "2", &[]));
    }
    assert!(first != start(&checkpoint("st-mean"), "1", &["--max-context", "60"]));
    let said = refusal(
        folder.path(),
        "embed",
        "st-mean",
        &[
            "--input",
            "texts.jsonl",
            "--output",
            "w.npy",
            "--batch-tokens",
            "0",
        ],
    );
    assert!(said.contains("--batch-tokens"), "{said}");
}

#[test]
fn a_model_of_another_kind_is_named_with_its_commands() {
    let folder = texts(&["a"]);
    write(
        folder.path(),
        "pairs.jsonl",
        [json!({"query": "a", "document": "b"})],
    );
    for (name, model, input, part) in [
        (
            "embed",
            "writer",
            "texts.jsonl",
            "use `gemmule generate` or `gemmule translate`",
        ),
        ("embed", "st-splade", "texts.jsonl", "use `gemmule run`"),
        (
            "rerank",
            "st-mean",
            "pairs.jsonl",
            "use `gemmule embed` or `gemmule run`",
        ),
        (
            "classify",
            "st-mean",
            "texts.jsonl",
            "use `gemmule embed` or `gemmule run`",
        ),
    ] {
        let args = ["--input", input, "--output", "o.jsonl"];
        let said = refusal(folder.path(), name, model, &args);
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn outputs_that_are_no_files_are_refused_before_the_model_is_loaded() {
    let folder = texts(&["a"]);
    fs::create_dir(folder.path().join("o.jsonl")).expect("created");
    let args = [
        "--input",
        "texts.jsonl",
        "--output",
        "o.jsonl",
        "--overwrite",
    ];
    let said = refusal(folder.path(), "embed", "missing", &args);
    assert!(said.contains("`o.jsonl` is a folder"), "{said}");
}
