//! Errors of the language itself: syntax, words, names.

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
fn comments_and_trailing_commas_may_stand_anywhere() {
    let commented = TINY
        .replace("(ids", "( /* table */ ids")
        .replace("body: [", "// the layers\n body: [ // body\n")
        .replace("\"y\"))", "\"y\",),)");
    let plain = build(TINY).expect("nothing is wrong with it");
    let commented = build(&commented).expect("comments are allowed");
    assert_eq!(plain.graph.text(), commented.graph.text());
}

#[test]
fn repeats_nest_as_deeply_as_ron_does() {
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
