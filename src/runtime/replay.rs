//! Which runs share a CUDA graph.

use crate::{program::Buckets, program::Program, tensor::Extents};

use super::{AllocatorChoice, batch::Batch};

/// What a session on a CUDA device replays as a graph instead of launching kernel by kernel. Results are the
/// same bit for bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GraphChoice {
    /// Batches of one [bucket](Buckets): they are planned and launched for its sizes. Batches that come
    /// padded, and those under [`AllocatorChoice::Maximum`], are their own buckets.
    #[default]
    Buckets,
    /// Batches of one shape: the same tokens, sequences, longest sequence and pairs of tokens.
    Exact,
    /// Nothing.
    Off,
}

impl GraphChoice {
    /// The buckets that a session's batches are rounded up to.
    pub fn buckets(self, program: &Program, allocator: &AllocatorChoice) -> Buckets {
        match self {
            // Whether a batch is within the declared maximum does not depend on its bucket.
            Self::Buckets if allocator.maximum().is_none() => Buckets::of(program),
            _ => Buckets::none(),
        }
    }

    /// The extents that a session on a CUDA device plans and launches a batch for.
    pub fn planned_for(
        self,
        program: &Program,
        allocator: &AllocatorChoice,
        batch: &Batch,
    ) -> Extents {
        extents_of(&self.buckets(program, allocator), batch)
    }
}

/// How often a session has replayed a graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphUse {
    /// Runs that replayed a graph made before.
    pub replayed: u64,
    /// Runs that were launched kernel by kernel.
    pub launched: u64,
    /// Graphs that were made, each of a run that was launched, while the device was at work on it.
    pub captured: u64,
    /// Graphs that are held.
    pub kept: usize,
}

/// What a batch that comes padded, or not, is planned and launched for.
pub(super) fn extents_of(buckets: &Buckets, batch: &Batch) -> Extents {
    match batch.padded() {
        Some(_) => batch.extents(),
        None => buckets.of_batch(&batch.extents()),
    }
}
