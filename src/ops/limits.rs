/// Max elements of a row, such as heads times head size or merged projections. The limit keeps the kernels' 32-bit products from
/// overflowing.
pub const MAX_WIDTH: u32 = 1 << 24;

/// Max rows of a table, because ids are signed 32-bit integers.
pub const MAX_ROWS: u32 = i32::MAX as u32;
