//! Times parts of a run with CUDA events.

use cudarc::driver::sys;

use super::{CudaCache, CudaSession, CudaTicket, Timing};
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

/// Says whether a part of a run holds a kernel.
pub type Part<'a> = &'a dyn Fn(&KernelSpec) -> bool;

impl CudaSession {
    /// Microseconds for which the device has nothing to do between two batches, for each of `runs` pairs of neighbours that are
    /// submitted one behind the other, two at a time, after `warm_up` that are not counted. By CUDA events around each run,
    /// between which lie the upload of its ids and the copy of its results.
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

    /// Times parts of a run, each as a CUDA graph of its launches alone, in their order and on the
    /// run's own memory. An untimed whole run precedes every replay, so that a part finds the values that it
    /// reads, and L2 as a run leaves it. The first `warm_up` replays of each part are left out of the `runs`
    /// that are returned. A part without launches takes no time. A batch of sequences that go on writes the same positions
    /// of `cache` in each run.
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
