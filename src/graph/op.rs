//! Operators of a graph, and their textual form.

use std::{borrow::Cow, fmt};

use serde::{Deserialize, Serialize};

use super::WeightExpr;
use crate::{
    ops::{
        Activation, AttentionProblem, BatchInput, Bias, Epilogue, HeadView, PoolWeights,
        PositionBias, Rotation, Side, SoftCap,
    },
    tensor::Format,
};

/// An operator. Descriptions use the operators of the first block; passes create the operators of the second block. Operands are listed in
/// slot order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Op {
    /// An input of the batch: `[tokens]`.
    Input(BatchInput),
    /// A constant of the model.
    Weight(WeightExpr),
    /// `ids, table` → `[tokens, width]`. `offset` is added to the ids.
    Embedding { offset: u32 },
    /// `x, weight, (bias), (residual)` → `act(x · weightᵀ + bias) + residual`. In descriptions, the epilogue is empty.
    Linear { epilogue: Epilogue },
    /// `x, bias` → `x + bias`, with a bias per column.
    AddBias,
    /// `a, b` of the same shape → `a + b`.
    Add,
    /// `a, b` of the same shape → the elementwise product.
    Multiply,
    /// `x` → the activation, elementwise.
    Activate(Activation),
    /// `x` → `by · x`.
    Scale { by: f32 },
    /// `x` → `cap · tanh(x / cap)`, elementwise.
    SoftCap(SoftCap),
    /// `x, gamma, beta` → LayerNorm over the last dimension.
    LayerNorm { eps: f32 },
    /// `x, weight` → RMSNorm of each of `heads` adjacent parts of a row. Each part is as wide as the weight. The first part starts at
    /// column `from` of the row, and the result has only the columns of the parts.
    RmsNorm { eps: f32, heads: u32, from: u32 },
    /// `[tokens, width]` → rotary position embedding of adjacent heads of `head` columns each. The first head starts at column `from` of a
    /// row, and the result has only the columns of the heads.
    Rotary {
        rotation: Rotation,
        from: u32,
        head: u32,
    },
    /// `x` → the columns of `heads` adjacent heads of `head` columns each. The first head starts at column `from` of a row. The columns are
    /// kept for later tokens of the sequence.
    Cache {
        name: String,
        from: u32,
        heads: u32,
        head: u32,
        /// Format to which the rows are rounded; `None` for the storage type of the activations.
        format: Option<Format>,
        /// Whether the rows are divided by the operand `scale` before they are rounded, and multiplied by it when they are read.
        scaled: bool,
    },
    /// Rows that another part of the model cached: `[source_slots, heads·head]`.
    CrossCache { name: String, heads: u32, head: u32 },
    /// `[tokens, heads·head]` → `[heads, tokens, head]`.
    SplitHeads { heads: u32 },
    /// `[heads, tokens, head]` → `[tokens, heads·head]`.
    MergeHeads,
    /// `q, k` → `[heads, pairs]`: `q · kᵀ` within each sequence. A key head serves `heads /
    /// kv_heads` query heads.
    Scores {
        heads: u32,
        kv_heads: u32,
        head: u32,
        q: HeadView,
        k: HeadView,
    },
    /// `x, table` → `[heads, pairs]`: `x · table[distance]`, with `x` from the query or the key of the pair (`of`). The distance is the
    /// key's position minus the query's, and the table is `[2·reach + 1, heads·head]`. Distances beyond `reach` use the last row on their
    /// side.
    RelativeScores { heads: u32, head: u32, of: Side },
    /// `scores, (bias)` → softmax of `scale · scores + bias` over the keys, or of `cap · tanh(scale · scores / cap) + bias` with a cap. A
    /// causal softmax is over keys up to the query; with a window, the softmax is over keys in the window.
    Softmax {
        scale: f32,
        causal: bool,
        by: PositionBias,
    },
    /// `probabilities, v` → the weighted sums of `v`, in the layout `out`.
    Context {
        heads: u32,
        kv_heads: u32,
        head: u32,
        v: HeadView,
        out: HeadView,
    },
    /// `x` → the rows of the tokens after each sequence's prompt, packed at the start. The remaining rows are unused. Only pooling reads
    /// the result.
    AfterPrompt,
    /// First token of each sequence: `[tokens, width]` → `[batch, width]`.
    FirstToken,
    /// Last token of each sequence: `[tokens, width]` → `[batch, width]`.
    LastToken,
    /// Mean over each sequence: `[tokens, width]` → `[batch, width]`.
    MeanPool,
    /// Maximum of each column over each sequence: `[tokens, width]` → `[batch, width]`.
    MaxPool,
    /// Weighted sum over each sequence: `[tokens, width]` → `[batch, width]`.
    WeightedPool(PoolWeights),
    /// Concatenation of the columns of `parts` values: `[rows, w1]`, `[rows, w2]`, … → `[rows, w1 +
    /// w2 + …]`.
    Concat { parts: u32 },
    /// `x` → each row divided by `max(‖row‖₂, eps)`.
    L2Normalize { eps: f32 },
    /// Logits `[tokens, width]` → `[tokens, 1]`: log-probability of each token given the previous tokens; 0 for the first token.
    LogProbability,
    /// `mean, log_variance`, both `[batch, width]` → `mean + exp(log_variance / 2) · noise`. The noise of a row is computed from the
    /// sequence's seed.
    Draw,

    /// `x` → columns `start .. start + width`.
    SliceColumns { start: u32, width: u32 },
    /// `[rows, 2·width]` → `[rows, width]`: the activation of the first half of the columns times
    /// the second half.
    Gate(Activation),
    /// `ids…, tables…, gamma, beta` → LayerNorm of the sum of the embeddings, with one offset per
    /// table.
    EmbeddingLayerNorm { eps: f32, offsets: Vec<u32> },
    /// `x, (bias), residual, gamma, beta` → LayerNorm of `x + bias + residual`.
    BiasResidualLayerNorm { eps: f32, bias: bool },
    /// `q, k, v, (bias)` → `[tokens, heads·head]`.
    Attention(AttentionProblem),
    /// `[tokens, width]` → `[batch, width]`: L2-normalised mean over each sequence.
    MeanPoolNormalize { eps: f32 },
    /// `weight` → the matrix in this format, quantized when the model is loaded. Only linear layers read it. Some of their kernels also
    /// round the input to this format.
    Quantize(Format),
    /// `x, out_scale` → `x / out_scale` in E4M3. Only [`Op::ScaledLinear`] reads it.
    ToE4m3,
    /// `x, weight, scale, (bias), (residual)` → `act(scale ∘ (x · weightᵀ) + bias) + residual`, with x and the weight in E4M3 and a
    /// scale for each column.
    ScaledLinear { epilogue: Epilogue },
}

