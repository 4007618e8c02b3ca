//! Memory aligned to cache lines. A vector that crosses a line boundary costs two loads.

use bytemuck::{Pod, Zeroable};

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u32; 16]);

/// A buffer of numbers that starts at a cache line.
#[derive(Default)]
pub(crate) struct Lines(Vec<Line>);

impl Lines {
    /// Allocates `len` zeros, rounded up to whole lines.
    pub fn zeros<T: Pod>(len: usize) -> Self {
        Self(vec![Line::zeroed(); lines::<T>(len)])
    }

    /// Returns a buffer for `len` numbers, with arbitrary contents.
    pub fn room<T: Pod>(&mut self, len: usize) -> &mut [T] {
        let lines = lines::<T>(len);
        if self.0.len() < lines {
            self.0.resize(lines, Line::zeroed());
        }
        &mut self.all_mut()[..len]
    }

    pub fn all<T: Pod>(&self) -> &[T] {
        bytemuck::cast_slice(&self.0)
    }

    pub fn all_mut<T: Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.0)
    }

    pub fn bytes(&self) -> u64 {
        size_of_val(self.0.as_slice()) as u64
    }
}

fn lines<T>(len: usize) -> usize {
    (len * size_of::<T>()).div_ceil(size_of::<Line>())
}
