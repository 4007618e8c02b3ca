//! Memory planning: a position in memory for each intermediate tensor of a run, based on the lifetimes of the tensors.
//!
//! The input is a list of [`UsageRecord`]s: the size of each tensor and the range of operators that need it. The output is a [`Plan`]: a
//! chunk and an offset for each tensor. Tensors that are never alive at the same operator may share bytes. A plan contains numbers only.
//! The owner of the memory, on the host or on a device, creates the chunks that [`Allocator::held`] lists.
//!
//! Each row of the table is an implementation of [`Allocator`]:
//!
//! | allocator | strategy | source |
//! |---|---|---|
//! | [`ChunkAllocator`] | the default: chunks that are reused between requests | TurboTransformers 4.2, with documented changes |
//! | [`Turbo`] | the published algorithm | TurboTransformers 4.2, algorithms 1 and 2 |
//! | [`Gsoc`] | one arena per request, greedy by size | Pisarchyk and Lee 2020, section 5.2 |
//! | [`Caching`] | two pools with best fit, allocation in operator order | the caching allocators of PyTorch and cub |
//! | [`Maximum`] | one plan for a declared maximum | LightSeq 2.3 |
//!
//! [`PlanCache`] keeps the plans of recent batch shapes, and [`chart::svg`] draws a plan.

use serde::Serialize;

mod blocks;
mod cache;
#[cfg(feature = "cli")]
pub mod chart;
mod chunks;
mod error;
mod pack;
mod papers;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod workloads;

pub use blocks::{Blocks, Full};
pub use cache::{PlanCache, PlanKey};
pub use chunks::{ChunkAllocator, ChunkPolicy};
pub use error::PlanError;
pub use papers::{Caching, Gsoc, Maximum, Turbo};

/// Alignment of every tensor's start and size, in bytes. Pointers from `cuMemAlloc` have this alignment; vector loads and TMA boxes need
/// less.
pub const ALIGNMENT: u64 = 256;

/// Max sum of tensor sizes that can be planned, 1 EiB. Up to this limit, no sum or product in the planner overflows.
pub const MAX_TOTAL_BYTES: u64 = 1 << 60;

/// One intermediate tensor of a run (TurboTransformers 4.2, "tensor usage record").
///
/// Operators are numbered in topological order. The tensor is alive from `first_op`, which writes it, to `last_op`, the last operator that
/// reads it, inclusive. Zero bytes are allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct UsageRecord {
    pub first_op: u32,
    pub last_op: u32,
    pub bytes: u64,
}

impl UsageRecord {
    /// Returns whether the two lifetimes overlap.
    pub fn lives_with(&self, other: &UsageRecord) -> bool {
        self.first_op <= other.last_op && other.first_op <= self.last_op
    }
}

/// Position of one tensor: `offset` bytes into chunk `chunk`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Placement {
    pub chunk: u32,
    pub offset: u64,
}

/// The placements of all tensors of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Size in bytes of each chunk, indexed by chunk id. Chunk ids are stable across requests. A chunk that this plan does not use
    /// therefore has size 0 here, even if its memory still exists.
    pub chunks: Vec<u64>,
    /// One placement per usage record, in the order of the records.
    pub placements: Vec<Placement>,
}

impl Plan {
    /// Returns the total bytes of the chunks that the plan uses.
    pub fn footprint(&self) -> u64 {
        self.chunks
            .iter()
            .fold(0, |sum, &bytes| sum.saturating_add(bytes))
    }

