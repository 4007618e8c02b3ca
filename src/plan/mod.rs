//! Where each intermediate tensor of a run lives: liveness and memory planning.
//!
//! The room is given [`UsageRecord`]s, which say how large a tensor is and which operators need
//! it, and answers with a [`Plan`]: a chunk and an offset for each. Tensors that are never alive at
//! the same operator may share bytes. It knows nothing of devices: a plan is numbers, and whoever
//! owns memory (host or device) makes its chunks as [`Allocator::held`] says.
//!
//! | allocator | what it is | source |
//! |---|---|---|
//! | [`ChunkAllocator`] | the one that gemmule runs on | TurboTransformers 4.2, with the changes it lists |
//! | [`Turbo`] | the same section, to the letter | TurboTransformers 4.2, algorithms 1 and 2 |
//! | [`Gsoc`] | one arena a request, greedy by size | Pisarchyk and Lee 2020, section 5.2 |
//! | [`Caching`] | size bins and reuse in operator order | the PyTorch / cub kind |
//! | [`Maximum`] | planned once for a declared maximum | LightSeq 2.3 |
//!
//! [`PlanCache`] remembers the plans of batch shapes that come again, and [`chart::svg`] draws one.

use serde::Serialize;

mod baselines;
mod blocks;
mod cache;
mod caching;
pub mod chart;
mod chunks;
mod error;
mod pack;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod workloads;

pub use baselines::{Gsoc, Maximum, Turbo};
pub use blocks::{Blocks, Full};
pub use cache::{PlanCache, PlanKey};
pub use caching::Caching;
pub use chunks::{ChunkAllocator, ChunkPolicy};
pub use error::PlanError;

/// Every tensor starts at a multiple of this many bytes, and takes a multiple of it: what
/// `cuMemAlloc` guarantees for its own pointers, and more than any vector load or TMA box needs.
pub const ALIGNMENT: u64 = 256;

/// The largest sum of tensor sizes that is planned for, 1 EiB. It is far beyond any memory, and
/// below it no sum or product of the planner can overflow.
pub const MAX_TOTAL_BYTES: u64 = 1 << 60;

/// One intermediate tensor of a run (TurboTransformers 4.2, "tensor usage record").
///
/// Operators are numbered in topological order, and the tensor is alive from `first_op`, which
/// writes it, to `last_op`, the last to read it, both included. Zero bytes are legal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct UsageRecord {
    pub first_op: u32,
    pub last_op: u32,
    pub bytes: u64,
}

impl UsageRecord {
    /// Whether some operator needs both tensors.
    pub fn lives_with(&self, other: &UsageRecord) -> bool {
        self.first_op <= other.last_op && other.first_op <= self.last_op
    }
}

/// Where one tensor lies: `offset` bytes into the chunk of that id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Placement {
    pub chunk: u32,
    pub offset: u64,
}

/// The places of all tensors of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Size in bytes of each chunk, indexed by chunk id. A chunk id keeps its meaning from one
    /// request to the next, so a chunk that this plan does not touch is there with size 0: its
    /// memory, if it has any, is not this plan's business.
    pub chunks: Vec<u64>,
    /// One per usage record, in the order of the records.
    pub placements: Vec<Placement>,
}

impl Plan {
    /// Bytes of all the chunks that the plan uses.
    pub fn footprint(&self) -> u64 {
        self.chunks
            .iter()
            .fold(0, |sum, &bytes| sum.saturating_add(bytes))
    }

