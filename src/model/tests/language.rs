//! Errors in the language: syntax, words and names.

use super::{TINY, build, changed, parse, refused};

macro_rules! refuses {
    ($($name:ident: $source:expr;)*) => {$(
        #[test]
        fn $name() {
            insta::assert_snapshot!(refused(parse($source.as_ref())));
        }
    )*};
}

refuses! {
    a_missing_comma_is_shown_where_reading_stopped:
        changed(r#"index: "i","#, r#"index: "i""#);
    a_missing_bracket_is_a_syntax_error:
        changed("        ]),\n    ],", "        ]),\n    ");
    text_after_the_end_is_a_syntax_error:
        format!("{TINY}\nModel()");
    an_empty_file_is_a_syntax_error: "";
    nesting_without_end_is_refused:
        changed(r#"default: ["out"]"#, &format!("default: {}", "[".repeat(150)));
    a_file_of_a_megabyte_is_refused: " ".repeat(1 << 20);
    extensions_of_ron_are_refused: format!("#![enable(implicit_some)]\n{TINY}");
    another_value_than_a_model_is_refused: "[1, 2]";
    an_unknown_operator_names_the_nearest:
        changed("linear(x:", "liner(x:");
    an_unknown_operator_without_a_near_one_lists_all:
        changed("linear(x:", "convolution(x:");
    an_unknown_statement_is_refused: changed("Repeat(", "Loop(");
    an_operator_without_let_says_how_to_name_it:
        changed(r#"Let("x", add(a: "x", b: "y"))"#, r#"add(a: "x", b: "y")"#);
    let_takes_a_name_and_an_operator:
        changed(r#"Let("x", add(a: "x", b: "y"))"#, r#"Let("x")"#);
    an_unknown_field_names_the_nearest: changed("weight:", "wieght:");
    a_field_given_twice_is_refused: changed(r#"b: "y""#, r#"b: "y", b: "x""#);
    a_missing_field_is_named: changed(r#", b: "y""#, "");
    an_unknown_field_of_the_model_is_refused: changed("default:", "defaults:");
    fields_without_names_are_refused: changed(r#"add(a: "x", b: "y")"#, r#"add("x", "y")"#);
    a_number_where_a_value_belongs_is_refused: changed(r#"b: "y""#, "b: 3");
    a_name_with_a_dot_is_refused: changed(r#"Let("y""#, r#"Let("y.z""#);
    an_undefined_value_names_the_nearest:
        changed(r#"Let("y", linear(x: "x""#, r#"Let("y", linear(x: "xx""#);
    a_value_of_an_ended_repeat_is_not_visible:
        changed("    ],\n    outputs", "        Let(\"z\", relu(x: \"y\")),\n    ],\n    outputs");
    an_input_is_read_by_an_embedding_only: changed(r#"b: "y""#, r#"b: "token_ids""#);
    an_unknown_input_is_refused: changed("token_ids", "tokens");
    a_name_defined_twice_is_refused: changed(
        "    ],\n    outputs",
        "        Let(\"x\", relu(x: \"x\")),\n    ],\n    outputs"
    );
    a_name_of_an_input_is_refused: changed(r#"Let("y""#, r#"Let("positions""#);
    a_value_computed_from_itself_is_refused:
        changed(r#"Let("y", linear(x: "x""#, r#"Let("y", linear(x: "y""#);
    a_cycle_is_refused: changed(
        "    ],\n    outputs",
        "        Let(\"a\", add(a: \"x\", b: \"b\")),\n        Let(\"b\", relu(x: \"a\")),\n    ],\n    outputs"
    );
    a_value_used_too_early_says_where_it_is_defined: changed(
        "    ],\n    outputs",
        "        Let(\"a\", add(a: \"x\", b: \"b\")),\n        Let(\"b\", relu(x: \"x\")),\n    ],\n    outputs"
    );
    an_undefined_dimension_names_the_nearest: changed(r#"out: "hidden""#, r#"out: "hiden * 4""#);
    a_dimension_used_above_its_definition_is_refused:
        changed(r#""vocab": Key("vocab_size"),"#, r#""vocab": "hidden * 2","#);
    a_dimension_defined_twice_is_refused: changed(r#""layers": "#, r#""hidden": "#);
    what_is_no_expression_is_refused: changed(r#"out: "hidden""#, r#"out: "hidden /""#);
    a_dimension_from_nothing_is_refused: changed(r#"Key("vocab_size")"#, "[]");
    an_unknown_origin_is_refused: changed(r#"Key("vocab_size")"#, r#"Keys("vocab_size")"#);
    an_undefined_activation_is_refused:
        changed(r#"add(a: "x", b: "y")"#, r#"activation(x: "y", kind: "act")"#);
    an_unknown_activation_is_refused:
        changed("    graph:", "    activations: {\"act\": \"geluu\"},\n    graph:");
    gelu_has_two_forms: changed(r#"add(a: "x", b: "y")"#, r#"gelu(x: "y", form: fast)"#);
    an_undefined_index_is_refused: changed("{i}", "{j}");
    what_is_no_expression_in_braces_is_refused: changed("{i}", "{2 * }");
    how_often_a_repeat_runs_does_not_depend_on_an_index: changed(
        "            Let(\"x\", add",
        "            Repeat(times: \"i\", index: \"j\", body: []),\n            Let(\"x\", add"
    );
    an_index_called_as_a_dimension_is_refused: changed("index: \"i\"", "index: \"hidden\"");
    a_when_needs_one_question: changed(
        "            Let(\"x\", add",
        "            When(key: \"k\", holds: \"1 == 1\", body: []),\n            Let(\"x\", add"
    );
    a_when_without_a_body_is_refused: changed(
        "            Let(\"x\", add",
        "            When(key: \"k\", is: 1),\n            Let(\"x\", add"
    );
    what_is_no_condition_is_refused: changed(
        "            Let(\"x\", add",
        "            When(holds: \"hidden = 3\", body: []),\n            Let(\"x\", add"
    );
    a_name_of_one_body_of_a_when_is_not_visible_behind_it: changed(
        "            Let(\"x\", add(a: \"x\", b: \"y\"))",
        "            When(holds: \"i == 0\", body: [Let(\"z\", relu(x: \"y\"))]),\n            Let(\"x\", add(a: \"x\", b: \"z\"))"
    );
    a_default_of_an_architecture_must_be_an_output:
        changed("    graph:", "    architectures: {\"A-1\": [\"logits\"]},\n    graph:");
    braces_of_a_weight_must_match: changed("{i}", "{i");
    two_repeats_of_one_name_are_refused: changed(
        "        ]),\n    ],",
        "        ]),\n        Repeat(times: 2, index: \"k\", name: \"layer\", body: []),\n    ],"
    );
    an_index_used_twice_is_refused:
        changed("body: [", "body: [\n            Repeat(times: 2, index: \"i\", name: \"inner\", body: []),");
    an_output_needs_a_value: changed(r#""out": "x""#, r#""out": "y""#);
    a_default_output_must_be_an_output: changed(r#"["out"]"#, r#"["logits"]"#);
    an_expectation_of_an_unknown_operator_is_refused:
        changed("body: [", "expect: {\"atention\": 1}, body: [");
}

#[test]
fn comments_and_trailing_commas_are_allowed_anywhere() {
    let commented = TINY
        .replace("(ids", "( /* table */ ids")
        .replace("body: [", "// the layers\n body: [ // body\n")
        .replace("\"y\"))", "\"y\",),)");
    let plain = build(TINY).expect("nothing is wrong with it");
    let commented = build(&commented).expect("comments are allowed");
    assert_eq!(plain.graph.text(), commented.graph.text());
}

#[test]
fn repeats_nest_as_deeply_as_ron_allows() {
    let nested = |depth: usize| {
        let open: String = (0..depth)
            .map(|k| format!("Repeat(times: 1, index: \"i{k}\", body: ["))
            .collect();
        let inner = format!("{open}Let(\"x\", relu(x: \"x\")),{}", "]),".repeat(depth));
        build(&changed(
            "        ]),\n    ],",
            &format!("        ]),\n{inner}    ],"),
        ))
    };
    let model = nested(30).expect("thirty loops are few enough");
    assert!(model.graph.text().contains(".i29.0.x = relu"));
    assert!(nested(200).is_err());
}

#[test]
fn an_error_after_other_alphabets_points_at_the_right_word() {
    let source =
        changed("    graph:", "    // длина — 長さ\n    graph:").replace("add(a:", "ad(a:");
    let span = parse(&source).expect_err("no such operator").span();
    let at = source.find("ad(a:").expect("it was put there");
    assert_eq!(span, Some(at..at + 2));
}

#[test]
fn a_when_builds_one_body_and_both_may_define_a_value() {
    let with = |statement: &str| {
        let add = "Let(\"x\", add(a: \"x\", b: \"y\"))";
        build(&changed(add, &format!("{statement},\n{add}"))).map(|m| m.graph.text())
    };
    // A condition may depend on the layer, a size or a config key. Statements after `When` may use a name that both of its bodies define.
    let text = with(
        r#"When(holds: "i + 1 < layers", body: [Let("z", relu(x: "y"))], otherwise: [Let("z", tanh(x: "y"))]),
           Let("w", add(a: "z", b: "x")), Let("x2", relu(x: "w")), When(holds: "hidden == 8", name: "wide", body: [Let("x", add(a: "x", b: "w"))])"#,
    )
    .expect("it is right");
    assert!(
        text.contains("layer.0.z = relu ") && text.contains("layer.1.z = tanh "),
        "{text}"
    );
    assert!(text.contains("layer.0.wide.x = add"), "{text}");
    for (is, taken) in [
        ("2", true),
        ("[1, 2]", true),
        ("3", false),
        ("\"2\"", false),
        ("null", false),
    ] {
        let when = format!(
            "When(key: \"num_hidden_layers\", is: {is}, name: \"if\", body: [Let(\"x\", relu(x: \"x\"))])"
        );
        let text = with(&when).expect("it is right");
        assert_eq!(text.contains("layer.1.if.x = relu"), taken, "{is}: {text}");
    }
    let text =
        with("When(key: \"none\", is: null, name: \"if\", body: [Let(\"x\", relu(x: \"x\"))])");
    assert!(text.expect("it is right").contains("layer.0.if.x = relu"));
}

#[test]
fn loops_have_a_start_index_and_weight_names_have_arithmetic() {
    let source = changed(
        "times: \"layers\"",
        "times: \"layers\", from: \"layers / 2\"",
    )
    .replace("layers.{i}.weight", "layers.{3 * (i - 1) + 1}.of.{hidden}");
    let model = build(&source).expect("it is right");
    let text = model.graph.text();
    assert!(
        text.contains("layers.1.of.8") && text.contains("layers.4.of.8"),
        "{text}"
    );
    assert!(
        text.contains("layer.1.y") && text.contains("layer.2.y"),
        "{text}"
    );
}

#[test]
fn weights_have_alternative_names() {
    let source = changed(
        "\"layers.{i}.weight\"",
        "[\"layers.{i}.weight\", \"h.{2 * i}.w\"]",
    )
    .replace(
        "    dims:",
        "    endings: {\".weight\": [\".gamma\", \".g\"]},\n    dims:",
    );
    let names = build(&source).expect("it is right").weight_names;
    assert_eq!(
        names.spellings("layers.1.weight"),
        ["layers.1.weight", "layers.1.gamma", "layers.1.g", "h.2.w"]
    );
}

#[test]
fn numbers_may_be_negative() {
    let source = |by: &str| {
        changed(
            "add(a: \"x\", b: \"y\")",
            &format!("scale(x: \"y\", by: {by})"),
        )
    };
    for by in ["-1.5", "\"-1.5\"", "\"-(hidden - 5) / 2\""] {
        let text = build(&source(by)).expect("it is a number").graph.text();
        assert!(text.contains("scale(by=-1.5)"), "{by}: {text}");
    }
}

#[test]
fn nested_bodies_are_checked_in_bounded_time() {
    let mut body = "Let(\"z\", relu(x: \"y\"))".to_owned();
    for _ in 0..24 {
        body = format!(
            "When(holds: \"1 == 1\", body: [{body}], otherwise: [{body_of}])",
            body_of = "Let(\"z\", tanh(x: \"y\"))"
        );
    }
    let source = changed(
        "Let(\"x\", add(a: \"x\", b: \"y\"))",
        &format!("{body},\nLet(\"x\", add(a: \"x\", b: \"z\"))"),
    );
    assert!(
        build(&source)
            .expect("it is right")
            .graph
            .text()
            .contains("layer.0.z = relu")
    );
}
