use std::{borrow::Cow, fmt};

use serde::{Deserialize, Serialize};

use crate::kernels::{
    Meta,
    attention::{Attending, HeadView},
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

/// Reads the parts of a stack, none of which is a stack: nesting without end would overflow the
/// reader's own.
fn parts<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<WeightExpr>, D::Error> {
    #[derive(Deserialize)]
    enum Part {
        Stored { name: String, dims: Vec<u64> },
        Transposed { name: String, dims: Vec<u64> },
    }
    let parts = Vec::<Part>::deserialize(from)?;
    Ok(parts
        .into_iter()
        .map(|part| match part {
            Part::Stored { name, dims } => WeightExpr::Stored { name, dims },
            Part::Transposed { name, dims } => WeightExpr::Transposed { name, dims },
        })
        .collect())
}

impl WeightExpr {
    pub fn dims(&self) -> Vec<u64> {
        match self {
            WeightExpr::Stored { dims, .. } => dims.clone(),
            WeightExpr::Transposed { dims, .. } => dims.iter().rev().copied().collect(),
            WeightExpr::Sinusoid { rows, width, .. } => vec![*rows, *width],
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
            WeightExpr::Stored { name, dims } | WeightExpr::Transposed { name, dims } => {
                vec![(name, dims)]
            }
            WeightExpr::Sinusoid { .. } => Vec::new(),
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
    /// `x, weight, (bias)` → `act(x · weightᵀ + bias)`; a description writes it without epilogue.
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
    /// `x, weight`: each of `heads` equal parts of a row over its root mean square, times the weight.
    RmsNorm { eps: f32, heads: u32 },
    /// `[tokens, heads·head]`: rotary position embedding of each head.
    Rotary(Rotation),
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
    /// Softmax of `scale · scores` over the keys; if causal, over those up to the query.
    Softmax { scale: f32, causal: bool },
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

    /// Columns `start .. start + width`.
    SliceColumns { start: u32, width: u32 },
    /// `ids…, tables…, gamma, beta`: LayerNorm of the sum of embeddings; one offset per table.
    EmbeddingLayerNorm { eps: f32, offsets: Vec<u32> },
    /// `x, (bias), residual, gamma, beta`.
    BiasResidualLayerNorm { eps: f32, bias: bool },
    /// `q, k, v` → `[tokens, heads·head]`.
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
                return match epilogue.activation {
                    None => format!("{bias}linear").into(),
                    Some(activation) if epilogue.bias => {
                        format!("bias_{}_linear", activation.name()).into()
                    }
                    Some(activation) => format!("linear_{}", activation.name()).into(),
                };
            }
            Op::AddBias => "add_bias",
            Op::Add => "add",
            Op::Multiply => "multiply",
            Op::RmsNorm { .. } => "rms_norm",
            Op::Rotary(_) => "rotary",
            Op::Cache { .. } => "cache",
            Op::Remembered { .. } => "remembered",
            Op::Activate(activation) => activation.name(),
            Op::Scale { .. } => "scale",
            Op::LayerNorm { .. } => "layer_norm",
            Op::SplitHeads { .. } => "split_heads",
            Op::MergeHeads => "merge_heads",
            Op::Scores { .. } => "scores",
            Op::Softmax { .. } => "softmax",
            Op::Context { .. } => "context",
            Op::FirstToken => "first_token",
            Op::LastToken => "last_token",
            Op::MeanPool => "mean_pool",
            Op::MaxPool => "max_pool",
            Op::Concat { .. } => "concat",
            Op::L2Normalize { .. } => "l2_normalize",
            Op::LogProbability => "log_probability",
            Op::SliceColumns { .. } => "slice_columns",
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
            Op::Linear { epilogue } => 2 + usize::from(epilogue.bias),
            Op::Embedding { .. }
            | Op::AddBias
            | Op::Add
            | Op::Multiply
            | Op::RmsNorm { .. }
            | Op::Scores { .. }
            | Op::Context { .. } => 2,
            Op::LayerNorm { .. } | Op::Attention(_) => 3,
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
            Op::RmsNorm { eps, heads: 1 } => write!(f, "(eps={eps:e})"),
            Op::RmsNorm { eps, heads } => write!(f, "(eps={eps:e}, heads={heads})"),
            Op::Rotary(of) => write!(
                f,
                "(heads={}, columns={})",
                of.heads,
                2 * of.frequencies.len()
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
            Op::Softmax { scale, causal } => write!(f, "(scale={scale}{})", mask(*causal)),
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
                "({}, scale={}{}, q={}, k={}, v={})",
                heads_of(of.heads, of.kv_heads, of.head),
                of.scale,
                mask(of.causal),
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

fn mask(causal: bool) -> &'static str {
    if causal { ", causal" } else { "" }
}

fn view(view: HeadView) -> String {
    match view {
        HeadView::HeadMajor => "head_major".to_owned(),
        HeadView::TokenMajor { offset, stride } => format!("columns {offset} of {stride}"),
    }
}
