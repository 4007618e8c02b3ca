//! Tests of wrong descriptions and their errors, of the shipped descriptions, and of damaged descriptions.

mod config;
mod language;
mod limits;
mod mutations;
mod parts;
mod shapes;
mod shipped;

use miette::{GraphicalReportHandler, GraphicalTheme};
use serde_json::{Value, json};

use super::{Description, Model, ModelError};

/// A small valid description. The tests change one thing in it.
const TINY: &str = r#"Model(
    name: "tiny",
    dims: {
        "vocab": Key("vocab_size"),
        "hidden": Key("hidden_size"),
        "layers": Key("num_hidden_layers"),
    },
    graph: [
        Let("x", embedding(ids: "token_ids", rows: "vocab", width: "hidden", table: "table")),
        Repeat(times: "layers", index: "i", name: "layer", body: [
            Let("y", linear(x: "x", out: "hidden", weight: "layers.{i}.weight")),
            Let("x", add(a: "x", b: "y")),
        ]),
    ],
    outputs: {"out": "x"},
    default: ["out"],
)
"#;

fn tiny_config() -> Value {
    json!({"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 2})
}

/// Returns [`TINY`] with `from` replaced by `to`. `from` must occur exactly once.
fn changed(from: &str, to: &str) -> String {
    assert_eq!(TINY.matches(from).count(), 1, "`{from}` stands once");
    TINY.replace(from, to)
}

fn parse(source: &str) -> Result<Description, ModelError> {
    Description::parse("tiny.ron", source)
}

fn build(source: &str) -> Result<Model, ModelError> {
    parse(source)?.build(&tiny_config(), None)
}

/// Returns the complete error message as shown to a user, without colors.
fn shown(error: &ModelError) -> String {
    let mut text = String::new();
    GraphicalReportHandler::new_themed(GraphicalTheme::unicode_nocolor())
        .with_width(100)
        .render_report(&mut text, error)
        .expect("a string takes everything");
    text
}

/// Returns the text of the error of `result`, and panics if `result` is not an error.
fn refused<T>(result: Result<T, ModelError>) -> String {
    match result {
        Ok(_) => panic!("accepted what is wrong"),
        Err(error) => shown(&error),
    }
}

#[test]
fn the_small_description_is_valid() {
    let model = build(TINY).expect("nothing is wrong with it");
    insta::assert_snapshot!(model.graph.text(), @r"
    token_ids = input(TokenIds) : [tokens]
    x = embedding token_ids @table : [tokens, 8]
    layer.0.y = linear x @layers.0.weight : [tokens, 8]
    layer.0.x = add x layer.0.y : [tokens, 8]
    layer.1.y = linear layer.0.x @layers.1.weight : [tokens, 8]
    layer.1.x = add layer.0.x layer.1.y : [tokens, 8]
    output out = layer.1.x
    ");
    assert_eq!(
        (model.vocab, model.max_positions, model.type_rows),
        (10, None, None)
    );
}
