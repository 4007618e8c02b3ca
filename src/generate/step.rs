//! Single decode steps, for measurements.

use super::{Executor, GenerateError, GenerationModel, Parts, check_generating};
use crate::{
    kernels::cache::BLOCK,
    runtime::batch::{Batch, Past, Sources},
};

/// Sizes of the batch of a decode step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeStep {
    pub requests: usize,
    /// Number of sequences of each request, which share one source.
    pub beams: usize,
    /// Number of tokens of each source, for encoder-decoder models.
    pub source: usize,
    /// Number of tokens of each sequence that are already in the cache.
    pub cached: usize,
}

impl GenerationModel<'_> {
    /// Returns the batch of a decode step, and an executor that can run it. The contents of the cache are undefined.
    pub(crate) fn decode_step(&self, step: DecodeStep) -> Result<(Executor, Batch), GenerateError> {
        check_generating(self.program())?;
        let parts = Parts::of(self.program());
        let mut blocks = 0u32;
        let mut slots = |positions: usize| {
            let first = blocks * BLOCK;
            blocks += positions.div_ceil(BLOCK as usize) as u32;
            first..first + positions as u32
        };
        let mut past = Past {
            sources: parts.map(|_| Sources::default()),
            ..Past::default()
        };
        let rows = step.requests * step.beams;
        for _ in 0..step.requests {
            if let (Some(parts), Some(sources)) = (parts, &mut past.sources) {
                let own = slots(parts.positions(step.source));
                for _ in 0..step.beams {
                    sources.lens.push(own.len() as u32);
                    sources.slots.extend(own.clone());
                }
            }
            for _ in 0..step.beams {
                past.cached.push(step.cached as u32);
                past.slots.extend(slots(step.cached + 1));
            }
        }
        past.blocks = u64::from(blocks);
        let generator = self.generator(past.blocks * self.program().block_bytes())?;
        let ids = (0..rows as u64).map(|row| self.limits.token_id(977 * row + 5));
        let batch = Batch::from_packed(ids.collect(), &vec![1; rows])?.with_past(past)?;
        let batch = batch.for_part(parts.map_or(0, |parts| parts.decode));
        batch.check(&self.limits)?;
        Ok((generator.executor, batch))
    }
}
