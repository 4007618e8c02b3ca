//! The modules of a sentence-transformers folder that follow the transformer.

use std::fmt;

use super::{error::At, syntax::Ast};
use crate::{
    graph::TOKEN_VECTORS,
    ops::{Activation, PoolWeights},
};

/// Output that most modules compute from a description's output `last_hidden_state`.
pub const EMBEDDING: &str = "sentence_embedding";
/// Output with a sparse embedding: a weight for each vocabulary entry, `[batch, vocabulary]`, or for each token, `[tokens, 1]`.
pub const SPARSE: &str = "sparse";
/// Output from which scores are computed. If the module [`LogitScore`](Module::LogitScore) is present, it computes this output. Otherwise,
/// the description computes it.
pub const LOGITS: &str = "sequence_logits";
/// Output with the state of each token, `[tokens, width]`. Most modules start from this output of the description.
pub const STATES: &str = "last_hidden_state";
/// Output that the module [`Splade`](Module::Splade) starts from.
pub(super) const TOKEN_LOGITS: &str = "mlm_logits";
/// Output that the module [`LogitScore`](Module::LogitScore) starts from.
pub(super) const NEXT_LOGITS: &str = "next_token_logits";

/// An entry of `modules.json` with the config.json of its folder. `folder` prefixes the names of graph values and of weights.
#[derive(Clone, Debug, PartialEq)]
pub enum Module {
    /// `[tokens, width]` → `[batch, modes · width]`: the concatenated results of all pooling `modes`. With `after_prompt`, the tokens of a
    /// prompt are left out.
    Pooling {
        folder: String,
        modes: Vec<Pooling>,
        after_prompt: bool,
    },
    /// Weighted sum of hidden states: `weights[k]` times the state after `from + k` layers. The state after 0 layers is the embeddings.
    WeightedLayers {
        folder: String,
        from: u32,
        weights: Vec<f32>,
    },
    /// `[batch, inputs]` → `[batch, outputs]`. The module reads `linear.weight` and `linear.bias` from its folder, or from the checkpoint
    /// if `folder` is empty. Without a preceding Pooling, the rows are tokens.
    Dense {
        folder: String,
        inputs: u32,
        outputs: u32,
        bias: bool,
        activation: Option<Activation>,
        /// Whether the input is added to the result, through `residual.weight` if the widths differ.
        residual: bool,
    },
    /// LayerNorm with `norm.weight` and `norm.bias` from its folder.
    LayerNorm { folder: String, width: u32 },
    /// Scales rows to length 1.
    Normalize { folder: String },
    /// Scales the vector of each token to length 1. This is the last module of a late-interaction model. With `hides_expansion`, a query
    /// may end with expansion tokens, to which no token attends (ColBERT).
    NormalizeTokens { hides_expansion: bool },
    /// Keeps the first columns (`truncate_dim`).
    Truncate { width: u32 },
    /// `ln(1 + max(x, 0))` of the maximum logit of each vocabulary entry over the tokens of a sequence. If `twice`, the function is applied
    /// a second time to its result.
    Splade { folder: String, twice: bool },
    /// Logit of one token, minus the logit of another token if `no` is given, as the single logit of a sequence.
    LogitScore {
        folder: String,
        yes: u32,
        no: Option<u32>,
    },
}

/// Pooling to one row per sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    First,
    Last,
    Mean,
    Max,
    Weighted(PoolWeights),
}

impl Pooling {
    fn name(self) -> &'static str {
        match self {
            Self::First => "the first token",
            Self::Last => "the last token",
            Self::Mean => "the mean",
            Self::Max => "the maximum",
            Self::Weighted(PoolWeights::Position) => "the mean weighted by position",
            Self::Weighted(PoolWeights::RootLength) => {
                "the sum divided by the root of the number of tokens"
            }
        }
    }
}

