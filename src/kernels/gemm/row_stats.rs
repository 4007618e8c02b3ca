//! Partial sums of rows, with which a later launch normalizes the rows.

use super::small_m::BLOCK_N;
use crate::tensor::{Shape, Size, Symbol};

/// Number of row statistics for a row of `columns`: Σ s and Σ s² over each block of 64 columns of a row s.
pub(super) fn row_stats_of(columns: u32) -> u64 {
    2 * u64::from(columns.div_ceil(BLOCK_N))
}

/// Shape of row statistics: `[rows, statistics per row]`.
pub(super) fn row_stats_shape(columns: u32) -> Shape {
    Shape::new([Size::from(Symbol::Rows), row_stats_of(columns).into()])
}
