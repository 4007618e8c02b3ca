//! Time breakdown of a run.

use std::time::{Duration, Instant};

use crate::{
    engine::{Engine, EngineError, Session, SessionBackend, laid_out},
    generate::{DecodeStep, Executor},
    kernels::{Class, KernelSpec},
    runtime::{
        batch::Batch,
        cpu::{CpuCache, CpuSession},
        cuda::{CudaCache, CudaSession, Part, Timing},
    },
};

/// Time of a run and of its parts (ByteTransformer, figure 3).
#[derive(Clone, Debug, PartialEq)]
pub struct Breakdown {
    /// Median time of a whole run in milliseconds. On a device, it does not include the upload of the batch.
    pub whole_ms: f32,
    /// One share for each of [`Class::ALL`], in that order.
    pub shares: Vec<Share>,
}

/// Time of all launches of one class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    pub class: Class,
    /// Median time of all launches of the class, in milliseconds.
    pub ms: f32,
}

impl Breakdown {
    /// Returns the sum over all classes, in milliseconds. The difference from [`whole_ms`](Self::whole_ms) is the overhead or
    /// the overlap of separate launches.
    pub fn sum_ms(&self) -> f32 {
        self.shares.iter().map(|s| s.ms).sum()
    }
}

impl Engine {
    /// Measures a decode step by kernel class, as [`Session::breakdown`] measures a run.
    ///
    /// # Errors
    /// Returns an error if the engine does not generate, or if memory cannot be allocated.
    pub fn step_breakdown(
        &self,
        step: DecodeStep,
        warm_up: usize,
        runs: usize,
    ) -> Result<Breakdown, EngineError> {
        let (mut executor, batch) = self.generation_model().decode_step(step)?;
        let (whole, parts) = match &mut executor {
            Executor::Cpu(session, cache) => on_cpu(session, &batch, Some(cache), warm_up, runs)?,
            Executor::Cuda(session, cache) => {
                on_device(session, &batch, Some(cache), warm_up, runs)?
            }
        };
        Ok(Breakdown::of(&whole, parts))
    }
}

impl Session {
    /// Measures a run of a batch by kernel class. A device replays the launches of one class at a time ([`CudaSession::time_parts`]). On
    /// the CPU, each step of a run is timed. Medians are over `runs` runs after `warm_up` warm-up runs.
    pub fn breakdown(
        &mut self,
        batch: &Batch,
        warm_up: usize,
        runs: usize,
    ) -> Result<Breakdown, EngineError> {
        batch.check(&self.limits)?;
        let batch = &*laid_out(batch, self.padding)?;
        let (whole, parts) = match &mut self.backend {
            SessionBackend::Cuda(session) => on_device(session, batch, None, warm_up, runs)?,
            SessionBackend::Cpu(session) => on_cpu(session, batch, None, warm_up, runs)?,
        };
        Ok(Breakdown::of(&whole, parts))
    }
}

impl Breakdown {
    /// Creates a breakdown from the timings of whole runs and of each class.
    pub(super) fn of(whole: &Timing, parts: Vec<Timing>) -> Self {
        let share = |(class, timing): (Class, Timing)| Share {
            class,
            ms: timing.median(),
        };
        Self {
            whole_ms: whole.median(),
            shares: Class::ALL.into_iter().zip(parts).map(share).collect(),
        }
    }
}

pub(super) fn on_device(
    session: &mut CudaSession,
    batch: &Batch,
    cache: Option<&mut CudaCache>,
    warm_up: usize,
    runs: usize,
) -> Result<(Timing, Vec<Timing>), EngineError> {
    let holds =
        Class::ALL.map(|class| move |kernel: &KernelSpec| kernel.as_kernel().class() == class);
    let all: Part<'_> = &|_| true;
    let parts: Vec<Part<'_>> = std::iter::once(all)
        .chain(holds.iter().map(|part| part as Part<'_>))
        .collect();
    let mut timings = session.time_parts(batch, cache, &parts, warm_up, runs)?;
    Ok((timings.remove(0), timings))
}

pub(super) fn on_cpu(
    session: &mut CpuSession,
    batch: &Batch,
    mut cache: Option<&mut CpuCache>,
    warm_up: usize,
    runs: usize,
) -> Result<(Timing, Vec<Timing>), EngineError> {
    let ms = |time: Duration| time.as_secs_f32() * 1e3;
    let mut whole = Timing::default();
    let mut parts = Class::ALL.map(|_| Timing::default());
    for i in 0..warm_up + runs {
        let mut spent = Class::ALL.map(|_| Duration::ZERO);
        let began = Instant::now();
        session.run_observed(batch, cache.as_deref_mut(), |kernel, time| {
            for (sum, class) in spent.iter_mut().zip(Class::ALL) {
                if class == kernel.as_kernel().class() {
                    *sum += time;
                }
            }
        })?;
        let taken = began.elapsed();
        if i >= warm_up {
            whole.ms.push(ms(taken));
            for (timing, spent) in parts.iter_mut().zip(spent) {
                timing.ms.push(ms(spent));
            }
        }
    }
    Ok((whole, parts.into()))
}
