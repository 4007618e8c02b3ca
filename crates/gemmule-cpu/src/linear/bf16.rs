//! bf16 products, summed in f32 by instructions that multiply pairs: AMX or AVX-512 BF16. Weights are rounded to bf16 at load time,
//! activations at run time. Products are summed in the order of k, independent of the other rows.

use std::{
    arch::x86_64::{__m512, __m512bh, __m512i, _mm512_dpbf16_ps},
    iter::zip,
    mem::transmute,
};

use pulp::{Simd, WithSimd};

use super::{
    Linear, amx,
    groups::{COLS, Group, LANES, Panels, TILE_ROWS, VECTOR_ROWS, VECTORS, tiles},
};
use crate::simd;

/// Number of rows in a block, whose activations stay in cache.
const ROWS: usize = 256;

/// A weight in bf16, packed in pairs of adjacent elements along k.
pub(super) struct Bf16 {
    panels: Panels,
}

/// Returns whether this CPU has AVX-512 BF16.
pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")
}

impl Bf16 {
    /// # Panics
    /// Panics on a CPU without the instructions.
    pub fn new(weight: &[f32], n: usize, k: usize) -> Self {
        assert!(
            is_supported(),
            "callers check for bf16 instructions before packing"
        );
        Self {
            panels: packed(weight, n, k),
        }
    }

    pub fn bytes(&self) -> u64 {
        self.panels.bytes()
    }

    /// Computes the result of the layer.
    pub fn multiply(&self, layer: &Linear<'_>, out: &mut [f32]) {
        let (n, depth) = (layer.n, layer.k.div_ceil(2));
        layer.by_chunks(out, |layer, rows, out| {
            let cut = layer.cut(rows, [ROWS, COLS]);
            let activations = layer.of_rows(rows, cut, |x| rounded(x, layer.k));
            layer.blocks(out, cut, |out, block| {
                let x = &activations[block.row / cut.rows];
                let panel = self.panels.panel_of(block.col);
                let mut sums = [[0.0; COLS]; TILE_ROWS];
                for row in (0..block.rows).step_by(TILE_ROWS) {
                    let rows = TILE_ROWS.min(block.rows - row);
                    let x = &x[row * depth..][..rows * depth];
                    // SAFETY: a weight is packed only on a CPU with the instructions.
                    unsafe { sums_of(x, panel, depth, &mut sums) };
                    for (i, sums) in sums.iter().take(rows).enumerate() {
                        let start = layer.at(block) + (row + i) * n;
                        // SAFETY: only this task writes this row of the block.
                        let out = unsafe { out.slice(start..start + block.cols) };
                        out.copy_from_slice(&sums[..block.cols]);
                    }
                }
            });
        });
    }
}

/// Packs `weight [n, k]` into panels of pairs.
fn packed(weight: &[f32], n: usize, k: usize) -> Panels {
    let pack = |first: usize, panel: &mut [Group]| {
        for col in 0..COLS.min(n - first) {
            let row = &weight[(first + col) * k..][..k];
            for (to, from) in zip(panel[col..].iter_mut().step_by(COLS), row.chunks(2)) {
                *to = pair(from);
            }
        }
    };
    Panels::new(n, k.div_ceil(2), pack)
}

/// Rounds rows of activations to bf16, and packs them in pairs of adjacent elements.
fn rounded(x: &[f32], k: usize) -> Vec<Group> {
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
    pairs: &'a mut [Group],
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

/// Packs one or two adjacent elements.
fn pair(x: &[f32]) -> Group {
    x.iter().rev().fold(0, |pair, &x| pair << 16 | bf16(x))
}

/// Returns the bits of the nearest bf16, ties to even. A NaN stays a NaN.
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

tiles!("avx512f,avx512bf16", f32, amx::of_pairs, |sums, x, w| {
    // SAFETY: all of these vector types are 512 bits wide, and every bit pattern is a valid value of each type.
    unsafe {
        let (x, w) = (
            transmute::<__m512i, __m512bh>(x),
            transmute::<__m512i, __m512bh>(w),
        );
        transmute::<__m512, __m512i>(_mm512_dpbf16_ps(transmute::<__m512i, __m512>(sums), x, w))
    }
});

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize) -> Vec<f32> {
        (0..n)
            .map(|i| (i * 7919 % 1009) as f32 / 7.0 - 70.0)
            .collect()
    }

    fn halves(pair: Group) -> [f32; 2] {
        [pair << 16, pair & 0xffff_0000].map(f32::from_bits)
    }

    /// Runs on every CPU, because packing does not use the instructions.
    #[test]
    fn a_weight_is_packed_into_panels_of_pairs_and_activations_into_rows_of_pairs() {
        let rounded = |x: f32| half::bf16::from_f32(x).to_f32();
        for (n, k) in [(1, 1), (48, 4), (50, 7), (97, 12)] {
            let x = numbers(n * k);
            let row = |row: usize| {
                let numbers = match row < n {
                    true => &x[row * k..][..k],
                    false => &[],
                };
                let mut row: Vec<f32> = numbers.iter().copied().map(rounded).collect();
                row.resize(k.next_multiple_of(2), 0.0);
                row
            };
            let panels = packed(&x, n, k);
            for col in 0..n.next_multiple_of(COLS) {
                let panel = panels.panel_of(col / COLS * COLS);
                let pairs = panel[col % COLS..].iter().step_by(COLS);
                let held: Vec<f32> = pairs.flat_map(|&p| halves(p)).collect();
                assert_eq!(held, row(col), "column {col} of [{n}, {k}]");
            }
            for (at, pairs) in super::rounded(&x, k).chunks(k.div_ceil(2)).enumerate() {
                let held: Vec<f32> = pairs.iter().flat_map(|&p| halves(p)).collect();
                assert_eq!(held, row(at), "row {at} of [{n}, {k}]");
            }
        }
        assert!(halves(bf16(f32::from_bits(0x7f80_0001)))[0].is_nan());
    }

    #[test]
    fn tiles_of_amx_and_of_vectors_have_the_same_sums() {
        if !(amx::is_supported() && is_supported()) {
            println!("not compared: this CPU does not have both AMX and AVX-512 BF16");
            return;
        }
        for (rows, k) in [(1, 2), (3, 30), (8, 32), (9, 70), (16, 384)] {
            let (x, weight) = (numbers(rows * k), numbers(COLS * k));
            let (x, panels, depth) = (super::rounded(&x, k), packed(&weight, COLS, k), k / 2);
            let mut sums = [[[0.0; COLS]; TILE_ROWS]; 2];
            // SAFETY: the CPU has the instructions.
            unsafe {
                amx::of_pairs(&x, panels.panel_of(0), depth, &mut sums[0]);
                by_vectors(&x, panels.panel_of(0), depth, &mut sums[1]);
            }
            let [tiles, vectors] = sums.each_ref().map(|sums| sums[..rows].as_flattened());
            for (&got, &want) in zip(tiles, vectors) {
                // The factors are at most 75 in magnitude, and the sums are rounded at each step.
                let most = 75.0 * 75.0 * k as f32 * f32::EPSILON * 4.0;
                assert!(
                    (got - want).abs() <= most,
                    "[{rows}, {k}]: {got}, not {want}"
                );
            }
        }
    }
}
