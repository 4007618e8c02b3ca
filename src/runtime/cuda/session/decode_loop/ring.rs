//! Ring buffer through which the device reports selected tokens to the host.

use crate::{
    kernels::decoding::{Advance, Chosen},
    runtime::cuda::memory::Pinned,
};

/// Outcome of a step for each row: the selected token, and the value that the kernel reports with it, such as its log-probability.
pub type ChosenRows = Vec<(Chosen, f32)>;

/// Pinned memory to which the device writes results: ids, values and step numbers of [`Advance::RING`] steps.
pub(super) struct Ring {
    pub(super) memory: Pinned,
    pub(super) address: u64,
}

/// Byte offsets of the arrays that follow the ids in the ring.
pub(super) const RING_VALUES: u64 = 4 * (Advance::RING * Advance::ROWS) as u64;
pub(super) const RING_STEPS: u64 = 2 * RING_VALUES;
pub(super) const RING_BYTES: u64 = RING_STEPS + 4 * Advance::RING as u64;

impl Ring {
    fn ints(&self) -> &[i32] {
        bytemuck::cast_slice(&self.memory.as_slice()[..RING_BYTES as usize])
    }

    /// Returns the number of the last step whose results are complete in a ring entry.
    pub(super) fn step(&self, entry: usize) -> i32 {
        let at = &self.ints()[(RING_STEPS / 4) as usize + entry];
        // SAFETY: the address is valid and aligned. The device writes to it, so the value is re-read on each call.
        let step = unsafe { std::ptr::read_volatile(at) };
        // Reads after this point must see everything that the device wrote before the step number.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        step
    }

    pub(super) fn rows(&self, entry: usize, n: usize) -> ChosenRows {
        let ints = self.ints();
        let from = entry * Advance::ROWS;
        let values = &ints[(RING_VALUES / 4) as usize + from..];
        ints[from..from + n]
            .iter()
            .zip(values)
            .map(|(id, value)| {
                // SAFETY: as in `step`.
                let read = |at: &i32| unsafe { std::ptr::read_volatile(at) };
                let value = f32::from_bits(read(value) as u32);
                (Chosen::of_code(read(id)), value)
            })
            .collect()
    }
}