    /// Checks that the plan is one for `records`: every tensor has a place, aligned to
    /// [`ALIGNMENT`] and inside its chunk, and tensors that are alive together share no byte.
    ///
    /// # Errors
    /// The first thing that is wrong, with the records concerned and their byte ranges.
    pub fn validate(&self, records: &[UsageRecord]) -> Result<(), PlanError> {
        if records.len() != self.placements.len() {
            return Err(PlanError::PlacementCount {
                n_records: records.len(),
                n_placements: self.placements.len(),
            });
        }
        // (record, first byte, byte after the last), in the order in which the tensors come alive.
        let mut placed = Vec::with_capacity(records.len());
        for (record, (usage, at)) in records.iter().zip(&self.placements).enumerate() {
            error::check_record(record, usage)?;
            let Some(&chunk_bytes) = self.chunks.get(at.chunk as usize) else {
                return Err(PlanError::NoSuchChunk {
                    record,
                    chunk: at.chunk,
                    n_chunks: self.chunks.len(),
                });
            };
            if !at.offset.is_multiple_of(ALIGNMENT) {
                return Err(PlanError::Misaligned {
                    record,
                    offset: at.offset,
                });
            }
            match at.offset.checked_add(usage.bytes) {
                Some(end) if end <= chunk_bytes => placed.push((record, at.offset, end)),
                _ => {
                    return Err(PlanError::OutsideChunk {
                        record,
                        bytes: usage.bytes,
                        offset: at.offset,
                        chunk: at.chunk,
                        chunk_bytes,
                    });
                }
            }
        }
        placed.sort_by_key(|&(record, ..)| records[record].first_op);
        for (i, &(a, a_start, a_end)) in placed.iter().enumerate() {
            for &(b, b_start, b_end) in &placed[i + 1..] {
                if records[b].first_op > records[a].last_op {
                    break;
                }
                let same_chunk = self.placements[a].chunk == self.placements[b].chunk;
                // Written so that a tensor of zero bytes overlaps nothing.
                if same_chunk && a_start.max(b_start) < a_end.min(b_end) {
                    let (a, b, a_range, b_range) = if a < b {
                        (a, b, a_start..a_end, b_start..b_end)
                    } else {
                        (b, a, b_start..b_end, a_start..a_end)
                    };
                    return Err(PlanError::Overlap {
                        a,
                        b,
                        chunk: self.placements[a].chunk,
                        op: records[a].first_op.max(records[b].first_op),
                        a_range,
                        b_range,
                    });
                }
            }
        }
        Ok(())
    }
}

/// The size that a tensor of `bytes` takes in a chunk: rounded up to [`ALIGNMENT`], and never
/// beyond the last multiple of it.
fn aligned(bytes: u64) -> u64 {
    bytes
        .checked_next_multiple_of(ALIGNMENT)
        .unwrap_or(u64::MAX - (ALIGNMENT - 1))
}

/// The largest sum of (aligned) sizes alive at one operator: no plan of any kind needs less.
/// Sums beyond `u64` saturate.
pub fn lower_bound(records: &[UsageRecord]) -> u64 {
    let mut events: Vec<(u32, bool, u64)> = Vec::with_capacity(2 * records.len());
    for record in records {
        // At one operator births come before deaths, as `last_op` still needs its operands.
        events.push((record.first_op, false, aligned(record.bytes)));
        events.push((record.last_op, true, aligned(record.bytes)));
    }
    events.sort_unstable_by_key(|&(op, dies, _)| (op, dies));
    let (mut alive, mut most) = (0u128, 0u128);
    for (_, dies, bytes) in events {
        if dies {
            alive = alive.saturating_sub(u128::from(bytes));
        } else {
            alive += u128::from(bytes);
            most = most.max(alive);
        }
    }
    u64::try_from(most).unwrap_or(u64::MAX)
}

/// What the last request cost, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestStats {
    /// The chunks that the plan uses.
    pub footprint: u64,
    /// Chunks that had to be allocated for this request.
    pub newly_allocated: u64,
    /// Chunks that were given back at this request.
    pub released: u64,
    /// All chunks that exist after the request, those that the plan does not use included.
    pub held: u64,
}

