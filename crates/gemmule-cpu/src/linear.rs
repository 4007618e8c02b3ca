//! Linear layers: `act(x · weightᵀ + bias) + residual`, computed on the thread pool. The epilogue is applied to each block of the result
//! while the block is in cache.
//!
//! Each weight is packed for the CPU's instruction set when a model is loaded. In every format, the summation order of a row does not
//! depend on the other rows.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod bf16;
#[cfg(target_arch = "x86_64")]
mod groups;
mod int8;
pub(crate) mod panels;
#[cfg(target_arch = "x86_64")]
mod vnni;

use std::fmt;

use panels::Panels;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use crate::{
    parallel::SharedOut,
    simd::{self, Activation, Pointwise, with_activation},
};

/// A weight `[n, k]`, packed for matrix multiplication in one [`MatmulPrecision`].
pub struct PackedWeight {
    n: usize,
    k: usize,
    form: Form,
}

enum Form {
    F32(Panels),
    #[cfg(target_arch = "x86_64")]
    Bf16(bf16::Bf16),
    Int8(int8::Int8),
}

/// Precision of products in linear layers on the CPU. Products are summed in f32, or exactly for integers. All other computation is in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MatmulPrecision {
    #[default]
    F32,
    /// Rounds both factors to bf16. Only some CPUs support this precision.
    Bf16,
    /// Quantizes both factors to 8-bit integers, symmetrically around 0. A weight has one scale per output row, computed at load
    /// time. An activation has one scale per row, computed at run time.
    Int8,
}

impl MatmulPrecision {
    /// Returns whether this CPU has the required instructions.
    pub fn is_supported(self) -> bool {
        match self {
            Self::F32 | Self::Int8 => true,
            #[cfg(target_arch = "x86_64")]
            Self::Bf16 => bf16::is_supported(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Bf16 => false,
        }
    }
}

impl fmt::Display for MatmulPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        })
    }
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
    /// Panics if `weight` has another length.
    pub fn new(weight: &[f32], n: usize, k: usize, products: MatmulPrecision) -> Self {
        assert_eq!(weight.len(), n * k, "the weight has n rows of k elements");
        let form = match products {
            MatmulPrecision::F32 => Form::F32(Panels::new(weight, n, k)),
            #[cfg(target_arch = "x86_64")]
            MatmulPrecision::Bf16 => Form::Bf16(bf16::Bf16::new(weight, n, k)),
            #[cfg(not(target_arch = "x86_64"))]
            MatmulPrecision::Bf16 => {
                unreachable!(
                    "bf16 products are requested only if `MatmulPrecision::is_supported` is true"
                )
            }
            MatmulPrecision::Int8 => Form::Int8(int8::Int8::new(weight, n, k)),
        };
        Self { n, k, form }
    }

    /// Packs like [`MatmulPrecision::Int8`] on a CPU without AVX-512 VNNI, which uses the format of `rten-gemm`.
    #[doc(hidden)]
    pub fn int8_of_crate(weight: &[f32], n: usize, k: usize) -> Self {
        let form = Form::Int8(int8::Int8::for_crate(weight, n, k));
        Self { n, k, form }
    }

    /// Maximum magnitude of a weight's integers on this CPU: 127, or 63 if the CPU adds two products in 16 bits.
    pub fn largest_integer() -> i8 {
        int8::largest()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        match &self.form {
            Form::F32(panels) => panels.bytes(),
            #[cfg(target_arch = "x86_64")]
            Form::Bf16(panels) => panels.bytes(),
            Form::Int8(panels) => panels.bytes(),
        }
    }

    /// Rows and columns of the packed weight.
    pub fn shape(&self) -> [u64; 2] {
        [self.n as u64, self.k as u64]
    }
}

/// Weight operand of a linear layer.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// Row-major, as stored.
    Rows(&'a [f32]),
    Packed(&'a PackedWeight),
}

/// Operands of the epilogue.
#[derive(Clone, Copy, Debug)]
pub struct Finish<'a> {
    pub bias: Option<&'a [f32]>,
    pub activation: Option<Activation>,
    /// Tensor of the same shape as the result.
    pub residual: Option<&'a [f32]>,
}

/// A linear layer for all rows of a batch. `x` is `[rows, k]`, and `out` is `[rows, n]` and not empty.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    pub x: &'a [f32],
    pub n: usize,
    pub k: usize,
    pub finish: Finish<'a>,
}

/// Partition of the result into blocks.
#[derive(Clone, Copy)]
struct Cut {
    rows: usize,
    cols: usize,
    /// Whether the work is large enough for more than one thread.
    parallel: bool,
}

