//! Matrices of quantized checkpoints whose columns are in the order of their groups, and the tensors that compute their inputs in the
//! same order.

use super::{CheckpointError, WeightSource};

/// Returns the order of the columns of a matrix.
///
/// # Errors
/// Returns the errors of [`WeightSource::ordered`], and an error if the matrix has no order.
pub(super) fn order(
    source: &dyn WeightSource,
    name: &str,
    dims: &[u64],
) -> Result<Vec<u32>, CheckpointError> {
    let found = source.ordered(name, dims)?;
    found
        .map(|(_, order)| order)
        .ok_or_else(|| CheckpointError::NoOrder {
            tensor: name.to_owned(),
        })
}

/// Puts the rows of each equal part in this order. `width` is the number of items of a row.
pub(super) fn rows<T: Copy>(stored: &[T], order: &[u32], width: u64) -> Vec<T> {
    let width = width as usize;
    let mut out = Vec::with_capacity(stored.len());
    for part in stored.chunks_exact((order.len() * width).max(1)) {
        for &row in order {
            out.extend_from_slice(&part[row as usize * width..][..width]);
        }
    }
    out
}
