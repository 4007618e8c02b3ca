//! Memory for the intermediate tensors of one session: a planner, and the chunks that it plans for.

use std::{sync::Arc, time::Duration, time::Instant};

use super::{Planner, PlannerError};
use crate::{
    plan::{Plan, RequestStats},
    program::Program,
    tensor::Extents,
};

/// Cost of memory management for one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryWork {
    /// Bytes of the chunks that the plan uses, of the chunks that were allocated and released for the plan, and of all chunks of the
    /// session.
    pub request: RequestStats,
    /// Time to make the plan, or to look it up in the cache.
    pub planning: Duration,
    /// Time to free and allocate the chunks that changed since the previous run.
    pub allocating: Duration,
}

/// Owner of the chunks' memory, on the host or on a device.
pub(super) trait ChunkOwner {
    type Error;

    /// Frees and then allocates chunks, so that the chunk with id `i` has `held[i]` bytes. The size 0 means no chunk. Returns whether any
    /// chunk has changed.
    fn follow(&mut self, held: &[u64]) -> Result<bool, Self::Error>;

    /// Frees every chunk.
    fn clear(&mut self);

    /// Bytes of all chunks.
    fn bytes(&self) -> u64;
}

/// Error of [`Workspace::make_room`].
#[derive(Debug)]
pub(super) enum NoRoom<E> {
    Plan(PlannerError),
    /// The allocation of chunks failed, and all chunks have been released. `bytes` is the total size that was needed.
    Memory {
        bytes: u64,
        source: E,
    },
}

/// A planner and the chunks that it plans for.
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

    /// Plans a batch and allocates its chunks. Returns the plan, and whether any chunk has changed since the previous plan.
    ///
    /// If an allocation fails while chunks of earlier batches are held, all chunks are released and the batch is planned again. The batch
    /// may then fit, because all memory is free. If the second attempt fails, no chunk is held, so a smaller batch can use all of the
    /// memory.
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

    /// Releases all chunks.
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

    /// Returns the cost of memory management for the last batch.
    pub(super) fn work(&self) -> MemoryWork {
        self.work
    }
}

#[cfg(test)]
mod tests;
