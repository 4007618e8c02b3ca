//! Tests of the command line: every subcommand, and its error messages.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::common::{
    Folder,
    tiny::{on_one_line, said},
    tiny_config, tiny_tensors, with_nvrtc,
};
use gemmule::DType;
use insta::assert_snapshot;

/// A temporary folder with a tiny checkpoint, in which `gemmule` commands run.
struct Cli(Folder);

impl Cli {
    fn new() -> Self {
        Self(Folder::whole(&tiny_tensors(DType::F32)))
    }

    fn output(&self, args: &[&str]) -> (bool, String, String) {
        self.output_with(args, &[])
    }

    /// Runs the command with additional environment variables. An empty value counts as not set.
    fn output_with(&self, args: &[&str], variables: &[(&str, &str)]) -> (bool, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gemmule"));
        let command = with_nvrtc(&mut command).args(args);
        said(&self.0, command.envs(variables.iter().copied()))
    }

    /// Returns the output of a command that succeeds.
    #[track_caller]
    fn ok(&self, args: &[&str]) -> String {
        let (success, out, errors) = self.output(args);
        assert!(success, "{args:?}: {out}{errors}");
        out
    }

    /// Returns the error of a command that fails, on one line.
    #[track_caller]
    fn error(&self, args: &[&str]) -> String {
        let (success, out, errors) = self.output(args);
        assert!(!success, "{args:?} should fail: {out}");
        on_one_line(&errors)
    }

    /// Returns the error of running the tiny model on a file of ids.
    #[track_caller]
    fn ids_error(&self, ids: &str) -> String {
        self.0.write("ids.json", ids);
        self.error(&[
            "run",
            "bert",
            "--weights",
            ".",
            "--device",
            "cpu",
            "--ids",
            "ids.json",
        ])
    }
}

fn references() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/references")
}

#[test]
fn option_names_of_the_last_release_still_work() {
    let renamed = [
        (
            &[
                "explain",
                "bert",
                "--config",
                "models/configs/bert-base.json",
            ][..],
            "lens",
            "lengths",
            Some("7"),
        ),
        (
            &[
                "explain",
                "bert",
                "--config",
                "models/configs/bert-base.json",
            ],
            "no-joint-launches",
            "no-fused-launches",
            None,
        ),
    ];
    let gemmule = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_gemmule"))
            .args(args)
            .output();
        output.expect("the program starts")
    };
    for (args, old, new, value) in renamed {
        let with = |name: &str| {
            let option = format!("--{name}");
            let more = [option.as_str()].into_iter().chain(value);
            gemmule(&args.iter().copied().chain(more).collect::<Vec<_>>())
        };
        let (old, new) = (with(old), with(new));
        let errors = String::from_utf8_lossy(&new.stderr);
        assert!(new.status.success(), "{errors}");
        assert_eq!(old.stdout, new.stdout);
    }
    let help = gemmule(&["serve", "--help"]);
    let help = String::from_utf8_lossy(&help.stdout);
    for (old, new) in [
        ("--cache-bytes", "--response-cache-bytes"),
        ("--kv-bytes", "--kv-cache-bytes"),
        ("--queue-ms", "--max-queue-ms"),
    ] {
        assert!(help.contains(new), "{new}");
        assert!(!help.contains(&format!(" {old} ")), "{old} is shown");
        let refused = gemmule(&["serve", "--weights", "no/such/folder", old, "5"]);
        let errors = String::from_utf8_lossy(&refused.stderr);
        assert!(errors.contains("no/such/folder"), "{old}: {errors}");
    }
}

#[test]
fn every_subcommand_has_help() {
    let cli = Cli::new();
    assert_snapshot!("help", cli.ok(&["--help"]));
    for command in [
        "check",
        "graph",
        "explain",
        "emit",
        "compile",
        "tune",
        "plan",
        "run",
        "generate",
        "simulate",
        "verify",
        "doctor",
        "kernels",
        "kernels check",
        "kernels list",
        "bench",
        "bench encoder",
        "bench load",
    ] {
        let mut args: Vec<&str> = command.split(' ').collect();
        args.push("--help");
        let help = cli.ok(&args);
        assert!(help.contains("Usage: gemmule"), "{command}: {help}");
    }
}

#[test]
fn a_description_is_checked() {
    let cli = Cli::new();
    assert_snapshot!(cli.ok(&["check", "bert", "--weights", "."]), @r"
    `bert` is valid: 33 launches as described, 9 after fusion; 5 expectations hold
    the checkpoint has all weights that the model reads, and every layer is used
    ");
    assert_snapshot!(cli.ok(&["check", "bert"]), @"`bert` is valid as far as can be checked without sizes; give --config or --weights to check shapes and fusion");
}

/// A shipped description states how many launches it expects for common sizes. For a model with unusual sizes, more launches are only a
/// note. For a description in a file, they are an error.
#[test]
fn only_a_description_in_a_file_must_meet_its_expectations() {
    let cli = Cli::new();
    let config = |text: &str| cli.0.write("odd.json", text);
    // Heads of 12 columns have no fused attention on GPUs.
    config(r#"{"vocab_size": 60, "hidden_size": 36, "n_head": 3, "n_layer": 2}"#);
    let said = cli.ok(&["check", "bloom", "--config", "odd.json"]);
    assert!(said.contains("fewer operators are fused"), "{said}");
    config(
        r#"{"vocab_size": 60, "hidden_size": 64, "intermediate_size": 40, "num_attention_heads": 1, "num_key_value_heads": 1,
            "num_hidden_layers": 2, "max_position_embeddings": 40, "use_parallel_residual": true}"#,
    );
    let said = cli.ok(&["check", "stablelm", "--config", "odd.json"]);
    assert!(said.contains("fewer operators are fused"), "{said}");
    config(
        r#"{"vocab_size": 60, "hidden_size": 64, "word_embed_proj_dim": 32, "ffn_dim": 40, "num_attention_heads": 1,
            "num_hidden_layers": 2, "max_position_embeddings": 40}"#,
    );
    let said = cli.ok(&["check", "opt", "--config", "odd.json"]);
    assert!(said.contains("`opt` is valid"), "{said}");
    let opt = gemmule::model::Description::shipped_source("opt").expect("it is shipped");
    cli.0
        .write("own.ron", opt.replace("\"launches\": 7", "\"launches\": 3"));
    let error = cli.error(&["check", "own.ron", "--config", "odd.json"]);
    assert!(error.contains("expected 3 × `launches`"), "{error}");
}

#[test]
fn a_cache_in_fp8_is_explained_and_its_kernels_are_emitted() {
    let cli = Cli::new();
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/models/configs/gpt2.json");
    let with = |command: &str, kind: &str| {
        let args = [command, "gpt2", "--config", config, "--card", "h200"];
        cli.ok(&[&args[..], &["--kv-dtype", kind]].concat())
    };
    let explained = |kind: &str| with("explain", kind);
    let file = "// mha_decode_f16_h12x64_q0of2304_blocks589824_e4m3";
    assert!(with("emit", "fp8").contains(file) && !with("emit", "auto").contains("e4m3"));
    let fp8 = explained("fp8");
    for line in [
        "quantized `layer.{0..11}.keys` by quantize_cache, × 12\n    its rows are stored in e4m3",
        "with mha_prefill_f16_h12x64_q0of2304_blocks589824_e4m3",
        "KV cache: 576.00 KiB in e4m3 for 32 tokens",
    ] {
        assert!(fp8.contains(line), "{line}: {fp8}");
    }
    let auto = explained("auto");
    assert!(
        auto.contains("KV cache: 1.12 MiB for 32 tokens") && !auto.contains("e4m3"),
        "{auto}"
    );
}

#[test]
fn every_rule_that_fuses_launches_is_explained() {
    let cli = Cli::new();
    let explained = |model: &str, config: &str, more: &[&str]| {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/models/configs");
        let config = format!("{folder}/{config}.json");
        let args = ["explain", model, "--config", &config, "--card", "h200"];
        cli.ok(&[&args[..], more].concat())
    };
    let gpt2 = explained("gpt2", "gpt2", &["--kv-dtype", "auto", "--lengths", "1,1"]);
    let qwen3 = explained("qwen3", "qwen3-0.6b", &["--kv-dtype", "auto"]);
    let bert = explained("bert", "bert-base", &["--quantize", "fp8"]);
    for (said, lines) in [
        (
            &gpt2,
            &["fused by append in the decode step, merges cache `layer.{0..11}.keys`"][..],
        ),
        (
            &qwen3,
            &[
                "fused by prepare attention, merges rotary",
                "as rotary(norm(x)) of queries",
            ],
        ),
        (
            &bert,
            &[
                "fused by attention+conversion to E4M3, merges attention `layer",
                " by gemm+norm",
            ],
        ),
    ] {
        for line in lines {
            assert!(said.contains(line), "{line}: {said}");
        }
    }
    let on_ampere = cli.ok(&[
        "explain",
        "bert",
        "--config",
        concat!(env!("CARGO_MANIFEST_DIR"), "/models/configs/bert-base.json"),
        "--card",
        "a100",
    ]);
    let refusal =
        " by gemm+norm, × 12\n    because its kernels need the WGMMA instructions of Hopper";
    assert!(on_ampere.contains(refusal), "{on_ampere}");
}

