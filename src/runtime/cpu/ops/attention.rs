//! Attention within each sequence on the packed layout. Every (sequence, head) is a separate small problem, read and written in
//! place through strides.

use crate::ops::{PositionBias, Side};
use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::OpError;
use super::args::{Args, Heads, Sequence};
use super::parallel::SharedOut;
use super::product::{Into, Operand, multiply};
use super::simd::{self, Running, Times};
use crate::kernels::attention::*;

/// Number of multiplications below which one thread is faster than several.
const MIN_PARALLEL: usize = 1 << 17;

/// Maximum number of queries per task and of keys per tile. The scores of a tile stay in the L2 cache, whatever the length of the
/// sequence. Fused attention asserts that the number of queries is a multiple of its panels on every instruction set: 48, 32, 16
/// or 12 queries, and 2.
pub(super) const MAX_QUERIES: usize = 240;
pub(super) const MAX_KEYS: usize = 256;

/// Consecutive queries of one sequence.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub sequence: Sequence,
    /// First query, counted within the sequence.
    pub query: usize,
    pub n_queries: usize,
}

/// Partitions sequences into blocks of queries.
pub(super) fn blocks(sequences: &[Sequence]) -> Vec<Block> {
    blocks_of(MAX_QUERIES, sequences)
}

/// Partitions sequences into blocks of at most `most` queries.
pub(super) fn blocks_of(most: usize, sequences: &[Sequence]) -> Vec<Block> {
    let mut blocks = Vec::with_capacity(sequences.len());
    for &sequence in sequences {
        for query in (0..sequence.len).step_by(most) {
            blocks.push(Block {
                sequence,
                query,
                n_queries: most.min(sequence.len - query),
            });
        }
    }
    blocks
}

/// Calls `body(scratch, head, block)` for every head of every block, in parallel if there are enough multiplications (`work`).
pub(super) fn for_heads_and_blocks(
    heads: usize,
    blocks: &[Block],
    work: usize,
    body: impl Fn(&mut Scratch, usize, Block) + Sync,
) {
    with_scratch(heads, blocks, work, body);
}

/// Like [`for_heads_and_blocks`], with any type of scratch memory.
pub(super) fn with_scratch<Scratch: Default>(
    heads: usize,
    blocks: &[Block],
    work: usize,
    body: impl Fn(&mut Scratch, usize, Block) + Sync,
) {
    let n = heads * blocks.len();
    // Heads of one block are adjacent, so that one thread reads a token-major row.
    let task = |scratch: &mut Scratch, i: usize| body(scratch, i % heads, blocks[i / heads]);
    if work < MIN_PARALLEL || rayon::current_num_threads() == 1 {
        let mut scratch = Scratch::default();
        (0..n).for_each(|i| task(&mut scratch, i));
        return;
    }
    (0..n).into_par_iter().for_each_init(Scratch::default, task);
}

/// Scratch memory of a task between the two matrix products.
#[derive(Default)]
pub(super) struct Scratch {
    pub scores: Vec<f32>,
    /// One entry per query.
    running: Vec<Running>,
    /// Factor of each query's sum of values.
    factors: Vec<f32>,
}

/// Number of multiplications of `scores = q·kᵀ` over all heads.
pub(super) fn work(sequences: &[Sequence], heads: usize, head: usize) -> usize {
    let pairs = sequences
        .iter()
        .map(|s| s.len.saturating_mul(s.len))
        .fold(0, usize::saturating_add);
    pairs.saturating_mul(heads).saturating_mul(head)
}

/// Returns the rows of one head, starting at `token`, as a matrix `[tokens, head]`.
pub(super) fn rows_of<'a>(x: &'a [f32], heads: &Heads, h: usize, token: usize) -> Operand<'a> {
    Operand {
        data: &x[heads.at(h, token)..],
        row: heads.token_stride,
        col: 1,
    }
}

