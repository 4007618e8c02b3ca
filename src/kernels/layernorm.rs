//! LayerNorm and what is fused with it. One warp reduces X rows together
//! (TurboTransformers 4.1.2, `warpAllReduce_XElem`).

use serde::{Deserialize, Serialize};

use crate::tensor::DType;

/// `x [rows, width]`, `gamma`, `beta [width]` → `out [rows, width]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerNorm {
    pub width: u32,
    pub eps: f32,
    pub dtype: DType,
}

/// `x [rows, width]`, (`bias [width]`), `residual [rows, width]`, `gamma`, `beta [width]`
/// → `out [rows, width]`: LayerNorm of `x + bias + residual` (ByteTransformer III.C.1).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BiasResidualLayerNorm {
    pub width: u32,
    pub eps: f32,
    pub dtype: DType,
    /// Whether there is a bias; without it the kernel is `residual_layernorm`.
    pub bias: bool,
}