#[test]
fn layers_with_inputs_in_e4m3_are_explained_for_cards_that_multiply_them() {
    let cli = Cli::new();
    let explained = |card: &str| {
        let config = concat!(env!("CARGO_MANIFEST_DIR"), "/models/configs/bert-base.json");
        let args = ["explain", "bert", "--config", config, "--quantize", "fp8"];
        cli.ok(&[&args[..], &["--card", card]].concat())
    };
    let lines = [
        "fused by attention+conversion to E4M3, merges attention `layer",
        "fused by norm+conversion to E4M3",
        "fused by gemm+conversion to E4M3",
    ];
    for card in ["l4", "l40s", "rtx4090", "rtx5090"] {
        let said = explained(card);
        for line in lines {
            assert!(said.contains(line), "{card}: {line}: {said}");
        }
    }
    for card in ["a100", "a10", "b200"] {
        let said = explained(card);
        assert!(!said.contains("E4M3"), "{card}: {said}");
    }
}

#[test]
fn the_launches_of_a_batch_are_explained() {
    let cli = Cli::new();
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/models/configs/bert-base.json");
    let explain = |more: &[&str]| {
        let args = ["explain", "bert", "--config", config, "--card", "h200"];
        let said = cli.ok(&[&args, more].concat());
        let (_, launches) = said.split_once("\n\n").expect("a part for launches");
        let last = launches.lines().last().expect("a last line");
        let number: usize = last.trim_end_matches(" launches").parse().expect(last);
        (launches.to_owned(), number)
    };
    let (fused, n_fused) = explain(&["--lengths", "7,9"]);
    assert!(
        fused.contains("launches `layer.{0..11}.context`, × 12\n    with mha_"),
        "{fused}"
    );
    assert!(fused.contains(" µs\n"), "{fused}");
    let (separate, n_separate) = explain(&["--lengths", "7,9", "--no-fused-launches"]);
    // One launch for the embeddings, seven for each of the twelve layers, and one for the pooling.
    assert_eq!(n_separate, 2 + 7 * 12, "{separate}");
    assert!(n_fused < n_separate, "{fused}");
}

#[test]
fn the_stages_are_shown() {
    let cli = Cli::new();
    assert_snapshot!("graph", cli.ok(&["graph", "bert", "--weights", "."]));
    assert_snapshot!(
        "graph_after_all",
        cli.ok(&["graph", "bert", "--weights", ".", "--after", "all"])
    );
    let mut explained = cli.ok(&["explain", "bert", "--weights", "."])
        + &cli.ok(&[
            "explain",
            "bert",
            "--weights",
            ".",
            "--output",
            "pooler_output",
        ]);
    // Add models that use the remaining passes: the passes for text generation, and the passes for soft caps of scores.
    for (name, config) in [("qwen3", "qwen3_h192a6"), ("gemma2", "gemma2_head24")] {
        let references = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/references");
        let config = format!("{references}/{config}.json");
        explained += &cli.ok(&["explain", name, "--config", &config]);
    }
    for pass in gemmule::passes::all() {
        assert!(
            explained.contains(pass.name()),
            "{}: {explained}",
            pass.name()
        );
    }
}

#[test]
fn a_plan_is_shown_and_drawn() {
    let cli = Cli::new();
    let mut config = crate::common::tiny_config();
    config["max_position_embeddings"] = 64.into();
    cli.0.write("long.json", config.to_string());
    let args = [
        "plan",
        "bert",
        "--config",
        "long.json",
        "--lengths",
        "17,18,52",
        "--svg",
        "plan.svg",
    ];
    assert_snapshot!("plan", cli.ok(&args));
    // With `--exact`, the plan is for the exact lengths, like a session on the CPU, instead of their bucket.
    let exact = cli.ok(&[&args[..], &["--exact"]].concat());
    assert!(exact.contains("87 tokens in 3 sequences, f16\nchunks:"));
    let svg = std::fs::read_to_string(cli.0.file("plan.svg")).expect("it was drawn");
    assert!(svg.starts_with("<svg") && svg.contains("layer.0.context"));
    assert_snapshot!(cli.error(&["plan", "bert", "--weights", ".", "--lengths", "17,0"]), @"× sequence 1 has no tokens; expected at least one token in every sequence");
    for command in ["plan", "explain"] {
        let long = [command, "bert", "--weights", ".", "--lengths", "5,13"];
        let error = cli.error(&long);
        insta::allow_duplicates! {
            assert_snapshot!(error, @"× sequence 1 has 13 tokens, but the model has 12 positions; shorten or split it");
        }
    }
}

#[test]
fn a_plan_is_that_of_the_allocator_that_is_asked_for() {
    let cli = Cli::new();
    let plan = |options: &[&str]| {
        let plan = ["plan", "bert", "--weights", ".", "--lengths", "6,5,4"];
        let shown = cli.ok(&[&plan, options].concat());
        let line = shown.lines().find(|line| line.starts_with("footprint:"));
        line.expect("it shows the footprint").to_owned()
    };
    assert_snapshot!(plan(&["--allocator", "chunk"]), @"footprint: 256.00 KiB (262144 bytes), lower bound: 2.50 KiB (2560 bytes), ratio 102.400");
    assert_eq!(
        plan(&["--release-after", "3", "--idle-limit", "0"]),
        plan(&[])
    );
    assert_snapshot!(plan(&["--allocator", "gsoc"]), @"footprint: 2.50 KiB (2560 bytes), lower bound: 2.50 KiB (2560 bytes), ratio 1.000");
    assert_snapshot!(plan(&["--allocator", "caching"]), @"footprint: 2.00 MiB (2097152 bytes), lower bound: 2.50 KiB (2560 bytes), ratio 819.200");
    assert_snapshot!(plan(&["--allocator", "turbo"]), @"footprint: 2.00 MiB (2097152 bytes), lower bound: 2.50 KiB (2560 bytes), ratio 819.200");
    assert_snapshot!(plan(&["--allocator", "maximum", "--maximum", "12x8"]), @"footprint: 15.00 KiB (15360 bytes), lower bound: 2.50 KiB (2560 bytes), ratio 6.000");
}

#[test]
fn attention_is_planned_as_asked_for() {
    let cli = Cli::new();
    let plan = |lens: &str, kind: &str| {
        let args = ["plan", "bert", "--weights", ".", "--lengths", lens];
        let args = [&args[..], &["--attention", kind]].concat();
        cli.output(&args)
    };
    let (fine, grouped, _) = plan("6,5,4", "grouped");
    assert!(fine && grouped.contains("layer.0.context.scores"));
    for kind in ["auto", "short", "online"] {
        let (fine, shown, _) = plan("6,5,4", kind);
        assert!(fine && !shown.contains(".scores"), "{kind}");
    }
    let (fine, _, error) = plan("300,5", "short");
    assert!(!fine && error.contains("has 300 tokens"), "{error}");
    let (fine, _, error) = plan("6", "wgmma");
    assert!(!fine && error.contains("compute capability 9.0"), "{error}");
    let (_, _, error) = plan("6", "flash");
    assert!(
        error.contains("expected auto, short, grouped, online or wgmma"),
        "{error}"
    );
}

