//! 8-bit integer products. CPUs with AVX-512 VNNI use the instructions in `vnni`; other CPUs use the crate `rten-gemm`. Weights and
//! activations have one scale per row, and are quantized symmetrically around 0. Sums of products are exact in 32 bits, so the result of a
//! row does not depend on the other rows.
//!
//! A row is quantized as `x ≈ sx·q` with `q = round(x / sx)` and `sx = max|x| / 127`. The weight is quantized likewise, as `w ≈ sw·p`, but
//! with [`largest()`] instead of 127. Then `x · w ≈ sx·sw·Σ q·p`. The rounding error of an element of `x` or `w` is at most `sx / 2` or
//! `sw / 2`.

use std::{
    iter::zip,
    sync::atomic::{AtomicU64, Ordering},
};

use pulp::{Simd, WithSimd};
use rayon::prelude::*;
use rten_gemm::{GemmExecutor, GemmInputA, GemmInputB, GemmUninitOptions, PackedBMatrix};
use rten_tensor::{NdTensorView, storage::Alloc};

#[cfg(target_arch = "x86_64")]
use super::vnni::{self, Quads};
use super::{Block, Linear, SharedOut};
#[cfg(target_arch = "x86_64")]
use crate::lines::Lines;
use crate::simd;

/// Number of columns of a panel for `rten-gemm`. It is a multiple of the tile width of that crate.
const COLS: usize = 96;
/// Number of rows of a block with `rten-gemm`. The block's 32-bit sums stay in cache until they are scaled.
const ROWS: usize = 64;
/// Rows and columns of a block for instructions that multiply quads (four 8-bit integers).
#[cfg(target_arch = "x86_64")]
const QUADS: [usize; 2] = [256, 48];
/// Offset that is added to quantized activations to make them unsigned, because the instructions multiply unsigned by signed integers.
const ZERO: i32 = 128;

type Executor = GemmExecutor<u8, i8, i32>;

thread_local! {
    static EXECUTOR: Executor = Executor::default();
}

/// Maximum magnitude of a weight's integers: 127, or 63 if the CPU adds two products in 16 bits. 63 avoids overflow, because 2 · 255 · 63
/// is below 2¹⁵.
pub(super) fn largest() -> i8 {
    match EXECUTOR.with(Executor::may_saturate) {
        true => 63,
        false => 127,
    }
}

/// A quantized weight `[n, k]`.
pub(super) struct Int8 {
    form: Form,
    /// Parameters of the result's columns, one for each row of the weight.
    columns: Vec<Column>,
}

enum Form {
    #[cfg(target_arch = "x86_64")]
    Quads(Quads),
    /// Panels of the weight's rows in the format of `rten-gemm`, and their size in bytes.
    Crate(Vec<PackedBMatrix<i8>>, u64),
}

/// Allocator for `rten-gemm` that counts bytes, because the crate does not report them.
#[derive(Default)]
struct Counted(AtomicU64);

impl Alloc for Counted {
    fn alloc<T>(&self, capacity: usize) -> Vec<T> {
        let room = Vec::with_capacity(capacity);
        let bytes = room.capacity() * size_of::<T>();
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
        room
    }
}

/// Parameters that convert the integer sums of a column to f32.
#[derive(Clone, Copy)]
struct Column {
    scale: f32,
    /// The contribution of the offset [`ZERO`] to the sum.
    surplus: i32,
}

impl Int8 {
    pub fn new(weight: &[f32], n: usize, k: usize) -> Self {
        Self::of_form(weight, n, k, Form::new)
    }

    /// Quantizes as on a CPU without AVX-512 VNNI.
    pub fn for_crate(weight: &[f32], n: usize, k: usize) -> Self {
        Self::of_form(weight, n, k, |integers, _, k| Form::for_crate(integers, k))
    }

