//! Attention within each sequence, on the packed layout: every (sequence, head) is its own small
//! problem, read and written in place through strides.

use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::OpError;
use super::args::{Args, Heads, Sequence};
use super::parallel::SharedOut;
use super::product::{Into, Operand, multiply};
use super::simd::{self, Running, Times};
use crate::kernels::attention::*;

/// Multiplications of attention below which one thread is faster than several.
const MIN_PARALLEL: usize = 1 << 17;

/// Queries that a task takes at once, and keys that it meets them with: the scores between them stay
/// in the second-level cache, whatever the length of the sequence. Queries are whole panels of fused attention on every
/// instruction set, which asserts it: 48, 32, 16 or 12 of them, and 2.
pub(super) const MAX_QUERIES: usize = 240;
pub(super) const MAX_KEYS: usize = 256;

/// Some queries of one sequence.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub sequence: Sequence,
    /// The first of them, within the sequence.
    pub query: usize,
    pub n_queries: usize,
}

/// Cuts sequences into blocks of queries.
pub(super) fn blocks(sequences: &[Sequence]) -> Vec<Block> {
    blocks_of(MAX_QUERIES, sequences)
}

/// Cuts sequences into blocks of at most so many queries.
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

/// Calls `body(scratch, head, block)` for every head of every block, in parallel when `work`
/// multiplications are enough for it.
pub(super) fn for_heads_and_blocks(
    heads: usize,
    blocks: &[Block],
    work: usize,
    body: impl Fn(&mut Scratch, usize, Block) + Sync,
) {
    with_scratch(heads, blocks, work, body);
}

/// As [`for_heads_and_blocks`], for tasks that keep something else.
pub(super) fn with_scratch<Scratch: Default>(
    heads: usize,
    blocks: &[Block],
    work: usize,
    body: impl Fn(&mut Scratch, usize, Block) + Sync,
) {
    let n = heads * blocks.len();
    // Heads of one block are neighbours, so that a token-major row is read by one thread.
    let task = |scratch: &mut Scratch, i: usize| body(scratch, i % heads, blocks[i / heads]);
    if work < MIN_PARALLEL || rayon::current_num_threads() == 1 {
        let mut scratch = Scratch::default();
        (0..n).for_each(|i| task(&mut scratch, i));
        return;
    }
    (0..n).into_par_iter().for_each_init(Scratch::default, task);
}

/// What a task keeps between the two products.
#[derive(Default)]
pub(super) struct Scratch {
    pub scores: Vec<f32>,
    /// One for each query.
    running: Vec<Running>,
    /// What each query's sum of values is multiplied by.
    factors: Vec<f32>,
}

/// Multiplications of `scores = q·kᵀ` over all heads.
pub(super) fn work(sequences: &[Sequence], heads: usize, head: usize) -> usize {
    let pairs = sequences
        .iter()
        .map(|s| s.len.saturating_mul(s.len))
        .fold(0, usize::saturating_add);
    pairs.saturating_mul(heads).saturating_mul(head)
}

/// The rows of `heads` of one head, from a token on, as a matrix of `[tokens, head]`.
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

/// Products of some rows with those of the table that their pairs are at, of which each pair then takes its own: about twice the
/// multiplications that pairs have, and those of a GEMM.
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
            // SAFETY: the products are this task's own.
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
    // A softmax is worth a few multiplications for each score.
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
            // A query of padding may attend to no key: its numerators are 0.
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

/// The operand of a bias; empty where there is none.
pub(super) fn biases<'r>(
    by: ByDistance,
    heads: u32,
    args: &mut Args<'r, '_>,
) -> Result<&'r [f32], OpError> {
    by.bias
        .map_or(Ok(&[]), |bias| args.real("bias", &bias.dims(heads)))
}

/// What positions do to the scores of a head.
#[derive(Clone, Copy)]
pub(super) struct Distances<'a> {
    pub by: ByDistance,
    pub causal: bool,
    pub biases: &'a [f32],
    pub head: usize,
}

impl<'a> Distances<'a> {
    /// Those of rows of scores, from a query and a key on, of a sequence of `n_keys` keys.
    pub fn of(self, query: usize, key: usize, n_keys: usize) -> Seen<'a> {
        Seen {
            distances: self,
            query,
            key,
            n_keys,
        }
    }
}

/// [`Distances`] of a block of scores.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    distances: Distances<'a>,
    /// The query of the first row and the key of the first column, and how many keys the sequence has.
    query: usize,
    key: usize,
    n_keys: usize,
}

impl Seen<'_> {
    /// The columns of a row that its query attends to, of `len`.
    fn columns(&self, row: usize, len: usize) -> Range<usize> {
        let Distances { by, causal, .. } = self.distances;
        let seen = by.seen(causal, self.query + row, self.n_keys);
        let column = |key: usize| key.saturating_sub(self.key).min(len);
        column(seen.start)..column(seen.end)
    }

    /// Adds the bias to some columns of a row.
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

/// Softmax of `scale · row` over the first `valid` of each row; 0 for the rest.
struct SoftmaxRows<'a> {
    rows: &'a mut [f32],
    /// Not 0.
    len: usize,
    /// From 1 to `len`.
    valid: usize,
    /// The query of the first row, where a row is over the keys up to its query.
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
        // SAFETY: each head has its own columns, each query its own rows.
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

/// A step of the online softmax on each row of scores, which becomes its numerators.
pub(super) struct OnlineSoftmax<'a> {
    pub rows: &'a mut [f32],
    /// Not 0.
    pub len: usize,
    /// The keys that each row is over, and what is added to their scores.
    pub seen: Seen<'a>,
    pub running: &'a mut [Running],
    /// Set to what the results of the steps before are to be multiplied by.
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

/// Multiplies each row of a block by its own number.
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
            // SAFETY: rows of the block that this task alone writes.
            let row = unsafe { self.out.slice(start..start + self.cols) };
            simd::map_in_place(simd, Times(by), row);
        }
    }
}
