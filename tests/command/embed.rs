//! Tests of `gemmule embed` on files of texts.
use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use gemmule::{DeviceChoice, Engine};
use serde_json::Value;

const TEXTS: [&str; 5] = [
    "A short text.",
    "",
    "Another one, with more words in it than the first.",
    "12 numbers, 13",
    "The last",
];

fn checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints/st-mean")
}

/// Runs `gemmule embed` in a folder. It reads and embeds two rows of the input file at a time (a window).
fn embed(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gemmule"))
        .arg("embed")
        .arg("--weights")
        .arg(checkpoint())
        .args(["--device", "cpu", "--window-rows", "2"])
        .args(args)
        .current_dir(folder)
        .output()
        .expect("it starts")
}

/// Creates a folder with `corpus.jsonl`, which contains the texts and, after the first text, a row without a text.
fn corpus() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("room for a folder");
    let mut rows: Vec<String> = TEXTS
        .iter()
        .enumerate()
        .map(|(id, text)| serde_json::json!({"id": id, "text": text}).to_string())
        .collect();
    rows.insert(1, r#"{"id": 9, "text": null}"#.to_owned());
    std::fs::write(folder.path().join("corpus.jsonl"), rows.join("\n")).expect("room");
    folder
}

fn vectors() -> Vec<Vec<f32>> {
    let engine = Engine::from_checkpoint(checkpoint()).device(DeviceChoice::Cpu);
    let engine = engine.build().expect("the checkpoint is valid");
    engine.embed(&TEXTS).expect("the texts are embedded")
}

fn close(got: &[f32], want: &[f32]) -> bool {
    got.len() == want.len() && got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-5)
}

#[test]
fn vectors_are_those_of_the_library_and_bad_rows_are_listed() {
    let folder = corpus();
    let out = embed(
        folder.path(),
        &[
            "--input",
            "corpus.jsonl",
            "--output",
            "v.jsonl",
            "--keep",
            "id",
        ],
    );
    // The exit code is 1, because a row has no vector.
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("1 rows have no vector"), "{said}");
    let text = std::fs::read_to_string(folder.path().join("v.jsonl")).expect("it was written");
    let rows: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("it is JSON"))
        .collect();
    let want = vectors();
    assert_eq!(rows.len(), TEXTS.len());
    for (id, row) in rows.iter().enumerate() {
        assert_eq!(row["id"], id);
        assert_eq!(row["row"], if id == 0 { 0 } else { id + 1 });
        let got: Vec<f32> = serde_json::from_value(row["embedding"].clone()).expect("numbers");
        assert!(close(&got, &want[id]), "{id}");
    }
    let errors = std::fs::read_to_string(folder.path().join("v.jsonl.errors.jsonl"));
    let errors: Value = serde_json::from_str(&errors.expect("it was written")).expect("one row");
    assert_eq!(errors["row"], 1);
}

#[test]
fn vectors_are_cut_and_have_length_1() {
    let folder = corpus();
    let args = [
        "--input",
        "corpus.jsonl",
        "--output",
        "v.jsonl",
        "--dimensions",
        "4",
    ];
    embed(folder.path(), &args);
    let text = std::fs::read_to_string(folder.path().join("v.jsonl")).expect("it was written");
    for (line, want) in text.lines().zip(vectors()) {
        let row: Value = serde_json::from_str(line).expect("it is JSON");
        let got: Vec<f32> = serde_json::from_value(row["embedding"].clone()).expect("numbers");
        let norm = want[..4].iter().map(|v| v * v).sum::<f32>().sqrt();
        let want: Vec<f32> = want[..4].iter().map(|v| v / norm).collect();
        assert!(close(&got, &want));
    }
    let more = [
        "--input",
        "corpus.jsonl",
        "--output",
        "w.jsonl",
        "--dimensions",
        "4000",
    ];
    let said = embed(folder.path(), &more);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("--dimensions is 4000"), "{said}");
}

#[test]
fn an_output_is_not_replaced_and_another_prompt_is_another_run() {
    let folder = corpus();
    let args = ["--input", "corpus.jsonl", "--output", "v.npy"];
    embed(folder.path(), &args);
    let first = std::fs::read(folder.path().join("v.npy")).expect("it was written");
    assert!(first.starts_with(b"\x93NUMPY"));
    let other = [&args[..], &["--prompt", "query: "]].concat();
    let said = embed(folder.path(), &other);
    assert!(!said.status.success());
    assert_eq!(
        std::fs::read(folder.path().join("v.npy")).expect("it is there"),
        first
    );
    embed(folder.path(), &[&other[..], &["--overwrite"]].concat());
    assert_ne!(
        std::fs::read(folder.path().join("v.npy")).expect("it is there"),
        first
    );
}
