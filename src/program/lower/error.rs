use std::borrow::Cow;

use crate::{kernels::attention::AttentionError, program::AttentionChoice};

#[derive(Debug, thiserror::Error)]
pub enum LowerError {
    #[error("`{node}` ({op}): {problem}")]
    Unsupported {
        node: String,
        op: Cow<'static, str>,
        problem: String,
    },
    #[error("`{node}` cannot be {choice} attention: {problem}")]
    Attention {
        node: String,
        choice: AttentionChoice,
        problem: AttentionError,
    },
    #[error(
        "{choice} attention was requested, but `{node}` belongs to attention that was not fused; enable the pass `fuse_attention` (`gemmule explain` shows why it refuses), or choose auto"
    )]
    AttentionInPieces {
        node: String,
        choice: AttentionChoice,
    },
    #[error(
        "`{node}` is fused attention, which has no mask for padding; to keep padding, switch the pass `fuse_attention` off"
    )]
    UnmaskedAttention { node: String },
    #[error(
        "`{node}` is causal, so the tokens that expand a query would attend to each other; for a causal late-interaction model, expected `attend_to_expansion_tokens: true` or `do_query_expansion: false`"
    )]
    CausalExpansion { node: String },
    #[error(
        "the output `{output}` is a mean over tokens (`{node}`), which would average padding too; to keep padding, ask for other outputs, such as values per token"
    )]
    MeanOfPadding { output: String, node: String },
    #[error(
        "the output `{output}` {reads} (`{node}`), which may be padding; to keep padding, ask for other outputs, such as values per token"
    )]
    ReadsPadding {
        output: String,
        node: String,
        /// Verb phrase that describes the reads, such as "reads last tokens".
        reads: &'static str,
    },
}
