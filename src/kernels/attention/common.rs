//! Constants, shapes and definitions that several attention kernels share.

use crate::{
    kernels::Case,
    tensor::{DType, Shape, Size, Symbol},
};

/// Max bytes of shared memory of a CTA on every target. sm_86 and sm_89 have the smallest limit.
pub(super) const SHARED_LIMIT: u32 = 99 * 1024;

/// Returns the number of elements of a head's row in shared memory. For tensor cores, the head size is rounded up to a multiple of 16, the
/// K extent of an MMA.
pub(super) fn row(head: u32, dtype: DType) -> u32 {
    if !dtype.has_mma() {
        head
    } else {
        head.next_multiple_of(16)
    }
}

/// Returns the pitch of a head's rows in shared memory, in bytes. It exceeds a row by 16 bytes, to avoid bank conflicts.
pub(super) fn row_bytes(head: u32, dtype: DType) -> u32 {
    row(head, dtype) * dtype.bytes() as u32 + 16
}

pub(super) fn pairs_shape(heads: u32) -> Shape {
    Shape::new([Size::constant(heads.into()), Size::from(Symbol::Pairs)])
}

/// Batches for every fused kernel: the standard batches, lengths around tile boundaries, and many sequences.
pub(super) fn edge_cases() -> Vec<Case> {
    let mut cases = Case::standard();
    cases.push(Case::new(
        "tile_edges",
        &[15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129],
    ));
    // More sequences than the 32 that a warp searches at once.
    let many: Vec<u32> = (0..70).map(|i| 1 + i * 5 % 37).collect();
    cases.push(Case::new("many", &many));
    cases
}

/// Relative bound for a value stored in `dtype`: twice the max rounding error, which is half a unit in the last place.
pub(super) fn rounding(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        DType::F32 => 2e-5,
    }
}

/// Returns `exp(x − max) / Σ exp(x − max)` for each element `x` of `row`. If there is a `sink`, the maximum and the sum include it.
pub(super) fn softmax(mut row: Vec<f64>, sink: Option<f64>) -> Vec<f64> {
    let scores = row.iter().copied().chain(sink);
    let top = scores.fold(f64::NEG_INFINITY, f64::max);
    for x in &mut row {
        *x = (*x - top).exp();
    }
    let sum = row.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - top).exp());
    for x in &mut row {
        *x /= sum;
    }
    row
}
