//! Tests of the command line with encoder-decoder models, most of them with a small trained Marian model that spells out numbers
//! (`scripts/train_translator.py`). The results must be those of transformers.

use std::{
    path::Path,
    process::{Command, Output},
};

use gemmule::{
    DeviceChoice, Engine,
    generate::{SamplingParams, generation_config},
    search::Beams,
    text::{Folder, TextEncoder},
};
use serde_json::Value;

const FOLDER: &str = "tests/checkpoints/translator";

fn gemmule(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gemmule"))
        .args(args)
        .args(["--device", "cpu"])
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

/// Returns the stored results of transformers for each source.
fn written(folder: &str) -> Vec<Value> {
    let file = Path::new(folder).join("written.json");
    let text = std::fs::read_to_string(file).expect("it is there");
    serde_json::from_str(&text).expect("JSON")
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().into_iter().flatten();
    ids.filter_map(Value::as_u64).map(|id| id as u32).collect()
}

#[test]
fn tokens_and_scores_are_those_of_transformers() {
    let asked = writes_as_transformers(FOLDER);
    assert_eq!(asked.beams, Some(Beams::of(4)));
    assert_eq!(asked.decoder_start, Some(0));
}

/// Checks a Marian folder that has random weights, but the same files and settings as published folders (`scripts/translators.py`).
#[test]
fn a_folder_with_sentence_pieces_and_forced_and_bad_words_writes_as_transformers() {
    let asked = writes_as_transformers("tests/checkpoints/hf-marian");
    assert_eq!(asked.rules.forced_last, [0]);
    assert_eq!(
        asked.rules.suppressed,
        [asked.decoder_start.expect("a start")]
    );
    assert!(asked.rules.renormalize);
}

#[test]
fn a_folder_of_many_languages_with_sentence_pieces_writes_as_transformers() {
    let asked = writes_as_transformers("tests/checkpoints/hf-m2m");
    assert!(asked.forced_bos.is_some());
}

#[test]
fn a_folder_with_biases_by_distance_writes_as_transformers() {
    let asked = writes_as_transformers("tests/checkpoints/hf-t5");
    assert_eq!(asked.rules.no_repeat_ngram, 3);
}

/// Compares generated tokens and scores with those stored in the folder `name`. Returns the generation settings of the folder.
#[track_caller]
fn writes_as_transformers(name: &str) -> SamplingParams {
    let engine = Engine::from_checkpoint(name).device(DeviceChoice::Cpu);
    let engine = engine.generating().build().expect("it loads");
    let folder = Folder::open(Path::new(name)).expect("a folder");
    let encoder = TextEncoder::for_prompts(folder).expect("a tokenizer");
    let mut asked = generation_config(Path::new(name)).expect("it is read");
    asked.rules.max_new_tokens = 30;
    let greedy = SamplingParams {
        beams: None,
        ..asked.clone()
    };
    let written = written(name);
    let texts: Vec<&str> = written
        .iter()
        .filter_map(|w| w["source"].as_str())
        .collect();
    let sources = encoder.prompts(&texts).expect("ids");
    for (options, key) in [(greedy, "greedy"), (asked.clone(), "beams")] {
        let go_on = |_: usize, _: &_| std::ops::ControlFlow::Continue(());
        let own = engine
            .generate(&sources, &options, go_on)
            .expect("it writes");
        assert_eq!(own.len(), written.len());
        for ((own, want), source) in own.iter().zip(&written).zip(&sources) {
            assert_eq!(*source, ids(&want["ids"]));
            assert_eq!(own.tokens, ids(&want[key]), "{key} of {}", want["source"]);
            if let (Some(score), Some(wanted)) = (own.score, want["score"].as_f64()) {
                assert!((f64::from(score) - wanted).abs() < 1e-4, "{score} {wanted}");
                let text = encoder.decode(&own.tokens).expect("a text");
                assert_eq!(Some(text.as_str()), want["text"].as_str());
            }
        }
    }
    asked
}

#[test]
fn a_file_is_translated_line_by_line_in_its_order() {
    let folder = tempfile::tempdir().expect("a folder");
    let (source, output) = (folder.path().join("in.txt"), folder.path().join("out.txt"));
    let written = written(FOLDER);
    let texts: Vec<&str> = written
        .iter()
        .filter_map(|w| w["source"].as_str())
        .collect();
    // Put an empty line between the texts. Each empty line results in an empty line.
    std::fs::write(&source, texts.join("\n\n") + "\n").expect("it is written");
    let wanted: Vec<&str> = written.iter().filter_map(|w| w["text"].as_str()).collect();
    let wanted = wanted.join("\n\n") + "\n";
    let source = source.to_str().expect("a name");
    let translate = ["translate", "--weights", FOLDER, "--source-file", source];
    assert_eq!(done(&translate), wanted);
    let greedy = ["--beams", "1", "--batch-tokens", "9"];
    assert_eq!(done(&[&translate[..], &greedy].concat()), wanted);
    let into = ["--output-file", output.to_str().expect("a name")];
    assert_eq!(done(&[&translate[..], &into].concat()), "");
    assert_eq!(
        std::fs::read_to_string(&output).expect("it is there"),
        wanted
    );
    // `--forced-bos` usually names a language token. This model has no languages, so force an ordinary token.
    let forced = done(&[&translate[..], &["--forced-bos", "nine"]].concat());
    assert!(
        forced
            .lines()
            .step_by(2)
            .all(|line| line.starts_with("nine")),
        "{forced}"
    );
}

#[test]
fn a_folder_with_sentence_pieces_is_translated_as_it_is() {
    let name = "tests/checkpoints/hf-marian";
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("in.txt");
    let written = written(name);
    let texts = |key: &str| {
        let texts = written.iter().filter_map(|w| w[key].as_str());
        texts.map(|t| format!("{t}\n")).collect::<String>()
    };
    std::fs::write(&source, texts("source")).expect("it is written");
    let source = source.to_str().expect("a name");
    let args = [
        "translate",
        "--weights",
        name,
        "--source-file",
        source,
        "--max-new",
        "30",
    ];
    assert_eq!(done(&args), texts("text"));
}

#[test]
fn what_cannot_be_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("in.txt");
    std::fs::write(&source, "7\n").expect("it is written");
    let source = source.to_str().expect("a name");
    let refused = |args: &[&str]| {
        let output = gemmule(args);
        assert!(!output.status.success(), "{args:?} is accepted");
        let errors = String::from_utf8(output.stderr).expect("text");
        let words = errors.split_whitespace().filter(|word| *word != "│");
        words.collect::<Vec<_>>().join(" ")
    };
    let of = |folder: &str, more: &[&str]| {
        let args = ["translate", "--source-file", source, "--weights", folder];
        refused(&[&args[..], more].concat())
    };
    let unknown = of(FOLDER, &["--forced-bos", "__de__"]);
    assert!(unknown.contains("has no token `__de__`"), "{unknown}");
    let own = of(FOLDER, &["--output-file", source]);
    assert!(own.contains("is both the source and the output"), "{own}");
    assert_eq!(std::fs::read_to_string(source).expect("it is there"), "7\n");
    let no_beams = of(FOLDER, &["--beams", "0"]);
    assert!(no_beams.contains("beams"), "{no_beams}");
    assert!(!no_beams.contains("num-hypotheses"), "{no_beams}");
    let writer = of("tests/checkpoints/writer", &[]);
    assert!(writer.contains("gemmule generate"), "{writer}");
    // A folder whose SentencePiece files are empty.
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        std::fs::copy(Path::new(FOLDER).join(file), folder.path().join(file)).expect("a copy");
    }
    for file in ["source.spm", "target.spm"] {
        std::fs::write(folder.path().join(file), "").expect("it is written");
    }
    let pieces = of(folder.path().to_str().expect("a name"), &[]);
    assert!(
        pieces.contains("it has 0 pieces; expected 1 to"),
        "{pieces}"
    );
}

