//! Scales of products in E4M3. A scale is computed from a whole matrix, so a loader keeps the scales that several tensors need.

use std::{
    collections::{HashMap, HashSet},
    slice,
    sync::{Mutex, PoisonError},
};

use super::{CheckpointError, WeightSource, evaluate, rows::Rows};
use crate::{
    graph::{Bound, WeightExpr},
    tensor::{Group, Quantized, Scaled, Values, row_scale},
};

/// Evaluates the weight of a product in E4M3. Each row of the matrix is divided by its own scale.
///
/// # Errors
/// Returns the errors of [`WeightSource::read`].
pub fn evaluate_scaled(
    expr: &WeightExpr,
    source: &dyn WeightSource,
) -> Result<Quantized, CheckpointError> {
    const FORMAT: Scaled = Scaled {
        values: Values::E4m3,
        group: Group::Row,
    };
    let rows = Rows::evaluate(expr, source)?;
    Ok(FORMAT.quantize_rows(rows.len(), rows.columns, |row, to| rows.read(row, to)))
}

/// Scales that have been computed and are kept for other tensors.
#[derive(Default)]
pub struct Scales<'e> {
    /// For each bound, the scale of values within this bound.
    inputs: Mutex<HashMap<&'e Bound, f32>>,
    /// Scales of the rows of each matrix. The key is the list of the parts whose concatenated rows are the matrix.
    rows: Mutex<HashMap<&'e [WeightExpr], Vec<f32>>>,
}

impl<'e> Scales<'e> {
    /// Returns the bounds from which scales among `weights` are computed, without duplicates.
    pub fn bounds(weights: impl Iterator<Item = &'e WeightExpr>) -> Vec<&'e Bound> {
        let mut seen = HashSet::new();
        let bounds = weights.filter_map(WeightExpr::bound);
        bounds.filter(|&bound| seen.insert(bound)).collect()
    }

    /// Computes and keeps the scale of values within a bound.
    ///
    /// # Errors
    /// Returns the errors of [`WeightSource::read`], and an error for a bound that is not finite.
    pub fn add_input(
        &self,
        bound: &'e Bound,
        source: &dyn WeightSource,
    ) -> Result<(), CheckpointError> {
        let scale = scale(bound, source)?;
        let mut inputs = self.inputs.lock().unwrap_or_else(PoisonError::into_inner);
        inputs.insert(bound, scale);
        Ok(())
    }

    /// Keeps the scales of the rows of a matrix.
    pub fn add_rows(&self, weight: &'e WeightExpr, matrix: &Quantized) {
        let parts = match weight {
            WeightExpr::ConcatRows(parts) => parts.as_slice(),
            one => slice::from_ref(one),
        };
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        rows.insert(parts, matrix.scales().collect());
    }

    /// Evaluates [`WeightExpr::ProductScales`] or [`WeightExpr::Scale`] with the scales that are kept, and any other expression like
    /// [`evaluate`].
    ///
    /// # Errors
    /// Returns the errors of [`evaluate`].
    pub fn evaluate(
        &self,
        expr: &WeightExpr,
        source: &dyn WeightSource,
    ) -> Result<Vec<f32>, CheckpointError> {
        let input = |bound: &Bound| {
            let inputs = self.inputs.lock().unwrap_or_else(PoisonError::into_inner);
            let kept = inputs.get(bound).copied();
            drop(inputs);
            kept.map_or_else(|| scale(bound, source), Ok)
        };
        match expr {
            WeightExpr::Scale(bound) => Ok(vec![input(bound)?]),
            WeightExpr::ProductScales {
                weight,
                input: bound,
            } => {
                let input = input(bound)?;
                let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
                let kept = rows.get(weight.as_slice()).cloned();
                drop(rows);
                let rows = match kept {
                    Some(kept) => kept,
                    None => {
                        let mut rows = Vec::new();
                        // Evaluate one part at a time, because a matrix may be large.
                        for part in weight {
                            rows.extend(Rows::evaluate(part, source)?.map(|_, row| row_scale(row)));
                        }
                        rows
                    }
                };
                Ok(rows.into_iter().map(|scale| scale * input).collect())
            }
            _ => evaluate(expr, source),
        }
    }
}

/// Returns the scale by which values within `bound` are divided to fit the range of E4M3.
fn scale(bound: &Bound, source: &dyn WeightSource) -> Result<f32, CheckpointError> {
    let all = |parts: &[WeightExpr]| -> Result<Vec<f32>, CheckpointError> {
        let mut values = Vec::new();
        for part in parts {
            values.extend(evaluate(part, source)?);
        }
        Ok(values)
    };
    let (gamma, beta) = (all(&bound.gamma)?, all(&bound.beta)?);
    let mut outputs: Vec<f64> = Vec::new();
    if let Some(linear) = &bound.linear {
        let bias = all(&linear.bias)?;
        let of_value = linear.from..linear.from + linear.outputs;
        for part in &linear.weight {
            let rows = Rows::evaluate(part, source)?;
            let first = outputs.len();
            outputs.extend(rows.map(|row, elements| {
                let row = first + row;
                let bias = bias.get(row).copied().unwrap_or_default();
                match of_value.contains(&(row as u64)) {
                    true => Bound::of_output(&gamma, &beta, elements, bias),
                    false => 0.0,
                }
            }));
        }
    }
    let largest = bound.of_outputs(&gamma, &beta, &outputs) as f32;
    match largest.is_finite() {
        true => Ok(row_scale(&[largest])),
        false => {
            let stored = bound.gamma.iter().flat_map(WeightExpr::stored).next();
            let tensor = stored.map_or("a norm", |(name, _)| name).to_owned();
            Err(CheckpointError::NoBound { tensor })
        }
    }
}
