//! Errors in config.json and in sizes.

use serde_json::{Value, json};

use super::{build, changed, parse, refused, tiny_config};
use crate::{graph::Op, model::Description};

/// Returns the error of building the test description `TINY` with `value` for the key `key` of config.json. A null value counts as absent.
fn with(key: &str, value: Value) -> String {
    let mut config = tiny_config();
    config[key] = value;
    let description = parse(super::TINY).expect("nothing is wrong with it");
    refused(description.build(&config, None))
}

macro_rules! refuses {
    ($($name:ident: $text:expr;)*) => {$(
        #[test]
        fn $name() {
            insta::assert_snapshot!($text);
        }
    )*};
}

refuses! {
    a_dimension_without_a_value_names_the_key: with("hidden_size", Value::Null);
    a_number_in_quotes_is_refused: with("hidden_size", json!("768"));
    a_fraction_is_refused: with("hidden_size", json!(76.8));
    a_negative_size_is_refused: with("hidden_size", json!(-8));
    a_size_of_zero_is_refused: with("hidden_size", json!(0));
    a_size_beyond_32_bits_is_refused: with("vocab_size", json!(1u64 << 40));
    a_dimension_by_a_misspelled_key_names_the_key_that_is_there:
        refused(build(&changed("Key(\"hidden_size\")", "Key(\"hiden_size\")")));
    a_repeat_of_a_billion_is_refused: with("num_hidden_layers", json!(1_000_000_000));
    a_weight_too_large_for_any_memory_is_refused: {
        let source = changed("width: \"hidden\"", "width: 2000000000")
            .replace("rows: \"vocab\"", "rows: 2000000000");
        refused(build(&source))
    };
    a_config_that_is_no_object_is_refused: {
        let description = parse(super::TINY).expect("nothing is wrong with it");
        refused(description.build(&json!([1, 2]), None))
    };
    a_remainder_is_refused: bert(json!({"num_attention_heads": 5}), None);
    an_unknown_activation_of_a_checkpoint_is_refused: bert(json!({"hidden_act": "mish"}), None);
    an_activation_that_is_no_name_is_refused: bert(json!({"hidden_act": 3}), None);
    an_epsilon_of_zero_is_refused: bert(json!({"layer_norm_eps": 0.0}), None);
    an_epsilon_that_is_no_number_is_refused: bert(json!({"layer_norm_eps": "small"}), None);
    labels_that_are_no_list_are_refused:
        bert(json!({"id2label": 3}), Some(&["sequence_logits"]));
    an_activation_that_is_another_function_is_not_offered: bert(json!({"hidden_act": "laplace"}), None);
    an_activation_in_another_form_is_offered: bert(json!({"hidden_act": "GELU"}), None);
    a_key_with_none_of_several_values_is_refused: {
        let must = "require: [Must(key: \"kind\", is: [\"a\", 2, null])], graph:";
        let source = changed("graph:", must);
        let mut config = tiny_config();
        config["kind"] = json!("b");
        refused(parse(&source).and_then(|d| d.build(&config, None)))
    };
    relative_positions_are_refused:
        bert(json!({"position_embedding_type": "relative_key"}), None);
    an_unknown_output_names_the_nearest: bert(json!({}), Some(&["mlm_logit"]));
    no_output_at_all_is_refused: bert(json!({}), Some(&[]));
    a_product_above_64_bits_is_refused:
        refused(build(&changed("out: \"hidden\"", "out: \"hidden * 9000000000000000000\"")));
    a_scale_that_is_not_finite_is_refused:
        refused(build(&changed("add(a: \"x\", b: \"y\")", "scale(x: \"y\", by: \"1 / 0\")")));
    a_soft_cap_of_zero_is_refused:
        refused(build(&changed("add(a: \"x\", b: \"y\")", "soft_cap(x: \"y\", cap: \"1 - 1\")")));
    an_offset_past_the_table_is_refused:
        refused(build(&changed("rows: \"vocab\"", "rows: \"vocab\", offset: \"vocab\"")));
}

/// Returns the error of building the shipped description of BERT with `changes` to config.json.
fn bert(changes: Value, outputs: Option<&[&str]>) -> String {
    refused(bert_model(changes, outputs))
}

