//! Syntax tree of a description.

use std::collections::HashSet;

use super::{
    build::operators::Operation,
    error::At,
    expr::{Condition, Expr},
    spelling::Spelling,
};

/// A parsed description, with source positions.
#[derive(Clone, Debug)]
pub(super) struct Ast {
    pub name: String,
    /// Supported values of `model_type` in config.json; empty for any.
    pub model_types: Vec<String>,
    /// Default outputs of checkpoints by architecture.
    pub architectures: Vec<(String, Vec<At<String>>)>,
    pub prefixes: Vec<String>,
    /// Endings of weight names, and the alternatives that some checkpoints use.
    pub endings: Vec<(String, Vec<String>)>,
    /// Tied head tensors and their tables.
    pub ties: Vec<(String, String)>,
    /// Names of tensors that do not affect any output. One `*` matches any text.
    pub ignores: Vec<String>,
    pub adapters: Option<Adapters>,
    pub requirements: Vec<Requirement>,
    /// Groups of keys for the same value. The keys that are present must agree.
    pub equal: Vec<Vec<At<String>>>,
    pub dims: Vec<Definition>,
    pub reals: Vec<Definition>,
    pub activations: Vec<Definition>,
    /// The parts in order. A file with `graph:` has one unnamed part, a file with `parts:` has named parts.
    pub parts: Vec<PartOf>,
    pub default_outputs: Vec<At<String>>,
    pub expect: Vec<Count>,
}

/// Keys of config.json for low-rank adapters: the list of adapter names, and the two numbers whose quotient `alpha / rank` is the factor of
/// each adapter.
#[derive(Clone, Debug)]
pub(super) struct Adapters {
    pub names: At<String>,
    pub alpha: At<String>,
    pub rank: At<String>,
}

/// A part of a model, which runs separately on its own batches. A description with a single graph has one part.
#[derive(Clone, Debug)]
pub(super) struct PartOf {
    /// Name and stream of the part; `None` in a description with a single graph. The stream is the kind of tokens that the part reads, such
    /// as `source`.
    pub named: Option<(At<String>, At<String>)>,
    pub body: Vec<Statement>,
    /// Output name and value name.
    pub outputs: Vec<(At<String>, At<String>)>,
    pub expect: Vec<Count>,
}

impl Ast {
    /// Outputs of all parts, in the order of the file.
    pub fn outputs(&self) -> impl Iterator<Item = &(At<String>, At<String>)> {
        self.parts.iter().flat_map(|part| &part.outputs)
    }
}

/// A key of config.json that must have one of the values `is`. A null value counts as absent.
#[derive(Clone, Debug)]
pub(super) struct Requirement {
    pub key: At<String>,
    pub is: Vec<serde_json::Value>,
    /// Value that the model uses if the key is absent. This value must then be one of `is`. If `None`, an absent key meets the requirement.
    pub default: Option<serde_json::Value>,
    /// Another key of config.json and a list of values. If given, the requirement applies only if this other key has one of the values.
    pub only: Option<(At<String>, Vec<serde_json::Value>)>,
    /// Outputs for which the requirement applies; `None` for all.
    pub outputs: Option<Vec<At<String>>>,
}

/// A named number or activation, with a list of origins such as keys of config.json. The first origin that is present gives the value.
#[derive(Clone, Debug)]
pub(super) struct Definition {
    pub name: At<String>,
    pub origins: Vec<At<Origin>>,
}

#[derive(Clone, Debug)]
pub(super) enum Origin {
    /// Value of a key in config.json.
    Key(String),
    /// Number of entries of a list or an object in config.json.
    Length(String),
    Expr(Expr),
    /// An activation by name.
    Word(String),
}

#[derive(Clone, Debug)]
pub(super) enum Statement {
    Let { name: At<String>, op: Operation },
    Repeat(Repeat),
    When(When),
}

#[derive(Clone, Debug)]
pub(super) struct Repeat {
    pub times: At<Expr>,
    /// First value of the index; `None` means 0.
    pub from: Option<At<Expr>>,
    pub index: At<String>,
    /// Prefix of value names: values of iteration 3 are called `label.3.…` in the graph.
    pub label: At<String>,
    pub body: Vec<Statement>,
    pub expect: Vec<Count>,
}

/// A choice between two bodies, by config.json or by sizes.
#[derive(Clone, Debug)]
pub(super) struct When {
    pub test: Test,
    /// Prefix of value names: values of either body are called `label.…` in the graph.
    pub label: Option<At<String>>,
    pub body: Vec<Statement>,
    pub otherwise: Vec<Statement>,
    /// Expected counts if the first body is taken.
    pub expect: Vec<Count>,
    pub expect_otherwise: Vec<Count>,
}

#[derive(Clone, Debug)]
pub(super) enum Test {
    /// The key of config.json has one of these values. An absent key counts as `null`.
    Key {
        /// Key with indices of the enclosing loops.
        key: At<Spelling>,
        is: Vec<serde_json::Value>,
        /// Condition that decides the test instead of `is` when the key is absent. A null value counts as absent unless `is` contains null.
        absent: Option<At<Condition>>,
    },
    Holds(At<Condition>),
}

impl When {
    /// Names that both bodies define, in the order of the first body. Later statements may read them.
    pub fn given_by_both(&self) -> Vec<&At<String>> {
        let other: HashSet<&str> = given(&self.otherwise).map(|n| n.value.as_str()).collect();
        let names = given(&self.body);
        names.filter(|n| other.contains(n.value.as_str())).collect()
    }
}

/// Names that a body defines. A nested `When` contributes the names that both of its bodies define.
pub(super) fn given(body: &[Statement]) -> impl Iterator<Item = &At<String>> {
    body.iter().flat_map(|statement| match statement {
        Statement::Let { name, .. } => vec![name],
        Statement::When(when) => when.given_by_both(),
        Statement::Repeat(_) => Vec::new(),
    })
}

/// An entry of `expect:`.
#[derive(Clone, Debug)]
pub(super) struct Count {
    pub what: At<String>,
    pub n: usize,
}
