//! Sessions, which run an engine's batches, and their outputs.

use std::borrow::Cow;

use super::{EngineError, Outputs, Padding, Pending, padding};
use crate::{
    ops::BatchInput,
    program::Program,
    runtime::{
        DeviceOutput, GraphUse, MemoryUse, MemoryWork,
        batch::{Batch, BatchError, Limits},
        cpu::CpuSession,
        cuda::{CudaSession, Timing},
    },
    tensor::{Extents, Symbol},
};

/// Runs an [`Engine`](super::Engine)'s batches for one caller. It stays usable after a failed run.
pub struct Session {
    pub(crate) limits: Limits,
    pub(crate) padding: Padding,
    pub(crate) backend: SessionBackend,
}

pub(crate) enum SessionBackend {
    Cpu(Box<CpuSession>),
    Cuda(Box<CudaSession>),
}

impl Session {
    /// Runs a batch and returns the outputs that the engine was built for. If the model has an end-of-sequence token ([`Limits::end`]),
    /// tokens of a sequence after the first such token are padding and are left out.
    ///
    /// # Errors
    /// Returns the errors of [`submit`](Self::submit) and [`Pending::wait`].
    pub fn run(&mut self, batch: &Batch) -> Result<Outputs, EngineError> {
        self.submit(batch)?.wait()
    }

    /// Enqueues a batch on the device and returns before it has run. The caller can then prepare and submit the next batch, so that the
    /// device is never idle between batches. On a CPU, and in an engine that keeps padding, the batch has run when this returns.
    ///
    /// # Errors
    /// Returns an error if the batch exceeds the model's limits, or if memory cannot be allocated. Tokens after a sequence's
    /// end-of-sequence token are an error if an output has values for each token or each pair of tokens. Returns
    /// [`CudaError::InFlight`](crate::runtime::cuda::CudaError::InFlight) if two submitted batches were neither waited for nor dropped.
    ///
    /// ```no_run
    /// # use gemmule::{Batch, Engine};
    /// # fn main() -> Result<(), gemmule::EngineError> {
    /// # let engine = Engine::builder("bert").checkpoint("all-MiniLM-L6-v2").build()?;
    /// # let batches: Vec<Batch> = Vec::new();
    /// let mut session = engine.session()?;
    /// let mut running = None;
    /// for batch in &batches {
    ///     let next = session.submit(batch)?;
    ///     if let Some(done) = running.replace(next) {
    ///         println!("{:?}", done.wait()?.get("sentence_embedding")?.shape);
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn submit(&mut self, batch: &Batch) -> Result<Pending, EngineError> {
        let batch = &*self.checked(batch)?;
        let laid_out = padding::laid_out(batch, self.padding)?;
        let lens = batch.own_lens().to_vec();
        let mut outputs = match &mut self.backend {
            SessionBackend::Cpu(session) => session.run(&laid_out)?,
            SessionBackend::Cuda(session) => match self.padding {
                Padding::Removed | Padding::Expanded => {
                    return Ok(Pending::running(session.submit(&laid_out)?, lens));
                }
                Padding::Kept => session.run(&laid_out)?,
            },
        };
        if self.padding == Padding::Kept {
            padding::remove(&mut outputs, self.program(), &laid_out);
        }
        Ok(Pending::done(Outputs { outputs, lens }))
    }

    /// Runs a batch and leaves its outputs in the memory of the device that computed them: on a CUDA device in the storage type of the
    /// model, and on the CPU in f32. The device has finished the batch when this method returns. The values are not checked for NaN.
    ///
    /// # Errors
    /// Returns the errors of [`submit`](Self::submit), driver errors, and an error if the engine keeps padding
    /// ([`Padding::Kept`]).
    pub fn run_on_device(&mut self, batch: &Batch) -> Result<Vec<DeviceOutput>, EngineError> {
        if self.padding == Padding::Kept {
            return Err(EngineError::PaddedOutputs);
        }
        let batch = &*self.checked(batch)?;
        let laid_out = padding::laid_out(batch, self.padding)?;
        match &mut self.backend {
            SessionBackend::Cpu(session) => {
                let outputs = session.run(&laid_out)?;
                Ok(outputs.into_iter().map(DeviceOutput::from).collect())
            }
            SessionBackend::Cuda(session) => Ok(session.run_on_device(&laid_out)?),
        }
    }

