//! The parts of a problem that depend on the elements of quantized rows.

use super::{
    GemmProblem,
    packed_rows::{RowElement, columns},
};
use crate::{
    kernels::HostTensor,
    tensor::{Format, Scaled},
};

impl GemmProblem {
    /// Elements of quantized rows.
    pub(crate) fn row_element(&self) -> RowElement {
        match self.multiplies_int8() {
            true => RowElement::Int8,
            false => RowElement::E4m3,
        }
    }

    /// Whether products of 8-bit integers are computed.
    pub(crate) fn multiplies_int8(&self) -> bool {
        self.quantized_rows && self.weight == Format::INT8
    }

    /// Returns the format of a packed weight that kernels convert in registers.
    pub(super) fn converted(&self) -> Option<Scaled> {
        self.packed().filter(|_| !self.quantized_rows)
    }

    /// Returns the problem without the conversion of the rows of x.
    pub(crate) fn with_plain_rows(&self) -> Self {
        Self {
            quantized_rows: false,
            ..self.clone()
        }
    }

    /// Checks the weight, the result and the columns of a problem with quantized rows.
    ///
    /// # Errors
    /// Returns the reason if no kernel computes the problem.
    pub(super) fn check_quantized_rows(&self) -> Result<(), String> {
        match RowElement::beside(self.weight) {
            Some(to) if self.dtype.has_mma() && self.k <= to.max_k() => Ok(()),
            _ => Err(format!(
                "quantized rows of {} columns, a weight in {} and results in {}; expected a weight in {}, or in {} with at most {} columns, and results in f16 or bf16",
                self.k,
                self.weight,
                self.dtype,
                Format::FP8,
                Format::INT8,
                RowElement::Int8.max_k()
            )),
        }
    }

    /// Returns the scales of rows in int8 with the sums of the rows in `reads`, and their index among the operands.
    pub(super) fn derived_inputs(&self, reads: &[&HostTensor]) -> Vec<(usize, HostTensor)> {
        let (true, [x, _, x_scale, ..]) = (self.multiplies_int8(), reads) else {
            return Vec::new();
        };
        let rows = x.real().chunks_exact(columns(self.k) as usize);
        let scales = x_scale.real().chunks_exact(2).zip(rows);
        let scales = scales.flat_map(|(scale, row)| [scale[0], row.iter().sum()]);
        vec![(2, HostTensor::Real(scales.collect()))]
    }
}
