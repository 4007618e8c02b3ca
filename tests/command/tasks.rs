//! Tests of commands for models with task heads (`classify`, `fill-mask` and others): the keys of `--json`, refused texts, and models
//! without the head.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::{Value, json};

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/checkpoints")
        .join(name)
}

fn gemmule(model: &str, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gemmule"))
        .args(args)
        .args(["--device", "cpu", "--weights"])
        .arg(checkpoint(model))
        .env("COLUMNS", "100")
        .output()
        .expect("the program starts")
}

/// Returns the JSON documents that a command prints, one for each line.
#[track_caller]
fn documents(model: &str, args: &[&str]) -> Vec<Value> {
    let output = gemmule(model, args);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    let text = String::from_utf8(output.stdout).expect("text");
    let parse = |line| serde_json::from_str(line).expect("JSON");
    text.lines().map(parse).collect()
}

/// Runs a command that fails, and returns its error on one line.
#[track_caller]
fn refused(model: &str, args: &[&str]) -> String {
    let output = gemmule(model, args);
    assert!(!output.status.success(), "{args:?} is accepted");
    let said = String::from_utf8_lossy(&output.stderr).replace('│', " ");
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn keys(value: &Value) -> Vec<&str> {
    let object = value.as_object().expect("an object");
    object.keys().map(String::as_str).collect()
}

#[test]
fn keys_of_json_are_those_of_pipelines() {
    let texts = ["--text", "the cat sat", "--text", "a dog", "--json"];
    let found = documents("ce-nli", &[&["classify"], &texts[..]].concat());
    assert_eq!(found.len(), 2);
    let best = &found[0].as_array().expect("a list of labels");
    assert_eq!(best.len(), 3);
    assert_eq!(keys(&best[0]), ["label", "score"]);
    let labels = ["--label", "rain", "--label", "snow"];
    let found = documents("ce-nli", &[&["classify"], &texts[..], &labels].concat());
    assert_eq!(found.len(), 2);
    assert_eq!(keys(&found[1]), ["labels", "scores", "sequence"]);
    assert_eq!(found[1]["sequence"], "a dog");
    let scores: Vec<f64> = found[1]["scores"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(Value::as_f64)
        .collect();
    assert!(scores.len() == 2 && scores[0] >= scores[1], "{scores:?}");
    let mut names = found[1]["labels"].as_array().expect("a list").clone();
    names.sort_by_key(Value::to_string);
    assert_eq!(names, [json!("rain"), json!("snow")]);
    let tokens = ["classify", "--tokens", "--ignore-label", "none"];
    let found = documents("hf-xlmr-token", &[&tokens[..], &texts].concat());
    let expected = ["end", "entity", "index", "score", "start", "word"];
    assert_eq!(keys(&found[0][0]), expected);
    let simple = ["--aggregation", "simple"];
    let found = documents("hf-xlmr-token", &[&tokens[..], &texts, &simple].concat());
    let expected = ["end", "entity_group", "score", "start", "word"];
    assert_eq!(keys(&found[0][0]), expected);
    let mask = ["fill-mask", "--text", "a <mask>", "--json"];
    let found = documents("hf-roberta-mlm", &mask);
    let expected = ["score", "sequence", "token", "token_str"];
    assert_eq!(keys(&found[0][0][0]), expected);
}

#[test]
fn a_text_that_is_refused_is_named() {
    let texts = [
        "--text",
        "a b c d e f",
        "--text",
        "a <pad> b",
        "--text",
        "a",
    ];
    let named = |model, args: &[&str]| refused(model, &[args, &texts[..]].concat());
    let part = "the id 1 is the model's padding token";
    for (model, args) in [
        ("ce-one", &["classify"][..]),
        ("hf-xlmr-token", &["classify", "--tokens"]),
        ("st-xlmr", &["run"]),
    ] {
        let said = named(model, args);
        assert!(
            said.contains("text 1, counted from 0, is refused"),
            "{said}"
        );
        assert!(said.contains("sequence 1, token"), "{said}");
        assert!(said.contains(part), "{said}");
    }
    let mask = [
        "fill-mask",
        "--text",
        "a <mask>",
        "--text",
        "b <pad> <mask>",
    ];
    let said = refused("hf-roberta-mlm", &mask);
    assert!(
        said.contains("text 1, counted from 0, is refused"),
        "{said}"
    );
    assert!(said.contains(part), "{said}");
    let folder = tempfile::tempdir().expect("room for a folder");
    let file = folder.path().join("texts.txt");
    std::fs::write(&file, "a b c d\n\na <pad> b\n").expect("it is written");
    let file = file.to_str().expect("a path of UTF-8");
    let said = refused("ce-one", &["classify", "--texts-file", file]);
    assert!(said.contains("line 3 of") && said.contains(part), "{said}");
}

#[test]
fn an_error_of_another_kind_of_model_names_its_outputs_and_commands() {
    let suited = |model: &str, args: &[&str]| {
        let said = refused(model, args);
        let start = said.find("` computes `").map(|at| &said[at + 2..]);
        let end = start.and_then(|start| start.split_once(" ╰─▶ "));
        end.unwrap_or_else(|| panic!("{said}")).0.to_owned()
    };
    let text = ["--text", "a"];
    let with = |command: &[&'static str]| [command, &text[..]].concat();
    insta::assert_snapshot!(suited("st-mean", &with(&["classify"])), @"computes `sentence_embedding`, and this command needs `sequence_logits`; for this model, use `gemmule embed` or `gemmule run`");
    insta::assert_snapshot!(suited("st-mean", &with(&["classify", "--tokens"])), @"computes `sentence_embedding`, and this command needs `token_logits`; for this model, use `gemmule embed` or `gemmule run`");
    insta::assert_snapshot!(suited("st-mean", &with(&["score"])), @"computes `sentence_embedding`, and this command needs `log_probability`; for this model, use `gemmule embed` or `gemmule run`");
    insta::assert_snapshot!(suited("late-bert", &with(&["score"])), @"computes `colbert`, and this command needs `log_probability`; for this model, use `gemmule rerank` or `gemmule embed --role`");
    insta::assert_snapshot!(suited("writer", &with(&["classify"])), @"computes `next_token_logits` and `log_probability`, and this command needs `sequence_logits`; for this model, use `gemmule generate` or `gemmule translate` or `gemmule score`");
    insta::assert_snapshot!(suited("translator", &with(&["score"])), @"computes `next_token_logits`, and this command needs `log_probability`; for this model, use `gemmule generate` or `gemmule translate`");
    insta::assert_snapshot!(suited("ce-one", &["fill-mask", "--text", "a <mask>"]), @"computes `sequence_logits`, and this command needs `mlm_logits`; for this model, use `gemmule classify` or `gemmule rerank`");
    let question = ["answer", "--question", "a", "--context", "b"];
    insta::assert_snapshot!(suited("writer", &question), @"computes `next_token_logits` and `log_probability`, and this command needs `token_logits`; for this model, use `gemmule generate` or `gemmule translate` or `gemmule score`");
    insta::assert_snapshot!(suited("hf-roberta-mlm", &question), @"computes `last_hidden_state` and `sentence_embedding` and `mlm_logits`, and this command needs `token_logits`; for this model, use `gemmule run` or `gemmule embed` or `gemmule fill-mask`");
    insta::assert_snapshot!(suited("st-splade", &with(&["run", "--similarities"])), @"computes `sparse`, and this command needs `sentence_embedding`; for this model, use `gemmule run`");
    let said = refused("hf-xlmr-token", &question);
    assert!(
        said.contains("the model has 3 labels for each token"),
        "{said}"
    );
    let said = refused("hf-roberta-mlm", &["score", "missing", "--text", "a"]);
    assert!(said.contains("`missing`"), "{said}");
    // The error also shows its cause.
    let said = refused("st-mean", &with(&["classify"]));
    assert!(said.contains("`classifier.weight`"), "{said}");
}

#[test]
fn numbers_and_words_without_a_meaning_are_refused() {
    let mask = ["fill-mask", "--text", "a <mask>"];
    let said = refused("hf-roberta-mlm", &[&mask[..], &["--top-k", "0"]].concat());
    assert!(said.contains("0 is not in 1..=1000"), "{said}");
    let said = refused("hf-roberta-mlm", &[&mask[..], &["--target", ""]].concat());
    assert!(
        said.contains("no token in the model's vocabulary"),
        "{said}"
    );
    let target = ["--target", "zzqq", "--json"];
    let output = gemmule("hf-roberta-mlm", &[&mask[..], &target].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("only the first one"),
        "{said}"
    );
    let score = ["score", "--text", "a", "--batch-tokens", "0"];
    let said = refused("writer", &score);
    assert!(said.contains("--batch-tokens"), "{said}");
    let answer = [
        "answer",
        "--question",
        "a",
        "--context",
        "b",
        "--top-k",
        "0",
    ];
    let said = refused("st-mean", &answer);
    assert!(said.contains("0 is not in 1..=1000"), "{said}");
}
