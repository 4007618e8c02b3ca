use clap::Parser;
use gemmule::kernels::trial::Difference;

use super::{problem::Work, report::*, *};
use crate::peers::PeerTime;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

fn args(words: &[&str]) -> Args {
    Cli::try_parse_from([&["bench"], words].concat())
        .unwrap()
        .args
}

/// Returns the default card, and one with Hopper instructions.
fn cards() -> [Launched; 2] {
    let hopper = Machine::of_capability((9, 0)).unwrap().unwrap();
    [Machine::usual().unwrap(), hopper].map(|machine| Launched::new(machine, None))
}

/// Returns the problems that these arguments select, on the default card.
fn selected(words: &[&str]) -> Vec<Problem> {
    let [usual, _] = cards();
    problems(&args(words), &usual).unwrap()
}

fn all() -> Vec<Problem> {
    selected(&[])
}

#[test]
fn work_is_the_minimum_of_an_operator() {
    let f16 = DType::F16;
    let softmax = Task::Softmax {
        batch: 20,
        length: 500,
        heads: 12,
    };
    // 120,000 rows of 500 values in f16, read and written.
    assert_eq!(softmax.work(f16), Work::Bytes(240_000_000.0));
    let rows = |rows, width| Task::BiasResidualLayerNorm { rows, width };
    assert_eq!(
        rows(1229, 768).work(f16),
        Work::Bytes(3.0 * 2.0 * 943_872.0)
    );
    assert_eq!(rows(1, 8).work(DType::F32), Work::Bytes(96.0));
    let layernorm = Task::LayerNorm {
        rows: 10,
        width: 768,
    };
    assert_eq!(layernorm.work(f16), Work::Bytes(30_720.0));
    let attention = |causal| Task::Attention {
        set: "two".to_owned(),
        heads: 12,
        kv_heads: 12,
        head: 64,
        causal,
        window: None,
        lens: vec![10, 20],
    };
    // 4·(100 + 400)·768 operations: only pairs of tokens of the same sequence count.
    assert_eq!(attention(false).work(f16), Work::Flop(1_536_000.0));
    // In causal attention, a token attends only to itself and to earlier tokens. Sequences of 10 and 20 tokens therefore have 55 and 210
    // pairs of a query and a key.
    assert_eq!(attention(true).work(f16), Work::Flop(814_080.0));
    let cached = |new| Task::CachedAttention {
        heads: 4,
        kv_heads: 2,
        head: 64,
        sequences: 3,
        new,
        keys: 10,
        window: None,
        e4m3: false,
    };
    // A window of 3 includes keys at distances of up to 3. In sequences of 10 and 20 tokens, 10 and 20 pairs of a query and a key are at
    // distance 0, and 9 + 8 + 7 = 24 and 19 + 18 + 17 = 54 pairs have an earlier key. Causal attention has 10 + 24 + 20 + 54 = 108 pairs.
    // Full attention also has the same number of pairs with a later key: 10 + 48 + 20 + 108 = 186.
    for (causal, pairs) in [(true, 108.0), (false, 186.0)] {
        let mut windowed = attention(causal);
        if let Task::Attention { window, .. } = &mut windowed {
            *window = Some(3);
        }
        assert_eq!(windowed.work(f16), Work::Flop(4.0 * pairs * 768.0));
    }
    // With one new token, the work is the bytes of the keys and values of both key heads. With three new tokens, there are 8 + 9 + 10 pairs
    // of a query and a key for each head.
    assert_eq!(cached(1).work(f16), Work::Bytes(15_360.0));
    assert_eq!(cached(3).work(f16), Work::Flop(4.0 * 3.0 * 27.0 * 256.0));
    let gemm = Task::GemmBiasGelu {
        rows: 10,
        n: 3072,
        k: 768,
    };
    assert_eq!(gemm.work(f16), Work::Flop(47_185_920.0));
    assert_eq!(gemm.work(f16).rate(1.0), 47.18592);
    assert_eq!(layernorm.work(f16).rate(2.0), 15.36);
}

