//! The conversion of rows to E4M3 or int8, with a scale for each row, for products with a packed weight of the same type.

use serde::{Deserialize, Serialize};

use super::{
    GemmProblem,
    packed_rows::{self, PACK, RowElement},
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Tolerance,
        limits, rows::Teams,
    },
    machine::Machine,
    ops::Epilogue,
    tensor::{DType, Extents},
};

/// `x [rows, k]` → `quantized [rows, columns]`, `row_scale [rows, 1]`: the rows of `x`, divided by their scales, in E4M3 or int8. The scale
/// of a row is the largest magnitude in the row divided by the largest magnitude of the type: 448 for E4M3, 127 for int8. A row of zeros
/// has the scale 1. In int8, elements are rounded to the nearest integer, with ties to even, and `row_scale [rows, 2]` also has the sums of
/// the integers.
///
/// A packed weight stores each block of 64 columns in a permuted order. The result has the same order, so the elements of a stored row and
/// of a row of the weight match. `columns` is `k`, rounded up to a multiple of 128. The columns after `k` are zero.
///
/// In E4M3, NaN stays NaN. An infinite element becomes NaN, and the other elements of its row become zero. In int8, a row with an element
/// that is not finite becomes zero, and its scale NaN. Products with such rows are NaN.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QuantizeRows {
    pub k: u32,
    pub dtype: DType,
    pub to: RowElement,
}

impl QuantizeRows {
    /// Returns the kernel that converts a problem's x, and the problem with the converted x. Returns `None` unless the weight is packed, is
    /// in E4M3 or int8, and has a scale for each row. Also returns `None` if the conversion does not support `k` or the storage type.
    pub fn of(problem: &GemmProblem) -> Option<(Self, GemmProblem)> {
        let GemmProblem { k, dtype, .. } = *problem;
        let to = RowElement::beside(problem.weight)?;
        let is_packed = problem.packed().is_some();
        let is_served = is_packed && k.is_multiple_of(PACK) && k <= to.max_k();
        let converted = GemmProblem {
            quantized_rows: true,
            ..problem.clone()
        };
        is_served.then_some((Self { k, dtype, to }, converted))
    }

    /// Columns of the result.
    pub fn columns(&self) -> u32 {
        packed_rows::columns(self.k)
    }

    fn teams(&self) -> Teams {
        Teams {
            x_rows: 1,
            ..Teams::usual(self.k, self.dtype)
        }
    }
}

impl Kernel for QuantizeRows {
    facts! { template: "quantize_rows", dtype: self.dtype }

    fn symbol(&self) -> String {
        let to = match self.to {
            RowElement::E4m3 => "",
            RowElement::Int8 => "int8_",
        };
        format!("quantize_rows_{to}{}_k{}", self.dtype, self.k)
    }

    fn constants(&self) -> Constants {
        let mut constants = self.teams().constants(self.k, self.dtype);
        constants.extend([
            ("k", self.k.into()),
            ("columns", self.columns().into()),
            ("int8", (self.to == RowElement::Int8).into()),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        packed_rows::params(
            self.k,
            self.dtype,
            self.to.element(),
            self.to.scales_shape(),
        )
    }

    /// Returns Hopper for E4M3, because only kernels for Hopper read quantized rows in E4M3.
    fn instructions(&self) -> Instructions {
        match self.to {
            RowElement::E4m3 => Instructions::Hopper,
            RowElement::Int8 => Instructions::Ampere,
        }
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.k])?;
        limits::teams(self.teams(), self.k, self.dtype)?;
        let problem = GemmProblem {
            weight: self.to.weight(),
            ..GemmProblem::new(1, self.k, self.dtype, Epilogue::default())
        };
        match Self::of(&problem) {
            Some(_) => Ok(()),
            None => Err(format!(
                "rows of {} columns in {} that are converted to {}; expected a multiple of {PACK} up to {}, in f16 or bf16",
                self.k,
                self.dtype,
                self.to.element(),
                self.to.max_k()
            )),
        }
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        self.teams().launch(extents.rows)
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        Some(packed_rows::cycles(self.k, rows, machine))
    }

    fn threads(&self) -> u32 {
        self.teams().threads()
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (quantized, scales) = packed_rows::quantized(reads[0].real(), self.k, self.to);
        vec![HostTensor::Real(quantized), HostTensor::Real(scales)]
    }

    fn cases(&self) -> Vec<Case> {
        Case::standard()
    }

    fn tolerance(&self) -> Tolerance {
        match self.to {
            RowElement::E4m3 => packed_rows::IN_E4M3,
            RowElement::Int8 => Tolerance {
                absolute: 0.0,
                relative: 1e-6,
                reason: "the reference has the same operations in f32; exact integers and sums",
            },
        }
    }
}

/// Instances with one warp per row and with several warps per row, and with every kind of partial block.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut kernels = Vec::new();
    for to in [RowElement::E4m3, RowElement::Int8] {
        for dtype in [DType::F16, DType::BF16] {
            for k in [8, 328, 768, 1024, 4096, 14_336] {
                kernels.push(QuantizeRows { k, dtype, to }.into());
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_widths_and_f32_are_refused() {
        let of = |k, dtype, to| QuantizeRows { k, dtype, to }.validate();
        let refused = |k, dtype, to| of(k, dtype, to).unwrap_err();
        let (e4m3, int8) = (RowElement::E4m3, RowElement::Int8);
        assert_eq!(
            refused(36, DType::F16, int8),
            "rows of 36 columns in f16 that are converted to i8; expected a multiple of 8 up to 65536, in f16 or bf16"
        );
        assert!(refused(36, DType::F16, e4m3).contains("converted to e4m3"));
        assert!(refused(64, DType::F32, e4m3).contains("in f32"));
    }
}
