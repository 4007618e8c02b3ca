//! Operators of a graph, and their text form.

use std::{borrow::Cow, fmt};

use serde::{Deserialize, Serialize};

use super::WeightExpr;
use crate::kernels::{
    Meta,
    attention::{Attending, Bias, ByDistance, HeadView, Side},
    gemm::{Activation, Epilogue},
    rotary::Rotation,
};

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
