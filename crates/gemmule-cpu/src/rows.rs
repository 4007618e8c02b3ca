//! Operations on whole rows: pointwise functions, norms, sums and rotations.

use std::iter::zip;

use pulp::{Simd, WithSimd};

use crate::simd::{self, Activation, Capped, Pointwise, Running, Times, with_activation};

/// Computes `out = a + b`, where `b` is added to every row. `b` is not empty.
pub struct AddRows<'a> {
    pub a: &'a [f32],
    pub b: &'a [f32],
    pub out: &'a mut [f32],
}

impl WithSimd for AddRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.b.len();
        for (a, out) in zip(self.a.chunks_exact(width), self.out.chunks_exact_mut(width)) {
            simd::add(simd, a, self.b, out);
        }
    }
}

/// Computes `out = a · b`, element by element.
pub fn multiply_elements(a: &[f32], b: &[f32], out: &mut [f32]) {
    for (out, (a, b)) in zip(out, zip(a, b)) {
        *out = a * b;
    }
}

/// RMSNorm of rows. `gamma` is as long as a row and not empty.
pub struct RmsRows<'a> {
    pub x: &'a [f32],
    pub gamma: &'a [f32],
    pub eps: f32,
    pub out: &'a mut [f32],
}

impl WithSimd for RmsRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.gamma.len();
        for (x, out) in zip(self.x.chunks_exact(width), self.out.chunks_exact_mut(width)) {
            let mean = simd::sum_of_squares(simd, x, 0.0) / width as f32;
            let factor = 1.0 / (mean + self.eps).sqrt();
            for (out, (x, gamma)) in zip(out, zip(x, self.gamma)) {
                *out = x * factor * gamma;
            }
        }
    }
}

struct Map<'a, F> {
    f: F,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl<F: Pointwise> WithSimd for Map<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        simd::map(simd, self.f, self.x, self.out);
    }
}

/// Computes `out = activation(x)`.
pub fn activate(activation: Activation, x: &[f32], out: &mut [f32]) {
    with_activation!(Some(activation), f => simd::dispatch(Map { f, x, out }));
}

/// Computes `out = activation(x) · up`.
pub fn gate(activation: Activation, x: &[f32], up: &[f32], out: &mut [f32]) {
    activate(activation, x, out);
    for (out, up) in zip(out, up) {
        *out *= up;
    }
}

/// Computes `out = by · x`.
pub fn scale(by: f32, x: &[f32], out: &mut [f32]) {
    let f = Times(by);
    simd::dispatch(Map { f, x, out });
}

/// Computes `out = cap · tanh(x / cap)`.
pub fn soft_cap(cap: f32, x: &[f32], out: &mut [f32]) {
    let f = Capped::new(cap);
    simd::dispatch(Map { f, x, out });
}

/// Terms whose sum is a row that is then normalized.
#[derive(Clone, Copy)]
pub enum Sum<'a> {
    /// Row `i` of each tensor, and a bias.
    Rows {
        bias: Option<&'a [f32]>,
        x: &'a [f32],
        residual: Option<&'a [f32]>,
    },
    /// One row of each table. The row for token `i` is selected by `ids[i]` of the table.
    Tables(&'a [Lookup<'a>]),
}

/// A table, and ids that select its rows. Each id plus `offset` must be the index of a row.
pub struct Lookup<'a> {
    pub ids: &'a [i32],
    /// Added to each id. The sum is not negative.
    pub offset: usize,
    pub rows: &'a [f32],
}

impl<'a> Lookup<'a> {
    /// Returns the row of a token.
    #[inline(always)]
    pub fn row(&self, token: usize, width: usize) -> &'a [f32] {
        let row = self.ids[token] as usize + self.offset;
        &self.rows[row * width..][..width]
    }
}

/// LayerNorm of a sum of rows, for the rows from `first` on. The sum is stored in the result and normalized in place, so it is in the L1
/// cache for the later passes.
pub struct NormalizeSum<'a> {
    pub sum: Sum<'a>,
    pub gamma: &'a [f32],
    pub beta: &'a [f32],
    pub eps: f32,
    pub first: usize,
    pub out: &'a mut [f32],
}

