//! Descriptions with several parts, and the caches that connect them.

use super::{parse, refused};

/// An encoder that caches its embeddings, and a decoder that attends to them. Both read the table `words`, the only weight.
const TINY: &str = r#"Model(
    name: "tiny",
    dims: {"vocab": 10, "hidden": 8},
    parts: [
        Part(name: "encode", stream: "source",
            graph: [
                Let("x", embedding(ids: "token_ids", rows: "vocab", width: "hidden", table: "words")),
                Let("keys", cache(x: "x", heads: 1, name: "source.keys")),
            ],
            outputs: {"encoded": "x"},
        ),
        Part(name: "decode", stream: "target",
            graph: [
                Let("x", embedding(ids: "token_ids", rows: "vocab", width: "hidden", table: "words")),
                Let("places", embedding(ids: "positions", rows: 6, width: "hidden", sinusoid: over_half, offset: 1)),
                Let("query", add(a: "x", b: "places")),
                Let("left", cache(heads: 1, width: "hidden", name: "source.keys")),
                Let("q", split_heads(x: "query", heads: 1)),
                Let("k", split_heads(x: "left", heads: 1)),
                Let("scores", matmul(a: "q", b: "k", transpose_b: true)),
                Let("p", softmax(x: "scores")),
                Let("c", matmul(a: "p", b: "k")),
                Let("out", merge_heads(x: "c")),
            ],
            outputs: {"out": "out"},
        ),
    ],
    default: ["out"],
)"#;

fn changed(from: &str, to: &str) -> String {
    assert_eq!(TINY.matches(from).count(), 1, "{from}");
    TINY.replace(from, to)
}

#[test]
fn parts_become_one_graph() {
    let model = parse(TINY).and_then(|d| d.build(&serde_json::json!({}), None));
    let model = model.map_err(miette::Report::new).expect("it is right");
    insta::assert_snapshot!(model.graph.text());
    assert_eq!(model.max_positions, Some(5));
}

macro_rules! refuses {
    ($($name:ident: $from:expr => $to:expr;)*) => {$(
        #[test]
        fn $name() {
            let source = changed($from, $to);
            insta::assert_snapshot!(refused(parse(&source).and_then(|d| d.build(&serde_json::json!({}), None))));
        }
    )*};
}

refuses! {
    a_cache_that_no_part_adds_to_names_the_nearest:
        r#"width: "hidden", name: "source.keys""# => r#"width: "hidden", name: "source.key""#;
    a_cache_that_is_read_before_anything_is_appended_is_refused:
        r#"Let("x", embedding(ids: "token_ids", rows: "vocab", width: "hidden", table: "words")),
                Let("keys", cache(x: "x", heads: 1, name: "source.keys")),"# =>
        r#"Let("x", cache(heads: 1, width: "hidden", name: "source.keys")),
                Let("keys", cache(x: "x", heads: 1, name: "source.keys")),"#;
    a_cache_of_the_same_part_is_read_by_its_value:
        r#"Let("keys", cache(x: "x", heads: 1, name: "source.keys")),"# =>
        r#"Let("keys", cache(x: "x", heads: 1, name: "source.keys")),
                Let("left", cache(heads: 1, width: "hidden", name: "source.keys")),
                Let("more", cache(x: "left", heads: 1, name: "more.keys")),"#;
    a_cache_is_read_as_it_was_added_to:
        r#"cache(heads: 1, width: "hidden""# => r#"cache(heads: 2, width: "hidden""#;
    attention_to_another_stream_is_not_causal: r#"softmax(x: "scores")"# => r#"softmax(x: "scores", causal: true)"#;
    values_of_another_part_are_not_seen: r#"add(a: "x", b: "places")"# => r#"add(a: "keys", b: "places")"#;
    streams_have_names_of_their_own: r#"stream: "target""# => r#"stream: "source""#;
    a_width_beside_x_is_refused: r#"x: "x", heads: 1"# => r#"x: "x", width: 8, heads: 1"#;
    a_graph_beside_parts_is_refused: r#"default: ["out"]"# => r#"graph: [], default: ["out"]"#;
    an_unknown_sinusoid_is_refused: "over_half" => "over_all";
}
