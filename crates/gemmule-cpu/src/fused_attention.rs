//! Fused attention. A few queries, one per SIMD lane, are processed against one block of keys after another. Scores then stay in the L1
//! cache, and sums in registers. The loops are those of FlashAttention (Dao et al. 2022, algorithm 1), adapted to CPU caches.
//!
//! The matrix of scores has one row per key and one column per query, so the softmax needs no sums across lanes. For this layout, only
//! queries and results are transposed, once each.

use std::{iter::zip, ops::Range};

use pulp::{Simd, WithSimd};

use crate::{
    attention::{MAX_QUERIES, Positions},
    lines::Lines,
    parallel::SharedOut,
    product::{Operand, add_products, vectors, vectors_mut},
    simd::{self, Capped, Running, exp2_of_negative},
};

/// Number of keys in a block. The scores of a block for three SIMD vectors of queries fit in the L1 cache.
const KEYS: usize = 128;

/// Scratch memory of a task for its queries and one block of keys. Its size does not depend on the sequence length.
#[derive(Default)]
pub struct Scratch {
    /// Keys of the block, `[keys, head]`, copied to contiguous memory. In the input, the rows of a head are far apart.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Scores of a panel (see [`Step`]), `[keys, queries]`. Each score is later replaced by `2^(score − max)`, the weight of a value.
    scores: Lines,
    /// Scaled and transposed queries of every panel: `[head, queries]`.
    transposed_queries: Lines,
    /// Weighted sums of values of every panel: `[head, queries]`.
    sums: Lines,
    /// Maximum score and sum of exponentials of every query, as in [`Softmax`].
    max: Lines,
    total: Lines,
}

/// Attention of some queries of a sequence to its keys, for one head.
pub struct Attend<'a, 'b> {
    /// Queries, keys and values of the sequence, with one row per token.
    pub q: Operand<'a>,
    pub k: Operand<'a>,
    pub v: Operand<'a>,
    pub scale: f32,
    /// Number of elements of a row.
    pub head: usize,
    /// Number of rows of the sequence.
    pub len: usize,
    pub queries: Range<usize>,
    /// Mask and biases of the scores.
    pub positions: &'a dyn Positions,
    pub scratch: &'b mut Scratch,
    pub out: SharedOut<'a>,
    /// Start of the sequence's results in `out`, whose rows are `stride` apart.
    pub at: usize,
    pub stride: usize,
}

/// Operation on a panel, which is one to three vectors of queries, with one query per lane.
#[derive(Clone, Copy)]
enum Step {
    /// Scale and transpose the queries.
    Transpose,
    /// Process the queries against the gathered keys and values.
    Process { first: usize, end: usize },
    /// Write the results.
    Finish,
}

impl Attend<'_, '_> {
    /// Computes and writes the results of the queries.
    ///
    /// # Safety
    /// While this function runs, nothing else may read or write the columns of the head in the rows of the queries.
    pub unsafe fn run(self) {
        simd::dispatch(self);
    }
}

impl WithSimd for Attend<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        self.begin(S::F32_LANES);
        self.panels(simd, Step::Transpose);
        let seen = self.seen(&self.queries);
        // Blocks of keys start at multiples of `KEYS`, so that the bits of a row do not depend on how queries are split into tasks.
        for key in (seen.start / KEYS * KEYS..seen.end).step_by(KEYS) {
            let (first, end) = (key.max(seen.start), seen.end.min(key + KEYS));
            self.gather(first..end);
            self.panels(simd, Step::Process { first, end });
        }
        self.panels(simd, Step::Finish);
    }
}

impl Attend<'_, '_> {
    /// Returns the range of keys to which at least one of the queries attends. Neither end of a query's range decreases from one
    /// query to the next (see [`Positions::seen`]), so the first query determines the start and the last query the end.
    fn seen(&self, queries: &Range<usize>) -> Range<usize> {
        let of = |query| self.positions.seen(query, self.len);
        of(queries.start).start..of(queries.end - 1).end
    }

