//! Runs whose outputs stay on the device.

use std::sync::Arc;

use cudarc::driver::result;

use super::{CudaSession, Ready, pieces};
use crate::runtime::{
    DeviceOutput,
    batch::Batch,
    cuda::{
        error::{CudaError, During},
        output_memory::CudaMemory,
    },
};

impl CudaSession {
    /// Runs a batch and copies each output to separate device memory, because the next batch reuses the memory of this batch. All copies
    /// have completed on return. The caller must have checked the batch against the model's limits.
    ///
    /// # Errors
    /// Returns [`CudaError::InFlight`] if two batches are in flight, an error if an allocation fails, and driver errors.
    pub fn run_on_device(&mut self, batch: &Batch) -> Result<Vec<DeviceOutput>, CudaError> {
        let ready = self.prepare(batch, 0)?;
        let model = Arc::clone(&self.launcher.model);
        let (pieces, _) = pieces(&model.program, &ready.own)?;
        let memories = pieces.iter().map(|piece| {
            let memory = CudaMemory::new(&model.device, piece.bytes as u64)?;
            Ok((memory, piece.bytes))
        });
        let memories: Vec<(CudaMemory, usize)> = memories.collect::<Result<_, CudaError>>()?;
        let ran = self.run_into(&ready, batch, &memories);
        // Wait even after an error, because the memory of the batch and of the outputs may be reused or freed afterwards.
        let waited = self.launcher.stream.synchronize();
        self.slots[ready.slot].staging.uploaded();
        ran?;
        waited.during(|| "wait for the run".to_owned())?;
        let outputs = pieces.into_iter().zip(memories);
        let outputs = outputs.map(|(piece, (memory, _))| {
            DeviceOutput::on_cuda(piece.name, piece.shape, piece.element, memory)
        });
        Ok(outputs.collect())
    }

    /// Enqueues a run and the copies of its outputs.
    fn run_into(
        &mut self,
        ready: &Ready,
        batch: &Batch,
        memories: &[(CudaMemory, usize)],
    ) -> Result<(), CudaError> {
        let enqueued = self.enqueue(ready, batch)?;
        let stream = self.launcher.stream.cu_stream();
        for (from, (memory, bytes)) in self.output_addresses(ready).into_iter().zip(memories) {
            if *bytes == 0 {
                continue;
            }
            // SAFETY: the output stays valid at `from` until the next batch on the stream, and the memory has room for it.
            unsafe { result::memcpy_dtod_async(memory.address(), from, *bytes, stream) }
                .during(|| "copy an output on the device".to_owned())?;
        }
        self.learn(ready, enqueued)
    }
}
