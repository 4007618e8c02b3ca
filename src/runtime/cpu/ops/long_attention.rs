//! The three kernels that compute attention by grouped GEMMs. The scores have the same [`Layout`] as in the CUDA kernels.

use gemmule_cpu::{
    attention::{MAX_KEYS, PartialReductions, Probabilities},
    parallel::SharedOut,
    product::{Into, Operand, multiply},
};

use super::args::{Args, Sequence};
use super::attention::{Scratch, blocks, for_heads_and_blocks, rows_of, work};
use super::{Call, CpuForm, OpError, forms};
use crate::kernels::attention::*;
use crate::tensor::Extents;

/// Number of keys in a tile.
const KEY_TILE: usize = Extents::KEY_TILE as usize;

/// Returns two sizes per head: the number of elements of `scores`, and the number of (maximum, sum) pairs of `partials`.
fn sizes(extents: &Extents) -> (u64, u64) {
    let scores = extents
        .tokens
        .saturating_mul(8)
        .saturating_add(extents.pairs);
    (scores, extents.key_tiles())
}

forms! {
    MhaLongReduce => reduce;
    MhaLongContext => context;
}

impl CpuForm for MhaLongScores {
    fn run(&self, mut call: Call<'_, '_, '_>) -> Result<(), OpError> {
        let [scores_out, partials] = call.outputs()?;
        scores(self, call.args(scores_out), partials)
    }
}

fn scores(
    spec: &MhaLongScores,
    mut args: Args<'_, '_>,
    partials: &mut [f32],
) -> Result<(), OpError> {
    let q_heads = args.heads("the heads of `q`", spec.q, spec.heads, spec.head)?;
    let k_heads = args.heads("the heads of `k`", spec.k, spec.heads, spec.head)?;
    let (of_scores, of_partials) = sizes(args.extents);
    let layout = Layout::of(args.extents);
    let q = args.real("q", &[q_heads.elements])?;
    let k = args.real("k", &[k_heads.elements])?;
    let sequences = args.sequences_with_pairs()?;
    args.check_shape(
        "partials",
        &[u64::from(spec.heads), of_partials, 2],
        partials.len(),
    )?;
    let out = args.out(&[u64::from(spec.heads), of_scores])?;
    let (heads, head) = (spec.heads as usize, spec.head as usize);
    let (out, partials) = (SharedOut::new(out), SharedOut::new(partials));
    let work = work(&sequences, heads, head);
    for_heads_and_blocks(
        heads,
        &blocks(&sequences),
        work,
        &|_: &mut Scratch, h, block| {
            let Sequence {
                start, len, pairs, ..
            } = block.sequence;
            let (pitch, tiles, n) = (Layout::pitch(len), Layout::tiles(len), block.n_queries);
            let at = layout.scores(h, pairs, start) + block.query * pitch;
            let reduced = (layout.partials(h, pairs, start) + block.query * tiles) * 2;
            let q = rows_of(q, &q_heads, h, start + block.query);
            let k = rows_of(k, &k_heads, h, start).transposed();
            // SAFETY: each head and query has its own rows of the scores and of the partials.
            let (rows, partials) = unsafe {
                multiply(
                    (n, len, head),
                    spec.scale,
                    q,
                    k,
                    Into::Overwrite,
                    &out,
                    at,
                    pitch,
                );
                (
                    out.slice(at..at + n * pitch),
                    partials.slice(reduced..reduced + n * tiles * 2),
                )
            };
            PartialReductions {
                rows,
                len,
                pitch,
                numerators: &mut [0.0; KEY_TILE],
                partials,
            }
            .run();
        },
    );
    Ok(())
}