pub(super) fn transposed(x: Operand<'_>) -> Operand<'_> {
    Operand {
        data: x.data,
        row: x.col,
        col: x.row,
    }
}

pub(super) fn scores(spec: &AttentionScores, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let q_heads = args.heads("the heads of `q`", spec.q, spec.heads, spec.head)?;
    let k_heads = args.heads("the heads of `k`", spec.k, spec.kv_heads, spec.head)?;
    let group = (spec.heads / spec.kv_heads.max(1)) as usize;
    let pairs = args.extents.pairs;
    let q = args.real("q", &[q_heads.elements])?;
    let k = args.real("k", &[k_heads.elements])?;
    let sequences = args.sequences_with_pairs()?;
    let out = args.out(&[u64::from(spec.heads), pairs])?;
    let (heads, head, pairs) = (spec.heads as usize, spec.head as usize, pairs as usize);
    let out = SharedOut::new(out);
    let work = work(&sequences, heads, head);
    for_heads_and_blocks(heads, &blocks(&sequences), work, |_, h, block| {
        let Sequence { start, len, .. } = block.sequence;
        let q = rows_of(q, &q_heads, h, start + block.query);
        let k = rows_of(k, &k_heads, h / group, start);
        let at = h * pairs + block.sequence.pairs + block.query * len;
        // SAFETY: each head and query has its own rows of the scores.
        unsafe {
            multiply(
                (block.n_queries, len, head),
                spec.scale,
                q,
                transposed(k),
                Into::Overwrite,
                &out,
                at,
                len,
            );
        }
    });
    Ok(())
}

/// Multiplies rows by those rows of the table that their pairs refer to, and then picks the element of each pair. This takes
/// about twice the multiplications of the pairs themselves, but runs as a GEMM.
pub(super) fn relative_scores(
    spec: &RelativeScores,
    mut args: Args<'_, '_>,
) -> Result<(), OpError> {
    let (heads, head) = (spec.heads as usize, spec.head as usize);
    let width = heads * head;
    let (tokens, pairs) = (args.extents.tokens, args.extents.pairs);
    let x = args.real("x", &[tokens, width as u64])?;
    let table = args.real("table", &[spec.rows(), width as u64])?;
    let sequences = args.sequences_with_pairs()?;
    let out = args.out(&[u64::from(spec.heads), pairs])?;
    let pairs = pairs as usize;
    let out = SharedOut::new(out);
    let work = work(&sequences, heads, head);
    for_heads_and_blocks(heads, &blocks(&sequences), work, |scratch, h, block| {
        let Sequence { start, len, .. } = block.sequence;
        let at = h * pairs + block.sequence.pairs + block.query * len;
        // SAFETY: each head and query has its own rows of the scores.
        let out = unsafe { out.slice(at..at + block.n_queries * len) };
        let rows_from = |x: &'_ [f32], row: usize| x.len().min(row * width + h * head);
        for key in (0..len).step_by(MAX_QUERIES) {
            let n_keys = MAX_QUERIES.min(len - key);
            let first = spec.row(key, block.query + block.n_queries - 1);
            let n_rows = spec.row(key + n_keys - 1, block.query) + 1 - first;
            let (token, n) = match spec.of {
                Side::Query => (start + block.query, block.n_queries),
                Side::Key => (start + key, n_keys),
            };
            let matrix = |data, row| Operand {
                data: &data[rows_from(data, row)..],
                row: width,
                col: 1,
            };
            let (rows, positions) = (matrix(x, token), matrix(table, first));
            scratch.scores.resize(n * n_rows, 0.0);
            let products = SharedOut::new(&mut scratch.scores);
            // SAFETY: the products belong to this task.
            unsafe {
                multiply(
                    (n, n_rows, head),
                    1.0,
                    rows,
                    transposed(positions),
                    Into::Overwrite,
                    &products,
                    0,
                    n_rows,
                );
            }
            for query in 0..block.n_queries {
                for j in 0..n_keys {
                    let row = match spec.of {
                        Side::Query => query,
                        Side::Key => j,
                    };
                    let column = spec.row(key + j, block.query + query) - first;
                    out[query * len + key + j] = scratch.scores[row * n_rows + column];
                }
            }
        }
    });
    Ok(())
}

pub(super) fn softmax(spec: &AttentionSoftmax, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (heads, pairs) = (u64::from(spec.heads), args.extents.pairs);
    let x = args.real("scores", &[heads, pairs])?;
    let mut sequences = args.sequences_with_pairs()?;
    if spec.mask == SoftmaxMask::Padding {
        args.valid_lens(&mut sequences)?;
    }
    let out = args.out(&[heads, pairs])?;
    let (heads, pairs) = (heads as usize, pairs as usize);
    let out = SharedOut::new(out);
    // A softmax costs as much as a few multiplications per score.
    let work = work(&sequences, heads, 8);
    for_heads_and_blocks(heads, &blocks(&sequences), work, |_, h, block| {
        let len = block.sequence.len;
        let at = h * pairs + block.sequence.pairs + block.query * len;
        let range = at..at + block.n_queries * len;
        // SAFETY: each head and query has its own rows of the scores.
        let out = unsafe { out.slice(range.clone()) };
        out.copy_from_slice(&x[range]);
        simd::dispatch(SoftmaxRows {
            rows: out,
            len,
            valid: block.sequence.valid,
            causal: (spec.mask == SoftmaxMask::Causal).then_some(block.query),
            scale: spec.scale,
        });
    });
    Ok(())
}

pub(super) fn softmax_by_distance(
    spec: &SoftmaxByDistance,
    mut args: Args<'_, '_>,
) -> Result<(), OpError> {
    let (heads, pairs) = (u64::from(spec.heads), args.extents.pairs);
    let x = args.real("scores", &[heads, pairs])?;
    let biases = biases(spec.by, spec.heads, &mut args)?;
    let mut sequences = args.sequences_with_pairs()?;
    if spec.mask == SoftmaxMask::Padding {
        args.valid_lens(&mut sequences)?;
    }
    let out = args.out(&[heads, pairs])?;
    let (heads, pairs) = (heads as usize, pairs as usize);
    let out = SharedOut::new(out);
    let work = work(&sequences, heads, 8);
    for_heads_and_blocks(heads, &blocks(&sequences), work, |scratch, h, block| {
        let Sequence { len, valid, .. } = block.sequence;
        let at = h * pairs + block.sequence.pairs + block.query * len;
        let range = at..at + block.n_queries * len;
        // SAFETY: each head and query has its own rows of the scores.
        let rows = unsafe { out.slice(range.clone()) };
        for (to, &score) in rows.iter_mut().zip(&x[range]) {
            *to = spec.scale * score;
        }
        let distances = Distances {
            by: spec.by,
            causal: spec.mask == SoftmaxMask::Causal,
            biases,
            head: h,
        };
        scratch.running.clear();
        scratch.running.resize(block.n_queries, Running::START);
        scratch.factors.resize(block.n_queries, 0.0);
        simd::dispatch(OnlineSoftmax {
            rows,
            len,
            seen: distances.of(block.query, 0, valid),
            running: &mut scratch.running,
            corrections: &mut scratch.factors,
        });
        for (row, running) in rows.chunks_exact_mut(len).zip(&scratch.running) {
            // A padding query may attend to no key; its numerators are 0.
            let inverse = if running.sum > 0.0 {
                1.0 / running.sum
            } else {
                0.0
            };
            row.iter_mut().for_each(|x| *x *= inverse);
        }
    });
    Ok(())
}

/// Returns the operand of a bias; empty without one.
pub(super) fn biases<'r>(
    by: PositionBias,
    heads: u32,
    args: &mut Args<'r, '_>,
) -> Result<&'r [f32], OpError> {
    by.bias
        .map_or(Ok(&[]), |bias| args.real("bias", &bias.dims(heads)))
}