impl Op {
    /// Returns whether the operator launches a kernel. The other operators only name existing data.
    pub fn is_compute(&self) -> bool {
        !matches!(
            self,
            Op::Input(_) | Op::Weight(_) | Op::Quantize(_) | Op::CrossCache { .. }
        )
    }

    /// Returns the operator's name in the textual form, in `expect:` lines and in reports.
    pub fn name(&self) -> Cow<'static, str> {
        let name = match self {
            Op::Input(_) => "input",
            Op::Weight(_) => "weight",
            Op::Embedding { .. } => "embedding",
            Op::Linear { epilogue } => return linear_name(*epilogue).into(),
            Op::ScaledLinear { epilogue } => {
                return format!("scaled_{}", linear_name(*epilogue)).into();
            }
            Op::AddBias => "add_bias",
            Op::Add => "add",
            Op::Multiply => "multiply",
            Op::RmsNorm { .. } => "rms_norm",
            Op::Rotary { .. } => "rotary",
            Op::Cache { .. } => "cache",
            Op::CrossCache { .. } => "remembered",
            Op::Activate(activation) => activation.name(),
            Op::Scale { .. } => "scale",
            Op::SoftCap(_) => "soft_cap",
            Op::LayerNorm { .. } => "layer_norm",
            Op::SplitHeads { .. } => "split_heads",
            Op::MergeHeads => "merge_heads",
            Op::Scores { .. } => "scores",
            Op::RelativeScores { .. } => "relative_scores",
            Op::Softmax { .. } => "softmax",
            Op::Context { .. } => "context",
            Op::AfterPrompt => "after_prompt",
            Op::FirstToken => "first_token",
            Op::LastToken => "last_token",
            Op::MeanPool => "mean_pool",
            Op::MaxPool => "max_pool",
            Op::WeightedPool(weights) => weights.name(),
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
            Op::Quantize(_) => "quantize",
            Op::ToE4m3 => "to_e4m3",
        };
        name.into()
    }

    /// Returns the names of the operands, in slot order. A kernel's parameter of the same name reads the operand.
    pub fn slots(&self) -> Vec<Cow<'static, str>> {
        let named = |names: &[&'static str]| names.iter().map(|&name| name.into()).collect();
        let optional = |names: &[(&'static str, bool)]| {
            let there = names.iter().filter(|(_, there)| *there);
            there.map(|&(name, _)| name.into()).collect()
        };
        match self {
            Op::Input(_) | Op::Weight(_) | Op::CrossCache { .. } => Vec::new(),
            Op::Embedding { .. } => named(&["ids", "table"]),
            Op::EmbeddingLayerNorm { offsets, .. } => {
                let n = offsets.len();
                let ids = (0..n).map(|i| format!("ids_{i}"));
                let tables = (0..n).map(|i| format!("table_{i}"));
                let vectors = ["gamma", "beta"].map(Cow::from);
                ids.chain(tables).map(Cow::from).chain(vectors).collect()
            }
            Op::Linear { epilogue } => optional(&[
                ("x", true),
                ("weight", true),
                ("bias", epilogue.bias),
                ("residual", epilogue.residual),
            ]),
            Op::ScaledLinear { epilogue } => optional(&[
                ("x", true),
                ("weight", true),
                ("scale", true),
                ("bias", epilogue.bias),
                ("residual", epilogue.residual),
            ]),
            Op::ToE4m3 => named(&["x", "out_scale"]),
            Op::AddBias => named(&["x", "bias"]),
            Op::Add | Op::Multiply => named(&["a", "b"]),
            Op::Draw => named(&["mean", "log_variance"]),
            Op::RmsNorm { .. } => named(&["x", "gamma"]),
            Op::LayerNorm { .. } => named(&["x", "gamma", "beta"]),
            Op::BiasResidualLayerNorm { bias, .. } => optional(&[
                ("x", true),
                ("bias", *bias),
                ("residual", true),
                ("gamma", true),
                ("beta", true),
            ]),
            Op::Scores { .. } => named(&["q", "k"]),
            Op::RelativeScores { .. } => named(&["x", "table"]),
            Op::Softmax { by, .. } => optional(&[("scores", true), ("bias", by.bias.is_some())]),
            Op::Context { .. } => named(&["probabilities", "v"]),
            Op::Attention(of) => optional(&[
                ("q", true),
                ("k", true),
                ("v", true),
                ("bias", of.by.bias.is_some()),
            ]),
            Op::Concat { parts } => (0..*parts).map(|i| format!("x_{i}").into()).collect(),
            Op::LogProbability => named(&["logits"]),
            Op::Quantize(_) => named(&["weight"]),
            Op::Cache { scaled, .. } => optional(&[("x", true), ("scale", *scaled)]),
            Op::Rotary { .. }
            | Op::Activate(_)
            | Op::Scale { .. }
            | Op::SoftCap(_)
            | Op::SplitHeads { .. }
            | Op::MergeHeads
            | Op::AfterPrompt
            | Op::FirstToken
            | Op::LastToken
            | Op::MeanPool
            | Op::MaxPool
            | Op::WeightedPool(_)
            | Op::L2Normalize { .. }
            | Op::SliceColumns { .. }
            | Op::Gate(_)
            | Op::MeanPoolNormalize { .. } => named(&["x"]),
        }
    }

    /// Returns the number of operands.
    pub fn arity(&self) -> usize {
        self.slots().len()
    }
}