#[test]
fn every_problem_starts_with_its_pick_and_has_valid_kernels() {
    for words in [&[][..], &["--dtype", "f32"], &["--dtype", "bf16"]] {
        let both = cards().map(|card| problems(&args(words), &card).unwrap());
        assert!(both.iter().all(|problems| problems.len() > 100));
        for problem in both.iter().flatten() {
            let name = format!("{} {}", problem.task.op(), problem.task);
            assert!(problem.contenders[0].picked, "{name}");
            assert_eq!(
                problem.contenders.iter().filter(|c| c.picked).count(),
                1,
                "{name}"
            );
            let mut labels: Vec<&str> = problem.contenders.iter().map(|c| c.label).collect();
            labels.sort_unstable();
            assert!(labels.is_sorted_by(|a, b| a < b), "{name}: {labels:?}");
            let extents = problem.case.extents().unwrap();
            let shapes = |chain: &gemmule::kernels::chain::Chain| {
                let of = |&t: &usize| chain.tensors[t].shape.elements().eval(&extents);
                chain.results.iter().map(of).collect::<Vec<_>>()
            };
            let first = shapes(&problem.contenders[0].chain);
            for contender in &problem.contenders {
                let n_launches = contender.label.split(", ").count();
                assert_eq!(
                    contender.chain.launches.len(),
                    n_launches,
                    "{}",
                    contender.label
                );
                assert_eq!(
                    shapes(&contender.chain),
                    first,
                    "{name} {}",
                    contender.label
                );
            }
        }
    }
}

#[test]
fn figure_5_has_every_number_of_rows_and_both_variances() {
    let problems = selected(&["--only", "softmax,layernorm"]);
    let timed = |op: &str, label: &str| {
        let of_op = problems.iter().filter(|p| p.task.op() == op);
        of_op
            .filter(|p| p.contenders.iter().any(|c| c.label == label))
            .count()
    };
    for op in ["softmax", "layernorm", "bias_residual_layernorm"] {
        for label in ["X=1", "X=2", "X=4"] {
            assert!(timed(op, label) > 4, "{op} {label}: {}", timed(op, label));
        }
    }
    assert!(timed("softmax", "a block a row") > 1 && timed("softmax", "streamed") == 7);
    assert_eq!(
        (
            timed("layernorm", "two passes"),
            timed("bias_residual_layernorm", "two passes")
        ),
        (8, 18)
    );
    assert_eq!(
        timed("bias_residual_layernorm", "add_bias, add, layernorm"),
        18
    );
}

#[test]
fn unfused_kernels_use_the_operands_of_the_fused_kernel() {
    for problem in all() {
        // Names of the tensors that are filled before the first launch.
        let operands = |c: &problem::Contender| {
            let filled = c.chain.tensors.iter().filter(|t| t.fill.is_some());
            let mut names: Vec<&str> = filled.map(|t| t.name).collect();
            names.retain(|n| *n != "pair_offsets");
            names.sort_unstable();
            names
        };
        let first = operands(&problem.contenders[0]);
        for contender in &problem.contenders[1..] {
            assert_eq!(operands(contender), first, "{}", contender.label);
        }
    }
}

#[test]
fn only_chooses_families_and_an_unknown_word_names_the_known_ones() {
    let chosen = selected(&["--only", "softmax,gemm"]);
    let ops: Vec<&str> = chosen.iter().map(|p| p.task.op()).collect();
    assert!(ops.contains(&"softmax") && ops.contains(&"gemm_bias_gelu"));
    assert!(!ops.contains(&"attention") && !ops.contains(&"layernorm"));
    let error = Cli::try_parse_from(["bench", "--only", "softmx"])
        .map(|_| ())
        .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("did you mean `softmax`?"), "{text}");
    assert!(
        text.contains("softmax, layernorm, attention, cached, windows, gemm"),
        "{text}"
    );
}