/// Effect of positions on the scores of a head: mask and bias.
#[derive(Clone, Copy)]
pub(super) struct Distances<'a> {
    pub by: PositionBias,
    pub causal: bool,
    pub biases: &'a [f32],
    pub head: usize,
}

impl<'a> Distances<'a> {
    /// Returns the effect on rows of scores that start at `query` and `key`, in a sequence of `n_keys` keys.
    pub fn of(self, query: usize, key: usize, n_keys: usize) -> Seen<'a> {
        Seen {
            distances: self,
            query,
            key,
            n_keys,
        }
    }
}

/// [`Distances`] for a block of scores.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    distances: Distances<'a>,
    /// Query of the first row, key of the first column, and number of keys of the sequence.
    query: usize,
    key: usize,
    n_keys: usize,
}

impl Seen<'_> {
    /// Columns of a row that its query attends to, below `len`.
    fn columns(&self, row: usize, len: usize) -> Range<usize> {
        let Distances { by, causal, .. } = self.distances;
        let seen = by.seen(causal, self.query + row, self.n_keys);
        let column = |key: usize| key.saturating_sub(self.key).min(len);
        column(seen.start)..column(seen.end)
    }

    /// Adds the bias to the given columns of a row.
    fn add(&self, row: usize, columns: Range<usize>, scores: &mut [f32]) {
        let Distances {
            by, biases, head, ..
        } = self.distances;
        let Some(bias) = by.bias else { return };
        let first = (self.key + columns.start) as i64 - (self.query + row) as i64;
        for (nth, score) in scores.iter_mut().enumerate() {
            *score += bias.at(biases, head, first + nth as i64) as f32;
        }
    }
}