fn bert_model(
    changes: Value,
    outputs: Option<&[&str]>,
) -> Result<crate::model::Model, crate::model::ModelError> {
    let mut config = json!({
        "vocab_size": 100, "max_position_embeddings": 16, "type_vocab_size": 2,
        "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3,
        "intermediate_size": 24,
    });
    for (key, value) in changes.as_object().expect("changes are an object") {
        config[key] = value.clone();
    }
    let description = Description::shipped("bert").expect("it is shipped");
    description?.build(&config, outputs)
}

#[test]
fn an_untied_decoder_has_its_own_weights() {
    let text = |tied: Value| {
        let config = json!({"tie_word_embeddings": tied});
        let model = bert_model(config, Some(&["mlm_logits"])).expect("both are described");
        model.graph.text()
    };
    let decoder = "cls.predictions.decoder.weight";
    assert!(text(json!(false)).contains(decoder));
    assert!(!text(json!(true)).contains(decoder));
    assert!(!text(Value::Null).contains(decoder));
}

#[test]
fn numbers_of_any_size_are_shown_with_few_digits() {
    let text = |eps: f64| {
        let error = bert_model(json!({"layer_norm_eps": eps}), None).expect_err("it is refused");
        error.problem().to_string()
    };
    insta::assert_snapshot!(text(1e-310), @"`eps` is 1e-310; expected a number that is above 0 in f32, too");
    insta::assert_snapshot!(text(-1e-300), @"`eps` is -1e-300; expected a number above 0");
    insta::assert_snapshot!(text(-0.5), @"`eps` is -0.5; expected a number above 0");
    insta::assert_snapshot!(text(1e300), @"`eps` is 1e300; expected a finite number in f32");
    let heads = bert_model(json!({"num_attention_heads": 1e300}), None).expect_err("refused");
    insta::assert_snapshot!(heads.problem(), @"config.json: `num_attention_heads` is `1e300`; expected a whole number");
}

#[test]
fn labels_are_counted_if_config_names_them() {
    let labels = |changes| {
        let model = bert_model(changes, Some(&["sequence_logits"]));
        model.map(|m| m.dims["labels"]).ok()
    };
    assert_eq!(labels(json!({})), Some(2));
    assert_eq!(labels(json!({"num_labels": 5})), Some(5));
    let named = json!({"id2label": {"0": "A", "1": "B", "2": "C"}, "num_labels": null});
    assert_eq!(labels(named), Some(3));
}

#[test]
fn keys_that_no_requested_output_reads_may_be_missing() {
    let model = bert_model(json!({"id2label": 3}), None).expect("labels are not read");
    assert!(!model.dims.contains_key("labels"));
}

#[test]
fn nested_keys_are_read() {
    let source = changed("Key(\"hidden_size\")", "Key(\"text_config.hidden_size\")");
    let build = |config| parse(&source).and_then(|d| d.build(&config, None));
    let mut config = tiny_config();
    assert!(refused(build(config.clone())).contains("`text_config.hidden_size`"));
    config["text_config"] = json!({"hidden_size": 24});
    assert_eq!(
        build(config.clone()).expect("it is there").dims["hidden"],
        24
    );
    config["text_config.hidden_size"] = json!(32);
    assert_eq!(build(config).expect("it is there").dims["hidden"], 32);
}

#[test]
fn a_repeat_of_zero_iterations_is_empty() {
    let mut config = tiny_config();
    config["num_hidden_layers"] = json!(0);
    let description = parse(super::TINY).expect("nothing is wrong with it");
    let model = description.build(&config, None).expect("no layers");
    assert_eq!(model.graph.n_launches(), 1);
}

#[test]
fn activations_have_their_published_names() {
    for (name, op) in [
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("relu", "relu"),
        ("tanh", "tanh"),
    ] {
        let model = bert_model(json!({"hidden_act": name}), None).expect("it is known");
        assert!(
            model
                .graph
                .text()
                .contains(&format!("layer.0.activated = {op} "))
        );
    }
}

