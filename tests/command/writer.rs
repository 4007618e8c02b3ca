//! Tests of text generation through the command line, with a small trained GPT-2 (`scripts/train_writer.py`). The texts must be those of
//! transformers.

use std::{
    ops::ControlFlow,
    path::Path,
    process::{Command, Output},
};

use gemmule::{
    DeviceChoice, Engine,
    generate::{Request, SamplingParams, generation_config},
    search::{Beams, Sampling},
    text::{Folder, TextEncoder},
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

/// Returns the stored results of transformers for each prompt.
fn written() -> Vec<Value> {
    let file = Path::new(FOLDER).join("written.json");
    let text = std::fs::read_to_string(file).expect("it is there");
    serde_json::from_str(&text).expect("JSON")
}

fn text<'v>(value: &'v Value, key: &str) -> &'v str {
    value[key].as_str().expect("a text")
}

/// Pairs each generated text with the stored result of transformers for its prompt.
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
fn one_call_generates_what_the_command_generates() {
    let engine = Engine::from_checkpoint(FOLDER)
        .device(DeviceChoice::Cpu)
        .generating()
        .build()
        .expect("it loads");
    for one in &written() {
        let prompt = text(one, "prompt");
        let got = engine.generate_text(prompt).expect("it generates");
        // The folder allows 200 new tokens. The stored text of 60 tokens is the beginning of the generated text.
        assert!(got.starts_with(text(one, "text")), "{prompt}: {got}");
        let command = json(&["generate", "--prompt", prompt, "--json"]);
        assert_eq!(command["texts"][0]["text"], got, "{prompt}");
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
        // The first token has no log-probability. transformers' stored value is 0.
        let mut got = got["log_probabilities"].clone();
        assert_eq!(got[0], Value::Null);
        got[0] = 0.0.into();
        let (got, want) = (numbers(&got), numbers(&want["log_probability"]));
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() < 1e-4, "{got} {want}");
        }
    }
}

