//! LayerNorm and what is fused with it. One warp reduces X rows together
//! (TurboTransformers 4.1.2, `warpAllReduce_XElem`).
//!
//! Mean and variance come from one reduction of `x − s` and `(x − s)²`, with `s` the row's first
//! element. The paper reduces `x` and `x²` and takes `E(x²) − E(x)²`, which loses the variance where
//! the mean is large beside the deviation; the variance does not depend on a shift.

use serde::{Deserialize, Serialize};

use super::{
    Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance, f32_literal,
    rows::{RowTeams, count, read, rounded_once, rows_by, word, write},
};
use crate::tensor::{DType, Extents, Shape, Symbol};

/// `x [rows, width]`, `gamma`, `beta [width]` → `out [rows, width]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerNorm {
    pub width: u32,
    pub eps: f32,
    pub dtype: DType,
}

/// `x [rows, width]`, (`bias [width]`), `residual [rows, width]`, `gamma`, `beta [width]`
/// → `out [rows, width]`: LayerNorm of `x + bias + residual` (ByteTransformer III.C.1).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BiasResidualLayerNorm {
    pub width: u32,
    pub eps: f32,
    pub dtype: DType,
    /// Whether there is a bias; without it the kernel is `residual_layernorm`.
    pub bias: bool,
}

impl Kernel for LayerNorm {
    fn symbol(&self) -> String {
        format!(
            "layernorm_{}_w{}_eps{}",
            self.dtype,
            self.width,
            word(self.eps)
        )
    }

    fn template(&self) -> &'static str {
        "layernorm"
    }

    fn constants(&self) -> Constants {
        constants(self.width, self.eps, self.dtype)
    }

    fn params(&self) -> Vec<Param> {
        let rows = rows_by(Symbol::Rows, self.width);
        let mut params = vec![read("x", self.dtype, rows.clone(), input_fill(self.dtype))];
        params.extend(affine_params(self.width, self.dtype));
        params.push(write("out", self.dtype, rows));
        params.push(count(Symbol::Rows));
        params
    }

    fn launch(&self, extents: &Extents) -> Launch {
        RowTeams::of(self.width, self.dtype).launch(extents.rows)
    }

    fn threads(&self) -> u32 {
        RowTeams::of(self.width, self.dtype).threads()
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [x, gamma, beta] = reads else {
            unreachable!("the parameter list has three operands")
        };
        let out = x
            .real()
            .chunks_exact(self.width as usize)
            .flat_map(|row| {
                let row: Vec<f64> = row.iter().map(|&v| v.into()).collect();
                layernorm_row(&row, gamma.real(), beta.real(), self.eps)
            })
            .collect();
        vec![HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        tolerance(self.dtype)
    }
}

impl Kernel for BiasResidualLayerNorm {
    fn symbol(&self) -> String {
        format!(
            "{}residual_layernorm_{}_w{}_eps{}",
            if self.bias { "bias_" } else { "" },
            self.dtype,
            self.width,
            word(self.eps)
        )
    }

