//! Classes of kernels for time breakdowns, and operation counts of matrix products.

use std::fmt;

use crate::tensor::{Size, Symbol};

/// Kernel classes of the time breakdown in ByteTransformer's figure 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Matrix products of activations with a weight, including epilogues.
    Gemm,
    /// Matrix products of attention (scores and context), or fused attention including softmax.
    Attention,
    /// Softmax as a separate kernel.
    Softmax,
    /// LayerNorm, including all operations that are fused into the same kernel.
    LayerNorm,
    /// Copies and pointwise kernels: lookups, sums, biases, activations, transposes, pooling.
    Other,
}

impl Class {
    pub const ALL: [Class; 5] = [
        Class::Gemm,
        Class::Attention,
        Class::Softmax,
        Class::LayerNorm,
        Class::Other,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Class::Gemm => "GEMM",
            Class::Attention => "attention",
            Class::Softmax => "softmax",
            Class::LayerNorm => "LayerNorm",
            Class::Other => "other",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Number of floating-point operations to multiply the rows by a weight `[n, k]`. A multiply-add counts as two operations.
pub(super) fn product_flop([n, k]: [u32; 2]) -> Size {
    flop(n, k, Symbol::Rows)
}

/// Number of floating-point operations of `products` matrix products of attention. A multiply-add counts as two operations.
pub(super) fn attention_flop(products: u64, heads: u32, head: u32) -> Size {
    &Size::constant(products) * &flop(heads, head, Symbol::Pairs)
}

fn flop(a: u32, b: u32, symbol: Symbol) -> Size {
    let each = 2u64.saturating_mul(u64::from(a).saturating_mul(b.into()));
    &Size::constant(each) * &symbol.into()
}
