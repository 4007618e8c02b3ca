//! Row statistics: sums over parts of a row, with which a later launch normalizes the row.

use super::small_m::BLOCK_N;
use crate::tensor::{Shape, Size, Symbol};

/// Returns the number of row statistics for a row s of `columns` elements: Σ s and Σ s² over each block of 64 columns.
pub(super) fn row_stats_of(columns: u32) -> u64 {
    2 * u64::from(columns.div_ceil(BLOCK_N))
}

/// Shape of row statistics: `[rows, statistics per row]`.
pub(super) fn row_stats_shape(columns: u32) -> Shape {
    Shape::new([Size::from(Symbol::Rows), row_stats_of(columns).into()])
}
