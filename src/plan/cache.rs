//! Plans of batch shapes that come again.

use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;

use super::{Allocator, Plan, PlanError, UsageRecord};

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
    /// The part of the model that the batch is for.
    pub part: u32,
    /// The most keys that a token attends to; 0 where nothing depends on them.
    pub keys: u64,
}

impl From<(u64, u64, u64, u64)> for PlanKey {
    /// From (tokens, batch, longest, pairs).
    fn from((tokens, batch, longest, pairs): (u64, u64, u64, u64)) -> Self {
        PlanKey {
            tokens,
            batch,
            longest,
            pairs,
            part: 0,
            keys: 0,
        }
    }
}

/// The plans of the batch shapes seen last, for one program and one [`Allocator`].
///
/// A plan is only as good as the chunks it was made for, and those come and go. So nothing is
/// handed out on the strength of the key alone: the allocator is asked whether every chunk of the
/// plan still exists in the size that it had, and it counts the request as one of its own, so that
/// chunks age and memory shrinks under a stream of hits as under a stream of plans. A plan
/// whose chunks have changed is dropped when it is met, and made again. A chunk that was released
/// and came back under the same id in the same size serves an old plan as well as a new one, since
/// a plan holds ids and offsets, and no addresses. An allocator that reuses no plans is asked for
/// one at every request, and nothing is kept.
#[derive(Clone, Debug)]
pub struct PlanCache {
    entries: LruCache<PlanKey, Entry>,
    n_requests: u64,
    n_hits: u64,
}

#[derive(Clone, Debug)]
struct Entry {
    plan: Arc<Plan>,
    /// What the allocator weighs memory against; see [`Allocator::reuse`].
    arena: u64,
}