#[test]
fn quantized_weights_hardly_change_the_log_probabilities() {
    let texts: Vec<String> = written()
        .iter()
        .map(|one| format!("{}{}", text(one, "prompt"), text(one, "text")))
        .collect();
    // Returns the log-probabilities of all tokens, except for the first of each text, which has none.
    let scores = |more: &[&str]| -> Vec<f64> {
        let mut args = vec!["score", "--json"];
        texts.iter().for_each(|text| args.extend(["--text", text]));
        let got = json(&[&args, more].concat());
        let texts = got["texts"].as_array().expect("a list").iter();
        let all = texts.flat_map(|text| text["log_probabilities"].as_array().expect("a list"));
        all.filter_map(Value::as_f64).collect()
    };
    let mean = |values: &mut dyn Iterator<Item = f64>, n: usize| values.sum::<f64>() / n as f64;
    let plain = scores(&[]);
    for (kind, bound) in [
        ("fp8", 0.01),
        ("fp8_g128", 0.01),
        ("int8", 0.01),
        ("int4", 0.04),
    ] {
        let rounded = scores(&["--quantize", kind]);
        assert_eq!(rounded.len(), plain.len());
        let changes = || rounded.iter().zip(&plain).map(|(a, b)| a - b);
        let change = mean(&mut changes().map(f64::abs), plain.len());
        // The perplexity is exp(−mean).
        let perplexity = (-mean(&mut changes(), plain.len())).exp();
        assert!(change > 0.0, "{kind} rounds nothing");
        assert!(change <= bound, "{kind}: {change}");
        assert!((perplexity - 1.0).abs() <= bound, "{kind}: {perplexity}");
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
    for file in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
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

/// Returns the token ids of a text as a prompt.
fn tokens_of(text: &str) -> Vec<u32> {
    let folder = Folder::open(Path::new(FOLDER)).expect("a folder");
    let encoder = TextEncoder::for_prompts(folder).expect("a tokenizer");
    encoder.prompts(&[text]).expect("ids").remove(0)
}

/// Returns the tokens that the Rust API generates after a prompt.
fn tokens_by(prompt: &str, change: impl FnOnce(&mut SamplingParams)) -> Vec<u32> {
    let engine = Engine::from_checkpoint(FOLDER).device(DeviceChoice::Cpu);
    let engine = engine.generating().build().expect("it loads");
    let mut options = generation_config(Path::new(FOLDER)).expect("it is read");
    options.rules.max_new_tokens = 40;
    change(&mut options);
    let prompts = [tokens_of(prompt)];
    let written = engine.generate(&prompts, &options, |_, _| ControlFlow::Continue(()));
    written.expect("it writes").remove(0).tokens
}

/// Checks that each option of the command line has the same effect as its setting in the Rust API, and that it changes the tokens.
#[test]
fn each_option_is_the_setting_of_its_name() {
    let prompt = "It";
    let of = |options: &[&str]| -> Vec<u32> {
        let args = ["generate", "--prompt", prompt, "--max-new", "40", "--json"];
        let got = json(&[&args[..], options].concat());
        let tokens = got["texts"][0]["tokens"].as_array().expect("a list");
        let ids = tokens.iter().filter_map(Value::as_u64);
        ids.map(|id| id as u32).collect()
    };
    let check = |options: &[&str], without: &[&str], change: &dyn Fn(&mut SamplingParams)| {
        let got = of(options);
        assert_eq!(got, tokens_by(prompt, change), "{options:?}");
        assert_ne!(got, of(without), "{options:?} changes nothing");
        got
    };
    check(&["--repetition-penalty", "5"], &[], &|o| {
        o.rules.repetition_penalty = 5.0;
    });
    check(&["--no-repeat-ngram", "2"], &[], &|o| {
        o.rules.no_repeat_ngram = 2;
    });
    let x = tokens_of("x")[0];
    let forced = check(&["--forced-bos", "x"], &[], &|o| {
        o.rules.forced_first = Some(x);
    });
    assert_eq!(forced[0], x);
    let drawn = ["--sample", "--top-k", "0", "--seed", "3"];
    check(&[&drawn[..], &["--min-p", "0.5"]].concat(), &drawn, &|o| {
        o.sampling = Some(Sampling {
            top_k: 0,
            min_p: 0.5,
            ..Sampling::default()
        });
        o.seed = 3;
    });
    let beams = ["--beams", "4"];
    let groups = [&beams[..], &["--groups", "4"]].concat();
    let diverse = [&groups[..], &["--diversity", "0.5"]].concat();
    let asked = Beams {
        groups: 4,
        ..Beams::of(4)
    };
    check(&groups, &beams, &|o| o.beams = Some(asked));
    check(&diverse, &groups, &|o| {
        o.beams = Some(Beams {
            diversity: 0.5,
            ..asked
        });
    });
}

#[test]
fn options_that_say_nothing_without_another_are_refused() {
    for (options, said) in [
        (
            &["--length-penalty", "2"][..],
            "--length-penalty has an effect only with --beams",
        ),
        (
            &["--early-stopping"],
            "--early-stopping has an effect only with --beams",
        ),
        (
            &["--groups", "2"],
            "--groups has an effect only with --beams",
        ),
        (
            &["--diversity", "1"],
            "--diversity has an effect only with --groups",
        ),
        (
            &["--beams", "4", "--diversity", "1"],
            "--diversity has an effect only with --groups",
        ),
        (
            &["--sample", "--length-penalty", "2"],
            "--length-penalty has an effect only with --beams",
        ),
    ] {
        let refused = refused(&[&["generate", "--prompt", "One"], options].concat());
        assert!(refused.contains(said), "{options:?}: {refused}");
    }
}

#[test]
fn the_prompts_and_texts_of_a_file_fail_one_by_one_and_messages_have_their_lines() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("lines.txt");
    let long = "a".repeat(300);
    std::fs::write(&file, format!("One day\n\n{long}\nOne?\n\nMia went\n")).expect("it is written");
    let file = file.to_str().expect("a name");
    let run = |args: &[&str]| {
        let output = gemmule(args);
        let errors = String::from_utf8(output.stderr).expect("text");
        let errors = errors.replace(file, "[file]");
        assert!(!output.status.success(), "{args:?}");
        assert!(
            errors.contains("line 4 of `[file]` failed: text 2 cannot be tokenized"),
            "{errors}"
        );
        let got: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        (got, errors)
    };
    let own = ["generate", "--max-new", "12", "--json"];
    let (got, errors) = run(&[&own[..], &["--prompts-file", file]].concat());
    assert!(
        errors.contains(
            "line 3 of `[file]` failed: the prompt's 300 tokens and 12 new ones are more"
        ),
        "{errors}"
    );
    let alone = json(&[&own[..], &["--prompt", "One day", "--prompt", "Mia went"]].concat());
    let texts = got["texts"].as_array().expect("a list");
    let reasons: Vec<&str> = texts.iter().map(|t| text(t, "reason")).collect();
    assert_eq!(reasons, ["length", "failed", "failed", "length"]);
    assert_eq!(
        [&texts[0], &texts[3]],
        [&alone["texts"][0], &alone["texts"][1]]
    );
    let bytes = |key: &str| got["bytes"][key].as_u64().expect("bytes");
    assert!(bytes("all") > bytes("cache"));
    let (got, errors) = run(&["score", "--texts-file", file, "--json"]);
    assert!(
        errors.contains(
            "line 3 of `[file]` failed: its 300 tokens are more than the model's 256 positions"
        ),
        "{errors}"
    );
    let alone = json(&["score", "--text", "One day", "--text", "Mia went", "--json"]);
    assert_eq!(got, alone);
}

#[test]
fn prompts_that_all_fail_are_all_named() {
    let output = gemmule(&["generate", "--prompt", "?", "--prompt", "", "--json"]);
    assert!(!output.status.success());
    let errors = String::from_utf8(output.stderr).expect("text");
    assert!(
        errors.contains("prompt 0, counted from 0, failed: text 0 cannot be tokenized"),
        "{errors}"
    );
    assert!(
        errors.contains("prompt 1, counted from 0, failed: the prompt has no token"),
        "{errors}"
    );
    let got: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let texts = got["texts"].as_array().expect("a list");
    assert!(texts.iter().all(|t| t["reason"] == "failed"), "{got}");
    let none = gemmule(&["generate", "--prompt", "?", "--json"]);
    assert!(serde_json::from_slice::<Value>(&none.stdout).is_ok());
}

#[test]
fn a_folder_that_asks_for_beams_and_draws_leaves_the_choice_to_the_arguments() {
    let folder = tempfile::tempdir().expect("a folder");
    for file in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        std::fs::copy(Path::new(FOLDER).join(file), folder.path().join(file)).expect("a copy");
    }
    let config = r#"{"eos_token_id": 0, "max_new_tokens": 20, "num_beams": 4, "do_sample": true}"#;
    std::fs::write(folder.path().join("generation_config.json"), config).expect("a file");
    let own = ["generate", "--prompt", "One day", "--max-new", "20"];
    let output = from(folder.path(), &own);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(errors.contains("--beams or --sample decides"), "{errors}");
    for more in [&["--beams", "4"][..], &["--sample"]] {
        let asked = [&own[..], more].concat();
        let output = from(folder.path(), &asked);
        assert_eq!(
            String::from_utf8(output.stdout).expect("text"),
            done(&asked)
        );
    }
}

