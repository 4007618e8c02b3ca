//! The default allocator.

use super::error::check_records;
use super::pack::{self, Item, Packing};
use super::{ALIGNMENT, Allocator, MAX_TOTAL_BYTES, Plan, PlanError, RequestStats, UsageRecord};
use super::{aligned, append_chunk, lower_bound, release};

#[cfg(test)]
mod tests;

/// Min chunk size in bytes, so that memory does not grow in small steps. With the minimum of TurboTransformers, 2 MiB, a single short
/// sequence would leave most of a chunk unused.
const SMALLEST_CHUNK: u64 = 256 << 10;

/// Policy for allocating and releasing memory in [`ChunkAllocator`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChunkPolicy {
    /// Max headroom of a new chunk in bytes; a multiple of [`ALIGNMENT`]. The headroom is the difference between the size of the chunk and
    /// the number of bytes that the chunk is made for.
    pub default_chunk: u64,
    /// Size of a new chunk as a multiple (1 to 16) of the bytes that the chunk is made for, so that a slightly longer request fits. The
    /// size is less than this multiple if the headroom would exceed `default_chunk` bytes.
    pub growth: f64,
    /// Memory is released after this number of consecutive requests that do not use it. 0 and 1 both mean immediate release, as in
    /// TurboTransformers.
    pub release_after: u32,
    /// Max idle memory in bytes: the bytes held minus the budget of the current request. The budget is the request's bytes plus 10 %, but
    /// at least 256 KiB more than its bytes. Memory above the maximum is released at once.
    pub keep_limit: u64,
}

impl Default for ChunkPolicy {
    /// Returns a policy with the chunk size of TurboTransformers, 2 MiB, and a [`growth`](Self::growth) of 1.08. The paper's growth of 1.2
    /// would raise the memory of a single sequence above 1.10 × its lower bound. Memory is released after 128 requests without use, or at
    /// once if more than 1 GiB is idle. Each release invalidates the plans and CUDA graphs that use the chunk, so requests of random
    /// lengths must not cause releases.
    fn default() -> Self {
        ChunkPolicy {
            default_chunk: 2 << 20,
            growth: 1.08,
            release_after: 128,
            keep_limit: 1 << 30,
        }
    }
}

impl ChunkPolicy {
    fn check(&self) -> Result<(), PlanError> {
        let found = self.default_chunk;
        if found == 0 || found > MAX_TOTAL_BYTES || !found.is_multiple_of(ALIGNMENT) {
            return Err(PlanError::DefaultChunk { found });
        }
        if !(1.0..=16.0).contains(&self.growth) {
            return Err(PlanError::Growth { found: self.growth });
        }
        Ok(())
    }

    /// Returns the size of a chunk made for `bytes`.
    fn chunk_bytes(&self, bytes: u64) -> u64 {
        // f64 is precise enough, because the headroom is rounded up to the alignment.
        let headroom = ((self.growth - 1.0) * bytes as f64) as u64;
        aligned(bytes + headroom.min(self.default_chunk)).max(self.smallest_chunk())
    }

    fn smallest_chunk(&self) -> u64 {
        SMALLEST_CHUNK.min(self.default_chunk)
    }

    /// Returns the maximum memory that is not considered wasteful for a request of `bytes`.
    fn budget(&self, bytes: u64) -> u64 {
        bytes + (bytes / 10).max(self.smallest_chunk())
    }
}

/// The sequence-length-aware allocator of TurboTransformers (4.2, algorithms 1 and 2). Chunks are kept between requests, and each request
/// places its tensors in the existing chunks.
///
/// It differs from the paper as follows. [`Turbo`](super::Turbo) is the unchanged algorithm.
///
/// 1. *The first chunk is an arena.* The paper appends a chunk of 1.2 times a tensor's size whenever a tensor does not fit, which scatters
///    the first request over chunks with unusable ends. Here the whole request is first packed into one arena, in several orders, and the
///    best packing is used. The smallest existing chunk that is large enough takes the arena. If there are no chunks, a new one is made for
///    the arena.
/// 2. *Growth is bounded.* If the existing chunks are too small together, the remaining tensors go into one new chunk. If the total would
///    then exceed 1.10 × the lower bound (for small requests, the lower bound plus 256 KiB), a single new chunk replaces all others. A new
///    chunk has a headroom of 8 % (20 % in the paper), but at most one default chunk.
/// 3. *Memory shrinks slowly.* The paper releases memory that the current plan does not use, and allocates it again for the next long
///    request. Here a chunk is released after [`release_after`](ChunkPolicy::release_after) requests without use. A large chunk may also be
///    too large for all recent requests, which keep it in use: if `release_after` consecutive requests each needed less than 1/1.10 of the
///    total, a chunk for the largest of these requests replaces all chunks.
#[derive(Clone, Debug)]
pub struct ChunkAllocator {
    policy: ChunkPolicy,
    /// Chunk sizes by id; 0 for an unused id.
    held: Vec<u64>,
    /// Number of requests since the last use of each chunk, by id.
    idle: Vec<u32>,
    excess: Excess,
    stats: RequestStats,
    last_arena: u64,
}