    /// Initializes the sums for whole vectors of queries. The softmax starts with the sink, if there is one.
    fn begin(&mut self, lanes: usize) {
        let (head, scratch) = (self.head, &mut *self.scratch);
        let sink = Running::after(self.positions.sink());
        let cols = self.queries.len().next_multiple_of(lanes);
        scratch
            .transposed_queries
            .room::<f32>(head * cols)
            .fill(0.0);
        scratch.sums.room::<f32>(head * cols).fill(0.0);
        // Scores are in base 2.
        let max = sink.max * std::f32::consts::LOG2_E;
        scratch.max.room(cols).fill(max);
        scratch.total.room::<f32>(cols).fill(sink.sum);
    }

    /// Applies a step to all panels.
    #[inline(always)]
    fn panels<S: Simd>(&mut self, simd: S, step: Step) {
        // Use as many sums as fit in the registers together with the operands.
        let many = S::REGISTER_COUNT >= 32;
        let most = const {
            let most = S::F32_LANES * if S::REGISTER_COUNT >= 32 { 3 } else { 2 };
            // The panel size divides the number of queries of every task, except for the last task of a sequence.
            assert!(MAX_QUERIES.is_multiple_of(most));
            most
        };
        for first in self.queries.clone().step_by(most) {
            let queries = first..self.queries.end.min(first + most);
            match (many, queries.len().div_ceil(S::F32_LANES)) {
                (true, 1) => self.panel::<S, 8, 1>(simd, queries, step),
                (true, 2) => self.panel::<S, 8, 2>(simd, queries, step),
                (true, _) => self.panel::<S, 8, 3>(simd, queries, step),
                (false, 1) => self.panel::<S, 4, 1>(simd, queries, step),
                (false, _) => self.panel::<S, 4, 2>(simd, queries, step),
            }
        }
    }

    /// Applies a step to `N` vectors of queries, with tiles of `M` rows of sums.
    #[inline(always)]
    fn panel<S: Simd, const M: usize, const N: usize>(
        &mut self,
        simd: S,
        queries: Range<usize>,
        step: Step,
    ) {
        match step {
            Step::Transpose => self.transpose::<S, N>(queries),
            Step::Process { first, end } => {
                let seen = self.seen(&queries);
                let block = first.max(seen.start)..end.min(seen.end);
                if !block.is_empty() {
                    self.process::<S, M, N>(simd, &queries, block, first);
                }
            }
            Step::Finish => self.finish::<S, N>(queries),
        }
    }

    /// Scales and transposes queries. The scale includes log₂ e, because the softmax uses base 2.
    #[inline(always)]
    fn transpose<S: Simd, const N: usize>(&mut self, queries: Range<usize>) {
        let (head, cols) = (self.head, N * S::F32_LANES);
        let at = (queries.start - self.queries.start) * head;
        let transposed_queries =
            &mut self.scratch.transposed_queries.all_mut()[at..][..head * cols];
        let scale = self.scale * std::f32::consts::LOG2_E;
        for (lane, query) in queries.enumerate() {
            let row = &self.q.data[query * self.q.row..][..head];
            for (to, x) in zip(transposed_queries[lane..].iter_mut().step_by(cols), row) {
                *to = scale * x;
            }
        }
    }

    /// Copies rows of keys and values to contiguous memory.
    fn gather(&mut self, rows: Range<usize>) {
        let Scratch { keys, values, .. } = &mut *self.scratch;
        for (to, from) in [(keys, self.k), (values, self.v)] {
            to.clear();
            for row in rows.clone() {
                to.extend_from_slice(&from.data[row * from.row..][..self.head]);
            }
        }
    }

