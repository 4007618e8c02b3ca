use std::{borrow::Cow, fmt};

use serde::{Deserialize, Serialize};

use crate::kernels::{
    Meta,
    attention::{Attending, Bias, ByDistance, HeadView, Side},
    gemm::{Activation, Epilogue},
    rotary::Rotation,
};

/// Where a weight comes from: a tensor of the checkpoint, or something computed from several
/// once, at load time.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WeightExpr {
    /// A tensor under its published name, without the checkpoint's prefix.
    Stored { name: String, dims: Vec<u64> },
    /// A matrix of the checkpoint with rows and columns exchanged; `dims` as it is stored.
    Transposed { name: String, dims: Vec<u64> },
    /// A table of positions `[rows, width]`, computed and in no checkpoint.
    Sinusoid {
        style: Sinusoid,
        rows: u64,
        width: u64,
    },
    /// Biases by distance `[heads, 2·reach + 1]` of a table of the checkpoint with a row for each bucket, `dims` of it.
    RelativeBias {
        name: String,
        dims: [u64; 2],
        buckets: Buckets,
    },
    /// Rows of a table of relative positions, `dims` of it, by distance: `[2·farthest + 1, width]`.
    Positions {
        name: String,
        dims: [u64; 2],
        positions: Positions,
    },
    /// The slope of each head, `[heads]`, computed and in no checkpoint.
    Slopes { heads: u64 },
    /// Rows `from ..` of a matrix of the checkpoint, `dims` of it as it is stored.
    Rows {
        name: String,
        dims: [u64; 2],
        from: u64,
        rows: u64,
    },
    /// A tensor of the checkpoint, to each element of which 1 is added.
    PlusOne { name: String, dims: Vec<u64> },
    /// A vector of zeros, such as the bias of a norm that has none.
    Zeros { n: u64 },
    /// Tensors stacked along their first dimension.
    ConcatRows(#[serde(deserialize_with = "parts")] Vec<WeightExpr>),
}

/// Which frequencies a table of sines and cosines has. Row `p` holds `sin(p · f[j])` in its first half of columns and
/// `cos(p · f[j])` in the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Sinusoid {
    /// `f[j] = 10000^(−2j / width)` (Vaswani et al. 2017, 3.5).
    OverWidth,
    /// `f[j] = 10000^(−j / (width / 2 − 1))`, as tensor2tensor and fairseq have them.
    OverHalf,
}

impl Sinusoid {
    /// The element of a row and column of a table that is so wide.
    pub fn at(self, row: u64, column: u64, width: u64) -> f64 {
        let half = width / 2;
        let nth = (column % half.max(1)) as f64;
        let exponent = match self {
            Sinusoid::OverWidth => 2.0 * nth / width as f64,
            Sinusoid::OverHalf => nth / (half as f64 - 1.0),
        };
        let angle = row as f64 * 10_000f64.powf(-exponent);
        match column < half {
            true => angle.sin(),
            false => angle.cos(),
        }
    }
}

/// How distances between tokens share the rows of a table of biases (Raffel et al. 2020, section 2.1): near ones have a row
/// each, and the rows of farther ones are as wide as the logarithm of the distance makes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Buckets {
    /// Rows of the table.
    pub n: u32,
    /// The distance from which on all have the last row of their side.
    pub reach: u32,
    /// Whether keys behind the query have half of the rows, else the first.
    pub bidirectional: bool,
}

impl Buckets {
    /// Rows of each side of the query.
    fn of_side(self) -> u32 {
        match self.bidirectional {
            true => self.n / 2,
            false => self.n,
        }
    }

    /// What is wrong with these numbers, if anything is: what was found, and what was expected.
    pub fn problem(self) -> Option<(String, String)> {
        let exact = self.of_side() / 2;
        if exact == 0 || (self.bidirectional && !self.n.is_multiple_of(2)) {
            let expected = match self.bidirectional {
                true => "an even number from 4 on",
                false => "2 or more",
            };
            return Some((format!("{} buckets", self.n), expected.to_owned()));
        }
        if self.reach <= exact || self.reach > ByDistance::FARTHEST {
            let found = format!("{} buckets up to a distance of {}", self.n, self.reach);
            let farthest = ByDistance::FARTHEST;
            return Some((
                found,
                format!("a distance from {} to {farthest}", exact + 1),
            ));
        }
        None
    }

