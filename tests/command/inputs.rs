//! Tests of hostile or unusual inputs through the command line: pipes, endless devices, names with terminal escapes, limits of the system,
//! and a standard error that is closed or full.

use std::{os::unix::process::ExitStatusExt, process::Command};

use crate::common::{Folder, tiny_config, tiny_tensors};
use gemmule::DType;
use insta::assert_snapshot;
use serde_json::json;

/// Result of a shell command: its exit code, standard output and standard error.
struct Ended {
    code: i32,
    out: String,
    errors: String,
}

/// A temporary folder with a tiny checkpoint and a file of token ids, in which shell commands run.
struct Shell(Folder);

impl Shell {
    fn new() -> Self {
        let folder = Folder::whole(&tiny_tensors(DType::F32));
        folder.write("ids.json", "[[1, 2, 3], [19, 0]]");
        Self(folder)
    }

    /// Runs a command line in bash. `gemmule` in the line stands for the path of the program.
    #[track_caller]
    fn run(&self, line: &str) -> Ended {
        let output = Command::new("bash")
            .args([
                "-c",
                &line.replace("gemmule", env!("CARGO_BIN_EXE_gemmule")),
            ])
            .current_dir(self.0.path())
            .env("NO_COLOR", "1")
            .env("LANG", "C.UTF-8")
            .env("COLUMNS", "100")
            .output()
            .expect("there is a shell");
        let text = |bytes: &[u8]| self.0.redact(&String::from_utf8_lossy(bytes));
        let ended = Ended {
            code: output.status.code().unwrap_or(-1),
            out: text(&output.stdout),
            errors: text(&output.stderr),
        };
        assert_eq!(output.status.signal(), None, "{line}: {}", ended.errors);
        for said in [&ended.out, &ended.errors] {
            assert!(!said.contains("panicked"), "{line}: {said}");
            let steers = |c: char| {
                (c.is_control() && c != '\n' && c != '\t') || ('\u{202a}'..='\u{202e}').contains(&c)
            };
            assert!(!said.contains(steers), "{line}: {said:?}");
        }
        ended
    }

    #[track_caller]
    fn ok(&self, line: &str) -> String {
        let ended = self.run(line);
        assert_eq!(ended.code, 0, "{line}: {}{}", ended.out, ended.errors);
        ended.out
    }

    /// Returns the error of a command line that fails, on one line.
    #[track_caller]
    fn error(&self, line: &str) -> String {
        let ended = self.run(line);
        assert_eq!(ended.code, 1, "{line}: {}{}", ended.out, ended.errors);
        let words = ended.errors.split_whitespace().filter(|w| *w != "│");
        words.collect::<Vec<_>>().join(" ")
    }
}

const RUN: &str = "gemmule run bert --weights . --device cpu";

#[test]
fn a_model_may_come_through_a_pipe() {
    let shell = Shell::new();
    shell
        .0
        .write("model.ron", include_str!("../../models/bert.ron"));
    let direct = shell.ok("gemmule check model.ron --config config.json");
    assert_eq!(
        shell.ok("gemmule check <(cat model.ron) --config <(cat config.json)"),
        direct
    );
    let run = |model: &str| {
        let line =
            format!("gemmule run {model} --weights . --device cpu --ids <(cat ids.json) --json");
        let json: serde_json::Value = serde_json::from_str(&shell.ok(&line)).expect("it is JSON");
        json["outputs"].clone()
    };
    let outputs = run("bert");
    assert_eq!(run("<(cat model.ron)"), outputs);
    let artifact =
        gemmule::engine::Artifact::of(crate::common::tiny_compiled(DType::F32), Vec::new());
    artifact
        .write(&shell.0.file("tiny"))
        .expect("it is written");
    assert_eq!(run("<(cat tiny)"), outputs);
    assert_snapshot!(shell.error("gemmule check tiny --weights ."), @"× `tiny` is a compiled model; expected a description: give the RON file that it was compiled from");
}

