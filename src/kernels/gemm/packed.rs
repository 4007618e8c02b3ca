//! Constants of kernels with a packed low-bit weight ([`Quantized::pack`](crate::tensor::Quantized::pack)).

use crate::tensor::{Group, Scaled, Values};

/// Name of the conversion of the weight in `partials/packed_weight.cu`.
pub(super) const fn kind(weight: Scaled) -> &'static str {
    match weight.values {
        Values::Int8 => "int8",
        Values::E4m3 => "e4m3",
        Values::Int4 => "int4",
    }
}

/// Number of issue slots for converting 16 rows of 128 columns, for the MMAs of single warps (`by_warps`) or of a warpgroup. An integer
/// instruction takes two slots.
pub(super) const fn conversion_slots(values: Values, by_warps: bool) -> f64 {
    match (values, by_warps) {
        (Values::Int4, true) => 190.0,
        (Values::Int8, true) => 150.0,
        (Values::E4m3, true) => 140.0,
        (Values::Int4, false) => 225.0,
        (Values::Int8, false) => 160.0,
        (Values::E4m3, false) => 125.0,
    }
}

/// Number of columns of a row that share a scale; 0 if all columns of a row share it.
pub(super) const fn group(weight: Scaled) -> u32 {
    match weight.group {
        Group::Row => 0,
        Group::Columns(width) => width,
    }
}

/// Bytes of a block: 64 columns of a row.
pub(super) const fn block_bytes(weight: Scaled) -> u32 {
    8 * weight.bits() as u32
}

/// Number of scales in `columns` columns of a row. A kernel reads these scales together with the values. Each takes a word.
pub(super) const fn scales(weight: Scaled, columns: u32) -> u32 {
    match weight.group {
        Group::Row => 0,
        Group::Columns(width) => columns.div_ceil(width),
    }
}

/// Bytes per element of a weight in device memory, including scales.
pub(super) fn bytes_per_element(weight: Scaled) -> f64 {
    let scales = match weight.group {
        Group::Row => 0.0,
        Group::Columns(width) => 4.0 / f64::from(width),
    };
    weight.bits() as f64 / 8.0 + scales
}
