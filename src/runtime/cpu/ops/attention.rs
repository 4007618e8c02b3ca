//! Attention within each sequence, on the packed layout: every (sequence, head) is its own small
//! problem, read and written in place through strides.

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::OpError;
use super::args::{Args, Heads, Sequence};
use super::gemm::{Operand, multiply};
use super::parallel::SharedOut;
use super::simd::{self, Times};
use crate::kernels::attention::*;

/// Multiplications of attention below which one thread is faster than several.
const MIN_PARALLEL: usize = 1 << 17;

/// Scores that a task holds at once, in elements: they stay in the second-level cache.
const SCRATCH: usize = 96 * 1024;
/// Most and fewest queries that a task takes at once. The fewest bounds how often keys are read
/// again, and so the scratch of a very long sequence is this many rows.
const MAX_QUERIES: usize = 128;
const MIN_QUERIES: usize = 16;

/// Some queries of one sequence.
#[derive(Clone, Copy)]
struct Block {
    sequence: Sequence,
    /// The first of them, within the sequence.
    query: usize,
    n_queries: usize,
}

/// Cuts sequences into blocks of queries.
fn blocks(sequences: &[Sequence]) -> Vec<Block> {
    let mut blocks = Vec::with_capacity(sequences.len());
    for &sequence in sequences {
        let most = (SCRATCH / sequence.len).clamp(MIN_QUERIES, MAX_QUERIES);
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
fn for_heads_and_blocks(
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
struct Scratch {
    scores: Vec<f32>,
    /// One over the sum of each row of scores.
    inverse_sums: Vec<f32>,
}

/// Multiplications of `scores = q·kᵀ` over all heads.
fn work(sequences: &[Sequence], heads: usize, head: usize) -> usize {
    let pairs = sequences
        .iter()
        .map(|s| s.len.saturating_mul(s.len))
        .fold(0, usize::saturating_add);
    pairs.saturating_mul(heads).saturating_mul(head)
}

/// The rows of `heads` of one head, from a token on, as a matrix of `[tokens, head]`.
fn rows_of<'a>(x: &'a [f32], heads: &Heads, h: usize, token: usize) -> Operand<'a> {
    Operand {
        data: &x[heads.at(h, token)..],
        row: heads.token_stride,
        col: 1,
    }
}

fn transposed(x: Operand<'_>) -> Operand<'_> {
    Operand {
        data: x.data,
        row: x.col,
        col: x.row,
    }
}

pub(super) fn scores(spec: &AttentionScores, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let q_heads = args.heads("the heads of `q`", spec.q, spec.heads, spec.head)?;
    let k_heads = args.heads("the heads of `k`", spec.k, spec.heads, spec.head)?;
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
        let k = rows_of(k, &k_heads, h, start);
        let at = h * pairs + block.sequence.pairs + block.query * len;
        // SAFETY: each head and query has its own rows of the scores.
        unsafe {
            multiply(
                (block.n_queries, len, head),
                spec.scale,
                q,
                transposed(k),
                &out,
                at,
                len,
            );
        }
    });
    Ok(())
}

pub(super) fn softmax(spec: &AttentionSoftmax, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (heads, pairs) = (u64::from(spec.heads), args.extents.pairs);
    let x = args.real("scores", &[heads, pairs])?;
    let sequences = args.sequences_with_pairs()?;
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
            scale: spec.scale,
            inverse_sums: None,
        });
    });
    Ok(())
}

/// Softmax of `scale · row`. With `inverse_sums`, the division by the sum is left to the caller.
struct SoftmaxRows<'a> {
    rows: &'a mut [f32],
    /// Not 0.
    len: usize,
    scale: f32,
    inverse_sums: Option<&'a mut [f32]>,
}

impl WithSimd for SoftmaxRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let rows = self.rows.chunks_exact_mut(self.len);
        match self.inverse_sums {
            Some(inverse_sums) => {
                for (row, inverse) in rows.zip(inverse_sums) {
                    *inverse = 1.0 / simd::softmax_numerators(simd, row, self.scale);
                }
            }
            None => {
                for row in rows {
                    let sum = simd::softmax_numerators(simd, row, self.scale);
                    simd::map_in_place(simd, Times(1.0 / sum), row);
                }
            }
        }
    }
}