impl PlanCache {
    /// A cache of at most `capacity` plans, which drops the one unused for longest.
    pub fn new(capacity: NonZeroUsize) -> Self {
        PlanCache {
            entries: LruCache::new(capacity),
            n_requests: 0,
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
        allocator: &mut dyn Allocator,
        records: impl FnOnce() -> Result<Vec<UsageRecord>, E>,
    ) -> Result<Arc<Plan>, E> {
        let key = key.into();
        self.n_requests += 1;
        if let Some(entry) = self.entries.get(&key) {
            if allocator.reuse(&entry.plan, entry.arena) {
                self.n_hits += 1;
                return Ok(Arc::clone(&entry.plan));
            }
            self.entries.pop(&key);
        }
        let plan = Arc::new(allocator.plan(&records()?)?);
        let Some(arena) = allocator.last_arena() else {
            return Ok(plan);
        };
        let entry = Entry {
            plan: Arc::clone(&plan),
            arena,
        };
        self.entries.put(key, entry);
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
        self.n_requests - self.n_hits
    }

    /// Forgets every plan.
    pub fn clear(&mut self) {
        self.entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::workloads::{self, BASE, Encoder};
    use crate::plan::{Caching, ChunkAllocator, ChunkPolicy, Gsoc, Turbo};

    const SMALL: Encoder = Encoder {
        n_layers: 2,
        ..BASE
    };

    fn key(length: u64) -> PlanKey {
        (length, 1, length, length * length).into()
    }

    fn cache(capacity: usize) -> PlanCache {
        PlanCache::new(NonZeroUsize::new(capacity).unwrap())
    }

    fn plan(cache: &mut PlanCache, allocator: &mut ChunkAllocator, length: u64) -> Arc<Plan> {
        let records = || Ok::<_, PlanError>(workloads::encoder(SMALL, 1, length).1);
        cache.plan(key(length), allocator, records).unwrap()
    }

    #[test]
    fn a_shape_seen_before_is_not_planned_again() {
        let (mut cache, mut allocator) = (cache(8), ChunkAllocator::default());
        let first = plan(&mut cache, &mut allocator, 100);
        let second = cache.plan(key(100), &mut allocator, || -> Result<_, PlanError> {
            panic!("the records of a shape seen before are not asked for")
        });
        assert!(Arc::ptr_eq(&first, &second.unwrap()));
        assert_eq!((cache.n_hits(), cache.n_misses()), (1, 1));
        let stats = allocator.last_request();
        assert_eq!(
            (stats.footprint, stats.newly_allocated),
            (first.footprint(), 0)
        );
    }

    #[test]
    fn a_plan_whose_chunks_were_released_is_made_again() {
        let (mut cache, mut allocator) = (cache(8), ChunkAllocator::default());
        plan(&mut cache, &mut allocator, 500);
        plan(&mut cache, &mut allocator, 10);
        allocator.release_all();
        let again = plan(&mut cache, &mut allocator, 10);
        assert!(allocator.is_current(&again));
        assert_eq!(again.chunks, allocator.held());
        assert_eq!(cache.n_hits(), 0);
    }

    #[test]
    fn hits_alone_let_memory_shrink() {
        let policy = ChunkPolicy {
            release_after: 5,
            ..ChunkPolicy::default()
        };
        let (mut cache, mut allocator) = (cache(8), ChunkAllocator::new(policy).unwrap());
        let large = plan(&mut cache, &mut allocator, 512).footprint();
        for _ in 0..4 {
            assert_eq!(plan(&mut cache, &mut allocator, 8).footprint(), large);
        }
        assert!(plan(&mut cache, &mut allocator, 8).footprint() < large);
        assert_eq!(allocator.last_request().released, large);
    }

    #[test]
    fn the_shape_unused_for_longest_is_forgotten() {
        let (mut cache, mut allocator) = (cache(2), ChunkAllocator::default());
        for length in [30, 20, 30, 10] {
            plan(&mut cache, &mut allocator, length);
        }
        assert_eq!((cache.len(), cache.n_hits()), (2, 1));
        plan(&mut cache, &mut allocator, 30);
        assert_eq!(cache.n_hits(), 2);
        plan(&mut cache, &mut allocator, 20);
        assert_eq!(cache.n_hits(), 2);
    }

    #[test]
    fn an_allocator_that_reuses_no_plans_plans_every_request() {
        let allocators: [Box<dyn Allocator>; 3] = [
            Box::new(Turbo::new()),
            Box::new(Gsoc::new()),
            Box::new(Caching::new()),
        ];
        for mut allocator in allocators {
            let mut cache = cache(8);
            for length in [100, 100, 7, 100] {
                let (_, records) = workloads::encoder(SMALL, 1, length);
                let give = || Ok::<_, PlanError>(records.clone());
                let plan = cache.plan(key(length), allocator.as_mut(), give).unwrap();
                plan.validate(&records).unwrap();
                assert_eq!(allocator.last_request().footprint, plan.footprint());
            }
            assert!(cache.is_empty(), "{}", allocator.name());
            assert_eq!((cache.n_hits(), cache.n_misses()), (0, 4));
        }
    }

    #[test]
    fn an_error_of_the_records_is_handed_on_and_not_remembered() {
        let (mut cache, mut allocator) = (cache(2), ChunkAllocator::default());
        let too_large = PlanError::TooLarge {
            record: 0,
            bytes: 1,
        };
        let found = cache.plan(key(9), &mut allocator, || Err(too_large.clone()));
        assert_eq!(found.unwrap_err(), too_large);
        assert!(cache.is_empty());
        plan(&mut cache, &mut allocator, 9);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn a_cached_plan_is_always_valid_on_the_chunks_that_are_held(
            lengths in prop::collection::vec((0usize..12, any::<bool>()), 1..80),
            release_after in 0u32..6,
            keep_limit in prop::sample::select(vec![0, 1 << 20, u64::MAX]),
            capacity in 1usize..12,
        ) {
            let policy = ChunkPolicy { default_chunk: 64 << 10, release_after, keep_limit, growth: 1.2 };
            let (mut cache, mut allocator) = (cache(capacity), ChunkAllocator::new(policy).unwrap());
            for (step, out_of_memory) in lengths {
                if out_of_memory && step == 0 {
                    allocator.release_all();
                }
                let length = 1 + (step * step * 4) as u64;
                let plan = plan(&mut cache, &mut allocator, length);
                prop_assert!(plan.validate(&workloads::encoder(SMALL, 1, length).1).is_ok());
                for (id, &bytes) in plan.chunks.iter().enumerate() {
                    prop_assert!(bytes == 0 || allocator.held()[id] == bytes);
                }
                prop_assert_eq!(allocator.last_request().held, allocator.held().iter().sum::<u64>());
                prop_assert!(cache.len() <= capacity);
            }
        }
    }
}
