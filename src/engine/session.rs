//! What runs an engine's batches, and their results.

use std::borrow::Cow;

use super::{EngineError, Padding, Pending, padding};
use crate::{
    program::Program,
    runtime::{
        GraphUse, MemoryUse, MemoryWork, Output,
        batch::{Batch, BatchError, Limits},
        cpu::CpuSession,
        cuda::{CudaSession, Timing},
    },
    tensor::{Extents, Symbol},
};

/// What one caller needs to run an [`Engine`](super::Engine). A run that fails leaves it usable.
pub struct Session {
    pub(super) limits: Limits,
    pub(super) padding: Padding,
    pub(super) backend: SessionBackend,
}

pub(super) enum SessionBackend {
    Cpu(Box<CpuSession>),
    Cuda(Box<CudaSession>),
}

impl Session {
    /// Runs a batch and returns the outputs that the engine was built for. Where the model knows the token that ends a sequence
    /// ([`Limits::end`]), tokens behind its first place are padding, and are left out.
    ///
    /// # Errors
    /// Those of [`submit`](Self::submit) and of [`Pending::wait`].
    pub fn run(&mut self, batch: &Batch) -> Result<Outputs, EngineError> {
        self.submit(batch)?.wait()
    }

    /// Gives a batch to the device and returns before it has run, so that the next one can be made ready, and submitted, while it
    /// runs: the device goes on with that at once. A CPU has run the batch when this returns, and so has an engine that keeps
    /// padding.
    ///
    /// # Errors
    /// A batch beyond the model's limits, tokens behind the end of a sequence where outputs have rows of tokens, memory that could not be had, and [`CudaError::InFlight`](crate::runtime::cuda::CudaError::InFlight) where two batches have been
    /// submitted and neither was waited for nor dropped.
    ///
    /// ```no_run
    /// # use gemmule::{Batch, Engine};
    /// # fn main() -> Result<(), gemmule::EngineError> {
    /// # let engine = Engine::builder("bert").checkpoint("all-MiniLM-L6-v2").build()?;
    /// # let batches: Vec<Batch> = Vec::new();
    /// let mut session = engine.session()?;
    /// let mut running = None;
    /// for batch in &batches {
    ///     let behind = session.submit(batch)?;
    ///     if let Some(done) = running.replace(behind) {
    ///         println!("{:?}", done.wait()?.get("sentence_embedding")?.shape);
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn submit(&mut self, batch: &Batch) -> Result<Pending, EngineError> {
        batch.check(&self.limits)?;
        let batch = &*self.ended(batch)?;
        let laid_out = padding::laid_out(batch, self.padding)?;
        let lens = batch.own_lens().to_vec();
        let mut outputs = match &mut self.backend {
            SessionBackend::Cpu(session) => session.run(&laid_out)?,
            SessionBackend::Cuda(session) => match self.padding {
                Padding::Removed => return Ok(Pending::running(session.submit(&laid_out)?, lens)),
                Padding::Kept => session.run(&laid_out)?,
            },
        };
        if self.padding == Padding::Kept {
            padding::remove(&mut outputs, self.program(), &laid_out);
        }
        Ok(Pending::done(Outputs { outputs, lens }))
    }

