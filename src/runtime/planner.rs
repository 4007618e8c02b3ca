//! Plans the memory of a program's intermediate tensors for a batch.

use std::{
    num::NonZeroUsize,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    plan::{
        Allocator, Caching, ChunkAllocator, ChunkPolicy, Gsoc, Maximum, Plan, PlanCache, PlanError,
        PlanKey, RequestStats, Turbo, lower_bound,
    },
    program::{LaunchError, Program, SizeOverflow},
    tensor::Extents,
};

/// Number of shapes whose plans are cached.
const CACHED_PLANS: NonZeroUsize = NonZeroUsize::new(256).expect("256 is not zero");

#[derive(Debug, thiserror::Error)]
pub enum PlannerError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Size(#[from] SizeOverflow),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(
        "the batch of {} is beyond the declared maximum of {}; declare a larger maximum, or send a smaller batch",
        in_words(batch),
        in_words(maximum)
    )]
    BeyondMaximum {
        batch: Box<Extents>,
        maximum: Box<Extents>,
    },
}

fn in_words(e: &Extents) -> String {
    format!(
        "{} sequence{}, {} tokens, {} in the longest, {} pairs of tokens",
        e.batch,
        if e.batch == 1 { "" } else { "s" },
        e.tokens,
        e.longest,
        e.pairs
    )
}

/// Allocator for the intermediate tensors of a session.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AllocatorChoice {
    /// Chunks that persist between requests (TurboTransformers 4.2, with the changes listed at [`ChunkAllocator`]).
    Chunk(ChunkPolicy),
    /// TurboTransformers 4.2 without changes.
    Turbo,
    /// One arena, reallocated for every request (Pisarchyk and Lee 2020).
    Gsoc,
    /// Two pools with best fit, reused in operator order, like the caching allocator of PyTorch.
    Caching,
    /// Memory for the largest batch, planned once (LightSeq 2.3). A batch that has more sequences, tokens or token pairs than this maximum,
    /// or a longer sequence, is an error.
    Maximum(Extents),
}

impl Default for AllocatorChoice {
    fn default() -> Self {
        Self::Chunk(ChunkPolicy::default())
    }
}

impl AllocatorChoice {
    /// Creates an empty allocator for a session of `program`.
    ///
    /// # Errors
    /// Returns an error if the chunk policy is invalid, or if the tensor sizes of the maximum batch overflow.
    pub fn allocator(&self, program: &Program) -> Result<Box<dyn Allocator>, PlannerError> {
        Ok(match self {
            Self::Chunk(policy) => Box::new(ChunkAllocator::new(*policy)?),
            Self::Turbo => Box::new(Turbo::new()),
            Self::Gsoc => Box::new(Gsoc::new()),
            Self::Caching => Box::new(Caching::new()),
            Self::Maximum(e) => Box::new(Maximum::new(&program.max_usage(e)?)?),
        })
    }

    /// Returns the declared maximum, if any.
    pub fn maximum(&self) -> Option<&Extents> {
        match self {
            Self::Maximum(maximum) => Some(maximum),
            _ => None,
        }
    }

    /// Returns an error if the batch exceeds the declared maximum.
    fn check(&self, batch: &Extents) -> Result<(), PlannerError> {
        match self.maximum() {
            Some(m)
                if batch.tokens > m.tokens
                    || batch.batch > m.batch
                    || batch.longest > m.longest
                    || batch.pairs > m.pairs =>
            {
                Err(PlannerError::BeyondMaximum {
                    batch: Box::new(*batch),
                    maximum: Box::new(*m),
                })
            }
            _ => Ok(()),
        }
    }
}

/// Memory requirement of a batch, computed before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes of the chunks that the plan uses.
    pub chunks: u64,
    /// Lower bound on the bytes of any plan for the extents of the batch: the maximum, over all launches, of the total size of the tensors
    /// that are live at the launch.
    pub lower_bound: u64,
}

/// Allocator of one session, with cached plans of earlier shapes.
pub struct Planner {
    choice: AllocatorChoice,
    allocator: Box<dyn Allocator>,
    cache: PlanCache,
    planning: Duration,
}

impl Default for Planner {
    /// Creates a planner with the chunk allocator.
    fn default() -> Self {
        Self::with(
            AllocatorChoice::default(),
            Box::new(ChunkAllocator::default()),
        )
    }
}

impl Planner {
    /// Creates an empty planner for sessions of `program`.
    ///
    /// # Errors
    /// Returns the errors of [`AllocatorChoice::allocator`].
    pub fn new(program: &Program, choice: &AllocatorChoice) -> Result<Self, PlannerError> {
        Ok(Self::with(*choice, choice.allocator(program)?))
    }

    fn with(choice: AllocatorChoice, allocator: Box<dyn Allocator>) -> Self {
        Self {
            choice,
            allocator,
            cache: PlanCache::new(CACHED_PLANS),
            planning: Duration::ZERO,
        }
    }

    /// Returns the plan of a batch with the extents `e`. The caller must then resize the chunks to the sizes that [`Planner::held`]
    /// returns.
    ///
    /// # Errors
    /// Returns an error if the batch exceeds the declared maximum or its sizes overflow.
    pub fn plan(&mut self, program: &Program, e: &Extents) -> Result<Arc<Plan>, PlannerError> {
        let began = Instant::now();
        self.choice.check(e)?;
        let plan = self.cache.plan(
            PlanKey {
                part: e.part,
                keys: e.max_keys(),
                ..(e.tokens, e.batch, e.longest, e.pairs).into()
            },
            self.allocator.as_mut(),
            || program.usage(e).map_err(PlannerError::from),
        )?;
        self.planning = began.elapsed();
        Ok(plan)
    }

    /// Returns the allocator that the planner uses.
    pub fn choice(&self) -> &AllocatorChoice {
        &self.choice
    }

    /// Returns the required size of every chunk in bytes, by chunk id; 0 if the chunk does not exist.
    pub fn held(&self) -> &[u64] {
        self.allocator.held()
    }

    /// Returns the memory statistics of the batch that was planned last, in bytes.
    pub fn last_request(&self) -> RequestStats {
        self.allocator.last_request()
    }

    /// Returns the time that the last call of [`Planner::plan`] took, including the lookup in the cache of plans.
    pub fn planning(&self) -> Duration {
        self.planning
    }

    /// Releases all chunks, for instance after a failed allocation.
    pub fn release_all(&mut self) {
        self.allocator.release_all();
        self.cache.clear();
    }

    /// Returns the memory that a new session needs for `batch` if it plans for the extents of `bucket`.
    ///
    /// # Errors
    /// Returns the errors of [`Planner::new`] and [`Planner::plan`].
    pub fn footprint(
        program: &Program,
        choice: &AllocatorChoice,
        batch: &Extents,
        bucket: &Extents,
    ) -> Result<Footprint, PlannerError> {
        choice.check(batch)?;
        let plan = choice.allocator(program)?.plan(&program.usage(bucket)?)?;
        Ok(Footprint {
            chunks: plan.footprint(),
            lower_bound: lower_bound(&program.usage(batch)?),
        })
    }
}
