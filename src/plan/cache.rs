//! Plans of batch shapes that come again.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use super::{Allocator, ChunkAllocator, Plan, PlanError, UsageRecord};

/// The dimensions of a batch on which the size of a tensor may depend. Batches of the same key
/// must have the same usage records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanKey {
    /// All tokens of the batch.
    pub tokens: u64,
    /// Sequences.
    pub batch: u64,
    /// Tokens of the longest sequence.
    pub longest: u64,
    /// Pairs of tokens of the same sequence: the sum of the squared lengths.
    pub pairs: u64,
}

impl From<(u64, u64, u64, u64)> for PlanKey {
    /// From (tokens, batch, longest, pairs).
    fn from((tokens, batch, longest, pairs): (u64, u64, u64, u64)) -> Self {
        PlanKey {
            tokens,
            batch,
            longest,
            pairs,
        }
    }
}

/// The plans of the batch shapes seen last, for one program and one [`ChunkAllocator`].
///
/// A plan is only as good as the chunks it was made for, and those come and go. So nothing is
/// handed out on the strength of the key alone: the allocator is asked whether every chunk of the
/// plan still exists in the size that it had, and it counts the request as one of its own, so that
/// chunks age, and memory shrinks, at the same requests with the cache as without. A plan
/// whose chunks have changed is dropped when it is met, and made again. A chunk that was released
/// and came back under the same id in the same size serves an old plan as well as a new one, since
/// a plan holds ids and offsets, and no addresses.
#[derive(Clone, Debug)]
pub struct PlanCache {
    capacity: NonZeroUsize,
    entries: HashMap<PlanKey, Entry>,
    /// Requests so far; tells which entry was used longest ago.
    clock: u64,
    n_hits: u64,
}

#[derive(Clone, Debug)]
struct Entry {
    plan: Arc<Plan>,
    /// What the allocator weighs memory against; see `ChunkAllocator::reuse`.
    arena: u64,
    used_at: u64,
}

impl PlanCache {
    /// A cache of at most `capacity` plans, which drops the one unused for longest.
    pub fn new(capacity: NonZeroUsize) -> Self {
        PlanCache {
            capacity,
            entries: HashMap::new(),
            clock: 0,
            n_hits: 0,
        }
    }

    /// The plan for the batch shape `key`: the one made before if it can still be run, else a new
    /// one for the records that `records` gives. Either way `allocator` has counted the request,
    /// and its [`held`](Allocator::held) is to be followed.
    ///
    /// # Errors
    /// Those of `records`, and of planning.
    pub fn plan<E: From<PlanError>>(
        &mut self,
        key: impl Into<PlanKey>,
        allocator: &mut ChunkAllocator,
        records: impl FnOnce() -> Result<Vec<UsageRecord>, E>,
    ) -> Result<Arc<Plan>, E> {
        let key = key.into();
        self.clock += 1;
        if let Some(entry) = self.entries.get_mut(&key) {
            if allocator.reuse(&entry.plan, entry.arena) {
                entry.used_at = self.clock;
                self.n_hits += 1;
                return Ok(Arc::clone(&entry.plan));
            }
            self.entries.remove(&key);
        }
        let plan = Arc::new(allocator.plan(&records()?)?);
        if self.entries.len() >= self.capacity.get() {
            // A scan is small beside the planning that has just been done.
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used_at);
            if let Some((&oldest, _)) = oldest {
                self.entries.remove(&oldest);
            }
        }
        let arena = allocator.last_arena();
        self.entries.insert(
            key,
            Entry {
                plan: Arc::clone(&plan),
                arena,
                used_at: self.clock,
            },
        );
        Ok(plan)
    }

    /// Plans at hand, those that have become unusable unnoticed included.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no plan is at hand.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Requests answered without planning.
    pub fn n_hits(&self) -> u64 {
        self.n_hits
    }

    /// Requests that had to be planned, or failed to be.
    pub fn n_misses(&self) -> u64 {
        self.clock - self.n_hits
    }

    /// Forgets every plan.
    pub fn clear(&mut self) {
        self.entries.clear();
    }
}
