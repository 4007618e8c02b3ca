//! Attention of long sequences as two grouped GEMMs with the softmax split between them (ByteTransformer III.E.2, figures
//! 5 to 8): scores with partial reductions in the epilogue, the full reduction, and the context with weights computed
//! in the mainloop.
//!
//! Scores are ragged as in the unfused kernels. The pitch of a row of `n` scores is `n` rounded up to 8, so that each row
//! starts at a multiple of 16 bytes ([`Layout`]).

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

/// Persistent CTAs of a grouped GEMM per SM. One, two or four CTAs are resident at once, so the number is a multiple of each. A CTA's
/// prologue is short compared to the time for its tiles.
const CTAS_PER_SM: u64 = 4;

/// Layout of the scores and partials that the three kernels exchange, for one batch.
///
/// The start of a sequence is computed from two sums over the preceding sequences: `pairs`, the sum of squared lengths, and `tokens`, the
/// sum of lengths. Rounding leaves gaps between sequences, which are neither written nor read.
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

    /// Index of the first score of a head and sequence. Row `i` begins `i` pitches later.
    pub fn scores(&self, head: usize, pairs: usize, tokens: usize) -> usize {
        head * self.scores + score_start(pairs, tokens)
    }

    /// Index of the first partial (row maximum and row sum of a key tile) of a head and sequence. The partials of row `i` begin
    /// at `i · tiles` from there.
    pub fn partials(&self, head: usize, pairs: usize, tokens: usize) -> usize {
        head * self.partials + partial_start(pairs, tokens)
    }
}

/// Start of a sequence's scores, a multiple of 8. If a sequence has n tokens, the next sequence starts at least n · ⌈n / 8⌉ · 8 elements
/// later.
fn score_start(pairs: usize, tokens: usize) -> usize {
    pairs / 8 * 8 + tokens * 8
}

/// Start of a sequence's partials. If a sequence has n tokens, the next sequence starts at least n · ⌈n / 128⌉ partials later.
fn partial_start(pairs: usize, tokens: usize) -> usize {
    pairs / KEY_TILE as usize + tokens
}

/// A problem of a grouped GEMM: one head of one sequence.
#[derive(Clone, Copy)]
struct Problem {
    head: usize,
    /// Sums of squared lengths and of lengths over the preceding sequences.
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

/// `[heads, pairs + 8·tokens]`: row pitches exceed rows by up to 7 elements, and starts are rounded down.
pub fn scores_shape(heads: u32) -> Shape {
    let padding = &Size::constant(8) * &Size::from(Symbol::Tokens);
    Shape::new([
        Size::constant(heads.into()),
        &Size::from(Symbol::Pairs) + &padding,
    ])
}

/// `[heads, key_tiles, 2]`: row maximum and row sum for each row and key tile.
pub fn partials_shape(heads: u32) -> Shape {
    pairs_of_reals(heads, Symbol::KeyTiles)
}

/// `[heads, tokens, 2]`: row maximum and row sum.
pub fn statistics_shape(heads: u32) -> Shape {
    pairs_of_reals(heads, Symbol::Tokens)
}

fn pairs_of_reals(heads: u32, rows: Symbol) -> Shape {
    Shape::new([Size::constant(heads.into()), rows.into(), Size::constant(2)])
}

/// Returns a persistent launch for at most `tiles_of_head` tiles per head.
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

/// Constants of `partials/attention_visitor.cu` and of the files that include it. A tile has `rows` queries, and `keys` keys if `tile_keys`
/// is set, otherwise all keys.
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

/// Upper bound on Σ ⌈n / rows⌉ · ⌈n / keys⌉ over the sequences.
pub(super) fn max_tiles(extents: &Extents, [rows, keys]: [u32; 2]) -> u64 {
    let (rows, keys) = (u64::from(rows), u64::from(keys));
    let whole = extents.pairs / (rows * keys) + extents.tokens / rows + extents.tokens / keys;
    whole + 3 + extents.batch
}

/// Batches for all three kernels.
fn cases() -> Vec<Case> {
    let mut cases = edge_cases();
    // With twelve heads, this batch has more than 32 tiles per CTA. The visitor searches many windows of sequences.
    let crowd: Vec<u32> = (0..1500).map(|i| 1 + i % 3).collect();
    cases.push(Case::new("crowd", &crowd));
    // More than eight key tiles.
    cases.push(Case::new("long", &[1100, 3, 257]));
    cases
}
