//! Attention of long sequences in three kernels (ByteTransformer III.E.2, figures 5 to 8). A grouped GEMM computes the scores, and reduces
//! each key tile of a row in its epilogue. A second kernel reduces these partials to row statistics. A grouped GEMM then computes the
//! softmax weights when it loads the scores, and multiplies them by the values.
//!
//! Scores are ragged as in the unfused kernels. However, the pitch of a row of `n` scores is `n` rounded up to a multiple of 8, to start
//! each row at a multiple of 16 bytes ([`Layout`]).

mod context;
mod reduce;
mod scores;
#[cfg(test)]
mod tests;

use super::common::edge_cases;
use crate::{
    kernels::{Case, Constants, Launch},
    machine::Machine,
    tensor::{Extents, Shape, Size, Symbol},
};

pub use context::MhaLongContext;
pub(super) use context::{Plan as ContextPlan, tensor_core_plan};
pub use reduce::MhaLongReduce;
pub use scores::MhaLongScores;

/// Keys per key tile.
const KEY_TILE: u32 = Extents::KEY_TILE as u32;

/// Max number of persistent CTAs of a grouped GEMM per SM. It is a multiple of 1, 2 and 4. If 1, 2 or 4 CTAs are resident on an SM at once,
/// the CTAs therefore run in full waves. Several waves cost little, because a CTA's prologue is short compared to its tiles.
const CTAS_PER_SM: u64 = 4;

/// Layout of the scores and the partials of a batch. The three kernels exchange both through global memory. A partial consists of the
/// maximum and the sum over the part of a row that is in one key tile.
///
/// The start of a sequence is computed from two sums over the preceding sequences: `pairs`, the sum of squared lengths, and `tokens`, the
/// sum of lengths. Sequences start at rounded indices, which leaves gaps that are neither written nor read.
pub struct Layout {
    /// Number of elements of a head's scores, including gaps.
    scores: usize,
    /// Number of partials of a head, including gaps.
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

    /// Row pitch of the scores of a sequence of `len` tokens, in elements.
    pub fn pitch(len: usize) -> usize {
        len.next_multiple_of(8)
    }

    /// Key tiles of a sequence of `len` tokens.
    pub fn tiles(len: usize) -> usize {
        len.div_ceil(KEY_TILE as usize)
    }

    /// Returns the index of the first score of a head and sequence. Row `i` begins `i · pitch` elements later.
    pub fn scores(&self, head: usize, pairs: usize, tokens: usize) -> usize {
        head * self.scores + score_start(pairs, tokens)
    }

    /// Returns the index of the first partial of a head and sequence. The partials of row `i` begin `i · tiles` partials later.
    pub fn partials(&self, head: usize, pairs: usize, tokens: usize) -> usize {
        head * self.partials + partial_start(pairs, tokens)
    }
}

/// Returns the index of a sequence's first score within a head, a multiple of 8. The sequence's n rows end before the next sequence starts,
/// because that start is at least n · ⌈n / 8⌉ · 8 elements later.
fn score_start(pairs: usize, tokens: usize) -> usize {
    pairs / 8 * 8 + tokens * 8
}

/// Returns the index of a sequence's first partial within a head. The partials of the sequence's n rows end before the next sequence
/// starts, because that start is at least n · ⌈n / 128⌉ partials later.
fn partial_start(pairs: usize, tokens: usize) -> usize {
    pairs / KEY_TILE as usize + tokens
}

/// A problem of a grouped GEMM: one head of one sequence.
#[derive(Clone, Copy)]
struct Problem {
    head: usize,
    /// Sum of the squared lengths of the preceding sequences. `tokens` is the sum of their lengths.
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

/// Shape of the scores with gaps: `[heads, pairs + 8·tokens]`. A row pitch exceeds its row by up to 7 elements.
pub fn scores_shape(heads: u32) -> Shape {
    let padding = &Size::constant(8) * &Size::from(Symbol::Tokens);
    Shape::new([
        Size::constant(heads.into()),
        &Size::from(Symbol::Pairs) + &padding,
    ])
}

/// Shape of the partials: `[heads, key_tiles, 2]`, a row maximum and a row sum for each row and key tile.
pub fn partials_shape(heads: u32) -> Shape {
    pairs_of_reals(heads, Symbol::KeyTiles)
}

/// Shape of the row statistics: `[heads, tokens, 2]`, a row maximum and a row sum.
pub fn statistics_shape(heads: u32) -> Shape {
    pairs_of_reals(heads, Symbol::Tokens)
}

fn pairs_of_reals(heads: u32, rows: Symbol) -> Shape {
    Shape::new([Size::constant(heads.into()), rows.into(), Size::constant(2)])
}

/// Returns a launch of persistent CTAs: one per tile, but at most `CTAS_PER_SM` per SM. `tiles_of_head` is an upper bound on the number of
/// tiles per head.
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

/// Constants of `partials/attention_visitor.cu` and of the files that include it. A tile has `rows` queries. If `tile_keys` is true, the
/// tile has `keys` keys. Otherwise, it has all keys of the sequence.
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

/// Returns an upper bound on the number of tiles per head, which is Σ ⌈n / rows⌉ · ⌈n / keys⌉ over the lengths n of the sequences.
pub(super) fn max_tiles(extents: &Extents, [rows, keys]: [u32; 2]) -> u64 {
    let (rows, keys) = (u64::from(rows), u64::from(keys));
    let whole = extents.pairs / (rows * keys) + extents.tokens / rows + extents.tokens / keys;
    whole + 3 + extents.batch
}

/// Returns batches with which all three kernels are checked.
fn cases() -> Vec<Case> {
    let mut cases = edge_cases();
    // With twelve heads, this batch has more than 32 tiles per CTA, and the search for a tile's sequence passes over many windows of
    // sequences.
    let crowd: Vec<u32> = (0..1500).map(|i| 1 + i % 3).collect();
    cases.push(Case::new("crowd", &crowd));
    // More than eight key tiles.
    cases.push(Case::new("long", &[1100, 3, 257]));
    cases
}
