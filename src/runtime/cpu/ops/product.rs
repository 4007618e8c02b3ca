//! Products on the calling thread: of matrices that lie in memory as they are, and tiles of sums in registers.

use gemm_common::Parallelism;
use gemm_f32::gemm::f32::get_gemm_fn;
use pulp::Simd;

use super::parallel::SharedOut;

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

/// What [`multiply`] does with what its block holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Into {
    Overwrite,
    Accumulate,
}

/// Writes or adds `scale · a · b`, on the calling thread, to the `m × n` block at `out[at..]` whose
/// rows are `stride` apart. `a` is `m × k` and `b` is `k × n`.
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
    into: Into,
    out: &SharedOut<'_>,
    at: usize,
    stride: usize,
) {
    a.check(m, k);
    b.check(k, n);
    let dst = out.block(at, m, n, stride);
    // The micro-kernel writes columns, so it computes the transpose: outᵀ = bᵀ · aᵀ, `n` rows of `m` columns.
    // SAFETY: the operands and the block are in bounds by the checks above; the block is ours by
    // the caller's promise. Strides of slices in memory fit an isize.
    unsafe {
        get_gemm_fn()(
            n,
            m,
            k,
            dst,
            stride as isize,
            1,
            into == Into::Accumulate,
            b.data.as_ptr(),
            b.row as isize,
            b.col as isize,
            a.data.as_ptr(),
            a.row as isize,
            a.col as isize,
            1.0,
            scale,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// Adds to a tile of sums in registers: of `M` rows, each with an element for each row of `b`, times `b`. Sums are in the order of
/// the elements.
#[inline(always)]
pub(super) fn add_products<S: Simd, const M: usize, const N: usize>(
    simd: S,
    mut rows: [&[f32]; M],
    b: &[[S::f32s; N]],
    sums: &mut [[S::f32s; N]; M],
) {
    // Loops rather than closures: a closure is compiled for the base instruction set unless it
    // happens to be inlined.
    for row in &mut rows {
        *row = &row[..b.len()];
    }
    for at in 0..b.len() {
        for i in 0..M {
            let x = simd.splat_f32s(rows[i][at]);
            for j in 0..N {
                sums[i][j] = simd.mul_add_e_f32s(x, b[at][j], sums[i][j]);
            }
        }
    }
}

/// Rows of `N` vectors.
#[inline(always)]
pub(super) fn vectors<S: Simd, const N: usize>(x: &[f32]) -> &[[S::f32s; N]] {
    pulp::as_arrays::<N, _>(S::as_simd_f32s(x).0).0
}

#[inline(always)]
pub(super) fn vectors_mut<S: Simd, const N: usize>(x: &mut [f32]) -> &mut [[S::f32s; N]] {
    pulp::as_arrays_mut::<N, _>(S::as_mut_simd_f32s(x).0).0
}
