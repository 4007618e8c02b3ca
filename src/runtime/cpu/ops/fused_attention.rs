//! Fused attention. A few queries, one per SIMD lane, are processed against one block of keys after another, so that scores stay
//! in the L1 cache and sums in registers. The loops are those of FlashAttention (Dao et al. 2022, algorithm 1), adapted to CPU
//! caches.
//!
//! Scores are transposed, with one row per key. The softmax then needs no sums across lanes, and only queries (once) and results
//! are transposed.

use std::{iter::zip, ops::Range};

use pulp::{Simd, WithSimd};

use super::{
    OpError,
    args::{Args, Sequence},
    attention::{Block, Distances, MAX_QUERIES, biases, blocks_of, rows_of, with_scratch, work},
    lines::Lines,
    parallel::SharedOut,
    product::{Operand, add_products, vectors, vectors_mut},
    simd::{self, exp2_of_negative},
};
use crate::{
    kernels::attention::{MhaOnline, MhaShort},
    ops::AttentionProblem,
};

/// Number of keys in a block. Their scores with three vectors of queries fit the L1 cache.
const KEYS: usize = 128;

pub(super) fn mha_short(spec: &MhaShort, args: Args<'_, '_>) -> Result<(), OpError> {
    fused(&spec.of, Some(spec.max_len), args)
}

pub(super) fn mha_online(spec: &MhaOnline, args: Args<'_, '_>) -> Result<(), OpError> {
    fused(&spec.of, None, args)
}

/// Implements both fused kernels. On the CPU they differ only in the maximum length.
fn fused(
    of: &AttentionProblem,
    max_len: Option<u32>,
    mut args: Args<'_, '_>,
) -> Result<(), OpError> {
    let (op, tokens) = (args.op(), args.extents.tokens);
    let q_heads = args.heads("the heads of `q`", of.q, of.heads, of.head)?;
    let k_heads = args.heads("the heads of `k`", of.k, of.kv_heads, of.head)?;
    let v_heads = args.heads("the heads of `v`", of.v, of.kv_heads, of.head)?;
    let q = args.real("q", &[q_heads.elements])?;
    let k = args.real("k", &[k_heads.elements])?;
    let v = args.real("v", &[v_heads.elements])?;
    let biases = biases(of.by, of.heads, &mut args)?;
    let sequences = args.sequences()?;
    if let Some(max_len) = max_len {
        let too_long = |s: &Sequence| s.len as u64 > u64::from(max_len);
        if let Some(sequence) = sequences.iter().position(too_long) {
            return Err(OpError::TooLong {
                op,
                sequence,
                len: sequences[sequence].len,
                max_len,
            });
        }
    }
    let (heads, head) = (of.heads as usize, of.head as usize);
    let group = heads / (of.kv_heads.max(1) as usize);
    let out = args.out(&[tokens, u64::from(of.heads), u64::from(of.head)])?;
    if out.is_empty() {
        return Ok(());
    }
    let width = heads * head;
    let out = SharedOut::new(out);
    let work = work(&sequences, heads, head);
    let body = |scratch: &mut Scratch, h: usize, block: Block| {
        let Sequence { start, len, .. } = block.sequence;
        simd::dispatch(Attend {
            q: rows_of(q, &q_heads, h, start),
            k: rows_of(k, &k_heads, h / group, start),
            v: rows_of(v, &v_heads, h / group, start),
            scale: of.scale,
            head,
            len,
            queries: block.query..block.query + block.n_queries,
            distances: Distances {
                by: of.by,
                causal: of.causal,
                biases,
                head: h,
            },
            scratch,
            out,
            // The result consists of a head's columns in the rows of the sequence.
            at: start * width + h * head,
            stride: width,
        });
    };
    // Keys and values are gathered once per block of queries, so blocks are large if there are still a few of them per thread.
    let most = match heads * sequences.len() >= 4 * rayon::current_num_threads() {
        true => 4 * MAX_QUERIES,
        false => MAX_QUERIES,
    };
    with_scratch(heads, &blocks_of(most, &sequences), work, body);
    Ok(())
}

/// Scratch memory of a task, for its queries and one block of keys, independent of the length of a sequence.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[keys, head]`, contiguous. In the input, the rows of one head are far apart.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// `[keys, queries]` of a panel: scores, later the weights of the values.
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
pub(super) struct Attend<'a, 'b> {
    /// Rows of the sequence.
    pub q: Operand<'a>,
    pub k: Operand<'a>,
    pub v: Operand<'a>,
    pub scale: f32,
    /// Elements per row.
    pub head: usize,
    /// Number of rows.
    pub len: usize,
    pub queries: Range<usize>,
    pub distances: Distances<'a>,
    pub scratch: &'b mut Scratch,
    pub out: SharedOut<'a>,
    /// Start of the sequence's results in `out`, whose rows are `stride` apart.
    pub at: usize,
    pub stride: usize,
}

/// Operation on a panel. A panel has as many queries as there are registers for their sums, one query per lane.
#[derive(Clone, Copy)]
enum Step {
    /// Scale and transpose the queries.
    Transpose,
    /// Process the queries against the gathered keys.
    Process { first: usize, end: usize },
    /// Write the results.
    Finish,
}

