//! The allocator that gemmule runs on.

use super::error::check_records;
use super::pack::{self, Item, Packing};
use super::{ALIGNMENT, Allocator, MAX_TOTAL_BYTES, Plan, PlanError, RequestStats, UsageRecord};
use super::{aligned, append_chunk, lower_bound, release};

#[cfg(test)]
mod tests;

/// No chunk is smaller, so that requests of a few tokens do not each grow the memory by a little;
/// the paper's are 2 MiB at least, of which a single short sequence leaves most empty.
const SMALLEST_CHUNK: u64 = 256 << 10;

/// When [`ChunkAllocator`] takes memory, how much, and when it gives it back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChunkPolicy {
    /// The most that a new chunk may have beyond what it was made for, in bytes; a multiple of
    /// [`ALIGNMENT`].
    pub default_chunk: u64,
    /// A new chunk is this factor larger than what it was made for, so that a slightly longer
    /// request finds room in it; from 1 to 16, and within what `default_chunk` allows.
    pub growth: f64,
    /// Memory is given back once this many requests in a row could do without it. 0 and 1 both
    /// mean at once, as in the paper.
    pub release_after: u32,
    /// Bytes that may be held beyond what the request at hand needs; what is above goes at once.
    pub keep_limit: u64,
}

impl Default for ChunkPolicy {
    /// The paper's 2 MiB, and a factor of 1.08 instead of its 1.2, with which the memory of a single
    /// sequence would be above 1.10 × its lower bound. Memory is given back after 128 requests without use, or at
    /// once where more than 1 GiB lies idle: after fewer, a stream of random lengths keeps giving back
    /// what it then needs again, and with each chunk go the plans and the CUDA graphs that are for it.
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

    /// The size of a chunk made for `bytes`.
    fn chunk_bytes(&self, bytes: u64) -> u64 {
        // Exact enough as a float: the headroom is rounded up to the alignment anyway.
        let headroom = ((self.growth - 1.0) * bytes as f64) as u64;
        aligned(bytes + headroom.min(self.default_chunk)).max(self.smallest_chunk())
    }

    fn smallest_chunk(&self) -> u64 {
        SMALLEST_CHUNK.min(self.default_chunk)
    }

    /// The most memory that is not called wasteful for a request that needs `bytes`.
    fn budget(&self, bytes: u64) -> u64 {
        bytes + (bytes / 10).max(self.smallest_chunk())
    }
}

/// The sequence-length-aware allocator of TurboTransformers (4.2, algorithms 1 and 2): chunks stay
/// between requests, and each request places its tensors anew, for its own lengths, in the chunks
/// at hand.
///
/// It differs from the paper as follows. ([`Turbo`](super::Turbo) is the paper's, to compare.)
///
/// 1. *The first chunk is an arena.* The paper appends a chunk of 1.2 times a tensor's size
///    whenever one fits nowhere, so that a request on a fresh allocator is scattered over chunks
///    with unusable rests at their ends. Here the whole request is packed first as if into one
///    arena, in several orders, and the best
///    is kept. If a chunk at hand is as large, the
///    smallest such takes it; if none is there, one is made for it.
/// 2. *Growth is bounded.* Where the chunks at hand are too small together, what does not fit goes
///    into one new chunk, sized for all of it. If more than 1.10 × the lower bound would be held
///    then (of small requests: 256 KiB more than it), the chunks are replaced by a single new one instead.
///    A new chunk's headroom (8 %, the paper's is 20 %) is at most one default chunk. Hence after a request
///    that the chunks at hand were too small for, all that is held is within 1.10 × its lower
///    bound (or its arena, where that is higher) and one default chunk.
/// 3. *Memory follows the demand down slowly.* The paper releases at once what the present plan
///    does not use, and allocates it again for the next long request. Here a chunk goes after
///    [`release_after`](ChunkPolicy::release_after) requests without use. And since a single large
///    chunk is always in use, even if by a small request, all memory is weighed too: when as many
///    requests in a row would each have been content with less than 1/1.10 of it, it is replaced by what
///    the largest of them needs.
#[derive(Clone, Debug)]
pub struct ChunkAllocator {
    policy: ChunkPolicy,
    /// Chunk sizes by id; 0 where there is none.
    held: Vec<u64>,
    /// By chunk id: requests since one used the chunk.
    idle: Vec<u32>,
    /// Requests in a row for each of which too much was held, and the largest arena among them.
    excess: Excess,
    stats: RequestStats,
    last_arena: u64,
}

/// A run of requests that would have been content with less memory.
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
    /// An allocator that holds nothing yet.
    ///
    /// # Errors
    /// A `default_chunk` that is zero or not aligned, a `growth` below 1 or above 16.
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

    /// The settings it was made with.
    pub fn policy(&self) -> ChunkPolicy {
        self.policy
    }

    /// Whether the chunks that `plan` uses are all still held, in the sizes it was made for. A
    /// plan that is not must not be run: it is to be made again.
    pub fn is_current(&self, plan: &Plan) -> bool {
        plan.chunks
            .iter()
            .enumerate()
            .all(|(id, &bytes)| bytes == 0 || self.held.get(id) == Some(&bytes))
    }

    fn total_held(&self) -> u64 {
        self.held.iter().sum()
    }

    /// The run of requests with too much memory, once a request with an arena of `arena` has come.
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

    /// Whether less memory must be held from now on, and not merely an idle chunk less.
    fn must_shrink(&self, excess: Excess, arena: u64) -> bool {
        let in_a_row = excess.n_requests > 0 && excess.n_requests >= self.policy.release_after;
        in_a_row || self.exceeds_keep_limit(self.total_held(), arena)
    }

    /// Whether `held` bytes are more than may be kept while a request needs `arena` bytes.
    fn exceeds_keep_limit(&self, held: u64, arena: u64) -> bool {
        held.saturating_sub(self.policy.budget(arena)) > self.policy.keep_limit
    }

    /// Releases all chunks but the smallest that takes `arena` without being too large for it.
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

    /// The smallest chunk of at least `bytes`.
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

    /// Counts a request against every chunk that its plan does not use, and releases those for
    /// which it is time.
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

    /// Packs into the chunks at hand and one new one, and returns the packing and the chunk of
    /// each bin. `None` if no chunk is at hand, or if more than `within` bytes would be held.
    fn grow(
        &mut self,
        items: &[Item],
        n_records: usize,
        within: u64,
    ) -> Option<(Packing, Vec<usize>)> {
        // Largest first, so that the small ones stay unused where they can be done without.
        let mut ids: Vec<usize> = (0..self.held.len())
            .filter(|&id| self.held[id] > 0)
            .collect();
        ids.sort_by_key(|&id| (!self.held[id], id));
        if ids.is_empty() {
            return None;
        }
        let capacities: Vec<u64> = ids.iter().map(|&id| self.held[id]).collect();
        let packing = pack::search(items, n_records, &capacities);
        // A packing that needs nothing new is right whatever is held: the memory is there.
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
            // The largest of the run may come again, unless even that is more than may be kept.
            let largest = excess.largest_arena;
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

    /// Plans made before are no longer [current](Self::is_current).
    fn release_all(&mut self) -> u64 {
        self.idle.clear();
        self.excess = Excess::default();
        release(&mut self.held, &mut self.stats)
    }

    /// What memory is weighed against.
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
