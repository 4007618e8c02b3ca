//! The command line on a small GPT-2 that was trained (`scripts/train_writer.py`): real text, as transformers writes it.

use std::{
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;

const FOLDER: &str = "tests/checkpoints/writer";

fn gemmule(args: &[&str]) -> Output {
    from(Path::new(FOLDER), args)
}

fn from(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gemmule"))
        .args(args)
        .args(["--device", "cpu", "--weights"])
        .arg(folder)
        .output()
        .expect("the program starts")
}

#[track_caller]
fn done(args: &[&str]) -> String {
    let output = gemmule(args);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    String::from_utf8(output.stdout).expect("text")
}

#[track_caller]
fn refused(args: &[&str]) -> String {
    let output = gemmule(args);
    assert!(!output.status.success(), "{args:?} is accepted");
    let errors = String::from_utf8(output.stderr).expect("text");
    errors.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&done(args)).expect("JSON")
}

/// What transformers made of each prompt.
fn written() -> Vec<Value> {
    let file = Path::new(FOLDER).join("written.json");
    let text = std::fs::read_to_string(file).expect("it is there");
    serde_json::from_str(&text).expect("JSON")
}

fn text<'v>(value: &'v Value, key: &str) -> &'v str {
    value[key].as_str().expect("a text")
}

/// Each text of an answer beside what transformers made of its prompt.
fn pairs<'v>(got: &'v Value, want: &'v [Value]) -> impl Iterator<Item = (&'v Value, &'v Value)> {
    let texts = got["texts"].as_array().expect("a list");
    assert_eq!(texts.len(), want.len());
    texts.iter().zip(want)
}

#[test]
fn stories_go_on_as_transformers_writes_them() {
    let written = written();
    assert!(written.len() >= 5);
    let mut args = vec!["generate", "--max-new", "60", "--json"];
    for one in &written {
        args.extend(["--prompt", text(one, "prompt")]);
    }
    let got = json(&args);
    for (got, want) in pairs(&got, &written) {
        assert_eq!(got["tokens"], want["greedy"], "{}", want["prompt"]);
        assert_eq!(got["text"], want["text"]);
        let end = want["greedy"].as_array().expect("a list").last() == Some(&Value::from(0));
        assert_eq!(got["reason"], if end { "end" } else { "length" });
    }
}

#[test]
fn one_beam_is_greedy_and_more_find_what_is_more_probable() {
    let prompt = "Lily was bored, so";
    let of = |beams: &[&str]| {
        let mut args = vec!["generate", "--prompt", prompt, "--json"];
        args.extend(beams);
        json(&args)["texts"][0]["text"]
            .as_str()
            .expect("a text")
            .to_owned()
    };
    assert_eq!(of(&["--beams", "1"]), of(&[]));
    let log_probability = |text: &str| {
        let whole = format!("{prompt}{text}");
        json(&["score", "--text", &whole, "--json"])["log_probability"]
            .as_f64()
            .expect("a number")
    };
    let (greedy, beams) = (of(&[]), of(&["--beams", "4", "--length-penalty", "0"]));
    assert!(log_probability(&beams) >= log_probability(&greedy) - 1e-3);
}

#[test]
fn scores_are_those_of_transformers() {
    let written = written();
    let mut args = vec!["score", "--json", "--batch-tokens", "100"];
    for one in &written {
        args.extend(["--text", text(one, "prompt")]);
    }
    let got = json(&args);
    for (got, want) in pairs(&got, &written) {
        assert_eq!(got["tokens"], want["ids"]);
        let numbers = |value: &Value| -> Vec<f64> {
            let all = value.as_array().expect("a list").iter();
            all.map(|x| x.as_f64().expect("a number")).collect()
        };
        let (got, want) = (
            numbers(&got["log_probabilities"]),
            numbers(&want["log_probability"]),
        );
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() < 1e-4, "{got} {want}");
        }
    }
}

#[test]
fn a_stream_is_the_text_and_a_stop_ends_it() {
    let prompt = ["generate", "--prompt", "Anna went to the pond."];
    let all = done(&prompt);
    let streamed = done(&[&prompt[..], &["--stream"]].concat());
    assert_eq!(all, streamed);
    assert!(streamed.ends_with("about the frog.\n"), "{streamed}");
    for stop in [
        &["--stop", "Thank you"][..],
        &["--stop", "Thank you", "--stream"][..],
    ] {
        let stopped = done(&[&prompt[..], stop].concat());
        assert!(stopped.ends_with("gave it a berry. \"\n"), "{stopped}");
    }
}

