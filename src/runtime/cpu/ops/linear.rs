//! Linear layers: `act(x · weightᵀ + bias) + residual`, over the pool's threads, with the epilogue applied while a block of
//! the result is in cache.
//!
//! A weight is packed once, when a model is loaded, for the instructions of the CPU at hand. A weight that lies in memory as
//! it was stored is multiplied by dot products, which compute a row in the same order whatever the other rows are.

mod panels;

use std::fmt;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{
    Read,
    parallel::SharedOut,
    product::DotRows,
    simd::{self, Pointwise, with_activation},
};
use crate::kernels::gemm::Activation;

/// A weight `[n, k]` in the form that its products are computed from.
pub struct PackedWeight {
    n: usize,
    k: usize,
    form: Form,
}

enum Form {
    F32(panels::Panels),
}

impl fmt::Debug for PackedWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a packed weight [{}, {}]", self.n, self.k)
    }
}

impl PackedWeight {
    /// Packs `weight`, which has `n` rows of `k` elements.
    ///
    /// # Panics
    /// When it has not.
    pub fn new(weight: &[f32], n: usize, k: usize) -> Self {
        assert_eq!(weight.len(), n * k, "the weight has n rows of k elements");
        let form = Form::F32(panels::Panels::new(weight, k));
        Self { n, k, form }
    }

    /// Bytes of memory that it takes.
    pub fn bytes(&self) -> u64 {
        match &self.form {
            Form::F32(panels) => panels.bytes(),
        }
    }

    /// Rows and columns of what was packed.
    pub fn shape(&self) -> [u64; 2] {
        [self.n as u64, self.k as u64]
    }
}

/// The weight of a linear layer as an operand.
#[derive(Clone, Copy)]
pub(super) enum Weight<'a> {
    /// As it was stored, row by row.
    Rows(&'a [f32]),
    Packed(&'a PackedWeight),
}

impl<'a> From<Weight<'a>> for Read<'a> {
    fn from(weight: Weight<'a>) -> Self {
        match weight {
            Weight::Rows(rows) => Read::Real(rows),
            Weight::Packed(packed) => Read::Packed(packed),
        }
    }
}

/// What the epilogue applies.
#[derive(Clone, Copy)]
pub(super) struct Finish<'a> {
    pub bias: Option<&'a [f32]>,
    pub activation: Option<Activation>,
    /// As long as the result.
    pub residual: Option<&'a [f32]>,
}

/// One linear layer for all rows of a batch: `x [rows, k]`, and `out [rows, n]`, which is not empty.
#[derive(Clone, Copy)]
pub(super) struct Linear<'a> {
    pub x: &'a [f32],
    pub n: usize,
    pub k: usize,
    pub finish: Finish<'a>,
}

/// A block of the result, which one task writes.
#[derive(Clone, Copy)]
struct Block {
    row: usize,
    rows: usize,
    col: usize,
    cols: usize,
}

impl Linear<'_> {
    /// Writes the layer's result.
    pub fn run(&self, weight: Weight<'_>, out: &mut [f32]) {
        match weight {
            Weight::Rows(weight) => self.dot(weight, out),
            Weight::Packed(packed) => match &packed.form {
                Form::F32(panels) => panels.multiply(self, out),
            },
        }
    }

    /// Dot products of rows that lie in memory as they are.
    fn dot(&self, weight: &[f32], out: &mut [f32]) {
        /// Rows and columns of a block, whose parts of both operands stay in cache.
        const BLOCK: [usize; 2] = [64, 96];
        let k = self.k;
        self.blocks(out, BLOCK, |out, block| {
            simd::dispatch(DotRows {
                x: &self.x[block.row * k..][..block.rows * k],
                weight: &weight[block.col * k..][..block.cols * k],
                rows: block.rows,
                cols: block.cols,
                k,
                out,
                at: self.at(block),
                stride: self.n,
            });
        });
    }

    /// Calls `multiply`, which writes the products of a block, and applies the epilogue, for all blocks of the result, on as
    /// many threads as are worth waking. A block has at most so many rows and columns; those of the same rows follow one
    /// another, so that these stay in cache.
    fn blocks(
        &self,
        out: &mut [f32],
        [most_rows, most_cols]: [usize; 2],
        multiply: impl Fn(SharedOut<'_>, Block) + Sync,
    ) {
        /// Multiplications below which one thread is faster than several. Where rows are few, reading the weight takes as
        /// long as the products of four rows.
        const MIN_PARALLEL: usize = 1 << 18;
        /// Rows at least of a block: fewer take longer by the row.
        const MIN_ROWS: usize = 32;
        let rows = out.len() / self.n;
        let threads = match rows.max(4) * self.n * self.k < MIN_PARALLEL {
            true => 1,
            false => rayon::current_num_threads(),
        };
        let over_cols = self.n.div_ceil(most_cols);
        // A few blocks per thread: one that is late leaves work for the others to take.
        let over_rows = match threads {
            1 => 1,
            _ => (4 * threads).div_ceil(over_cols),
        };
        let over_rows = over_rows
            .min(rows.div_ceil(MIN_ROWS))
            .max(rows.div_ceil(most_rows));
        let most_rows = rows.div_ceil(over_rows).next_multiple_of(8);
        let out = SharedOut::new(out);
        let block = |i: usize| {
            let (row, col) = (i / over_cols * most_rows, i % over_cols * most_cols);
            let block = Block {
                row,
                rows: most_rows.min(rows - row),
                col,
                cols: most_cols.min(self.n - col),
            };
            multiply(out, block);
            self.finish(out, block);
        };
        let n_blocks = rows.div_ceil(most_rows) * over_cols;
        match threads {
            1 => (0..n_blocks).for_each(block),
            _ => (0..n_blocks).into_par_iter().for_each(block),
        }
    }

    /// Where a block starts in the result.
    fn at(&self, block: Block) -> usize {
        block.row * self.n + block.col
    }

    /// The epilogue on a block that holds products.
    fn finish(&self, out: SharedOut<'_>, block: Block) {
        let (linear, of) = (*self, self.finish);
        if of.bias.is_some() || of.activation.is_some() || of.residual.is_some() {
            with_activation!(of.activation, f => simd::dispatch(ApplyEpilogue { f, linear, out, block }));
        }
    }
}

struct ApplyEpilogue<'a, F> {
    f: F,
    linear: Linear<'a>,
    out: SharedOut<'a>,
    block: Block,
}

impl<F: Pointwise> WithSimd for ApplyEpilogue<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Block { col, cols, .. } = self.block;
        let of = self.linear.finish;
        for row in 0..self.block.rows {
            let start = self.linear.at(self.block) + row * self.linear.n;
            // SAFETY: a row of the block that this task alone writes.
            let row = unsafe { self.out.slice(start..start + cols) };
            match of.bias {
                Some(bias) => simd::add_map_in_place(simd, self.f, &bias[col..][..cols], row),
                None => simd::map_in_place(simd, self.f, row),
            }
            if let Some(residual) = of.residual {
                simd::accumulate(simd, &residual[start..][..cols], row);
            }
        }
    }
}
