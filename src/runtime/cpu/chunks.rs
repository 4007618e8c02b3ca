//! Host memory of the chunks that the planner requests.

use std::alloc::{Layout, alloc_zeroed, dealloc};

use crate::{plan::ALIGNMENT, runtime::workspace::ChunkOwner};

/// Buffers by chunk id, as requested by the planner.
#[derive(Default)]
pub(super) struct Chunks {
    buffers: Vec<Option<Buffer>>,
}

struct Buffer {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: a buffer is plain memory, which is accessed only through its owner.
unsafe impl Send for Buffer {}

impl Buffer {
    fn new(bytes: u64) -> Option<Self> {
        let layout =
            Layout::from_size_align(usize::try_from(bytes).ok()?, ALIGNMENT as usize).ok()?;
        // SAFETY: the caller does not request empty chunks. The memory is zeroed, so no uninitialized memory is read, even if a kernel
        // leaves elements unwritten.
        let start = unsafe { alloc_zeroed(layout) };
        (!start.is_null()).then_some(Self { start, layout })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the buffer was allocated with this layout and is freed once.
        unsafe { dealloc(self.start, self.layout) };
    }
}

/// The host is out of memory.
#[derive(Debug)]
pub(super) struct NoMemory;

impl ChunkOwner for Chunks {
    type Error = NoMemory;

    fn follow(&mut self, held: &[u64]) -> Result<bool, NoMemory> {
        let mut changed = held.len() < self.buffers.len();
        self.buffers.resize_with(held.len(), || None);
        for (buffer, &bytes) in self.buffers.iter_mut().zip(held) {
            if buffer
                .as_ref()
                .is_some_and(|b| b.layout.size() as u64 != bytes)
            {
                *buffer = None;
                changed = true;
            }
        }
        for (buffer, &bytes) in self.buffers.iter_mut().zip(held) {
            if buffer.is_none() && bytes > 0 {
                *buffer = Some(Buffer::new(bytes).ok_or(NoMemory)?);
                changed = true;
            }
        }
        Ok(changed)
    }

    fn clear(&mut self) {
        self.buffers.clear();
    }

    fn bytes(&self) -> u64 {
        self.buffers
            .iter()
            .flatten()
            .map(|b| b.layout.size() as u64)
            .sum()
    }
}

impl Chunks {
    /// Returns the address at byte `offset` of a chunk.
    pub(super) fn at(&self, chunk: usize, offset: u64) -> *mut f32 {
        match self.buffers.get(chunk).and_then(Option::as_ref) {
            // The offset is in range, because the plan was made for a chunk of this size.
            Some(buffer) => buffer.start.wrapping_add(offset as usize).cast(),
            // A plan refers to a missing chunk only for empty tensors.
            None => std::ptr::NonNull::<f32>::dangling().as_ptr(),
        }
    }
}
