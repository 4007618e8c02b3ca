//! What the nodes of a graph ask for, whichever kernel computes it.

use crate::{
    kernels::{
        gemm::Epilogue,
        layernorm::{BiasResidualLayerNorm, LayerNorm},
    },
    tensor::DType,
};

/// What one node asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Site {
    /// `x [rows, k]`, `weight [n, k]`, (`bias [n]`) → `[rows, n]`.
    Linear {
        n: u32,
        k: u32,
        dtype: DType,
        epilogue: Epilogue,
    },
    /// As [`LayerNorm::new`] makes it.
    LayerNorm(LayerNorm),
    /// As [`BiasResidualLayerNorm::new`] makes it.
    SumLayerNorm(BiasResidualLayerNorm),
}

/// A site of a chain: its value is the first operand of the next one's, and of no other operand of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    pub site: Site,
    /// Whether nothing but the next site reads the value, so that it need not be stored.
    pub is_private: bool,
}

/// Sites in the order of their launches, each of which feeds the next.
#[derive(Clone, Debug, PartialEq)]
pub struct Chain {
    pub links: Vec<Link>,
}

impl Chain {
    /// A site that neither feeds another one nor is fed.
    pub fn of(site: Site) -> Self {
        Self {
            links: vec![Link {
                site,
                is_private: false,
            }],
        }
    }
}
