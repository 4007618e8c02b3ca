//! Errors in shapes and in expectations after the passes.

use std::collections::BTreeSet;

use super::{TINY, build, changed, refused};
use crate::{
    graph::{Graph, Op},
    model::expect::counted,
    ops::{Activation, BatchInput, Epilogue, PoolWeights},
    tensor::{Format, SequenceEnd},
};

macro_rules! refuses {
    ($($name:ident: $source:expr;)*) => {$(
        #[test]
        fn $name() {
            insta::assert_snapshot!(refused(build(&$source)));
        }
    )*};
}

/// Returns the test description `TINY` with the second statement of its loop replaced by `op`.
fn last(op: &str) -> String {
    changed(r#"add(a: "x", b: "y")"#, op)
}

/// Returns the test description `TINY` with attention. `fields` are additional fields of its `softmax`.
fn attending(fields: &str) -> String {
    let statements = format!(
        r#"        Let("h", split_heads(x: "x", heads: 2)),
        Let("s", matmul(a: "h", b: "h", transpose_b: true)),
        Let("p", softmax(x: "s"{fields})),
        Let("c", matmul(a: "p", b: "h")),
        Let("n", merge_heads(x: "c")),
    ],
    outputs"#
    );
    changed("    ],\n    outputs", &statements).replace("\"out\": \"x\"", "\"out\": \"n\"")
}

#[test]
fn a_softmax_has_an_optional_window_and_bias() {
    let fields = r#", causal: true, window: "4 - 1", bias: relative_bias(table: "biases", buckets: 8, reach: 20, bidirectional: true)"#;
    let graph = build(&attending(fields)).expect("it is right").graph.text();
    let line = "p = softmax(scale=1, causal, window=3, bias up to 20) s @biases : [2, pairs]";
    assert!(graph.contains(line), "{graph}");
    let graph = build(&attending(", bias: alibi"))
        .expect("it is right")
        .graph;
    assert!(
        graph.text().contains("p = softmax(scale=1, slopes) s"),
        "{graph}"
    );
    let graph = build(&attending(", bias: alibi(scale: \"1 / sqrt(4)\")"));
    let graph = graph.expect("it is right").graph.text();
    assert!(graph.contains("slopes) s @slopes.2.times.0.5"), "{graph}");
}

