//! The softmax of attention scores, which runs between the two matrix products of attention, and position-dependent changes to scores.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use crate::parallel::SharedOut;
use crate::simd::{self, Capped, Running, Times, Weight};

pub use crate::fused_attention::{Attend, Scratch};

/// Maximum number of queries per task. The fused attention kernel processes 48, 16, 12 or 2 queries together, depending on the instruction
/// set. The maximum is a multiple of each of these numbers.
pub const MAX_QUERIES: usize = 240;
/// Maximum number of keys per tile. The scores of a tile fit in the L2 cache for any sequence length.
pub const MAX_KEYS: usize = 256;

/// Changes to the scores of one head: a soft cap, a mask, and biases, which are added after the cap. The softmax may also have a sink.
pub trait Positions: Sync {
    /// Returns the range of keys, out of `n_keys`, to which the query at position `query` attends. Neither end of the range may decrease as
    /// `query` increases.
    fn seen(&self, query: usize, n_keys: usize) -> Range<usize>;

    /// Bound of the soft cap `cap · tanh(score / cap)`, if there is one.
    fn cap(&self) -> Option<f32>;

    /// Logit of the sink, if there is one. It counts as the score of one more key, whose value is 0.
    fn sink(&self) -> Option<f32>;

    fn has_biases(&self) -> bool;

    /// Adds `factor` times the biases of `keys` to the scores of a query. The score of the `i`th key in `keys` is `scores[i * stride]`.
    fn add_biases(
        &self,
        query: usize,
        keys: Range<usize>,
        factor: f32,
        scores: &mut [f32],
        stride: usize,
    );
}

/// Computes the softmax of `scale · row` over the first `valid` elements of each row, and sets the rest to 0.
pub struct SoftmaxRows<'a> {
    pub rows: &'a mut [f32],
    /// Row length, not 0.
    pub len: usize,
    /// From 1 to `len`.
    pub valid: usize,
    /// Index of the first row's query; `None` if attention is not causal. In causal attention, row `i` has `causal + i + 1` valid elements
    /// instead of `valid`.
    pub causal: Option<usize>,
    pub scale: f32,
}

impl WithSimd for SoftmaxRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for (i, row) in self.rows.chunks_exact_mut(self.len).enumerate() {
            let valid = self.causal.map_or(self.valid, |first| first + i + 1);
            let (row, masked) = row.split_at_mut(valid);
            let mut running = Running::START;
            simd::softmax_numerators(simd, row, self.scale, &mut running);
            simd::map_in_place(simd, Times(1.0 / running.sum), row);
            masked.fill(0.0);
        }
    }
}

/// Applies one step of the online softmax to each row of scores, and replaces the scores by the numerators of the softmax.
pub struct OnlineSoftmax<'a> {
    pub rows: &'a mut [f32],
    /// Row length, not 0.
    pub len: usize,
    /// Mask and biases of the scores.
    pub positions: &'a dyn Positions,
    /// Index of the query of the first row.
    pub query: usize,
    /// Index of the key of the first column.
    pub key: usize,
    /// Number of keys of the sequence.
    pub n_keys: usize,
    pub running: &'a mut [Running],
    /// Receives the factors that rescale the results of the previous steps.
    pub corrections: &'a mut [f32],
}

impl WithSimd for OnlineSoftmax<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (positions, has_biases) = (self.positions, self.positions.has_biases());
        let cap = positions.cap().map(Capped::new);
        let state = self.running.iter_mut().zip(self.corrections);
        let rows = self.rows.chunks_exact_mut(self.len).zip(state);
        for (i, (row, (running, correction))) in rows.enumerate() {
            let query = self.query + i;
            let keys = positions.seen(query, self.n_keys);
            let column = |key: usize| key.saturating_sub(self.key).min(self.len);
            let seen = column(keys.start)..column(keys.end);
            row[seen.end..].fill(0.0);
            row[..seen.start].fill(0.0);
            let row = &mut row[seen.clone()];
            if let Some(cap) = cap {
                simd::map_in_place(simd, cap, row);
            }
            if has_biases {
                let keys = self.key + seen.start..self.key + seen.end;
                positions.add_biases(query, keys, 1.0, row, 1);
            }
            *correction = match row {
                [] => 1.0,
                row => simd::softmax_numerators(simd, row, 1.0, running),
            };
        }
    }
}

/// Multiplies each row of a block by its own factor.
pub struct ScaleRows<'a> {
    pub by: &'a [f32],
    /// Memory that contains the block. The rows of the block start at `at`, have `cols` elements and are `stride` apart. See
    /// [`run`](Self::run) for who may access them.
    pub out: SharedOut<'a>,
    pub at: usize,
    pub cols: usize,
    pub stride: usize,
}

impl WithSimd for ScaleRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for (i, &by) in self.by.iter().enumerate() {
            let start = self.at + i * self.stride;
            // SAFETY: only this task writes these rows of the block.
            let row = unsafe { self.out.slice(start..start + self.cols) };
            simd::map_in_place(simd, Times(by), row);
        }
    }
}

/// Computes the maximum and the sum of exponentials for each tile of keys in each row. Sets the padding between `len` and `pitch` to 0.
pub struct PartialReductions<'a> {
    pub rows: &'a mut [f32],
    /// Row length; rows are `pitch` elements apart. Neither is 0.
    pub len: usize,
    pub pitch: usize,
    /// Scratch memory for one tile. Its length is the tile size.
    pub numerators: &'a mut [f32],
    /// A maximum and a sum for each tile of each row.
    pub partials: &'a mut [f32],
}

impl WithSimd for PartialReductions<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut partials = self.partials.chunks_exact_mut(2);
        for row in self.rows.chunks_exact_mut(self.pitch) {
            let (row, rest) = row.split_at_mut(self.len);
            rest.fill(0.0);
            // `partials` has one pair per tile: a maximum and a sum.
            for (tile, partial) in row.chunks(self.numerators.len()).zip(&mut partials) {
                let numerators = &mut self.numerators[..tile.len()];
                numerators.copy_from_slice(tile);
                let mut running = Running::START;
                simd::softmax_numerators(simd, numerators, 1.0, &mut running);
                partial.copy_from_slice(&[running.max, running.sum]);
            }
        }
    }
}

/// Computes `exp(score − maximum) / sum` for a range of keys in each row.
pub struct Probabilities<'a> {
    /// Rows of scores, `pitch` apart.
    pub scores: &'a [f32],
    pub pitch: usize,
    /// Maximum and sum of each row.
    pub statistics: &'a [f32],
    pub probabilities: &'a mut [f32],
    /// Number of keys, not 0.
    pub len: usize,
}

impl WithSimd for Probabilities<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let rows = self
            .scores
            .chunks(self.pitch)
            .zip(self.statistics.chunks_exact(2));
        for ((row, of_row), to) in rows.zip(self.probabilities.chunks_exact_mut(self.len)) {
            let weight = Weight {
                max: of_row[0],
                factor: 1.0 / of_row[1],
            };
            simd::map(simd, weight, &row[..self.len], to);
        }
    }
}

impl ScaleRows<'_> {
    /// Runs the operation with the widest vector instructions of this machine.
    ///
    /// # Safety
    /// While this function runs, nothing else may read or write the rows of the block.
    pub unsafe fn run(self) {
        simd::dispatch(self);
    }
}

crate::runs!(SoftmaxRows, OnlineSoftmax, PartialReductions, Probabilities);