/// Returns the name of a linear layer with this epilogue.
fn linear_name(epilogue: Epilogue) -> String {
    let bias = if epilogue.bias { "bias_" } else { "" };
    let residual = if epilogue.residual { "residual_" } else { "" };
    match epilogue.activation {
        None => format!("{bias}{residual}linear"),
        Some(activation) if epilogue.bias => {
            format!("bias_{}_{residual}linear", activation.name())
        }
        Some(activation) => format!("{residual}linear_{}", activation.name()),
    }
}

/// Formats the operator with its attributes: `name(key=value)`.
impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())?;
        match self {
            Op::Input(meta) => write!(f, "({meta:?})"),
            Op::Embedding { offset } if *offset > 0 => write!(f, "(offset={offset})"),
            Op::Scale { by } => write!(f, "(by={by})"),
            Op::SoftCap(cap) => write!(f, "(cap={})", cap.get()),
            Op::Quantize(format) => write!(f, "({format})"),
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
                format,
                scaled,
            } => {
                write!(f, "({name}, heads={heads}, head={head}, from={from}")?;
                if let Some(format) = format {
                    write!(f, ", format={format}")?;
                }
                if *scaled {
                    f.write_str(", scaled")?;
                }
                f.write_str(")")
            }
            Op::CrossCache { name, heads, head } => {
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

/// Formats the first column that is read, unless it is 0.
fn first_column(from: u32) -> String {
    match from {
        0 => String::new(),
        from => format!(", from={from}"),
    }
}

fn mask(causal: bool) -> &'static str {
    if causal { ", causal" } else { "" }
}

fn distances(by: PositionBias) -> String {
    let cap = by.cap.map(|cap| format!(", cap={}", cap.get()));
    let window = by.window.map(|window| format!(", window={window}"));
    let bias = by.bias.map(|bias| match bias {
        Bias::Table { reach } => format!(", bias up to {reach}"),
        Bias::Slopes => ", slopes".to_owned(),
    });
    [cap, window, bias].into_iter().flatten().collect()
}

fn view(view: HeadView) -> String {
    match view {
        HeadView::HeadMajor => "head_major".to_owned(),
        HeadView::TokenMajor { offset, stride } => format!("columns {offset} of {stride}"),
    }
}
