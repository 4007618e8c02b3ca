//! Compares the results of task heads with those of transformers' pipelines, which `scripts/heads.py` stores.

use std::path::{Path, PathBuf};

use gemmule::{
    DeviceChoice, Engine,
    heads::{
        AnswerOptions, EntityOptions, MASK_LOGITS, MaskOptions, TOKEN_LOGITS, ZeroShotOptions,
    },
};
use serde_json::{Value, json};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn expected(task: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(root().join("tests/pipelines/expected.json"));
    let all: Value = serde_json::from_str(&text.expect("it is readable")).expect("it is JSON");
    all[task].as_array().expect("a list of folders").clone()
}

fn engine(folder: &str, output: &str) -> Engine {
    let builder = Engine::from_checkpoint(root().join(folder)).outputs([output]);
    builder.device(DeviceChoice::Cpu).build().expect("it loads")
}

/// Compares JSON values. Numbers may differ by rounding.
#[track_caller]
fn assert_near(found: &Value, expected: &Value, about: &Value) {
    let is_near = |a: f64, b: f64| (a - b).abs() < 2e-5;
    match (found, expected) {
        (Value::Number(a), Value::Number(b)) if a.is_f64() || b.is_f64() => {
            let (a, b) = (a.as_f64().unwrap_or(f64::NAN), b.as_f64().unwrap_or(0.0));
            assert!(is_near(a, b), "{a} is not {b}: {about}");
        }
        (Value::Array(a), Value::Array(b)) => {
            assert_eq!(a.len(), b.len(), "{found} is not {expected}: {about}");
            a.iter().zip(b).for_each(|(a, b)| assert_near(a, b, about));
        }
        (Value::Object(a), Value::Object(b)) => {
            let names = |map: &serde_json::Map<String, Value>| {
                let mut names: Vec<String> = map.keys().cloned().collect();
                names.sort_unstable();
                names
            };
            assert_eq!(names(a), names(b), "{about}");
            a.iter().for_each(|(key, a)| assert_near(a, &b[key], about));
        }
        _ => assert_eq!(found, expected, "{about}"),
    }
}

fn text<'v>(run: &'v Value, key: &str) -> &'v str {
    run[key].as_str().unwrap_or_default()
}

fn texts(value: &Value) -> Vec<String> {
    let all = value.as_array().into_iter().flatten();
    all.filter_map(|text| text.as_str().map(str::to_owned))
        .collect()
}

fn count(run: &Value, key: &str) -> Option<usize> {
    run[key].as_u64().map(|n| n as usize)
}

#[test]
fn entities_are_those_of_transformers() {
    for of in expected("entities") {
        let engine = engine(text(&of, "folder"), TOKEN_LOGITS);
        for run in of["runs"].as_array().expect("runs") {
            let options = EntityOptions {
                aggregation: text(run, "aggregation").parse().expect("a rule"),
                ignored: texts(&run["ignored"]),
            };
            let found = engine.classify_tokens(&[text(run, "text")], &options);
            let found = json!(found.expect("it runs")[0]);
            assert_near(&found, &run["entities"], run);
        }
    }
}

#[test]
fn masks_are_filled_as_by_transformers() {
    for of in expected("masks") {
        let engine = engine(text(&of, "folder"), MASK_LOGITS);
        for run in of["runs"].as_array().expect("runs") {
            let options = MaskOptions {
                top_k: count(run, "top_k").unwrap_or(5),
                targets: texts(&run["targets"]),
            };
            let found = engine.fill_masks(&[text(run, "text")], &options);
            let found = json!(found.expect("it runs")[0]);
            assert_near(&found, &run["masks"], run);
        }
        let none = engine.fill_masks(&["no mask"], &MaskOptions::default());
        let told = none.expect_err("it has none").to_string();
        assert!(told.starts_with("text 0 has no mask; put `"), "{told}");
    }
}

#[test]
fn labels_without_training_are_scored_as_by_transformers() {
    for of in expected("zero_shot") {
        let engine = engine(text(&of, "folder"), "sequence_logits");
        for run in of["runs"].as_array().expect("runs") {
            let mut options = ZeroShotOptions {
                multi_label: run["multi_label"] == true,
                ..ZeroShotOptions::default()
            };
            if let Some(template) = run["template"].as_str() {
                options.template = template.to_owned();
            }
            let labels = texts(&run["labels"]);
            let found = engine.classify_zero_shot(text(run, "text"), &labels, &options);
            let found = found.expect("it runs");
            let ranked: Vec<&str> = found.iter().map(|label| label.label.as_str()).collect();
            assert_eq!(json!(ranked), run["ranked"], "{run}");
            let scores: Vec<f32> = found.iter().map(|label| label.score).collect();
            assert_near(&json!(scores), &run["scores"], run);
        }
        let options = ZeroShotOptions {
            template: "no place".to_owned(),
            ..ZeroShotOptions::default()
        };
        let told = engine.classify_zero_shot("rain", &["a"], &options);
        assert_eq!(
            told.expect_err("there is no place").to_string(),
            "the template `no place` has no `{}`; put `{}` in the place of the label"
        );
    }
    let other = engine("tests/checkpoints/ce-one", "sequence_logits");
    let told = other.classify_zero_shot("rain", &["a"], &ZeroShotOptions::default());
    let told = told.expect_err("it is no NLI").to_string();
    assert!(told.contains("none begins with `entailment`"), "{told}");
}

#[test]
fn questions_are_answered_as_by_transformers() {
    for of in expected("answers") {
        let engine = engine(text(&of, "folder"), TOKEN_LOGITS);
        for run in of["runs"].as_array().expect("runs") {
            let usual = AnswerOptions::default();
            let options = AnswerOptions {
                top_k: count(run, "top_k").unwrap_or(1),
                max_answer_tokens: count(run, "max_answer_len").unwrap_or(usual.max_answer_tokens),
                max_tokens: count(run, "max_seq_len"),
                stride: count(run, "doc_stride"),
                allows_none: run["handle_impossible_answer"] == true,
                aligns_to_words: run["align_to_words"] != false,
            };
            let found = engine.answer(text(run, "question"), text(run, "context"), &options);
            assert_near(&json!(found.expect("it runs")), &run["answers"], run);
        }
        let told = |question: &str, options: AnswerOptions| {
            let answered = engine.answer(question, "rain", &options);
            answered.expect_err("it is refused").to_string()
        };
        let usual = AnswerOptions::default;
        assert!(told(&"who ".repeat(90), usual()).contains("leaves no room"));
        assert!(told("", usual()).contains("it is empty"));
        let none = AnswerOptions {
            top_k: 0,
            ..usual()
        };
        assert_eq!(
            told("who?", none),
            "`top_k` is 0; expected a number from 1 to 1000"
        );
    }
}
