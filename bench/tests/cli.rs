//! Tests the command line for developers, from the arguments to the files that are written.

#[path = "../../tests/common/tiny.rs"]
mod tiny;

use std::process::Command;

use insta::assert_snapshot;
use serde_json::Value;

use tiny::{Folder, on_one_line, said, tiny_config};

const SETS: &str = r#"{"encoder": [
    {"name": "ragged", "lens": [5, 1, 3]}, {"name": "even", "lens": [4, 4]},
    {"name": "long", "lens": [13, 2]}]}"#;

struct Bench(Folder);

impl Bench {
    fn new() -> Self {
        let folder = Folder::new();
        folder.write("config.json", tiny_config().to_string());
        folder.write("sets.json", SETS);
        Self(folder)
    }

    fn output(&self, args: &[&str]) -> (bool, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gemmule-bench"));
        said(&self.0, command.args(args))
    }

    /// Returns the output of a command that succeeds.
    #[track_caller]
    fn ok(&self, args: &[&str]) -> String {
        let (success, out, errors) = self.output(args);
        assert!(success, "{args:?}: {out}{errors}");
        out
    }

    /// Returns the error message of a command that fails, on one line.
    #[track_caller]
    fn error(&self, args: &[&str]) -> String {
        let (success, out, errors) = self.output(args);
        assert!(!success, "{args:?} should fail: {out}");
        on_one_line(&errors)
    }

    #[track_caller]
    fn json(&self, file: &str) -> Value {
        let text = std::fs::read_to_string(self.0.file(file)).expect("it was written");
        serde_json::from_str(&text).expect("it is JSON")
    }

    /// Returns the output, the JSON and the chart.
    #[track_caller]
    fn measure(&self, name: &str) -> (String, Value, String) {
        let files = ["--json", "out.json", "--figure", "out.svg"];
        let sets = ["--workloads", "sets.json"];
        let out = self.ok(&[&on_cpu(name)[..], &files, &sets].concat());
        let svg = std::fs::read_to_string(self.0.file("out.svg")).expect("it was drawn");
        (out, self.json("out.json"), svg)
    }
}

/// Returns the arguments for timing the tiny model with the benchmark `name`.
fn on_cpu(name: &str) -> [&str; 10] {
    [
        name,
        "bert",
        "--config",
        "config.json",
        "--device",
        "cpu",
        "--warm-up",
        "1",
        "--runs",
        "2",
    ]
}

fn rows<'a>(json: &'a Value, key: &str) -> &'a Vec<Value> {
    json[key].as_array().expect("a list")
}

