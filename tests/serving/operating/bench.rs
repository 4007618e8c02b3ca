//! Tests of the `gemmule bench` commands that measure a server, a text generator or costs.

use std::{fs, process::Command, time::Duration};

use gemmule::{
    http::{HttpChoice, Server},
    serve::{Model, ModelChoice, Models, Recorder},
};
use serde_json::Value;

use super::{checkpoint, choice, costs};

fn gemmule(args: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_gemmule"))
        .args(args)
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

fn started(models: Vec<Model>) -> Server {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let quick = HttpChoice {
        drain_delay: Duration::ZERO,
        ..HttpChoice::default()
    };
    Server::start(socket, Models::new(models), quick).unwrap()
}

#[test]
fn a_server_is_asked_by_plan_and_in_turns_and_what_it_did_is_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (trace, table, report) = (path("trace"), path("costs"), path("report"));
    fs::write(&table, costs().to_ron().unwrap()).unwrap();
    let embeds = Model::open(ModelChoice {
        trace: Some(Recorder::create(trace.as_ref(), 1 << 24).unwrap()),
        ..choice("packed")
    });
    let writes = Model::open(ModelChoice {
        folder: checkpoint("writer"),
        name: "writer".to_owned(),
        ..choice("packed")
    });
    let server = started(vec![embeds.unwrap(), writes.unwrap()]);
    let url = format!("http://{}", server.address());
    let asked = |more: &[&str]| -> Value {
        let usual = [
            "bench",
            "serve",
            &url,
            "--seconds",
            "1",
            "--warm-up",
            "0.1",
            "--json",
            &report,
        ];
        let (is_well, text) = gemmule(&[&usual, more].concat());
        assert!(is_well, "{text}");
        serde_json::from_str(&fs::read_to_string(&report).unwrap()).unwrap()
    };
    let open = asked(&[
        "--rate",
        "80",
        "--lengths",
        "uniform:3,9",
        "--model",
        "st-mean",
    ]);
    let n = open["sent"].as_u64().unwrap();
    assert!((40..140).contains(&n), "{open}");
    assert_eq!(open["statuses"]["200"], n, "{open}");
    let latency = &open["latency"];
    assert!(latency["p50"].as_f64() <= latency["p99"].as_f64(), "{open}");
    let closed = asked(&[
        "--closed",
        "3",
        "--lengths",
        "fixed:5",
        "--ids",
        "30",
        "--different",
        "4",
    ]);
    assert_eq!(closed["statuses"]["200"], closed["sent"], "{closed}");
    assert!(closed["tokens_per_second"].as_f64().unwrap() > 0.0);
    let texts = [
        "--route",
        "completions",
        "--closed",
        "2",
        "--new",
        "4",
        "--lengths",
        "fixed:3",
    ];
    let written = asked(&[&texts[..], &["--model", "writer"]].concat());
    // The tokenizer of `writer` knows only the characters of its stories, so the server refuses some of the texts.
    let statuses = written["statuses"].as_object().unwrap();
    assert!(
        statuses.keys().all(|code| code == "200" || code == "400"),
        "{written}"
    );
    assert!(written["answered"].as_u64() > Some(0), "{written}");
    assert!(written["first"]["mean"].as_f64() <= written["latency"]["mean"].as_f64());
    server.shut_down(Duration::ZERO);

    let replay = ["simulate", "--trace", &trace, "--replay", "--costs", &table];
    let (is_well, text) = gemmule(&[&replay[..], &["--scheduler", "packed"]].concat());
    assert!(
        is_well && text.contains("all decisions agree with the server"),
        "{text}"
    );
    let (is_well, text) = gemmule(&[&replay[..], &["--scheduler", "no-batch"]].concat());
    assert!(!is_well && text.contains("but the trace has"), "{text}");

    // Measuring a server that no longer runs is an error.
    let gone = [
        "bench",
        "serve",
        &url,
        "--closed",
        "1",
        "--seconds",
        "0.2",
        "--warm-up",
        "0",
    ];
    let (is_well, text) = gemmule(&gone);
    assert!(!is_well && text.contains("no connection"), "{text}");
    for (url, problem) in [
        ("https://127.0.0.1:1", "does not begin with http://"),
        ("http://no host", "is not a URL"),
    ] {
        let (is_well, text) = gemmule(&["bench", "serve", url, "--rate", "1"]);
        assert!(!is_well && text.contains(problem), "{text}");
    }
}

