//! Results as numpy arrays.

use gemmule::Output;
use numpy::{IxDyn, PyArray1, PyArrayDyn, PyArrayMethods};
use pyo3::prelude::*;

use crate::error::Result;

/// A row of values for each input.
pub struct Rows {
    /// Values in row-major order.
    pub values: Vec<f32>,
    pub n_rows: usize,
    /// Dimensions of a row; empty if a row is a single value.
    pub row: Vec<usize>,
}

impl Rows {
    /// Returns an array of shape `[n, …]`. For a single input, returns its row without the first dimension.
    pub fn into_array(self, py: Python<'_>, is_single: bool) -> Result<Bound<'_, PyArrayDyn<f32>>> {
        let mut shape = self.row;
        if !is_single {
            shape.insert(0, self.n_rows);
        }
        array(py, self.values, shape)
    }
}

/// Moves the values of an output to an array of the same shape.
pub fn of_output(py: Python<'_>, output: Output) -> Result<Bound<'_, PyArrayDyn<f32>>> {
    let shape = output.shape.iter().map(|&n| n as usize).collect();
    array(py, output.values, shape)
}

fn array(
    py: Python<'_>,
    values: Vec<f32>,
    shape: Vec<usize>,
) -> Result<Bound<'_, PyArrayDyn<f32>>> {
    Ok(PyArray1::from_vec(py, values).reshape(IxDyn(&shape))?)
}
