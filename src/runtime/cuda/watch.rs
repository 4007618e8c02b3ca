//! Measures the time between two points of a stream with CUDA events.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, sys};

use super::{
    device::Device,
    error::{CudaError, During},
};

/// Times work that is enqueued on a stream.
pub(super) struct Watch {
    stream: Arc<CudaStream>,
    start: CudaEvent,
    end: CudaEvent,
}

impl Watch {
    pub(super) fn new(device: &Device, stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let event = || {
            let context = device.context();
            context
                .new_event(flags)
                .during(|| "make an event".to_owned())
        };
        Ok(Self {
            stream: Arc::clone(stream),
            start: event()?,
            end: event()?,
        })
    }

    /// Returns the device time of the work that `enqueue` puts on the stream, in milliseconds.
    pub(super) fn lap(
        &self,
        enqueue: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<f32, CudaError> {
        self.lap_beside(&mut (), |()| enqueue(), |(), ()| Ok(()))
    }

    /// Measures like [`Watch::lap`]. Meanwhile, the host calls `beside` with the value that `enqueue` returned.
    pub(super) fn lap_beside<T, E>(
        &self,
        on: &mut T,
        enqueue: impl FnOnce(&mut T) -> Result<E, CudaError>,
        beside: impl FnOnce(&mut T, E) -> Result<(), CudaError>,
    ) -> Result<f32, CudaError> {
        let record = |event: &CudaEvent| {
            event
                .record(&self.stream)
                .during(|| "record an event".to_owned())
        };
        record(&self.start)?;
        let enqueued = enqueue(on)?;
        record(&self.end)?;
        beside(on, enqueued)?;
        self.end
            .synchronize()
            .during(|| "wait for the run".to_owned())?;
        self.start
            .elapsed_ms(&self.end)
            .during(|| "read the events".to_owned())
    }
}