#[test]
fn files_without_an_end_are_errors() {
    let shell = Shell::new();
    assert_snapshot!(shell.error("gemmule check <(yes)").replace(char::is_numeric, "N"), @"× `/dev/fd/NN` is larger than NNN KiB, the size limit of a description; check that it is the right file");
    assert_snapshot!(shell.error("gemmule check /dev/zero"), @"× `/dev/zero` is larger than 128 KiB, the size limit of a description; check that it is the right file");
    assert_snapshot!(shell.error("gemmule check bert --config /dev/zero"), @"× `/dev/zero` is larger than 16 MiB, the size limit of a config.json; check that it is the right file");
    assert_snapshot!(shell.error("gemmule emit bert --weights . --timings /dev/zero"), @"× `/dev/zero` is larger than 16 MiB, the size limit of a timings file; check that it is the right file");
    // With little memory, these commands run out of memory before they reach the size limit of a file.
    let limited = |line: &str| shell.error(&format!("ulimit -v 700000; {line}"));
    assert_snapshot!(limited(&format!("{RUN} --ids /dev/zero")), @"× `/dev/zero` cannot be read ╰─▶ out of memory");
    assert_snapshot!(limited(&format!("{RUN} --texts-file /dev/zero")), @"× `/dev/zero` cannot be read ╰─▶ out of memory");
    assert_snapshot!(limited("gemmule verify bert --weights . --reference /dev/zero"), @"× `/dev/zero` cannot be read ╰─▶ out of memory");
}

#[test]
fn weights_that_no_memory_holds_are_an_error() {
    let shell = Shell::new();
    let mut config = tiny_config();
    config["vocab_size"] = json!(20_000_000);
    shell.0.write("large.json", config.to_string());
    let run = "gemmule run bert --config large.json --random-weights 1 --device cpu --ids ids.json";
    assert_snapshot!(shell.error(&format!("ulimit -v 1000000; {run}")), @"× out of memory for the tensor `embeddings.word_embeddings.weight`, which takes 1280000000 bytes; are its sizes right? Free memory, or use a smaller model");
    // A tensor of 2⁴⁰ elements, the max that a description allows.
    config["vocab_size"] = json!(1 << 20);
    config["hidden_size"] = json!(1 << 20);
    shell.0.write("large.json", config.to_string());
    assert_snapshot!(shell.error(&format!("ulimit -v 1000000; {run}")), @"× out of memory for the tensor `embeddings.word_embeddings.weight`, which takes 4398046511104 bytes; are its sizes right? Free memory, or use a smaller model");
}

#[test]
fn threads_that_cannot_start_are_an_error() {
    let shell = Shell::new();
    // The stack of a thread does not fit in memory. The system reports this with the same error as too many processes.
    let limits = "ulimit -v 1000000; RUST_MIN_STACK=100000000000 RAYON_NUM_THREADS=2";
    let line = format!("{limits} {RUN} --ids ids.json");
    assert_snapshot!(shell.error(&line), @"× the threads of the pool cannot be started: Resource temporarily unavailable (os error 11); use fewer (RAYON_NUM_THREADS), or raise the limit on processes (`ulimit -u`) or on memory help: --threads sets their number");
    let doctor = shell.ok(&format!("{limits} gemmule doctor"));
    assert!(doctor.contains("use fewer (RAYON_NUM_THREADS)"), "{doctor}");
}