pub(super) fn context(spec: &AttentionContext, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let v_heads = args.heads("the heads of `v`", spec.v, spec.heads, spec.head)?;
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
                rows_of(v, &v_heads, h, start),
                &out,
                out_heads.at(h, start + block.query),
                out_heads.token_stride,
            );
        }
    });
    Ok(())
}

pub(super) fn mha_short(spec: &MhaShort, args: Args<'_, '_>) -> Result<(), OpError> {
    let fused = Fused {
        heads: spec.heads,
        head: spec.head,
        scale: spec.scale,
        q: spec.q,
        k: spec.k,
        v: spec.v,
        max_len: Some(spec.max_len),
    };
    fused.run(args)
}

pub(super) fn mha_online(spec: &MhaOnline, args: Args<'_, '_>) -> Result<(), OpError> {
    let fused = Fused {
        heads: spec.heads,
        head: spec.head,
        scale: spec.scale,
        q: spec.q,
        k: spec.k,
        v: spec.v,
        max_len: None,
    };
    fused.run(args)
}

/// Both fused kernels: on the CPU they differ only in the lengths that they take.
struct Fused {
    heads: u32,
    head: u32,
    scale: f32,
    q: HeadView,
    k: HeadView,
    v: HeadView,
    max_len: Option<u32>,
}

impl Fused {
    fn run(self, mut args: Args<'_, '_>) -> Result<(), OpError> {
        let (op, tokens) = (args.op(), args.extents.tokens);
        let q_heads = args.heads("the heads of `q`", self.q, self.heads, self.head)?;
        let k_heads = args.heads("the heads of `k`", self.k, self.heads, self.head)?;
        let v_heads = args.heads("the heads of `v`", self.v, self.heads, self.head)?;
        let q = args.real("q", &[q_heads.elements])?;
        let k = args.real("k", &[k_heads.elements])?;
        let v = args.real("v", &[v_heads.elements])?;
        let sequences = args.sequences()?;
        if let Some(max_len) = self.max_len {
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
        let (heads, head) = (self.heads as usize, self.head as usize);
        let out = args.out(&[tokens, u64::from(self.heads), u64::from(self.head)])?;
        if out.is_empty() {
            return Ok(());
        }
        let width = heads * head;
        let out = SharedOut::new(out);
        let work = work(&sequences, heads, head);
        for_heads_and_blocks(heads, &blocks(&sequences), work, |scratch, h, block| {
            let Sequence { start, len, .. } = block.sequence;
            let n = block.n_queries;
            // Grows to the largest block that this task meets; the product overwrites it.
            scratch
                .scores
                .resize(scratch.scores.len().max(n * len), 0.0);
            scratch.inverse_sums.resize(MAX_QUERIES, 0.0);
            let scores = &mut scratch.scores[..n * len];
            let inverse_sums = &mut scratch.inverse_sums[..n];
            let q = rows_of(q, &q_heads, h, start + block.query);
            let k = rows_of(k, &k_heads, h, start);
            // SAFETY: the scratch is this task's.
            unsafe {
                multiply(
                    (n, len, head),
                    self.scale,
                    q,
                    transposed(k),
                    &SharedOut::new(scores),
                    0,
                    len,
                );
            }
            simd::dispatch(SoftmaxRows {
                rows: scores,
                len,
                scale: 1.0,
                inverse_sums: Some(inverse_sums),
            });
            let probabilities = Operand {
                data: scores,
                row: len,
                col: 1,
            };
            let at = (start + block.query) * width + h * head;
            // SAFETY: each head has its own columns, each query its own rows.
            unsafe {
                multiply(
                    (n, head, len),
                    1.0,
                    probabilities,
                    rows_of(v, &v_heads, h, start),
                    &out,
                    at,
                    width,
                );
            }
            simd::dispatch(ScaleRows {
                by: inverse_sums,
                out,
                at,
                cols: head,
                stride: width,
            });
        });
        Ok(())
    }
}

/// Multiplies each row of a block by its own number.
struct ScaleRows<'a> {
    by: &'a [f32],
    out: SharedOut<'a>,
    at: usize,
    cols: usize,
    stride: usize,
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