    /// The row of a distance, the key's position less the query's. Divisions are in f32, as in transformers.
    pub fn row(self, distance: i64) -> u64 {
        let side = self.of_side();
        let first = match self.bidirectional && distance > 0 {
            true => u64::from(side),
            false => 0,
        };
        let far = match self.bidirectional {
            true => distance.unsigned_abs(),
            false => distance.min(0).unsigned_abs(),
        };
        let exact = u64::from(side / 2);
        if far < exact {
            return first + far;
        }
        let logarithm = |ratio: f64| ratio.ln() as f32;
        let ratio = logarithm(f64::from(far as f32 / exact as f32))
            / logarithm(f64::from(self.reach) / exact as f64);
        let steps = (ratio * (u64::from(side) - exact) as f32) as u64;
        first + (exact + steps).min(u64::from(side) - 1)
    }
}

/// Which row of a table of relative positions, `[2·span, width]`, a distance has (DeBERTa: He et al. 2021, arXiv:2006.03654, section
/// 3.1, and arXiv:2111.09543's code): row `span + r` with `r` of query less key, at most `span − 1` and at least `−span`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Positions {
    pub span: u32,
    /// Up to half of the span `r` is the distance itself, and from there on its logarithm, so that the distance `reach − 1` has the
    /// last row; the distance itself everywhere, where `None`.
    pub reach: Option<u32>,
}

impl Positions {
    /// What is wrong with these numbers, if anything is: what was found, and what was expected.
    pub fn problem(self) -> Option<(String, String)> {
        let Some(reach) = self.reach else {
            return match (1..=ByDistance::FARTHEST).contains(&self.span) {
                true => None,
                false => {
                    let expected = format!("1 to {}", ByDistance::FARTHEST);
                    Some((format!("a span of {}", self.span), expected))
                }
            };
        };
        let found = format!("a span of {} and a reach of {reach}", self.span);
        let middle = self.span / 2;
        if middle < 2 || reach <= middle + 1 || self.farthest().is_none() {
            let expected = format!(
                "a span from 4 on, and a reach from half of it and 2 on whose last row is within a distance of {}",
                ByDistance::FARTHEST
            );
            return Some((found, expected));
        }
        None
    }

    /// The row of a distance, the key's position less the query's. Logarithms are divided in f32, as in transformers.
    pub fn row(self, distance: i64) -> u64 {
        let span = i64::from(self.span);
        let relative = -distance;
        let bucket = match self.reach {
            None => relative,
            Some(reach) => {
                let middle = span / 2;
                let far = relative.unsigned_abs();
                if far <= middle.unsigned_abs() {
                    relative
                } else {
                    let logarithm = |ratio: f32| f64::from(ratio).ln() as f32;
                    let whole = logarithm(((f64::from(reach) - 1.0) / middle as f64) as f32);
                    let steps = logarithm(far as f32 / middle as f32) / whole;
                    let steps = (steps * (middle - 1) as f32).ceil();
                    relative.signum() * (steps as i64 + middle)
                }
            }
        };
        bucket
            .saturating_add(span)
            .clamp(0, 2 * span - 1)
            .unsigned_abs()
    }

    /// The distance from which on all have the last row of their side; `None` where that is too far.
    pub fn farthest(self) -> Option<u32> {
        let last = 2 * u64::from(self.span) - 1;
        let is_far = |far: u32| {
            let far = i64::from(far);
            self.row(far) == 0 && self.row(-far) == last
        };
        // Rows are monotone in the distance.
        let (mut near, mut far) = (0, 1);
        while !is_far(far) {
            if far >= ByDistance::FARTHEST {
                return None;
            }
            (near, far) = (far, 2 * far);
        }
        while far - near > 1 {
            let middle = near + (far - near) / 2;
            match is_far(middle) {
                true => far = middle,
                false => near = middle,
            }
        }
        Some(far)
    }
}