#[test]
fn a_closed_or_full_standard_error_changes_no_exit_code() {
    let shell = Shell::new();
    let run = format!("{RUN} --ids ids.json");
    for to in ["2>&-", "2>/dev/full"] {
        assert_eq!(shell.run(&format!("gemmule check absent.ron {to}")).code, 1);
        assert_eq!(shell.run(&format!("{run} --output absent {to}")).code, 1);
        assert_eq!(shell.run(&format!("gemmule run --absent {to}")).code, 2);
        assert!(
            shell
                .ok(&format!("{run} --verbose {to}"))
                .contains("sentence_embedding")
        );
    }
    // A warning about NaN values is also written to standard error.
    let mut tensors = tiny_tensors(DType::F32);
    let table = "embeddings.word_embeddings.weight";
    let tensor = tensors.get_mut(table).expect("it is there");
    // This NaN is in the embedding of token 7, which is not in the batch.
    tensor.bytes[7 * 16 * 4..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    crate::common::write_tensors(&shell.0.file("model.safetensors"), &tensors);
    for to in ["2>&-", "2>/dev/full"] {
        shell.ok(&format!("{run} {to}"));
    }
}

#[test]
fn values_that_are_no_numbers_are_an_error_in_every_form() {
    let shell = Shell::new();
    let mut tensors = tiny_tensors(DType::F32);
    let table = tensors
        .get_mut("embeddings.word_embeddings.weight")
        .expect("it is there");
    // This NaN is in the embedding of token 19, which is in the second sequence.
    table.bytes[19 * 16 * 4..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    crate::common::write_tensors(&shell.0.file("model.safetensors"), &tensors);
    let run = format!("{RUN} --ids ids.json 2> >(grep -v WARN >&2)");
    assert_snapshot!(shell.error(&format!("{run} --json")), @"× the output `last_hidden_state` contains NaN or infinite values: 32 of 80, the first in sequence 1, token 0; check that the checkpoint is undamaged and that the storage type can hold its values: bf16 and f32 have a wider range than f16");
    assert_snapshot!(shell.error(&format!("{run} --output last_hidden_state")), @"× the output `last_hidden_state` contains NaN or infinite values: 32 of 80, the first in sequence 1, token 0; check that the checkpoint is undamaged and that the storage type can hold its values: bf16 and f32 have a wider range than f16");
    assert_eq!(
        shell
            .run(&format!("{RUN} --ids ids.json --similarities"))
            .code,
        1
    );
    // Without token 19, all values are finite.
    shell.0.write("ids.json", "[[1, 2, 3]]");
    assert!(
        !shell
            .ok(&format!("{RUN} --ids ids.json --json"))
            .contains("null")
    );
}

#[test]
fn what_is_missing_is_said_before_kernels_are_compiled() {
    let shell = Shell::new();
    assert_snapshot!(shell.error(RUN), @"× there is no input; give --text, --texts-file, --pair, --pairs-file or --ids");
    shell.0.write("texts", "\n \n");
    assert_snapshot!(shell.error(&format!("{RUN} --texts-file texts")), @"× `texts` has no text; expected one per line");
    // Tokenizer and weights are both missing. The error reports the tokenizer.
    std::fs::remove_file(shell.0.file("model.safetensors")).expect("it was there");
    assert_snapshot!(shell.error(&format!("{RUN} --text a")), @"× `.` has no tokenizer.json; expected one, or a SentencePiece model with the vocab.json of its ids: source.spm, or sentencepiece.bpe.model");
    shell.0.write(
        "tokenizer.json",
        include_str!("../../fuzz/seeds/tokenizer/wordpiece.json")
            .replace("BertPreTokenizer\"", "FixedLength\", \"length\": 0"),
    );
    assert_snapshot!(shell.error(&format!("{RUN} --text 'a text'")), @"× text 0 cannot be tokenized: `./tokenizer.json` makes the tokenizers crate panic: chunk size must be non-zero; expected the tokenizer.json of a checkpoint");
    shell.0.write(
        "ids.json",
        r#"{"ids": [[1, 2], [3]], "mask": [[1, 1], [1]]}"#,
    );
    assert_snapshot!(shell.error(&format!("{RUN} --ids ids.json")), @r#"× `ids.json`: expected [[101, 102], …], or {"ids": [[…], …], "mask": [[…], …], "types": [[…], …]} with rows of one length, of which `mask` and `types` may be left out; the rows differ in length"#);
}

#[test]
fn names_do_not_steer_a_terminal() {
    let shell = Shell::new();
    let evil = "a\u{1b}[2J\u{9b}31m\u{202e}b";
    shell
        .0
        .write("evil.ron", format!("Model(name: \"{evil}\")"));
    assert_snapshot!(shell.error("gemmule check evil.ron"), @"× line 1, column 15 has the raw control character U+001B; remove it, or write it as an escape in a string");
    shell.0.write(&format!("{evil}.ron"), "Model(");
    assert_snapshot!(shell.error("gemmule check a*.ron"), @r"× this is not RON: the file ends too early ╭─[a\u{1b}[2J\u{9b}31m\u{202e}b.ron:1:7] 1 Model( ╰──── help: a description is one `Model(…)`, and all its brackets are closed");
    assert_snapshot!(shell.error(&format!("gemmule check '{evil}'")), @r"× there is no description `a\u{1b}[2J\u{9b}31m\u{202e}b`: it is neither a file nor shipped with gemmule; expected a file or one of bert, jina_bert, roberta, roberta_prelayernorm, roformer, xlm_roberta_flash, xlm_roberta_xl, distilbert, albert, electra, mpnet, megatron_bert, rembert, nomic_bert, gte, deberta, deberta_v2, modernbert, modernbert_decoder, neobert, eurobert, gemma, gemma2, gemma3_text, clip_text, gpt2, openai_gpt, gpt_bigcode, gpt_neo, llama, internlm3, exaone, exaone4, seed_oss, ernie4_5, helium, hunyuan_v1_dense, arcee, nemotron, glm, qwen2, qwen3, phi3, olmo, olmo2, olmo3, starcoder2, stablelm, phi, smollm3, granite, opt, xglm, biogpt, gpt_neox, gptj, falcon, cohere, cohere2, bloom, mpt, marian, bart_classifier, bart, mbart, m2m_100, pegasus, blenderbot, blenderbot_small, t5, vae, static_embedding, sparse_static_embedding");
    assert_eq!(shell.run(&format!("gemmule check bert '--{evil}'")).code, 2);
    let mut config = tiny_config();
    config["hidden_act"] = json!(evil);
    shell.0.write("evil.json", config.to_string());
    assert_snapshot!(shell.error("gemmule check bert --config evil.json"), @r#"× config.json: `hidden_act`: the activation `a\u{1b}[2J\u{9b}31m\u{202e}b` is not known ╭─[bert.ron:52:17] 51 activations: { 52 "act": [Key("hidden_act"), "gelu"], · ────────┬──────── · ╰── config.json gives `a\u{1b}[2J\u{9b}31m\u{202e}b` 53 }, ╰──── help: a different function would change the model; the known ones are `gelu`, `gelu_python`, `gelu_new`, `gelu_pytorch_tanh`, `gelu_fast`, `relu`, `tanh`, `silu`, `swish` and `quick_gelu`"#);
    // A name in a description may contain escapes. The graph and errors show the name in escaped form.
    let named = include_str!("../../models/bert.ron")
        .replace("\"embeddings.LayerNorm.bias\"", "\"evil\\u{1b}[2J\\u{9b}\"");
    shell.0.write("model.ron", &named);
    let graph = shell.ok("gemmule graph model.ron --weights .");
    assert!(graph.contains("@evil\\u{1b}[2J\\u{9b} "), "{graph}");
    let line = "gemmule run model.ron --weights . --device cpu --ids ids.json";
    assert_snapshot!(shell.error(line), @r"WARN `.` has neither modules.json nor 1_Pooling/config.json, which define the pooling; the embedding of a text is the mean of its tokens, normalized × `./model.safetensors` lacks 1 of the 21 tensors that the model needs: `evil\u{1b}[2J\u{9b}`; is it a checkpoint of this model, with its own config.json?");
    let mut tensors = tiny_tensors(DType::F32);
    let tensor = tensors["embeddings.LayerNorm.bias"].clone();
    tensors.insert(evil.to_owned(), tensor);
    crate::common::write_tensors(&shell.0.file("model.safetensors"), &tensors);
    let said = shell.run(&format!("{RUN} --ids ids.json --verbose")).errors;
    assert!(
        said.contains("a\\x1b[2J\\u{9b}31m\\u{202e}b` is not used"),
        "{said}"
    );
}

#[test]
fn a_reference_without_values_is_an_error() {
    let shell = Shell::new();
    let long = |values: &[i64]| crate::common::Stored {
        dtype: safetensors::Dtype::I64,
        shape: vec![values.len()],
        bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    };
    let tensors = [
        ("ids".to_owned(), long(&[1, 2])),
        ("lens".to_owned(), long(&[2])),
    ];
    crate::common::write_tensors(&shell.0.file("r.safetensors"), &tensors.into());
    assert_snapshot!(shell.error("gemmule verify bert --weights . --device cpu --reference r.safetensors"), @"× `r.safetensors` is not a reference: it has `ids`, but no F32 value to compare with them");
}