#[test]
fn a_queue_is_measured_beside_its_engine() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (table, report) = (path("costs"), path("report"));
    fs::write(&table, costs().to_ron().unwrap()).unwrap();
    let weights = checkpoint("st-mean");
    let (is_well, text) = gemmule(&[
        "bench",
        "serve",
        "--in-process",
        "--weights",
        weights.to_str().unwrap(),
        "--device",
        "cpu",
        "--costs",
        &table,
        "--closed",
        "8",
        "--seconds",
        "0.5",
        "--warm-up",
        "0.1",
        "--lengths",
        "fixed:6",
        "--json",
        &report,
    ]);
    assert!(is_well && text.contains("the engine alone"), "{text}");
    let report: Value = serde_json::from_str(&fs::read_to_string(&report).unwrap()).unwrap();
    assert_eq!(report["statuses"]["200"], report["sent"]);
    assert!(report["share"].as_f64().unwrap() > 0.0, "{report}");
}

#[test]
fn a_load_is_told_where_it_cannot_be_compared_with_the_engine_alone() {
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report");
    let weights = checkpoint("writer");
    let asked = |more: &[&str]| -> (String, Value) {
        let usual = [
            "bench",
            "serve",
            "--in-process",
            "--device",
            "cpu",
            "--route",
            "completions",
            "--seconds",
            "1",
            "--warm-up",
            "0.1",
            "--ids",
            "50",
            "--weights",
            weights.to_str().unwrap(),
            "--json",
            report.to_str().unwrap(),
        ];
        let (is_well, text) = gemmule(&[&usual, more].concat());
        assert!(is_well, "{text}");
        let report = serde_json::from_str(&fs::read_to_string(&report).unwrap()).unwrap();
        (text, report)
    };
    // Prompts of the mean length and 200 new tokens together exceed the model's positions. Shorter prompts fit.
    let long = asked(&[
        "--closed",
        "4",
        "--lengths",
        "uniform:2,254",
        "--new",
        "200",
    ]);
    let open = asked(&["--rate", "20", "--lengths", "fixed:4", "--new", "4"]);
    assert!(!open.1["target"].as_str().unwrap().contains("KV cache"));
    for ((text, report), words) in [(long, "200"), (open, "give their number with --closed")] {
        let problem = report["offline_problem"].as_str().unwrap();
        assert!(problem.contains(words), "{problem}");
        let told = format!("the engine alone was not measured: {problem}\n");
        assert!(
            text.contains(&told) && text.contains(" requests/s, "),
            "{text}"
        );
        assert!(report["answered"].as_u64().unwrap() > 0, "{report}");
        assert!(report["latency"]["p50"].as_f64().unwrap() > 0.0);
        assert!(report["share"].is_null(), "{report}");
    }
}

#[test]
fn a_writer_is_measured_with_a_cache_in_fp8() {
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report");
    let weights = checkpoint("writer");
    let usual = [
        "bench",
        "serve",
        "--in-process",
        "--device",
        "cpu",
        "--kv-dtype",
        "fp8",
        "--closed",
        "2",
        "--seconds",
        "0.5",
        "--warm-up",
        "0.1",
        "--lengths",
        "fixed:4",
        "--new",
        "4",
        "--ids",
        "50",
        "--weights",
        weights.to_str().unwrap(),
        "--json",
        report.to_str().unwrap(),
    ];
    let (is_well, text) = gemmule(&[&usual[..], &["--route", "completions"]].concat());
    assert!(is_well && text.contains("the engine alone"), "{text}");
    let report: Value = serde_json::from_str(&fs::read_to_string(&report).unwrap()).unwrap();
    let target = report["target"].as_str().unwrap();
    assert!(target.ends_with("KV cache in e4m3"), "{target}");
    assert!(report["answered"].as_u64().unwrap() > 0, "{report}");
    let (is_well, text) = gemmule(&usual);
    let problem = "--kv-dtype fp8 is for models that generate text";
    assert!(!is_well && text.contains(problem), "{text}");
}

#[test]
fn costs_of_a_card_that_is_not_there_are_marked_as_estimated() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("costs.ron");
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/models/configs/bert-base.json");
    let (is_well, text) = gemmule(&[
        "bench",
        "costs",
        "bert",
        "--config",
        config,
        "--card",
        "h200",
        "--estimated",
        "--to",
        table.to_str().unwrap(),
    ]);
    assert!(is_well, "{text}");
    let text = fs::read_to_string(&table).unwrap();
    assert!(text.starts_with("// estimated by the cost model of NVIDIA H200, not measured: bert"));
    let table = gemmule::schedule::CostTable::parse(&text).unwrap();
    // For comparison: on an H200, batches of about 4,900 tokens took 1.46 to 1.61 ms.
    let at = table.packed.x.iter().position(|&x| x > 4_000.0).unwrap();
    let micros = table.packed.values[at][3];
    assert!((1_000.0..1_800.0).contains(&micros), "{micros}");
}
