//! Attention over packed sequences: the unfused pieces, and the two fused kernels.
//!
//! A token attends to the tokens of its own sequence only, so scores are ragged: head `h`, query
//! `i` and key `j` of sequence `b` with length `n` lie at
//! `h·pairs + pair_offsets[b] + i·n + j`, with `pairs = Σ n²`.

use serde::{Deserialize, Serialize};

use crate::tensor::DType;

/// Where element `c` of head `h` of token `t` lies in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum HeadView {
    /// `[heads, tokens, head]`: `(h·tokens + t)·head + c`.
    HeadMajor,
    /// Columns of a `[tokens, stride]` tensor: `t·stride + offset + h·head + c`.
    TokenMajor { offset: u32, stride: u32 },
}

/// `q`, `k`, `cu_lens`, `pair_offsets` → `scores [heads, pairs]`: `scale · q·kᵀ` per sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionScores {
    pub heads: u32,
    pub head: u32,
    pub scale: f32,
    pub q: HeadView,
    pub k: HeadView,
    pub dtype: DType,
}

/// `scores`, `cu_lens`, `pair_offsets` → `out [heads, pairs]`: softmax of `scale · scores` over keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionSoftmax {
    pub heads: u32,
    pub scale: f32,
    pub dtype: DType,
}

/// `probabilities [heads, pairs]`, `v`, `cu_lens`, `pair_offsets` → `out`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AttentionContext {
    pub heads: u32,
    pub head: u32,
    pub v: HeadView,
    pub out: HeadView,
    pub dtype: DType,
}

/// Short fused attention (ByteTransformer III.E.1): all keys of a sequence at once in shared
/// memory, for sequences of at most `max_len`.
///
/// `q`, `k`, `v`, `cu_lens` → `out [tokens, heads·head]`, softmax of `scale · q·kᵀ` times `v`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaShort {
    pub heads: u32,
    pub head: u32,
    pub scale: f32,
    pub q: HeadView,
    pub k: HeadView,
    pub v: HeadView,
    pub max_len: u32,
    pub dtype: DType,
}

/// Fused attention of any length by online softmax. Operands as [`MhaShort`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaOnline {
    pub heads: u32,
    pub head: u32,
    pub scale: f32,
    pub q: HeadView,
    pub k: HeadView,
    pub v: HeadView,
    pub dtype: DType,
}
