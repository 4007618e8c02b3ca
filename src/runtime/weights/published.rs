//! Weights that keep the low-bit values of a published checkpoint.

use std::collections::BTreeMap;

use gemmule_weights::{
    Element,
    gguf::folder::{Folder, Integers, Weight},
    quantized::{Kind, Runs},
};
use rayon::prelude::*;

use super::{
    CheckpointError, WeightSource, elements, ordered, put, rows::Rows, selected_rows, zeros,
};
use crate::{
    graph::WeightExpr,
    tensor::{Group, Quantized, Scaled, Values},
};

/// Number of elements of a GGUF matrix that a thread reads at once.
const PART: u64 = 1 << 20;

/// Scale and zero point of a group.
pub type ScaleAndZero = (f32, u8);

/// The encoded low-bit values, scales and zero points of a published matrix.
pub struct Codes {
    /// Code of each element, row by row, as [`Scaled::with_codes`] takes them.
    pub elements: Vec<u8>,
    /// Scale and zero point of each group, row by row.
    pub groups: Vec<ScaleAndZero>,
}

/// Evaluates the weight of a linear layer in the low-bit format `format`. A weight that is published in this format keeps its values and
/// scales. Any other weight is rounded.
///
/// # Errors
/// Returns the errors of [`WeightSource::read`] and [`WeightSource::read_codes`].
pub fn evaluate_quantized(
    expr: &WeightExpr,
    source: &dyn WeightSource,
    format: Scaled,
) -> Result<Quantized, CheckpointError> {
    if let Some(published) = published(expr, source, format)? {
        return Ok(published);
    }
    let rows = Rows::evaluate(expr, source)?;
    Ok(format.quantize_rows(rows.len(), rows.columns, |row, to| rows.read(row, to)))
}

/// Evaluates a weight like [`evaluate_quantized`], and returns the bytes that kernels read.
///
/// # Errors
/// Returns the errors of [`evaluate_quantized`].
pub fn evaluate_packed(
    expr: &WeightExpr,
    source: &dyn WeightSource,
    format: Scaled,
) -> Result<Vec<u8>, CheckpointError> {
    if let Some(published) = published(expr, source, format)? {
        return Ok(published.pack());
    }
    let rows = Rows::evaluate(expr, source)?;
    Ok(format.pack_rows(rows.len(), rows.columns, |row, to| rows.read(row, to)))
}

/// Returns the published values of a matrix. Returns `None` unless all stored matrices of the expression are published in `format`.
fn published(
    expr: &WeightExpr,
    source: &dyn WeightSource,
    format: Scaled,
) -> Result<Option<Quantized>, CheckpointError> {
    let columns = expr.dims().last().map_or(1, |&n| n.max(1) as usize);
    let codes = codes(expr, source, format)?;
    Ok(codes.map(|Codes { elements, groups }| format.with_codes(columns, elements, groups)))
}

/// Returns the published codes and scales of a matrix. Returns `None` unless all stored matrices of the expression are published in
/// `format`.
fn codes(
    expr: &WeightExpr,
    source: &dyn WeightSource,
    format: Scaled,
) -> Result<Option<Codes>, CheckpointError> {
    // Returns the numbers of elements and of groups in a row.
    let of_row = |dims: &[u64]| {
        let columns = elements(&dims[1..]);
        let per_row = columns.div_ceil(format.width(columns as usize).max(1) as u64);
        (columns, per_row)
    };
    match expr {
        WeightExpr::Stored { name, dims } => source.read_codes(name, dims, format),
        WeightExpr::Rows { name, dims, .. } => {
            let (columns, per_row) = of_row(dims);
            let stored = source.read_codes(name, dims, format)?;
            Ok(stored.map(|stored| Codes {
                elements: selected_rows(expr, stored.elements, columns),
                groups: selected_rows(expr, stored.groups, per_row),
            }))
        }
        WeightExpr::OrderedColumns { name, dims } => source.read_ordered_codes(name, dims, format),
        WeightExpr::OrderedRows {
            name,
            dims,
            by,
            by_dims,
        } => {
            let (columns, per_row) = of_row(dims);
            let Some(stored) = source.read_codes(name, dims, format)? else {
                return Ok(None);
            };
            let order = ordered::order(source, by, by_dims)?;
            Ok(Some(Codes {
                elements: ordered::rows(&stored.elements, &order, columns),
                groups: ordered::rows(&stored.groups, &order, per_row),
            }))
        }
        WeightExpr::ConcatRows(parts) => {
            let mut all = zeros("a quantized matrix", elements(&expr.dims()))?;
            let (mut rest, mut groups) = (all.as_mut_slice(), Vec::new());
            for part in parts {
                let Some(part) = codes(part, source, format)? else {
                    return Ok(None);
                };
                rest = put(rest, &part.elements);
                groups.extend(part.groups);
            }
            Ok(Some(Codes {
                elements: all,
                groups,
            }))
        }
        WeightExpr::Transposed { .. }
        | WeightExpr::Sinusoid { .. }
        | WeightExpr::RelativeBias { .. }
        | WeightExpr::Positions { .. }
        | WeightExpr::Slopes { .. }
        | WeightExpr::ResizedHeads { .. }
        | WeightExpr::PlusOne { .. }
        | WeightExpr::Zeros { .. }
        | WeightExpr::Ones { .. }
        | WeightExpr::ProductScales { .. }
        | WeightExpr::Scale(_)
        | WeightExpr::CacheScale { .. }
        | WeightExpr::InterleavedColumns { .. } => Ok(None),
    }
}