/// Computes the softmax of `scale · row` over the first `valid` elements of each row, and sets the rest to 0.
struct SoftmaxRows<'a> {
    rows: &'a mut [f32],
    /// Row length, not 0.
    len: usize,
    /// From 1 to `len`.
    valid: usize,
    /// Query of the first row, if attention is causal.
    causal: Option<usize>,
    scale: f32,
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

pub(super) fn context(spec: &AttentionContext, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let v_heads = args.heads("the heads of `v`", spec.v, spec.kv_heads, spec.head)?;
    let group = (spec.heads / spec.kv_heads.max(1)) as usize;
    let out_heads = args.heads("the heads of `out`", spec.out, spec.heads, spec.head)?;
    let (heads, pairs) = (u64::from(spec.heads), args.extents.pairs);
    let probabilities = args.real("probabilities", &[heads, pairs])?;
    let v = args.real("v", &[v_heads.elements])?;
    let sequences = args.sequences_with_pairs()?;
    let out = args.out(&[out_heads.elements])?;
    let (heads, head, pairs) = (spec.heads as usize, spec.head as usize, pairs as usize);
    let out = SharedOut::new(out);
    let work = work(&sequences, heads, head);
    for_heads_and_blocks(heads, &blocks(&sequences), work, |_, h, block| {
        let Sequence { start, len, .. } = block.sequence;
        let probabilities = Operand {
            data: &probabilities[h * pairs + block.sequence.pairs + block.query * len..],
            row: len,
            col: 1,
        };
        // SAFETY: each head has its own columns and each query its own rows.
        unsafe {
            multiply(
                (block.n_queries, head, len),
                1.0,
                probabilities,
                rows_of(v, &v_heads, h / group, start),
                Into::Overwrite,
                &out,
                out_heads.at(h, start + block.query),
                out_heads.token_stride,
            );
        }
    });
    Ok(())
}

/// Applies one step of the online softmax to each row of scores, which becomes its numerators.
pub(super) struct OnlineSoftmax<'a> {
    pub rows: &'a mut [f32],
    /// Row length, not 0.
    pub len: usize,
    /// The keys that each row attends to, and the biases of their scores.
    pub seen: Seen<'a>,
    pub running: &'a mut [Running],
    /// Receives the factors for the results of the previous steps.
    pub corrections: &'a mut [f32],
}

impl WithSimd for OnlineSoftmax<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let state = self.running.iter_mut().zip(self.corrections);
        let rows = self.rows.chunks_exact_mut(self.len).zip(state);
        for (i, (row, (running, correction))) in rows.enumerate() {
            let seen = self.seen.columns(i, self.len);
            row[seen.end..].fill(0.0);
            row[..seen.start].fill(0.0);
            let row = &mut row[seen.clone()];
            self.seen.add(i, seen, row);
            *correction = match row {
                [] => 1.0,
                row => simd::softmax_numerators(simd, row, 1.0, running),
            };
        }
    }
}

/// Multiplies each row of a block by its own factor.
pub(super) struct ScaleRows<'a> {
    pub by: &'a [f32],
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
            // SAFETY: rows of the block, which only this task writes.
            let row = unsafe { self.out.slice(start..start + self.cols) };
            simd::map_in_place(simd, Times(by), row);
        }
    }
}