impl WithSimd for Attend<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        self.begin(S::F32_LANES);
        self.panels(simd, Step::Transpose);
        let seen = self.seen(&self.queries);
        // Blocks start at multiples of `KEYS`, so that the bits of a row do not depend on the partition into blocks of queries.
        for key in (seen.start / KEYS * KEYS..seen.end).step_by(KEYS) {
            let (first, end) = (key.max(seen.start), seen.end.min(key + KEYS));
            self.gather(first..end);
            self.panels(simd, Step::Process { first, end });
        }
        self.panels(simd, Step::Finish);
    }
}

impl Attend<'_, '_> {
    /// Range of keys that any of the queries attends to. Later queries reach further.
    fn seen(&self, queries: &Range<usize>) -> Range<usize> {
        let Distances { by, causal, .. } = self.distances;
        let of = |query| by.seen(causal, query, self.len);
        of(queries.start).start..of(queries.end - 1).end
    }

    /// Initializes the sums, for whole vectors of queries.
    fn begin(&mut self, lanes: usize) {
        let (head, scratch) = (self.head, &mut *self.scratch);
        let cols = self.queries.len().next_multiple_of(lanes);
        scratch
            .transposed_queries
            .room::<f32>(head * cols)
            .fill(0.0);
        scratch.sums.room::<f32>(head * cols).fill(0.0);
        scratch.max.room(cols).fill(f32::NEG_INFINITY);
        scratch.total.room::<f32>(cols).fill(0.0);
    }

    /// Applies a step to all panels.
    #[inline(always)]
    fn panels<S: Simd>(&mut self, simd: S, step: Step) {
        // Use as many sums as fit the registers together with the operands.
        let many = S::REGISTER_COUNT >= 32;
        let most = const {
            let most = S::F32_LANES * if S::REGISTER_COUNT >= 32 { 3 } else { 2 };
            // Blocks of queries are a multiple of the panel size, except the last block of a sequence.
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

    /// Scales and transposes queries. Scores are exponents of two.
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

    /// Copies rows of keys and values into contiguous memory.
    fn gather(&mut self, rows: Range<usize>) {
        let Scratch { keys, values, .. } = &mut *self.scratch;
        for (to, from) in [(keys, self.k), (values, self.v)] {
            to.clear();
            for row in rows.clone() {
                to.extend_from_slice(&from.data[row * from.row..][..self.head]);
            }
        }
    }

    /// Adds the contribution of a block of keys to the sums. `first` is the first gathered key.
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
            // The last key is recomputed in the remaining rows of the tile, without being stored.
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
        let (distances, len) = (self.distances, self.len);
        distances.add_biases(queries, &block, len, cols, scores);
        distances.fill_unseen(queries, &block, len, cols, scores, f32::NEG_INFINITY);
        let mut softmax = Softmax {
            max: *max,
            total: *total,
        };
        let corrections = softmax.step::<S>(simd, scores);
        (*max, *total) = (softmax.max, softmax.total);
        distances.fill_unseen(queries, &block, len, cols, scores, 0.0);
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
                // The softmax of such scores is undefined: their difference from the maximum is NaN.
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

impl Distances<'_> {
    /// Adds biases to scores with a row for each key of a block and a column for each query. Scores are exponents of two.
    fn add_biases(
        &self,
        queries: &Range<usize>,
        block: &Range<usize>,
        n_keys: usize,
        cols: usize,
        scores: &mut [f32],
    ) {
        let Some(bias) = self.by.bias else { return };
        for (lane, query) in queries.clone().enumerate() {
            let seen = self.by.seen(self.causal, query, n_keys);
            for key in seen.start.max(block.start)..seen.end.min(block.end) {
                let bias = bias.at(self.biases, self.head, key as i64 - query as i64) as f32;
                scores[(key - block.start) * cols + lane] += std::f32::consts::LOG2_E * bias;
            }
        }
    }

    /// Masks the scores of keys that a query does not attend to.
    fn fill_unseen(
        &self,
        queries: &Range<usize>,
        block: &Range<usize>,
        n_keys: usize,
        cols: usize,
        scores: &mut [f32],
        value: f32,
    ) {
        if !self.causal && self.by.window.is_none() {
            return;
        }
        for (lane, query) in queries.clone().enumerate() {
            let seen = self.by.seen(self.causal, query, n_keys);
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

/// Online softmax of columns of scores with base 2 (Milakov and Gimelshein, algorithm 3).
struct Softmax<V, const N: usize> {
    /// Maximum score of each column so far, and the sum of `2^(score − max)`.
    max: [V; N],
    total: [V; N],
}

impl<V: Copy, const N: usize> Softmax<V, N> {
    /// Processes further rows, which become `2^(score − max)`. Returns the factors that rescale the previous sums to the new
    /// maxima.
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
            // A column without scores so far has no maximum to subtract.
            let nothing = simd.equal_f32s(base[j], simd.splat_f32s(f32::NEG_INFINITY));
            base[j] = simd.select_f32s(nothing, simd.splat_f32s(0.0), base[j]);
            corrections[j] = exp2_of_negative(simd, simd.sub_f32s(before[j], base[j]));
            self.total[j] = simd.mul_f32s(self.total[j], corrections[j]);
        }
        // Process one vector of columns at a time: the exponential and two further sums would not fit 16 registers.
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