#[test]
fn an_allocator_is_told_what_it_needs_and_nothing_else() {
    let cli = Cli::new();
    let on = |options: &[&str]| {
        let plan = ["plan", "bert", "--weights", ".", "--lengths", "6,5,4"];
        cli.error(&[&plan, options].concat())
    };
    assert_snapshot!(on(&["--allocator", "best"]), @"error: invalid value 'best' for '--allocator <NAME>' [possible values: chunk, gsoc, caching, maximum, turbo] For more information, try '--help'.");
    assert_snapshot!(on(&["--allocator", "maximum"]), @"× --allocator maximum needs the size of the largest batch; give --maximum, such as 512x8 for 8 sequences of 512 tokens");
    assert_snapshot!(on(&["--maximum", "12x8"]), @"× --maximum has an effect only with --allocator maximum; leave it out, or give --allocator maximum");
    assert_snapshot!(on(&["--allocator", "gsoc", "--maximum", "12x8"]), @"× --maximum has an effect only with --allocator maximum; leave it out, or give --allocator maximum");
    assert_snapshot!(on(&["--allocator", "turbo", "--release-after", "3"]), @"× --release-after and --idle-limit are settings of the chunk allocator; leave them out, or give --allocator chunk");
    assert_snapshot!(on(&["--allocator", "caching", "--idle-limit", "0"]), @"× --release-after and --idle-limit are settings of the chunk allocator; leave them out, or give --allocator chunk");
    for wrong in [
        "12",
        "0x8",
        "12x0",
        "x",
        "12x8x2",
        "-1x4",
        "4294967295x4294967295",
    ] {
        let error = on(&["--allocator", "maximum", &format!("--maximum={wrong}")]);
        assert_eq!(
            error,
            format!(
                "error: invalid value '{wrong}' for '--maximum <LENxN>': `{wrong}` is not a batch size; expected length x sequences, each at least 1 and together at most 16777216 tokens, such as 512x8 for 8 sequences of 512 tokens For more information, try '--help'."
            )
        );
    }
    assert_snapshot!(on(&["--allocator", "maximum", "--maximum", "4x4"]), @"× the batch of 3 sequences, 15 tokens, 6 in the longest, 77 pairs of tokens is beyond the declared maximum of 4 sequences, 16 tokens, 4 in the longest, 64 pairs of tokens; declare a larger maximum, or send a smaller batch");
    cli.0.write("ids.json", "[[1, 2, 3], [19, 0]]");
    let run = [
        "run",
        "bert",
        "--weights",
        ".",
        "--device",
        "cpu",
        "--ids",
        "ids.json",
    ];
    let maximum = ["--allocator", "maximum", "--maximum", "2x2"];
    assert_snapshot!(cli.error(&[&run[..], &maximum].concat()), @"WARN `.` has neither modules.json nor 1_Pooling/config.json, which define the pooling; the embedding of a text is the mean of its tokens, normalized × the batch of 2 sequences, 5 tokens, 3 in the longest, 13 pairs of tokens is beyond the declared maximum of 2 sequences, 4 tokens, 2 in the longest, 8 pairs of tokens; declare a larger maximum, or send a smaller batch");
}

