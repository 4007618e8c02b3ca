//! RMSNorm (Zhang and Sennrich 2019): a row over its root mean square.

use serde::{Deserialize, Serialize};

use super::{
    Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance, f32_literal,
    rows::{Teams, count, read, rounded_once, rows_by, word, write},
};
use crate::machine::Machine;
use crate::tensor::{DType, Extents, Shape, Symbol};

/// `x [rows, width]`, `gamma [width]` → `out [rows, width]`: `x / √(mean(x²) + eps) · gamma`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNorm {
    pub width: u32,
    pub eps: f32,
    pub dtype: DType,
}

impl RmsNorm {
    fn teams(&self) -> Teams {
        Teams::usual(self.width, self.dtype)
    }
}

impl Kernel for RmsNorm {
    fn symbol(&self) -> String {
        format!(
            "rms_norm_{}_w{}_eps{}",
            self.dtype,
            self.width,
            word(self.eps)
        )
    }

    fn template(&self) -> &'static str {
        "rms_norm"
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
            read("gamma", self.dtype, width, Fill::ACTIVATION),
            write("out", self.dtype, rows),
            count(Symbol::Rows),
        ]
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        self.teams().launch(extents.rows)
    }

    fn threads(&self) -> u32 {
        self.teams().threads()
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [x, gamma] = reads else {
            unreachable!("the parameter list has two operands")
        };
        let mut out = Vec::with_capacity(x.real().len());
        for row in x.real().chunks_exact(self.width as usize) {
            let squares: f64 = row.iter().map(|&v| f64::from(v).powi(2)).sum();
            let norm = (squares / f64::from(self.width) + f64::from(self.eps)).sqrt();
            let normal = row.iter().zip(gamma.real());
            out.extend(normal.map(|(&v, &g)| (f64::from(v) / norm * f64::from(g)) as f32));
        }
        vec![HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        rounded_once(
            self.dtype,
            1e-5,
            "an f32 sum of squares in another order and a square root, rounded to storage",
        )
    }
}

/// Heads, the widths of models, and an odd one.
pub(super) fn representative() -> Vec<KernelSpec> {
    let of = |dtype| {
        [64, 128, 1003, 1024, 2048, 4096].map(|width| {
            RmsNorm {
                width,
                eps: 1e-6,
                dtype,
            }
            .into()
        })
    };
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    dtypes.into_iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_divided_by_its_root_mean_square() {
        let kernel = RmsNorm {
            width: 2,
            eps: 1.0,
            dtype: DType::F32,
        };
        let real = |values: &[f32]| HostTensor::Real(values.to_vec());
        // Mean squares 15 and 3, and 1 added: norms 4 and 2.
        let x = real(&[5.0, 5f32.sqrt(), 6f32.sqrt(), 0.0]);
        let out = kernel.reference(
            &Extents::of(&[2]).expect("a batch"),
            &[&x, &real(&[4.0, 2.0])],
        );
        let want = [5.0, 5f32.sqrt() / 2.0, 6f32.sqrt() * 2.0, 0.0];
        for (got, want) in out[0].real().iter().zip(want) {
            assert!((got - want).abs() < 1e-6, "{got} {want}");
        }
    }
}