/// A series of consecutive requests that needed less memory than was held, with the size of the largest of these requests.
#[derive(Clone, Copy, Debug, Default)]
struct Excess {
    n_requests: u32,
    largest_arena: u64,
}

impl Default for ChunkAllocator {
    fn default() -> Self {
        Self::unchecked(ChunkPolicy::default())
    }
}

impl ChunkAllocator {
    /// Creates an allocator without chunks.
    ///
    /// # Errors
    /// Returns an error if `default_chunk` is zero, not aligned or above [`MAX_TOTAL_BYTES`], or if `growth` is not
    /// between 1 and 16.
    pub fn new(policy: ChunkPolicy) -> Result<Self, PlanError> {
        policy.check()?;
        Ok(Self::unchecked(policy))
    }

    fn unchecked(policy: ChunkPolicy) -> Self {
        ChunkAllocator {
            policy,
            held: Vec::new(),
            idle: Vec::new(),
            excess: Excess::default(),
            stats: RequestStats::default(),
            last_arena: 0,
        }
    }

    /// Returns the policy that the allocator was created with.
    pub fn policy(&self) -> ChunkPolicy {
        self.policy
    }

    /// Returns whether all chunks of `plan` still exist with the sizes in the plan. A plan that is not current must not be used; plan the
    /// request again.
    pub fn is_current(&self, plan: &Plan) -> bool {
        plan.chunks
            .iter()
            .enumerate()
            .all(|(id, &bytes)| bytes == 0 || self.held.get(id) == Some(&bytes))
    }

    fn total_held(&self) -> u64 {
        self.held.iter().sum()
    }

    /// Returns the series of requests that needed less memory than was held, with a request for an arena of `arena` bytes appended. Returns
    /// an empty series if the largest of these requests needs the held memory.
    fn excess_with(&self, arena: u64) -> Excess {
        let largest_arena = self.excess.largest_arena.max(arena);
        if self.total_held() <= self.policy.budget(largest_arena) {
            return Excess::default();
        }
        Excess {
            n_requests: self.excess.n_requests.saturating_add(1),
            largest_arena,
        }
    }

    /// Returns whether to shrink the total memory, in addition to releasing idle chunks.
    fn must_shrink(&self, excess: Excess, arena: u64) -> bool {
        let in_a_row = excess.n_requests > 0 && excess.n_requests >= self.policy.release_after;
        in_a_row || self.exceeds_keep_limit(self.total_held(), arena)
    }

    /// Returns whether `held` bytes exceed [`ChunkPolicy::keep_limit`] for a request that needs `arena` bytes.
    fn exceeds_keep_limit(&self, held: u64, arena: u64) -> bool {
        held.saturating_sub(self.policy.budget(arena)) > self.policy.keep_limit
    }

    /// Releases all chunks except the smallest chunk of at least `arena` bytes. That chunk is also released if it exceeds the
    /// [`budget`](ChunkPolicy::budget) of `arena`.
    fn keep_only_for(&mut self, arena: u64) {
        let kept = self
            .smallest_for(arena)
            .filter(|&id| self.held[id] <= self.policy.budget(arena));
        for (id, bytes) in self.held.iter_mut().enumerate() {
            if Some(id) != kept {
                *bytes = 0;
            }
        }
        self.excess = Excess::default();
    }

    /// Returns the id of the smallest chunk of at least `bytes`.
    fn smallest_for(&self, bytes: u64) -> Option<usize> {
        let fitting = self
            .held
            .iter()
            .enumerate()
            .filter(|&(_, &held)| held > 0 && held >= bytes);
        fitting
            .min_by_key(|&(id, &held)| (held, id))
            .map(|(id, _)| id)
    }

