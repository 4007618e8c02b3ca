//! Matrices that are converted to f32 row by row, so that no f32 copy of a whole matrix is needed.

use rayon::prelude::*;

use super::{CheckpointError, WeightSource, decode_into, evaluate_as};
use crate::{graph::WeightExpr, tensor::DType};

/// A matrix in the type in which it is stored.
pub(super) struct Rows {
    bytes: Vec<u8>,
    dtype: DType,
    pub columns: usize,
}

impl Rows {
    /// Evaluates a matrix in the narrowest type that rounds none of its elements.
    ///
    /// # Errors
    /// Returns the errors of [`evaluate_as`].
    pub fn evaluate(expr: &WeightExpr, source: &dyn WeightSource) -> Result<Self, CheckpointError> {
        let dtype = dtype(expr, source);
        Ok(Self {
            bytes: evaluate_as(expr, source, dtype)?,
            dtype,
            columns: expr.dims().last().map_or(1, |&n| n.max(1) as usize),
        })
    }

    /// Bytes of a row.
    fn pitch(&self) -> usize {
        self.columns * self.dtype.bytes() as usize
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.pitch()
    }

    /// Appends the elements of a row to `elements`, converted to f32.
    pub fn read(&self, row: usize, elements: &mut Vec<f32>) {
        let bytes = &self.bytes[row * self.pitch()..][..self.pitch()];
        decode_into(elements, bytes, self.dtype);
    }

    /// Calls `value(row, elements)` for each row in parallel, and returns the results in the order of the rows.
    pub fn map<T: Send>(&self, value: impl Fn(usize, &[f32]) -> T + Sync) -> Vec<T> {
        let rows = (0..self.len()).into_par_iter();
        rows.map_init(Vec::new, |elements, row| {
            elements.clear();
            self.read(row, elements);
            value(row, elements)
        })
        .collect()
    }
}

/// Returns the narrowest type in which [`evaluate_as`] rounds no element of an expression.
fn dtype(expr: &WeightExpr, source: &dyn WeightSource) -> DType {
    match expr {
        WeightExpr::Stored { name, dims } | WeightExpr::Rows { name, dims, .. } => {
            source.dtype(name, dims)
        }
        WeightExpr::ConcatRows(parts) => {
            let mut parts = parts.iter().map(|part| dtype(part, source));
            let first = parts.next().unwrap_or(DType::F32);
            match parts.all(|other| other == first) {
                true => first,
                false => DType::F32,
            }
        }
        // In f32, no element of any expression is rounded.
        WeightExpr::Transposed { .. }
        | WeightExpr::Sinusoid { .. }
        | WeightExpr::RelativeBias { .. }
        | WeightExpr::Positions { .. }
        | WeightExpr::Slopes { .. }
        | WeightExpr::PlusOne { .. }
        | WeightExpr::ResizedHeads { .. }
        | WeightExpr::Zeros { .. }
        | WeightExpr::Ones { .. }
        | WeightExpr::ProductScales { .. }
        | WeightExpr::Scale(_)
        | WeightExpr::CacheScale { .. }
        | WeightExpr::OrderedColumns { .. }
        | WeightExpr::OrderedRows { .. }
        | WeightExpr::InterleavedColumns { .. } => DType::F32,
    }
}