#[test]
fn an_encoder_is_timed_on_the_sets_that_it_serves() {
    let cli = Cli::new();
    cli.0.write(
        "sets.json",
        r#"{"encoder": [{"name": "ragged", "lens": [5, 1, 3]}, {"name": "long", "lens": [13]}]}"#,
    );
    let bench = ["bench", "encoder", "bert", "--weights", ".", "--device"];
    let sets = ["cpu", "--workloads", "sets.json", "--runs", "2"];
    let encoder = [&bench[..], &sets].concat();
    let shown = cli.ok(&[&encoder[..], &["--json", "rows.json"]].concat());
    for part in [
        "first result, of ragged, ",
        "skipped long: its longest sequence has 13 tokens, and the model's position table serves 12",
        "median of 2 runs",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let rows = std::fs::read_to_string(cli.0.file("rows.json")).expect("it was written");
    let rows: serde_json::Value = serde_json::from_str(&rows).expect("it is JSON");
    assert_eq!(rows.as_array().map(Vec::len), Some(1));
    assert_eq!(
        (&rows[0]["set"], &rows[0]["tokens"]),
        (&"ragged".into(), &9.into())
    );
    assert!(rows[0]["ms"].as_f64().is_some_and(|ms| ms > 0.0));
    assert_snapshot!(cli.error(&[&encoder[..], &["--sets", "raged"]].concat()), @"× there is no set `raged` (did you mean `ragged`?); there are ragged, long");
    // `gemmule bench` has no comparisons with other libraries and no figures. `gemmule-bench` has them.
    assert!(
        cli.error(&[&encoder[..], &["--peers"]].concat())
            .contains("unexpected argument '--peers'")
    );
}

#[test]
fn sources_are_written() {
    let cli = Cli::new();
    let said = cli.ok(&["emit", "bert", "--weights", ".", "-o", "cu"]);
    let n_files = std::fs::read_dir(cli.0.file("cu"))
        .expect("it was made")
        .count();
    assert_eq!(said, format!("{n_files} kernels written to cu\n"));
    assert!(n_files >= 9, "{n_files} kernels of 9 launches");
    let files = std::fs::read_dir(cli.0.file("cu")).expect("the folder was made");
    for file in files {
        let file = file.expect("a file").path();
        let symbol = file.file_stem().expect("a name").to_str().expect("plain");
        let text = std::fs::read_to_string(&file).expect("text");
        assert!(text.contains(&format!(" {symbol}(")), "{symbol}");
    }
    cli.0.write("taken", "");
    assert_snapshot!(cli.error(&["emit", "bert", "--weights", ".", "-o", "taken"]), @"× `taken` cannot be written ╰─▶ File exists (os error 17)");
}

#[test]
fn a_compiled_file_runs_like_the_model() {
    let cli = Cli::new();
    cli.0.write("ids.json", "[[1, 2, 3], [19, 0]]");
    let compiled = cli.ok(&[
        "compile",
        "bert",
        "--weights",
        ".",
        "--dtype",
        "f32",
        "--arch",
        "sm_80",
        "-o",
        "tiny",
    ]);
    assert!(compiled.starts_with("tiny: 9 launches of "), "{compiled}");
    let values = |model: &str| -> serde_json::Value {
        let args = [
            "run",
            model,
            "--weights",
            ".",
            "--device",
            "cpu",
            "--ids",
            "ids.json",
            "--json",
        ];
        serde_json::from_str(&cli.ok(&args)).expect("it is JSON")
    };
    let (ours, direct) = (values("tiny"), values("bert"));
    assert_eq!(ours["outputs"], direct["outputs"]);
    assert_eq!(
        ours["outputs"]["sentence_embedding"]["shape"],
        serde_json::json!([2, 16])
    );
    assert_eq!(ours["lens"], serde_json::json!([3, 2]));
    assert_eq!(ours["dtype"], "f32");
    let mut damaged = std::fs::read(cli.0.file("tiny")).expect("it was written");
    damaged[0] ^= 1;
    cli.0.write("damaged", &damaged);
    let run = [
        "run",
        "damaged",
        "--weights",
        ".",
        "--device",
        "cpu",
        "--ids",
        "ids.json",
    ];
    assert_snapshot!(cli.error(&run), @"× `damaged` is neither a description (a text file) nor a compiled model of `gemmule compile`; is it damaged?");
    damaged[0] ^= 1;
    damaged.pop();
    cli.0.write("damaged", &damaged);
    assert_snapshot!(cli.error(&run), @"× `damaged` is not an artifact of this version of gemmule: its checksum does not match, so it is damaged or truncated; compile the model again");
    let shown = cli.ok(&[
        "run",
        "tiny",
        "--weights",
        ".",
        "--device",
        "cpu",
        "--ids",
        "ids.json",
    ]);
    assert!(
        shown.contains("sentence_embedding") && shown.contains("[2, 16]"),
        "{shown}"
    );
}

#[test]
fn results_are_compared_with_stored_ones() {
    let cli = Cli::new();
    let file = |name: &str| references().join(name).display().to_string();
    let (config, reference) = (file("bert_head32.json"), file("bert_head32.safetensors"));
    let args = |seed| {
        [
            "verify",
            "bert",
            "--config",
            &config,
            "--random-weights",
            seed,
            "--weights-deviation",
            "0.1",
            "--device",
            "cpu",
            "--reference",
            &reference,
        ]
        .map(str::to_owned)
    };
    let right = args("20");
    let shown = cli.ok(&right.each_ref().map(String::as_str));
    assert!(
        shown.contains(" ok ") && !shown.contains("OUT OF BOUNDS"),
        "{shown}"
    );
    // With the weights of another seed, the results differ from the reference.
    let (success, shown, _) = cli.output(&args("21").each_ref().map(String::as_str));
    assert!(!success && shown.contains("OUT OF BOUNDS"), "{shown}");
}

#[test]
fn the_doctor_looks_at_every_part() {
    let report = Cli::new().ok(&["doctor"]);
    for part in [
        "gemmule",
        "driver",
        "NVRTC",
        "cuBLASLt",
        "cache",
        "models of the hub",
        "CPU",
        concat!(env!("CARGO_PKG_VERSION"), ", with"),
        "\nModels run on the ",
    ] {
        assert!(report.contains(part), "no {part}: {report}");
    }
}

#[test]
fn without_a_command_the_first_ones_are_named() {
    let cli = Cli::new();
    let first = cli.ok(&[]);
    let commands = first
        .lines()
        .filter_map(|line| line.strip_prefix("  gemmule "));
    let commands: Vec<Vec<&str>> = commands.map(|line| line.split(' ').collect()).collect();
    assert_eq!(commands.len(), 3, "{first}");
    for command in commands {
        let help = cli.ok(&[command[0], "--help"]);
        for option in command.iter().filter(|word| word.starts_with("--")) {
            assert!(help.contains(option), "{option}: {help}");
        }
    }
}

#[test]
fn shells_and_man_know_all_commands() {
    let cli = Cli::new();
    for shell in ["bash", "fish", "zsh"] {
        let script = cli.ok(&["completions", shell]);
        assert!(script.contains("GEMMULE_COMPLETE"), "{shell}: {script}");
    }
    std::fs::create_dir_all(cli.0.file("hub/models--org--tiny/snapshots")).expect("a folder");
    std::fs::create_dir_all(cli.0.file("hub/models--org--empty")).expect("a folder");
    let completed = |words: &[&str]| {
        let home = cli.0.path().to_str().expect("a plain path");
        let variables = [
            ("GEMMULE_COMPLETE", "fish"),
            ("HF_HOME", home),
            ("HF_HUB_CACHE", ""),
        ];
        let words = [&["--", "gemmule"], words].concat();
        let (success, out, errors) = cli.output_with(&words, &variables);
        assert!(success, "{words:?}: {errors}");
        let candidates = out.lines().filter_map(|line| line.split('\t').next());
        candidates.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(completed(&["transl"]), ["translate"]);
    assert_eq!(completed(&["run", "--simil"]), ["--similarities"]);
    assert_eq!(completed(&["run", "--model", "or"]), ["org/tiny"]);
    assert_eq!(completed(&["explain", "nomic"]), ["nomic_bert"]);
    assert!(cli.error(&["completions", "csh"]).contains("bash"));
    assert_eq!(cli.ok(&["man-pages", "man/man1"]), "");
    let page = |name: &str| {
        let file = cli.0.file(&format!("man/man1/{name}.1"));
        std::fs::read_to_string(file).expect(name)
    };
    assert!(page("gemmule").contains("gemmule\\-run(1)"));
    assert!(page("gemmule-run").contains("similarities"));
    assert!(page("gemmule-bench-serve").contains("closed"));
    cli.0.write("file", "");
    assert!(
        cli.error(&["man-pages", "file"])
            .contains("cannot be written")
    );
}

/// Checks that gemmule loads no library from `.gemmule` and runs no interpreter in the current folder, because these files may come with an
/// untrusted archive or repository.
#[cfg(unix)]
#[test]
fn nothing_of_the_current_folder_is_run() {
    use std::os::unix::fs::PermissionsExt;
    let cli = Cli::new();
    let packages = ".gemmule/venv/lib/python3.11/site-packages/nvidia/cu13/lib";
    std::fs::create_dir_all(cli.0.file(packages)).expect("the folder is ours");
    cli.0
        .write(&format!("{packages}/libnvrtc.so.13"), "planted");
    cli.0.write("libnvrtc.so.13", "planted");
    cli.0.write("libcuda.so", "planted");
    let python = cli.0.write("python3", "#!/bin/sh\necho > ran\n");
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).expect("ours");
    let usual = std::env::var("PATH").expect("there is one");
    let variables = [
        ("GEMMULE_NVRTC", ""),
        ("LD_LIBRARY_PATH", "/nowhere:"),
        ("CUDA_HOME", "."),
        ("VIRTUAL_ENV", ".gemmule/venv"),
        ("PATH", &format!(":.:{usual}")),
    ];
    let (success, out, errors) = cli.output_with(&["doctor"], &variables);
    assert!(success, "{out}{errors}");
    assert!(!cli.0.file("ran").exists());
    let log: Vec<&str> = out
        .lines()
        .filter(|line| line.contains("loader's path") || line.contains(": not searched"))
        .map(str::trim)
        .collect();
    assert_snapshot!(log.join("\n"), @r"
    the loader's path: not searched: LD_LIBRARY_PATH has an empty entry, which means the current folder, and that contains `libcuda.so`; remove the extra colon
    CUDA, .: not searched, because a relative path depends on the current folder; make it absolute
    VIRTUAL_ENV, .gemmule/venv: not searched, because a relative path depends on the current folder; make it absolute
    ");
    assert!(!out.contains("[dir]"), "{out}");
    // The search for the CUDA driver also refuses an `LD_LIBRARY_PATH` with an empty entry.
    cli.0.write("ids.json", "[[1, 2]]");
    let run = ["run", "bert", "--weights", ".", "--device", "cuda"];
    let run = [&run[..], &["--ids", "ids.json"]].concat();
    let (success, _, errors) = cli.output_with(&run, &variables);
    assert!(!success);
    let words: Vec<&str> = errors.split_whitespace().filter(|w| *w != "│").collect();
    assert_snapshot!(words.join(" "), @"× libcuda is not loaded: LD_LIBRARY_PATH has an empty entry, which means the current folder, and that contains `libcuda.so`; remove the extra colon. The loader could run code that others put there; the CPU works without it");
}

#[cfg(unix)]
#[test]
fn the_doctor_names_a_cache_that_others_may_write_to() {
    use std::os::unix::fs::PermissionsExt;
    let cli = Cli::new();
    let folder = cli.0.file("cache/cubins");
    std::fs::create_dir_all(&folder).expect("the folder is ours");
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o1777)).expect("ours");
    let cache = cli.0.file("cache").display().to_string();
    let (_, out, _) = cli.output_with(&["doctor"], &[("GEMMULE_CACHE", &cache)]);
    // Join the lines of the third column in the row `cache` of the table.
    let rows = out.lines().skip_while(|line| !line.starts_with("│ cache"));
    let rows = rows.take_while(|line| !line.starts_with("│ CPU"));
    let advice: Vec<&str> = rows
        .filter_map(|line| line.rsplit('┆').next())
        .map(|cell| cell.trim_matches(['│', ' ']))
        .collect();
    let advice = advice.join(" ");
    assert!(
        advice.contains("is neither read nor written: ")
            && advice.contains("is writable by other users"),
        "{out}"
    );
    assert!(
        advice.contains("chmod go-w") && advice.contains("set GEMMULE_CACHE"),
        "{out}"
    );
}

#[test]
fn unknown_names_are_answered_with_known_ones() {
    let cli = Cli::new();
    assert_snapshot!(cli.error(&["check", "brt"]), @"× there is no description `brt`: it is neither a file nor shipped with gemmule (did you mean `bart`?); expected a file or one of bert, jina_bert, roberta, roberta_prelayernorm, roformer, xlm_roberta_flash, xlm_roberta_xl, distilbert, albert, electra, mpnet, megatron_bert, rembert, nomic_bert, gte, deberta, deberta_v2, modernbert, modernbert_decoder, neobert, eurobert, gemma, gemma2, gemma3_text, clip_text, gpt2, openai_gpt, gpt_bigcode, gpt_neo, llama, internlm3, exaone, exaone4, seed_oss, ernie4_5, helium, hunyuan_v1_dense, arcee, nemotron, glm, qwen2, qwen3, phi3, olmo, olmo2, olmo3, starcoder2, stablelm, phi, smollm3, granite, opt, xglm, biogpt, gpt_neox, gptj, falcon, cohere, cohere2, bloom, mpt, marian, bart_classifier, bart, mbart, m2m_100, pegasus, blenderbot, blenderbot_small, t5, vae, static_embedding, sparse_static_embedding");
    assert_snapshot!(cli.error(&["graph", "bert", "--weights", ".", "--after", "fuse_everything"]), @"× no pass `fuse_everything` ran; the passes are hoist_pooled_token, fold_soft_cap, fold_scale, merge_projections, fold_head_layout, fuse_attention, fuse_embedding_layer_norm, fuse_bias_residual_layer_norm, fuse_gate, fuse_bias_activation, fuse_residual, fuse_pool_normalize, or `all`");
    assert_snapshot!(cli.error(&["explain", "bert", "--weights", ".", "--without", "fuse_atention"]), @"× no pass is named `fuse_atention`; the passes are hoist_pooled_token, fold_soft_cap, fold_scale, merge_projections, fold_head_layout, fuse_attention, fuse_embedding_layer_norm, fuse_bias_residual_layer_norm, fuse_gate, fuse_bias_activation, fuse_residual, fuse_pool_normalize, quantize_inputs");
    assert_snapshot!(cli.error(&["graph", "bert", "--weights", ".", "--output", "sentence_embeding"]), @"× the description has no output `sentence_embeding` help: did you mean `sentence_embedding`?");
    assert_snapshot!(cli.error(&["run", "bert", "--weights", ".", "--device", "gpu"]), @"error: invalid value 'gpu' for '--device <DEVICE>': `gpu` is not a device; expected auto, cpu, cuda or cuda:N For more information, try '--help'.");
    assert_snapshot!(cli.error(&["run", "bert", "--weights", ".", "--dtype", "f8"]), @"error: invalid value 'f8' for '--dtype <DTYPE>': `f8` is not a storage type; expected f32, f16 or bf16 For more information, try '--help'.");
    assert_snapshot!(cli.error(&["compile", "bert", "--weights", ".", "--arch", "sm_75", "-o", "x"]), @"error: invalid value 'sm_75' for '--arch <ARCH>': `sm_75` is not a target; the targets are sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120 For more information, try '--help'.");
}

