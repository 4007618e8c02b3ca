//! 8-bit integer products: a weight has a scale for each of its rows, an activation one for each of its, and both are
//! symmetric around 0. Sums of products are exact in 32 bits, so a row's result does not depend on the other rows.
//!
//! `x ≈ sx·q` with `q = round(x / sx)` and `sx = max|x| / 127` by row, and so the weight; then `x · w ≈ sx·sw·Σ q·p`. The
//! error of one factor is at most half its scale.

use std::iter::zip;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;
use rten_gemm::{
    GemmExecutor, GemmInputA, GemmInputB, GemmUninitOptions, PackedAMatrix, PackedBMatrix,
};
use rten_tensor::NdTensorView;

use super::{super::simd, Linear, SharedOut};

/// Columns of a panel: whole tiles of the crate's kernels.
const COLS: usize = 96;
/// Rows of a block: its 32-bit sums stay in cache until they are scaled.
const ROWS: usize = 64;
/// What is added to an activation, as the crate's products are of unsigned and signed integers.
const ZERO: i32 = 128;

type Executor = GemmExecutor<u8, i8, i32>;

thread_local! {
    static EXECUTOR: Executor = Executor::default();
}

/// The largest integer of a weight. Where the CPU adds two products in 16 bits, a bit less keeps these from overflowing:
/// 2 · 255 · 63 is below 2¹⁵.
pub(super) fn largest() -> i8 {
    match EXECUTOR.with(Executor::may_saturate) {
        true => 63,
        false => 127,
    }
}

/// A weight `[n, k]` as panels of its rows.
pub(super) struct Int8 {
    panels: Vec<PackedBMatrix<i8>>,
    /// By row of the weight.
    columns: Vec<Column>,
}

/// What turns the sum of a column of the result into a number.
#[derive(Clone, Copy)]
struct Column {
    scale: f32,
    /// What [`ZERO`] adds to the sum.
    surplus: i32,
}

impl Int8 {
    pub fn new(weight: &[f32], n: usize, k: usize) -> Self {
        let panel = |first: usize| {
            let rows = COLS.min(n - first);
            let (mut integers, mut scales) = (vec![0_i8; rows * k], vec![0.0; rows]);
            simd::dispatch(Round {
                x: &weight[first * k..][..rows * k],
                k,
                largest: largest().into(),
                integer: |p: i32| p as i8,
                integers: &mut integers,
                scales: &mut scales,
            });
            let matrix = NdTensorView::from_data([rows, k], integers.as_slice());
            let packed = EXECUTOR.with(|executor| executor.prepack_b(matrix.transposed()));
            let column = |(row, &scale): (&[i8], &f32)| Column {
                scale,
                surplus: ZERO * row.iter().map(|&p| i32::from(p)).sum::<i32>(),
            };
            let columns: Vec<Column> = zip(integers.chunks(k), &scales).map(column).collect();
            (packed, columns)
        };
        // A weight of no depth has nothing to pack.
        let packed = if k == 0 { 0 } else { n };
        let firsts: Vec<usize> = (0..packed).step_by(COLS).collect();
        let (panels, columns): (Vec<_>, Vec<_>) = firsts.into_par_iter().map(panel).unzip();
        Self {
            panels,
            columns: columns.concat(),
        }
    }

    /// Bytes of memory for a weight `[n, k]`: its integers, in whole tiles, and what each column has.
    pub fn bytes(&self, n: usize, k: usize) -> u64 {
        (n * k.next_multiple_of(4) + size_of_val(self.columns.as_slice())) as u64
    }

    /// Writes the layer's result.
    pub fn multiply(&self, layer: &Linear<'_>, out: &mut [f32]) {
        layer.by_chunks(out, |layer, rows, out| {
            self.multiply_chunk(layer, rows, out)
        });
    }

