//! Places the intermediate tensors of a program for a batch.

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

/// Shapes whose plans are kept.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(256).expect("256 is not zero");

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

/// Which allocator places the intermediate tensors of a session.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AllocatorChoice {
    /// Chunks that stay from one request to the next (TurboTransformers 4.2, with the changes that
    /// [`ChunkAllocator`] lists).
    Chunk(ChunkPolicy),
    /// TurboTransformers 4.2 to the letter.
    Turbo,
    /// One arena, made anew for every request (Pisarchyk and Lee 2020).
    Gsoc,
    /// Size bins and reuse in operator order, as frameworks without a planner do.
    Caching,
    /// Memory for the largest batch, planned once (LightSeq 2.3). A batch with more sequences,
    /// tokens, or pairs of tokens than these, or a longer one, is an error.
    Maximum(Extents),
}

impl Default for AllocatorChoice {
    fn default() -> Self {
        Self::Chunk(ChunkPolicy::default())
    }
}

impl AllocatorChoice {
    /// An allocator for a session of `program`, which holds nothing yet.
    ///
    /// # Errors
    /// A chunk policy that cannot be, or a maximum whose sizes are beyond what is planned for.
    pub fn allocator(&self, program: &Program) -> Result<Box<dyn Allocator>, PlannerError> {
        Ok(match self {
            Self::Chunk(policy) => Box::new(ChunkAllocator::new(*policy)?),
            Self::Turbo => Box::new(Turbo::new()),
            Self::Gsoc => Box::new(Gsoc::new()),
            Self::Caching => Box::new(Caching::new()),
            Self::Maximum(e) => Box::new(Maximum::new(&program.most_usage(e)?)?),
        })
    }

    /// The declared maximum, where there is one.
    pub fn maximum(&self) -> Option<&Extents> {
        match self {
            Self::Maximum(maximum) => Some(maximum),
            _ => None,
        }
    }

    /// Refuses a batch beyond the declared maximum.
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

/// What a batch needs, before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes of the chunks that the plan uses.
    pub chunks: u64,
    /// Largest sum of the sizes of the batch itself that are alive at one launch: no plan needs less.
    pub lower_bound: u64,
}

/// The allocator of one session, with the plans of shapes seen before.
pub struct Planner {
    choice: AllocatorChoice,
    allocator: Box<dyn Allocator>,
    cache: PlanCache,
    planning: Duration,
}

impl Default for Planner {
    /// With the chunk allocator.
    fn default() -> Self {
        Self::with(
            AllocatorChoice::default(),
            Box::new(ChunkAllocator::default()),
        )
    }
}

impl Planner {
    /// A planner for sessions of `program`, which holds nothing yet.
    ///
    /// # Errors
    /// Those of [`AllocatorChoice::allocator`].
    pub fn new(program: &Program, choice: &AllocatorChoice) -> Result<Self, PlannerError> {
        Ok(Self::with(*choice, choice.allocator(program)?))
    }

    fn with(choice: AllocatorChoice, allocator: Box<dyn Allocator>) -> Self {
        Self {
            choice,
            allocator,
            cache: PlanCache::new(REMEMBERED),
            planning: Duration::ZERO,
        }
    }

    /// The plan for a batch; afterwards the owner of the chunks follows [`Planner::held`].
    ///
    /// # Errors
    /// A batch beyond the declared maximum, or sizes beyond what is planned for.
    pub fn plan(&mut self, program: &Program, e: &Extents) -> Result<Arc<Plan>, PlannerError> {
        let began = Instant::now();
        self.choice.check(e)?;
        let plan = self.cache.plan(
            PlanKey {
                part: e.part,
                keys: e.most_keys(),
                ..(e.tokens, e.batch, e.longest, e.pairs).into()
            },
            self.allocator.as_mut(),
            || program.usage(e).map_err(PlannerError::from),
        )?;
        self.planning = began.elapsed();
        Ok(plan)
    }

    /// Which allocator it plans with.
    pub fn choice(&self) -> &AllocatorChoice {
        &self.choice
    }

    /// Size of every chunk that is to exist, by chunk id; 0 where there is none.
    pub fn held(&self) -> &[u64] {
        self.allocator.held()
    }

    /// The cost in bytes of the last batch that was planned.
    pub fn last_request(&self) -> RequestStats {
        self.allocator.last_request()
    }

    /// How long the last plan took, or finding that of a shape seen before.
    pub fn planning(&self) -> Duration {
        self.planning
    }

    /// Gives all chunks up, for instance after an allocation failed.
    pub fn release_all(&mut self) {
        self.allocator.release_all();
        self.cache.clear();
    }

    /// What a batch would need of a session that holds nothing yet, and that plans it for the extents of
    /// its `bucket`.
    ///
    /// # Errors
    /// Those of [`Planner::new`] and [`Planner::plan`].
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
