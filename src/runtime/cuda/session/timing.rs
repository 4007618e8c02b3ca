//! Times of runs and of their parts, between CUDA events.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, sys};

use super::{CudaSession, Timing};
use crate::{
    kernels::KernelSpec,
    runtime::{
        batch::Batch,
        cuda::{
            error::{CudaError, During},
            graphs::capture,
        },
    },
};

/// Says whether a part of a run holds a kernel.
pub type Part<'a> = &'a dyn Fn(&KernelSpec) -> bool;

impl CudaSession {
    /// Times parts of a run, each as a CUDA graph of its launches alone, in their order and on the
    /// run's own memory. A whole run goes before every replay, untimed, so that a part finds the
    /// values that it reads, and a cache as a run leaves it. `warm_up` replays of each part come
    /// before the `runs` that are returned. A part without launches takes no time.
    pub fn time_parts(
        &mut self,
        batch: &Batch,
        parts: &[Part<'_>],
        warm_up: usize,
        runs: usize,
    ) -> Result<Vec<Timing>, CudaError> {
        let ready = self.prepare(batch)?;
        self.upload(&ready.data, batch)?;
        let whole = capture(&self.stream, || self.launch(&ready, &|_| true))?;
        let watch = self.watch()?;
        let launch = |graph: &cudarc::driver::CudaGraph| {
            graph.launch().during(|| "launch a graph".to_owned())
        };
        let mut timings = Vec::with_capacity(parts.len());
        for part in parts {
            let mut timing = Timing::default();
            if !self.model.program.kernels.iter().any(part) {
                timing.ms.resize(runs, 0.0);
                timings.push(timing);
                continue;
            }
            let graph = capture(&self.stream, || self.launch(&ready, part))?;
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

    /// A pair of events on the session's stream.
    pub(super) fn watch(&self) -> Result<Watch, CudaError> {
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let event = || {
            self.model
                .device
                .context()
                .new_event(flags)
                .during(|| "make an event".to_owned())
        };
        Ok(Watch {
            stream: Arc::clone(&self.stream),
            start: event()?,
            end: event()?,
        })
    }
}

/// Times what is put on a stream.
pub(super) struct Watch {
    stream: Arc<CudaStream>,
    start: CudaEvent,
    end: CudaEvent,
}

impl Watch {
    /// Milliseconds on the device from the start to the end of what `enqueue` puts on the stream.
    pub(super) fn lap(
        &self,
        enqueue: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<f32, CudaError> {
        let record = |event: &CudaEvent| {
            event
                .record(&self.stream)
                .during(|| "record an event".to_owned())
        };
        record(&self.start)?;
        enqueue()?;
        record(&self.end)?;
        self.end
            .synchronize()
            .during(|| "wait for the run".to_owned())?;
        self.start
            .elapsed_ms(&self.end)
            .during(|| "read the events".to_owned())
    }
}