    /// Checks that the plan fits `records`: every tensor is placed at a multiple of [`ALIGNMENT`]
    /// inside its chunk, and tensors that are alive together share no byte.
    ///
    /// # Errors
    /// Returns an error if the plan violates a condition: the first violation, with the records concerned and their byte ranges.
    pub fn validate(&self, records: &[UsageRecord]) -> Result<(), PlanError> {
        if records.len() != self.placements.len() {
            return Err(PlanError::PlacementCount {
                n_records: records.len(),
                n_placements: self.placements.len(),
            });
        }
        // (record, start, end), later sorted by the first operator of the tensor.
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
                // A tensor of zero bytes overlaps with nothing.
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

/// Rounds `bytes` up to a multiple of [`ALIGNMENT`], saturating at the last multiple.
fn aligned(bytes: u64) -> u64 {
    bytes
        .checked_next_multiple_of(ALIGNMENT)
        .unwrap_or(u64::MAX - (ALIGNMENT - 1))
}

/// Returns a lower bound on the memory of any plan. For each operator, the aligned sizes of the tensors that are alive at this operator are
/// added up. The bound is the largest of these sums. Sums beyond `u64` saturate.
pub fn lower_bound(records: &[UsageRecord]) -> u64 {
    let mut events: Vec<(u32, bool, u64)> = Vec::with_capacity(2 * records.len());
    for record in records {
        // Starts sort before ends at the same operator, because a tensor is still alive while its last reader writes another tensor.
        events.push((record.first_op, false, aligned(record.bytes)));
        events.push((record.last_op, true, aligned(record.bytes)));
    }
    events.sort_unstable_by_key(|&(op, dies, _)| (op, dies));
    let (mut alive, mut peak) = (0u128, 0u128);
    for (_, dies, bytes) in events {
        if dies {
            alive = alive.saturating_sub(u128::from(bytes));
        } else {
            alive += u128::from(bytes);
            peak = peak.max(alive);
        }
    }
    u64::try_from(peak).unwrap_or(u64::MAX)
}

/// Memory statistics of the last request, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestStats {
    /// Total size of the chunks that the plan uses.
    pub footprint: u64,
    /// Total size of the chunks allocated for this request.
    pub newly_allocated: u64,
    /// Total size of the chunks released at this request.
    pub released: u64,
    /// Total size of all chunks after the request, including those that the plan does not use.
    pub held: u64,
}

/// A memory planner whose chunks outlive a request.
///
/// Planning is deterministic: the same sequence of requests always results in the same plans.
///
/// The owner of the memory follows [`held`](Self::held) after every [`plan`](Self::plan): it frees the buffer of each chunk whose size has
/// changed, and then allocates the missing buffers. Because of this order, the peak does not exceed the total of `held`. An allocation that
/// fails can be retried at the next request, because `held` describes a state instead of a change.
pub trait Allocator: Send {
    /// Returns the name used on the command line, in tables and in figures.
    fn name(&self) -> &'static str;

    /// Places every record.
    ///
    /// # Errors
    /// Returns an error if the lifetime of a record is reversed, or if the sizes sum to more than [`MAX_TOTAL_BYTES`]. The chunks are then
    /// unchanged.
    fn plan(&mut self, records: &[UsageRecord]) -> Result<Plan, PlanError>;

    /// Returns the required size of every chunk in bytes, indexed by chunk id; 0 means no chunk.
    fn held(&self) -> &[u64];

    /// Returns the statistics of the last request that was planned; zeros before the first.
    fn last_request(&self) -> RequestStats;

    /// Releases all chunks, for example if a device has run out of memory or an engine becomes idle. Returns the number of bytes released.
    fn release_all(&mut self) -> u64;

    /// Returns the size of the single arena into which the tensors of the last request can be packed. Returns `None`, the default, if plans
    /// cannot be [reused](Self::reuse), so that every request must be planned.
    fn last_arena(&self) -> Option<u64> {
        None
    }

    /// Counts a request that reuses `plan`. The plan was made for the same records, and `arena` is the value of
    /// [`last_arena`](Self::last_arena) after that planning. Returns false and changes nothing if the request must be planned again,
    /// because a chunk of the plan no longer exists or memory must shrink. The default always returns false.
    fn reuse(&mut self, plan: &Plan, arena: u64) -> bool {
        let (_, _) = (plan, arena);
        false
    }
}

/// Stores a new chunk under the lowest free id, and returns the id.
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

/// Clears all chunks, and returns their total bytes.
fn release(held: &mut Vec<u64>, stats: &mut RequestStats) -> u64 {
    stats.held = 0;
    held.drain(..).sum()
}

/// Returns the total size of the chunks in `these` whose id does not exist in `those` or has another size there.
fn bytes_not_in(these: &[u64], those: &[u64]) -> u64 {
    let differing = these
        .iter()
        .enumerate()
        .filter(|&(id, bytes)| those.get(id) != Some(bytes));
    differing.map(|(_, bytes)| bytes).sum()
}

impl RequestStats {
    /// Creates the statistics of a request with the plan `plan`, which changed the chunks from `before` to `held`.
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
    /// Creates the plan that places each record at the given chunk id and offset. `None` means a record of zero bytes. Such a record is
    /// placed at the start of the first chunk that other records use, or else of the first existing chunk, so that its address is valid.
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
