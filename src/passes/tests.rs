//! Properties of all passes on whole models. Tests of a single pass are in its file.

pub(crate) mod interpret;
pub(crate) mod models;

use proptest::prelude::*;

use self::{
    interpret::{Batch, evaluate},
    models::{Builder, Decoder, Encoder},
};
use super::*;
use crate::{
    graph::{NodeId, Op},
    tensor::{DType, Extents},
};

fn names() -> Vec<&'static str> {
    all().iter().map(|pass| pass.name()).collect()
}

fn without(names: impl IntoIterator<Item = &'static str>) -> Options {
    Options {
        without: names.into_iter().map(str::to_owned).collect(),
        ..Options::default()
    }
}

fn only(name: &str) -> Options {
    assert!(names().contains(&name));
    without(names().into_iter().filter(|&n| n != name))
}

/// Checks that every output and every remaining named value is unchanged.
#[track_caller]
fn assert_same_values(unfused: &Graph, fused: &Graph) {
    let batch = Batch::new(&[3, 1, 5, 2]);
    let (want, got) = (evaluate(unfused, &batch), evaluate(fused, &batch));
    let names =
        |graph: &Graph| -> Vec<String> { graph.outputs().iter().map(|(n, _)| n.clone()).collect() };
    assert_eq!(names(unfused), names(fused));
    for ((name, before), (_, after)) in unfused.outputs().iter().zip(fused.outputs()) {
        let name_of = |graph: &Graph, id: NodeId| graph.node(id).name.clone();
        let before = name_of(unfused, *before);
        assert_eq!(before, name_of(fused, *after), "output {name}");
    }
    for (name, got) in &got {
        let Some(want) = want.get(name) else { continue };
        assert_eq!(got.len(), want.len(), "`{name}`");
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            // A negated comparison, `!(… > …)`, would accept NaN.
            assert!(
                (got - want).abs() <= 1e-9 * want.abs().max(1.0),
                "`{name}`[{i}] is {got}, unfused {want}"
            );
        }
    }
}

/// Runs one pass alone on `graph`, and checks that the values are unchanged.
#[track_caller]
pub(super) fn alone(pass: &str, graph: &Graph) -> (Graph, Report) {
    let (fused, report) = optimize(graph.clone(), &only(pass)).unwrap();
    assert_same_values(graph, &fused);
    (fused, report)
}

/// Returns the graph before and after one pass, and the pass's report, for a snapshot.
#[track_caller]
pub(super) fn story(pass: &str, graph: Graph) -> String {
    let (fused, report) = alone(pass, &graph);
    format!("{graph}\n=== {pass} ===\n\n{fused}\n{report}")
}

/// Returns the refusals of one pass on `graph`, and checks that the graph is unchanged.
#[track_caller]
pub(super) fn refusals(pass: &str, graph: Graph) -> String {
    let (fused, report) = alone(pass, &graph);
    assert_eq!(graph.text(), fused.text());
    report.to_string()
}

fn ops(graph: &Graph, prefix: &str) -> Vec<String> {
    let ids = graph.topological().into_iter();
    let ids = ids.filter(|&id| graph.op(id).is_compute());
    ids.filter(|&id| graph.node(id).name.starts_with(prefix))
        .map(|id| graph.op(id).name().into_owned())
        .collect()
}

#[test]
fn a_layer_is_seven_launches() {
    let graph = Encoder::SMALL.build();
    let unfused = graph.n_launches();
    let (fused, report) = optimize(graph, &Options::default()).unwrap();
    for layer in ["layers.0.", "layers.1."] {
        assert_eq!(
            ops(&fused, layer),
            [
                "bias_linear",
                "attention",
                "linear",
                "bias_residual_layer_norm",
                "bias_gelu_linear",
                "linear",
                "bias_residual_layer_norm",
            ]
        );
    }
    // One launch for the embeddings, seven per layer, two for the pooler and one for the sentence embedding.
    assert_eq!(fused.n_launches(), 1 + 2 * 7 + 2 + 1);
    assert_eq!(
        report.launches_saved(),
        unfused as i64 - fused.n_launches() as i64
    );
    insta::assert_snapshot!("encoder", fused.text());
}

