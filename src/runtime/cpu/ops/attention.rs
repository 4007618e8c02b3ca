//! Attention within each sequence of a packed batch. Each head of each sequence is a separate small problem. Its operands and results are
//! accessed in place, with strides.

use std::ops::Range;

use gemmule_cpu::{
    Running,
    attention::{MAX_QUERIES, OnlineSoftmax, Positions, SoftmaxRows},
    parallel::{self, SharedOut},
    product::{Into, Operand, multiply},
};

use super::args::{Args, Heads, Sequence};
use super::{OpError, forms};
use crate::{
    kernels::attention::*,
    ops::{PositionBias, Side, SoftCap},
};

/// Consecutive queries of one sequence.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub sequence: Sequence,
    /// Index of the first query within the sequence.
    pub query: usize,
    pub n_queries: usize,
}

/// Partitions sequences into blocks of at most [`MAX_QUERIES`] queries.
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

/// Calls `body(scratch, head, block)` for every head of every block. `work` is the total number of multiplications. If it is small, all
/// calls are made on the calling thread.
pub(super) fn for_heads_and_blocks<Scratch: Default>(
    heads: usize,
    blocks: &[Block],
    work: usize,
    body: &(dyn Fn(&mut Scratch, usize, Block) + Sync),
) {
    // The tasks for the heads of a block are adjacent, so that one thread reads whole token-major rows.
    let task = |scratch: &mut Scratch, i: usize| body(scratch, i % heads, blocks[i / heads]);
    parallel::with_scratch(heads * blocks.len(), work, &task);
}

/// Scratch memory of a task between its two matrix products, `q·kᵀ` and the product of the probabilities with `v`.
#[derive(Default)]
pub(super) struct Scratch {
    pub scores: Vec<f32>,
    /// Softmax state of each query: the maximum and the sum so far.
    running: Vec<Running>,
    /// Factor by which the accumulated output of each query is rescaled.
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

forms! {
    AttentionScores => scores;
    AttentionSoftmax => softmax;
    SoftmaxByDistance => softmax_by_distance;
    RelativeScores => relative_scores;
    AttentionContext => context;
}

fn scores(spec: &AttentionScores, mut args: Args<'_, '_>) -> Result<(), OpError> {
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
    for_heads_and_blocks(
        heads,
        &blocks(&sequences),
        work,
        &|_: &mut Scratch, h, block| {
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
                    k.transposed(),
                    Into::Overwrite,
                    &out,
                    at,
                    len,
                );
            }
        },
    );
    Ok(())
}

