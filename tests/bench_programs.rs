//! The benchmarks that compare programs of one description, from the command line to their files.

mod common;

use std::process::Command;

use common::{Folder, tiny_config};
use insta::assert_snapshot;
use serde_json::Value;

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

    fn output(&self, name: &str, further: &[&str]) -> (bool, String, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_gemmule"))
            .args(["bench", name, "bert", "--config", "config.json"])
            .args(["--device", "cpu", "--warm-up", "1", "--runs", "2"])
            .args(further)
            .current_dir(self.0.path())
            .env("NO_COLOR", "1")
            .env("COLUMNS", "100")
            .output()
            .expect("the program starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (
            output.status.success(),
            text(&output.stdout),
            text(&output.stderr),
        )
    }

    /// What is printed, the JSON and the chart.
    #[track_caller]
    fn measure(&self, name: &str) -> (String, Value, String) {
        let files = ["--json", "out.json", "--figure", "out.svg"];
        let sets = ["--workloads", "sets.json"];
        let (success, out, errors) = self.output(name, &[files.as_slice(), &sets].concat());
        assert!(success, "{out}{errors}");
        let read = |file: &str| std::fs::read_to_string(self.0.file(file)).expect("it was written");
        let json = serde_json::from_str(&read("out.json")).expect("it is JSON");
        (out, json, read("out.svg"))
    }

    #[track_caller]
    fn error(&self, name: &str, further: &[&str]) -> String {
        let (success, out, errors) = self.output(name, further);
        assert!(!success, "{out}");
        // miette breaks lines to the width of the terminal, with a bar in front.
        let words = errors.split_whitespace().filter(|w| *w != "│");
        words.collect::<Vec<_>>().join(" ")
    }
}

fn rows<'a>(json: &'a Value, key: &str) -> &'a Vec<Value> {
    json[key].as_array().expect("a list")
}

#[test]
fn every_rung_of_the_ladder_computes_the_same() {
    let (out, json, svg) = Bench::new().measure("ladder");
    let left_out =
        "long: left out, as it has a sequence of 13 tokens and the position table serves 12\n";
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
        // Steps follow one another, so their times add up to less than the run's. Medians of the
        // classes and of the whole may come from different runs.
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
    // One layer of width 16: 2·(4·16² + 2·16·32) a token in products with weights, 4·16 a pair in
    // attention; 15 tokens and 75 pairs padded, 9 and 35 packed.
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
        let long = bench.error(name, &[file.as_slice(), &["long"]].concat());
        assert_eq!(
            long,
            "× no set is short enough for a position table of 12; choose others with --sets or --workloads, or sizes with a larger table"
        );
        let unknown = bench.error(name, &[file.as_slice(), &["raged"]].concat());
        assert_eq!(
            unknown,
            "× there is no set `raged` (did you mean `ragged`?); there are ragged, even, long"
        );
    }
    bench.0.write("broken.json", "{}");
    assert_snapshot!(bench.error("ladder", &["--workloads", "broken.json"]), @r#"× `broken.json` holds no sets of lengths; expected {"encoder": [{"name": …, "lens": […]}, …]} ╰─▶ missing field `encoder` at line 1 column 2"#);
    assert_snapshot!(bench.error("ladder", &["--workloads", "absent.json"]), @"× `absent.json` cannot be read ╰─▶ No such file or directory (os error 2)");
}
