//! Constants of kernels with a packed low-bit weight ([`Quantized::pack`](crate::tensor::Quantized::pack)).

use crate::{
    kernels::Constants,
    tensor::{Group, Scaled, Values},
};

/// Constants of `partials/packed_weight.cu`, and of the templates that include it.
pub(super) fn constants(weight: Option<Scaled>) -> Constants {
    // Name of the conversion that the partial implements.
    let kind = weight.map_or("", |weight| match weight.values {
        Values::Int8 => "int8",
        Values::E4m3 => "e4m3",
        Values::Int4 => "int4",
    });
    // Number of columns that share a scale; 0 if all columns of a row share it.
    let group = weight.map_or(0, |weight| match weight.group {
        Group::Row => 0,
        Group::Columns(width) => width,
    });
    let scale_bytes = weight.map_or(0, Scaled::scale_bytes);
    Constants::from([
        ("packed", kind.into()),
        ("group", group.into()),
        ("scale_bytes", scale_bytes.into()),
        ("row_scaled", (weight.is_some() && group == 0).into()),
    ])
}

/// Cycles that a warp takes to convert and multiply 16 rows of 128 columns, if no other warp shares its scheduler.
pub(super) const STEP_LATENCY: f64 = 400.0;

/// Number of issue slots that the conversion of 16 rows of 128 columns takes. `by_warps` is whether the elements are converted for the MMAs
/// of single warps in the streaming GEMM, rather than for other MMAs. An integer instruction takes two slots.
pub(super) const fn conversion_slots(weight: Scaled, by_warps: bool) -> f64 {
    match (weight.values, weight.group, by_warps) {
        (Values::Int4, _, true) => 190.0,
        (Values::Int8, Group::Row, true) => 150.0,
        (Values::Int8, Group::Columns(_), true) => 205.0,
        (Values::E4m3, _, true) => 140.0,
        (Values::Int4, _, false) => 225.0,
        (Values::Int8, Group::Row, false) => 160.0,
        (Values::Int8, Group::Columns(_), false) => 215.0,
        (Values::E4m3, _, false) => 125.0,
    }
}

/// Bytes of the values of 64 columns of a row (a block).
pub(super) const fn block_bytes(weight: Scaled) -> u32 {
    8 * weight.bits() as u32
}

/// Bytes of the scales for `columns` columns of a row, if groups of columns have scales. A kernel loads these scales in the same stages as
/// the values. Returns 0 if each whole row has one scale.
pub(super) const fn scale_bytes(weight: Scaled, columns: u32) -> u32 {
    match weight.group {
        Group::Row => 0,
        Group::Columns(width) => columns.div_ceil(width) * weight.scale_bytes() as u32,
    }
}

/// Bytes per element of a weight in device memory, including scales.
pub(super) fn bytes_per_element(weight: Scaled) -> f64 {
    let scales = match weight.group {
        Group::Row => 0.0,
        Group::Columns(width) => weight.scale_bytes() as f64 / f64::from(width),
    };
    weight.bits() as f64 / 8.0 + scales
}
