//! What a description consists of.

use std::collections::HashSet;

use super::{
    error::{At, ModelError, Problem},
    expr::{Condition, Expr},
};
use crate::{
    graph::Sinusoid,
    kernels::{Meta, attention::Side, gemm::Activation},
};

/// A description as written, each part with its place.
#[derive(Clone, Debug)]
pub(super) struct Ast {
    pub name: String,
    /// What config.json calls the models that this describes; any, where empty.
    pub model_types: Vec<String>,
    /// What is computed by default of checkpoints of an architecture.
    pub architectures: Vec<(String, Vec<At<String>>)>,
    pub prefixes: Vec<String>,
    /// An ending of weight names, and what some checkpoints write in its place.
    pub endings: Vec<(String, Vec<String>)>,
    /// The tensor of a head, and the table that the head is tied to.
    pub ties: Vec<(String, String)>,
    /// Names of tensors that change no output of the model, with one `*` for any text.
    pub ignores: Vec<String>,
    pub requirements: Vec<Requirement>,
    /// Keys that are names of one value: those that are there agree.
    pub equal: Vec<Vec<At<String>>>,
    pub dims: Vec<Definition>,
    pub reals: Vec<Definition>,
    pub activations: Vec<Definition>,
    /// One without a name where the file has `graph:`, else those of `parts:` in their order.
    pub parts: Vec<PartOf>,
    pub default_outputs: Vec<At<String>>,
    pub expect: Vec<Count>,
}

/// A graph that runs by itself.
#[derive(Clone, Debug)]
pub(super) struct PartOf {
    /// Its name and its stream, where there are several.
    pub named: Option<(At<String>, At<String>)>,
    pub body: Vec<Statement>,
    /// Name of the output, name of the value.
    pub outputs: Vec<(At<String>, At<String>)>,
    pub expect: Vec<Count>,
}

impl Ast {
    /// The outputs of all parts, in the order of the file.
    pub fn outputs(&self) -> impl Iterator<Item = &(At<String>, At<String>)> {
        self.parts.iter().flat_map(|part| &part.outputs)
    }
}

/// A key of config.json that must be absent, null or one of `is`.
#[derive(Clone, Debug)]
pub(super) struct Requirement {
    pub key: At<String>,
    pub is: Vec<serde_json::Value>,
    /// The value that the model has without the key; one of `is`, where `None`.
    pub default: Option<serde_json::Value>,
    /// Only where another key has one of these values.
    pub only: Option<(At<String>, Vec<serde_json::Value>)>,
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
    When(When),
}

#[derive(Clone, Debug)]
pub(super) struct Repeat {
    pub times: At<Expr>,
    /// The first value of the index; 0, where `None`.
    pub from: Option<At<Expr>>,
    pub index: At<String>,
    /// Values of iteration 3 are called `label.3.…` in the graph.
    pub label: At<String>,
    pub body: Vec<Statement>,
    pub expect: Vec<Count>,
}

/// One of two bodies, by config.json or by sizes.
#[derive(Clone, Debug)]
pub(super) struct When {
    pub test: Test,
    /// Values of either body are called `label.…` in the graph, where there is one.
    pub label: Option<At<String>>,
    pub body: Vec<Statement>,
    pub otherwise: Vec<Statement>,
    /// What counts where the one body or the other is taken.
    pub expect: Vec<Count>,
    pub expect_otherwise: Vec<Count>,
}

#[derive(Clone, Debug)]
pub(super) enum Test {
    /// The key of config.json has one of these values; absent and null are the value `null`.
    Key {
        /// With indices of the loops around.
        key: At<Spelling>,
        is: Vec<serde_json::Value>,
        /// What decides where the key is not there.
        absent: Option<At<Condition>>,
    },
    Holds(At<Condition>),
}

impl When {
    /// Names that both bodies give, in the order of the first: what follows may read them.
    pub fn given_by_both(&self) -> Vec<&At<String>> {
        let other: HashSet<&str> = given(&self.otherwise).map(|n| n.value.as_str()).collect();
        let names = given(&self.body);
        names.filter(|n| other.contains(n.value.as_str())).collect()
    }
}

/// Names that a body gives, with those of both bodies of a `When` inside.
pub(super) fn given(body: &[Statement]) -> impl Iterator<Item = &At<String>> {
    body.iter().flat_map(|statement| match statement {
        Statement::Let { name, .. } => vec![name],
        Statement::When(when) => when.given_by_both(),
        Statement::Repeat(_) => Vec::new(),
    })
}

/// What an embedding looks rows up in.
#[derive(Clone, Debug)]
pub(super) enum Table {
    Stored(At<Pattern>),
    /// Computed: `sinusoid`.
    Sinusoid(Sinusoid),
}

/// What is added to scores by the distance between query and key.
#[derive(Clone, Debug)]
pub(super) enum ByDistance {
    /// `relative_bias`: a table with a row for each bucket of distances.
    Relative {
        table: At<Pattern>,
        buckets: At<Expr>,
        /// The distance from which on all share a bucket.
        reach: At<Expr>,
        bidirectional: bool,
    },
    /// `alibi`: slopes that are computed.
    Alibi,
}