#[test]
fn every_pass_fuses_something_in_an_encoder_or_a_decoder() {
    let graphs = [
        Encoder::SMALL.build(),
        Decoder::SMALL.build(),
        Decoder {
            capped: true,
            ..Decoder::SMALL
        }
        .build(),
        Encoder::SMALL.pooled(),
    ];
    for name in names() {
        let fused = graphs.each_ref().map(|graph| {
            let (_, report) = alone(name, graph);
            let mut fused = report.entries.iter();
            fused.any(|e| matches!(e, Entry::Fused { pass, .. } if *pass == name))
        });
        // Without `fold_scale`, a scale remains between the scores and the softmax.
        assert_eq!(fused.contains(&true), name != "fuse_attention", "{name}");
    }
}

#[test]
fn a_layer_that_normalizes_first_has_four_gemms() {
    let graph = Decoder::SMALL.build();
    let (fused, report) = optimize(graph.clone(), &Options::default()).unwrap();
    assert_same_values(&graph, &fused);
    for layer in ["layers.0.", "layers.1."] {
        assert_eq!(
            ops(&fused, layer),
            [
                "rms_norm",
                "linear",
                "rms_norm",
                "rotary",
                "rms_norm",
                "rotary",
                "cache",
                "cache",
                "attention",
                "residual_linear",
                "rms_norm",
                "linear",
                "silu_gate",
                "residual_linear",
            ]
        );
    }
    assert_eq!(
        report.launches_saved(),
        graph.n_launches() as i64 - fused.n_launches() as i64
    );
    insta::assert_snapshot!("decoder", fused.text());
}

#[test]
fn each_pass_switched_off_keeps_the_values() {
    let graphs = [
        Encoder::SMALL.build(),
        Decoder::SMALL.build(),
        Encoder::SMALL.pooled(),
    ];
    for (graph, name) in graphs
        .iter()
        .flat_map(|graph| names().into_iter().map(move |name| (graph, name)))
    {
        let (fused, report) = optimize(graph.clone(), &without([name])).unwrap();
        assert_same_values(graph, &fused);
        let ran = |entry: &Entry| match entry {
            Entry::Fused { pass, .. }
            | Entry::Refused { pass, .. }
            | Entry::Quantized { pass, .. } => *pass == name,
        };
        assert!(!report.entries.iter().any(ran), "{name}");
    }
}

#[test]
fn attention_is_fused_without_the_head_layout() {
    let graph = Encoder::SMALL.build();
    let (fused, _) = optimize(graph, &without(["fold_head_layout"])).unwrap();
    let ops = ops(&fused, "layers.0.");
    let has = |name: &str| ops.iter().any(|op| op == name);
    assert!(has("attention") && !has("merge_heads"));
}

#[test]
fn layers_that_share_weights_share_the_stacked_ones() {
    let graph = Encoder {
        shared: true,
        ..Encoder::SMALL
    };
    let graph = graph.build();
    let (fused, _) = optimize(graph.clone(), &Options::default()).unwrap();
    assert_same_values(&graph, &fused);
    let stacked = fused
        .topological()
        .into_iter()
        .filter(|&id| matches!(fused.op(id), Op::Weight(expr) if expr.stored().len() == 3));
    assert_eq!(stacked.count(), 2, "one weight, one bias");
}

#[test]
fn an_unknown_pass_is_an_error_that_lists_the_passes() {
    let options = Options {
        without: BTreeSet::from(["fuse_everything".to_owned()]),
        ..Options::default()
    };
    let error = optimize(Encoder::SMALL.build(), &options).unwrap_err();
    insta::assert_snapshot!(error, @"no pass is named `fuse_everything`; the passes are hoist_pooled_token, fold_soft_cap, fold_scale, merge_projections, fold_head_layout, fuse_attention, fuse_embedding_layer_norm, fuse_bias_residual_layer_norm, fuse_gate, fuse_bias_activation, fuse_residual, fuse_pool_normalize, quantize_inputs");
}

#[test]
fn an_unsound_input_graph_is_not_blamed_on_a_pass() {
    let mut b = Builder::default();
    let x = b.tokens(16);
    b.graph.add("tokens", Op::Add, &[x, x]).unwrap();
    let mut graph = b.graph;
    let twice = graph.consumers(x)[0];
    graph.add_output("y", twice);
    let error = optimize(graph, &Options::default()).unwrap_err();
    insta::assert_snapshot!(error, @"the graph was unsound before the first pass: two values have the name `tokens`; rename one of them");
}