#[test]
fn a_norm_of_heads_has_a_weight_for_each_head() {
    let norm = |heads: u32, more: &str| {
        last(&format!(
            r#"layer_norm(x: "y", weight: "w", eps: 1e-5, heads: {heads}{more})"#
        ))
    };
    let graph = build(&norm(2, ", interleaved: 4")).expect("it is right");
    let graph = graph.graph.text();
    assert!(
        graph.contains("head_layer_norm(eps=1e-5, heads=2) layer.0.y @w[4 in pairs]"),
        "{graph}"
    );
    let refusal = |source: String| refused(build(&source));
    assert!(refusal(norm(3, "")).contains("does not divide into 3 heads"));
    let odd = refusal(norm(2, ", interleaved: 3"));
    assert!(odd.contains("expected an even number up to 4"), "{odd}");
    let biased = refusal(norm(2, r#", bias: "b""#));
    assert!(biased.contains("a norm of heads has none"), "{biased}");
    let alone = r#"layer_norm(x: "y", weight: "w", eps: 1e-5, interleaved: 2)"#;
    let alone = refusal(last(alone));
    assert!(alone.contains("`heads` beside it"), "{alone}");
    let raised = refusal(norm(2, ", plus_one: true"));
    assert!(raised.contains("is read without changes"), "{raised}");
    let bare = refusal(last(r#"layer_norm(x: "y", eps: 1e-5, heads: 2)"#));
    assert!(bare.contains("a norm of heads has one"), "{bare}");
}

#[test]
fn a_norm_of_rows_needs_no_weight() {
    let graph = |more: &str| {
        let model = build(&last(&format!(r#"layer_norm(x: "y", eps: 1e-5{more})"#)));
        model.expect("it is right").graph.text()
    };
    let bare = graph("");
    assert!(
        bare.contains("layer_norm(eps=1e-5) layer.0.y @ones.8 @zeros.8"),
        "{bare}"
    );
    let raised = graph(r#", weight: "w", plus_one: true"#);
    assert!(
        raised.contains("layer_norm(eps=1e-5) layer.0.y @w @zeros.8"),
        "{raised}"
    );
    let alone = last(r#"layer_norm(x: "y", eps: 1e-5, plus_one: true)"#);
    let alone = refused(build(&alone));
    assert!(alone.contains("`weight` beside it"), "{alone}");
}

#[test]
fn a_softmax_has_optional_sinks() {
    let text = |fields| build(&attending(fields)).expect("it is right").graph.text();
    let graph = text(r#", sinks: "sinks""#);
    let line = "p = softmax(scale=1, sinks) s @sinks : [2, pairs]";
    assert!(graph.contains(line), "{graph}");
    let graph = text(r#", window: 3, bias: alibi, sinks: "sinks""#);
    let line = "p = softmax(scale=1, window=3, slopes, sinks) s ";
    assert!(graph.contains(line), "{graph}");
}

refuses! {
    sums_of_two_shapes_are_refused_in_words: changed(r#"out: "hidden""#, r#"out: "4 * hidden""#);
    heads_must_divide_the_width: last(r#"split_heads(x: "y", heads: 3)"#);
    heads_are_not_merged_before_they_are_split: last(r#"merge_heads(x: "y")"#);
    matmul_is_not_for_rows: last(r#"matmul(a: "x", b: "y")"#);
    softmax_is_of_scores: last(r#"softmax(x: "y")"#);
    a_bias_of_scores_is_one_of_two: attending(", bias: slopes");
    sinks_are_a_weight: attending(", sinks: 4");
    sinks_have_an_element_for_each_head: attending(r#", sinks: "table""#);
    a_relative_bias_has_fields: attending(r#", bias: relative_bias(buckets: 8)"#);
    buckets_of_two_sides_are_even_in_number: attending(
        r#", bias: relative_bias(table: "biases", buckets: 7, reach: 20, bidirectional: true)"#
    );
    buckets_reach_farther_than_those_of_one_distance: attending(
        r#", bias: relative_bias(table: "biases", buckets: 8, reach: 4, bidirectional: false)"#
    );
    log_probabilities_are_an_output: changed(
        "    ],\n    outputs",
        "        Let(\"p\", log_probability(x: \"x\")),\n        Let(\"n\", mean_pool(x: \"p\")),\n    ],\n    outputs"
    )
    .replace("\"out\": \"x\"", "\"out\": \"n\"");
    a_latent_variable_is_of_sequences: last(r#"draw(mean: "x", log_variance: "y")"#);
    pooled_rows_are_not_pooled_again: changed(
        "    ],\n    outputs",
        "        Let(\"m\", mean_pool(x: \"x\")),\n        Let(\"n\", first_token(x: \"m\")),\n    ],\n    outputs"
    )
    .replace("\"out\": \"x\"", "\"out\": \"n\"");
    scores_are_no_rows_to_normalize: changed(
        "    ],\n    outputs",
        r#"        Let("h", split_heads(x: "x", heads: 2)),
        Let("s", matmul(a: "h", b: "h", transpose_b: true)),
        Let("n", l2_normalize(x: "s", eps: 0.001)),
    ],
    outputs"#
    )
    .replace("\"out\": \"x\"", "\"out\": \"n\"");
    tokens_are_not_put_beside_sequences: changed(
        "    ],\n    outputs",
        r#"        Let("m", max_pool(x: "x")),
        Let("n", concat(of: ["m", "x"])),
    ],
    outputs"#
    )
    .replace("\"out\": \"x\"", "\"out\": \"n\"");
    what_is_put_side_by_side_is_no_wider_than_a_row:
        last(r#"concat(of: ["x", "y"])"#)
            .replace(r#"linear(x: "x", out: "hidden", weight: "layers.{i}.weight")"#, r#"relu(x: "x")"#)
            .replace(r#"Key("hidden_size")"#, "9000000");
    a_single_value_is_not_put_side_by_side: last(r#"concat(of: ["x"])"#);
    one_weight_has_one_shape: changed(
        r#"Let("x", add(a: "x", b: "y"))"#,
        r#"Let("x", linear(x: "y", out: "hidden + hidden", weight: "layers.{i}.weight"))"#
    );
    a_weight_that_changes_its_shape_between_layers_is_refused:
        last(r#"linear(x: "y", out: "3 * hidden", weight: "wider")"#)
            .replace("layers.{i}.weight", "shared");
    a_value_named_as_a_weight_is_refused: changed(r#"table: "table""#, r#"table: "x""#);
    a_model_without_tokens_is_refused: changed("token_ids", "positions");
}

#[test]
fn a_weight_read_twice_is_one_node() {
    let shared = TINY.replace("layers.{i}.weight", "shared");
    let model = build(&shared).expect("sharing is allowed");
    let weights = model.graph.topological().into_iter().filter(
        |&id| matches!(model.graph.op(id), Op::Weight(expr) if expr.stored()[0].0 == "shared"),
    );
    assert_eq!(weights.count(), 1);
}

#[test]
fn expectations_count_in_their_layer_and_in_the_whole() {
    let source = changed(
        "body: [",
        "expect: {\"launches\": 2, \"gemms\": 1, \"add\": 1}, body: [",
    )
    .replace(
        "default:",
        "expect: {\"launches\": 5, \"embedding\": 1, \"softmax\": 0},\n    default:",
    );
    let model = build(&source).expect("nothing is wrong with it");
    assert_eq!(model.expectations.len(), 2 * 3 + 3);
    model.check_expectations(&model.graph).expect("they hold");
    assert!(model.check_expectations(&Graph::new()).is_err());
}

#[test]
fn an_expectation_not_met_says_what_is_there() {
    let source = changed("body: [", "expect: {\"launches\": 1},\n        body: [");
    let model = build(&source).expect("nothing is wrong with it");
    insta::assert_snapshot!(refused(model.check_expectations(&model.graph)));
}

#[test]
fn an_iteration_that_no_output_needs_is_not_expected() {
    let source = changed("body: [", "expect: {\"launches\": 2}, body: [")
        .replace(
            "        Repeat",
            "        Let(\"early\", relu(x: \"x\")),\n        Repeat",
        )
        .replace("{\"out\": \"x\"}", "{\"out\": \"x\", \"early\": \"early\"}");
    let description = super::parse(&source).expect("nothing is wrong with it");
    let model = description.build(&super::tiny_config(), Some(&["early"]));
    assert!(
        model
            .expect("nothing is wrong with it")
            .expectations
            .is_empty()
    );
}

#[test]
fn the_countable_names_are_the_names_of_operators() {
    let eps = 1e-5;
    let counted = counted();
    let unique: BTreeSet<&String> = counted.iter().collect();
    assert_eq!(unique.len(), counted.len());
    let weights = [PoolWeights::Position, PoolWeights::RootLength];
    let mut ops = weights.map(Op::WeightedPool).to_vec();
    ops.extend([false, true].map(|bias| Op::BiasResidualLayerNorm { eps, bias }));
    ops.extend([false, true].map(|centered| Op::RmsNorm {
        eps,
        heads: 1,
        from: 0,
        centered,
    }));
    ops.extend([Op::Scale { by: 1.0 }, Op::MeanPoolNormalize { eps }]);
    ops.extend(Activation::ALL.map(Op::Activate));
    ops.extend(Activation::ALL.map(Op::Gate));
    for bias in [false, true] {
        for activation in Activation::ALL.map(Some).into_iter().chain([None]) {
            let epilogue = Epilogue::new(bias, activation);
            for epilogue in [epilogue, epilogue.with_residual()] {
                ops.push(Op::Linear { epilogue });
            }
        }
    }
    for op in &ops {
        assert!(counted.contains(&op.name().into_owned()), "{op}");
    }
    for op in [Op::Input(BatchInput::TokenIds), Op::Quantize(Format::FP8)] {
        assert!(!op.is_compute() && !counted.contains(&op.name().into_owned()));
    }
}

#[test]
fn previous_ids_have_a_first_id_of_the_table_and_no_cache() {
    let ids = |with: &str| changed(r#"ids: "token_ids""#, with);
    let model = build(&ids(r#"ids: "previous_ids", first: 9"#)).expect("9 has a row");
    assert!(
        model
            .graph
            .text()
            .contains("previous_ids = input(PreviousIds { first: 9 })")
    );
    assert_eq!(model.vocab, 10);
    let told = |source: &str, part: &str| {
        let text = refused(build(source));
        assert!(text.contains(part), "{text}");
    };
    told(
        &ids(r#"ids: "previous_ids", first: 10"#),
        "the id before the first token",
    );
    told(&ids(r#"ids: "previous_ids""#), "`first`");
    told(
        &ids(r#"ids: "token_ids", first: 1"#),
        "`first` of `embedding`",
    );
    let both = ids(r#"ids: "previous_ids", first: 9"#).replace(
        r#"linear(x: "x", out: "hidden", weight: "layers.{i}.weight")"#,
        r#"embedding(ids: "previous_ids", first: 8, rows: "vocab", width: "hidden", table: "table")"#,
    );
    told(&both, "as elsewhere");
}

#[test]
fn a_last_token_may_have_a_required_id() {
    let source = changed(r#"outputs: {"out": "x"}"#, r#"outputs: {"out": "last"}"#).replace(
        "        ]),\n",
        "        ]),\n        Let(\"last\", last_token(x: \"x\", is: 3)),\n",
    );
    let model = build(&source).expect("it is right");
    assert_eq!(model.end, Some(SequenceEnd::Required(3)));
    let text = refused(build(&source.replace("is: 3", "is: 3, end: 4")));
    assert!(text.contains("`is` of `last_token`"), "{text}");
    let model = build(&source.replace("is: 3", "padding: 0")).expect("it is right");
    assert_eq!(model.end, Some(SequenceEnd::BeforePadding(0)));
    let model = build(&source.replace("is: 3", "is_not: 0")).expect("it is right");
    assert_eq!(model.end, Some(SequenceEnd::NotPadding(0)));
}