/// A primitive operator with its operands by name.
#[derive(Clone, Debug)]
pub(super) enum Operator {
    Embedding {
        ids: At<Meta>,
        table: Table,
        rows: At<Expr>,
        width: At<Expr>,
        offset: Option<At<Expr>>,
        /// A token id that positions are not counted for.
        skips: Option<At<Expr>>,
    },
    Linear {
        x: At<String>,
        weight: At<Pattern>,
        bias: Option<At<Pattern>>,
        out: At<Expr>,
        /// Whether the weight is stored as `[in, out]`.
        in_out: bool,
        /// The rows that the stored matrix has and the first of them that are the weight's, where it is a part of one.
        part: Option<(At<Expr>, At<Expr>)>,
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
    Multiply {
        a: At<String>,
        b: At<String>,
    },
    NamedActivation {
        x: At<String>,
        kind: At<String>,
    },
    LayerNorm {
        x: At<String>,
        weight: At<Pattern>,
        bias: Option<At<Pattern>>,
        eps: At<Expr>,
    },
    RmsNorm {
        x: At<String>,
        weight: At<Pattern>,
        eps: At<Expr>,
        /// Equal parts of a row, each normalised by itself.
        heads: Option<At<Expr>>,
        /// Whether 1 is added to the weight.
        plus_one: bool,
    },
    Rotary {
        x: At<String>,
        heads: At<Expr>,
        /// Columns of a head that are turned, its first.
        width: At<Expr>,
        theta: At<Expr>,
        /// Keys of config.json of which the first that is there says how frequencies are scaled.
        scaling: Vec<At<String>>,
        /// The most positions of a sequence for which this is what the model computes.
        longest: Option<At<Expr>>,
    },
    Cache {
        x: At<String>,
        heads: At<Expr>,
        /// What the rows are kept under, with the indices of the loops around.
        name: At<Pattern>,
    },
    /// `cache` without `x`.
    Remembered {
        heads: At<Expr>,
        width: At<Expr>,
        name: At<Pattern>,
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
    /// Rows of a table of the checkpoint by distance, as a value.
    PositionTable {
        table: At<Pattern>,
        width: At<Expr>,
        span: At<Expr>,
        /// The distance whose logarithm has the last row; no logarithms, where `None`.
        reach: Option<At<Expr>>,
    },
    RelativeScores {
        x: At<String>,
        table: At<String>,
        heads: At<Expr>,
        of: Side,
    },
    Softmax {
        x: At<String>,
        /// Whether a query attends to the keys up to its own only.
        causal: bool,
        /// How far a key may be from its query; any distance, where `None`.
        window: Option<At<Expr>>,
        bias: Option<ByDistance>,
    },
    Columns {
        x: At<String>,
        from: At<Expr>,
        width: At<Expr>,
    },
    /// Another name for a value.
    Same {
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
        /// The id of the token that ends a sequence, behind which all is padding.
        end: Option<At<Expr>>,
        /// The value of `end` that stands for the highest id of each sequence.
        highest_end: Option<At<Expr>>,
    },
    Concat {
        of: Vec<At<String>>,
    },
    LogProbability {
        x: At<String>,
    },
    Draw {
        mean: At<String>,
        log_variance: At<String>,
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
            Operator::Embedding { .. }
            | Operator::Remembered { .. }
            | Operator::PositionTable { .. } => Vec::new(),
            Operator::RelativeScores { x, table, .. } => vec![x, table],
            Operator::Concat { of } => of.iter().collect(),
            Operator::Add { a, b }
            | Operator::Multiply { a, b }
            | Operator::Matmul { a, b, .. } => vec![a, b],
            Operator::Draw { mean, log_variance } => vec![mean, log_variance],
            Operator::Linear { x, .. }
            | Operator::AddBias { x, .. }
            | Operator::Scale { x, .. }
            | Operator::Activate { x, .. }
            | Operator::NamedActivation { x, .. }
            | Operator::LayerNorm { x, .. }
            | Operator::RmsNorm { x, .. }
            | Operator::Rotary { x, .. }
            | Operator::Cache { x, .. }
            | Operator::SplitHeads { x, .. }
            | Operator::MergeHeads { x }
            | Operator::Softmax { x, .. }
            | Operator::Columns { x, .. }
            | Operator::Same { x }
            | Operator::FirstToken { x }
            | Operator::MeanPool { x }
            | Operator::MaxPool { x }
            | Operator::LastToken { x, .. }
            | Operator::LogProbability { x }
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
                skips,
                ..
            } => [rows, width]
                .into_iter()
                .chain(offset)
                .chain(skips)
                .collect(),
            Operator::Linear { out, part, .. } => {
                let mut sizes = vec![out];
                sizes.extend(part.iter().flat_map(|(of, from)| [of, from]));
                sizes
            }
            Operator::SplitHeads { heads, .. }
            | Operator::Cache { heads, .. }
            | Operator::RelativeScores { heads, .. } => vec![heads],
            Operator::PositionTable {
                width, span, reach, ..
            } => [width, span].into_iter().chain(reach).collect(),
            Operator::Remembered { heads, width, .. } => vec![heads, width],
            Operator::Columns { from, width, .. } => vec![from, width],
            Operator::LastToken {
                end, highest_end, ..
            } => end.iter().chain(highest_end).collect(),
            Operator::Rotary {
                heads,
                width,
                longest,
                ..
            } => [heads, width].into_iter().chain(longest).collect(),
            Operator::RmsNorm { heads, .. } => heads.iter().collect(),
            Operator::Softmax { window, bias, .. } => {
                let mut sizes: Vec<&At<Expr>> = window.iter().collect();
                if let Some(ByDistance::Relative { buckets, reach, .. }) = bias {
                    sizes.extend([buckets, reach]);
                }
                sizes
            }
            _ => Vec::new(),
        }
    }

