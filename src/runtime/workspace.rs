//! The memory of the intermediate tensors of one session: the planner, and the chunks that follow
//! it.

use std::{sync::Arc, time::Duration, time::Instant};

use super::{Planner, PlannerError};
use crate::{
    plan::{Plan, RequestStats},
    program::Program,
    tensor::Extents,
};

/// What managing the memory of one run took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryWork {
    /// Bytes of the chunks that the plan uses, that were allocated and released for it, and that
    /// are held.
    pub request: RequestStats,
    /// Making the plan, or finding that of a shape seen before.
    pub planning: Duration,
    /// Freeing and allocating the chunks that differ from those of the run before.
    pub allocating: Duration,
}

/// Whoever has the memory of the chunks, on a host or a device.
pub(super) trait ChunkOwner {
    type Error;

    /// Frees and allocates so that the chunks have the sizes `held`, by chunk id; 0 means none.
    /// Frees first. Returns whether any chunk has changed.
    fn follow(&mut self, held: &[u64]) -> Result<bool, Self::Error>;

    /// Frees every chunk.
    fn clear(&mut self);

    /// Bytes of all chunks.
    fn bytes(&self) -> u64;
}

/// Why there is no room for a batch.
#[derive(Debug)]
pub(super) enum NoRoom<E> {
    Plan(PlannerError),
    /// Nothing is held any more, and the chunks, of `bytes` together, could not be had.
    Memory {
        bytes: u64,
        source: E,
    },
}

/// A planner with the chunks that it plans for.
pub(super) struct Workspace<C> {
    planner: Planner,
    chunks: C,
    work: MemoryWork,
}

impl<C: ChunkOwner> Workspace<C> {
    pub(super) fn new(planner: Planner, chunks: C) -> Self {
        Self {
            planner,
            chunks,
            work: MemoryWork::default(),
        }
    }

    /// Plans a batch and makes its chunks exist. Returns the plan, and whether any chunk has
    /// changed since the plan before.
    ///
    /// Where an allocation fails while chunks of earlier batches are held, all are given back and
    /// the batch is planned again: what it needs by itself may fit. Where that fails too nothing
    /// is held any more, so that a smaller batch has all of the memory.
    pub(super) fn make_room(
        &mut self,
        program: &Program,
        e: &Extents,
    ) -> Result<(Arc<Plan>, bool), NoRoom<C::Error>> {
        let held_before = self.chunks.bytes() > 0;
        self.work = MemoryWork::default();
        match self.try_room(program, e) {
            Err(NoRoom::Memory { .. }) if held_before => {
                let (plan, _) = self.try_room(program, e)?;
                Ok((plan, true))
            }
            result => result,
        }
    }

    fn try_room(
        &mut self,
        program: &Program,
        e: &Extents,
    ) -> Result<(Arc<Plan>, bool), NoRoom<C::Error>> {
        let plan = self.planner.plan(program, e).map_err(NoRoom::Plan)?;
        self.work.planning += self.planner.planning();
        let began = Instant::now();
        let followed = self.chunks.follow(self.planner.held());
        if followed.is_err() {
            self.release();
        }
        self.work.allocating += began.elapsed();
        self.work.request = self.planner.last_request();
        match followed {
            Ok(changed) => Ok((plan, changed)),
            Err(source) => Err(NoRoom::Memory {
                bytes: plan.footprint(),
                source,
            }),
        }
    }

    /// Gives all chunks back.
    pub(super) fn release(&mut self) {
        self.chunks.clear();
        self.planner.release_all();
    }

    pub(super) fn planner(&self) -> &Planner {
        &self.planner
    }

    pub(super) fn chunks(&self) -> &C {
        &self.chunks
    }

    /// The memory management of the last batch.
    pub(super) fn work(&self) -> MemoryWork {
        self.work
    }
}

#[cfg(test)]
mod tests;