    /// Calls [`checked`] with the limits and the program of this session.
    pub(super) fn checked<'b>(&self, batch: &'b Batch) -> Result<Cow<'b, Batch>, BatchError> {
        checked(batch, &self.limits, self.program())
    }

    /// If the session cannot accept another batch, waits for the first submitted batch. The results of that batch are kept for its
    /// [`Pending`].
    pub(crate) fn make_place(&mut self) {
        if let SessionBackend::Cuda(session) = &mut self.backend {
            session.make_place();
        }
    }

    /// Reserves memory on a CUDA device for batches of up to `extents`. Memory is only allocated when no batch is in flight. Without a
    /// reservation, a batch that needs more memory therefore waits until the batch in flight has ended. Does nothing on a CPU, where memory
    /// is allocated when it is needed.
    ///
    /// # Errors
    /// Returns an error if memory cannot be allocated, or if the extents exceed the declared maximum.
    pub fn reserve(&mut self, extents: &Extents) -> Result<(), EngineError> {
        match &mut self.backend {
            SessionBackend::Cpu(_) => Ok(()),
            SessionBackend::Cuda(session) => Ok(session.reserve(extents)?),
        }
    }

    /// Submits the batch repeatedly, and returns the idle times of a CUDA device between consecutive runs, in microseconds. There is one
    /// idle time for each of `runs` pairs of consecutive runs; `warm_up` further pairs come first and are discarded. Returns an empty
    /// vector on the CPU.
    ///
    /// # Errors
    /// Returns the errors of [`submit`](Self::submit) and [`Pending::wait`].
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

    /// Runs a batch `warm_up + runs` times, and returns the milliseconds of each of the last `runs` runs. Times are measured with CUDA
    /// events on a GPU, and with the system clock on the CPU.
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

    /// Returns the number of bytes of memory that the session and its model hold.
    pub fn memory(&self) -> MemoryUse {
        match &self.backend {
            SessionBackend::Cpu(session) => session.memory(),
            SessionBackend::Cuda(session) => session.memory(),
        }
    }

    /// Returns how often runs were replayed as CUDA graphs; zeros on the CPU.
    pub fn graph_use(&self) -> GraphUse {
        match &self.backend {
            SessionBackend::Cpu(_) => GraphUse::default(),
            SessionBackend::Cuda(session) => session.graph_use(),
        }
    }

    /// Returns the cost of memory management in the last run; zeros before the first run.
    pub fn memory_work(&self) -> MemoryWork {
        match &self.backend {
            SessionBackend::Cpu(session) => session.memory_work(),
            SessionBackend::Cuda(session) => session.memory_work(),
        }
    }
}

/// Checks that a session accepts a batch, and removes the tokens after each end-of-sequence token.
pub(super) fn checked<'b>(
    batch: &'b Batch,
    limits: &Limits,
    program: &Program,
) -> Result<Cow<'b, Batch>, BatchError> {
    batch.check(limits)?;
    check_left_out(batch, program)?;
    ended(batch, limits, program)
}

/// Returns an error if the batch leaves tokens of a prompt out of pooling, but an output pools all tokens.
fn check_left_out(batch: &Batch, program: &Program) -> Result<(), BatchError> {
    if batch.left_out().is_none() || program.reads(BatchInput::PooledTokens) {
        return Ok(());
    }
    let mut outputs = program.outputs.iter();
    let pools = outputs.any(|(_, tensor)| {
        let n = program.tensors[*tensor].shape.elements();
        !n.depends_on(Symbol::Tokens)
    });
    match pools {
        true => Err(BatchError::PoolsAll),
        false => Ok(()),
    }
}

/// Removes the tokens after each end-of-sequence token. Such tokens are an error if an output has values for each token or each pair of
/// tokens.
fn ended<'b>(
    batch: &'b Batch,
    limits: &Limits,
    program: &Program,
) -> Result<Cow<'b, Batch>, BatchError> {
    let ended = batch.ended(limits.end)?;
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