/// The slope of a head: a geometric sequence that begins at its ratio, 2^(−8 / n) for n heads, where n is a power of two;
/// other numbers of heads take those of the next smaller power, and then every other one of the next larger (Press et al.
/// 2022, section 3, and their code).
pub fn slope(head: u64, heads: u64) -> f64 {
    let power = 1u64 << heads.max(1).ilog2();
    let (nth, of) = match head < power {
        true => (head + 1, power),
        false => (2 * (head - power) + 1, 2 * power),
    };
    2f64.powf(-8.0 * nth as f64 / of as f64)
}

/// Reads the parts of a stack, none of which is a stack: nesting without end would overflow the
/// reader's own.
fn parts<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<WeightExpr>, D::Error> {
    #[derive(Deserialize)]
    enum Part {
        Stored {
            name: String,
            dims: Vec<u64>,
        },
        Transposed {
            name: String,
            dims: Vec<u64>,
        },
        Rows {
            name: String,
            dims: [u64; 2],
            from: u64,
            rows: u64,
        },
    }
    let parts = Vec::<Part>::deserialize(from)?;
    Ok(parts
        .into_iter()
        .map(|part| match part {
            Part::Stored { name, dims } => WeightExpr::Stored { name, dims },
            Part::Transposed { name, dims } => WeightExpr::Transposed { name, dims },
            Part::Rows {
                name,
                dims,
                from,
                rows,
            } => WeightExpr::Rows {
                name,
                dims,
                from,
                rows,
            },
        })
        .collect())
}

impl WeightExpr {
    pub fn dims(&self) -> Vec<u64> {
        match self {
            WeightExpr::Stored { dims, .. } | WeightExpr::PlusOne { dims, .. } => dims.clone(),
            WeightExpr::Transposed { dims, .. } => dims.iter().rev().copied().collect(),
            WeightExpr::Rows { dims, rows, .. } => vec![*rows, dims[1]],
            WeightExpr::Sinusoid { rows, width, .. } => vec![*rows, *width],
            WeightExpr::RelativeBias { dims, buckets, .. } => {
                vec![dims[1], 2 * u64::from(buckets.reach) + 1]
            }
            WeightExpr::Positions {
                dims, positions, ..
            } => {
                let farthest = u64::from(positions.farthest().unwrap_or(0));
                vec![2 * farthest + 1, dims[1]]
            }
            WeightExpr::Slopes { heads } => vec![*heads],
            WeightExpr::Zeros { n } => vec![*n],
            WeightExpr::ConcatRows(parts) => {
                let mut dims = parts.first().map(WeightExpr::dims).unwrap_or_default();
                if let Some(rows) = dims.first_mut() {
                    *rows = parts.iter().filter_map(|p| p.dims().first().copied()).sum();
                }
                dims
            }
        }
    }

    /// The stored tensors that take part, in order.
    pub fn stored(&self) -> Vec<(&str, &[u64])> {
        match self {
            WeightExpr::Stored { name, dims }
            | WeightExpr::Transposed { name, dims }
            | WeightExpr::PlusOne { name, dims } => {
                vec![(name, dims)]
            }
            WeightExpr::RelativeBias { name, dims, .. }
            | WeightExpr::Rows { name, dims, .. }
            | WeightExpr::Positions { name, dims, .. } => vec![(name, dims)],
            WeightExpr::Sinusoid { .. } | WeightExpr::Slopes { .. } | WeightExpr::Zeros { .. } => {
                Vec::new()
            }
            WeightExpr::ConcatRows(parts) => parts.iter().flat_map(WeightExpr::stored).collect(),
        }
    }
}