/// Computes a score for each pair: the dot product of its query (or key) with the table row of its distance. A GEMM multiplies a block of
/// queries (or keys) by the table rows of all distances in the block, and the scores of the pairs are then picked from the result. This
/// takes about twice as many multiplications as one dot product per pair, but a GEMM is faster.
fn relative_scores(spec: &RelativeScores, mut args: Args<'_, '_>) -> Result<(), OpError> {
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
    for_heads_and_blocks(
        heads,
        &blocks(&sequences),
        work,
        &|scratch: &mut Scratch, h, block| {
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
                // SAFETY: only this task uses the products.
                unsafe {
                    multiply(
                        (n, n_rows, head),
                        1.0,
                        rows,
                        positions.transposed(),
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
        },
    );
    Ok(())
}

fn softmax(spec: &AttentionSoftmax, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (heads, pairs) = (u64::from(spec.heads), args.extents.pairs);
    let x = args.real("scores", &[heads, pairs])?;
    let mut sequences = args.sequences_with_pairs()?;
    if spec.mask == SoftmaxMask::Padding {
        args.valid_lens(&mut sequences)?;
    }
    let out = args.out(&[heads, pairs])?;
    let (heads, pairs) = (heads as usize, pairs as usize);
    let out = SharedOut::new(out);
    // A softmax takes about as long as eight multiplications per score.
    let work = work(&sequences, heads, 8);
    for_heads_and_blocks(
        heads,
        &blocks(&sequences),
        work,
        &|_: &mut Scratch, h, block| {
            let len = block.sequence.len;
            let at = h * pairs + block.sequence.pairs + block.query * len;
            let range = at..at + block.n_queries * len;
            // SAFETY: each head and query has its own rows of the scores.
            let out = unsafe { out.slice(range.clone()) };
            out.copy_from_slice(&x[range]);
            SoftmaxRows {
                rows: out,
                len,
                valid: block.sequence.valid,
                causal: (spec.mask == SoftmaxMask::Causal).then_some(block.query),
                scale: spec.scale,
            }
            .run();
        },
    );
    Ok(())
}

fn softmax_by_distance(spec: &SoftmaxByDistance, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (heads, pairs) = (u64::from(spec.heads), args.extents.pairs);
    let x = args.real("scores", &[heads, pairs])?;
    let [biases, sinks] = biases_and_sinks(spec.by, spec.heads, &mut args)?;
    let mut sequences = args.sequences_with_pairs()?;
    if spec.mask == SoftmaxMask::Padding {
        args.valid_lens(&mut sequences)?;
    }
    let out = args.out(&[heads, pairs])?;
    let (heads, pairs) = (heads as usize, pairs as usize);
    let out = SharedOut::new(out);
    let work = work(&sequences, heads, 8);
    for_heads_and_blocks(
        heads,
        &blocks(&sequences),
        work,
        &|scratch: &mut Scratch, h, block| {
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
                sinks,
                head: h,
            };
            let start = Running::after(distances.sink());
            scratch.running.clear();
            scratch.running.resize(block.n_queries, start);
            scratch.factors.resize(block.n_queries, 0.0);
            OnlineSoftmax {
                rows,
                len,
                positions: &distances,
                query: block.query,
                key: 0,
                n_keys: valid,
                running: &mut scratch.running,
                corrections: &mut scratch.factors,
            }
            .run();
            for (row, running) in rows.chunks_exact_mut(len).zip(&scratch.running) {
                // A padding query may attend to no key. Its numerators and their sum are then 0.
                let inverse = if running.sum > 0.0 {
                    1.0 / running.sum
                } else {
                    0.0
                };
                row.iter_mut().for_each(|x| *x *= inverse);
            }
        },
    );
    Ok(())
}

/// Takes the operands `bias` and `sinks`, and returns them in this order. The slice of an operand that the kernel lacks is empty.
pub(super) fn biases_and_sinks<'r>(
    by: PositionBias,
    heads: u32,
    args: &mut Args<'r, '_>,
) -> Result<[&'r [f32]; 2], OpError> {
    let biases = match by.bias {
        Some(bias) => args.real("bias", &bias.dims(heads))?,
        None => &[],
    };
    let sinks = match by.sinks {
        true => args.real("sinks", &[heads.into()])?,
        false => &[],
    };
    Ok([biases, sinks])
}

/// Parameters of the soft cap, the mask, the bias and the sink that are applied to the scores of a head.
#[derive(Clone, Copy)]
pub(super) struct Distances<'a> {
    pub by: PositionBias,
    pub causal: bool,
    pub biases: &'a [f32],
    pub sinks: &'a [f32],
    pub head: usize,
}

impl Positions for Distances<'_> {
    fn seen(&self, query: usize, n_keys: usize) -> Range<usize> {
        self.by.seen(self.causal, query, n_keys)
    }

    fn cap(&self) -> Option<f32> {
        self.by.cap.map(SoftCap::get)
    }

    fn sink(&self) -> Option<f32> {
        self.sinks.get(self.head).copied()
    }

    fn has_biases(&self) -> bool {
        self.by.bias.is_some()
    }

    fn add_biases(
        &self,
        query: usize,
        keys: Range<usize>,
        factor: f32,
        scores: &mut [f32],
        stride: usize,
    ) {
        let Some(bias) = self.by.bias else { return };
        for (key, score) in keys.zip(scores.iter_mut().step_by(stride)) {
            let distance = key as i64 - query as i64;
            *score += factor * bias.at(self.biases, self.head, distance) as f32;
        }
    }
}

fn context(spec: &AttentionContext, mut args: Args<'_, '_>) -> Result<(), OpError> {
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
    for_heads_and_blocks(
        heads,
        &blocks(&sequences),
        work,
        &|_: &mut Scratch, h, block| {
            let Sequence { start, len, .. } = block.sequence;
            let probabilities = Operand {
                data: &probabilities[h * pairs + block.sequence.pairs + block.query * len..],
                row: len,
                col: 1,
            };
            // SAFETY: each head has its own columns, and each query has its own rows.
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
        },
    );
    Ok(())
}