/// A memory planner whose chunks outlive a request.
///
/// The same sequence of requests always gives the same plans.
///
/// Who owns the memory follows [`held`](Self::held) after every [`plan`](Self::plan): frees each
/// chunk whose size is no longer the one of its buffer, then allocates those that are missing.
/// Freeing first keeps the peak at what is held. An allocation that fails may be tried again at
/// the next request, since what is held is stated, not transferred.
pub trait Allocator: Send {
    /// What the command line, tables and figures call it.
    fn name(&self) -> &'static str;

    /// Places every record.
    ///
    /// # Errors
    /// A record whose lifetime is reversed, or sizes that sum to more than [`MAX_TOTAL_BYTES`].
    /// The chunks held are then as before.
    fn plan(&mut self, records: &[UsageRecord]) -> Result<Plan, PlanError>;

    /// The size of every chunk that is to exist now, indexed by chunk id; 0 where there is none.
    fn held(&self) -> &[u64];

    /// The cost of the last request that was planned; zeros before the first.
    fn last_request(&self) -> RequestStats;

    /// Gives every chunk back: for a device that has run out of memory, or an engine that goes
    /// idle. The next request starts from none. Returns the bytes given back.
    fn release_all(&mut self) -> u64;

    /// Bytes that the last request takes when it is packed by itself, if its plan may be
    /// [reused](Self::reuse). `None`, the default, is an allocator that plans every request anew.
    fn last_arena(&self) -> Option<u64> {
        None
    }

    /// Counts a request that would run on a `plan` made earlier for the same records, when
    /// [`last_arena`](Self::last_arena) was `arena`. Returns false, and changes nothing, if the
    /// request must be planned: because a chunk of the plan is gone, because memory is due to
    /// shrink, or, by default, always.
    fn reuse(&mut self, plan: &Plan, arena: u64) -> bool {
        let (_, _) = (plan, arena);
        false
    }
}

/// Puts a new chunk under the lowest id that is free, and returns the id.
fn append_chunk(held: &mut Vec<u64>, bytes: u64) -> usize {
    let id = held
        .iter()
        .position(|&held| held == 0)
        .unwrap_or(held.len());
    if id == held.len() {
        held.push(0);
    }
    held[id] = bytes;
    id
}

/// Gives all chunks up, and returns their bytes.
fn release(held: &mut Vec<u64>, stats: &mut RequestStats) -> u64 {
    stats.held = 0;
    held.drain(..).sum()
}

/// Bytes of the chunks in `these` that `those` does not have, or has in another size.
fn bytes_not_in(these: &[u64], those: &[u64]) -> u64 {
    let differing = these
        .iter()
        .enumerate()
        .filter(|&(id, bytes)| those.get(id) != Some(bytes));
    differing.map(|(_, bytes)| bytes).sum()
}

impl RequestStats {
    /// The cost of a request that runs on `plan` and has changed the chunks from `before` to `held`.
    fn new(plan: &Plan, before: &[u64], held: &[u64]) -> Self {
        RequestStats {
            footprint: plan.footprint(),
            newly_allocated: bytes_not_in(held, before),
            released: bytes_not_in(before, held),
            held: held.iter().sum(),
        }
    }
}

impl Plan {
    /// The plan that puts each record at its place, given as chunk id and offset. `None` is a
    /// record of zero bytes: it goes to the start of the first chunk that others use, or of the
    /// first that is held, so that it has a valid address.
    fn new(places: &[Option<(usize, u64)>], held: &[u64]) -> Self {
        let used = places.iter().flatten().map(|&(id, _)| id).min();
        let home = used
            .or(held.iter().position(|&bytes| bytes > 0))
            .unwrap_or(0);
        let mut chunks = vec![0; held.len()];
        let placements = places
            .iter()
            .map(|place| {
                let (id, offset) = place.unwrap_or((home, 0));
                chunks[id] = held[id];
                Placement {
                    chunk: id as u32,
                    offset,
                }
            })
            .collect();
        Plan { chunks, placements }
    }
}