impl Module {
    /// Returns the folder of the module's weights, if it has any.
    pub fn weights(&self) -> Option<&str> {
        match self {
            Module::Dense { folder, .. } | Module::LayerNorm { folder, .. } => {
                Some(folder.as_str()).filter(|folder| !folder.is_empty())
            }
            Module::Pooling { .. }
            | Module::WeightedLayers { .. }
            | Module::Normalize { .. }
            | Module::NormalizeTokens { .. }
            | Module::Truncate { .. }
            | Module::Splade { .. }
            | Module::LogitScore { .. } => None,
        }
    }
}

/// Describes the module for messages, without the name of its folder.
impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pooling {
                folder: _,
                modes,
                after_prompt,
            } => {
                let modes: Vec<&str> = modes.iter().map(|mode| mode.name()).collect();
                write!(f, "pooling by {}", modes.join(" and "))?;
                match after_prompt {
                    true => f.write_str(" without the prompt"),
                    false => Ok(()),
                }
            }
            Self::WeightedLayers {
                folder: _,
                from,
                weights,
            } => write!(
                f,
                "weights of {} layers from layer {from} on",
                weights.len()
            ),
            Self::Dense {
                folder: _,
                inputs,
                outputs,
                bias,
                activation,
                residual,
            } => {
                write!(f, "a Dense layer from {inputs} to {outputs}")?;
                if !bias {
                    f.write_str(" without bias")?;
                }
                if *residual {
                    f.write_str(" with residual")?;
                }
                match activation {
                    Some(activation) => write!(f, " and {activation:?}"),
                    None => Ok(()),
                }
            }
            Self::LayerNorm { folder: _, width } => write!(f, "LayerNorm of {width}"),
            Self::Normalize { folder: _ } => f.write_str("normalization"),
            Self::NormalizeTokens { hides_expansion } => {
                f.write_str("normalization of tokens")?;
                match hides_expansion {
                    true => f.write_str(" with hidden query expansion"),
                    false => Ok(()),
                }
            }
            Self::Truncate { width } => write!(f, "truncation to {width}"),
            Self::Splade { folder: _, twice } => match twice {
                true => f.write_str("SPLADE with ln(1 + x) twice"),
                false => f.write_str("SPLADE"),
            },
            Self::LogitScore { folder: _, yes, no } => match no {
                Some(no) => write!(f, "the logit of token {yes} minus that of token {no}"),
                None => write!(f, "the logit of token {yes}"),
            },
        }
    }
}

/// Returns the output that `modules` compute, or `None` if there are none.
pub fn computed(modules: &[Module]) -> Option<&'static str> {
    Some(match modules.first()? {
        _ if normalizes_tokens(modules).is_some() => TOKEN_VECTORS,
        Module::Splade { .. } => SPARSE,
        Module::LogitScore { .. } => LOGITS,
        _ => EMBEDDING,
    })
}

/// Returns `hides_expansion` of the module [`NormalizeTokens`](Module::NormalizeTokens). Returns `None` if there is no such module, which
/// means that the model is not a late-interaction model.
pub fn normalizes_tokens(modules: &[Module]) -> Option<bool> {
    modules.iter().find_map(|module| match module {
        Module::NormalizeTokens { hides_expansion } => Some(*hides_expansion),
        Module::Pooling { .. }
        | Module::WeightedLayers { .. }
        | Module::Dense { .. }
        | Module::LayerNorm { .. }
        | Module::Normalize { .. }
        | Module::Truncate { .. }
        | Module::Splade { .. }
        | Module::LogitScore { .. } => None,
    })
}

/// Returns the name of the output that `modules` start from.
pub(super) fn start(modules: &[Module]) -> &'static str {
    match modules.first() {
        Some(Module::Splade { .. }) => TOKEN_LOGITS,
        Some(Module::LogitScore { .. }) => NEXT_LOGITS,
        _ => STATES,
    }
}

/// Returns the name of the graph value that `modules` start from, which is the value of the description's output [`start`]. Returns `None`
/// if the description lacks this output.
pub(super) fn states<'a>(ast: &'a Ast, modules: &[Module]) -> Option<&'a At<String>> {
    let start = start(modules);
    let found = ast.outputs().find(|(name, _)| name.value == start);
    found.map(|(_, value)| value)
}