#[test]
fn requests_that_cannot_be_timed_give_the_reason() {
    let error = run(args(&["--device", "cpu", "--peers", "off"])).unwrap_err();
    assert!(error.to_string().contains("--device cuda:N"), "{error}");
    // No machine has this many devices.
    let error = run(args(&["--device", "cuda:4096", "--peers", "off"])).unwrap_err();
    assert!(!error.to_string().is_empty());
}

#[test]
fn the_request_has_the_format_of_the_script() {
    let problems = all();
    let json = |op: &str| {
        let problem = problems.iter().find(|p| p.task.op() == op).unwrap();
        serde_json::to_value(&problem.task).unwrap()
    };
    let script = peers::KERNELS.text;
    for op in [
        "softmax",
        "layernorm",
        "bias_residual_layernorm",
        "attention",
        "cached_attention",
        "gemm",
        "gemm_bias_gelu",
    ] {
        assert_eq!(json(op)["op"], op);
        assert!(script.contains(&format!("def {op}(p, dtype)")), "{op}");
    }
    for (op, fields) in [
        ("softmax", &["batch", "length", "heads"][..]),
        ("layernorm", &["rows", "width"]),
        (
            "attention",
            &["lens", "heads", "kv_heads", "head", "causal"],
        ),
        (
            "cached_attention",
            &["heads", "kv_heads", "head", "sequences", "new", "keys"],
        ),
        ("gemm", &["rows", "n", "k"]),
    ] {
        for field in fields {
            assert!(!json(op)[field].is_null(), "{op} {field}");
            assert!(script.contains(&format!("p[\"{field}\"]")), "{op} {field}");
        }
    }
}

fn measured() -> (Vec<Problem>, Vec<Row>) {
    let problems = selected(&["--only", "gemm"]);
    let problems: Vec<Problem> = problems
        .into_iter()
        .filter(|p| p.contenders.len() == 3)
        .collect();
    let lap = |us, worst, max| Lap {
        us,
        difference: Some(Difference {
            worst,
            max,
            ..Difference::default()
        }),
    };
    let laps = vec![
        vec![
            lap(10.0, 0.5, 0.1),
            lap(12.0, 7.0, 3e-3),
            lap(16.0, 9.0, 1e-2)
        ];
        problems.len()
    ];
    let peer = |who: &str, us| PeerTime {
        item: 1,
        who: who.to_owned(),
        us,
    };
    let peers = [
        peer("torch", 20.0),
        peer("torch.compile", 15.0),
        peer("cuBLAS, product only", 5.0),
    ];
    let rows = rows(&problems, &laps, &peers, DType::F16);
    (problems, rows)
}

#[test]
fn the_ratio_is_to_the_best_peer_that_does_the_whole_task() {
    let (_, rows) = measured();
    let of = |problem: usize| rows.iter().filter(move |r| r.problem == problem);
    assert!(of(0).all(|r| r.ratio_to_best_peer.is_none()));
    let ratios: Vec<f64> = of(1).map(|r| r.ratio_to_best_peer.unwrap()).collect();
    assert_eq!(ratios, [1.5, 1.25, 0.9375, 0.75, 1.0, 3.0]);
    assert_eq!(of(1).filter(|r| r.picked).count(), 1);
    let agrees: Vec<Option<bool>> = of(1).map(|r| r.agrees).collect();
    assert_eq!(agrees[..3], [Some(true), Some(true), Some(false)]);
    assert_eq!(agrees[3..], [None; 3]);
}