#[test]
fn the_observer_sees_the_graph_after_each_pass_that_runs() {
    let graph = Encoder::SMALL.build();
    let mut seen = Vec::new();
    let options = without(["fuse_attention"]);
    let (fused, _) = optimize_observed(graph, &options, |pass, graph| {
        seen.push((pass, graph.text()));
    })
    .unwrap();
    let mut expected = names();
    expected.retain(|&n| n != "fuse_attention");
    assert_eq!(seen.iter().map(|s| s.0).collect::<Vec<_>>(), expected);
    assert_eq!(seen[expected.len() - 1].1, fused.text());
}

#[test]
fn bytes_saved_are_the_reduction_of_a_batchs_traffic() {
    let mut b = Builder::default();
    let x = b.tokens(16);
    let mean = b.add("mean", Op::MeanPool, &[x]);
    b.add("y", Op::L2Normalize { eps: 1e-12 }, &[mean]);
    let (_, report) = alone("fuse_pool_normalize", &b.with_outputs(&["y"]));
    // The means of the three sequences are no longer written to memory and read again.
    let extents = Extents::of(&[4, 5, 6]).unwrap();
    assert_eq!(
        report.bytes_saved(&extents, DType::F16),
        Some(2 * 3 * 16 * 2)
    );
    let huge = Extents {
        tokens: u64::MAX,
        ..extents
    };
    assert_eq!(report.bytes_saved(&huge, DType::F16), None);
}

#[test]
fn the_explanation_reads_well() {
    let mut graph = Encoder::SMALL.build();
    let mean = graph.topological();
    let mean = mean.into_iter().find(|&id| *graph.op(id) == Op::MeanPool);
    graph.add_output("average", mean.unwrap());
    let (_, report) = optimize(graph, &Options::default()).unwrap();
    let extents = Extents::of(&[17, 18, 52]).unwrap();
    insta::assert_snapshot!("explanation", report.explain(extents, DType::F16));
}

fn decoders() -> impl Strategy<Value = Decoder> {
    let head = prop_oneof![Just(4), Just(8), Just(12)];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (1..3u32, 1..3u32, 1..3u32, head, flags).prop_map(
        |(layers, kv_heads, group, head, (bias, normed, turned, capped))| Decoder {
            layers,
            kv_heads,
            group,
            head,
            bias,
            normed,
            turned,
            capped,
            ..Decoder::SMALL
        },
    )
}

fn encoders() -> impl Strategy<Value = Encoder> {
    let head = prop_oneof![Just(4), Just(8), Just(12)];
    (1..3u32, 1..4u32, head, any::<bool>(), any::<bool>()).prop_map(
        |(layers, heads, head, bias, shared)| Encoder {
            layers,
            heads,
            width: u64::from(heads) * head,
            inner: 10,
            bias,
            shared,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Checks that any subset of passes preserves the values of a graph, also with additional outputs and additional readers.
    #[test]
    fn fused_equals_unfused(
        mut graph in prop_oneof![
            encoders().prop_map(Encoder::build),
            encoders().prop_map(Encoder::pooled),
            decoders().prop_map(Decoder::build),
        ],
        off in proptest::sample::subsequence(names(), 0..=names().len()),
        outputs in proptest::collection::vec(any::<proptest::sample::Index>(), 0..3),
        readers in proptest::collection::vec(any::<proptest::sample::Index>(), 0..3),
    ) {
        let values: Vec<NodeId> = graph.topological().into_iter()
            .filter(|&id| graph.op(id).is_compute())
            .collect();
        for (i, at) in outputs.iter().enumerate() {
            graph.add_output(format!("extra.{i}"), *at.get(&values));
        }
        for (i, at) in readers.iter().enumerate() {
            let scale = Op::Scale { by: 2.0 };
            let reader = graph.add(format!("reader.{i}"), scale, &[*at.get(&values)]).unwrap();
            graph.add_output(format!("read.{i}"), reader);
        }
        let (fused, report) = optimize(graph.clone(), &without(off)).unwrap();
        assert_same_values(&graph, &fused);
        let saved = graph.n_launches() as i64 - fused.n_launches() as i64;
        prop_assert_eq!(report.launches_saved(), saved);
    }
}
