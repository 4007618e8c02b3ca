//! Owners of device memory and of pinned memory. They free the memory when they are dropped.

use std::{ffi::c_void, sync::Arc};

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use super::{
    device::Device,
    error::{CudaError, During},
};
use crate::plan::ALIGNMENT;
use crate::runtime::workspace::ChunkOwner;

/// Device memory.
pub(super) struct Buffer {
    context: Arc<CudaContext>,
    start: sys::CUdeviceptr,
    bytes: u64,
}

impl Buffer {
    /// Allocates at least one byte, so that the address is valid. The size is rounded up to a multiple of [`ALIGNMENT`], since
    /// kernels may read the whole last 16-byte vector of a tensor.
    pub(super) fn new(device: &Device, bytes: u64, what: &'static str) -> Result<Self, CudaError> {
        let context = Arc::clone(device.context());
        context
            .bind_to_thread()
            .during(|| "use the device on this thread".into())?;
        let size = bytes.max(1).checked_next_multiple_of(ALIGNMENT);
        let size = size.and_then(|n| usize::try_from(n).ok());
        // SAFETY: the size is not zero, and the buffer frees the allocation.
        match unsafe { result::malloc_sync(size.unwrap_or(usize::MAX)) } {
            Ok(start) => Ok(Self {
                context,
                start,
                bytes,
            }),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, total) = device.memory()?;
                let advice =
                    String::from("send fewer tokens at once, or free memory on the device");
                Err(CudaError::OutOfMemory {
                    what,
                    bytes,
                    free,
                    total,
                    advice,
                })
            }
            Err(source) => Err(CudaError::Driver {
                action: format!("allocate {bytes} bytes"),
                source,
            }),
        }
    }

    pub(super) fn start(&self) -> sys::CUdeviceptr {
        self.start
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // A drop cannot return an error. The context records the error for the next call.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: `new` allocated the memory, and it is freed once. Freeing waits for work on the device.
            let _ = unsafe { result::free_sync(self.start) };
        }
    }
}

/// Copies that initialize device memory before its first use. They use a separate stream, because waiting for the whole device would
/// invalidate a graph capture of another thread.
pub(super) struct Uploads(Arc<CudaStream>);

impl Uploads {
    pub(super) fn new(device: &Device) -> Result<Self, CudaError> {
        let stream = device.context().new_stream();
        Ok(Self(stream.during(|| "make a stream".to_owned())?))
    }

    /// Copies bytes to an address. When this function returns, the source may be overwritten or freed if it is pageable memory.
    ///
    /// # Safety
    /// The device memory must have room for the bytes, and nothing may use it before [`finish`](Self::finish).
    pub(super) unsafe fn copy(
        &self,
        to: sys::CUdeviceptr,
        bytes: &[u8],
    ) -> Result<(), DriverError> {
        // SAFETY: the caller guarantees the requirements of this function.
        unsafe { result::memcpy_htod_async(to, bytes, self.0.cu_stream()) }
    }

    /// Sets `n` bytes to zero, starting at address `from`.
    ///
    /// # Safety
    /// The requirements of [`copy`](Self::copy) apply.
    pub(super) unsafe fn clear(&self, from: sys::CUdeviceptr, n: usize) -> Result<(), DriverError> {
        // SAFETY: the caller guarantees the requirements of this function.
        unsafe { result::memset_d8_async(from, 0, n, self.0.cu_stream()) }
    }

    /// Waits until all copies are complete and visible to every stream.
    pub(super) fn finish(self) -> Result<(), DriverError> {
        self.0.synchronize()
    }
}

/// Page-locked host memory, mapped into the device's address space so that kernels can read it.
pub(super) struct Pinned {
    context: Arc<CudaContext>,
    start: *mut c_void,
    bytes: usize,
}

// SAFETY: this is plain memory, which is accessed only through its owner.
unsafe impl Send for Pinned {}

impl Pinned {
    pub(super) fn new(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        let context = Arc::clone(device.context());
        context
            .bind_to_thread()
            .during(|| "use the device on this thread".into())?;
        // SAFETY: the size is not zero, and `drop` below frees the memory.
        let start = unsafe { result::malloc_host(bytes.max(1), sys::CU_MEMHOSTALLOC_DEVICEMAP) }
            .during(|| format!("page-lock {bytes} bytes of host memory"))?;
        // SAFETY: the memory has just been allocated with this size.
        unsafe { start.cast::<u8>().write_bytes(0, bytes.max(1)) };
        Ok(Self {
            context,
            start,
            bytes: bytes.max(1),
        })
    }

    pub(super) fn device_address(&self) -> Result<sys::CUdeviceptr, CudaError> {
        let mut address = 0;
        // SAFETY: the memory was allocated as mapped memory, and the call writes the address.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, self.start, 0) }
            .result()
            .during(|| "find host memory on the device".to_owned())?;
        Ok(address)
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `start` points to `bytes` initialized bytes, which are borrowed with `self`.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.bytes) }
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        // SAFETY: `start` points to `bytes` initialized bytes, which are borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: `new` allocated the memory, and it is freed once.
            let _ = unsafe { result::free_host(self.start) };
        }
    }
}

/// Buffers by chunk id, as requested by the planner.
pub(super) struct Chunks {
    device: Device,
    /// The stream whose work uses the buffers.
    stream: Arc<CudaStream>,
    buffers: Vec<Option<Buffer>>,
}

impl ChunkOwner for Chunks {
    type Error = CudaError;

    fn follow(&mut self, held: &[u64]) -> Result<bool, CudaError> {
        let mut changed = held.len() < self.buffers.len();
        let is_kept = |(buffer, &bytes): (&Option<Buffer>, &u64)| {
            buffer.as_ref().is_none_or(|b| b.bytes == bytes)
        };
        if changed || !self.buffers.iter().zip(held).all(is_kept) {
            self.settle();
        }
        self.buffers.resize_with(held.len(), || None);
        for (buffer, &bytes) in self.buffers.iter_mut().zip(held) {
            if buffer.as_ref().is_some_and(|b| b.bytes != bytes) {
                *buffer = None;
                changed = true;
            }
        }
        for (buffer, &bytes) in self.buffers.iter_mut().zip(held) {
            if buffer.is_none() && bytes > 0 {
                *buffer = Some(Buffer::new(
                    &self.device,
                    bytes,
                    "the intermediate tensors",
                )?);
                changed = true;
            }
        }
        Ok(changed)
    }

    fn clear(&mut self) {
        if !self.buffers.is_empty() {
            self.settle();
        }
        self.buffers.clear();
    }

    fn bytes(&self) -> u64 {
        self.buffers.iter().flatten().map(|b| b.bytes).sum()
    }
}

impl Chunks {
    /// Creates an owner without buffers. Only work on `stream` may use its buffers.
    pub(super) fn new(device: Device, stream: Arc<CudaStream>) -> Self {
        Self {
            device,
            stream,
            buffers: Vec::new(),
        }
    }

    /// Waits for the batches in flight, because they may use memory that is about to be freed.
    fn settle(&self) {
        // The error is ignored: after a device failure, nothing uses the memory any more, and each batch in flight reports the error.
        let _ = self.stream.synchronize();
    }

    /// Returns the address at byte `offset` of a chunk. Returns 0 if the chunk does not exist, which is the case for empty tensors.
    pub(super) fn at(&self, chunk: usize, offset: u64) -> sys::CUdeviceptr {
        self.buffers
            .get(chunk)
            .and_then(Option::as_ref)
            .map_or(0, |b| b.start + offset)
    }
}
