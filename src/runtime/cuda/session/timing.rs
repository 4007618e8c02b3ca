//! Times parts of a run with CUDA events.

use super::{CudaCache, CudaSession, Timing};
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
        self.staging.fill(&ready.data, batch, &ready.extents)?;
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
