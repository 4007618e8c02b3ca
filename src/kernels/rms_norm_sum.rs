//! A kernel that computes RMSNorm of a sublayer's result, adds it to the residual stream, and computes RMSNorm of the sum. Models with
//! norms before and after each sublayer (Gemma 2, "sandwich norms") need this between two sublayers.

use serde::{Deserialize, Serialize};

use super::{
    Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance, f32_literal,
    rows::{Teams, count, read, rounded_once, rows_by, word, write},
};
use crate::{
    kernels::limits,
    machine::Machine,
    tensor::{DType, Extents, Shape, Symbol},
};

/// `x, residual [rows, width]`, `gamma, next_gamma [width]` → `sum, out [rows, width]`: `sum = residual + RMSNorm(x) · gamma`, and `out =
/// RMSNorm(sum) · next_gamma`. The second norm is computed from the unrounded sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNormSum {
    pub width: u32,
    pub eps: f32,
    pub dtype: DType,
}

/// Number of values that this kernel reads and writes per element (four), relative to LayerNorm with a residual (three), to which the cost
/// per element was fitted.
const ACCESSES: f64 = 4.0 / 3.0;

impl RmsNormSum {
    /// Returns the teams for few rows. Several warps per row shorten the two reductions of a row, of which the second depends on the first.
    fn teams(&self) -> Teams {
        Teams::for_few_rows(self.width, self.dtype)
    }
}

impl Kernel for RmsNormSum {
    facts! { template: "rms_norm_sum", dtype: self.dtype, class: LayerNorm }

    fn symbol(&self) -> String {
        format!(
            "rms_norm_sum_rms_norm_{}_w{}_eps{}",
            self.dtype,
            self.width,
            word(self.eps)
        )
    }

    fn constants(&self) -> Constants {
        let mut constants = self.teams().constants(self.width, self.dtype);
        constants.insert("eps", f32_literal(self.eps).into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        let rows = rows_by(Symbol::Rows, self.width);
        let width = Shape::fixed(&[self.width.into()]);
        vec![
            read("x", self.dtype, rows.clone(), Fill::ACTIVATION),
            read("gamma", self.dtype, width.clone(), Fill::ACTIVATION),
            read("residual", self.dtype, rows.clone(), Fill::ACTIVATION),
            read("next_gamma", self.dtype, width, Fill::ACTIVATION),
            write("sum", self.dtype, rows.clone()),
            write("out", self.dtype, rows),
            count(Symbol::Rows),
        ]
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])?;
        limits::eps(self.eps)
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        self.teams().launch(extents.rows)
    }

    /// Estimates the cycles from the number of elements, with the cost constants of LayerNorm.
    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        let cost = &machine.costs.norm;
        let elements = rows as f64 * f64::from(self.width);
        Some(cost.launch_of(rows) + elements * cost.element * ACCESSES)
    }

    fn threads(&self) -> u32 {
        self.teams().threads()
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [x, gamma, residual, next_gamma] = reads else {
            unreachable!("the parameter list has four operands")
        };
        let width = self.width as usize;
        let norm = |row: &[f64]| {
            let squares: f64 = row.iter().map(|v| v * v).sum();
            (squares / f64::from(self.width) + f64::from(self.eps)).sqrt()
        };
        let (mut sums, mut out) = (Vec::new(), Vec::new());
        let rows = x.real().chunks_exact(width);
        for (x, residual) in rows.zip(residual.real().chunks_exact(width)) {
            let x: Vec<f64> = x.iter().map(|&v| v.into()).collect();
            let of_x = norm(&x);
            let branch = x.iter().zip(gamma.real()).zip(residual);
            let sum: Vec<f64> = branch
                .map(|((v, &g), &r)| f64::from(r) + v / of_x * f64::from(g))
                .collect();
            let of_sum = norm(&sum);
            let next = sum.iter().zip(next_gamma.real());
            out.extend(next.map(|(v, &g)| (v / of_sum * f64::from(g)) as f32));
            sums.extend(sum.iter().map(|&v| v as f32));
        }
        vec![HostTensor::Real(sums), HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        rounded_once(
            self.dtype,
            2e-5,
            "two f32 sums of squares in another order, each with a square root, rounded to storage",
        )
    }
}

/// Instances with the widths of Gemma's models, narrow rows, and an odd width.
pub(super) fn representative() -> Vec<KernelSpec> {
    let of = |dtype| {
        [64, 768, 1003, 1152, 2560, 4096].map(|width| {
            KernelSpec::from(RmsNormSum {
                width,
                eps: 1e-6,
                dtype,
            })
        })
    };
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    dtypes.into_iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_branch_is_normalized_then_added_and_the_sum_is_normalized() {
        let kernel = RmsNormSum {
            width: 2,
            eps: 1.0,
            dtype: DType::F32,
        };
        let real = |values: &[f32]| HostTensor::Real(values.to_vec());
        // The mean square of x is 15 and eps is 1, so the norm of x is 4, and x · gamma / 4 = [5, √5]. The mean square of the sum [√6, 0]
        // is 3, so the norm of the sum is 2.
        let x = real(&[5.0, 5f32.sqrt()]);
        let residual = real(&[6f32.sqrt() - 5.0, -(5f32.sqrt())]);
        let reads = [&x, &real(&[4.0, 4.0]), &residual, &real(&[2.0, 8.0])];
        let out = kernel.reference(&Extents::of(&[1]).expect("a batch"), &reads);
        for (out, want) in out.iter().zip([[6f32.sqrt(), 0.0], [6f32.sqrt(), 0.0]]) {
            for (got, want) in out.real().iter().zip(want) {
                assert!((got - want).abs() < 1e-6, "{got} {want}");
            }
        }
    }
}
