//! The conversion of rows to E4M3, with a scale for each row, for products with a packed weight in E4M3.

use serde::{Deserialize, Serialize};

use super::{
    GemmProblem,
    packed_rows::{self, scales_shape},
};
use crate::{
    kernels::{
        Case, Constants, Fill, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param,
        Tolerance, limits,
        rows::{Teams, count, read, rows_by, write},
    },
    machine::Machine,
    ops::Epilogue,
    tensor::{DType, Element, Extents, Format, Symbol},
};

/// `x [rows, k]` → `quantized [rows, columns]`, `row_scale [rows, 1]`: the rows of `x`, divided by their scales, in E4M3. The scale of a row
/// is its largest magnitude divided by that of E4M3. A row of zeros has the scale 1.
///
/// Each block of 64 columns is stored in the order of a packed weight, so that the dot product of a stored row and a row of
/// the weight multiplies the right pairs. `columns` is `k`, rounded up to a multiple of 128. The columns after `k` are zero.
///
/// NaN stays NaN. An infinite element becomes NaN, and the other elements of its row become zero, so that products with the row are NaN.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QuantizeRows {
    pub k: u32,
    pub dtype: DType,
}

/// Columns of a thread's access.
const PACK: u32 = 8;

impl QuantizeRows {
    /// Returns the conversion of a problem's x, and the problem with the converted x. Returns `None` unless the weight is packed E4M3 with a
    /// scale for each row.
    pub fn of(problem: &GemmProblem) -> Option<(Self, GemmProblem)> {
        let GemmProblem { k, dtype, .. } = *problem;
        let is_packed = problem.weight == Format::FP8 && problem.packed().is_some();
        let converted = GemmProblem {
            quantized_rows: true,
            ..problem.clone()
        };
        is_packed.then_some((Self { k, dtype }, converted))
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
        format!("quantize_rows_{}_k{}", self.dtype, self.k)
    }

    fn constants(&self) -> Constants {
        let mut constants = self.teams().constants(self.k, self.dtype);
        constants.extend([("k", self.k.into()), ("columns", self.columns().into())]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        // With this deviation, scales are far above the absolute tolerance.
        let x = Fill::Normal {
            mean: 0.0,
            deviation: 1000.0,
        };
        let columns = rows_by(Symbol::Rows, self.columns());
        vec![
            read("x", self.dtype, rows_by(Symbol::Rows, self.k), x),
            write("quantized", Element::E4m3, columns),
            write("row_scale", DType::F32, scales_shape()),
            count(Symbol::Rows),
        ]
    }

    /// Only kernels for Hopper read the result.
    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.k])?;
        limits::teams(self.teams(), self.k, self.dtype)?;
        let problem = GemmProblem {
            weight: Format::FP8,
            ..GemmProblem::new(1, self.k, self.dtype, Epilogue::default())
        };
        match Self::of(&problem) {
            Some(_) if self.k.is_multiple_of(PACK) => Ok(()),
            _ => Err(format!(
                "rows of {} columns in {} that are converted to E4M3; expected a multiple of {PACK} in f16 or bf16",
                self.k, self.dtype
            )),
        }
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        self.teams().launch(extents.rows)
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        // The kernel moves half as many bytes as a norm with a residual, in the same access pattern.
        let cost = &machine.costs.norm;
        let elements = rows as f64 * f64::from(self.k);
        Some(cost.launch_of(rows) + elements * cost.element * 0.5)
    }

    fn threads(&self) -> u32 {
        self.teams().threads()
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (quantized, scales) = packed_rows::quantized(reads[0].real(), self.k);
        vec![HostTensor::Real(quantized), HostTensor::Real(scales)]
    }

    fn cases(&self) -> Vec<Case> {
        Case::standard()
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            absolute: 1.0 / 1024.0 + 1e-5,
            relative: 1.0 / 16.0 + 1e-5,
            reason: "half a step of E4M3 (2^-4, and 2^-10 below 2^-6); the multiplication by the reciprocal of a scale",
        }
    }
}

/// Instances with one warp and with several warps for a row, and with every kind of partial block.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut kernels = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for k in [8, 328, 768, 1024, 4096, 14_336] {
            kernels.push(QuantizeRows { k, dtype }.into());
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_widths_and_f32_are_refused() {
        let refused = |k, dtype| QuantizeRows { k, dtype }.validate().unwrap_err();
        assert_eq!(
            refused(36, DType::F16),
            "rows of 36 columns in f16 that are converted to E4M3; expected a multiple of 8 in f16 or bf16"
        );
        assert!(refused(64, DType::F32).contains("in f32"));
    }
}
