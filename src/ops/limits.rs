/// Max elements of a row, so that the kernels' 32-bit products do not overflow (heads by head size, merged projections).
pub const MAX_WIDTH: u32 = 1 << 24;

/// Max rows of a table: ids are signed 32-bit integers.
pub const MAX_ROWS: u32 = i32::MAX as u32;