impl WithSimd for NormalizeSum<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.gamma.len();
        for (i, out) in self.out.chunks_exact_mut(width).enumerate() {
            let row = self.first + i;
            let at = row * width;
            match self.sum {
                Sum::Rows { bias, x, residual } => {
                    let x = &x[at..][..width];
                    match residual {
                        Some(residual) => simd::add(simd, x, &residual[at..][..width], out),
                        None => out.copy_from_slice(x),
                    }
                    if let Some(bias) = bias {
                        simd::accumulate(simd, bias, out);
                    }
                }
                Sum::Tables(tables) => {
                    out.fill(0.0);
                    for table in tables {
                        simd::accumulate(simd, table.row(row, width), out);
                    }
                }
            }
            simd::normalize(simd, out, self.gamma, self.beta, self.eps);
        }
    }
}

/// Computes `log Σ exp` of a row, which is overwritten.
pub fn log_sum_exp(row: &mut [f32]) -> f32 {
    simd::dispatch(LogSum(row))
}

struct LogSum<'a>(&'a mut [f32]);

impl WithSimd for LogSum<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let mut running = Running::START;
        simd::softmax_numerators(simd, self.0, 1.0, &mut running);
        running.max + running.sum.ln()
    }
}

/// Rows of a sequence that are pooled to one row.
#[derive(Clone, Copy, Debug)]
pub struct Pooled {
    pub start: usize,
    /// Number of rows, not 0.
    pub len: usize,
}

/// Computes the mean of the rows of each sequence. If `normalize` is set, divides the mean by its Euclidean length, or by `normalize` if
/// that is larger.
pub struct MeanRows<'a> {
    pub x: &'a [f32],
    pub sequences: &'a [Pooled],
    pub normalize: Option<f32>,
    /// Row width, not 0.
    pub width: usize,
    pub out: &'a mut [f32],
}

impl WithSimd for MeanRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.width;
        let rows = self.out.chunks_exact_mut(width);
        for (sequence, out) in self.sequences.iter().zip(rows) {
            out.fill(0.0);
            let x = &self.x[sequence.start * width..][..sequence.len * width];
            for x in x.chunks_exact(width) {
                simd::accumulate(simd, x, out);
            }
            simd::map_in_place(simd, Times(1.0 / sequence.len as f32), out);
            if let Some(eps) = self.normalize {
                unit(simd, out, eps);
            }
        }
    }
}

/// Divides each row by its Euclidean length, or by `eps` if that is larger.
pub struct UnitRows<'a> {
    /// Row width, not 0.
    pub width: usize,
    pub eps: f32,
    pub out: &'a mut [f32],
}

impl WithSimd for UnitRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for row in self.out.chunks_exact_mut(self.width) {
            unit(simd, row, self.eps);
        }
    }
}

/// Divides a row by `max(‖row‖₂, eps)`.
#[inline(always)]
fn unit<S: Simd>(simd: S, row: &mut [f32], eps: f32) {
    let norm = simd::sum_of_squares(simd, row, 0.0).sqrt();
    // `f32::max` would turn a NaN norm into `eps`.
    let norm = if norm < eps { eps } else { norm };
    simd::map_in_place(simd, Times(1.0 / norm), row);
}

/// Rotates the heads of a token, each `head` columns wide (RoPE). Columns `c` and `c + frequencies.len()` of a head are a pair, which is
/// rotated by `position · frequencies[c]` radians and multiplied by `factor`.
pub fn rotate(frequencies: &[f32], factor: f32, head: usize, position: i32, heads: &mut [f32]) {
    let position = position as f32;
    for (c, &frequency) in frequencies.iter().enumerate() {
        let (sin, cos) = (position * frequency).sin_cos();
        let (sin, cos) = (factor * sin, factor * cos);
        for head in heads.chunks_exact_mut(head) {
            let (a, b) = (head[c], head[c + frequencies.len()]);
            head[c] = a * cos - b * sin;
            head[c + frequencies.len()] = b * cos + a * sin;
        }
    }
}

crate::runs!(AddRows, RmsRows, NormalizeSum, MeanRows, UnitRows);
