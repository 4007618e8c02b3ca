//! From tokens to one row per sequence.

use serde::{Deserialize, Serialize};

use crate::tensor::DType;

/// `x [tokens, width]`, `cu_lens [batch + 1]` → `out [batch, width]`: each sequence's first token.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FirstToken {
    pub width: u32,
    pub dtype: DType,
}

/// `x [tokens, width]`, `cu_lens [batch + 1]` → `out [batch, width]`: mean over each sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MeanPool {
    pub width: u32,
    pub dtype: DType,
}

/// `x [rows, width]` → `out [rows, width]`: each row over `max(‖row‖₂, eps)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct L2Normalize {
    pub width: u32,
    pub eps: f32,
    pub dtype: DType,
}

/// [`MeanPool`], then [`L2Normalize`], without storing the means.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeanPoolNormalize {
    pub width: u32,
    pub eps: f32,
    pub dtype: DType,
}