#[test]
fn what_is_not_given_is_asked_for() {
    let cli = Cli::new();
    cli.0.write("ids.json", "[[1, 2]]");
    assert_snapshot!(cli.error(&["graph", "bert"]), @"× the sizes of the model are unknown; give a checkpoint folder or a config.json");
    assert_snapshot!(cli.error(&["run", "bert", "--config", "config.json", "--device", "cpu", "--ids", "ids.json"]), @"× there are no weights to run with; give a checkpoint folder, or a seed for random weights");
    let texts = [
        "run",
        "bert",
        "--config",
        "config.json",
        "--random-weights",
        "1",
        "--device",
        "cpu",
        "--text",
        "a",
    ];
    assert_snapshot!(cli.error(&texts), @"× texts need the tokenizer.json of a checkpoint; give --weights, or --ids instead of texts");
    assert_snapshot!(cli.error(&["run", "bert", "--weights", ".", "--device", "cpu", "--text", "a"]), @"× `.` has no tokenizer.json; expected one, or a SentencePiece model with the vocab.json of its ids: source.spm, or sentencepiece.bpe.model");
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let cli = Cli::new();
    cli.0.write("ids.json", "[[1, 2]]");
    let run = ["run", "bert", "--weights", ".", "--ids", "ids.json"];
    let on = |device| cli.error(&[&run[..], &["--device", device]].concat());
    let presence = gemmule::runtime::cuda::probe();
    if !presence.driver {
        assert_snapshot!(on("cuda:0"), @"× no CUDA driver: libcuda is not in the loader's path; install the NVIDIA driver, or use the CPU");
    } else if !presence.devices.is_empty() {
        let n = presence.devices.len();
        let expected =
            format!("× CUDA device 99 does not exist; the driver reports {n}, counted from 0");
        assert_eq!(on("cuda:99"), expected);
    }
}

