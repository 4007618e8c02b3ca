//! `act(x · weightᵀ + bias)`, with the epilogue applied while a block of the result is in cache.

use gemm::Parallelism;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::OpError;
use super::args::Args;
use super::parallel::SharedOut;
use super::simd::{self, Pointwise, with_activation};
use crate::kernels::gemm::{Epilogue, Gemm};

/// A strided matrix operand: element `(i, j)` is at `i·row + j·col`.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a> {
    pub data: &'a [f32],
    pub row: usize,
    pub col: usize,
}

impl Operand<'_> {
    fn check(&self, rows: usize, cols: usize) {
        let end = match (rows.checked_sub(1), cols.checked_sub(1)) {
            (Some(i), Some(j)) => i * self.row + j * self.col + 1,
            _ => 0,
        };
        assert!(
            end <= self.data.len(),
            "kernels read within the length that was checked"
        );
    }
}

/// Writes `scale · a · b` on the calling thread to the `m × n` block at `out[at..]` whose rows are
/// `stride` apart. `a` is `m × k` and `b` is `k × n`.
///
/// # Safety
///
/// No one else reads or writes the block meanwhile.
#[expect(clippy::too_many_arguments, reason = "a GEMM has this many sizes")]
pub(super) unsafe fn multiply(
    (m, n, k): (usize, usize, usize),
    scale: f32,
    a: Operand<'_>,
    b: Operand<'_>,
    out: &SharedOut<'_>,
    at: usize,
    stride: usize,
) {
    a.check(m, k);
    b.check(k, n);
    let dst = out.block(at, m, n, stride);
    // SAFETY: the operands and the block are in bounds by the checks above; the block is ours by
    // the caller's promise. Strides of slices in memory fit an isize.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst,
            1,
            stride as isize,
            false,
            a.data.as_ptr(),
            a.col as isize,
            a.row as isize,
            b.data.as_ptr(),
            b.col as isize,
            b.row as isize,
            0.0,
            scale,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// Columns of a block: its part of the weight stays in the second-level cache for all its rows.
const BLOCK_COLS: usize = 192;
/// Rows of a block: with [`BLOCK_COLS`], the result is still in cache for the epilogue.
const BLOCK_ROWS: usize = 512;
/// Multiplications below which one thread is faster than several.
const MIN_PARALLEL: usize = 1 << 19;

pub(super) fn gemm(spec: &Gemm, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (rows, n, k) = (args.extents.rows, u64::from(spec.n), u64::from(spec.k));
    let x = args.real("x", &[rows, k])?;
    let weight = args.real("weight", &[n, k])?;
    let bias = if spec.epilogue.bias {
        Some(args.real("bias", &[n])?)
    } else {
        None
    };
    let out = args.out(&[rows, n])?;
    if out.is_empty() {
        return Ok(());
    }
    let (n, k) = (n as usize, k as usize);
    linear(x, weight, bias, spec.epilogue, out, n, k);
    Ok(())
}

/// `out [rows, n]` is not empty; `x [rows, k]` and `weight [n, k]` fit it.
fn linear(
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    epilogue: Epilogue,
    out: &mut [f32],
    n: usize,
    k: usize,
) {
    let rows = out.len() / n;
    let out = SharedOut::new(out);
    let block = |first_row: usize, m: usize, first_col: usize, cols: usize| {
        let at = first_row * n + first_col;
        let x = Operand {
            data: &x[first_row * k..],
            row: k,
            col: 1,
        };
        let weight = Operand {
            data: &weight[first_col * k..],
            row: 1,
            col: k,
        };
        // SAFETY: blocks are disjoint, and each is one task's.
        unsafe { multiply((m, cols, k), 1.0, x, weight, &out, at, n) };
        let bias = bias.map(|b| &b[first_col..first_col + cols]);
        if bias.is_none() && epilogue.activation.is_none() {
            return;
        }
        with_activation!(epilogue.activation, f => simd::dispatch(ApplyEpilogue {
            f, bias, out, at, rows: m, cols, stride: n,
        }));
    };
    if rows * n * k < MIN_PARALLEL || rayon::current_num_threads() == 1 {
        for first_row in (0..rows).step_by(BLOCK_ROWS) {
            block(first_row, BLOCK_ROWS.min(rows - first_row), 0, n);
        }
        return;
    }
    let row_blocks = rows.div_ceil(BLOCK_ROWS);
    let block_rows = rows.div_ceil(row_blocks);
    let col_blocks = n.div_ceil(BLOCK_COLS);
    (0..row_blocks * col_blocks).into_par_iter().for_each(|i| {
        let first_row = i / col_blocks * block_rows;
        let first_col = i % col_blocks * BLOCK_COLS;
        block(
            first_row,
            block_rows.min(rows - first_row),
            first_col,
            BLOCK_COLS.min(n - first_col),
        );
    });
}

struct ApplyEpilogue<'a, F> {
    f: F,
    bias: Option<&'a [f32]>,
    out: SharedOut<'a>,
    at: usize,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<F: Pointwise> WithSimd for ApplyEpilogue<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for row in 0..self.rows {
            let start = self.at + row * self.stride;
            // SAFETY: rows of the block that this task alone writes.
            let row = unsafe { self.out.slice(start..start + self.cols) };
            match self.bias {
                Some(bias) => simd::add_map_in_place(simd, self.f, bias, row),
                None => simd::map_in_place(simd, self.f, row),
            }
        }
    }
}
