//! What a description consists of.

use super::{
    error::{At, ModelError, Problem},
    expr::Expr,
};
use crate::kernels::{Meta, gemm::Activation};

/// A description as written, each part with its place.
#[derive(Clone, Debug)]
pub(super) struct Ast {
    pub name: String,
    pub prefixes: Vec<String>,
    pub requirements: Vec<Requirement>,
    pub dims: Vec<Definition>,
    pub reals: Vec<Definition>,
    pub activations: Vec<Definition>,
    pub body: Vec<Statement>,
    /// Name of the output, name of the value.
    pub outputs: Vec<(At<String>, At<String>)>,
    pub default_outputs: Vec<At<String>>,
    pub expect: Vec<Count>,
}

/// A key of config.json that must be absent, null or `is`.
#[derive(Clone, Debug)]
pub(super) struct Requirement {
    pub key: At<String>,
    pub is: serde_json::Value,
    /// Only where one of these outputs is asked for; always, where `None`.
    pub outputs: Option<Vec<At<String>>>,
}

/// A named number or activation; the first origin that is there gives its value.
#[derive(Clone, Debug)]
pub(super) struct Definition {
    pub name: At<String>,
    pub origins: Vec<At<Origin>>,
}

#[derive(Clone, Debug)]
pub(super) enum Origin {
    /// The value of a key of config.json.
    Key(String),
    /// The number of entries of a list or an object of config.json.
    Length(String),
    Expr(Expr),
    /// An activation by its name.
    Word(String),
}

#[derive(Clone, Debug)]
pub(super) enum Statement {
    Let { name: At<String>, op: At<Operator> },
    Repeat(Repeat),
}

#[derive(Clone, Debug)]
pub(super) struct Repeat {
    pub times: At<Expr>,
    pub index: At<String>,
    /// Values of iteration 3 are called `label.3.…` in the graph.
    pub label: At<String>,
    pub body: Vec<Statement>,
    pub expect: Vec<Count>,
}

/// A primitive operator with its operands by name.
#[derive(Clone, Debug)]
pub(super) enum Operator {
    Embedding {
        ids: At<Meta>,
        table: At<Pattern>,
        rows: At<Expr>,
        width: At<Expr>,
        offset: Option<At<Expr>>,
    },
    Linear {
        x: At<String>,
        weight: At<Pattern>,
        bias: Option<At<Pattern>>,
        out: At<Expr>,
    },
    AddBias {
        x: At<String>,
        bias: At<Pattern>,
    },
    Add {
        a: At<String>,
        b: At<String>,
    },
    Scale {
        x: At<String>,
        by: At<Expr>,
    },
    /// `gelu`, `relu`, `tanh`.
    Activate {
        x: At<String>,
        kind: Activation,
    },
    /// `activation`: the kind stands under `activations`.
    NamedActivation {
        x: At<String>,
        kind: At<String>,
    },
    LayerNorm {
        x: At<String>,
        weight: At<Pattern>,
        bias: At<Pattern>,
        eps: At<Expr>,
    },
    SplitHeads {
        x: At<String>,
        heads: At<Expr>,
    },
    MergeHeads {
        x: At<String>,
    },
    Matmul {
        a: At<String>,
        b: At<String>,
        transpose_b: bool,
    },
    Softmax {
        x: At<String>,
    },
    FirstToken {
        x: At<String>,
    },
    MeanPool {
        x: At<String>,
    },
    MaxPool {
        x: At<String>,
    },
    LastToken {
        x: At<String>,
    },
    Concat {
        of: Vec<At<String>>,
    },
    L2Normalize {
        x: At<String>,
        eps: At<Expr>,
    },
}

impl Operator {
    /// The values that the operator reads.
    pub fn values(&self) -> Vec<&At<String>> {
        match self {
            Operator::Embedding { .. } => Vec::new(),
            Operator::Concat { of } => of.iter().collect(),
            Operator::Add { a, b } | Operator::Matmul { a, b, .. } => vec![a, b],
            Operator::Linear { x, .. }
            | Operator::AddBias { x, .. }
            | Operator::Scale { x, .. }
            | Operator::Activate { x, .. }
            | Operator::NamedActivation { x, .. }
            | Operator::LayerNorm { x, .. }
            | Operator::SplitHeads { x, .. }
            | Operator::MergeHeads { x }
            | Operator::Softmax { x }
            | Operator::FirstToken { x }
            | Operator::MeanPool { x }
            | Operator::MaxPool { x }
            | Operator::LastToken { x }
            | Operator::L2Normalize { x, .. } => vec![x],
        }
    }

