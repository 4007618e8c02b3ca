//! Places the intermediate tensors of a program for a batch.

use std::{num::NonZeroUsize, sync::Arc};

use crate::{
    plan::{Allocator, ChunkAllocator, Plan, PlanCache, PlanError, lower_bound},
    program::{Program, SizeOverflow},
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
}

/// What a batch needs, before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes of the chunks that the plan uses.
    pub chunks: u64,
    /// Largest sum of the sizes that are alive at one launch: no plan needs less.
    pub lower_bound: u64,
}

/// The chunk allocator of one session, with the plans of shapes seen before.
pub struct Planner {
    allocator: ChunkAllocator,
    cache: PlanCache,
}

impl Default for Planner {
    fn default() -> Self {
        Self {
            allocator: ChunkAllocator::default(),
            cache: PlanCache::new(REMEMBERED),
        }
    }
}

impl Planner {
    /// The plan for a batch; afterwards the owner of the chunks follows [`Planner::held`].
    pub fn plan(&mut self, program: &Program, e: &Extents) -> Result<Arc<Plan>, PlannerError> {
        self.cache.plan(
            (e.tokens, e.batch, e.longest, e.pairs),
            &mut self.allocator,
            || program.usage(e).map_err(PlannerError::from),
        )
    }

    /// Size of every chunk that is to exist, by chunk id; 0 where there is none.
    pub fn held(&self) -> &[u64] {
        self.allocator.held()
    }

    /// Gives all chunks up, for instance after an allocation failed.
    pub fn release_all(&mut self) {
        self.allocator.release_all();
        self.cache.clear();
    }

    /// What a batch would need of a session that holds nothing yet.
    pub fn footprint(program: &Program, e: &Extents) -> Result<Footprint, PlannerError> {
        let usage = program.usage(e)?;
        let plan = ChunkAllocator::default().plan(&usage)?;
        Ok(Footprint {
            chunks: plan.footprint(),
            lower_bound: lower_bound(&usage),
        })
    }
}
