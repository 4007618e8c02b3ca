//! Products of matrices that lie in memory as they are, on the calling thread.

use gemm_common::Parallelism;
use gemm_f32::gemm::f32::get_gemm_fn;
use pulp::{Simd, WithSimd};

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

/// A block of `out = x [rows, k] · weight [cols, k]ᵀ`, as dot products of
/// rows that both lie in memory as they are.
#[derive(Clone, Copy)]
pub(super) struct DotRows<'a> {
    pub x: &'a [f32],
    pub weight: &'a [f32],
    pub rows: usize,
    pub cols: usize,
    pub k: usize,
    pub out: SharedOut<'a>,
    /// Where the block starts in `out`, whose rows are `stride` apart.
    pub at: usize,
    pub stride: usize,
}

impl WithSimd for DotRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // As many sums as fit the registers together with what is multiplied.
        if S::REGISTER_COUNT >= 32 {
            self.tiles::<S, 4, 4>(simd);
        } else {
            self.tiles::<S, 3, 3>(simd);
        }
    }
}

impl DotRows<'_> {
    #[inline(always)]
    fn tiles<S: Simd, const M: usize, const N: usize>(self, simd: S) {
        let (cols, k) = (self.cols, self.k);
        for col in (0..cols).step_by(N) {
            let n = N.min(cols - col);
            // Past the last one, a row is computed again and not stored.
            let mut w: [&[f32]; N] = [&[]; N];
            for (j, w) in w.iter_mut().enumerate() {
                *w = &self.weight[(col + j.min(n - 1)) * k..][..k];
            }
            for row in (0..self.rows).step_by(M) {
                let m = M.min(self.rows - row);
                let mut x: [&[f32]; M] = [&[]; M];
                for (i, x) in x.iter_mut().enumerate() {
                    *x = &self.x[(row + i.min(m - 1)) * k..][..k];
                }
                let sums = dot_tile(simd, x, w);
                for (i, sums) in sums.iter().take(m).enumerate() {
                    let at = self.at + (row + i) * self.stride + col;
                    // SAFETY: these columns are this task's.
                    let out = unsafe { self.out.slice(at..at + n) };
                    out.copy_from_slice(&sums[..n]);
                }
            }
        }
    }
}

/// The dot product of each of `a` with each of `b`, all of one length.
#[inline(always)]
fn dot_tile<S: Simd, const M: usize, const N: usize>(
    simd: S,
    a: [&[f32]; M],
    b: [&[f32]; N],
) -> [[f32; N]; M] {
    // Loops rather than closures: a closure is compiled for the base instruction set unless it
    // happens to be inlined.
    let mut a_heads: [&[S::f32s]; M] = [&[]; M];
    let mut b_heads: [&[S::f32s]; N] = [&[]; N];
    let mut a_tails: [S::f32s; M] = [simd.splat_f32s(0.0); M];
    let mut b_tails: [S::f32s; N] = [simd.splat_f32s(0.0); N];
    let steps = a[0].len() / S::F32_LANES;
    for i in 0..M {
        let (head, tail) = S::as_simd_f32s(a[i]);
        (a_heads[i], a_tails[i]) = (&head[..steps], simd.partial_load_f32s(tail));
    }
    for j in 0..N {
        let (head, tail) = S::as_simd_f32s(b[j]);
        (b_heads[j], b_tails[j]) = (&head[..steps], simd.partial_load_f32s(tail));
    }
    let mut sums = [[simd.splat_f32s(0.0); N]; M];
    for i in 0..M {
        for j in 0..N {
            sums[i][j] = simd.mul_f32s(a_tails[i], b_tails[j]);
        }
    }
    for step in 0..steps {
        for i in 0..M {
            let a = a_heads[i][step];
            for j in 0..N {
                sums[i][j] = simd.mul_add_e_f32s(a, b_heads[j][step], sums[i][j]);
            }
        }
    }
    let mut totals = [[0.0; N]; M];
    for i in 0..M {
        for j in 0..N {
            totals[i][j] = simd.reduce_sum_f32s(sums[i][j]);
        }
    }
    totals
}