/// An operator. The first block is what descriptions are written in; the second is what the passes
/// make of it. Operands are listed in the order of the edges' slots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Op {
    /// Data of the batch: `[tokens]`.
    Input(Meta),
    /// A constant of the model.
    Weight(WeightExpr),
    /// `ids, table` → `[tokens, width]`; `offset` is added to the ids.
    Embedding { offset: u32 },
    /// `x, weight, (bias), (residual)` → `act(x · weightᵀ + bias) + residual`; a description writes it without epilogue.
    Linear { epilogue: Epilogue },
    /// `x, bias`.
    AddBias,
    /// `a, b` of one shape.
    Add,
    /// `a, b` of one shape, element by element.
    Multiply,
    /// One value at a time.
    Activate(Activation),
    /// `by · x`.
    Scale { by: f32 },
    /// `x, gamma, beta`, over the last dimension.
    LayerNorm { eps: f32 },
    /// `x, weight`: each of `heads` parts of a row, as wide as the weight, from column `from` on, over its root mean square,
    /// times the weight.
    RmsNorm { eps: f32, heads: u32, from: u32 },
    /// `[tokens, width]`: rotary position embedding of each head of `head` columns, from column `from` on.
    Rotary {
        rotation: Rotation,
        from: u32,
        head: u32,
    },
    /// Columns `from ..` of `x`, as wide as `heads` heads of `head`: rows that later tokens of the sequence read too.
    Cache {
        name: String,
        from: u32,
        heads: u32,
        head: u32,
    },
    /// Rows that another part of the model added to a cache: `[source_slots, heads·head]`.
    Remembered { name: String, heads: u32, head: u32 },
    /// `[tokens, heads·head]` → `[heads, tokens, head]`.
    SplitHeads { heads: u32 },
    /// `[heads, tokens, head]` → `[tokens, heads·head]`.
    MergeHeads,
    /// `q, k` → `[heads, pairs]`: `q · kᵀ`, each sequence by itself; a key head serves `heads / kv_heads` query heads.
    Scores {
        heads: u32,
        kv_heads: u32,
        head: u32,
        q: HeadView,
        k: HeadView,
    },
    /// `x, table` → `[heads, pairs]`: `x · table[distance]`, of the row of each pair's query or key, and of the table's row for the
    /// key's position less the query's, of `[2·reach + 1, heads·head]`; farther ones have the last row of their side.
    RelativeScores { heads: u32, head: u32, of: Side },
    /// `scores, (bias)`: softmax of `scale · scores + bias` over the keys; if causal, over those up to the query, and over
    /// those of a window alone, where there is one.
    Softmax {
        scale: f32,
        causal: bool,
        by: ByDistance,
    },
    /// `probabilities, v` → the weighted sums of `v`, laid out as `out` says.
    Context {
        heads: u32,
        kv_heads: u32,
        head: u32,
        v: HeadView,
        out: HeadView,
    },
    /// First token of each sequence: `[tokens, width]` → `[batch, width]`.
    FirstToken,
    /// `[tokens, width]` → `[batch, width]`.
    LastToken,
    /// Mean over each sequence: `[tokens, width]` → `[batch, width]`.
    MeanPool,
    /// `[tokens, width]` → `[batch, width]`: the largest of each column.
    MaxPool,
    /// So many of one number of rows, side by side: `[rows, w1]`, `[rows, w2]`, … → `[rows, w1 + w2 + …]`.
    Concat { parts: u32 },
    /// Each row over `max(‖row‖₂, eps)`.
    L2Normalize { eps: f32 },
    /// Logits `[tokens, width]` → `[tokens, 1]`: log-probability of each token given those before it, 0 of the first.
    LogProbability,
    /// `mean, log_variance`, both `[batch, width]`: `mean + exp(log_variance / 2) · noise`, by the seed of each sequence.
    Draw,

    /// Columns `start .. start + width`.
    SliceColumns { start: u32, width: u32 },
    /// `[rows, 2·width]` → `[rows, width]`: the activation of the first half of a row's columns, times the second half.
    Gate(Activation),
    /// `ids…, tables…, gamma, beta`: LayerNorm of the sum of embeddings; one offset per table.
    EmbeddingLayerNorm { eps: f32, offsets: Vec<u32> },
    /// `x, (bias), residual, gamma, beta`.
    BiasResidualLayerNorm { eps: f32, bias: bool },
    /// `q, k, v, (bias)` → `[tokens, heads·head]`.
    Attention(Attending),
    /// Mean over each sequence, then its L2 normalisation.
    MeanPoolNormalize { eps: f32 },
}