#[test]
fn every_problem_is_in_one_figure_and_figures_draw() {
    let problems = all();
    let laps: Vec<Vec<Lap>> = problems
        .iter()
        .map(|p| {
            let lap = Lap {
                us: 3.0,
                difference: None,
            };
            vec![lap; p.contenders.len()]
        })
        .collect();
    let rows = rows(&problems, &laps, &[], DType::F16);
    let figures = figures(&problems, &rows, "a card", DType::F16);
    let n_groups: usize = figures.iter().map(|(_, f)| f.groups.len()).sum();
    assert_eq!((figures.len(), n_groups), (10, problems.len()));
    for (name, figure) in figures {
        assert!(figure.svg().unwrap().starts_with("<svg"), "{name}");
    }
}

#[test]
fn a_missing_peer_is_a_gap_in_the_figure() {
    let (problems, rows) = measured();
    let (_, figure) = figures(&problems, &rows, "a card", DType::F16).remove(0);
    let names: Vec<&str> = figure.series.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(names[0], "gemmule: gemm_bias_gelu");
    assert_eq!(
        names[3..],
        ["torch", "torch.compile", "cuBLAS, product only"]
    );
    assert!(figure.series[3].values[0].is_none() && figure.series[3].values[1].is_some());
}

#[test]
fn the_picked_kernel_is_the_one_that_a_model_launches() {
    use crate::launched::ChosenBy;
    let [usual, hopper] = cards().map(|card| problems(&args(&[]), &card).unwrap());
    let template = |problem: &Problem| {
        let picked = &problem.contenders[0].chain.launches[0].kernel;
        picked.as_kernel().template()
    };
    let mut n_of_hopper = 0;
    for (usual, hopper) in usual.iter().zip(&hopper) {
        assert_eq!(usual.task, hopper.task);
        let by = match usual.task {
            Task::Softmax { .. } | Task::Attention { .. } | Task::CachedAttention { .. } => {
                ChosenBy::Rule
            }
            _ => ChosenBy::CostModel,
        };
        for problem in [usual, hopper] {
            assert_eq!(problem.contenders[0].chosen_by, Some(by));
            assert!(
                problem.contenders[1..]
                    .iter()
                    .all(|c| c.chosen_by.is_none())
            );
        }
        assert!(!template(usual).contains("wgmma"), "{}", usual.task);
        n_of_hopper += usize::from(template(usual) != template(hopper));
    }
    assert!(n_of_hopper > 50, "{n_of_hopper}");
}

#[test]
fn few_tokens_have_an_additional_kernel_on_hopper() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sets.json");
    let sets = r#"{"encoder": [{"name": "few", "lens": [7, 20, 1]}]}"#;
    std::fs::write(&file, sets).unwrap();
    let args = args(&["--only", "attention", "--workloads", file.to_str().unwrap()]);
    let labels = cards().map(|card| {
        let of_bert = problems(&args, &card).unwrap().remove(0);
        let labels: Vec<&str> = of_bert.contenders.iter().map(|c| c.label).collect();
        labels.join("; ")
    });
    let rest = "mha_online; grouped scores, reduction, context; scores, softmax, context";
    assert_eq!(labels[0], format!("mha_short; {rest}"));
    assert_eq!(
        labels[1],
        format!("mha_split_keys; mha_short of tight length; mha_wgmma; {rest}")
    );
}

#[test]
fn timings_of_another_card_or_compiler_are_rejected() {
    let here = TimedOn {
        card: "NVIDIA H200".to_owned(),
        capability: (9, 0),
        sms: 132,
        nvrtc: (13, 0),
    };
    assert!(refusal(here.clone(), here.clone()).is_none());
    let part = TimedOn {
        sms: 16,
        nvrtc: (12, 8),
        ..here.clone()
    };
    let error = refusal(part, here.clone()).unwrap().to_string();
    assert!(
        error.contains("16 SMs") && error.contains("132 SMs"),
        "{error}"
    );
    let older = TimedOn {
        nvrtc: (12, 8),
        ..here.clone()
    };
    let error = refusal(older, here).unwrap().to_string();
    assert!(error.contains("NVRTC 12.8"), "{error}");
}
