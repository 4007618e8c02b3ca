//! Timings of kernels that correct the cost model.

use super::super::{Builder, Compiled, DeviceName, EngineError, TuneMode, Tuner};
use crate::{jit::Jit, runtime::cuda::Device, select::Timings};

impl Builder {
    /// Returns whether timings of kernels correct the cost model.
    pub(super) fn is_tuned(&self) -> bool {
        self.tune != TuneMode::Off || self.timings.is_some()
    }

    /// Reads or measures the timings that correct the cost model.
    pub(super) fn timed(
        &self,
        device: &DeviceName,
        compiled: &Compiled,
    ) -> Result<Timings, EngineError> {
        let DeviceName::Cuda(info) = device else {
            let device = device.to_string();
            return Err(EngineError::TuneOnCpu { device });
        };
        let (device, jit) = (Device::open(info.ordinal)?, Jit::open()?);
        Tuner::new(&device, &jit, self.tune)
            .given(self.timings.as_deref())
            .progress(&self.progress)
            .time(compiled)
    }
}