#[test]
fn draws_depend_on_the_seed_and_on_nothing_else() {
    let of = |seed: &str, others: &[&str]| {
        let mut args = vec![
            "generate", "--sample", "--seed", seed, "--prompt", "One", "--json",
        ];
        args.extend(others);
        json(&args)["texts"][0]["text"]
            .as_str()
            .expect("a text")
            .to_owned()
    };
    let one = of("1", &[]);
    assert_eq!(of("1", &["--prompt", "Mia went to the"]), one);
    let others: Vec<String> = ["2", "3", "4"].iter().map(|seed| of(seed, &[])).collect();
    assert!(others.iter().any(|other| *other != one));
}

#[test]
fn draws_are_instead_of_the_beams_of_a_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(Path::new(FOLDER).join(file), folder.path().join(file)).expect("a copy");
    }
    let config = r#"{"eos_token_id": 0, "max_new_tokens": 20, "num_beams": 4}"#;
    std::fs::write(folder.path().join("generation_config.json"), config).expect("a file");
    let own = ["generate", "--prompt", "One day", "--max-new", "20"];
    let beams = done(&[&own[..], &["--beams", "4"]].concat());
    for (more, want) in [
        (&[][..], beams),
        (&["--sample"], done(&[&own[..], &["--sample"]].concat())),
    ] {
        let output = from(folder.path(), &[&own[..], more].concat());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{more:?}: {errors}");
        assert_eq!(String::from_utf8(output.stdout).expect("text"), want);
    }
}

#[test]
fn what_cannot_be_written_is_refused_in_words() {
    let long = "a".repeat(300);
    let too_long = refused(&["generate", "--prompt", &long]);
    assert!(
        too_long.contains(
            "the prompt's 300 tokens and 200 new ones are more than the model's 256 positions"
        ),
        "{too_long}"
    );
    let empty = refused(&["generate", "--prompt", ""]);
    assert!(empty.contains("the prompt has no token"), "{empty}");
    let temperature = refused(&["generate", "--prompt", "One", "--temperature", "0"]);
    assert!(
        temperature.contains("the temperature is 0"),
        "{temperature}"
    );
    let top_p = refused(&["generate", "--prompt", "One", "--top-p", "1.5"]);
    assert!(top_p.contains("top_p is 1.5"), "{top_p}");
    let beams = refused(&["generate", "--prompt", "One", "--beams", "0"]);
    assert!(beams.contains("0 beams; expected at least one"), "{beams}");
    let groups = refused(&[
        "generate", "--prompt", "One", "--beams", "4", "--groups", "3",
    ]);
    assert!(groups.contains("4 beams in 3 groups"), "{groups}");
    let two = refused(&["generate", "--prompt", "One", "--prompt", "Two", "--stream"]);
    assert!(two.contains("--stream shows one text as it comes"), "{two}");
    let stop = refused(&["generate", "--prompt", "One", "--stop", ""]);
    assert!(stop.contains("an empty --stop"), "{stop}");
    let output = refused(&["generate", "--prompt", "One", "--output", "token_logits"]);
    assert!(output.contains("leave `token_logits` out"), "{output}");
    let unknown = refused(&["generate", "--prompt", "One?"]);
    assert!(unknown.contains("text 0"), "{unknown}");
    let score = refused(&["score", "--text", ""]);
    assert!(
        score.contains("text 0, counted from 0, failed: it has no token"),
        "{score}"
    );
}

#[test]
fn a_chat_template_writes_the_question_and_the_answer_alone_is_printed() {
    let refused = refused(&["generate", "--chat", "--prompt", "Who?"]);
    assert!(
        refused.contains("neither chat_template.jinja nor `chat_template`"),
        "{refused}"
    );
    let folder = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(FOLDER).expect("the checkpoint") {
        let file = entry.expect("a file").path();
        let name = file.file_name().expect("a name");
        std::fs::copy(&file, folder.path().join(name)).expect("it is copied");
    }
    // A conversation in this template is the text that the checkpoint was asked to go on from.
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    let file = folder.path().join("chat_template.jinja");
    std::fs::write(file, template).expect("it is written");
    let prompt = "Lily was bored, so";
    let plain = done(&["generate", "--prompt", prompt]);
    let answer = |args: &[&str]| {
        let output = from(folder.path(), args);
        assert!(output.status.success());
        String::from_utf8(output.stdout).expect("text")
    };
    let asked = answer(&[
        "generate",
        "--chat",
        "--system",
        "Lily was",
        "--prompt",
        " bored, so",
    ]);
    assert_eq!(format!("{prompt}{asked}"), plain);
    let streamed = answer(&["generate", "--chat", "--stream", "--prompt", prompt]);
    assert_eq!(streamed, asked);
}
