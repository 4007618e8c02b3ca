//! The ring by which the device tells the host what steps chose.

use crate::{
    kernels::decoding::{Advance, Chosen},
    runtime::cuda::memory::Pinned,
};

/// What a step chose, by row.
pub type ChosenRows = Vec<(Chosen, f32)>;

/// Pinned memory that the device writes results to: ids, values and step numbers of [`Advance::RING`] steps.
pub(super) struct Ring {
    pub(super) memory: Pinned,
    pub(super) address: u64,
}

/// Offsets of the ring's three arrays.
pub(super) const RING_VALUES: u64 = 4 * (Advance::RING * Advance::ROWS) as u64;
pub(super) const RING_STEPS: u64 = 2 * RING_VALUES;
pub(super) const RING_BYTES: u64 = RING_STEPS + 4 * Advance::RING as u64;

impl Ring {
    fn ints(&self) -> &[i32] {
        bytemuck::cast_slice(&self.memory.as_slice()[..RING_BYTES as usize])
    }

    /// The number of the last step that is complete in an entry.
    pub(super) fn step(&self, entry: usize) -> i32 {
        let at = &self.ints()[(RING_STEPS / 4) as usize + entry];
        // SAFETY: the address is valid and aligned; the device writes it, so it is read anew each time.
        let step = unsafe { std::ptr::read_volatile(at) };
        // What the device wrote before the number is read after it.
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