impl Op {
    /// Whether the operator launches a kernel, rather than naming data that is there.
    pub fn is_compute(&self) -> bool {
        !matches!(self, Op::Input(_) | Op::Weight(_) | Op::Remembered { .. })
    }

    /// The operator's name in the text form, in `expect:` lines and in reports.
    pub fn name(&self) -> Cow<'static, str> {
        let name = match self {
            Op::Input(_) => "input",
            Op::Weight(_) => "weight",
            Op::Embedding { .. } => "embedding",
            Op::Linear { epilogue } => {
                let bias = if epilogue.bias { "bias_" } else { "" };
                let residual = if epilogue.residual { "residual_" } else { "" };
                return match epilogue.activation {
                    None => format!("{bias}{residual}linear").into(),
                    Some(activation) if epilogue.bias => {
                        format!("bias_{}_{residual}linear", activation.name()).into()
                    }
                    Some(activation) => format!("{residual}linear_{}", activation.name()).into(),
                };
            }
            Op::AddBias => "add_bias",
            Op::Add => "add",
            Op::Multiply => "multiply",
            Op::RmsNorm { .. } => "rms_norm",
            Op::Rotary { .. } => "rotary",
            Op::Cache { .. } => "cache",
            Op::Remembered { .. } => "remembered",
            Op::Activate(activation) => activation.name(),
            Op::Scale { .. } => "scale",
            Op::LayerNorm { .. } => "layer_norm",
            Op::SplitHeads { .. } => "split_heads",
            Op::MergeHeads => "merge_heads",
            Op::Scores { .. } => "scores",
            Op::RelativeScores { .. } => "relative_scores",
            Op::Softmax { .. } => "softmax",
            Op::Context { .. } => "context",
            Op::FirstToken => "first_token",
            Op::LastToken => "last_token",
            Op::MeanPool => "mean_pool",
            Op::MaxPool => "max_pool",
            Op::Concat { .. } => "concat",
            Op::L2Normalize { .. } => "l2_normalize",
            Op::LogProbability => "log_probability",
            Op::Draw => "draw",
            Op::SliceColumns { .. } => "slice_columns",
            Op::Gate(activation) => return format!("{}_gate", activation.name()).into(),
            Op::EmbeddingLayerNorm { .. } => "embedding_layer_norm",
            Op::BiasResidualLayerNorm { bias: true, .. } => "bias_residual_layer_norm",
            Op::BiasResidualLayerNorm { bias: false, .. } => "residual_layer_norm",
            Op::Attention(_) => "attention",
            Op::MeanPoolNormalize { .. } => "mean_pool_normalize",
        };
        name.into()
    }

    /// How many operands the operator takes.
    pub fn arity(&self) -> usize {
        match self {
            Op::Input(_) | Op::Weight(_) | Op::Remembered { .. } => 0,
            Op::Linear { epilogue } => 2 + epilogue.operands(),
            Op::Embedding { .. }
            | Op::AddBias
            | Op::Add
            | Op::Multiply
            | Op::Draw
            | Op::RmsNorm { .. }
            | Op::Scores { .. }
            | Op::RelativeScores { .. }
            | Op::Context { .. } => 2,
            Op::LayerNorm { .. } => 3,
            Op::Softmax { by, .. } => 1 + usize::from(by.bias.is_some()),
            Op::Attention(of) => 3 + usize::from(of.by.bias.is_some()),
            Op::Concat { parts } => *parts as usize,
            Op::EmbeddingLayerNorm { offsets, .. } => 2 * offsets.len() + 2,
            Op::BiasResidualLayerNorm { bias, .. } => 4 + usize::from(*bias),
            _ => 1,
        }
    }
}