    fn template(&self) -> &'static str {
        "bias_residual_layernorm"
    }

    fn constants(&self) -> Constants {
        let mut constants = constants(self.width, self.eps, self.dtype);
        constants.insert("bias", self.bias.into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        let rows = rows_by(Symbol::Rows, self.width);
        let mut params = vec![read("x", self.dtype, rows.clone(), input_fill(self.dtype))];
        if self.bias {
            let width = Shape::fixed(&[self.width.into()]);
            params.push(read("bias", self.dtype, width, Fill::ACTIVATION));
        }
        params.push(read("residual", self.dtype, rows.clone(), Fill::ACTIVATION));
        params.extend(affine_params(self.width, self.dtype));
        params.push(write("out", self.dtype, rows));
        params.push(count(Symbol::Rows));
        params
    }

    fn launch(&self, extents: &Extents) -> Launch {
        RowTeams::of(self.width, self.dtype).launch(extents.rows)
    }

    fn threads(&self) -> u32 {
        RowTeams::of(self.width, self.dtype).threads()
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (x, bias, residual, gamma, beta) = match *reads {
            [x, bias, residual, gamma, beta] => (x, Some(bias), residual, gamma, beta),
            [x, residual, gamma, beta] => (x, None, residual, gamma, beta),
            _ => unreachable!("the parameter list has four operands, or five with a bias"),
        };
        let width = self.width as usize;
        let out = x
            .real()
            .chunks_exact(width)
            .zip(residual.real().chunks_exact(width))
            .flat_map(|(x, residual)| {
                let sum: Vec<f64> = (0..width)
                    .map(|c| {
                        let bias = bias.map_or(0.0, |b| b.real()[c]);
                        f64::from(x[c]) + f64::from(bias) + f64::from(residual[c])
                    })
                    .collect();
                layernorm_row(&sum, gamma.real(), beta.real(), self.eps)
            })
            .collect();
        vec![HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        tolerance(self.dtype)
    }
}

/// `(row − mean) / √(variance + eps) · gamma + beta`, in two passes.
pub(super) fn layernorm_row(row: &[f64], gamma: &[f32], beta: &[f32], eps: f32) -> Vec<f32> {
    let n = row.len() as f64;
    let mean = row.iter().sum::<f64>() / n;
    let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
    let deviation = (variance + f64::from(eps)).sqrt();
    row.iter()
        .zip(gamma.iter().zip(beta))
        .map(|(v, (&g, &b))| ((v - mean) / deviation * f64::from(g) + f64::from(b)) as f32)
        .collect()
}

/// What `partials/rows.cu` and a LayerNorm template read.
pub(super) fn constants(width: u32, eps: f32, dtype: DType) -> Constants {
    let mut constants = RowTeams::of(width, dtype).constants(width, dtype);
    constants.insert("eps", f32_literal(eps).into());
    constants
}

/// `gamma` and `beta`, as every LayerNorm takes them.
pub(super) fn affine_params(width: u32, dtype: DType) -> [Param; 2] {
    let width = Shape::fixed(&[width.into()]);
    let gamma = Fill::Normal {
        mean: 1.0,
        deviation: 0.1,
    };
    let beta = Fill::Normal {
        mean: 0.0,
        deviation: 0.1,
    };
    [
        read("gamma", dtype, width.clone(), gamma),
        read("beta", dtype, width, beta),
    ]
}

/// In f32 the mean is large beside the deviation, so that a variance which cancels is seen. The
/// 16-bit types would round such an input to a few values.
pub(super) fn input_fill(dtype: DType) -> Fill {
    let mean = if dtype == DType::F32 { 10.0 } else { 0.0 };
    Fill::Normal {
        mean,
        deviation: 1.0,
    }
}

/// Bound for every LayerNorm over sums of at most a few operands of deviation 1 and mean 10.
pub(super) fn tolerance(dtype: DType) -> Tolerance {
    rounded_once(
        dtype,
        2e-5,
        "the sums before the mean are near 10, where an f32 step is 1e-6, and a row has a few \
         thousand terms; the result, of magnitude 1, is then rounded to storage",
    )
}

/// Instances for the device check and the compile tests: every storage type, widths of models and
/// odd ones, one, two and four rows a warp, and several warps a row.
pub fn representative() -> Vec<KernelSpec> {
    let mut kernels: Vec<KernelSpec> = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for width in [768, 384, 320, 1024, 1003, 128, 1536, 4096, 8191, 8192] {
            let eps = 1e-12;
            kernels.push(KernelSpec::from(LayerNorm { width, eps, dtype }));
            for bias in [true, false] {
                kernels.push(KernelSpec::from(BiasResidualLayerNorm {
                    width,
                    eps,
                    dtype,
                    bias,
                }));
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_normalises_a_row_worked_by_hand() {
        let kernel = BiasResidualLayerNorm {
            width: 4,
            eps: 0.0,
            dtype: DType::F32,
            bias: true,
        };
        let real = |v: [f32; 4]| HostTensor::Real(v.to_vec());
        // The sums are 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5.
        let x = real([1.0, 1.0, 1.0, 1.0]);
        let bias = real([0.0, 1.0, 2.0, 3.0]);
        let residual = real([0.0, 1.0, 2.0, 3.0]);
        let gamma = real([1.0, 1.0, 2.0, 1.0]);
        let beta = real([0.0, 0.0, 0.0, 10.0]);
        let extents = Extents::of(&[1]).unwrap();
        let out = kernel.reference(&extents, &[&x, &bias, &residual, &gamma, &beta]);
        let r = 5f32.sqrt().recip();
        let want = [-3.0 * r, -r, 2.0 * r, 3.0 * r + 10.0];
        for (got, want) in out[0].real().iter().zip(want) {
            assert!((got - want).abs() < 1e-6, "{got} {want}");
        }

        let plain = LayerNorm {
            width: 4,
            eps: 4.0, // variance 5 + 4 = 9
            dtype: DType::F32,
        };
        let x = real([1.0, 3.0, 5.0, 7.0]);
        let (one, zero) = (real([1.0; 4]), real([0.0; 4]));
        let out = plain.reference(&extents, &[&x, &one, &zero]);
        assert_eq!(out[0].real(), [-1.0, -1.0 / 3.0, 1.0 / 3.0, 1.0]);
    }

    #[test]
    fn the_bias_is_a_parameter_only_where_there_is_one() {
        let names = |bias| -> Vec<&str> {
            let kernel = BiasResidualLayerNorm {
                width: 768,
                eps: 1e-12,
                dtype: DType::F16,
                bias,
            };
            kernel.params().iter().map(|p| p.name).collect()
        };
        let without = ["x", "residual", "gamma", "beta", "out", "rows"];
        let with = ["x", "bias", "residual", "gamma", "beta", "out", "rows"];
        assert_eq!(
            (names(true), names(false)),
            (with.to_vec(), without.to_vec())
        );
    }

    /// Σ over a row as the kernel takes it, in f32: a lane's packs one after the other, then the
    /// butterfly of `warp_all_reduce_xelem`.
    fn warp_sum(row: &[f32], vector: usize) -> f32 {
        let mut lanes = [0f32; 32];
        for (i, pack) in row.chunks(vector).enumerate() {
            pack.iter().for_each(|v| lanes[i % 32] += v);
        }
        for offset in [16, 8, 4, 2, 1] {
            let before = lanes;
            for (lane, sum) in lanes.iter_mut().enumerate() {
                *sum += before[lane ^ offset];
            }
        }
        lanes[0]
    }

    /// Rows of mean 1000 and deviation 0.1: twelve uniform values make a normal one.
    fn far_from_zero(width: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut uniform = || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 40) as f64 / (1u64 << 24) as f64
        };
        (0..width)
            .map(|_| {
                let normal = (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
                (1000.0 + 0.1 * normal) as f32
            })
            .collect()
    }

    #[test]
    fn the_shifted_variance_survives_a_large_mean_and_the_naive_one_does_not() {
        let mut worst_shifted = 0f64;
        let mut best_naive = f64::INFINITY;
        for (width, vector) in [(768usize, 4usize), (1024, 4), (1003, 1)] {
            for seed in 1..=16 {
                let row = far_from_zero(width, seed);
                let n = width as f64;
                let mean = row.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
                let exact = row
                    .iter()
                    .map(|&v| (f64::from(v) - mean).powi(2))
                    .sum::<f64>()
                    / n;
                let variance = |s: f32| {
                    let d: Vec<f32> = row.iter().map(|v| v - s).collect();
                    let squares: Vec<f32> = d.iter().map(|d| d * d).collect();
                    let share = 1.0 / width as f32;
                    let mean = warp_sum(&d, vector) * share;
                    warp_sum(&squares, vector) * share - mean * mean
                };
                let error = |v: f32| (f64::from(v) - exact).abs() / exact;
                worst_shifted = worst_shifted.max(error(variance(row[0])));
                best_naive = best_naive.min(error(variance(0.0)));
            }
        }
        assert!(worst_shifted < 1e-5, "relative error {worst_shifted}");
        assert!(best_naive > 0.1, "relative error {best_naive}");
    }
}