    /// Adds the contribution of a block of keys to the sums. `first` is the index of the first gathered key.
    #[inline(always)]
    fn process<S: Simd, const M: usize, const N: usize>(
        &mut self,
        simd: S,
        queries: &Range<usize>,
        block: Range<usize>,
        first: usize,
    ) {
        let (head, cols) = (self.head, N * S::F32_LANES);
        let at = queries.start - self.queries.start;
        let Scratch {
            keys,
            values,
            scores,
            transposed_queries,
            sums,
            max,
            total,
        } = &mut *self.scratch;
        let of_block = (block.start - first) * head..(block.end - first) * head;
        let (k, values) = (&keys[of_block.clone()], &values[of_block]);
        let transposed_queries =
            vectors::<S, N>(&transposed_queries.all()[at * head..][..head * cols]);
        let sums = &mut sums.all_mut()[at * head..][..head * cols];
        let max = &mut vectors_mut::<S, N>(&mut max.all_mut()[at..][..cols])[0];
        let total = &mut vectors_mut::<S, N>(&mut total.all_mut()[at..][..cols])[0];
        let scores = scores.room(block.len() * cols);
        let tiles = scores.chunks_mut(M * cols).zip(k.chunks(M * head));
        for (scores, k) in tiles {
            // If fewer than `M` keys are left, the other rows of the tile recompute the last key, and their results are not stored.
            let last = k.len() / head - 1;
            let mut rows: [&[f32]; M] = [&[]; M];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = &k[i.min(last) * head..][..head];
            }
            let mut products = [[simd.splat_f32s(0.0); N]; M];
            add_products(simd, rows, transposed_queries, &mut products);
            for (to, products) in zip(vectors_mut::<S, N>(scores), products) {
                *to = products;
            }
        }
        let of = Seen {
            positions: self.positions,
            queries,
            block: &block,
            n_keys: self.len,
        };
        if let Some(cap) = self.positions.cap() {
            // Scores include the factor log₂ e, so the cap is multiplied by this factor, too.
            let cap = Capped::new(cap * std::f32::consts::LOG2_E);
            simd::map_in_place(simd, cap, scores);
        }
        of.add_biases(cols, scores);
        let is_masked = of.is_masked();
        if is_masked {
            of.fill_unseen(cols, scores, f32::NEG_INFINITY);
        }
        let mut softmax = Softmax {
            max: *max,
            total: *total,
        };
        let corrections = softmax.step::<S>(simd, scores);
        (*max, *total) = (softmax.max, softmax.total);
        if is_masked {
            of.fill_unseen(cols, scores, 0.0);
        }
        let weights = vectors::<S, N>(scores);
        let (whole, rest) = sums.split_at_mut(head / M * M * cols);
        for (i, sums) in whole.chunks_exact_mut(M * cols).enumerate() {
            let values = &values[i * M..];
            accumulate::<S, M, N>(simd, values, head, weights, corrections, sums);
        }
        for (i, sums) in rest.chunks_exact_mut(cols).enumerate() {
            let values = &values[head / M * M + i..];
            accumulate::<S, 1, N>(simd, values, head, weights, corrections, sums);
        }
    }

    /// Writes the results.
    #[inline(always)]
    fn finish<S: Simd, const N: usize>(&self, queries: Range<usize>) {
        let (head, cols) = (self.head, N * S::F32_LANES);
        let at = queries.start - self.queries.start;
        let Scratch {
            sums, max, total, ..
        } = &*self.scratch;
        let (max, total) = (&max.all::<f32>()[at..], &total.all::<f32>()[at..]);
        let sums = &sums.all::<f32>()[at * head..][..head * cols];
        for (lane, query) in queries.enumerate() {
            let factor = match max[lane] == f32::NEG_INFINITY {
                // All scores are −∞, so the softmax is undefined: the difference between a score and the maximum is NaN.
                true => f32::NAN,
                false => 1.0 / total[lane],
            };
            let start = self.at + query * self.stride;
            // SAFETY: only this task writes these columns of the query's row.
            let row = unsafe { self.out.slice(start..start + head) };
            for (to, &sum) in zip(row, sums[lane..].iter().step_by(cols)) {
                *to = factor * sum;
            }
        }
    }
}

/// Mask and biases of a matrix of scores, which has one row per key of the block and one column per query.
struct Seen<'a> {
    positions: &'a dyn Positions,
    queries: &'a Range<usize>,
    block: &'a Range<usize>,
    n_keys: usize,
}

