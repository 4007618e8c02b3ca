//! bf16 products, summed in f32, by the instructions that multiply pairs (AVX-512 BF16). A weight is rounded to bf16 when it
//! is loaded, an activation when it is multiplied. Sums are in the order of k, whatever the other rows are.

use std::{
    arch::x86_64::{
        __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_set1_epi32,
        _mm512_setzero_ps, _mm512_storeu_ps,
    },
    iter::zip,
    mem::transmute,
};

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{super::simd, Linear};

/// Lanes of a vector of sums.
const LANES: usize = 16;
/// Vectors of a panel, and rows of a tile: as many sums as fit the registers together with what is multiplied.
const VECTORS: usize = 3;
const TILE_ROWS: usize = 8;
/// Columns of a panel.
const COLS: usize = VECTORS * LANES;
/// Rows of a block, whose activations stay in cache.
const ROWS: usize = 256;

/// Two neighbours along k, the first in the low half.
type Pair = u32;

/// A weight `[n, k]` as panels `[k / 2, 48]` of pairs, the last one filled up with zeros.
pub(super) struct Bf16 {
    pairs: Vec<Pair>,
}

/// Whether this CPU has the instructions.
pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")
}

impl Bf16 {
    /// # Panics
    /// On a CPU without the instructions.
    pub fn new(weight: &[f32], n: usize, k: usize) -> Self {
        assert!(
            is_supported(),
            "who asks for bf16 products has asked whether there are any"
        );
        let depth = k.div_ceil(2);
        let mut pairs = vec![0; n.div_ceil(COLS) * COLS * depth];
        let panels = pairs.par_chunks_mut((COLS * depth).max(1));
        panels.enumerate().for_each(|(panel, pairs)| {
            let first = panel * COLS;
            for col in 0..COLS.min(n - first) {
                let row = &weight[(first + col) * k..][..k];
                for (to, from) in zip(pairs[col..].iter_mut().step_by(COLS), row.chunks(2)) {
                    *to = pair(from);
                }
            }
        });
        Self { pairs }
    }

    pub fn bytes(&self) -> u64 {
        size_of_val(self.pairs.as_slice()) as u64
    }

    /// Writes the layer's result.
    pub fn multiply(&self, layer: &Linear<'_>, out: &mut [f32]) {
        let (n, depth) = (layer.n, layer.k.div_ceil(2));
        layer.by_chunks(out, |layer, rows, out| {
            let cut = layer.cut(rows, [ROWS, COLS]);
            let activations = layer.of_rows(rows, cut, |x| rounded(x, layer.k));
            layer.blocks(out, cut, |out, block| {
                let x = &activations[block.row / cut.rows];
                let panel = &self.pairs[block.col * depth..][..COLS * depth];
                for row in (0..block.rows).step_by(TILE_ROWS) {
                    let rows = TILE_ROWS.min(block.rows - row);
                    // SAFETY: a weight is packed on a CPU with the instructions only.
                    let sums = unsafe { sums_of(&x[row * depth..][..rows * depth], panel, depth) };
                    for (i, sums) in sums.iter().take(rows).enumerate() {
                        let start = layer.at(block) + (row + i) * n;
                        // SAFETY: a row of the block that this task alone writes.
                        let out = unsafe { out.slice(start..start + block.cols) };
                        out.copy_from_slice(&sums[..block.cols]);
                    }
                }
            });
        });
    }
}

/// Rows of activations as pairs.
fn rounded(x: &[f32], k: usize) -> Vec<Pair> {
    let mut pairs = vec![0; x.len() / k * k.div_ceil(2)];
    simd::dispatch(Round {
        x,
        k,
        pairs: &mut pairs,
    });
    pairs
}

struct Round<'a> {
    x: &'a [f32],
    k: usize,
    pairs: &'a mut [Pair],
}

impl WithSimd for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let rows = self.pairs.chunks_exact_mut(self.k.div_ceil(2));
        for (x, pairs) in zip(self.x.chunks_exact(self.k), rows) {
            let (whole, rest) = x.as_chunks::<2>();
            for (to, &[low, high]) in zip(&mut *pairs, whole) {
                *to = bf16(low) | bf16(high) << 16;
            }
            if let ([last], Some(to)) = (rest, pairs.last_mut()) {
                *to = bf16(*last);
            }
        }
    }
}

/// One or two neighbours.
fn pair(x: &[f32]) -> Pair {
    x.iter().rev().fold(0, |pair, &x| pair << 16 | bf16(x))
}

/// The bits of the nearest bf16, ties to even; a NaN stays one.
#[inline(always)]
fn bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if x.is_nan() {
        bits >> 16 | 0x40
    } else {
        nearest
    }
}

/// The products of up to [`TILE_ROWS`] rows of `depth` pairs with a panel.
///
/// # Safety
/// The CPU has AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
fn sums_of(x: &[Pair], panel: &[Pair], depth: usize) -> [[f32; COLS]; TILE_ROWS] {
    match x.len() / depth.max(1) {
        1 => tile::<1>(x, panel, depth),
        2 => tile::<2>(x, panel, depth),
        3 | 4 => tile::<4>(x, panel, depth),
        _ => tile::<TILE_ROWS>(x, panel, depth),
    }
}

/// As [`sums_of`], for up to `M` rows: behind the last one, it is computed again.
#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
fn tile<const M: usize>(x: &[Pair], panel: &[Pair], depth: usize) -> [[f32; COLS]; TILE_ROWS] {
    let last = (x.len() / depth.max(1)).saturating_sub(1);
    let rows: [&[Pair]; M] = std::array::from_fn(|i| &x[i.min(last) * depth..][..depth]);
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; M];
    for (at, weights) in panel.chunks_exact(COLS).enumerate() {
        let mut w = [_mm512_set1_epi32(0); VECTORS];
        for j in 0..VECTORS {
            // SAFETY: 16 of the 48 pairs.
            w[j] = unsafe { _mm512_loadu_si512(weights[j * LANES..][..LANES].as_ptr().cast()) };
        }
        for i in 0..M {
            let x = _mm512_set1_epi32(rows[i][at].cast_signed());
            for j in 0..VECTORS {
                // SAFETY: both are 512 bits without a meaning of their own.
                let (x, w) = unsafe {
                    (
                        transmute::<__m512i, __m512bh>(x),
                        transmute::<__m512i, __m512bh>(w[j]),
                    )
                };
                sums[i][j] = _mm512_dpbf16_ps(sums[i][j], x, w);
            }
        }
    }
    let mut out = [[0.0; COLS]; TILE_ROWS];
    for i in 0..M {
        for j in 0..VECTORS {
            let to = &mut out[i][j * LANES..][..LANES];
            // SAFETY: room for the 16 lanes.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), sums[i][j]) };
        }
    }
    out
}
