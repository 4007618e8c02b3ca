//! Syntax tree of a description.

use std::collections::HashSet;

use super::{
    error::{At, ModelError, Problem},
    expr::{Condition, Expr},
};
use crate::{
    graph::Sinusoid,
    ops::{Activation, BatchInput, PoolWeights, Side},
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

/// A graph that runs on its own.
#[derive(Clone, Debug)]
pub(super) struct PartOf {
    /// Name and stream, if the description has several parts.
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

/// A key of config.json that must be absent, null or one of `is`.
#[derive(Clone, Debug)]
pub(super) struct Requirement {
    pub key: At<String>,
    pub is: Vec<serde_json::Value>,
    /// Value that the model uses if the key is absent; `None` if any value in `is` is possible.
    pub default: Option<serde_json::Value>,
    /// If given, the requirement applies only if this other key of config.json has one of these values.
    pub only: Option<(At<String>, Vec<serde_json::Value>)>,
    /// Outputs for which the requirement applies; `None` for all.
    pub outputs: Option<Vec<At<String>>>,
}

/// A named number or activation. Its value is that of the first origin that is present.
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
    Let { name: At<String>, op: At<Operator> },
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

/// Table of an embedding.
#[derive(Clone, Debug)]
pub(super) enum Table {
    Stored(At<Pattern>),
    /// A computed table (`sinusoid`).
    Sinusoid(Sinusoid),
}

/// Position bias of attention scores, a function of the distance between query and key.
#[derive(Clone, Debug)]
pub(super) enum PositionBias {
    /// `relative_bias`: a table with one row per bucket of distances.
    Relative {
        table: At<Pattern>,
        buckets: At<Expr>,
        /// All distances of at least `reach` on one side share a bucket.
        reach: At<Expr>,
        bidirectional: bool,
    },
    /// `alibi`: computed slopes.
    Alibi,
}

/// Rows of a stored matrix.
#[derive(Clone, Debug)]
pub(super) struct RowsOf {
    /// Number of rows of the stored matrix.
    pub of: At<Expr>,
    /// Number of equal parts of the rows; 1 if not given.
    pub groups: Option<At<Expr>>,
    /// First row to read in each part.
    pub from: At<Expr>,
    /// Number of rows that are stored in pairs of neighbours, counted from the first row that is read of each part. The first rows of all
    /// pairs are put before the second rows. If not given, no rows are reordered.
    pub interleaved: Option<At<Expr>>,
}

/// A primitive operator with its operands by name.
#[derive(Clone, Debug)]
pub(super) enum Operator {
    Embedding {
        ids: At<BatchInput>,
        /// Id before the first token of a sequence, if `ids` are the previous ids.
        first: Option<At<Expr>>,
        table: Table,
        rows: At<Expr>,
        width: At<Expr>,
        offset: Option<At<Expr>>,
        /// Token id that gets no position.
        skips: Option<At<Expr>>,
    },
    Linear {
        x: At<String>,
        weight: At<Pattern>,
        bias: Option<At<Pattern>>,
        out: At<Expr>,
        /// Whether the weight is stored as `[in, out]`.
        in_out: bool,
        /// The rows that are read, if the weight is a part of a matrix.
        part: Option<RowsOf>,
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
    SoftCap {
        x: At<String>,
        cap: At<Expr>,
    },
    /// An activation that has its own operator, such as `gelu`, `relu` or `tanh`.
    Activate {
        x: At<String>,
        kind: Activation,
    },
    Multiply {
        a: At<String>,
        b: At<String>,
    },
    /// `activation`, whose kind is defined under `activations`.
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
        /// Number of equal parts of a row that are normalized separately.
        heads: Option<At<Expr>>,
        /// Whether 1 is added to the weight.
        plus_one: bool,
    },
    Rotary {
        x: At<String>,
        heads: At<Expr>,
        /// Number of leading columns of a head that are rotated.
        width: At<Expr>,
        /// Share of the `width` columns that is rotated, rounded down.
        part: Option<At<Expr>>,
        theta: At<Expr>,
        /// Keys of config.json. The first one present specifies the frequency scaling.
        scaling: Vec<At<String>>,
        /// Maximum number of positions of a sequence.
        longest: Option<At<Expr>>,
    },
    Cache {
        x: At<String>,
        heads: At<Expr>,
        /// Cache name, with indices of the enclosing loops.
        name: At<Pattern>,
    },
    /// `cache` without `x`.
    CrossCache {
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
    /// Rows of a checkpoint table, ordered by distance.
    PositionTable {
        table: At<Pattern>,
        width: At<Expr>,
        span: At<Expr>,
        /// If given, distances above half of `span` are scaled logarithmically, so that the distance `reach − 1` has the last row.
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
        /// Whether a query attends only to keys up to its own position.
        causal: bool,
        /// Maximum distance between query and key; `None` for any.
        window: Option<At<Expr>>,
        bias: Option<PositionBias>,
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
    WeightedPool {
        x: At<String>,
        weights: PoolWeights,
    },
    LastToken {
        x: At<String>,
        /// Id of the token that ends a sequence. Later tokens are padding.
        end: Option<At<Expr>>,
        /// If `end` has this value, the highest id of each sequence ends it.
        highest_end: Option<At<Expr>>,
        /// Id that the last token of each sequence must have.
        is: Option<At<Expr>>,
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
    /// Values that the operator reads.
    pub fn values(&self) -> Vec<&At<String>> {
        match self {
            Operator::Embedding { .. }
            | Operator::CrossCache { .. }
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
            | Operator::SoftCap { x, .. }
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
            | Operator::WeightedPool { x, .. }
            | Operator::LastToken { x, .. }
            | Operator::LogProbability { x }
            | Operator::L2Normalize { x, .. } => vec![x],
        }
    }

    /// Sizes of the operator, which are whole numbers.
    pub fn sizes(&self) -> Vec<&At<Expr>> {
        match self {
            Operator::Embedding {
                rows,
                width,
                first,
                offset,
                skips,
                ..
            } => [rows, width]
                .into_iter()
                .chain(first)
                .chain(offset)
                .chain(skips)
                .collect(),
            Operator::Linear { out, part, .. } => {
                let mut sizes = vec![out];
                if let Some(part) = part {
                    sizes.extend([&part.of, &part.from].into_iter().chain(&part.groups));
                }
                sizes
            }
            Operator::SplitHeads { heads, .. }
            | Operator::Cache { heads, .. }
            | Operator::RelativeScores { heads, .. } => vec![heads],
            Operator::PositionTable {
                width, span, reach, ..
            } => [width, span].into_iter().chain(reach).collect(),
            Operator::CrossCache { heads, width, .. } => vec![heads, width],
            Operator::Columns { from, width, .. } => vec![from, width],
            Operator::LastToken {
                end,
                highest_end,
                is,
                ..
            } => end.iter().chain(highest_end).chain(is).collect(),
            Operator::Rotary {
                heads,
                width,
                longest,
                ..
            } => [heads, width].into_iter().chain(longest).collect(),
            Operator::RmsNorm { heads, .. } => heads.iter().collect(),
            Operator::Softmax { window, bias, .. } => {
                let mut sizes: Vec<&At<Expr>> = window.iter().collect();
                if let Some(PositionBias::Relative { buckets, reach, .. }) = bias {
                    sizes.extend([buckets, reach]);
                }
                sizes
            }
            _ => Vec::new(),
        }
    }

    /// Attributes that are real numbers.
    pub fn reals(&self) -> Vec<&At<Expr>> {
        match self {
            Operator::Scale { by, .. } => vec![by],
            Operator::SoftCap { cap, .. } => vec![cap],
            Operator::LayerNorm { eps, .. }
            | Operator::RmsNorm { eps, .. }
            | Operator::L2Normalize { eps, .. } => vec![eps],
            Operator::Rotary { theta, part, .. } => {
                [Some(theta), part.as_ref()].into_iter().flatten().collect()
            }
            _ => Vec::new(),
        }
    }

    /// Names of the weights that the operator reads, and of its cache. They may contain indices.
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
                bias: Some(PositionBias::Relative { table, .. }),
                ..
            } => vec![table],
            Operator::PositionTable { table, .. } => vec![table],
            Operator::Cache { name, .. } | Operator::CrossCache { name, .. } => vec![name],
            _ => Vec::new(),
        }
    }
}

/// Published name of a weight with indices of the enclosing loops, such as `layer.{i}.weight`, followed by alternative names in
/// lookup order.
#[derive(Clone, Debug)]
pub(super) struct Pattern(pub Vec<Spelling>);

/// A name with expressions of indices and dimensions in braces.
#[derive(Clone, Debug)]
pub(super) struct Spelling(Vec<Part>);

#[derive(Clone, Debug)]
enum Part {
    Text(String),
    Number(Expr),
}

/// Maximum length of a name, longer than any published name. A name in a loop is expanded once per iteration.
const MAX_SPELLING: usize = 256;

impl Spelling {
    /// Parses `text`, which starts at byte `start` of the file. The error describes the expected form.
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

    /// Creates a fixed name, in which braces have no meaning.
    pub fn literal(text: &str) -> Self {
        Self(vec![Part::Text(text.to_owned())])
    }

    pub fn names(&self) -> impl Iterator<Item = &At<String>> {
        self.0.iter().flat_map(|part| match part {
            Part::Number(expr) => expr.names(),
            Part::Text(_) => Vec::new(),
        })
    }

    /// Expands the name with the numbers of the current iteration.
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

/// An entry of `expect:`.
#[derive(Clone, Debug)]
pub(super) struct Count {
    pub what: At<String>,
    pub n: usize,
}

/// Model inputs by the names that descriptions use. The first id of `previous_ids` is a field of the operator that reads this input.
pub(super) const INPUTS: [(&str, BatchInput); 4] = [
    ("token_ids", BatchInput::TokenIds),
    ("previous_ids", BatchInput::PreviousIds { first: 0 }),
    ("type_ids", BatchInput::TypeIds),
    ("positions", BatchInput::Positions),
];

/// Result of a decoder.
pub(super) type Decoded<T> = Result<T, ModelError>;

/// Creates a problem about a value with a wrong form.
pub(super) fn form(what: &str, expected: impl Into<String>, found: &str) -> Problem {
    Problem::Form {
        what: what.to_owned(),
        expected: expected.into(),
        found: format!("`{found}`"),
    }
}