    /// The attributes that are real numbers.
    pub fn reals(&self) -> Vec<&At<Expr>> {
        match self {
            Operator::Scale { by, .. } => vec![by],
            Operator::LayerNorm { eps, .. }
            | Operator::RmsNorm { eps, .. }
            | Operator::L2Normalize { eps, .. } => vec![eps],
            Operator::Rotary { theta, .. } => vec![theta],
            _ => Vec::new(),
        }
    }

    /// The names with indices: of weights that the operator reads, and of a cache.
    pub fn weights(&self) -> Vec<&At<Pattern>> {
        match self {
            Operator::Embedding {
                table: Table::Stored(table),
                ..
            } => vec![table],
            Operator::Linear { weight, bias, .. } => [weight].into_iter().chain(bias).collect(),
            Operator::AddBias { bias, .. } => vec![bias],
            Operator::LayerNorm { weight, bias, .. } => [weight].into_iter().chain(bias).collect(),
            Operator::RmsNorm { weight, .. } => vec![weight],
            Operator::Softmax {
                bias: Some(ByDistance::Relative { table, .. }),
                ..
            } => vec![table],
            Operator::PositionTable { table, .. } => vec![table],
            Operator::Cache { name, .. } | Operator::Remembered { name, .. } => vec![name],
            _ => Vec::new(),
        }
    }
}

/// A weight's published name, with the indices of the loops around it: `layer.{i}.weight`. What else
/// checkpoints call it stands behind, in the order in which the names are looked for.
#[derive(Clone, Debug)]
pub(super) struct Pattern(pub Vec<Spelling>);

/// One name, with expressions of indices and dimensions in braces.
#[derive(Clone, Debug)]
pub(super) struct Spelling(Vec<Part>);

#[derive(Clone, Debug)]
enum Part {
    Text(String),
    Number(Expr),
}

/// Longer than any published name. A name in a loop is filled in once for each iteration.
const MAX_SPELLING: usize = 256;

impl Spelling {
    /// Reads `text`, which stands in the file from `start` on; the error says what was expected.
    pub fn parse(text: &str, start: usize) -> Result<Self, String> {
        if text.is_empty() {
            return Err("at least one character".to_owned());
        }
        if text.len() > MAX_SPELLING {
            return Err(format!("at most {MAX_SPELLING} bytes"));
        }
        let mut parts = Vec::new();
        let mut at = 0;
        while let Some(open) = text[at..].find(['{', '}']).map(|n| at + n) {
            let close = text[open..].find('}').filter(|&close| close > 0);
            let close =
                open + close.ok_or("matching braces around an index, as in `layer.{i}.weight`")?;
            parts.push(Part::Text(text[at..open].to_owned()));
            let inner = Expr::parse(&text[open + 1..close], start + open + 1).map_err(|why| {
                format!("an index or an expression in the braces, as in `layer.{{2 * i}}.weight` ({why})")
            })?;
            parts.push(Part::Number(inner));
            at = close + 1;
        }
        parts.push(Part::Text(text[at..].to_owned()));
        Ok(Self(parts))
    }

    /// The name `text`, braces included.
    pub fn literal(text: &str) -> Self {
        Self(vec![Part::Text(text.to_owned())])
    }

    pub fn names(&self) -> impl Iterator<Item = &At<String>> {
        self.0.iter().flat_map(|part| match part {
            Part::Number(expr) => expr.names(),
            Part::Text(_) => Vec::new(),
        })
    }

    /// The name, given the numbers of the iteration at hand.
    pub fn fill(&self, lookup: &impl Fn(&str) -> Option<u64>) -> Result<String, String> {
        let mut name = String::new();
        for part in &self.0 {
            match part {
                Part::Text(text) => name.push_str(text),
                Part::Number(expr) => name.push_str(&expr.whole(lookup)?.to_string()),
            }
        }
        Ok(name)
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
pub(super) const ACTIVATIONS: [(&str, Activation); 10] = [
    ("gelu", Activation::GeluExact),
    ("gelu_python", Activation::GeluExact),
    ("gelu_new", Activation::GeluTanh),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("relu", Activation::Relu),
    ("tanh", Activation::Tanh),
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("quick_gelu", Activation::QuickGelu),
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
