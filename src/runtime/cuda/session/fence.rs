//! Points in a stream for which the host or another stream can wait.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};

use crate::runtime::cuda::error::{CudaError, During};

/// A point in a stream. The fence is passed when all earlier work on the stream is done.
pub struct Fence(CudaEvent);

impl Fence {
    /// Creates a fence after all work currently on the stream.
    pub(super) fn after(stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let event = stream.record_event(None);
        Ok(Self(event.during(|| "record an event".to_owned())?))
    }

    /// Makes later work on `stream` wait for the fence. The host does not wait.
    pub(super) fn hold(&self, stream: &CudaStream) -> Result<(), CudaError> {
        let held = stream.wait(&self.0);
        held.during(|| "let a stream wait for another".to_owned())
    }

    /// Returns whether all work before the fence is done.
    ///
    /// # Errors
    /// Returns an error if that work failed on the device.
    pub fn is_passed(&self) -> Result<bool, CudaError> {
        let passed = self.0.try_is_complete();
        passed.during(|| "query an event".to_owned())
    }

    /// Blocks the host until the fence is passed.
    ///
    /// # Errors
    /// Returns an error if the work before the fence failed on the device.
    pub fn wait(&self) -> Result<(), CudaError> {
        let waited = self.0.synchronize();
        waited.during(|| "wait for an event".to_owned())
    }
}
