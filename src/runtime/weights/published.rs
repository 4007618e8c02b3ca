//! Weights that keep the low-bit values of a published checkpoint.

use std::collections::BTreeMap;

use gemmule_weights::{
    Element,
    gguf::folder::{Folder, Weight},
    quantized::{Kind, Runs},
};

use super::{CheckpointError, WeightSource, elements, evaluate, ordered, selected_rows};
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
        WeightExpr::OrderedColumns { name, dims } => source.read_ordered_groups(name, dims, format),
        WeightExpr::OrderedRows {
            name,
            dims,
            by,
            by_dims,
        } => {
            let columns = elements(&dims[1..]) as usize;
            let per_row = columns.div_ceil(format.width(columns).max(1)) as u64;
            let Some(stored) = source.read_groups(name, dims, format)? else {
                return Ok(None);
            };
            let order = ordered::order(source, by, by_dims)?;
            Ok(Some(ordered::rows(&stored, &order, per_row)))
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
        | WeightExpr::Scale(_)
        | WeightExpr::CacheScale { .. } => Ok(None),
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

/// Returns the kernel format that holds the values and scales of a matrix in a GGUF file without rounding; `None` if there is no such
/// format.
pub(super) fn of_gguf(weight: &Weight) -> Option<Scaled> {
    weight.is_int4().then_some(Scaled {
        values: Values::Int4,
        group: Group::Columns(Weight::RUN as u32),
    })
}

/// Reads the scale and the zero point of each group of a matrix in a GGUF file.
pub(super) fn groups_of_gguf(
    folder: &Folder,
    weight: &Weight,
) -> Result<Vec<ScaleAndZero>, CheckpointError> {
    let scales = folder.scales(weight)?.into_iter();
    Ok(scales.map(|scale| (scale, 8)).collect())
}

/// Logs how the quantized tensors of a GGUF file are read.
pub(super) fn log_gguf<'w>(weights: impl Iterator<Item = &'w Weight>) {
    let (mut kept, mut others) = (0, BTreeMap::<String, usize>::new());
    for weight in weights.filter(|weight| weight.format.block_elements() > 1) {
        match weight.is_int4() {
            true => kept += 1,
            false => *others.entry(weight.format.to_string()).or_default() += 1,
        }
    }
    if kept > 0 {
        tracing::info!(
            "the file has {kept} matrices in Q4_0, which a GPU keeps in 4 bits with activations in f16 or bf16"
        );
    }
    if !others.is_empty() {
        let each = others.iter().map(|(format, n)| format!("{n} in {format}"));
        tracing::info!(
            "the file has tensors in formats that kernels do not have ({}); they are dequantized when they are read. `--quantize int8` or `int4` stores the weights of all linear layers in few bits",
            each.collect::<Vec<_>>().join(", ")
        );
    }
}