    /// Quantizes a weight `[n, k]`, and packs its integers with `form`.
    fn of_form(
        weight: &[f32],
        n: usize,
        k: usize,
        form: impl FnOnce(&[i8], usize, usize) -> Form,
    ) -> Self {
        // If k is 0, there is nothing to pack.
        let n = if k == 0 { 0 } else { n };
        let (mut integers, mut scales) = (vec![0_i8; n * k], vec![0.0; n]);
        let rows = COLS * k.max(1);
        let parts = weight.par_chunks(rows).zip(
            integers
                .par_chunks_mut(rows)
                .zip(scales.par_chunks_mut(COLS)),
        );
        parts.for_each(|(x, (integers, scales))| {
            simd::dispatch(Round {
                x,
                k,
                stride: k,
                largest: largest().into(),
                integer: |p: i32| p as i8,
                integers,
                scales,
            });
        });
        let column = |(row, &scale): (&[i8], &f32)| Column {
            scale,
            surplus: ZERO * row.iter().map(|&p| i32::from(p)).sum::<i32>(),
        };
        let columns = zip(integers.chunks(k.max(1)), &scales)
            .map(column)
            .collect();
        Self {
            form: form(&integers, n, k),
            columns,
        }
    }

    /// Size in bytes of the packed integers and of the column parameters.
    pub fn bytes(&self) -> u64 {
        let columns = size_of_val(self.columns.as_slice()) as u64;
        columns
            + match &self.form {
                #[cfg(target_arch = "x86_64")]
                Form::Quads(quads) => quads.bytes(),
                Form::Crate(_, bytes) => *bytes,
            }
    }

    /// Computes the result of the layer.
    pub fn multiply(&self, layer: &Linear<'_>, out: &mut [f32]) {
        layer.by_chunks(out, |layer, rows, out| match &self.form {
            #[cfg(target_arch = "x86_64")]
            Form::Quads(quads) => self.by_quads(quads, layer, rows, out),
            Form::Crate(panels, _) => self.by_crate(panels, layer, rows, out),
        });
    }

    #[cfg(target_arch = "x86_64")]
    fn by_quads(&self, quads: &Quads, layer: &Linear<'_>, rows: usize, out: &mut [f32]) {
        let cut = layer.cut(rows, QUADS);
        let activations = layer.of_rows(rows, cut, |x| {
            let mut integers = Lines::zeros::<u8>(x.len() / layer.k * layer.k.next_multiple_of(4));
            let stride = layer.k.next_multiple_of(4);
            let scales = round(x, layer.k, stride, integers.all_mut());
            (integers, scales)
        });
        layer.blocks(out, cut, |out, block| {
            let (x, scales) = &activations[block.row / cut.rows];
            quads.multiply(x, block.rows, block.col, |row, sums| {
                let block = Block {
                    row: block.row + row,
                    rows: sums.len(),
                    ..block
                };
                let scales = &scales[row..][..sums.len()];
                self.scale(layer, block, sums.as_flattened(), scales, out);
            });
        });
    }

    fn by_crate(
        &self,
        panels: &[PackedBMatrix<i8>],
        layer: &Linear<'_>,
        rows: usize,
        out: &mut [f32],
    ) {
        let k = layer.k;
        let cut = layer.cut(rows, [ROWS, COLS]);
        let activations = layer.of_rows(rows, cut, |x| {
            let mut integers = vec![0; x.len()];
            let scales = round(x, k, k, &mut integers);
            let matrix = NdTensorView::from_data([x.len() / k, k], integers.as_slice());
            (EXECUTOR.with(|executor| executor.prepack_a(matrix)), scales)
        });
        layer.blocks(out, cut, |out, block| {
            let (x, scales) = &activations[block.row / cut.rows];
            let panel = GemmInputB::Packed(&panels[block.col / COLS]);
            let mut sums = Vec::with_capacity(block.rows * block.cols);
            let sums = EXECUTOR.with(|executor| {
                let room = &mut sums.spare_capacity_mut()[..block.rows * block.cols];
                let options = GemmUninitOptions::default();
                executor.gemm_uninit(room, GemmInputA::Packed(x), panel, options)
            });
            let sums = sums.expect(
                "both operands were packed by this executor, and the room is of their sizes",
            );
            self.scale(layer, block, sums, scales, out);
        });
    }

