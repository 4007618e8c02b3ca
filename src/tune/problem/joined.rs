//! A linear layer and the LayerNorm behind it: one launch or two.

use super::{Choice, Range};
use crate::{
    kernels::{
        Kernel,
        gemm::{GemmResidualLayerNorm, WgmmaTile},
    },
    tensor::DType,
};

/// `x [rows, k]`, `weight [n, k]`, (`bias [n]`), `residual [rows, n]`, `gamma`, `beta [n]` → `[rows, n]`: LayerNorm of
/// `x · weightᵀ + bias + residual`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearLayerNorm {
    pub n: u32,
    pub k: u32,
    pub eps: f32,
    pub dtype: DType,
    /// Whether there is a bias.
    pub bias: bool,
}

impl LinearLayerNorm {
    /// The kernel that computes both.
    pub(super) fn joined(&self, tile: WgmmaTile) -> GemmResidualLayerNorm {
        let &Self {
            n,
            k,
            eps,
            dtype,
            bias,
        } = self;
        GemmResidualLayerNorm {
            n,
            k,
            eps,
            dtype,
            bias,
            tile,
        }
    }

    fn tiles(&self) -> Vec<WgmmaTile> {
        GemmResidualLayerNorm::candidates(self.n, self.k, self.dtype)
    }

    /// As the kernel's symbol, without a tile.
    pub(super) fn key(&self) -> String {
        let any = GemmResidualLayerNorm::TILES[0];
        self.joined(any).definition()
    }

    /// Two launches, and then one, by each tile.
    pub(super) fn candidates(&self) -> Vec<Choice> {
        let joined = self.tiles().into_iter().map(Choice::Joined);
        [Choice::Apart].into_iter().chain(joined).collect()
    }

    /// Estimated cycles; those of two launches are of the best kernels that there are for them.
    pub(super) fn cycles(&self, choice: Choice, rows: u64) -> f64 {
        match choice {
            Choice::Apart => GemmResidualLayerNorm::cycles_apart(rows, self.n, self.k, self.dtype),
            Choice::Joined(tile) => self.joined(tile).cycles(rows),
            _ => f64::INFINITY,
        }
    }

    pub(super) fn guess(&self) -> Vec<Range> {
        let &Self {
            n,
            k,
            eps,
            dtype,
            bias,
        } = self;
        let ranges = GemmResidualLayerNorm::by_rows(n, k, eps, dtype, bias).into_iter();
        let ranges = ranges.map(|(up_to, kernel)| Range {
            up_to,
            choice: kernel.map_or(Choice::Apart, |kernel| Choice::Joined(kernel.tile)),
        });
        ranges.collect()
    }
}