#[test]
fn a_line_that_is_too_long_fails_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("in.txt");
    std::fs::write(&source, format!("7\n{}\n4217\n", "1".repeat(100))).expect("it is written");
    let source = source.to_str().expect("a name");
    let output = gemmule(&["translate", "--weights", FOLDER, "--source-file", source]);
    assert!(!output.status.success());
    let text = String::from_utf8(output.stdout).expect("text");
    assert_eq!(text, "seven\n\nfour thousand two hundred seventeen\n");
    let errors = String::from_utf8(output.stderr).expect("text");
    assert!(errors.contains("line 2 failed: "), "{errors}");
    // If the limit of new tokens is too large, the whole command fails, not only a line.
    let long = ["--max-new", "64"];
    let translate = ["translate", "--weights", FOLDER, "--source-file", source];
    let output = gemmule(&[&translate[..], &long].concat());
    assert!(!output.status.success());
    let errors = String::from_utf8(output.stderr).expect("text");
    assert!(
        errors.contains("64 new tokens after the start token are more than the model's 64 positions; request at most 63 new tokens"),
        "{errors}"
    );
}

#[test]
fn a_line_that_cannot_run_leaves_the_others_their_room() {
    let engine = Engine::from_checkpoint(FOLDER).device(DeviceChoice::Cpu);
    let engine = engine.generating().build().expect("it loads");
    let options = generation_config(Path::new(FOLDER)).expect("it is read");
    let bytes = |lens: &[usize]| engine.cache_bytes_at_most(lens, &options).expect("bytes");
    assert_eq!(bytes(&[5, 9, 1000]), bytes(&[5, 9]));
    assert_eq!(bytes(&[9; 1000]), bytes(&[9; 16]), "of four beams each");
}