#[test]
fn a_length_with_the_prompt_bounds_what_is_new() {
    let folder = tempfile::tempdir().expect("a folder");
    for file in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        std::fs::copy(Path::new(FOLDER).join(file), folder.path().join(file)).expect("a copy");
    }
    let config = r#"{"eos_token_id": 0, "min_new_tokens": 99, "max_length": 30}"#;
    std::fs::write(folder.path().join("generation_config.json"), config).expect("a file");
    let of = |more: &[&str]| {
        let output = from(folder.path(), &[&["generate", "--json"], more].concat());
        let got: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let texts = got["texts"].as_array().expect("a list").iter();
        let n = |t: &Value| t["tokens"].as_array().expect("a list").len();
        let n: Vec<usize> = texts.map(n).collect();
        (n, String::from_utf8(output.stderr).expect("text"))
    };
    let long = "a".repeat(30);
    let (n, errors) = of(&["--prompt", "One", "--prompt", "One day", "--prompt", &long]);
    assert_eq!(n, [27, 23, 0]);
    assert!(
        errors.contains(
            "prompt 2, counted from 0, failed: the 30 existing tokens leave no room below the maximum length of 30"
        ),
        "{errors}"
    );
    assert_eq!(of(&["--prompt", &long, "--max-new", "8"]).0, [8]);
}

