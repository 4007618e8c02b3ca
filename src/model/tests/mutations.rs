//! Damaged descriptions and configs must not cause a panic or an endless loop. Any error or model is accepted as the result.

use proptest::{prelude::*, test_runner::Config};
use serde_json::{Value, json};

use crate::model::{Description, ModelError};

/// Texts that a mutation inserts. Some have a meaning in the language.
const PIECES: [&str; 40] = [
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "\"",
    "//",
    "/*",
    "*/",
    "\n",
    "#![enable(x)]",
    "r#\"",
    "'",
    "\\",
    "\u{0}",
    "é",
    "長",
    "-",
    "1e400",
    "99999999999999999999",
    "0",
    "{i}",
    "{",
    "Let",
    "Repeat",
    "Key",
    "Model",
    "()",
    "\"hidden\"",
    "\"x\"",
    "linear(x: \"hidden\")",
    "matmul",
    "1..2",
    "'a",
    "Some(",
    "[[[[[[[[",
    "((((((((",
];

fn config() -> Value {
    json!({
        "vocab_size": 11, "max_position_embeddings": 8, "type_vocab_size": 2, "hidden_size": 8,
        "embedding_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16,
    })
}

#[derive(Clone, Debug)]
enum Mutation {
    Insert(usize, usize),
    Delete(usize, usize),
    Copy(usize, usize, usize),
}

impl Mutation {
    fn apply(&self, text: &mut Vec<char>) {
        let n = text.len().max(1);
        match *self {
            Mutation::Insert(at, piece) => {
                let at = (at % n).min(text.len());
                text.splice(at..at, PIECES[piece % PIECES.len()].chars());
            }
            Mutation::Delete(at, len) => {
                let at = (at % n).min(text.len());
                let end = (at + 1 + len % 40).min(text.len());
                text.drain(at..end);
            }
            Mutation::Copy(from, len, to) => {
                let from = (from % n).min(text.len());
                let end = (from + len % 80).min(text.len());
                let piece: Vec<char> = text[from..end].to_vec();
                let to = (to % n).min(text.len());
                text.splice(to..to, piece);
            }
        }
    }
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<usize>;
    prop_oneof![
        (at(), at()).prop_map(|(a, p)| Mutation::Insert(a, p)),
        (at(), at()).prop_map(|(a, l)| Mutation::Delete(a, l)),
        (at(), at(), at()).prop_map(|(f, l, t)| Mutation::Copy(f, l, t)),
    ]
}

/// Parses `source` and, if parsing succeeds, builds the model. If either returns an error, checks that the error can be formatted.
fn survives(source: &str, config: &Value) {
    survive(Description::parse("damaged.ron", source), config);
}

fn survive(parsed: Result<Description, ModelError>, config: &Value) {
    if let Err(error) = parsed.and_then(|d| d.build(config, None)) {
        assert!(!super::shown(&error).is_empty());
    }
}

proptest! {
    #![proptest_config(Config { cases: 1500, failure_persistence: None, ..Config::default() })]

    #[test]
    fn damaged_descriptions_do_not_panic(
        which in 0..4usize,
        mutations in prop::collection::vec(mutation(), 1..6),
    ) {
        let name = Description::shipped_names()[which];
        let source = Description::shipped_source(name).expect("it is shipped");
        let mut text: Vec<char> = source.chars().collect();
        for mutation in &mutations {
            mutation.apply(&mut text);
        }
        survives(&text.into_iter().collect::<String>(), &config());
    }

    #[test]
    fn damaged_small_descriptions_do_not_panic(
        mutations in prop::collection::vec(mutation(), 1..4),
    ) {
        let mut text: Vec<char> = super::TINY.chars().collect();
        for mutation in &mutations {
            mutation.apply(&mut text);
        }
        survives(&text.into_iter().collect::<String>(), &super::tiny_config());
    }

    #[test]
    fn any_config_is_built_or_refused(
        which in 0..4usize,
        key in 0..8usize,
        value in prop_oneof![
            any::<u64>().prop_map(Value::from),
            (0..40u64).prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,8}".prop_map(Value::from),
            Just(Value::Null),
            Just(json!({"0": 1})),
            Just(json!([])),
        ],
    ) {
        let mut config = config();
        let object = config.as_object_mut().expect("it is an object");
        let key = object.keys().nth(key).expect("there are eight keys").clone();
        object.insert(key, value);
        let name = Description::shipped_names()[which];
        survive(Description::shipped(name).expect("it is shipped"), &config);
    }
}
