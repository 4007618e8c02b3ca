//! RMSNorm (Zhang and Sennrich 2019), which divides a row by its root mean square, and LayerNorm of heads, which first subtracts the mean.

use serde::{Deserialize, Serialize};

use super::{
    Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Role, Tolerance, f32_literal,
    layernorm::NO_RESIDUAL,
    rows::{Teams, read, rounded_once, rows_by, vector_width, word, write},
};
use crate::{
    kernels::limits,
    machine::Machine,
    tensor::{DType, Extents, Shape, Size, Symbol},
};

/// `x [rows, stride]`, `gamma [width]` → `out [rows, heads·width]`: `h / √(mean(h²) + eps) · gamma` for each head `h` of a row. The heads
/// are adjacent groups of `width` columns of `x`, starting at column `from`. If `centered`, `h` is a head minus its mean, and `gamma
/// [heads, width]` has a row for each head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNorm {
    pub width: u32,
    pub heads: u32,
    pub from: u32,
    /// Columns of `x`.
    pub stride: u32,
    pub centered: bool,
    pub eps: f32,
    pub dtype: DType,
}

impl RmsNorm {
    /// Creates the norm of whole rows.
    pub fn of_rows(width: u32, eps: f32, dtype: DType) -> Self {
        Self {
            width,
            heads: 1,
            from: 0,
            stride: width,
            centered: false,
            eps,
            dtype,
        }
    }

    /// Total number of heads of all rows. The kernel processes one head at a time.
    fn all_heads(&self) -> Size {
        &Size::from(Symbol::Rows) * &Size::constant(self.heads.into())
    }

    fn teams(&self) -> Teams {
        Teams::usual(self.width, self.dtype)
    }
}

impl Kernel for RmsNorm {
    facts! { template: "rms_norm", dtype: self.dtype, class: LayerNorm }

    fn symbol(&self) -> String {
        let columns = match (self.heads, self.from) {
            (1, 0) if self.stride == self.width => format!("w{}", self.width),
            (heads, from) => format!("h{heads}x{}_from{from}of{}", self.width, self.stride),
        };
        let name = match self.centered {
            true => "head_layer_norm",
            false => "rms_norm",
        };
        format!("{name}_{}_{columns}_eps{}", self.dtype, word(self.eps))
    }

    fn constants(&self) -> Constants {
        let mut constants = self.teams().constants(self.width, self.dtype);
        let vector = vector_width(self.dtype, &[self.width, self.from, self.stride]);
        constants.extend([
            ("eps", f32_literal(self.eps).into()),
            ("to_e4m3", false.into()),
            ("keeps", true.into()),
            ("vector", vector.into()),
            ("heads", self.heads.into()),
            ("from", self.from.into()),
            ("stride", self.stride.into()),
            ("centered", self.centered.into()),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        let x = rows_by(Symbol::Rows, self.stride);
        let gamma = match self.centered {
            true => Shape::fixed(&[self.heads.into(), self.width.into()]),
            false => Shape::fixed(&[self.width.into()]),
        };
        let out = rows_by(Symbol::Rows, self.heads * self.width);
        vec![
            read("x", self.dtype, x, Fill::ACTIVATION),
            read("gamma", self.dtype, gamma, Fill::ACTIVATION),
            write("out", self.dtype, out),
            Param {
                name: "rows",
                role: Role::Count(self.all_heads()),
            },
        ]
    }

    fn validate(&self) -> Result<(), String> {
        limits::heads(
            self.heads,
            self.width,
            &[limits::columns_of(self.from, self.stride)],
        )?;
        limits::eps(self.eps)
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        self.teams()
            .launch(extents.rows.saturating_mul(self.heads.into()))
    }

    /// Estimates the cycles from the number of elements, with the cost constants of LayerNorm.
    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        let cost = &machine.costs.norm;
        let elements = rows as f64 * f64::from(self.heads * self.width);
        Some(cost.launch_of(rows) + elements * cost.element * NO_RESIDUAL)
    }

    fn threads(&self) -> u32 {
        self.teams().threads()
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [x, gamma] = reads else {
            unreachable!("the parameter list has two operands")
        };
        let mut out = Vec::new();
        let columns = (self.heads * self.width) as usize;
        let rows = x.real().chunks_exact(self.stride as usize);
        let heads = rows
            .flat_map(|row| row[self.from as usize..][..columns].chunks_exact(self.width as usize));
        let gammas = gamma.real().chunks_exact(self.width as usize).cycle();
        for (head, gamma) in heads.zip(gammas) {
            let n = f64::from(self.width);
            let mean = match self.centered {
                true => head.iter().map(|&v| f64::from(v)).sum::<f64>() / n,
                false => 0.0,
            };
            let head = head.iter().map(|&v| f64::from(v) - mean);
            let squares: f64 = head.clone().map(|v| v.powi(2)).sum();
            let norm = (squares / n + f64::from(self.eps)).sqrt();
            out.extend(
                head.zip(gamma)
                    .map(|(v, &g)| (v / norm * f64::from(g)) as f32),
            );
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

/// Instances with realistic widths and an odd width. Some normalize heads of a merged projection, whose columns may not allow wide
/// accesses, or heads that several warps process (width 2100). Some are centered.
pub(super) fn representative() -> Vec<KernelSpec> {
    let of = |dtype| {
        let rows = [64, 128, 1003, 1024, 2048, 4096];
        let rows = rows.map(|width| RmsNorm::of_rows(width, 1e-6, dtype));
        let heads = [(16, 128, 0, 4096), (8, 128, 2048, 4096), (3, 20, 5, 66)];
        let heads = heads.map(|(heads, width, from, stride)| RmsNorm {
            heads,
            from,
            stride,
            ..RmsNorm::of_rows(width, 1e-6, dtype)
        });
        let wide = (3, 2100, 0, 6300);
        let centered = [
            (12, 128, 0, 2048),
            (1, 128, 1792, 2048),
            (3, 20, 5, 66),
            wide,
        ];
        let centered = centered.map(|(heads, width, from, stride)| RmsNorm {
            heads,
            from,
            stride,
            centered: true,
            ..RmsNorm::of_rows(width, 1e-5, dtype)
        });
        let all = rows.into_iter().chain(heads).chain(centered);
        all.map(KernelSpec::from)
    };
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    dtypes.into_iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_divided_by_its_root_mean_square() {
        let kernel = RmsNorm::of_rows(2, 1.0, DType::F32);
        let real = |values: &[f32]| HostTensor::Real(values.to_vec());
        // The mean squares are 15 and 3, and eps is 1, so the norms are 4 and 2.
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

    #[test]
    fn a_centered_head_has_its_own_weights() {
        let kernel = RmsNorm {
            heads: 2,
            stride: 5,
            from: 1,
            centered: true,
            ..RmsNorm::of_rows(2, 0.0, DType::F32)
        };
        let real = |values: &[f32]| HostTensor::Real(values.to_vec());
        // The heads are (4, 8) and (-1, -3): the means are 6 and -2, and the deviations 2 and 1.
        let x = real(&[9.0, 4.0, 8.0, -1.0, -3.0]);
        let gamma = real(&[2.0, 3.0, 5.0, 7.0]);
        let out = kernel.reference(&Extents::of(&[1]).expect("a batch"), &[&x, &gamma]);
        assert_eq!(out[0].real(), [-2.0, 3.0, 5.0, -7.0]);
    }
}