    /// Converts the integer sums of a block to f32, and writes them to `out`. `rows` contains the scale of each row of activations in the
    /// block.
    fn scale(
        &self,
        layer: &Linear<'_>,
        block: Block,
        sums: &[i32],
        rows: &[f32],
        out: SharedOut<'_>,
    ) {
        simd::dispatch(Scale {
            sums,
            rows,
            columns: &self.columns[block.col..][..block.cols],
            out,
            at: layer.at(block),
            stride: layer.n,
        });
    }
}

impl Form {
    /// Packs `integers [n, k]`.
    #[cfg(target_arch = "x86_64")]
    fn new(integers: &[i8], n: usize, k: usize) -> Self {
        match vnni::is_supported() {
            true => Self::Quads(Quads::new(integers, n, k)),
            false => Self::for_crate(integers, k),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn new(integers: &[i8], _n: usize, k: usize) -> Self {
        Self::for_crate(integers, k)
    }

    /// Packs rows of `k` integers for `rten-gemm`.
    fn for_crate(integers: &[i8], k: usize) -> Self {
        let held = Counted::default();
        let pack = |rows: &[i8]| {
            let matrix = NdTensorView::from_data([rows.len() / k, k], rows);
            EXECUTOR.with(|executor| executor.prepack_b_in(&held, matrix.transposed()))
        };
        let panels = integers.par_chunks(COLS * k.max(1)).map(pack).collect();
        Self::Crate(panels, held.0.into_inner())
    }
}

/// Quantizes `x [rows, k]` to integers, in rows that are `stride` apart. Returns the scales.
fn round(x: &[f32], k: usize, stride: usize, integers: &mut [u8]) -> Vec<f32> {
    let mut scales = vec![0.0; x.len() / k];
    simd::dispatch(Round {
        x,
        k,
        stride,
        largest: 127.0,
        integer: |q: i32| q.wrapping_add(ZERO) as u8,
        integers,
        scales: &mut scales,
    });
    scales
}

/// Quantizes rows of `k` numbers to integers with a magnitude of at most `largest`, and computes their scales.
struct Round<'a, T, F> {
    x: &'a [f32],
    k: usize,
    /// Distance between rows of integers.
    stride: usize,
    largest: f32,
    /// Converts an integer to its storage type. Only the low 8 bits are significant.
    integer: F,
    integers: &'a mut [T],
    scales: &'a mut [f32],
}

impl<T, F: Fn(i32) -> T> WithSimd for Round<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        // Adding this constant rounds to the nearest integer, which is then in the low bits of the mantissa.
        const ROUND: f32 = 12_582_912.0;
        let rows = zip(
            self.x.chunks_exact(self.k),
            self.integers.chunks_exact_mut(self.stride),
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

/// Converts integer sums to f32. The result is a block of the layer's result before the epilogue.
struct Scale<'a> {
    /// Rows of sums. Their stride is at least the number of columns.
    sums: &'a [i32],
    /// Scales of the block's rows. The block is not empty.
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
        let pitch = self.sums.len() / self.rows.len();
        for ((i, sums), scale) in zip(self.sums.chunks_exact(pitch).enumerate(), self.rows) {
            let start = self.at + i * self.stride;
            // SAFETY: only this task writes this row of the block.
            let out = unsafe { self.out.slice(start..start + cols) };
            for ((out, sum), column) in zip(zip(out, sums), self.columns) {
                *out = (sum - column.surplus) as f32 * (scale * column.scale);
            }
        }
    }
}

/// Returns the maximum magnitude, or NaN if an element is NaN.
fn largest_of(x: &[f32]) -> f32 {
    // Without the sign bit, bit patterns are ordered like magnitudes, and NaN is above infinity.
    f32::from_bits(
        x.iter()
            .map(|x| x.to_bits() & 0x7fff_ffff)
            .max()
            .unwrap_or(0),
    )
}

/// Returns the factor that scales values to integers; 0 if all values are 0.
fn reciprocal(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}
