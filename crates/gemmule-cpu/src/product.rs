//! Matrix products on the calling thread: products of strided matrices, and of register tiles.

use gemm_common::Parallelism;
use gemm_f32::gemm::f32::get_gemm_fn;
use pulp::Simd;

use crate::parallel::SharedOut;

/// A strided matrix operand: element `(i, j)` is at `i·row + j·col`.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    pub data: &'a [f32],
    pub row: usize,
    pub col: usize,
}

impl<'a> Operand<'a> {
    /// Returns the transpose, which refers to the same elements.
    #[inline]
    #[must_use]
    pub fn transposed(self) -> Operand<'a> {
        Operand {
            data: self.data,
            row: self.col,
            col: self.row,
        }
    }

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

/// Determines what [`multiply`] does with the previous contents of the output block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Into {
    Overwrite,
    Accumulate,
}

/// Writes or adds `scale · a · b` on the calling thread. The output is the `m × n` block at `out[at..]`, whose rows are `stride`
/// apart. `a` is `m × k` and `b` is `k × n`.
///
/// # Safety
///
/// While this function runs, nothing else may read or write the block.
#[expect(clippy::too_many_arguments, reason = "a GEMM has this many sizes")]
pub unsafe fn multiply(
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
    // The micro-kernel writes columns, so this computes the transpose: outᵀ = bᵀ · aᵀ, with `n` rows of `m` columns.
    // SAFETY: the checks above ensure that the operands and the block are in bounds. The caller guarantees exclusive access to the block.
    // Strides of slices in memory fit an isize.
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

/// Adds the products of `M` vectors (`rows`) and the matrix `b` to a register tile of sums. Element `k` of a vector is multiplied by row
/// `k` of `b`, in the order of `k`.
#[inline(always)]
pub(crate) fn add_products<S: Simd, const M: usize, const N: usize>(
    simd: S,
    rows: [&[f32]; M],
    b: &[[S::f32s; N]],
    sums: &mut [[S::f32s; N]; M],
) {
    add_products_ahead::<S, M, N, 0>(simd, rows, b, sums, &[]);
}

/// Like [`add_products`], but also prefetches the slice `ahead`. Each step along k requests `AHEAD` cache lines. The requests of all steps
/// are evenly distributed over the slice. If the slice has fewer lines than there are requests, some lines are requested twice; if it has
/// more, the last lines are not requested.
#[inline(always)]
pub(crate) fn add_products_ahead<S: Simd, const M: usize, const N: usize, const AHEAD: usize>(
    simd: S,
    mut rows: [&[f32]; M],
    b: &[[S::f32s; N]],
    sums: &mut [[S::f32s; N]; M],
    ahead: &[f32],
) {
    // Use loops rather than closures: a closure that is not inlined is compiled for the base instruction set.
    for row in &mut rows {
        *row = &row[..b.len()];
    }
    // Sum in a local copy, and without checks in the loop: a path that panics would keep the sums in memory instead of registers, which
    // doubles the time.
    let mut own = *sums;
    // Use a single loop without branches: a second loop for elements without a prefetch would double the time.
    let request = Requests::of(ahead, AHEAD * b.len());
    for (at, b) in b.iter().enumerate() {
        for i in 0..AHEAD {
            request.send(at * AHEAD + i);
        }
        for i in 0..M {
            // SAFETY: every row has been cut to the length of `b`.
            let x = simd.splat_f32s(unsafe { *rows[i].get_unchecked(at) });
            for j in 0..N {
                own[i][j] = simd.mul_add_e_f32s(x, b[j], own[i][j]);
            }
        }
    }
    *sums = own;
}

/// Prefetch requests, numbered from 0, that are evenly distributed over a range of memory.
#[derive(Clone, Copy)]
struct Requests {
    from: *const f32,
    /// Distance between consecutive requests in cache lines, as a fixed-point number with `SHIFT` fractional bits.
    step: usize,
}

impl Requests {
    const LINE: usize = 64 / size_of::<f32>();
    const SHIFT: u32 = 16;

    #[inline(always)]
    fn of(ahead: &[f32], requests: usize) -> Self {
        let lines = ahead.len() / Self::LINE;
        Self {
            from: ahead.as_ptr(),
            step: ((lines << Self::SHIFT) / requests.max(1)).min(1 << Self::SHIFT),
        }
    }

    /// Prefetches into the L2 cache.
    #[inline(always)]
    fn send(self, number: usize) {
        let line = (number * self.step) >> Self::SHIFT;
        let line = self.from.wrapping_add(line * Self::LINE);
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            // SAFETY: a prefetch is not an access: it never faults and has no visible effect.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }
}

/// Splits a slice into rows of `N` vectors.
#[inline(always)]
pub(crate) fn vectors<S: Simd, const N: usize>(x: &[f32]) -> &[[S::f32s; N]] {
    pulp::as_arrays::<N, _>(S::as_simd_f32s(x).0).0
}

#[inline(always)]
pub(crate) fn vectors_mut<S: Simd, const N: usize>(x: &mut [f32]) -> &mut [[S::f32s; N]] {
    pulp::as_arrays_mut::<N, _>(S::as_mut_simd_f32s(x).0).0
}

/// Computes `Σ aᵢbᵢ` in f64, in eight interleaved sums. The reference implementations of GEMM kernels use this function.
#[must_use]
pub fn exact_dot(a: &[f32], b: &[f32]) -> f64 {
    let (a_chunks, b_chunks) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder());
    let mut sum: f64 = rest.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    let mut lanes = [0.0f64; 8];
    for (a, b) in a_chunks.zip(b_chunks) {
        for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += f64::from(a) * f64::from(b);
        }
    }
    sum += lanes.iter().sum::<f64>();
    sum
}