    /// Increments the idle count of every chunk that `plan` does not use, and releases chunks that have been idle for too long.
    fn age(&mut self, plan: &Plan) {
        self.idle.resize(self.held.len(), 0);
        for (id, (held, idle)) in self.held.iter_mut().zip(&mut self.idle).enumerate() {
            if *held == 0 || plan.chunks.get(id).is_some_and(|&used| used > 0) {
                *idle = 0;
                continue;
            }
            *idle = idle.saturating_add(1);
            if *idle >= self.policy.release_after {
                *held = 0;
            }
        }
    }

    /// Packs the items into the existing chunks and at most one new chunk. Returns the packing, and the index of the chunk that each
    /// bin of the packing stands for. Returns `None` if there are no chunks, or if a new chunk is needed and would raise the total above
    /// `within` bytes.
    fn grow(
        &mut self,
        items: &[Item],
        n_records: usize,
        within: u64,
    ) -> Option<(Packing, Vec<usize>)> {
        // The largest chunks come first, so that small ones stay unused if possible.
        let mut ids: Vec<usize> = (0..self.held.len())
            .filter(|&id| self.held[id] > 0)
            .collect();
        ids.sort_by_key(|&id| (!self.held[id], id));
        if ids.is_empty() {
            return None;
        }
        let capacities: Vec<u64> = ids.iter().map(|&id| self.held[id]).collect();
        let packing = pack::search(items, n_records, &capacities);
        // A packing that needs no new memory is accepted for any total.
        if packing.open_top > 0 {
            let new = self.policy.chunk_bytes(packing.open_top);
            if self.total_held() + new > within {
                return None;
            }
            ids.push(append_chunk(&mut self.held, new));
        }
        Some((packing, ids))
    }
}

impl Allocator for ChunkAllocator {
    fn name(&self) -> &'static str {
        "chunk"
    }

    fn plan(&mut self, records: &[UsageRecord]) -> Result<Plan, PlanError> {
        check_records(records)?;
        let held_before = self.held.clone();
        let items = pack::items(records);
        let arena = pack::search(&items, records.len(), &[]);
        self.last_arena = arena.open_top;

        let excess = self.excess_with(arena.open_top);
        let mut chunk_for = arena.open_top;
        if self.must_shrink(excess, arena.open_top) {
            // The largest request of the series may recur, so a chunk that is large enough for it is kept or made, unless this would exceed
            // the keep limit.
            let largest = excess.largest_arena.max(arena.open_top);
            if !self.exceeds_keep_limit(self.policy.chunk_bytes(largest), arena.open_top) {
                chunk_for = largest;
            }
            self.keep_only_for(chunk_for);
        } else {
            self.excess = excess;
        }

        let (packing, ids) = if records.is_empty() {
            (arena, Vec::new())
        } else if let Some(id) = self.smallest_for(arena.open_top) {
            (arena, vec![id])
        } else {
            let within = self.policy.budget(lower_bound(records));
            let within = within.max(arena.open_top + self.policy.smallest_chunk());
            match self.grow(&items, records.len(), within) {
                Some(grown) => grown,
                None => {
                    self.held.fill(0);
                    self.excess = Excess::default();
                    let id = append_chunk(&mut self.held, self.policy.chunk_bytes(chunk_for));
                    (arena, vec![id])
                }
            }
        };

        let in_chunk = |place: &Option<(usize, u64)>| place.map(|(bin, offset)| (ids[bin], offset));
        let places: Vec<_> = packing.places.iter().map(in_chunk).collect();
        let plan = Plan::new(&places, &self.held);
        self.age(&plan);
        self.stats = RequestStats::new(&plan, &held_before, &self.held);
        Ok(plan)
    }

    fn held(&self) -> &[u64] {
        &self.held
    }

    fn last_request(&self) -> RequestStats {
        self.stats
    }

    /// Invalidates all earlier plans; see [`is_current`](Self::is_current).
    fn release_all(&mut self) -> u64 {
        self.idle.clear();
        self.excess = Excess::default();
        release(&mut self.held, &mut self.stats)
    }

    fn last_arena(&self) -> Option<u64> {
        Some(self.last_arena)
    }

    fn reuse(&mut self, plan: &Plan, arena: u64) -> bool {
        let excess = self.excess_with(arena);
        if !self.is_current(plan) || self.must_shrink(excess, arena) {
            return false;
        }
        self.excess = excess;
        self.last_arena = arena;
        let held_before = self.total_held();
        self.age(plan);
        self.stats = RequestStats {
            footprint: plan.footprint(),
            newly_allocated: 0,
            released: held_before - self.total_held(),
            held: self.total_held(),
        };
        true
    }
}