#[test]
fn options_that_say_nothing_without_another_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("in.txt");
    std::fs::write(&source, "7\n").expect("it is written");
    let source = source.to_str().expect("a name");
    let translate = ["translate", "--weights", FOLDER, "--source-file", source];
    let penalty = ["--length-penalty", "2"];
    assert_eq!(done(&[&translate[..], &penalty].concat()), "seven\n");
    let output = gemmule(&[&translate[..], &penalty, &["--beams", "1"]].concat());
    assert!(!output.status.success());
    let errors = String::from_utf8(output.stderr).expect("text");
    assert!(
        errors.contains("--length-penalty has an effect only with --beams"),
        "{errors}"
    );
}

#[test]
fn a_search_stops_as_early_as_it_is_asked_to() {
    // With this length penalty, long hypotheses have better scores. The search finds the best hypothesis only if it continues after shorter
    // ones are finished.
    let asked = ["--prompt", "9", "--beams", "3", "--length-penalty", "8"];
    let of = |early: &[&str]| {
        let args = ["generate", "--weights", FOLDER];
        done(&[&args[..], &asked, early].concat())
    };
    assert_eq!(of(&["--early-stopping"]), "nine\n");
    assert_eq!(of(&["--early-stopping", "yes"]), "nine\n");
    assert_eq!(of(&["--early-stopping", "no"]), of(&[]));
    let never = of(&["--early-stopping", "never"]);
    assert!(never.starts_with("nine hundred"), "{never}");
}

/// Copies a folder, and replaces or adds some files.
fn copy_of(folder: &str, changed: &[(&str, &str)]) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(folder).expect("the checkpoint") {
        let file = entry.expect("a file").path();
        let name = file.file_name().expect("a name");
        std::fs::copy(&file, copy.path().join(name)).expect("it is copied");
    }
    for (name, text) in changed {
        std::fs::write(copy.path().join(name), text).expect("it is written");
    }
    copy
}

