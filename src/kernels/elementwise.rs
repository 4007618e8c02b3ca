//! Pointwise kernels: what runs between GEMMs when fusion is off.

use serde::{Deserialize, Serialize};

use super::gemm::Activation;
use crate::tensor::DType;

/// `x [rows, width]`, `bias [width]` → `out [rows, width]`: `x + bias`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AddBias {
    pub width: u32,
    pub dtype: DType,
}

/// `a, b [rows, width]` → `out [rows, width]`: `a + b`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Add {
    pub width: u32,
    pub dtype: DType,
}

/// `x [rows, width]` → `out [rows, width]`: the activation of each element.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Activate {
    pub activation: Activation,
    pub width: u32,
    pub dtype: DType,
}

/// `x [rows, width]` → `out [rows, width]`: `by · x`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scale {
    pub by: f32,
    pub width: u32,
    pub dtype: DType,
}

/// `x [rows, from_width]` → `out [rows, width]`: columns `start .. start + width`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SliceColumns {
    pub from_width: u32,
    pub start: u32,
    pub width: u32,
    pub dtype: DType,
}

/// `x [tokens, heads·head]` → `out [heads, tokens, head]`. Runs over tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SplitHeads {
    pub heads: u32,
    pub head: u32,
    pub dtype: DType,
}

/// `x [heads, tokens, head]` → `out [tokens, heads·head]`. Runs over tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MergeHeads {
    pub heads: u32,
    pub head: u32,
    pub dtype: DType,
}