#[test]
fn a_key_with_an_index_selects_a_body_and_an_absent_one_uses_the_condition() {
    let source = changed(
        "            Let(\"x\", add(a: \"x\", b: \"y\"))",
        "            When(key: \"kinds.{i}\", is: \"far\", absent: \"i == 0\",
                body: [Let(\"z\", tanh(x: \"y\"))], otherwise: [Let(\"z\", relu(x: \"y\"))]),
            Let(\"x\", add(a: \"x\", b: \"z\"))",
    );
    let description = super::parse(&source).expect("it is right");
    let kinds = |kinds: Value| {
        let mut config = tiny_config();
        config["kinds"] = kinds;
        let model = description
            .build(&config, None)
            .expect("the sizes are right");
        let of = |i: u32| match model.graph.text().contains(&format!("layer.{i}.z = tanh")) {
            true => "far",
            false => "near",
        };
        [of(0), of(1)]
    };
    assert_eq!(kinds(json!(["near", "far"])), ["near", "far"]);
    assert_eq!(kinds(json!(["far", "far"])), ["far", "far"]);
    assert_eq!(kinds(Value::Null), ["far", "near"]);
    // The list has no entry for layer 1, so the condition `i == 0` decides.
    assert_eq!(kinds(json!(["near"])), ["near", "near"]);
}

#[test]
fn a_table_is_no_output() {
    let source = changed(
        r#"{"out": "x"}"#,
        r#"{"out": "x", "table": "distances"}"#,
    )
    .replacen(
        "        Repeat",
        "        Let(\"distances\", position_table(table: \"rel\", width: \"hidden\", span: 4)),\n        Repeat",
        1,
    );
    let description = super::parse(&source).expect("it is right");
    insta::assert_snapshot!(refused(description.build(&tiny_config(), Some(&["table"]))));
    let steep = source.replace("span: 4", "span: 3, reach: 9");
    let description = super::parse(&steep).expect("it is right");
    insta::assert_snapshot!(refused(description.build(&tiny_config(), Some(&["table"]))));
}

#[test]
fn a_fixed_scaling_of_the_base_has_the_last_frequency_over_the_factor() {
    let source = changed(
        r#"add(a: "x", b: "y")"#,
        r#"rotary(x: "y", heads: 1, width: 4, theta: 100, scaling: "rope_scaling")"#,
    );
    let description = super::parse(&source).expect("it is right");
    let frequencies = |scaling: Value| {
        let mut config = tiny_config();
        config["rope_scaling"] = scaling;
        let model = description.build(&config, None);
        let graph = model
            .map_err(miette::Report::new)
            .expect("the sizes are right")
            .graph;
        let nodes = graph.topological().into_iter();
        let mut turns = nodes.filter_map(|id| match graph.op(id) {
            Op::Rotary { rotation, .. } => Some(rotation.frequencies.clone()),
            _ => None,
        });
        turns.next().expect("it turns")
    };
    // 1 / 8^(2/4), and (8 · 100)^(−2/4) / 8^(2/4).
    let fixed = frequencies(json!({"type": "ntk", "factor": 8.0}));
    let expected = [8f64.powf(-0.5), 800f64.powf(-0.5) * 8f64.powf(-0.5)];
    for (got, want) in fixed.iter().zip(expected) {
        assert!((f64::from(*got) / want - 1.0).abs() < 1e-6, "{fixed:?}");
    }
    // exp(−a (j + 1)^b) with a = ln 8 / 2^b.
    let mixed = frequencies(json!({"type": "ntk", "factor": 8.0, "mixed_b": 0.5}));
    let a = 8f64.ln() / 2f64.sqrt();
    let expected = [(-a).exp(), 0.1 * (-a * 2f64.sqrt()).exp()];
    for (got, want) in mixed.iter().zip(expected) {
        assert!((f64::from(*got) / want - 1.0).abs() < 1e-6, "{mixed:?}");
    }
    let mut config = tiny_config();
    config["rope_scaling"] = json!({"type": "ntk", "factor": 0.5});
    insta::assert_snapshot!(refused(description.build(&config, None)));
}

#[test]
fn frequencies_that_depend_on_the_length_limit_it() {
    let source = changed(
        r#"add(a: "x", b: "y")"#,
        r#"rotary(x: "y", heads: 2, width: 4, theta: 10000, scaling: "rope_scaling")"#,
    );
    let model = |config: Value| {
        let description = super::parse(&source).expect("it is right");
        description.build(&config, None)
    };
    let mut config = tiny_config();
    config["rope_scaling"] = json!({"type": "dynamic", "factor": 4.0});
    config["max_position_embeddings"] = json!(2048);
    let dynamic = model(config.clone()).expect("the sizes are right");
    assert_eq!(dynamic.max_positions, Some(2048));
    config["rope_scaling"] = Value::Null;
    let plain = model(config.clone()).expect("the sizes are right");
    assert_eq!(plain.max_positions, Some(2048));
    assert_eq!(dynamic.graph.text(), plain.graph.text());
    config["rope_scaling"] =
        json!({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 100});
    let original = model(config.clone()).expect("the sizes are right");
    assert_eq!(original.max_positions, Some(100));
    config["rope_scaling"] = json!({"rope_type": "dynamic", "factor": 4.0});
    config["max_position_embeddings"] = json!("many");
    insta::assert_snapshot!(refused(model(config)));
    // A description may set a limit too, and the lowest one applies.
    let limited = source.replace(
        "\"rope_scaling\")",
        "\"rope_scaling\", longest: \"8 * hidden\")",
    );
    let description = super::parse(&limited).expect("it is right");
    let mut config = tiny_config();
    let of = |config: &Value| {
        description
            .build(config, None)
            .expect("the sizes are right")
    };
    config["max_position_embeddings"] = json!(2048);
    let positions = 8 * of(&config).dims["hidden"] as u32;
    assert_eq!(of(&config).max_positions, Some(positions));
    config["rope_scaling"] =
        json!({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 5});
    assert_eq!(of(&config).max_positions, Some(5));
}

#[test]
fn sequences_are_limited_to_the_scaled_positions_of_config_json() {
    let source = changed(
        r#"add(a: "x", b: "y")"#,
        r#"rotary(x: "y", heads: 2, width: 4, theta: 10000, scaling: "rope_scaling")"#,
    );
    let description = super::parse(&source).expect("it is right");
    let limit = |scaling: Value| {
        let mut config = tiny_config();
        config["max_position_embeddings"] = json!(100);
        config["rope_scaling"] = scaling;
        let model = description.build(&config, None);
        model.expect("the sizes are right").max_positions
    };
    assert_eq!(limit(Value::Null), Some(100));
    assert_eq!(limit(json!({"rope_type": "default"})), Some(100));
    assert_eq!(limit(json!({"type": "linear", "factor": 2.5})), Some(250));
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 50,
    });
    assert_eq!(limit(llama3), Some(100));
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 80});
    assert_eq!(limit(yarn), Some(320));
    assert_eq!(limit(json!({"type": "ntk", "factor": 2.0})), Some(100));
    let dynamic = json!({"rope_type": "dynamic", "factor": 4.0});
    assert_eq!(limit(dynamic), Some(100));
    // With `alpha`, frequencies do not depend on the length of a sequence.
    let stretched = json!({"type": "dynamic", "factor": 1.0, "alpha": 1000.0, "beta_fast": 32});
    assert_eq!(limit(stretched), Some(100));
    for (alpha, named) in [
        (json!(-1.0), "alpha"),
        (json!(0), "alpha"),
        (Value::Null, "beta_fast"),
    ] {
        let mut config = tiny_config();
        config["rope_scaling"] =
            json!({"type": "dynamic", "factor": 1.0, "alpha": alpha, "beta_fast": 32});
        let error = refused(description.build(&config, None));
        assert!(
            error.contains(&format!("`rope_scaling.{named}` is")),
            "{error}"
        );
    }
    let longrope = |short: Value| {
        json!({
            "type": "longrope", "short_factor": short, "long_factor": [4.0, 8.0], "original_max_position_embeddings": 60,
        })
    };
    assert_eq!(limit(longrope(json!([1.0, 2.0]))), Some(60));
    let limits = |max_context: Value| {
        let mut config = tiny_config();
        config["max_position_embeddings"] = json!(100);
        config["rope_scaling"] = longrope(json!([1.0, 2.0]));
        config["max_context"] = max_context;
        let model = description.build(&config, None);
        model.map(|model| (model.max_positions, model.extended_positions))
    };
    let of = |max_context: Value| limits(max_context).expect("the sizes are right");
    assert_eq!(of(Value::Null), (Some(60), Some(100)));
    assert_eq!(of(json!(60)), (Some(60), Some(100)));
    assert_eq!(of(json!(61)), (Some(61), Some(100)));
    assert_eq!(of(json!(100)), (Some(100), None));
    for wrong in [json!(101), json!(0), json!("60")] {
        let error = refused(limits(wrong));
        assert!(error.contains("`max_context` is"), "{error}");
    }
    let mut config = tiny_config();
    config["rope_scaling"] = longrope(json!([1.0, 0.0]));
    let error = refused(description.build(&config, None));
    assert!(error.contains("`rope_scaling.short_factor` is"), "{error}");
    // Values that are not a number of positions are reported.
    let mut config = tiny_config();
    config["max_position_embeddings"] = json!(0);
    let error = refused(description.build(&config, None));
    assert!(
        error.contains("`max_position_embeddings` is `0`; expected a number of positions"),
        "{error}"
    );
}