    /// The sizes, in whole numbers.
    pub fn sizes(&self) -> Vec<&At<Expr>> {
        match self {
            Operator::Embedding {
                rows,
                width,
                offset,
                ..
            } => [rows, width].into_iter().chain(offset).collect(),
            Operator::Linear { out, .. } => vec![out],
            Operator::SplitHeads { heads, .. } => vec![heads],
            _ => Vec::new(),
        }
    }

    /// The attributes that are real numbers.
    pub fn reals(&self) -> Vec<&At<Expr>> {
        match self {
            Operator::Scale { by, .. } => vec![by],
            Operator::LayerNorm { eps, .. } | Operator::L2Normalize { eps, .. } => vec![eps],
            _ => Vec::new(),
        }
    }

    /// The weights that the operator reads.
    pub fn weights(&self) -> Vec<&At<Pattern>> {
        match self {
            Operator::Embedding { table, .. } => vec![table],
            Operator::Linear { weight, bias, .. } => [weight].into_iter().chain(bias).collect(),
            Operator::AddBias { bias, .. } => vec![bias],
            Operator::LayerNorm { weight, bias, .. } => vec![weight, bias],
            _ => Vec::new(),
        }
    }
}

/// A weight's published name, with the indices of the loops around it: `layer.{i}.weight`.
#[derive(Clone, Debug)]
pub(super) struct Pattern(Vec<Part>);

#[derive(Clone, Debug)]
enum Part {
    Text(String),
    Index(String),
}

/// Longer than any published name. A pattern in a loop is filled in once for each iteration.
const MAX_PATTERN: usize = 256;

impl Pattern {
    /// The error says what was expected.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        if text.is_empty() {
            return Err("at least one character");
        }
        if text.len() > MAX_PATTERN {
            return Err("at most 256 bytes");
        }
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some(open) = rest.find(['{', '}']) {
            let (before, from) = rest.split_at(open);
            let close = from.find('}').filter(|&close| close > 0);
            let close = close.ok_or("matching braces around an index, as in `layer.{i}.weight`")?;
            parts.push(Part::Text(before.to_owned()));
            parts.push(Part::Index(from[1..close].to_owned()));
            rest = &from[close + 1..];
        }
        parts.push(Part::Text(rest.to_owned()));
        Ok(Self(parts))
    }

    pub fn indices(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| match part {
            Part::Index(name) => Some(name.as_str()),
            Part::Text(_) => None,
        })
    }

    /// The name, given the indices of the iteration at hand.
    pub fn fill(&self, indices: &[(String, u64)]) -> String {
        let mut name = String::new();
        for part in &self.0 {
            match part {
                Part::Text(text) => name.push_str(text),
                Part::Index(index) => {
                    // The check of names has found every index.
                    let found = indices.iter().find(|(i, _)| i == index);
                    name.push_str(&found.map(|(_, k)| k.to_string()).unwrap_or_default());
                }
            }
        }
        name
    }
}

/// One entry of `expect:`.
#[derive(Clone, Debug)]
pub(super) struct Count {
    pub what: At<String>,
    pub n: usize,
}

/// An activation by the name that config.json gives it.
pub(super) fn activation(name: &str) -> Option<Activation> {
    ACTIVATIONS
        .iter()
        .find(|(n, _)| *n == name)
        .map(|&(_, kind)| kind)
}

/// Published names of activations.
pub(super) const ACTIVATIONS: [(&str, Activation); 7] = [
    ("gelu", Activation::GeluExact),
    ("gelu_python", Activation::GeluExact),
    ("gelu_new", Activation::GeluTanh),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("relu", Activation::Relu),
    ("tanh", Activation::Tanh),
];

/// Inputs of a model, by the names that descriptions use.
pub(super) const INPUTS: [(&str, Meta); 3] = [
    ("token_ids", Meta::TokenIds),
    ("type_ids", Meta::TypeIds),
    ("positions", Meta::Positions),
];

/// What a decoder returns.
pub(super) type Decoded<T> = Result<T, ModelError>;

/// The problem of a value with a wrong form.
pub(super) fn form(what: &str, expected: impl Into<String>, found: &str) -> Problem {
    Problem::Form {
        what: what.to_owned(),
        expected: expected.into(),
        found: format!("`{found}`"),
    }
}
