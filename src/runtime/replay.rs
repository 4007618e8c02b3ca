//! Decides which runs share a CUDA graph.

use crate::{program::Buckets, program::Program, tensor::Extents};

use super::{AllocatorChoice, batch::Batch};

/// Determines which batches share a CUDA graph in a CUDA session. Runs that replay a graph and runs that are launched kernel by kernel have
/// bitwise identical results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GraphChoice {
    /// One graph per [bucket](Buckets), to which the sizes of a batch are rounded up. The batch is planned and launched for the rounded
    /// sizes. Padded batches and batches under [`AllocatorChoice::Maximum`] are not rounded up.
    #[default]
    Buckets,
    /// One graph per exact shape: equal numbers of tokens, sequences and token pairs, and equal maximum length.
    Exact,
    /// No graphs.
    Off,
}

impl GraphChoice {
    /// Returns the buckets to which a session's batches are rounded up.
    pub fn buckets(self, program: &Program, allocator: &AllocatorChoice) -> Buckets {
        match self {
            // With a declared maximum, no batch is rounded up. Only the batch's own extents are checked against the maximum, so the extents
            // of its bucket could exceed it.
            Self::Buckets if allocator.maximum().is_none() => Buckets::of(program),
            _ => Buckets::none(),
        }
    }

    /// Returns the extents for which a CUDA session plans and launches a batch.
    pub fn planned_for(
        self,
        program: &Program,
        allocator: &AllocatorChoice,
        batch: &Batch,
    ) -> Extents {
        extents_of(&self.buckets(program, allocator), batch)
    }
}

/// Graph statistics of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphUse {
    /// Number of runs that replayed an existing graph.
    pub replayed: u64,
    /// Number of runs that were launched kernel by kernel.
    pub launched: u64,
    /// Number of captured graphs. A graph is captured from a launched run, while the device executes this run.
    pub captured: u64,
    /// Number of graphs that the session holds.
    pub kept: usize,
}

/// Returns the extents for which a batch is planned and launched. A padded batch is not rounded up.
pub(super) fn extents_of(buckets: &Buckets, batch: &Batch) -> Extents {
    match batch.padded() {
        Some(_) => batch.extents(),
        None => buckets.of_batch(&batch.extents()),
    }
}
