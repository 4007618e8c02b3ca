//! Where the time of a step of one token for each sequence goes.

use super::{Executor, Parts, check_generating};
use crate::{
    engine::{
        Breakdown, Engine, EngineError,
        breakdown::{on_cpu, on_device},
    },
    kernels::cache::BLOCK,
    runtime::batch::{Batch, Past, Sources},
};

/// The sequences of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeStep {
    pub requests: usize,
    /// Sequences of each request, which read one source.
    pub beams: usize,
    /// Tokens of each source, where the model writes from one.
    pub source: usize,
    /// Tokens of each sequence before the step's.
    pub cached: usize,
}

impl Engine {
    /// Takes a step apart as [`Session::breakdown`](crate::Session::breakdown) does a run. What chooses the tokens is not in it.
    /// The cache has whatever its memory had before.
    ///
    /// # Errors
    /// Those of [`Engine::generator`], a step that the model's positions do not take, and those of a run.
    pub fn step_breakdown(
        &self,
        step: DecodeStep,
        warm_up: usize,
        runs: usize,
    ) -> Result<Breakdown, EngineError> {
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
        let mut generator = self.generator(past.blocks * self.program().block_bytes())?;
        let ids = (0..rows as u64).map(|row| self.limits().token_id(977 * row + 5));
        let batch = Batch::from_packed(ids.collect(), &vec![1; rows])?.with_past(past)?;
        let batch = batch.for_part(parts.map_or(0, |parts| parts.decode));
        batch.check(&self.limits())?;
        let (whole, parts) = match &mut generator.executor {
            Executor::Cpu(session, cache) => on_cpu(session, &batch, Some(cache), warm_up, runs)?,
            Executor::Cuda(session, cache) => {
                on_device(session, &batch, Some(cache), warm_up, runs)?
            }
        };
        Ok(Breakdown::of(&whole, parts))
    }
}
