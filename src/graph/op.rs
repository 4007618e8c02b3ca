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

/// Lists all operators. A row has the variant, its names, and the names of its operands in slot order. An operator with several names or
/// with none derives its name from its attributes. [`Op::has`] decides which optional operands are present.
macro_rules! operators {
    ($(
        $(#[$doc:meta])*
        $Op:ident $(($of:ty))? $({ $($(#[$note:meta])* $field:ident: $Type:ty),* $(,)? })? = $($name:literal)|* ($($slot:ident),*);
    )*) => {
        /// An operator. Descriptions of models use the operators up to [`Op::Draw`]; passes create the later ones. The documentation of an
        /// operator lists its operands in slot order.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        pub enum Op {
            $($(#[$doc])* $Op $(($of))? $({ $($(#[$note])* $field: $Type),* })?,)*
        }

        impl Op {
            /// Names of all operators, except for names that are derived from attributes.
            const NAMES: &[&str] = &[$($($name,)*)*];

            /// Returns the names in the operator's row, and the names of its operands.
            fn row(&self) -> (&'static [&'static str], &'static [&'static str]) {
                match self {
                    $(Self::$Op { .. } => (&[$($name),*], &[$(stringify!($slot)),*]),)*
                }
            }
        }
    };
}

operators! {
    /// An input of the batch: `[tokens]`.
    Input(BatchInput) = "input"();
    /// A constant of the model.
    Weight(WeightExpr) = "weight"();
    /// `ids, table` → `[tokens, width]`. `offset` is added to the ids.
    Embedding { offset: u32 } = "embedding"(ids, table);
    /// `x, weight, (bias), (residual)` → `act(x · weightᵀ + bias) + residual`. In descriptions of models, the epilogue is empty.
    Linear { epilogue: Epilogue } = "linear" | "bias_linear" | "residual_linear" | "bias_residual_linear"(x, weight, bias, residual);
    /// `x, bias` → `x + bias`, with a bias per column.
    AddBias = "add_bias"(x, bias);
    /// `a, b` of the same shape → `a + b`.
    Add = "add"(a, b);
    /// `a, b` of the same shape → the elementwise product.
    Multiply = "multiply"(a, b);
    /// `x` → the activation, elementwise.
    Activate(Activation) = (x);
    /// `x` → `by · x`.
    Scale { by: f32 } = "scale"(x);
    /// `x` → `cap · tanh(x / cap)`, elementwise.
    SoftCap(SoftCap) = "soft_cap"(x);
    /// `x, gamma, beta` → LayerNorm over the last dimension.
    LayerNorm { eps: f32 } = "layer_norm"(x, gamma, beta);
    /// `x, gamma` → RMSNorm of each of `heads` adjacent parts of a row. The parts start at column `from`, and each is as wide as `gamma`.
    /// The result has only the columns of the parts. If `centered`, the mean of a part is subtracted first (LayerNorm without bias), and
    /// `gamma`, `[heads, width]`, has a row for each part.
    RmsNorm {
        eps: f32,
        heads: u32,
        from: u32,
        centered: bool,
    } = "rms_norm" | "head_layer_norm"(x, gamma);
    /// `[tokens, width]` → rotary position embedding of adjacent heads of `head` columns each. The first head starts at column `from` of a
    /// row, and the result has only the columns of the heads.
    Rotary {
        rotation: Rotation,
        from: u32,
        head: u32,
    } = "rotary"(x);
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
    } = "cache"(x, scale);
    /// Rows that another part of the model cached: `[source_slots, heads·head]`.
    CrossCache { name: String, heads: u32, head: u32 } = "remembered"();
    /// `[tokens, heads·head]` → `[heads, tokens, head]`.
    SplitHeads { heads: u32 } = "split_heads"(x);
    /// `[heads, tokens, head]` → `[tokens, heads·head]`.
    MergeHeads = "merge_heads"(x);
    /// `q, k` → `[heads, pairs]`: `q · kᵀ` within each sequence. A key head serves `heads /
    /// kv_heads` query heads.
    Scores {
        heads: u32,
        kv_heads: u32,
        head: u32,
        q: HeadView,
        k: HeadView,
    } = "scores"(q, k);
    /// `x, table` → `[heads, pairs]`: `x · table[distance]` for each pair of a query and a key. `of` selects the row of `x`: that of the
    /// query or that of the key. The distance is the key's position minus the query's, and the table is `[2·reach + 1, heads·head]`.
    /// Distances beyond `reach` use the outermost row on their side.
    RelativeScores { heads: u32, head: u32, of: Side } = "relative_scores"(x, table);
    /// `scores, (bias), (sinks)` → softmax over the keys. Its argument is `scale · scores + bias` or, with a cap, `cap · tanh(scale ·
    /// scores / cap) + bias`. A causal softmax includes only the keys up to the query, and a softmax with a window only the keys in the
    /// window. The sink of a head, if there is one, is the score of one more key in the sum of the exponentials.
    Softmax {
        scale: f32,
        causal: bool,
        by: PositionBias,
    } = "softmax"(scores, bias, sinks);
    /// `probabilities, v` → the weighted sums of `v`, in the layout `out`.
    Context {
        heads: u32,
        kv_heads: u32,
        head: u32,
        v: HeadView,
        out: HeadView,
    } = "context"(probabilities, v);
    /// `x` → the rows of the tokens after each sequence's prompt, packed at the start. The remaining rows are unused. Only pooling reads
    /// the result.
    AfterPrompt = "after_prompt"(x);
    /// First token of each sequence: `[tokens, width]` → `[batch, width]`.
    FirstToken = "first_token"(x);
    /// Last token of each sequence: `[tokens, width]` → `[batch, width]`.
    LastToken = "last_token"(x);
    /// Mean over each sequence: `[tokens, width]` → `[batch, width]`.
    MeanPool = "mean_pool"(x);
    /// Maximum of each column over each sequence: `[tokens, width]` → `[batch, width]`.
    MaxPool = "max_pool"(x);
    /// Weighted sum over each sequence: `[tokens, width]` → `[batch, width]`.
    WeightedPool(PoolWeights) = "weighted_mean_pool" | "root_length_pool"(x);
    /// Concatenation of the columns of `parts` values: `[rows, w1]`, `[rows, w2]`, … → `[rows, w1 +
    /// w2 + …]`.
    Concat { parts: u32 } = "concat"();
    /// `x` → each row divided by `max(‖row‖₂, eps)`.
    L2Normalize { eps: f32 } = "l2_normalize"(x);
    /// Logits `[tokens, width]` → `[tokens, 1]`: log-probability of each token given the previous tokens; 0 for the first token.
    LogProbability = "log_probability"(logits);
    /// `mean, log_variance`, both `[batch, width]` → `mean + exp(log_variance / 2) · noise`. The noise of a row is computed from the
    /// sequence's seed.
    Draw = "draw"(mean, log_variance);

    /// `x` → columns `start .. start + width`.
    SliceColumns { start: u32, width: u32 } = "slice_columns"(x);
    /// `[rows, 2·width]` → `[rows, width]`: the activation of the first half of the columns times
    /// the second half.
    Gate(Activation) = (x);
    /// `ids…, tables…, gamma, beta` → LayerNorm of the sum of the embeddings. Each table has an offset, which is added to its ids.
    EmbeddingLayerNorm { eps: f32, offsets: Vec<u32> } = "embedding_layer_norm"();
    /// `x, (bias), residual, gamma, beta` → LayerNorm of `x + bias + residual`.
    BiasResidualLayerNorm { eps: f32, bias: bool } = "bias_residual_layer_norm" | "residual_layer_norm"(x, bias, residual, gamma, beta);
    /// `q, k, v, (bias), (sinks)` → fused scaled dot-product attention, `[tokens, heads·head]`.
    Attention(AttentionProblem) = "attention"(q, k, v, bias, sinks);
    /// `[tokens, width]` → `[batch, width]`: L2-normalized mean over each sequence.
    MeanPoolNormalize { eps: f32 } = "mean_pool_normalize"(x);
    /// `weight` → the matrix in this format, quantized when the model is loaded. Only linear layers read it. Some of their kernels also
    /// round the input to this format.
    Quantize(Format) = "quantize"(weight);
    /// `x, out_scale` → `x / out_scale` in E4M3. Only [`Op::ScaledLinear`] reads it.
    ToE4m3 = "to_e4m3"(x, out_scale);
    /// `x, weight, scale, (bias), (residual)` → `act(scale ∘ (x · weightᵀ) + bias) + residual`, with x and the weight in E4M3 and a
    /// scale for each column.
    ScaledLinear { epilogue: Epilogue } = "scaled_linear"(x, weight, scale, bias, residual);
}

impl Op {
    /// Returns whether the operator launches a kernel. The other operators only name existing data.
    pub fn is_compute(&self) -> bool {
        !matches!(
            self,
            Op::Input(_) | Op::Weight(_) | Op::Quantize(_) | Op::CrossCache { .. }
        )
    }

    /// Returns the names of the operators that launch kernels, except for names that contain the name of an activation.
    pub fn countable() -> impl Iterator<Item = &'static str> {
        let names = Op::NAMES.iter().copied();
        names.filter(|name| !["input", "weight", "remembered", "quantize"].contains(name))
    }

    /// Returns the operator's name in the textual form, in `expect:` lines and in reports.
    pub fn name(&self) -> Cow<'static, str> {
        let names = self.row().0;
        match self {
            Op::Linear { epilogue } => linear_name(*epilogue).into(),
            Op::ScaledLinear { epilogue } => format!("scaled_{}", linear_name(*epilogue)).into(),
            Op::Gate(activation) => format!("{}_gate", activation.name()).into(),
            Op::Activate(activation) => activation.name().into(),
            Op::WeightedPool(weights) => weights.name().into(),
            Op::RmsNorm { centered: true, .. } | Op::BiasResidualLayerNorm { bias: false, .. } => {
                names[1].into()
            }
            _ => names.first().copied().unwrap_or_default().into(),
        }
    }

    /// Returns the names of the operands, in slot order. A kernel's parameter of the same name reads the operand.
    pub fn slots(&self) -> Vec<Cow<'static, str>> {
        match self {
            Op::EmbeddingLayerNorm { offsets, .. } => {
                let n = offsets.len();
                let ids = (0..n).map(|i| format!("ids_{i}"));
                let tables = (0..n).map(|i| format!("table_{i}"));
                let vectors = ["gamma", "beta"].map(Cow::from);
                ids.chain(tables).map(Cow::from).chain(vectors).collect()
            }
            Op::Concat { parts } => (0..*parts).map(|i| format!("x_{i}").into()).collect(),
            _ => {
                let slots = self.row().1.iter().filter(|slot| self.has(slot));
                slots.map(|&slot| slot.into()).collect()
            }
        }
    }

    /// Returns whether the operand `slot` is present.
    fn has(&self, slot: &str) -> bool {
        match (self, slot) {
            (Op::Linear { epilogue } | Op::ScaledLinear { epilogue }, "bias") => epilogue.bias,
            (Op::Linear { epilogue } | Op::ScaledLinear { epilogue }, "residual") => {
                epilogue.residual
            }
            (Op::BiasResidualLayerNorm { bias, .. }, "bias") => *bias,
            (Op::Softmax { by, .. } | Op::Attention(AttentionProblem { by, .. }), "bias") => {
                by.bias.is_some()
            }
            (Op::Softmax { by, .. } | Op::Attention(AttentionProblem { by, .. }), "sinks") => {
                by.sinks
            }
            (Op::Cache { scaled, .. }, "scale") => *scaled,
            _ => true,
        }
    }

    /// Returns the number of operands.
    pub fn arity(&self) -> usize {
        self.slots().len()
    }
}

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
            Op::RmsNorm {
                eps, heads, from, ..
            } => {
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
    let sinks = by.sinks.then(|| ", sinks".to_owned());
    [cap, window, bias, sinks].into_iter().flatten().collect()
}

fn view(view: HeadView) -> String {
    match view {
        HeadView::HeadMajor => "head_major".to_owned(),
        HeadView::TokenMajor { offset, stride } => format!("columns {offset} of {stride}"),
    }
}
