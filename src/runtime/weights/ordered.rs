//! Sorts the columns of quantized matrices by group. The inputs of such a matrix must then be in the same order, so the rows of the tensors
//! that compute these inputs are reordered, too.

use super::{CheckpointError, WeightSource};

/// Returns the column indices of the quantized matrix `name`, sorted by group.
///
/// # Errors
/// Returns the errors of [`WeightSource::ordered`], and an error if it returns `None`.
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

/// Returns the elements of the row-major matrix `stored`, row by row. Element `i` of each returned row is from column `order[i]`.
pub(super) fn columns<'s, T: Copy>(
    stored: &'s [T],
    order: &'s [u32],
) -> impl Iterator<Item = T> + 's {
    let rows = stored.chunks_exact(order.len().max(1));
    rows.flat_map(move |row| order.iter().map(|&column| row[column as usize]))
}

/// Splits `stored` into parts of `order.len()` rows of `width` items each. Row `i` of each part of the result is row `order[i]` of the
/// part.
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
