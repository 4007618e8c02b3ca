//! Times runs and parts of runs with CUDA events.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use cudarc::driver::sys;

use super::{CudaCache, CudaSession, CudaTicket};
use crate::{
    kernels::KernelSpec,
    runtime::{
        batch::Batch,
        cuda::{
            error::{CudaError, During},
            graphs::{THREAD, capture},
            watch::Watch,
        },
    },
};

/// Predicate that returns whether a part of a run includes a kernel.
pub type Part<'a> = &'a dyn Fn(&KernelSpec) -> bool;

/// Times of several runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timing {
    /// Milliseconds between CUDA events around each run.
    pub ms: Vec<f32>,
    /// Host time of each run in microseconds, from planning to the last enqueued launch. It includes the capture of a graph, if there was
    /// one. Empty if the host was not timed.
    pub host_us: Vec<f32>,
}

impl Timing {
    /// Median of `ms`, or NaN without runs.
    pub fn median(&self) -> f32 {
        median(&self.ms)
    }

    /// Median of `host_us`, or `None` if it is empty.
    pub fn host_median(&self) -> Option<f32> {
        (!self.host_us.is_empty()).then(|| median(&self.host_us))
    }
}

fn median(of: &[f32]) -> f32 {
    let mut sorted = of.to_vec();
    sorted.sort_by(f32::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f32::NAN)
}

impl CudaSession {
    /// Times `runs` runs from ids to outputs, after `warm_up` untimed runs. The timed region includes the upload of the ids. The outputs
    /// stay on the device.
    pub fn time(
        &mut self,
        batch: &Batch,
        warm_up: usize,
        runs: usize,
    ) -> Result<Timing, CudaError> {
        let watch = Watch::new(&self.launcher.model.device, &self.launcher.stream)?;
        let mut timing = Timing::default();
        for i in 0..warm_up + runs {
            let host = Cell::new(Duration::ZERO);
            let clocked = |began: Instant| host.set(host.get() + began.elapsed());
            let began = Instant::now();
            let ready = self.prepare(batch, 0)?;
            clocked(began);
            let ms = watch.lap_beside(
                self,
                |session| {
                    let began = Instant::now();
                    let enqueued = session.enqueue(&ready, batch)?;
                    clocked(began);
                    Ok(enqueued)
                },
                |session, enqueued| {
                    let began = Instant::now();
                    session.learn(&ready, enqueued)?;
                    clocked(began);
                    Ok(())
                },
            )?;
            self.slots[ready.slot].staging.uploaded();
            if i >= warm_up {
                timing.ms.push(ms);
                timing.host_us.push(host.get().as_secs_f32() * 1e6);
            }
        }
        Ok(timing)
    }

    /// Measures the idle time of the device between two batches, in microseconds, for `runs` pairs of consecutive batches. Two batches are
    /// in flight at a time, and the first `warm_up` pairs are discarded. CUDA events are recorded before and after each run. The upload of
    /// the ids and the copy of the results lie between the two events of a run.
    pub fn gaps(
        &mut self,
        batch: &Batch,
        warm_up: usize,
        runs: usize,
    ) -> Result<Vec<f32>, CudaError> {
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let mut laps = Vec::with_capacity(warm_up + runs + 1);
        for _ in 0..=warm_up + runs {
            let event = || {
                let event = self.launcher.model.device.context().new_event(flags);
                event.during(|| "make an event".to_owned())
            };
            laps.push([event()?, event()?]);
        }
        let mut ahead = None;
        for lap in &laps {
            let ticket = self.submit_at(batch, 0, Some(lap))?;
            if let Some(ahead) = ahead.replace(ticket) {
                CudaTicket::wait(ahead)?;
            }
        }
        if let Some(last) = ahead {
            last.wait()?;
        }
        let pairs = laps.windows(2).skip(warm_up);
        let gaps = pairs.map(|pair| {
            let gap = pair[0][1].elapsed_ms(&pair[1][0]);
            gap.map(|ms| ms * 1e3)
                .during(|| "read the events".to_owned())
        });
        gaps.collect()
    }

    /// Times parts of a run. The launches of each part are captured as a CUDA graph, which uses the memory of the run. Before every replay
    /// of a part, the whole run is executed untimed, to provide the part's inputs and the usual contents of L2. The first `warm_up` replays
    /// of a part are discarded. A part without launches takes no time. If the batch continues cached sequences, each run writes the same
    /// positions of `cache`.
    pub fn time_parts(
        &mut self,
        batch: &Batch,
        cache: Option<&mut CudaCache>,
        parts: &[Part<'_>],
        warm_up: usize,
        runs: usize,
    ) -> Result<Vec<Timing>, CudaError> {
        let start = cache.map_or(0, |cache| cache.memory.start());
        let ready = self.prepare(batch, start)?;
        let staging = &mut self.slots[ready.slot].staging;
        staging.fill(&ready.data, batch, &ready.extents)?;
        let whole = capture(&self.launcher.stream, THREAD, || self.launch_all(&ready))?;
        let watch = Watch::new(&self.launcher.model.device, &self.launcher.stream)?;
        let launch = |graph: &cudarc::driver::CudaGraph| {
            graph.launch().during(|| "launch a graph".to_owned())
        };
        let mut timings = Vec::with_capacity(parts.len());
        for part in parts {
            let mut timing = Timing::default();
            if !self.launcher.model.program.kernels.iter().any(part) {
                timing.ms.resize(runs, 0.0);
                timings.push(timing);
                continue;
            }
            let graph = capture(&self.launcher.stream, THREAD, || {
                self.launch(&ready, usize::MAX, part)
            })?;
            for i in 0..warm_up + runs {
                launch(&whole)?;
                let ms = watch.lap(|| launch(&graph))?;
                if i >= warm_up {
                    timing.ms.push(ms);
                }
            }
            timings.push(timing);
        }
        Ok(timings)
    }
}