#[test]
fn settings_in_config_json_are_read_where_there_is_no_other_file() {
    let config =
        std::fs::read_to_string(Path::new(FOLDER).join("config.json")).expect("it is there");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    for (key, value) in [
        ("num_beams", serde_json::json!(3)),
        ("length_penalty", serde_json::json!(0.5)),
        ("max_length", serde_json::json!(40)),
        ("forced_bos_token_id", serde_json::json!(5)),
        ("bad_words_ids", serde_json::json!([[7]])),
    ] {
        config[key] = value;
    }
    let text = config.to_string();
    let folder = copy_of(FOLDER, &[("config.json", &text)]);
    let kept = generation_config(folder.path()).expect("it is read");
    assert_eq!(kept.beams, Some(Beams::of(4)), "of generation_config.json");
    std::fs::remove_file(folder.path().join("generation_config.json")).expect("it was there");
    let read = generation_config(folder.path()).expect("it is read");
    let beams = Beams {
        length_penalty: 0.5,
        ..Beams::of(3)
    };
    assert_eq!(read.beams, Some(beams));
    assert_eq!((read.max_length, read.decoder_start), (Some(40), Some(0)));
    let rules = read.rules;
    assert_eq!((read.forced_bos, rules.suppressed), (Some(5), vec![7]));
    assert_eq!((rules.end, rules.forced_last), (vec![1], vec![1]));
}

#[test]
fn a_text_has_as_many_tokens_as_its_folder_allows() {
    let tokens = |settings: &str| {
        let folder = copy_of(FOLDER, &[("generation_config.json", settings)]);
        let folder = folder.path().to_str().expect("a name");
        let out = done(&[
            "generate",
            "--weights",
            folder,
            "--prompt",
            "7777777",
            "--json",
        ]);
        let out: Value = serde_json::from_str(&out).expect("JSON");
        let text = &out["texts"][0];
        let n = text["tokens"].as_array().expect("a list").len();
        (n, text["reason"].as_str().expect("a reason").to_owned())
    };
    // `min_new_tokens` is so large that no text ends early. A text then ends at one of three limits: `max_new_tokens`, `max_length` (which
    // also counts the start token), or the model's 64 positions.
    let of = |more: &str| format!(r#"{{"eos_token_id": 1, "min_new_tokens": 99{more}}}"#);
    assert_eq!(tokens(&of("")), (63, "length".to_owned()));
    assert_eq!(
        tokens(&of(r#", "max_length": 31"#)),
        (30, "length".to_owned())
    );
    assert_eq!(
        tokens(&of(r#", "max_length": 512"#)),
        (63, "length".to_owned())
    );
    let both = of(r#", "max_length": 31, "max_new_tokens": 9"#);
    assert_eq!(tokens(&both), (9, "length".to_owned()));
}

#[test]
fn a_source_is_a_prompt_that_is_not_repeated() {
    let out = done(&["generate", "--weights", FOLDER, "--prompt", "4217"]);
    assert_eq!(out, "four thousand two hundred seventeen\n");
}

#[test]
fn a_bench_says_what_was_timed_and_where_the_time_of_a_step_goes() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("times.json");
    let file = file.to_str().expect("a name");
    let sizes = [
        "--batch",
        "1,3",
        "--prompt-tokens",
        "5",
        "--new",
        "4",
        "--json",
        file,
    ];
    let of = |more: &[&str]| -> Vec<Value> {
        let args = ["bench", "generate", "--weights", FOLDER];
        done(&[&args[..], &sizes, more].concat());
        let text = std::fs::read_to_string(file).expect("it is there");
        serde_json::from_str(&text).expect("rows")
    };
    for (row, batch) in of(&["--beams", "2", "--classes"]).iter().zip([1, 3]) {
        let asked = ["batch", "prompt_tokens", "new", "beams"].map(|key| row[key].as_u64());
        assert_eq!(asked, [batch, 5, 4, 2].map(Some));
        let time = |value: &Value| value.as_f64().expect("a time");
        assert!(time(&row["whole_ms"]) > time(&row["first_ms"]));
        let classes = row["classes"].as_object().expect("classes");
        assert!(time(&classes["GEMM"]) > 0.0 && time(&classes["attention"]) > 0.0);
        assert!(classes.contains_key("choosing"));
    }
    let drawn = of(&["--top-k", "3", "--top-p", "0.5"]);
    assert_eq!(
        (drawn[0]["top_k"].as_u64(), drawn[0]["top_p"].as_f64()),
        (Some(3), Some(0.5))
    );
    assert!(drawn[0].get("beams").is_none() && drawn[0].get("classes").is_none());
}