#[test]
fn bad_batches_are_refused() {
    let cli = Cli::new();
    assert_snapshot!(cli.ids_error("[]"), @"× the batch is empty; expected at least one sequence");
    assert_snapshot!(cli.ids_error("[[1], []]"), @"× sequence 1 has no tokens; expected at least one token in every sequence");
    assert_snapshot!(cli.ids_error("[[1, 2], [3, 20]]"), @"WARN `.` has neither modules.json nor 1_Pooling/config.json, which define the pooling; the embedding of a text is the mean of its tokens, normalized × sequence 1, token 1: the token id 20 is outside the table of 20 rows; expected an id below 20");
    assert_snapshot!(cli.ids_error("[[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]"), @"WARN `.` has neither modules.json nor 1_Pooling/config.json, which define the pooling; the embedding of a text is the mean of its tokens, normalized × sequence 0 has 13 tokens, but the model has 12 positions; shorten or split it");
    assert_snapshot!(cli.ids_error(r#"{"ids": [[1, 2, 3]], "mask": [[1, 0, 1]]}"#), @"× row 0 of the mask has a hole at column 2: a 1 follows a 0; expected ones, then zeros");
    assert_snapshot!(cli.ids_error(r#"{"ids": [[1, 2, 3]], "mask": [[1, 2, 0]]}"#), @"× row 0, column 1 of the mask is 2; expected 0 or 1");
    assert_snapshot!(cli.ids_error(r#"{"ids": [[1, 2, 3]], "mask": [[0, 0, 0]]}"#), @"× sequence 0 has no tokens; expected at least one token in every sequence");
    assert_snapshot!(cli.ids_error(r#"{"ids": [[1, 2], [3]], "mask": [[1, 1], [1]]}"#), @r#"× `ids.json`: expected [[101, 102], …], or {"ids": [[…], …], "mask": [[…], …], "types": [[…], …]} with rows of one length, of which `mask` and `types` may be left out; the rows differ in length"#);
    assert_snapshot!(cli.ids_error(r#"{"ids": [[1, 2], [3, 4]], "mask": [[1, 1]]}"#), @r#"× `ids.json`: expected [[101, 102], …], or {"ids": [[…], …], "mask": [[…], …], "types": [[…], …]} with rows of one length, of which `mask` and `types` may be left out; the rows of `ids` and `mask` differ in number or length"#);
    assert_snapshot!(cli.ids_error(r#"{"mask": [[1]]}"#), @r#"× `ids.json`: expected [[101, 102], …], or {"ids": [[…], …], "mask": [[…], …], "types": [[…], …]} with rows of one length, of which `mask` and `types` may be left out ╰─▶ missing field `ids` at line 1 column 15"#);
    assert_snapshot!(cli.ids_error("[[-1]]"), @r#"× `ids.json`: expected [[101, 102], …], or {"ids": [[…], …], "mask": [[…], …], "types": [[…], …]} with rows of one length, of which `mask` and `types` may be left out ╰─▶ invalid value: integer `-1`, expected u32 at line 1 column 4"#);
    assert_snapshot!(cli.ids_error("[[1,"), @r#"× `ids.json`: expected [[101, 102], …], or {"ids": [[…], …], "mask": [[…], …], "types": [[…], …]} with rows of one length, of which `mask` and `types` may be left out ╰─▶ EOF while parsing a value at line 1 column 4"#);
    let absent = [
        "run",
        "bert",
        "--weights",
        ".",
        "--device",
        "cpu",
        "--ids",
        "absent.json",
    ];
    assert_snapshot!(cli.error(&absent), @"× `absent.json` cannot be read ╰─▶ No such file or directory (os error 2)");
}

#[test]
fn a_bad_checkpoint_is_refused_before_anything_else() {
    let cli = Cli::new();
    cli.0.write("model.safetensors", "");
    assert_snapshot!(cli.ids_error("[[1]]"), @"WARN `.` has neither modules.json nor 1_Pooling/config.json, which define the pooling; the embedding of a text is the mean of its tokens, normalized × `./model.safetensors` is not a complete safetensors file: header too small; download it again");
    cli.0
        .write("config.json", tiny_config().to_string().replace("16", "15"));
    assert_snapshot!(cli.ids_error("[[1]]"), @r#"× shapes do not match: `layer.0.query_heads` (split_heads): a width of 15 does not divide into 2 heads; operands are `layer.0.query` [tokens, 15] ╭─[bert.ron:83:21] 82 bias: "encoder.layer.{i}.attention.self.value.bias")), 83 Let("query_heads", split_heads(x: "query", heads: "heads")), · ──────┬────── · ╰── computed here 84 Let("key_heads", split_heads(x: "key", heads: "heads")), ╰──── help: `layer.0.query` holds 15 values for each token"#);
}

/// Writes a file of timings in which `kernel` takes one second, far longer than estimated.
fn write_timings(cli: &Cli, file: &str, on: &gemmule::engine::TimedOn, kernel: &str) {
    let mut timings = gemmule::select::Timings::default();
    timings.add(kernel, 64, 1e6);
    timings.add(kernel, 452, 1e6);
    gemmule::engine::write_timings(&cli.0.file(file), &timings, on).expect("it is written");
}

fn timed_on(card: &str, sms: u32, nvrtc: (i32, i32)) -> gemmule::engine::TimedOn {
    gemmule::engine::TimedOn {
        card: card.to_owned(),
        capability: (9, 0),
        sms,
        nvrtc,
    }
}

#[test]
fn kernels_are_timed_on_a_card_only_and_timings_of_another_are_refused() {
    let cli = Cli::new();
    let model = ["bert", "--weights", "."];
    let error = |command: &str, more: &[&str]| {
        let text = cli.error(&[&[command], &model[..], more].concat());
        let threads = text.split_whitespace().rev();
        let n = threads.skip_while(|w| !w.starts_with("threads")).nth(1);
        n.map_or(text.clone(), |n| {
            text.replace(&format!(" {n} threads"), " N threads")
        })
    };
    assert_snapshot!(error("tune", &["--device", "cpu"]), @"× kernels can only be timed on a CUDA device, and this is the CPU, N threads; omit the tuning help: leave --tune and --timings out");
    cli.0.write("ids.json", "[[1, 2]]");
    let ids = ["--device", "cpu", "--ids", "ids.json"];
    assert_snapshot!(error("run", &[&ids[..], &["--tune", "quick"]].concat()), @"WARN `.` has neither modules.json nor 1_Pooling/config.json, which define the pooling; the embedding of a text is the mean of its tokens, normalized × kernels can only be timed on a CUDA device, and this is the CPU, N threads; omit the tuning help: leave --tune and --timings out");
    assert_snapshot!(error("run", &[&ids[..], &["--timings", "absent"]].concat()), @"WARN `.` has neither modules.json nor 1_Pooling/config.json, which define the pooling; the embedding of a text is the mean of its tokens, normalized × kernels can only be timed on a CUDA device, and this is the CPU, N threads; omit the tuning help: leave --tune and --timings out");
    assert_snapshot!(error("run", &["--tune", "on"]), @"error: invalid value 'on' for '--tune <MODE>': `on` is not a tuning mode; expected off, quick or full For more information, try '--help'.");
    let on_cpu = ["--tune", "quick", "--device", "cpu", "-o", "tiny"];
    assert_snapshot!(error("compile", &on_cpu), @"× kernels can only be timed on a CUDA device, and this is the CPU, N threads; omit the tuning help: leave --tune and --timings out");
    let compile = ["--timings", "timings.ron", "-o", "tiny"];
    assert_snapshot!(error("compile", &compile), @"× `timings.ron` cannot be read ╰─▶ No such file or directory (os error 2)");
    cli.0.write("timings.ron", "(format: 2)");
    assert_snapshot!(error("compile", &compile), @"× the timings in `timings.ron` are not valid: their format is 2, this version of gemmule reads format 1; measure again with `gemmule tune`, or omit the file");
    write_timings(
        &cli,
        "timings.ron",
        &timed_on("NVIDIA H200", 132, (1, 2)),
        "any",
    );
    let with = |more: &[&str]| error("compile", &[&compile[..], more].concat());
    assert_snapshot!(with(&["--arch", "sm_80"]), @"× the timings in `timings.ron` are not valid: they were measured on NVIDIA H200 (capability 9.0, 132 SMs), and kernels are chosen for a100 (capability 8.0, 108 SMs); measure again with `gemmule tune`, or omit the file");
    assert_snapshot!(with(&["--arch", "sm_80,sm_90a"]), @"× the timings in `timings.ron` are not valid: they were measured on NVIDIA H200 (capability 9.0, 132 SMs), and kernels are chosen for a100 (capability 8.0, 108 SMs); measure again with `gemmule tune`, or omit the file");
    assert_snapshot!(with(&["--card", "a100"]), @"× the timings in `timings.ron` are not valid: they were measured on NVIDIA H200 (capability 9.0, 132 SMs), and kernels are chosen for a100 (capability 8.0, 108 SMs); measure again with `gemmule tune`, or omit the file");
    assert_snapshot!(with(&["--card", "h100_sxm"]), @"× the timings in `timings.ron` are not valid: they were measured on NVIDIA H200 (capability 9.0, 132 SMs), and kernels are chosen for h100_sxm (capability 9.0, 132 SMs); measure again with `gemmule tune`, or omit the file");
    assert_snapshot!(with(&["--invariant"]), @"× timings select kernels by size, and an invariant model uses one kernel for all sizes; omit one of the two help: leave --invariant out, or --tune and --timings");
    let text = with(&[]);
    assert!(
        text.contains("they were measured with NVRTC 1.2, and this is"),
        "{text}"
    );
    // Timings are refused for an artifact, because its kernels were already selected when it was compiled.
    let artifact =
        gemmule::engine::Artifact::of(crate::common::tiny_compiled(DType::F32), Vec::new());
    artifact.write(&cli.0.file("tiny")).expect("it is written");
    let run = [
        "run",
        "tiny",
        "--weights",
        ".",
        "--ids",
        "ids.json",
        "--device",
        "cpu",
    ];
    assert_snapshot!(cli.error(&[&run[..], &["--tune", "quick"]].concat()), @"× the artifact `tiny` already contains its kernels; tune the model when it is compiled help: give --tune or --timings to `gemmule compile`");
}

#[test]
fn a_card_that_is_named_need_not_be_there_and_must_be_one() {
    let cli = Cli::new();
    let emit = |more: &[&str]| {
        let emit = ["emit", "bert", "--weights", ".", "-o", "cu"];
        let (success, out, errors) = cli.output(&[&emit[..], more].concat());
        let words = errors.split_whitespace().filter(|w| *w != "│");
        let errors: Vec<&str> = words.collect();
        (success, if success { out } else { errors.join(" ") })
    };
    for machine in gemmule::machine::Machine::all().expect("the cards are described") {
        let (success, said) = emit(&["--card", &machine.name]);
        assert!(
            success && said.ends_with("kernels written to cu\n"),
            "{said}"
        );
    }
    assert_snapshot!(emit(&["--card", "h20"]).1, @"× `h20` is not a card that gemmule describes; the nearest is `h200`; expected one of a10, a100, b200, h100_pcie, h100_sxm, h200, l4, l40s, rtx4090, rtx5090");
    assert_snapshot!(emit(&["--card", "h200", "--arch", "sm_80"]).1, @"× the card h200 has compute capability 9.0, and its code does not run on sm_80; omit one of the two help: leave --card or --arch out");
    // Code with Hopper's instructions runs only on one target.
    let compile = [
        "compile",
        "bert",
        "--weights",
        ".",
        "--card",
        "h200",
        "-o",
        "tiny",
    ];
    let both = ["--arch", "sm_80,sm_90a"];
    assert_snapshot!(cli.error(&[&compile[..], &both].concat()), @"× the card h200 has compute capability 9.0, and its code does not run on sm_80; omit one of the two help: leave --card or --arch out");
}

#[test]
fn launches_are_those_of_each_operator_where_that_is_asked_for() {
    let cli = Cli::new();
    // With these widths, some kernels fuse several operators.
    let config = tiny_config().to_string();
    let wide = config.replace("\"hidden_size\":16", "\"hidden_size\":768");
    let wide = wide.replace("\"intermediate_size\":32", "\"intermediate_size\":3072");
    let wide = wide.replace("\"num_attention_heads\":2", "\"num_attention_heads\":12");
    cli.0.write("wide.json", wide);
    let kernels = |folder: &str, more: &[&str]| -> Vec<String> {
        let emit = [
            "emit",
            "bert",
            "--config",
            "wide.json",
            "--card",
            "h200",
            "-o",
        ];
        cli.ok(&[&emit[..], &[folder], more].concat());
        let files = std::fs::read_dir(cli.0.file(folder)).expect("it was made");
        let name = |file: std::io::Result<std::fs::DirEntry>| {
            file.expect("a file")
                .file_name()
                .to_string_lossy()
                .into_owned()
        };
        files.map(name).collect()
    };
    let joint = |names: &[String]| {
        let is_joint = |name: &&String| {
            let one = ["gemm_residual_", "deferred_layernorm_"];
            one.iter().any(|stem| name.contains(stem)) || name.contains("layernorm_eps1em12_gemm")
        };
        names.iter().filter(is_joint).count()
    };
    assert!(joint(&kernels("with", &[])) > 0);
    assert_eq!(joint(&kernels("without", &["--no-fused-launches"])), 0);
}

#[test]
fn source_is_written_of_the_kernels_that_timings_choose() {
    use gemmule::engine::{CompileOptions, compile, description};
    let cli = Cli::new();
    let bert = description("bert").expect("it is shipped");
    let options = CompileOptions::new(DType::F16, crate::common::hopper());
    let compiled = compile(&bert, &tiny_config(), &options).expect("it compiles");
    let names: Vec<String> = compiled
        .program
        .kernels
        .iter()
        .map(|kernel| kernel.as_kernel().symbol())
        .collect();
    // In the timings, make a kernel slow. Choose a kernel that the program uses only for few rows, so that its source is then not written.
    // The source of a kernel that larger batches also use would still be written.
    let few = gemmule::tensor::Extents::of(&[1; 64]).expect("a batch");
    let launched = compiled.program.steps.iter().find_map(|step| {
        let name = &names[*step.dispatch.at(&few)?];
        name.starts_with("gemm").then_some(name)
    });
    let slow = launched.expect("a linear layer has a kernel");
    let on = timed_on(&options.machine.cards[0], options.machine.sms, (1, 2));
    write_timings(&cli, "timings.ron", &on, slow);
    let emit = ["emit", "bert", "--weights", ".", "--dtype", "f16"];
    let files = |folder: &str| -> Vec<String> {
        let files = std::fs::read_dir(cli.0.file(folder)).expect("it was made");
        let name = |file: std::io::Result<std::fs::DirEntry>| {
            file.expect("a file")
                .file_name()
                .to_string_lossy()
                .into_owned()
        };
        let mut names: Vec<String> = files.map(name).collect();
        names.sort();
        names
    };
    cli.ok(&[
        &emit[..],
        &["--card", &options.machine.name, "-o", "untimed"],
    ]
    .concat());
    // Without `--arch`, no code is compiled, so timings of any NVRTC version are accepted. Without `--card`, the timings determine the
    // card.
    cli.ok(&[&emit[..], &["--timings", "timings.ron", "-o", "timed"]].concat());
    assert_ne!(files("untimed"), files("timed"));
    let other = ["--timings", "timings.ron", "--arch", "sm_80", "-o", "x"];
    assert_snapshot!(cli.error(&[&emit[..], &other].concat()), @"× the timings in `timings.ron` are not valid: they were measured on NVIDIA H200 (capability 9.0, 132 SMs), and kernels are chosen for a100 (capability 8.0, 108 SMs); measure again with `gemmule tune`, or omit the file");
}

#[test]
fn an_invariant_model_gives_a_sequence_the_same_values_in_every_batch() {
    let cli = Cli::new();
    cli.0.write("alone.json", "[[1, 2, 3]]");
    let mates: Vec<String> = (0..40).map(|i| format!("[{}, 7, 4]", i % 20)).collect();
    cli.0
        .write("last.json", format!("[{}, [1, 2, 3]]", mates.join(", ")));
    let last_row = |ids: &str| -> Vec<serde_json::Value> {
        let args = ["run", "bert", "--weights", ".", "--device", "cpu", "--json"];
        let text = cli.ok(&[&args[..], &["--invariant", "--ids", ids]].concat());
        let json: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
        let values = &json["outputs"]["sentence_embedding"]["values"];
        let values = values.as_array().expect("values").clone();
        values[values.len() - 16..].to_vec()
    };
    assert_eq!(last_row("alone.json"), last_row("last.json"));
    let compile = [
        "compile",
        "bert",
        "--weights",
        ".",
        "--arch",
        "sm_80",
        "-o",
        "tiny",
    ];
    let text = cli.ok(&[&compile[..], &["--invariant"]].concat());
    assert!(text.contains("f16, invariant, for sm_80"), "{text}");
    assert!(
        gemmule::engine::Artifact::read(&cli.0.file("tiny")).is_ok_and(|a| a.program.invariant)
    );
}

/// Checks that the program ends without an error message if its output is no longer read, as in `gemmule models | head -1`.
#[test]
fn a_reader_that_closes_the_pipe_ends_the_program_quietly() {
    let mut program = Command::new(env!("CARGO_BIN_EXE_gemmule"))
        .arg("models")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the program starts");
    drop(program.stdout.take());
    let output = program.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert!(output.status.success());
}

/// Returns a folder of `tests/checkpoints`.
fn published(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/checkpoints")
        .join(name);
    folder.to_str().expect("a plain path").to_owned()
}

#[test]
fn every_folder_that_runs_is_sound() {
    let cli = Cli::new();
    let folders = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints");
    let mut n = 0;
    for folder in std::fs::read_dir(&folders).expect("it is there") {
        let folder = folder.expect("it is read").path();
        let name = folder.file_name().and_then(|name| name.to_str());
        // gemmule refuses the poolings of these two folders.
        if !folder.is_dir() || matches!(name, Some("st-sqrt" | "st-weighted")) {
            continue;
        }
        let said = cli.ok(&["check", "--weights", folder.to_str().expect("a plain path")]);
        assert!(said.contains("is valid"), "{}: {said}", folder.display());
        n += 1;
    }
    assert!(n > 30, "{n}");
}

#[test]
fn the_shipped_descriptions_are_listed_and_printed() {
    let cli = Cli::new();
    let list = cli.ok(&["models"]);
    assert!(list.contains("roberta, xlm-roberta, camembert"), "{list}");
    let bert = gemmule::model::Description::shipped_source("bert");
    assert_eq!(Some(cli.ok(&["models", "bert"]).as_str()), bert);
    assert_snapshot!(cli.error(&["models", "brt"]), @"× no description `brt` comes with gemmule (did you mean `bart`?); there are bert, jina_bert, roberta, roberta_prelayernorm, roformer, xlm_roberta_flash, xlm_roberta_xl, distilbert, albert, electra, mpnet, megatron_bert, rembert, nomic_bert, gte, deberta, deberta_v2, modernbert, modernbert_decoder, neobert, eurobert, gemma, gemma2, gemma3_text, clip_text, gpt2, openai_gpt, gpt_bigcode, gpt_neo, llama, internlm3, exaone, exaone4, seed_oss, ernie4_5, helium, hunyuan_v1_dense, arcee, nemotron, glm, qwen2, qwen3, phi3, olmo, olmo2, olmo3, starcoder2, stablelm, phi, smollm3, granite, opt, xglm, biogpt, gpt_neox, gptj, falcon, cohere, cohere2, bloom, mpt, marian, bart_classifier, bart, mbart, m2m_100, pegasus, blenderbot, blenderbot_small, t5, vae, static_embedding, sparse_static_embedding");
}

#[test]
fn a_role_chooses_the_route_of_a_router() {
    let cli = Cli::new();
    let folder = published("st-asym");
    let text = std::fs::read_to_string(Path::new(&folder).join("expected.json"));
    let expected: serde_json::Value =
        serde_json::from_str(&text.expect("it is there")).expect("JSON");
    let runs = expected["runs"].as_array().expect("runs");
    let plain = |task: &str| {
        let is_it = |run: &&serde_json::Value| {
            let own = run["task"].as_str().unwrap_or("document");
            own == task && run["prompt_name"].is_null()
        };
        runs.iter().find(is_it).expect("there is a run")
    };
    for (how, task) in [
        ("--role", "query"),
        ("--task", "query"),
        ("--role", "document"),
    ] {
        let run = plain(task);
        let text = run["texts"][0].as_str().expect("a text");
        let args = [
            "run",
            "--weights",
            &folder,
            "--device",
            "cpu",
            "--json",
            how,
            task,
            "--text",
            text,
        ];
        let json: serde_json::Value = serde_json::from_str(&cli.ok(&args)).expect("JSON");
        let found = &json["outputs"]["sentence_embedding"]["values"];
        let values = |of: &serde_json::Value| -> Vec<f64> {
            let of = of.as_array().expect("numbers").iter();
            of.filter_map(serde_json::Value::as_f64).collect()
        };
        let (found, wanted) = (values(found), values(&run["values"]));
        assert!(!found.is_empty());
        assert!(found.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-4));
    }
}

#[test]
fn a_folder_runs_without_model_and_pairs_are_scored() {
    let cli = Cli::new();
    let run = |folder: &str, more: &[&str]| {
        let folder = published(folder);
        let args = ["run", "--weights", &folder, "--device", "cpu", "--json"];
        let json = cli.ok(&[&args[..], more].concat());
        serde_json::from_str::<serde_json::Value>(&json).expect("JSON")
    };
    let embedded = run("st-mean", &["--text", "Rain"]);
    let outputs = embedded["outputs"].as_object().expect("outputs");
    assert_eq!(outputs.keys().collect::<Vec<_>>(), ["sentence_embedding"]);
    let prompted = run("st-mean", &["--text", "Rain", "--prompt-name", "query"]);
    assert_ne!(embedded["lens"], prompted["lens"]);
    assert_eq!(
        prompted["lens"],
        run("st-mean", &["--text", "Rain", "--prompt", "find: "])["lens"]
    );
    // The scores of a file of pairs and of a single pair are those of `CrossEncoder.predict`.
    let text = std::fs::read_to_string(Path::new(&published("ce-one")).join("expected.json"));
    let expected: serde_json::Value =
        serde_json::from_str(&text.expect("it is there")).expect("JSON");
    let first = &expected["runs"][0];
    let pairs: Vec<[String; 2]> = serde_json::from_value(first["pairs"].clone()).expect("pairs");
    let lines: Vec<String> = pairs.iter().map(|pair| pair.join("\t")).collect();
    cli.0.write("pairs.tsv", lines.join("\n"));
    let of_file = run("ce-one", &["--pairs-file", "pairs.tsv"]);
    let scores = |json: &serde_json::Value| -> Vec<f64> {
        serde_json::from_value(json["outputs"]["scores"]["values"].clone()).expect("scores")
    };
    let want: Vec<f64> = serde_json::from_value(first["values"].clone()).expect("scores");
    for (got, want) in scores(&of_file).iter().zip(&want) {
        assert!((got - want).abs() < 1e-5, "{got} {want}");
    }
    let one = run("ce-one", &["--pair", &pairs[0][0], &pairs[0][1]]);
    assert!((scores(&one)[0] - want[0]).abs() < 1e-5);
    let table = cli.ok(&[
        "run",
        "--weights",
        &published("ce-one"),
        "--device",
        "cpu",
        "--pair",
        "who?",
        "nobody",
    ]);
    assert!(
        table.contains("score") && table.contains("nobody"),
        "{table}"
    );
    cli.0.write("pairs.tsv", "\n\none text\n");
    let args = [
        "run",
        "--weights",
        &published("ce-one"),
        "--device",
        "cpu",
        "--pairs-file",
        "pairs.tsv",
    ];
    assert_snapshot!(cli.error(&args), @"× line 3 of `pairs.tsv`: expected two texts with one tab between them, found 0 tabs");
}

#[test]
fn a_late_interaction_model_runs_queries_and_documents() {
    let cli = Cli::new();
    let folder = published("late-bert");
    let run = |more: &[&str]| -> serde_json::Value {
        let args = ["run", "--weights", &folder, "--device", "cpu", "--json"];
        serde_json::from_str(&cli.ok(&[&args[..], more].concat())).expect("JSON")
    };
    let text = std::fs::read_to_string(Path::new(&folder).join("expected.json"));
    let expected: serde_json::Value =
        serde_json::from_str(&text.expect("it is there")).expect("JSON");
    let text = |side: &str, at: usize| expected[side][at]["text"].as_str().expect("a text");
    for (side, role) in [("queries", "query"), ("documents", "document")] {
        let got = run(&["--role", role, "--text", text(side, 0)]);
        let n = expected[side][0]["ids"].as_array().expect("ids").len();
        assert_eq!(got["lens"], serde_json::json!([n]));
        assert_eq!(
            got["outputs"]["colbert"]["shape"],
            serde_json::json!([n, 16])
        );
    }
    let pair = |query, document| [text("queries", query), text("documents", document)];
    let ([a, b], [c, d]) = (pair(0, 1), pair(1, 2));
    let got = run(&["--pair", a, b, "--pair", c, d]);
    let scores: Vec<f64> =
        serde_json::from_value(got["outputs"]["scores"]["values"].clone()).expect("scores");
    let want = [&expected["scores"][0][1], &expected["scores"][1][2]];
    for (got, want) in scores.iter().zip(want) {
        assert!(
            (got - want.as_f64().expect("a score")).abs() < 1e-4,
            "{got} {want}"
        );
    }
    let args = [
        "run",
        "--weights",
        &folder,
        "--device",
        "cpu",
        "--text",
        "x",
    ];
    assert_snapshot!(cli.error(&args), @"× a late-interaction model reads queries and documents differently; give --role query or --role document");
    let other = published("st-mean");
    let args = ["run", "--weights", &other, "--role", "query", "--text", "x"];
    assert_snapshot!(cli.error(&args), @"× --role is for late-interaction models and the routes of a Router, and this model is neither; leave it out");
    let args = [
        "run",
        "--weights",
        &folder,
        "--role",
        "passage",
        "--text",
        "x",
    ];
    assert_snapshot!(cli.error(&args), @"error: invalid value 'passage' for '--role <ROLE>': expected query or document For more information, try '--help'.");
}

#[test]
fn segment_ids_of_a_file_are_read() {
    let cli = Cli::new();
    let folder = published("ce-identity");
    let score = |ids: &str| -> f64 {
        cli.0.write("ids.json", ids);
        let args = [
            "run",
            "--weights",
            &folder,
            "--device",
            "cpu",
            "--json",
            "--ids",
            "ids.json",
        ];
        let json: serde_json::Value = serde_json::from_str(&cli.ok(&args)).expect("JSON");
        json["outputs"]["sequence_logits"]["values"][0]
            .as_f64()
            .expect("a number")
    };
    let plain = score("[[2, 5, 3, 7, 8, 3]]");
    assert_eq!(
        plain,
        score(r#"{"ids": [[2, 5, 3, 7, 8, 3]], "types": [[0, 0, 0, 0, 0, 0]]}"#)
    );
    let typed = score(r#"{"ids": [[2, 5, 3, 7, 8, 3]], "types": [[0, 0, 0, 1, 1, 1]]}"#);
    assert!((plain - typed).abs() > 1e-3, "{plain} {typed}");
    let padded = r#"{"ids": [[2, 5, 3, 7, 8, 3, 0]], "mask": [[1, 1, 1, 1, 1, 1, 0]], "types": [[0, 0, 0, 1, 1, 1, 0]]}"#;
    assert!((typed - score(padded)).abs() < 1e-6);
    let error = |ids: &str| {
        cli.0.write("ids.json", ids);
        cli.error(&[
            "run",
            "--weights",
            &folder,
            "--device",
            "cpu",
            "--ids",
            "ids.json",
        ])
    };
    assert_snapshot!(error(r#"{"ids": [[2, 3]], "token_type_ids": [[0, 0]]}"#), @r#"× `ids.json`: expected [[101, 102], …], or {"ids": [[…], …], "mask": [[…], …], "types": [[…], …]} with rows of one length, of which `mask` and `types` may be left out ╰─▶ unknown field `token_type_ids`, expected one of `ids`, `mask`, `types` at line 1 column 34"#);
    assert_snapshot!(error(r#"{"ids": [[2, 3]], "types": [[0]]}"#), @r#"× `ids.json`: expected [[101, 102], …], or {"ids": [[…], …], "mask": [[…], …], "types": [[…], …]} with rows of one length, of which `mask` and `types` may be left out; the rows of `ids` and `types` differ in number or length"#);
    assert_snapshot!(error(r#"{"ids": [[2, 3]], "types": [[0, 2]]}"#), @"× sequence 0, token 1: the segment id 2 is outside the table of 2 rows; expected an id below 2");
}

#[test]
fn a_check_with_a_folder_looks_at_its_weights_and_at_every_output() {
    let cli = Cli::new();
    let gamma = published("hf-gamma");
    assert_snapshot!(cli.ok(&["check", "--weights", &gamma]), @r"
    `bert` is valid: 58 launches as described, 16 after fusion; 9 expectations hold
    the checkpoint has all weights that the model reads, and every layer is used
    ");
    let short =
        std::fs::read_to_string(Path::new(&gamma).join("config.json")).expect("it is there");
    cli.0.write(
        "one.json",
        short.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1"),
    );
    let error = cli.error(&["check", "--weights", &gamma, "--config", "one.json"]);
    assert!(
        error.contains("does not use `bert.encoder.layer.1."),
        "{error}"
    );
    // The changed description has a wrong shape in an output that is not computed by default. `check` reports it nevertheless.
    let bert = gemmule::model::Description::shipped_source("bert").expect("it is shipped");
    let broken = bert.replace(
        "tanh(x: \"pooler_dense\")",
        "first_token(x: \"pooler_dense\")",
    );
    cli.0.write("broken.ron", broken);
    let error = cli.error(&["check", "broken.ron", "--weights", &gamma]);
    assert!(error.contains("pooler_output"), "{error}");
}

/// Checks that the generated table in `docs/models.md` is up to date. `INSTA_UPDATE=always` updates it.
#[test]
fn the_table_of_models_in_the_documents_is_that_of_the_descriptions() {
    let table = Cli::new().ok(&["models", "--markdown"]);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/models.md");
    let text = std::fs::read_to_string(&file).expect("the document");
    let (begin, end) = (
        "<!-- table of `gemmule models --markdown` -->\n",
        "<!-- end of the table -->",
    );
    let (before, rest) = text.split_once(begin).expect("the beginning is marked");
    let (found, after) = rest.split_once(end).expect("the end is marked");
    let expected = format!("\n{}\n", table.trim_end().to_owned() + "\n");
    if found != expected && std::env::var("INSTA_UPDATE").as_deref() == Ok("always") {
        let renewed = format!("{before}{begin}{expected}{end}{after}");
        std::fs::write(&file, renewed).expect("it is written");
    } else {
        assert_eq!(
            found, expected,
            "docs/models.md is not up to date; renew it with INSTA_UPDATE=always"
        );
    }
}
