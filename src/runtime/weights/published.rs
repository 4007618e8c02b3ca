//! Weights that keep the low-bit values of a published checkpoint.

use gemmule_weights::{
    Element,
    quantized::{Kind, Runs},
};

use super::{CheckpointError, WeightSource, elements, evaluate, selected_rows};
use crate::{
    graph::WeightExpr,
    tensor::{Group, Quantized, Scaled, Values},
};

/// Scale and zero point of a group.
pub type ScaleAndZero = (f32, u8);

/// Evaluates the weight of a linear layer as low-bit values. Matrices that are published in this format keep their values and scales. Other
/// matrices are rounded.
///
/// # Errors
/// Returns the errors of [`WeightSource::read`] and [`WeightSource::read_groups`].
pub fn evaluate_quantized(
    expr: &WeightExpr,
    source: &dyn WeightSource,
    format: Scaled,
) -> Result<Quantized, CheckpointError> {
    let rows = evaluate(expr, source)?;
    let columns = expr.dims().last().map_or(1, |&n| n as usize);
    Ok(match groups(expr, source, format)? {
        Some(groups) => format.quantize_with(&rows, columns, groups),
        None => format.quantize(&rows, columns),
    })
}

/// Returns the published scales and zero points of a matrix, row by row. Returns `None` unless all stored matrices of the expression are
/// published in this format.
fn groups(
    expr: &WeightExpr,
    source: &dyn WeightSource,
    format: Scaled,
) -> Result<Option<Vec<ScaleAndZero>>, CheckpointError> {
    match expr {
        WeightExpr::Stored { name, dims } => source.read_groups(name, dims, format),
        WeightExpr::Rows { name, dims, .. } => {
            let columns = elements(&dims[1..]) as usize;
            let per_row = columns.div_ceil(format.width(columns).max(1)) as u64;
            let stored = source.read_groups(name, dims, format)?;
            Ok(stored.map(|groups| selected_rows(expr, groups, per_row)))
        }
        WeightExpr::ConcatRows(parts) => {
            let parts = parts.iter().map(|part| groups(part, source, format));
            let parts: Option<Vec<_>> = parts.collect::<Result<_, _>>()?;
            Ok(parts.map(|parts| parts.concat()))
        }
        WeightExpr::Transposed { .. }
        | WeightExpr::Sinusoid { .. }
        | WeightExpr::RelativeBias { .. }
        | WeightExpr::Positions { .. }
        | WeightExpr::Slopes { .. }
        | WeightExpr::ResizedHeads { .. }
        | WeightExpr::PlusOne { .. }
        | WeightExpr::Zeros { .. }
        | WeightExpr::ProductScales { .. }
        | WeightExpr::Scale(_) => Ok(None),
    }
}

/// Returns the kernel format that holds the values and scales of a published matrix with `columns` columns without rounding; `None` if
/// there is no such format.
pub(super) fn format_of(runs: Runs, columns: u64) -> Option<Scaled> {
    let is_row = runs.columns == columns;
    let holds = |width: &u32| is_row || runs.columns.is_multiple_of(u64::from(*width));
    let (values, group) = match runs.kind {
        Kind::Int8 => (Values::Int8, is_row.then_some(Group::Row)),
        Kind::E4M3 if is_row => (Values::E4m3, Some(Group::Row)),
        Kind::E4M3 => (Values::E4m3, holds(&128).then_some(Group::Columns(128))),
        Kind::Int4 => {
            // Kernels have scales in f16.
            let is_16 = matches!(runs.scales, Element::F16 | Element::BF16);
            let width = [128, 64, 32].into_iter().find(holds).filter(|_| is_16);
            (Values::Int4, width.map(Group::Columns))
        }
    };
    Some(Scaled {
        values,
        group: group?,
    })
}
