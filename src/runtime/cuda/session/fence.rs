//! Points of a stream that the host or another stream waits for.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};

use crate::runtime::cuda::error::{CudaError, During};

/// What a stream had to do when the fence was put behind it.
pub struct Fence(CudaEvent);

impl Fence {
    /// A fence behind all that is on a stream now.
    pub(super) fn behind(stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let event = stream.record_event(None);
        Ok(Self(event.during(|| "record an event".to_owned())?))
    }

    /// Lets what comes on a stream from now on wait for the fence. The host does not.
    pub(super) fn hold(&self, stream: &CudaStream) -> Result<(), CudaError> {
        let held = stream.wait(&self.0);
        held.during(|| "let a stream wait for another".to_owned())
    }

    /// Whether all before it is done.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn is_passed(&self) -> Result<bool, CudaError> {
        let passed = self.0.try_is_complete();
        passed.during(|| "ask for an event".to_owned())
    }

    /// Lets the host wait for it.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn wait(&self) -> Result<(), CudaError> {
        let waited = self.0.synchronize();
        waited.during(|| "wait for an event".to_owned())
    }
}
