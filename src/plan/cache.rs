//! A cache of plans for recurring batch shapes.

use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;

use super::{Allocator, Plan, PlanError, UsageRecord};

/// The dimensions of a batch that the size of a tensor may depend on. Batches with equal keys must
/// have equal usage records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanKey {
    /// Total number of tokens in the batch.
    pub tokens: u64,
    /// Number of sequences.
    pub batch: u64,
    /// Number of tokens of the longest sequence.
    pub longest: u64,
    /// Pairs of tokens of the same sequence: the sum of the squared lengths.
    pub pairs: u64,
    /// Index of the part of the model that the batch runs, such as the encoder or the decoder.
    pub part: u32,
    /// Maximum number of keys that a token attends to; 0 if no size depends on it.
    pub keys: u64,
}

impl From<(u64, u64, u64, u64)> for PlanKey {
    /// Converts from (tokens, batch, longest, pairs).
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

/// An LRU cache of plans by batch shape, for one program and one [`Allocator`].
///
/// A plan contains chunk ids and offsets. It is valid as long as all its chunks exist with the same sizes. Each lookup checks this with
/// [`Allocator::reuse`], which also counts the request, so that unused chunks age even if every lookup is a hit. A plan whose chunks have
/// changed is dropped, and the request is planned again. If an allocator does not reuse plans, nothing is stored.
#[derive(Clone, Debug)]
pub struct PlanCache {
    entries: LruCache<PlanKey, Entry>,
    n_requests: u64,
    n_hits: u64,
}

#[derive(Clone, Debug)]
struct Entry {
    plan: Arc<Plan>,
    /// Value of [`Allocator::last_arena`] after the plan was made. It is passed to [`Allocator::reuse`].
    arena: u64,
}

impl PlanCache {
    /// Creates a cache of at most `capacity` plans with LRU eviction.
    pub fn new(capacity: NonZeroUsize) -> Self {
        PlanCache {
            entries: LruCache::new(capacity),
            n_requests: 0,
            n_hits: 0,
        }
    }

    /// Returns the plan for the batch shape `key`: the cached plan if it is still valid, otherwise a new plan for the usage records that
    /// `records` returns. In both cases, `allocator` counts the request, and the caller must then free and allocate chunks to match
    /// [`held`](Allocator::held).
    ///
    /// # Errors
    /// Returns an error if `records` or [`Allocator::plan`] returns one.
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

    /// Returns the number of cached plans, including those that are no longer valid.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the number of requests answered from the cache.
    pub fn n_hits(&self) -> u64 {
        self.n_hits
    }

    /// Returns the number of requests that were planned or whose planning failed.
    pub fn n_misses(&self) -> u64 {
        self.n_requests - self.n_hits
    }

    /// Removes every plan.
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
    fn a_repeated_shape_is_not_planned_again() {
        let (mut cache, mut allocator) = (cache(8), ChunkAllocator::default());
        let first = plan(&mut cache, &mut allocator, 100);
        let second = cache.plan(key(100), &mut allocator, || -> Result<_, PlanError> {
            panic!("the records of a cached shape are not needed")
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
    fn cache_hits_let_memory_shrink() {
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
    fn the_least_recently_used_shape_is_evicted() {
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
    fn an_allocator_without_reuse_plans_every_request() {
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
    fn an_error_of_the_records_is_returned_and_not_cached() {
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
