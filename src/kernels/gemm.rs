//! `out = act(x · weightᵀ + bias)`: the tensor-core GEMM with its epilogues (ByteTransformer III.C).

use serde::{Deserialize, Serialize};

use crate::tensor::DType;

/// A pointwise function of one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Activation {
    /// `x·Φ(x)` with the error function, as BERT's checkpoints use it.
    GeluExact,
    /// The tanh approximation of GELU: another function, at most about 5e-4 away.
    GeluTanh,
    Relu,
    Tanh,
}

/// What is applied to the accumulators while they are still in registers.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct Epilogue {
    pub bias: bool,
    pub activation: Option<Activation>,
}

/// How a GEMM is cut: a block computes `m × n`, in steps of `k`, by `warps_m × warps_n` warps,
/// with `stages` steps of shared memory in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Tile {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub warps_m: u32,
    pub warps_n: u32,
    pub stages: u32,
}

/// `x [rows, k]`, `weight [n, k]`, `bias [n]` → `out [rows, n]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Gemm {
    pub n: u32,
    pub k: u32,
    pub dtype: DType,
    pub epilogue: Epilogue,
    pub tile: Tile,
}
