//! Attention of long sequences as two grouped GEMMs with the softmax between them taken apart
//! (ByteTransformer III.E.2, figures 5 to 8): scores with partial reductions in the epilogue, the
//! full reduction, and the context with the weights computed in the main loop.
//!
//! Scores are ragged as those of the unfused kernels, but rows of `n` are `n` rounded up to 8 apart,
//! so that each starts at a multiple of 16 bytes. [`Layout`] says where.

mod context;
mod reduce;
mod scores;
#[cfg(test)]
mod tests;

use super::fused::edge_cases;
use crate::{
    kernels::{Case, Constants, Launch},
    machine::Machine,
    tensor::{Extents, Shape, Size, Symbol},
};

pub use context::MhaLongContext;
pub(super) use context::{Plan as ContextPlan, tensor_core_plan};
pub use reduce::MhaLongReduce;
pub use scores::MhaLongScores;

/// Keys of a tile.
const KEY_TILE: u32 = Extents::KEY_TILE as u32;

/// CTAs of a grouped GEMM for each SM: they are persistent, and this divides evenly over SMs that hold one, two or four of
/// them. What a CTA needs to start is small beside the tiles that it takes.
const CTAS_PER_SM: u64 = 4;

/// Where the tensors between the three kernels hold what, for one batch. A sequence is named by what
/// lies before it: the sum of the squared lengths, `pairs`, and that of the lengths, `tokens`.
///
/// Starts are quotients of these sums rather than sums of quotients, so that no prefix sum is
/// needed. That leaves elements which belong to no row: they are never written, and never read.
pub struct Layout {
    /// Elements of a head.
    scores: usize,
    partials: usize,
}

impl Layout {
    pub fn of(batch: &Extents) -> Self {
        let (pairs, tokens) = (batch.pairs as usize, batch.tokens as usize);
        Self {
            scores: score_start(pairs, tokens),
            partials: partial_start(pairs, tokens),
        }
    }

    /// Elements from one row of scores of a sequence of `len` tokens to the next.
    pub fn pitch(len: usize) -> usize {
        len.next_multiple_of(8)
    }

    /// Tiles of keys of a sequence of `len` tokens.
    pub fn tiles(len: usize) -> usize {
        len.div_ceil(KEY_TILE as usize)
    }

    /// Index of the first score of a head and sequence. Row `i` is `i` pitches from there.
    pub fn scores(&self, head: usize, pairs: usize, tokens: usize) -> usize {
        head * self.scores + score_start(pairs, tokens)
    }

    /// Index of the first partial (a maximum and a sum) of a head and sequence. Row `i` has those of
    /// its tiles from `i · tiles` on.
    pub fn partials(&self, head: usize, pairs: usize, tokens: usize) -> usize {
        head * self.partials + partial_start(pairs, tokens)
    }
}

/// A multiple of 8. With n tokens more, it grows by at least n rows of n rounded up to 8.
fn score_start(pairs: usize, tokens: usize) -> usize {
    pairs / 8 * 8 + tokens * 8
}

/// With n tokens more, it grows by at least n rows of ⌈n / 128⌉.
fn partial_start(pairs: usize, tokens: usize) -> usize {
    pairs / KEY_TILE as usize + tokens
}

/// One head of one sequence.
#[derive(Clone, Copy)]
struct Problem {
    head: usize,
    /// What lies before the sequence.
    pairs: usize,
    tokens: usize,
    len: usize,
}

fn problems(heads: u32, cu_lens: &[i64], pair_offsets: &[i64]) -> Vec<Problem> {
    let sequences = cu_lens.windows(2).zip(pair_offsets);
    sequences
        .flat_map(|(ends, &pairs)| {
            (0..heads as usize).map(move |head| Problem {
                head,
                pairs: pairs as usize,
                tokens: ends[0] as usize,
                len: (ends[1] - ends[0]) as usize,
            })
        })
        .collect()
}

/// `[heads, pairs + 8·tokens]`: room for rows that are up to 7 elements longer than their sequence,
/// and for starts that are rounded down.
pub fn scores_shape(heads: u32) -> Shape {
    let padding = &Size::constant(8) * &Size::from(Symbol::Tokens);
    Shape::new([
        Size::constant(heads.into()),
        &Size::from(Symbol::Pairs) + &padding,
    ])
}

/// `[heads, key_tiles, 2]`: a maximum and a sum for each row and tile of keys.
pub fn partials_shape(heads: u32) -> Shape {
    pairs_of_reals(heads, Symbol::KeyTiles)
}

/// `[heads, tokens, 2]`: a maximum and a sum for each row.
pub fn statistics_shape(heads: u32) -> Shape {
    pairs_of_reals(heads, Symbol::Tokens)
}

fn pairs_of_reals(heads: u32, rows: Symbol) -> Shape {
    Shape::new([Size::constant(heads.into()), rows.into(), Size::constant(2)])
}

/// A launch for at most so many tiles of each head.
pub(super) fn visitor_launch(
    tiles_of_head: u64,
    heads: u32,
    threads: u32,
    shared_bytes: u32,
    machine: &Machine,
) -> Launch {
    let most = CTAS_PER_SM * u64::from(machine.sms);
    let tiles = tiles_of_head.saturating_mul(heads.into());
    Launch {
        grid: [tiles.clamp(1, most) as u32, 1, 1],
        threads,
        shared_bytes,
    }
}

/// What the templates of grouped GEMMs read besides their own. A tile has so many rows and keys, or
/// all keys where it is not `tile_keys`.
pub(super) fn visitor_constants(
    heads: u32,
    [rows, keys]: [u32; 2],
    tile_keys: bool,
    min_blocks: u32,
) -> Constants {
    Constants::from([
        ("heads", heads.into()),
        ("rows", rows.into()),
        ("key_tile", keys.into()),
        ("tile_keys", tile_keys.into()),
        ("min_blocks", min_blocks.into()),
    ])
}

/// At least ⌈n / rows⌉ · ⌈n / keys⌉, summed over the sequences.
pub(super) fn most_tiles(extents: &Extents, [rows, keys]: [u32; 2]) -> u64 {
    let (rows, keys) = (u64::from(rows), u64::from(keys));
    let whole = extents.pairs / (rows * keys) + extents.tokens / rows + extents.tokens / keys;
    whole + 3 + extents.batch
}

/// Batches that all three kernels are checked on.
fn cases() -> Vec<Case> {
    let mut cases = edge_cases();
    // More tiles than 32 for each block, where there are twelve heads, and many sequences to pass.
    let crowd: Vec<u32> = (0..1500).map(|i| 1 + i % 3).collect();
    cases.push(Case::new("crowd", &crowd));
    // More than eight tiles of keys.
    cases.push(Case::new("long", &[1100, 3, 257]));
    cases
}