    /// The batch without what stands behind the ends of sequences, where outputs are of whole sequences alone.
    fn ended<'b>(&self, batch: &'b Batch) -> Result<Cow<'b, Batch>, BatchError> {
        let ended = batch.ended(self.limits.end)?;
        let program = self.program();
        let mut outputs = program.outputs.iter();
        let has_tokens = outputs.any(|(_, tensor)| {
            let n = program.tensors[*tensor].shape.elements();
            n.depends_on(Symbol::Tokens) || n.depends_on(Symbol::Pairs)
        });
        if let Cow::Owned(ended) = &ended
            && has_tokens
        {
            let mut lens = ended.lens().iter().zip(batch.lens()).enumerate();
            let longer = lens.find(|(_, (end, len))| end != len);
            if let Some((sequence, (&end, &len))) = longer {
                let (token, n) = (end - 1, len - end);
                return Err(BatchError::BehindEnd { sequence, token, n });
            }
        }
        Ok(ended)
    }

    /// Waits for the batch that was submitted first, where the session takes no other; its results are kept for whoever has it.
    pub(super) fn make_place(&mut self) {
        if let SessionBackend::Cuda(session) = &mut self.backend {
            session.make_place();
        }
    }

    /// Makes room on a CUDA device for batches of up to these extents, so that a batch in flight is never waited for because a
    /// larger one comes. On a CPU memory is taken as it is needed.
    ///
    /// # Errors
    /// Memory that could not be had, and extents beyond the declared maximum.
    pub fn reserve(&mut self, extents: &Extents) -> Result<(), EngineError> {
        match &mut self.backend {
            SessionBackend::Cpu(_) => Ok(()),
            SessionBackend::Cuda(session) => Ok(session.reserve(extents)?),
        }
    }

    /// Microseconds for which a CUDA device has nothing to do between a batch and the same batch behind it, for each of `runs`
    /// pairs; none on the CPU.
    ///
    /// # Errors
    /// Those of [`submit`](Self::submit) and of [`Pending::wait`].
    pub fn gaps(
        &mut self,
        batch: &Batch,
        warm_up: usize,
        runs: usize,
    ) -> Result<Vec<f32>, EngineError> {
        batch.check(&self.limits)?;
        let batch = &*padding::laid_out(batch, self.padding)?;
        match &mut self.backend {
            SessionBackend::Cpu(_) => Ok(Vec::new()),
            SessionBackend::Cuda(session) => Ok(session.gaps(batch, warm_up, runs)?),
        }
    }

    /// Times runs of a batch, in milliseconds: by CUDA events on a device, by the clock on the CPU.
    pub fn time(
        &mut self,
        batch: &Batch,
        warm_up: usize,
        runs: usize,
    ) -> Result<Timing, EngineError> {
        batch.check(&self.limits)?;
        let batch = &*padding::laid_out(batch, self.padding)?;
        match &mut self.backend {
            SessionBackend::Cuda(session) => Ok(session.time(batch, warm_up, runs)?),
            SessionBackend::Cpu(session) => {
                let mut timing = Timing::default();
                for i in 0..warm_up + runs {
                    let start = std::time::Instant::now();
                    session.run(batch)?;
                    if i >= warm_up {
                        timing.ms.push(start.elapsed().as_secs_f32() * 1e3);
                    }
                }
                Ok(timing)
            }
        }
    }

    fn program(&self) -> &Program {
        match &self.backend {
            SessionBackend::Cpu(session) => session.program(),
            SessionBackend::Cuda(session) => session.program(),
        }
    }

    /// Bytes that the session and its model hold.
    pub fn memory(&self) -> MemoryUse {
        match &self.backend {
            SessionBackend::Cpu(session) => session.memory(),
            SessionBackend::Cuda(session) => session.memory(),
        }
    }

    /// How often runs were replayed as CUDA graphs; zeros on the CPU.
    pub fn graph_use(&self) -> GraphUse {
        match &self.backend {
            SessionBackend::Cpu(_) => GraphUse::default(),
            SessionBackend::Cuda(session) => session.graph_use(),
        }
    }

    /// What managing the memory of the last run took; zeros before the first.
    pub fn memory_work(&self) -> MemoryWork {
        match &self.backend {
            SessionBackend::Cpu(session) => session.memory_work(),
            SessionBackend::Cuda(session) => session.memory_work(),
        }
    }
}

/// The results of a run, by name.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    pub(super) outputs: Vec<Output>,
    pub(super) lens: Vec<u32>,
}

impl Outputs {
    /// The output `name`: `[tokens, width]` for outputs per token, in packed order, or
    /// `[batch, width]`.
    pub fn get(&self, name: &str) -> Result<&Output, EngineError> {
        self.outputs
            .iter()
            .find(|o| o.name == name)
            .ok_or_else(|| EngineError::NoOutput {
                name: name.to_owned(),
                known: self.outputs.iter().map(|o| o.name.clone()).collect(),
            })
    }

    pub fn iter(&self) -> impl Iterator<Item = &Output> {
        self.outputs.iter()
    }

    /// The rows of sequence `sequence` in an output per token, row-major.
    pub fn sequence(&self, name: &str, sequence: usize) -> Result<&[f32], EngineError> {
        let output = self.get(name)?;
        let rows = output.shape.first().copied().unwrap_or(0) as usize;
        let width = output.values.len() / rows.max(1);
        let (first, n) = if rows == self.lens.len() && self.lens.iter().any(|&n| n != 1) {
            (sequence, 1)
        } else {
            let before = self.lens.iter().take(sequence).map(|&n| n as usize).sum();
            (before, self.lens.get(sequence).map_or(0, |&n| n as usize))
        };
        output
            .values
            .get(first * width..(first + n) * width)
            .filter(|_| n > 0)
            .ok_or(EngineError::NoSequence {
                sequence,
                n_sequences: self.lens.len(),
            })
    }
}
