//! Partitioning of work for the caller's thread pool.
//!
//! Loop bodies are passed as trait objects, so that the code of the thread pool is compiled once rather than for every caller. A body is
//! called for blocks of rows or whole tasks, never for single elements.

use std::marker::PhantomData;
use std::ops::Range;

use rayon::prelude::*;

/// Number of elements of pointwise work below which waking another thread takes longer than it saves.
const MIN_ELEMENTS: usize = 16 * 1024;

/// Number of multiplications below which one thread is faster than several.
pub const MIN_MULTIPLICATIONS: usize = 1 << 17;

/// Calls `body(first_row, rows)` on blocks of whole rows of `out`, in parallel if there are enough of them. The length of `out` is a
/// multiple of `width`. If `out` is empty, `body` is not called.
pub fn for_row_blocks(out: &mut [f32], width: usize, body: &(dyn Fn(usize, &mut [f32]) + Sync)) {
    if out.is_empty() {
        return;
    }
    let threads = rayon::current_num_threads();
    if threads == 1 || out.len() < 2 * MIN_ELEMENTS {
        return body(0, out);
    }
    // Use a few blocks per thread, so that other threads can take over blocks of a slow one.
    let rows = out.len() / width;
    let block = rows.div_ceil(4 * threads).max(MIN_ELEMENTS.div_ceil(width));
    out.par_chunks_mut(block * width)
        .enumerate()
        .for_each(|(i, rows)| body(i * block, rows));
}

/// Calls `body` once for every number below `n`, each time with scratch memory. The calls are parallel if `work`, the total number of
/// multiplications, is large enough. Calls on one thread may share scratch memory, which then contains the data of an earlier call.
pub fn with_scratch<Scratch: Default>(
    n: usize,
    work: usize,
    body: &(dyn Fn(&mut Scratch, usize) + Sync),
) {
    if work < MIN_MULTIPLICATIONS || rayon::current_num_threads() == 1 {
        let mut scratch = Scratch::default();
        (0..n).for_each(|i| body(&mut scratch, i));
        return;
    }
    (0..n).into_par_iter().for_each_init(Scratch::default, body);
}

/// A slice that several tasks write to. Each task writes only its own elements, which need not be contiguous.
#[derive(Clone, Copy, Debug)]
pub struct SharedOut<'a> {
    start: *mut f32,
    len: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: this is a `&mut [f32]` whose elements are accessed only through `slice` and `block`. Callers of these functions guarantee that no
// two tasks access the same element.
unsafe impl Send for SharedOut<'_> {}
// SAFETY: for the same reason as `Send`.
unsafe impl Sync for SharedOut<'_> {}

impl<'a> SharedOut<'a> {
    pub fn new(out: &'a mut [f32]) -> Self {
        Self {
            start: out.as_mut_ptr(),
            len: out.len(),
            borrow: PhantomData,
        }
    }

    /// Returns the elements in `range`.
    ///
    /// # Safety
    ///
    /// While the result lives, nothing else may read or write these elements.
    #[expect(
        clippy::mut_from_ref,
        reason = "disjointness is the caller's promise, as the safety section says"
    )]
    pub unsafe fn slice(&self, range: Range<usize>) -> &mut [f32] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "kernels write within the length that was checked"
        );
        // SAFETY: the assertion ensures that the range is in bounds, and the caller guarantees exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// Returns a pointer to a block that starts at `at` and has `rows` rows of `cols` elements, `stride` apart.
    pub fn block(&self, at: usize, rows: usize, cols: usize, stride: usize) -> *mut f32 {
        assert!(
            rows == 0 || at + (rows - 1) * stride + cols <= self.len,
            "kernels write within the length that was checked"
        );
        // Use `wrapping_add`, because an empty block may start at the end.
        self.start.wrapping_add(at)
    }
}
