//! Device memory of outputs that outlive their run.

use cudarc::driver::{result, sys};

use super::{
    device::Device,
    error::{CudaError, During},
    memory::Buffer,
};

/// Device memory that belongs to no session.
pub struct CudaMemory {
    device: Device,
    buffer: Buffer,
}

impl CudaMemory {
    /// Allocates `bytes` bytes of memory with undefined contents.
    pub(super) fn new(device: &Device, bytes: u64) -> Result<Self, CudaError> {
        Ok(Self {
            device: device.clone(),
            buffer: Buffer::new(device, bytes, "an output that stays on the device")?,
        })
    }

    /// Returns the address of the first byte on the device.
    pub fn address(&self) -> sys::CUdeviceptr {
        self.buffer.start()
    }

    /// Returns the number of the device.
    pub fn ordinal(&self) -> usize {
        self.device.info().ordinal
    }

    /// Allocates `bytes` zeros on the device of this memory.
    pub(in crate::runtime) fn zeros_beside(&self, bytes: u64) -> Result<Self, CudaError> {
        let memory = Self::new(&self.device, bytes)?;
        self.on_a_stream("clear an output", |stream| {
            // SAFETY: the buffer has this size, and nothing else uses it yet.
            unsafe { result::memset_d8_async(memory.address(), 0, bytes as usize, stream) }
        })?;
        Ok(memory)
    }

    /// Copies all bytes to the host. `name` is the name of the output.
    pub(in crate::runtime) fn read(&self, name: &str) -> Result<Vec<u8>, CudaError> {
        let bytes = self.buffer.bytes();
        let no_memory = || CudaError::OutputMemory {
            output: name.to_owned(),
            bytes,
        };
        let n = usize::try_from(bytes).map_err(|_| no_memory())?;
        let mut copy = Vec::new();
        copy.try_reserve_exact(n).map_err(|_| no_memory())?;
        copy.resize(n, 0);
        self.bind()?;
        // SAFETY: the buffer has this size, and all work that writes it is done. The call returns after the copy.
        unsafe { result::memcpy_dtoh_sync::<u8>(&mut copy, self.address()) }
            .during(|| format!("download `{name}`"))?;
        Ok(copy)
    }

    /// Copies the first `n` bytes of row `i` of `from` to row `rows[i]` of this memory. Rows of `from` have `row_bytes` bytes, and rows of
    /// this memory have `n`. All copies have completed on return.
    ///
    /// # Panics
    /// Panics if a row is outside of either memory. Both memories must be on the same device.
    pub(in crate::runtime) fn copy_rows(
        &mut self,
        from: &Self,
        rows: &[usize],
        row_bytes: u64,
        n: u64,
    ) -> Result<(), CudaError> {
        let last = rows.iter().max().map_or(0, |&row| row as u64 + 1);
        assert!(n <= row_bytes && last * n <= self.buffer.bytes());
        assert!(rows.len() as u64 * row_bytes <= from.buffer.bytes());
        let whole = row_bytes == n;
        self.on_a_stream("collect an output", |stream| {
            let mut at = 0;
            while at < rows.len() {
                // Rows with adjacent target rows are copied at once.
                let next = rows[at..]
                    .windows(2)
                    .take_while(|pair| whole && pair[1] == pair[0] + 1);
                let count = 1 + next.count();
                let source = from.address() + at as u64 * row_bytes;
                let target = self.address() + rows[at] as u64 * n;
                // SAFETY: the assertions above check that the rows are within both buffers. All work that writes `from` is done. Nothing
                // else uses this memory, because it is borrowed mutably.
                unsafe { result::memcpy_dtod_async(target, source, count * n as usize, stream) }?;
                at += count;
            }
            Ok(())
        })
    }

    fn bind(&self) -> Result<(), CudaError> {
        let bound = self.device.context().bind_to_thread();
        bound.during(|| "use the device on this thread".to_owned())
    }

    /// Enqueues work on a new stream and waits for it, even if enqueueing fails.
    fn on_a_stream(
        &self,
        action: &str,
        enqueue: impl FnOnce(sys::CUstream) -> Result<(), cudarc::driver::DriverError>,
    ) -> Result<(), CudaError> {
        self.bind()?;
        let stream = self.device.context().new_stream();
        let stream = stream.during(|| "make a stream".to_owned())?;
        let enqueued = enqueue(stream.cu_stream());
        let done = stream.synchronize();
        enqueued.and(done).during(|| action.to_owned())
    }
}
