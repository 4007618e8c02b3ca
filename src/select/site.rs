//! The problems that nodes of a graph pose, whichever kernel solves them.

use crate::{
    kernels::{
        elementwise::Gate,
        gemm::Epilogue,
        layernorm::{BiasResidualLayerNorm, LayerNorm},
        prepare_attention::PrepareAttention,
        rms_norm::RmsNorm,
    },
    tensor::DType,
};

/// The problem of one node.
#[derive(Clone, Debug, PartialEq)]
pub enum Site {
    /// `x [rows, k]`, `weight [n, k]`, (`bias [n]`), (`residual [rows, n]`) → `[rows, n]`.
    Linear {
        n: u32,
        k: u32,
        dtype: DType,
        epilogue: Epilogue,
    },
    /// RMSNorm of whole rows, as [`RmsNorm::of_rows`] makes it.
    RmsNorm(RmsNorm),
    /// LayerNorm, as [`LayerNorm::new`] makes it.
    LayerNorm(LayerNorm),
    /// The gate of the halves of a linear layer's rows.
    Gate(Gate),
    /// LayerNorm of a sum, as [`BiasResidualLayerNorm::new`] makes it.
    SumLayerNorm(BiasResidualLayerNorm),
    /// What attention reads of a linear layer's rows: two values, queries and keys, or queries and a cache.
    Prepare {
        kernel: PrepareAttention,
        /// Whether nothing else reads the columns that it prepares, so that the rows need not have them.
        is_alone: bool,
    },
}

/// A site of a chain. Its value is the first operand of the next site, and none of its other operands.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    pub site: Site,
    /// Whether only the next site reads the value, so that it need not be stored.
    pub is_private: bool,
}

/// Sites in the order of their launches, each of which feeds the next.
#[derive(Clone, Debug, PartialEq)]
pub struct Chain {
    pub links: Vec<Link>,
}

impl Chain {
    /// A chain of one site.
    pub fn of(site: Site) -> Self {
        Self {
            links: vec![Link {
                site,
                is_private: false,
            }],
        }
    }
}
