//! The conversion of rows to E4M3 or int8, with a scale for each row, for products with a packed weight of the same type. The rows may be
//! normalized first.

use serde::{Deserialize, Serialize};

use super::{
    GemmProblem,
    packed_rows::{self, RowElement},
};
use crate::{
    kernels::{
        Case, Constants, Fill, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param,
        Tolerance, f32_literal, limits,
        rms_norm::RmsNorm,
        rows::{Teams, count, read, rounded_once, rows_by, word, write},
    },
    machine::Machine,
    ops::Epilogue,
    tensor::{DType, Extents, Shape, Symbol},
};

/// `x [rows, k]` → `quantized [rows, columns]`, `row_scale [rows, 1]`: the rows of `x`, divided by their scales, in E4M3 or int8. The scale of
/// a row is its largest magnitude divided by that of E4M3 (448) or by 127. A row of zeros has the scale 1. In int8, elements are rounded to
/// the nearest integer, with ties to even, and `row_scale [rows, 2]` also has the sums of the integers.
///
/// With a `norm_eps`, the kernel converts `RMSNorm(x)`, rounded to the type of `x`. It then also reads the weights `gamma [k]` of the norm.
///
/// Each block of 64 columns is stored in the order of a packed weight, so that the dot product of a stored row and a row of
/// the weight multiplies the right pairs. `columns` is `k`, rounded up to a multiple of 128. The columns after `k` are zero.
///
/// In E4M3, NaN stays NaN. An infinite element becomes NaN, and the other elements of its row become zero. In int8, a row with an element that
/// is not finite becomes zero, and its scale NaN. Products with such rows are NaN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuantizeRows {
    pub k: u32,
    pub dtype: DType,
    pub to: RowElement,
    /// `eps` of an RMSNorm of the rows. Only rows in E4M3 can be normalized.
    pub norm_eps: Option<f32>,
}

/// Columns of a thread's access.
const PACK: u32 = 8;
/// Max rows of which a norm is not converted. A streaming GEMM takes about as long for them, and reads the norm in 16 bits.
const FEW_ROWS: u64 = 32;

impl QuantizeRows {
    /// Returns the conversion of a problem's x, and the problem with the converted x. Returns `None` unless the weight is packed E4M3 or int8
    /// with a scale for each row, and has columns that the conversion supports.
    pub fn of(problem: &GemmProblem) -> Option<(Self, GemmProblem)> {
        let GemmProblem { k, dtype, .. } = *problem;
        let to = RowElement::beside(problem.weight)?;
        let is_packed = problem.packed().is_some();
        let is_served = is_packed && k.is_multiple_of(PACK) && k <= to.max_k();
        let converted = GemmProblem {
            quantized_rows: true,
            ..problem.clone()
        };
        let conversion = Self {
            k,
            dtype,
            to,
            norm_eps: None,
        };
        is_served.then_some((conversion, converted))
    }

    /// Returns the norm of the rows.
    pub(crate) fn norm(&self) -> Option<RmsNorm> {
        let of = |eps| RmsNorm::of_rows(self.k, eps, self.dtype);
        self.norm_eps.map(of)
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
        let norm = match self.norm_eps {
            Some(eps) => format!("rms_norm_eps{}_", word(eps)),
            None => String::new(),
        };
        format!("{norm}quantize_rows_{to}{}_k{}", self.dtype, self.k)
    }