/// The attributes in the text form, `name(key=value)`.
impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())?;
        match self {
            Op::Input(meta) => write!(f, "({meta:?})"),
            Op::Embedding { offset } if *offset > 0 => write!(f, "(offset={offset})"),
            Op::Scale { by } => write!(f, "(by={by})"),
            Op::LayerNorm { eps }
            | Op::BiasResidualLayerNorm { eps, .. }
            | Op::L2Normalize { eps }
            | Op::MeanPoolNormalize { eps } => write!(f, "(eps={eps:e})"),
            Op::RmsNorm { eps, heads, from } => {
                write!(f, "(eps={eps:e}")?;
                if *heads != 1 {
                    write!(f, ", heads={heads}")?;
                }
                write!(f, "{})", first_column(*from))
            }
            Op::Rotary { rotation, from, .. } => write!(
                f,
                "(heads={}, columns={}{})",
                rotation.heads,
                2 * rotation.frequencies.len(),
                first_column(*from)
            ),
            Op::EmbeddingLayerNorm { eps, offsets } => {
                write!(f, "(eps={eps:e}, offsets={offsets:?})")
            }
            Op::SplitHeads { heads } => write!(f, "(heads={heads})"),
            Op::Cache {
                name,
                from,
                heads,
                head,
            } => write!(f, "({name}, heads={heads}, head={head}, from={from})"),
            Op::Remembered { name, heads, head } => {
                write!(f, "({name}, heads={heads}, head={head})")
            }
            Op::Scores {
                heads,
                kv_heads,
                head,
                q,
                k,
            } => {
                let heads = heads_of(*heads, *kv_heads, *head);
                write!(f, "({heads}, q={}, k={})", view(*q), view(*k))
            }
            Op::RelativeScores { heads, head, of } => {
                write!(f, "({}, of={})", heads_of(*heads, *heads, *head), of.name())
            }
            Op::Softmax { scale, causal, by } => {
                write!(f, "(scale={scale}{}{})", mask(*causal), distances(*by))
            }
            Op::Context {
                heads,
                kv_heads,
                head,
                v,
                out,
            } => {
                let heads = heads_of(*heads, *kv_heads, *head);
                write!(f, "({heads}, v={}, out={})", view(*v), view(*out))
            }
            Op::SliceColumns { start, width } => write!(f, "({start}..{})", start + width),
            Op::Attention(of) => write!(
                f,
                "({}, scale={}{}{}, q={}, k={}, v={})",
                heads_of(of.heads, of.kv_heads, of.head),
                of.scale,
                mask(of.causal),
                distances(of.by),
                view(of.q),
                view(of.k),
                view(of.v)
            ),
            _ => Ok(()),
        }
    }
}

fn heads_of(heads: u32, kv_heads: u32, head: u32) -> String {
    match kv_heads == heads {
        true => format!("heads={heads}, head={head}"),
        false => format!("heads={heads}, kv_heads={kv_heads}, head={head}"),
    }
}

/// Where columns of a row are read from, unless they are the first.
fn first_column(from: u32) -> String {
    match from {
        0 => String::new(),
        from => format!(", from={from}"),
    }
}

fn mask(causal: bool) -> &'static str {
    if causal { ", causal" } else { "" }
}

fn distances(by: ByDistance) -> String {
    let window = by.window.map(|window| format!(", window={window}"));
    let bias = by.bias.map(|bias| match bias {
        Bias::Table { reach } => format!(", bias up to {reach}"),
        Bias::Slopes => ", slopes".to_owned(),
    });
    [window, bias].into_iter().flatten().collect()
}

fn view(view: HeadView) -> String {
    match view {
        HeadView::HeadMajor => "head_major".to_owned(),
        HeadView::TokenMajor { offset, stride } => format!("columns {offset} of {stride}"),
    }
}