#[test]
fn what_cannot_be_written_is_refused_in_words() {
    let long = "a".repeat(300);
    let too_long = refused(&["generate", "--prompt", &long]);
    assert!(
        too_long.contains(
            "the prompt's 300 tokens and 1 new ones are more than the model's 256 positions"
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
    assert!(
        groups.contains("4 beams do not divide into 3 groups"),
        "{groups}"
    );
    let two = refused(&["generate", "--prompt", "One", "--prompt", "Two", "--stream"]);
    assert!(
        two.contains("--stream prints one text while it is generated"),
        "{two}"
    );
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
        refused.contains("chat_template.jinja nor `chat_template` in"),
        "{refused}"
    );
    let folder = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(FOLDER).expect("the checkpoint") {
        let file = entry.expect("a file").path();
        let name = file.file_name().expect("a name");
        std::fs::copy(&file, folder.path().join(name)).expect("it is copied");
    }
    // This chat template returns the contents of the messages without markup, so a chat gives the same text as the plain prompt.
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
    // This template reads the variable `plain`, which `--chat-template-kwargs` sets, and refuses the conversation without it.
    let template = "{% if plain %}{{ messages[0].content }}{% else %}{{ raise_exception('not plain') }}{% endif %}";
    let file = folder.path().join("chat_template.jinja");
    std::fs::write(file, template).expect("it is written");
    let kwargs = "--chat-template-kwargs";
    let given = ["generate", "--chat", "--prompt", prompt, kwargs];
    assert_eq!(
        answer(&[&given[..], &[r#"{"plain": true}"#]].concat()),
        asked
    );
    for (text, expected) in [
        (
            "{}",
            "the model's chat template refuses the conversation: not plain",
        ),
        (
            "3",
            "--chat-template-kwargs is a number; expected a JSON object",
        ),
        ("{", "--chat-template-kwargs is not JSON"),
    ] {
        let output = from(folder.path(), &[&given[..], &[text]].concat());
        assert!(!output.status.success());
        let problem = String::from_utf8(output.stderr).expect("text");
        let words: Vec<&str> = problem.split_whitespace().collect();
        assert!(words.join(" ").contains(expected), "{problem}");
    }
}

/// Creates a folder with the config.json of `folder`, and with the generation_config.json of `folder` in which `settings` replace some
/// keys.
fn changed(folder: &Path, settings: &Value) -> tempfile::TempDir {
    let changed = tempfile::tempdir().expect("a folder");
    let file = "generation_config.json";
    let own = std::fs::read_to_string(folder.join(file)).expect("it is there");
    let mut own: Value = serde_json::from_str(&own).expect("JSON");
    for (key, value) in settings.as_object().expect("settings") {
        own[key] = value.clone();
    }
    std::fs::write(changed.path().join(file), own.to_string()).expect("it is written");
    std::fs::copy(
        folder.join("config.json"),
        changed.path().join("config.json"),
    )
    .expect("a copy");
    changed
}

/// Returns, for each of `settings`, the new tokens of all prompts, or the first error. All requests run at the same time. Equal settings
/// run only once.
fn tokens_with(
    engine: &Engine,
    prompts: &[Vec<u32>],
    settings: &[Result<SamplingParams, String>],
) -> Vec<Result<Value, String>> {
    let mut generator = engine.generator(16 << 20).expect("a generator");
    let mut different: Vec<&SamplingParams> = Vec::new();
    let places = settings.iter().map(|options| {
        let options = options.as_ref().map_err(Clone::clone)?;
        let checked = generator.check_options(options);
        checked.map_err(|e| e.to_string())?;
        let place = different.iter().position(|&known| known == options);
        Ok(place.unwrap_or_else(|| {
            different.push(options);
            different.len() - 1
        }))
    });
    let places: Vec<Result<usize, String>> = places.collect();
    let requests = different.iter().flat_map(|&options| {
        prompts.iter().map(|prompt| Request {
            prompt: prompt.clone(),
            options: options.clone(),
        })
    });
    let written = generator.write_all(requests, |_, _| ControlFlow::Continue(()));
    let written = written.expect("it writes");
    let of_place = |place: usize| {
        let own = written.chunks_exact(prompts.len()).nth(place);
        let own = own.expect("it was written").iter();
        own.map(|written| match &written.problem {
            Some(problem) => Err(problem.to_string()),
            None => Ok(Value::from(written.tokens.clone())),
        })
        .collect()
    };
    places.into_iter().map(|place| of_place(place?)).collect()
}

/// Changes each key of generation_config.json, one at a time. `scripts/generation_sweep.py` stored the expected tokens.
#[test]
fn every_setting_of_a_folder_gives_the_tokens_of_transformers_or_is_refused_by_name() {
    let file = std::fs::read_to_string("tests/references/generation_sweep.json");
    let folders: Value = serde_json::from_str(&file.expect("it is there")).expect("JSON");
    let mut refused = std::collections::BTreeSet::new();
    for (name, stored) in folders.as_object().expect("folders") {
        let folder = Path::new("tests/checkpoints").join(name);
        let engine = Engine::from_checkpoint(&folder).device(DeviceChoice::Cpu);
        let engine = engine.generating().build().expect("it loads");
        let prompts = serde_json::from_value(stored["prompts"].clone());
        let prompts: Vec<Vec<u32>> = prompts.expect("prompts");
        let cases = stored["cases"].as_array().expect("cases");
        assert!(cases.len() > 200);
        let read = |settings: &Value| {
            let changed = changed(&folder, settings);
            generation_config(changed.path()).map_err(|e| e.to_string())
        };
        let settings = cases.iter().map(|case| read(&case["settings"]));
        let mut settings: Vec<Result<SamplingParams, String>> = settings.collect();
        // transformers refuses some values that gemmule accepts because they have no effect. The expected tokens are then those without the
        // key.
        let is_odd = |case: &&Value| case.get("tokens").is_none() && case["draws"] != true;
        settings.extend(cases.iter().filter(is_odd).map(|case| {
            let mut without = case["settings"].clone();
            without[text(case, "key")] = Value::Null;
            read(&without)
        }));
        let got = tokens_with(&engine, &prompts, &settings);
        let (got, without) = got.split_at(cases.len());
        let mut without = without.iter();
        for (case, got) in cases.iter().zip(got) {
            let (key, settings) = (text(case, "key"), &case["settings"]);
            let without = is_odd(&case).then(|| without.next().expect("one for each"));
            match (got, case.get("tokens"), without) {
                (Err(problem), ..) => {
                    let is_named = problem.contains(&format!("`{key}`"));
                    assert!(is_named, "{name}, {settings}: {problem}");
                    refused.insert(format!("{key}: {}", settings[key]));
                }
                (Ok(got), Some(want), _) => assert_eq!(got, want, "{name}, {settings}"),
                (Ok(_), None, Some(without)) => assert_eq!(got, without, "{name}, {settings}"),
                // Randomly sampled tokens are not compared.
                (Ok(_), None, None) => {}
            }
        }
    }
    insta::assert_debug_snapshot!(refused);
}

#[test]
fn a_cache_in_fp8_is_asked_for_by_an_option() {
    let args = [
        "generate",
        "--prompt",
        "Lily was bored, so",
        "--max-new",
        "20",
    ];
    let with = |more: &[&str]| json(&[&args[..], more, &["--json"]].concat());
    let (plain, auto, fp8) = (
        with(&[]),
        with(&["--kv-dtype", "auto"]),
        with(&["--kv-dtype", "fp8"]),
    );
    assert_eq!(plain["texts"], auto["texts"]);
    assert_eq!([&plain["kv_dtype"], &fp8["kv_dtype"]], ["f32", "e4m3"]);
    let bytes = |value: &Value| value["bytes"]["cache"].as_u64().expect("bytes");
    assert_eq!(bytes(&plain), 4 * bytes(&fp8));
    assert!(!text(&fp8["texts"][0], "text").is_empty());
    let output = gemmule(&[&args[..], &["--kv-dtype", "fp8"]].concat());
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(said.contains(" in e4m3; "), "{said}");

    let problem = refused(&[&args[..], &["--kv-dtype", "int8"]].concat());
    assert!(
        problem.contains("`int8` is not a format of a KV cache; expected auto (the type of activations) or fp8 (E4M3)"),
        "{problem}"
    );
    let problem = refused(&["run", "--text", "a", "--kv-dtype", "fp8"]);
    let expected = "a KV cache in e4m3 is for engines that generate text";
    assert!(problem.replace("│ ", "").contains(expected), "{problem}");
}