    fn constants(&self) -> Constants {
        let mut constants = self.teams().constants(self.k, self.dtype);
        constants.extend([
            ("k", self.k.into()),
            ("columns", self.columns().into()),
            ("int8", (self.to == RowElement::Int8).into()),
            ("normalizes", self.norm_eps.is_some().into()),
            ("eps", f32_literal(self.norm_eps.unwrap_or(0.0)).into()),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        // With this deviation of the converted values, scales are far above the absolute tolerance.
        let wide = Fill::Normal {
            mean: 0.0,
            deviation: 1000.0,
        };
        let rows = rows_by(Symbol::Rows, self.k);
        let mut params = match self.norm_eps {
            Some(_) => vec![
                read("x", self.dtype, rows, Fill::ACTIVATION),
                read("gamma", self.dtype, Shape::fixed(&[self.k.into()]), wide),
            ],
            None => vec![read("x", self.dtype, rows, wide)],
        };
        let columns = rows_by(Symbol::Rows, self.columns());
        params.extend([
            write("quantized", self.to.element(), columns),
            write("row_scale", DType::F32, self.to.scales_shape()),
            count(Symbol::Rows),
        ]);
        params
    }

    /// Only kernels for Hopper read rows in E4M3.
    fn instructions(&self) -> Instructions {
        match self.to {
            RowElement::E4m3 => Instructions::Hopper,
            RowElement::Int8 => Instructions::Ampere,
        }
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.k])?;
        limits::teams(self.teams(), self.k, self.dtype)?;
        if let Some(eps) = self.norm_eps {
            limits::eps(eps)?;
            if self.to == RowElement::Int8 {
                return Err("normalized rows in int8; expected E4M3".to_owned());
            }
        }
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

    /// Estimates the cycles. With a norm, the estimate for few rows is infinite.
    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        if let Some(norm) = self.norm() {
            return match rows <= FEW_ROWS {
                true => Some(f64::INFINITY),
                false => norm.cycles(rows, machine),
            };
        }
        // The kernel moves half as many bytes as a norm with a residual, in the same access pattern.
        let cost = &machine.costs.norm;
        let elements = rows as f64 * f64::from(self.k);
        Some(cost.launch_of(rows) + elements * cost.element * 0.5)
    }

    fn threads(&self) -> u32 {
        self.teams().threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let normalized = self.norm().map(|norm| {
            let rows = norm.reference(extents, reads).remove(0);
            let rows = rows.real().iter().map(|&v| self.dtype.round(v));
            rows.collect::<Vec<f32>>()
        });
        let x = normalized.as_deref().unwrap_or_else(|| reads[0].real());
        let (quantized, scales) = packed_rows::quantized(x, self.k, self.to);
        vec![HostTensor::Real(quantized), HostTensor::Real(scales)]
    }

    fn cases(&self) -> Vec<Case> {
        Case::standard()
    }

    fn tolerance(&self) -> Tolerance {
        // A norm may be rounded to the adjacent value of its type, and so may the largest element of its row.
        let of_norm = match self.norm_eps {
            Some(_) => 4.0 * rounded_once(self.dtype, 0.0, "").relative,
            None => 0.0,
        };
        match self.to {
            RowElement::E4m3 => Tolerance {
                absolute: 1.0 / 1024.0 + 1e-5,
                relative: 1.0 / 16.0 + 1e-5 + of_norm,
                reason: "half a step of E4M3 (2^-4, and 2^-10 below 2^-6); the multiplication by the reciprocal of a scale",
            },
            RowElement::Int8 => Tolerance {
                absolute: 0.0,
                relative: 1e-6,
                reason: "the reference has the same operations in f32; exact integers and sums",
            },
        }
    }
}

/// Instances with one warp and with several warps for a row, and with every kind of partial block.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut kernels = Vec::new();
    for (to, norm_eps) in [
        (RowElement::E4m3, None),
        (RowElement::E4m3, Some(1e-6)),
        (RowElement::Int8, None),
    ] {
        for dtype in [DType::F16, DType::BF16] {
            let kernel = |k| QuantizeRows {
                k,
                dtype,
                to,
                norm_eps,
            };
            let widths = [8, 328, 768, 1024, 4096, 14_336].into_iter();
            kernels.extend(widths.map(kernel).map(KernelSpec::from));
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_widths_and_f32_are_refused() {
        let refused = |k, dtype, to| {
            let kernel = QuantizeRows {
                k,
                dtype,
                to,
                norm_eps: None,
            };
            kernel.validate().unwrap_err()
        };
        let (e4m3, int8) = (RowElement::E4m3, RowElement::Int8);
        assert_eq!(
            refused(36, DType::F16, int8),
            "rows of 36 columns in f16 that are converted to i8; expected a multiple of 8 up to 65536, in f16 or bf16"
        );
        assert!(refused(36, DType::F16, e4m3).contains("converted to e4m3"));
        assert!(refused(64, DType::F32, e4m3).contains("in f32"));
    }

    #[test]
    fn norms_convert_their_rows_only_to_e4m3_and_need_a_valid_eps() {
        let of = |to, eps| {
            let kernel = QuantizeRows {
                k: 64,
                dtype: DType::F16,
                to,
                norm_eps: Some(eps),
            };
            kernel.validate()
        };
        of(RowElement::E4m3, 1e-6).expect("it is supported");
        let refused = of(RowElement::Int8, 1e-6).unwrap_err();
        assert_eq!(refused, "normalized rows in int8; expected E4M3");
        assert!(of(RowElement::E4m3, -1.0).is_err());
    }
}