#[test]
fn every_rung_of_the_ladder_computes_the_same() {
    let (out, json, svg) = Bench::new().measure("ladder");
    let left_out = "long: skipped, because it has a sequence of 13 tokens and the maximum of the position table is 12\n";
    assert!(out.starts_with(left_out), "{out}");
    let rungs: Vec<String> = rows(&json, "rungs")
        .iter()
        .zip(rows(&json, "rows"))
        .map(|(rung, row)| {
            assert_eq!(rung["name"], row["rung"]);
            format!(
                "{} {} {}",
                rung["name"], rung["padded"], row["launches_a_layer"]
            )
        })
        .collect();
    assert_snapshot!(rungs.join("\n"), @r#"
    "baseline" true 16
    "+ LayerNorm fusion" true 12
    "+ GELU fusion" true 9
    "+ no padding" false 9
    "+ fused attention" false 7
    "#);
    let measured = rows(&json, "rows");
    assert_eq!(measured.len(), 2 * rungs.len());
    for row in measured {
        assert_eq!(row["agrees"], true, "{row}");
        assert!(row["ms"].as_f64().is_some_and(|ms| ms > 0.0), "{row}");
    }
    let tokens: Vec<u64> = measured[..rungs.len()]
        .iter()
        .filter_map(|row| row["tokens"].as_u64())
        .collect();
    assert_eq!(tokens, [15, 15, 15, 9, 9]);
    for name in ["ragged", "even", "baseline", "fused attention"] {
        assert!(out.contains(name) && svg.contains(name), "{name}");
    }
    assert!(svg.starts_with("<svg"), "{svg}");
}

#[test]
fn the_parts_of_a_run_are_told_apart() {
    let (out, json, svg) = Bench::new().measure("breakdown");
    let measured = rows(&json, "rows");
    assert_eq!(measured.len(), 4);
    for row in measured {
        let number = |value: &Value| value.as_f64().expect("a number");
        // Steps are sequential, so the sum of their times is below the time of the run. The medians of both may be from different runs, so
        // they are not compared.
        assert!(number(&row["sum_ms"]) > 0.0, "{row}");
        let classes = rows(row, "classes");
        let shares: f64 = classes.iter().map(|c| number(&c["share"])).sum();
        assert!((shares - 1.0).abs() < 1e-4, "{row}");
        let has = |name: &str| {
            let class = classes.iter().find(|c| c["class"] == name);
            class.is_some_and(|c| number(&c["ms"]) > 0.0)
        };
        assert!(has("GEMM") && has("attention") && has("LayerNorm"), "{row}");
        let unfused = row["program"] == "unfused";
        assert_eq!((has("softmax"), has("other")), (unfused, unfused), "{row}");
    }
    let counts: Vec<String> = rows(&json, "counts")
        .iter()
        .filter(|count| count["set"] == "ragged")
        .map(|count| {
            format!(
                "{} {}: {} {} {}",
                count["class"],
                count["symbolic"],
                count["padded"],
                count["zero_padding"],
                count["packed"]
            )
        })
        .collect();
    // One layer of width 16. Products with weights have 2·(4·16² + 2·16·32) operations per token, and attention has 4·16 per pair. There
    // are 15 tokens and 75 pairs with padding, and 9 tokens and 35 pairs without.
    assert_snapshot!(counts.join("\n"), @r#"
    "GEMM" "4096·tokens": 61440 36864 36864
    "attention" "64·pairs": 4800 4800 2240
    "#);
    for name in ["GEMM", "attention", "softmax", "LayerNorm", "other"] {
        assert!(out.contains(name) && svg.contains(name), "{name}");
    }
}

#[test]
fn sets_that_cannot_be_run_are_named() {
    let bench = Bench::new();
    for name in ["ladder", "breakdown"] {
        let file = ["--workloads", "sets.json", "--sets"];
        let long = bench.error(&[&on_cpu(name)[..], &file, &["long"]].concat());
        assert_eq!(
            long,
            "× no set is short enough for a position table of 12; choose others with --sets or --workloads, or sizes with a larger table"
        );
        let unknown = bench.error(&[&on_cpu(name)[..], &file, &["raged"]].concat());
        assert_eq!(
            unknown,
            "× there is no set `raged` (did you mean `ragged`?); there are ragged, even, long"
        );
    }
    bench.0.write("broken.json", "{}");
    let ladder = |file| bench.error(&[&on_cpu("ladder")[..], &["--workloads", file]].concat());
    assert_snapshot!(ladder("broken.json"), @r#"× `broken.json` has no sets of lengths; expected {"encoder": [{"name": …, "lens": […]}, …]} ╰─▶ missing field `encoder` at line 1 column 2"#);
    assert_snapshot!(ladder("absent.json"), @"× `absent.json` cannot be read ╰─▶ No such file or directory (os error 2)");
}

#[test]
fn allocators_are_compared_on_one_stream() {
    let bench = Bench::new();
    let measure = |options: &[&str]| {
        let stream = ["allocators", "bert", "--config", "config.json"];
        let lengths = ["--shortest", "1", "--longest", "12", "--requests", "20"];
        let files = ["--json", "stream.json", "--figures", "figures"];
        bench.ok(&[&stream[..], &lengths, &files, options].concat());
        bench.json("stream.json")
    };
    let planned = measure(&["--plan-only"]);
    let ran = measure(&["--device", "cpu"]);
    for name in ["allocators_held.svg", "allocators_allocated.svg"] {
        let svg = std::fs::read_to_string(bench.0.file("figures").join(name)).expect("drawn");
        let series = ["chunk", "turbo", "gsoc", "caching", "maximum"];
        assert!(series.iter().all(|name| svg.contains(name)), "{name}");
    }
    assert_eq!(
        (&planned["device"], &ran["lens"]),
        (&Value::Null, &planned["lens"])
    );
    let streams = |measured: &Value| measured["allocators"].as_array().cloned();
    let (planned, ran) = (
        streams(&planned).expect("a list"),
        streams(&ran).expect("a list"),
    );
    let names: Vec<_> = ran
        .iter()
        .map(|stream| stream["allocator"].clone())
        .collect();
    assert_eq!(names, ["chunk", "turbo", "gsoc", "caching", "maximum"]);
    for (planned, ran) in planned.iter().zip(&ran) {
        for key in ["footprint", "held", "newly_allocated", "released"] {
            assert_eq!(planned[key], ran[key]);
            assert_eq!(ran[key].as_array().map(Vec::len), Some(20), "{key}");
        }
        assert_eq!(planned["run_us"], serde_json::json!([]));
        let sum = |key: &str| -> f64 {
            let values = ran[key].as_array().expect("a list").iter();
            values.map(|us| us.as_f64().expect("a number")).sum()
        };
        assert!(sum("memory_us") > 0.0 && sum("memory_us") < sum("run_us"));
    }
    let refused = |options: &[&str]| {
        let stream = [
            "allocators",
            "bert",
            "--config",
            "config.json",
            "--plan-only",
        ];
        bench.error(&[&stream[..], options].concat())
    };
    assert_snapshot!(refused(&[]), @"× --longest is 500, but the position table of `bert` has only 12 rows; use a smaller --longest");
    assert_snapshot!(refused(&["--shortest", "9", "--longest", "8"]), @"× the range of lengths from 9 to 8 tokens is invalid; expected 1 ≤ --shortest ≤ --longest");
    assert_snapshot!(bench.error(&["allocators", "albert.ron"]), @"× the sizes of the model are unknown; give a checkpoint folder or a config.json");
    assert_snapshot!(refused(&["--device", "cpu"]), @"error: the argument '--plan-only' cannot be used with '--device <DEVICE>' Usage: gemmule-bench allocators --config <FILE> --plan-only <MODEL> For more information, try '--help'.");
}

#[test]
fn every_subcommand_has_help() {
    let bench = Bench::new();
    assert_snapshot!("help", bench.ok(&["--help"]));
    for command in [
        "allocators",
        "breakdown",
        "encoder",
        "gemm",
        "kernels",
        "ladder",
        "stream",
    ] {
        let help = bench.ok(&[command, "--help"]);
        assert!(help.contains("Usage: gemmule-bench"), "{command}: {help}");
    }
}

#[test]
fn an_encoder_is_drawn_and_has_peers_on_a_card_only() {
    let bench = Bench::new();
    let random = ["--random-weights", "1", "--workloads", "sets.json"];
    let encoder = [&on_cpu("encoder")[..], &random].concat();
    let files = ["--json", "out.json", "--figure", "out.svg"];
    let out = bench.ok(&[&encoder[..], &files].concat());
    assert!(
        out.contains("skipped long") && out.contains("drew out.svg"),
        "{out}"
    );
    let json = bench.json("out.json");
    let sets: Vec<&Value> = json
        .as_array()
        .expect("a list")
        .iter()
        .map(|row| &row["set"])
        .collect();
    assert_eq!(sets, ["ragged", "even"]);
    assert_eq!(
        (&json[0]["tokens"], &json[0]["time_to_floor"]),
        (&9.into(), &Value::Null)
    );
    assert!(json[0]["ms"].as_f64().is_some_and(|ms| ms > 0.0));
    let svg = std::fs::read_to_string(bench.0.file("out.svg")).expect("it was drawn");
    assert!(svg.contains("ragged") && svg.contains("gemmule"));
    let error = bench.error(&[&encoder[..], &["--peers"]].concat());
    assert!(
        error.starts_with("× the peers are timed on a CUDA device, and the model runs on the CPU"),
        "{error}"
    );
}