impl Cut {
    /// Calls `task` with every number below `n`.
    fn for_each(&self, n: usize, task: impl Fn(usize) + Send + Sync) {
        match self.parallel {
            true => (0..n).into_par_iter().for_each(task),
            false => (0..n).for_each(task),
        }
    }
}

/// A block of the result, written by one task.
#[derive(Clone, Copy)]
struct Block {
    row: usize,
    rows: usize,
    col: usize,
    cols: usize,
}

impl Linear<'_> {
    /// Computes the result of the layer.
    pub fn run(&self, weight: Weight<'_>, out: &mut [f32]) {
        match weight {
            Weight::Rows(weight) => Panels::new(weight, self.n, self.k).multiply(self, out),
            // If k is 0, the weight has no packed data.
            Weight::Packed(_) if self.k == 0 => Panels::new(&[], self.n, 0).multiply(self, out),
            Weight::Packed(packed) => match &packed.form {
                Form::F32(panels) => panels.multiply(self, out),
                #[cfg(target_arch = "x86_64")]
                Form::Bf16(panels) => panels.multiply(self, out),
                Form::Int8(panels) => panels.multiply(self, out),
            },
        }
    }

    /// Splits the rows into chunks, which limits the memory for quantized activations at any batch size. For each chunk, calls `part` with
    /// the layer restricted to the chunk, the number of rows of the chunk, and these rows of the result.
    fn by_chunks(&self, out: &mut [f32], part: impl Fn(&Linear<'_>, usize, &mut [f32])) {
        const ROWS: usize = 4096;
        let (n, k) = (self.n, self.k);
        for (i, out) in out.chunks_mut(ROWS * n).enumerate() {
            let (first, rows) = (i * ROWS, out.len() / n);
            let residual = self.finish.residual.map(|r| &r[first * n..][..rows * n]);
            let layer = Linear {
                x: &self.x[first * k..][..rows * k],
                finish: Finish {
                    residual,
                    ..self.finish
                },
                ..*self
            };
            part(&layer, rows, out);
        }
    }

    /// Applies `make` to the activations of each block of rows.
    fn of_rows<T: Send>(
        &self,
        rows: usize,
        cut: Cut,
        make: impl Fn(&[f32]) -> T + Send + Sync,
    ) -> Vec<T> {
        let make = |i: usize| {
            let first = i * cut.rows;
            make(&self.x[first * self.k..][..cut.rows.min(rows - first) * self.k])
        };
        let n = rows.div_ceil(cut.rows);
        match cut.parallel {
            true => (0..n).into_par_iter().map(make).collect(),
            false => (0..n).map(make).collect(),
        }
    }

    /// Partitions a result of `rows` rows into blocks with at most the given numbers of rows and columns.
    fn cut(&self, rows: usize, [max_rows, cols]: [usize; 2]) -> Cut {
        /// Number of multiplications below which one thread is faster than several. Fewer than four rows are counted as four, because
        /// reading the weight takes as long as the products of four rows.
        const MIN_PARALLEL: usize = 1 << 18;
        /// Minimum number of rows per block; smaller blocks take longer per row.
        const MIN_ROWS: usize = 32;
        let threads = match rows.max(4) * self.n * self.k < MIN_PARALLEL {
            true => 1,
            false => rayon::current_num_threads(),
        };
        // Use a few blocks per thread, so that other threads can take over blocks of a slow one.
        let over_rows = match threads {
            1 => 1,
            _ => (4 * threads).div_ceil(self.n.div_ceil(cols)),
        };
        let over_rows = over_rows
            .min(rows.div_ceil(MIN_ROWS))
            .max(rows.div_ceil(max_rows));
        Cut {
            rows: rows.div_ceil(over_rows).next_multiple_of(8),
            cols,
            parallel: threads > 1,
        }
    }

    /// Computes each block of the result: calls `multiply` to write the products, then applies the epilogue. Blocks of the same rows are
    /// processed consecutively, so that these rows stay in cache.
    fn blocks(
        &self,
        out: &mut [f32],
        cut: Cut,
        multiply: impl Fn(SharedOut<'_>, Block) + Send + Sync,
    ) {
        let (rows, over_cols) = (out.len() / self.n, self.n.div_ceil(cut.cols));
        let out = SharedOut::new(out);
        cut.for_each(rows.div_ceil(cut.rows) * over_cols, |i| {
            let (row, col) = (i / over_cols * cut.rows, i % over_cols * cut.cols);
            let block = Block {
                row,
                rows: cut.rows.min(rows - row),
                col,
                cols: cut.cols.min(self.n - col),
            };
            multiply(out, block);
            self.finish(out, block);
        });
    }

    /// Start of a block in the result.
    fn at(&self, block: Block) -> usize {
        block.row * self.n + block.col
    }

    /// Applies the epilogue to a block of products.
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
            // SAFETY: only this task writes this row of the block.
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