    fn multiply_chunk(&self, layer: &Linear<'_>, rows: usize, out: &mut [f32]) {
        let (n, k) = (layer.n, layer.k);
        let cut = layer.cut(rows, [ROWS, COLS]);
        let activations = layer.of_rows(rows, cut, |x| Activations::new(x, k));
        layer.blocks(out, cut, |out, block| {
            let x = &activations[block.row / cut.rows];
            let panel = GemmInputB::Packed(&self.panels[block.col / COLS]);
            let mut sums = Vec::with_capacity(block.rows * block.cols);
            let sums = EXECUTOR.with(|executor| {
                let room = &mut sums.spare_capacity_mut()[..block.rows * block.cols];
                executor.gemm_uninit(
                    room,
                    GemmInputA::Packed(&x.packed),
                    panel,
                    GemmUninitOptions::default(),
                )
            });
            simd::dispatch(Scale {
                sums: sums.expect(
                    "both operands were packed by this executor, and the room is of their sizes",
                ),
                rows: &x.scales,
                columns: &self.columns[block.col..][..block.cols],
                out,
                at: layer.at(block),
                stride: n,
            });
        });
    }
}

/// A block of activations as integers.
struct Activations {
    packed: PackedAMatrix<u8>,
    scales: Vec<f32>,
}

impl Activations {
    /// Rounds `x [rows, k]`.
    fn new(x: &[f32], k: usize) -> Self {
        let rows = x.len() / k;
        let mut integers = vec![0; x.len()];
        let mut scales = vec![0.0; rows];
        simd::dispatch(Round {
            x,
            k,
            largest: 127.0,
            integer: |q: i32| q.wrapping_add(ZERO) as u8,
            integers: &mut integers,
            scales: &mut scales,
        });
        let matrix = NdTensorView::from_data([rows, k], integers.as_slice());
        Self {
            packed: EXECUTOR.with(|executor| executor.prepack_a(matrix)),
            scales,
        }
    }
}

/// Rounds rows of `k` numbers to integers of up to `largest`, and finds their scales.
struct Round<'a, T, F> {
    x: &'a [f32],
    k: usize,
    largest: f32,
    /// What an integer, of which the low 8 bits count, is stored as.
    integer: F,
    integers: &'a mut [T],
    scales: &'a mut [f32],
}

impl<T, F: Fn(i32) -> T> WithSimd for Round<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        // Adding this leaves the nearest whole number in the low bits of the mantissa.
        const ROUND: f32 = 12_582_912.0;
        let rows = zip(
            self.x.chunks_exact(self.k),
            self.integers.chunks_exact_mut(self.k),
        );
        for ((x, integers), scale) in zip(rows, self.scales) {
            *scale = largest_of(x) / self.largest;
            let factor = reciprocal(*scale);
            for (to, from) in zip(integers, x) {
                *to = (self.integer)((from * factor + ROUND).to_bits().cast_signed());
            }
        }
    }
}

/// Numbers of sums: a block of the result before the epilogue.
struct Scale<'a> {
    sums: &'a [i32],
    /// By row of the block.
    rows: &'a [f32],
    columns: &'a [Column],
    out: SharedOut<'a>,
    at: usize,
    stride: usize,
}

impl WithSimd for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let cols = self.columns.len();
        for ((i, sums), scale) in zip(self.sums.chunks_exact(cols).enumerate(), self.rows) {
            let start = self.at + i * self.stride;
            // SAFETY: a row of the block that this task alone writes.
            let out = unsafe { self.out.slice(start..start + cols) };
            for ((out, sum), column) in zip(zip(out, sums), self.columns) {
                *out = (sum - column.surplus) as f32 * (scale * column.scale);
            }
        }
    }
}

/// The largest magnitude; NaN where there is a NaN.
fn largest_of(x: &[f32]) -> f32 {
    // As bits without a sign, numbers are in the order of their magnitudes, and a NaN is behind infinity.
    f32::from_bits(
        x.iter()
            .map(|x| x.to_bits() & 0x7fff_ffff)
            .max()
            .unwrap_or(0),
    )
}

/// What values of a scale are multiplied by; 0 where all are 0.
fn reciprocal(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}