impl Seen<'_> {
    /// Adds biases to scores, which are in base 2.
    fn add_biases(&self, cols: usize, scores: &mut [f32]) {
        if !self.positions.has_biases() {
            return;
        }
        let block = self.block;
        for (lane, query) in self.queries.clone().enumerate() {
            let seen = self.positions.seen(query, self.n_keys);
            let keys = seen.start.max(block.start)..seen.end.min(block.end);
            if !keys.is_empty() {
                let scores = &mut scores[(keys.start - block.start) * cols + lane..];
                let log2_e = std::f32::consts::LOG2_E;
                self.positions.add_biases(query, keys, log2_e, scores, cols);
            }
        }
    }

    /// Returns whether at least one query does not attend to all keys of the block. Neither end of a query's range of keys decreases from
    /// one query to the next, so only the end of the first query's range and the start of the last query's range need to be checked.
    fn is_masked(&self) -> bool {
        let of = |query| self.positions.seen(query, self.n_keys);
        let (first, last) = (of(self.queries.start), of(self.queries.end - 1));
        first.end < self.block.end || last.start > self.block.start
    }

    /// Writes `value` to each score of a query and a key to which this query does not attend.
    fn fill_unseen(&self, cols: usize, scores: &mut [f32], value: f32) {
        let block = self.block;
        for (lane, query) in self.queries.clone().enumerate() {
            let seen = self.positions.seen(query, self.n_keys);
            let before = block.start..seen.start.min(block.end);
            for key in before.chain(seen.end.max(block.start)..block.end) {
                scores[(key - block.start) * cols + lane] = value;
            }
        }
    }
}

/// Computes `sums = corrections · sums + valuesᵀ · weights` for the first `M` elements of each row of values.
#[inline(always)]
fn accumulate<S: Simd, const M: usize, const N: usize>(
    simd: S,
    values: &[f32],
    stride: usize,
    weights: &[[S::f32s; N]],
    corrections: [S::f32s; N],
    sums: &mut [f32],
) {
    let to = vectors_mut::<S, N>(sums);
    let mut sums = [[simd.splat_f32s(0.0); N]; M];
    for i in 0..M {
        for j in 0..N {
            sums[i][j] = simd.mul_f32s(to[i][j], corrections[j]);
        }
    }
    for (key, weights) in weights.iter().enumerate() {
        let row = &values[key * stride..][..M];
        for i in 0..M {
            let x = simd.splat_f32s(row[i]);
            for j in 0..N {
                sums[i][j] = simd.mul_add_e_f32s(x, weights[j], sums[i][j]);
            }
        }
    }
    for (to, sums) in zip(to, sums) {
        *to = sums;
    }
}

/// Online softmax of columns of scores in base 2 (Milakov and Gimelshein, algorithm 3).
struct Softmax<V, const N: usize> {
    /// Maximum score of each column so far, and the sum of `2^(score − max)`.
    max: [V; N],
    total: [V; N],
}

impl<V: Copy, const N: usize> Softmax<V, N> {
    /// Processes further rows of scores and replaces them by `2^(score − max)`. Returns the factors that rescale the previous sums to the
    /// new maxima.
    #[inline(always)]
    fn step<S: Simd<f32s = V>>(&mut self, simd: S, scores: &mut [f32]) -> [V; N] {
        let scores = vectors_mut::<S, N>(scores);
        let before = self.max;
        for scores in scores.iter() {
            for (max, &score) in zip(&mut self.max, scores) {
                *max = simd.max_f32s(*max, score);
            }
        }
        let mut base = self.max;
        let mut corrections = self.max;
        for j in 0..N {
            // A column whose scores are all −∞ so far has no maximum to subtract.
            let nothing = simd.equal_f32s(base[j], simd.splat_f32s(f32::NEG_INFINITY));
            base[j] = simd.select_f32s(nothing, simd.splat_f32s(0.0), base[j]);
            corrections[j] = exp2_of_negative(simd, simd.sub_f32s(before[j], base[j]));
            self.total[j] = simd.mul_f32s(self.total[j], corrections[j]);
        }
        // Process one vector of columns at a time, because the exponential and the sums of all vectors together would not fit in 16
        // registers.
        for j in 0..N {
            let mut total = self.total[j];
            for scores in scores.iter_mut() {
                scores[j] = exp2_of_negative(simd, simd.sub_f32s(scores[j], base[j]));
                total = simd.add_f32s(total, scores[j]);
            }
            self.total[j] = total;
        }
        corrections
    }
}