fn reduce(spec: &MhaLongReduce, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let (_, of_partials) = sizes(args.extents);
    let tokens = args.extents.tokens;
    let layout = Layout::of(args.extents);
    let partials = args.real("partials", &[u64::from(spec.heads), of_partials, 2])?;
    let sequences = args.sequences_with_pairs()?;
    let out = args.out(&[u64::from(spec.heads), tokens, 2])?;
    let (heads, tokens) = (spec.heads as usize, tokens as usize);
    let out = SharedOut::new(out);
    // For each query, the kernel computes one exponential per tile of keys. The cost of an exponential is estimated as one multiplication
    // for each key of the tile.
    let work = work(&sequences, heads, 1);
    for_heads_and_blocks(
        heads,
        &blocks(&sequences),
        work,
        &|_: &mut Scratch, h, block| {
            let Sequence {
                start, len, pairs, ..
            } = block.sequence;
            let n = block.n_queries;
            let tiles = Layout::tiles(len);
            let from = (layout.partials(h, pairs, start) + block.query * tiles) * 2;
            let to = (h * tokens + start + block.query) * 2;
            // SAFETY: each head and query has its own location.
            let out = unsafe { out.slice(to..to + n * 2) };
            let rows = partials[from..from + n * tiles * 2].chunks_exact(tiles * 2);
            for (row, to) in rows.zip(out.chunks_exact_mut(2)) {
                let tiles = || row.chunks_exact(2);
                let max = tiles().map(|t| t[0]).fold(f32::NEG_INFINITY, f32::max);
                let sum: f32 = tiles().map(|t| t[1] * (t[0] - max).exp()).sum();
                to.copy_from_slice(&[max, sum]);
            }
        },
    );
    Ok(())
}

fn context(spec: &MhaLongContext, mut args: Args<'_, '_>) -> Result<(), OpError> {
    let v_heads = args.heads("the heads of `v`", spec.v, spec.heads, spec.head)?;
    let (of_scores, _) = sizes(args.extents);
    let tokens = args.extents.tokens;
    let layout = Layout::of(args.extents);
    let heads = u64::from(spec.heads);
    let scores = args.real("scores", &[heads, of_scores])?;
    let statistics = args.real("statistics", &[heads, tokens, 2])?;
    let v = args.real("v", &[v_heads.elements])?;
    let sequences = args.sequences_with_pairs()?;
    let out = args.out(&[tokens, heads, u64::from(spec.head)])?;
    let (heads, head, tokens) = (spec.heads as usize, spec.head as usize, tokens as usize);
    let width = heads * head;
    let out = SharedOut::new(out);
    let work = work(&sequences, heads, head);
    for_heads_and_blocks(
        heads,
        &blocks(&sequences),
        work,
        &|scratch: &mut Scratch, h, block| {
            let Sequence {
                start, len, pairs, ..
            } = block.sequence;
            let (pitch, n) = (Layout::pitch(len), block.n_queries);
            let from = layout.scores(h, pairs, start) + block.query * pitch;
            let first = (h * tokens + start + block.query) * 2;
            let statistics = &statistics[first..first + n * 2];
            let at = (start + block.query) * width + h * head;
            // The scratch memory never shrinks. Each iteration writes its elements before it reads them.
            let largest = scratch.scores.len().max(n * len.min(MAX_KEYS));
            scratch.scores.resize(largest, 0.0);
            for key in (0..len).step_by(MAX_KEYS) {
                let n_keys = MAX_KEYS.min(len - key);
                let weights = &mut scratch.scores[..n * n_keys];
                Probabilities {
                    scores: &scores[from + key..from + (n - 1) * pitch + key + n_keys],
                    pitch,
                    statistics,
                    probabilities: weights,
                    len: n_keys,
                }
                .run();
                let weights = Operand {
                    data: weights,
                    row: n_keys,
                    col: 1,
                };
                let into = match key {
                    0 => Into::Overwrite,
                    _ => Into::Accumulate,
                };
                let v = rows_of(v, &v_heads, h, start + key);
                // SAFETY: each head has its own columns, and each query has its own rows.
                unsafe { multiply((n, head, n_keys), 1.0, weights, v, into, &out, at, width) };
            }
        },
    );
    Ok(())
}