/// Returns the kernel format that represents a published matrix of `columns` columns exactly; `None` if there is no such format.
pub(super) fn format_of(runs: Runs, columns: u64) -> Option<Scaled> {
    let is_row = runs.columns == columns;
    let holds = |width: &u32| is_row || runs.columns.is_multiple_of(u64::from(*width));
    // Kernels read the scales of groups of integers in f16. Scales in f32 may have no exact value in f16, so no format is exact.
    let is_16 = matches!(runs.scales, Element::F16 | Element::BF16);
    let (values, group) = match runs.kind {
        Kind::Int8 if is_row => (Values::Int8, Some(Group::Row)),
        Kind::Int8 => {
            let is_held = is_16 && holds(&32);
            (Values::Int8, is_held.then_some(Group::Columns(32)))
        }
        Kind::E4M3 if is_row => (Values::E4m3, Some(Group::Row)),
        Kind::E4M3 => (Values::E4m3, holds(&128).then_some(Group::Columns(128))),
        Kind::Int4 => {
            let width = [128, 64, 32].into_iter().find(holds).filter(|_| is_16);
            (Values::Int4, width.map(Group::Columns))
        }
    };
    Some(Scaled {
        values,
        group: group?,
    })
}

/// Returns the kernel format that represents a matrix of a GGUF file exactly; `None` if there is no such format.
pub(super) fn of_gguf(weight: &Weight) -> Option<Scaled> {
    let values = match weight.integers()? {
        Integers::Int4 => Values::Int4,
        Integers::Int8 => Values::Int8,
    };
    Some(Scaled {
        values,
        group: Group::Columns(Weight::RUN as u32),
    })
}

/// Reads a matrix of a GGUF file in the format that [`of_gguf`] returns. Also returns the number of its values that are not finite.
pub(super) fn codes_of_gguf(
    folder: &Folder,
    weight: &Weight,
    format: Scaled,
) -> Result<(Codes, usize), CheckpointError> {
    // Number of rows that are read at once.
    let rows = PART.div_ceil(weight.dims.last().map_or(1, |&n| n.max(1)));
    let (elements, scales) = match weight.in_parts(rows) {
        Some(parts) => {
            let parts = parts.par_iter().map(|part| folder.read_integers(part));
            let parts: Vec<_> = parts.collect::<Result<_, _>>()?;
            let mut all = zeros(weight.stored_name(), elements(&weight.dims))?;
            let (mut rest, mut scales) = (all.as_mut_slice(), Vec::new());
            for (elements, of_part) in &parts {
                rest = put(rest, elements);
                scales.extend_from_slice(of_part);
            }
            (all, scales)
        }
        None => folder.read_integers(weight)?,
    };
    let n_bad = scales.iter().filter(|scale| !scale.is_finite()).count();
    // The integers of Q4_0 are codes minus 8.
    let zero = format.zero_point(8);
    let groups = scales.into_iter().map(|scale| (scale, zero)).collect();
    let codes = Codes { elements, groups };
    Ok((codes, n_bad * Weight::RUN as usize))
}

/// Logs which quantized tensors of a GGUF file keep their values, and which are dequantized.
pub(super) fn log_gguf<'w>(weights: impl Iterator<Item = &'w Weight>) {
    let mut kept = BTreeMap::<String, usize>::new();
    let mut others = BTreeMap::<String, usize>::new();
    for weight in weights.filter(|weight| weight.format.block_elements() > 1) {
        let formats = match weight.integers() {
            Some(_) => &mut kept,
            None => &mut others,
        };
        *formats.entry(weight.format.to_string()).or_default() += 1;
    }
    let listed = |formats: BTreeMap<String, usize>| {
        let each = formats.iter().map(|(format, n)| format!("{n} in {format}"));
        each.collect::<Vec<_>>().join(", ")
    };
    if !kept.is_empty() {
        tracing::info!(
            "the file has matrices whose values a GPU keeps in linear layers, with activations in f16 or bf16: {}",
            listed(kept)
        );
    }
    if !others.is_empty() {
        tracing::info!(
            "the file has tensors in formats that kernels do not have ({}); they are dequantized when they are read. `--quantize int8` or `int4` stores the weights of all linear layers in few bits",
            listed(others)
        );
    }
}
