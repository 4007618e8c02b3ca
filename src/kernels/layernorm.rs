//! LayerNorm, alone and fused with bias and residual. The reductions of several rows are interleaved in a warp or a CTA, as in
//! `warpAllReduce_XElem` of TurboTransformers (section 4.1.2).

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use super::{
    Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance, f32_literal,
    rows::{count, read, rounded_once, rows_by, word, write},
};
use crate::{
    kernels::limits,
    machine::Machine,
    tensor::{DType, Extents, Shape, Symbol},
};

pub use super::rows::Teams;

/// Algorithm for a row's variance. Figure 5 of TurboTransformers compares one-pass and two-pass algorithms.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub enum Variance {
    /// Computes mean and variance from one reduction of `x − s` and `(x − s)²`, where `s` is the row's first element. TurboTransformers
    /// uses `E(x²) − E(x)²`, which suffers from cancellation if the mean is large compared to the deviation. The shift by `s` avoids
    /// cancellation and does not change the variance.
    #[default]
    OnePassShifted,
    /// Computes the mean first, then the mean of `(x − mean)²`, in two dependent reductions.
    TwoPass,
}

/// If a LayerNorm reads and writes at most this number of bytes in total, its result stays in L2. Otherwise, the kernel marks the result as
/// the first data to evict, because little of it would still be in L2 when the next kernel reads it. The limit is about half of the L2 of
/// an H200.
const KEPT_BYTES: u64 = 25_000_000;

/// `x [rows, width]`, `gamma`, `beta [width]` → `out [rows, width]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerNorm {
    pub width: u32,
    pub eps: f32,
    pub dtype: DType,
    pub teams: Teams,
    pub variance: Variance,
}

/// `x [rows, width]`, (`bias [width]`), `residual [rows, width]`, `gamma`, `beta [width]`
/// → `out [rows, width]`: LayerNorm of `x + bias + residual` (ByteTransformer III.C.1).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BiasResidualLayerNorm {
    pub width: u32,
    pub eps: f32,
    pub dtype: DType,
    /// Whether there is a bias. Without a bias, the kernel is called `residual_layernorm`.
    pub bias: bool,
    pub teams: Teams,
    pub variance: Variance,
}

/// Memory traffic of a norm without a residual (two values per element), relative to a norm with a residual (three values per element).
pub(super) const NO_RESIDUAL: f64 = 2.0 / 3.0;

/// Implements dispatch, cost estimate and candidates for [`LayerNorm`] and [`BiasResidualLayerNorm`].
macro_rules! choices {
    ($kernel:ident, $by_rows:path, $accesses:expr) => {
        impl $kernel {
            /// Returns the default dispatch by number of rows. Each entry is a max number of rows (inclusive) and the kernel for launches
            /// up to this number. The last entry has no max. In launches with few rows, several warps process each row.
            pub fn by_rows(&self, machine: &Machine) -> Vec<(Option<u64>, Self)> {
                $by_rows(self.width, self.dtype, machine)
                    .into_iter()
                    .map(|(rows, teams)| {
                        let kernel = Self {
                            teams,
                            ..self.clone()
                        };
                        (rows, kernel)
                    })
                    .collect()
            }

            /// Estimates the cycles from the number of elements. The kernel is memory-bound, so `teams` has little effect. If `teams` is
            /// not the default for this number of rows, the estimate is slightly higher.
            fn estimate(&self, rows: u64, machine: &Machine) -> f64 {
                const OTHER_SHARING: f64 = 1.03;
                let ranges = $by_rows(self.width, self.dtype, machine);
                let serves =
                    |(most, _): &&(Option<u64>, Teams)| most.is_none_or(|most| rows <= most);
                let is_best = ranges
                    .iter()
                    .find(serves)
                    .is_some_and(|(_, teams)| *teams == self.teams);
                let cost = &machine.costs.norm;
                let elements = rows as f64 * f64::from(self.width);
                let cycles = cost.launch_of(rows) + elements * cost.element * $accesses;
                if is_best {
                    cycles
                } else {
                    cycles * OTHER_SHARING
                }
            }

            /// Returns every kernel that can replace this kernel: all candidates for `teams`, each with both algorithms for the variance.
            /// Their results differ only by f32 rounding.
            pub fn candidates(&self) -> Vec<Self> {
                let teams = Teams::candidates(self.width, self.dtype).into_iter();
                teams
                    .flat_map(|teams| {
                        [Variance::OnePassShifted, Variance::TwoPass].map(|variance| Self {
                            teams,
                            variance,
                            ..self.clone()
                        })
                    })
                    .collect()
            }
        }
    };
}

choices!(LayerNorm, Teams::by_rows, NO_RESIDUAL);
choices!(BiasResidualLayerNorm, Teams::by_rows_with_residual, 1.0);

impl LayerNorm {
    /// Creates the kernel with the default teams for many rows and with the one-pass variance.
    pub fn new(width: u32, eps: f32, dtype: DType) -> Self {
        Self {
            width,
            eps,
            dtype,
            teams: Teams::usual(width, dtype),
            variance: Variance::default(),
        }
    }
}

impl BiasResidualLayerNorm {
    /// Creates the kernel with the default teams for many rows and with the one-pass variance.
    pub fn new(width: u32, eps: f32, dtype: DType, bias: bool) -> Self {
        Self {
            width,
            eps,
            dtype,
            bias,
            teams: Teams::usual(width, dtype),
            variance: Variance::default(),
        }
    }
}

impl Variance {
    fn suffix(self) -> &'static str {
        match self {
            Self::OnePassShifted => "",
            Self::TwoPass => "_two_pass",
        }
    }
}

impl Kernel for LayerNorm {
    facts! { template: "layernorm", dtype: self.dtype, class: LayerNorm }

    fn symbol(&self) -> String {
        format!(
            "layernorm_{}_w{}_eps{}{}{}",
            self.dtype,
            self.width,
            word(self.eps),
            self.teams.suffix(self.width, self.dtype),
            self.variance.suffix(),
        )
    }

    fn constants(&self) -> Constants {
        let mut constants = constants(self.width, self.eps, self.dtype, self.teams, self.variance);
        let row_bytes = 2 * u64::from(self.width) * self.dtype.bytes();
        let kept_rows = (KEPT_BYTES / row_bytes.max(1)) as u32;
        constants.insert("kept_rows", kept_rows.into());
        constants.insert(
            "blocks",
            self.teams.min_ctas_per_sm(self.width, self.dtype).into(),
        );
        constants
    }

    fn params(&self) -> Vec<Param> {
        let rows = rows_by(Symbol::Rows, self.width);
        let mut params = vec![read("x", self.dtype, rows.clone(), input_fill(self.dtype))];
        params.extend(affine_params(self.width, self.dtype));
        params.push(write("out", self.dtype, rows));
        params.push(count(Symbol::Rows));
        params
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])?;
        limits::eps(self.eps)?;
        limits::teams(self.teams, self.width, self.dtype)
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        self.teams.launch(extents.rows)
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        Some(self.estimate(rows, machine))
    }

    fn threads(&self) -> u32 {
        self.teams.threads()
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
    facts! { template: "bias_residual_layernorm", dtype: self.dtype, class: LayerNorm }

    fn symbol(&self) -> String {
        format!(
            "{}residual_layernorm_{}_w{}_eps{}{}{}",
            if self.bias { "bias_" } else { "" },
            self.dtype,
            self.width,
            word(self.eps),
            self.teams.suffix(self.width, self.dtype),
            self.variance.suffix(),
        )
    }

    fn constants(&self) -> Constants {
        let mut constants = constants(self.width, self.eps, self.dtype, self.teams, self.variance);
        constants.insert("bias", self.bias.into());
        constants.insert(
            "blocks",
            self.teams.min_ctas_per_sm(self.width, self.dtype).into(),
        );
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

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])?;
        limits::eps(self.eps)?;
        limits::teams(self.teams, self.width, self.dtype)
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        self.teams.launch(extents.rows)
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        Some(self.estimate(rows, machine))
    }

    fn threads(&self) -> u32 {
        self.teams.threads()
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

/// Returns `(row − mean) / √(variance + eps) · gamma + beta`, computed in two passes.
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

/// Constants of `partials/rows.cu` and of a LayerNorm template.
pub(super) fn constants(
    width: u32,
    eps: f32,
    dtype: DType,
    teams: Teams,
    variance: Variance,
) -> Constants {
    let mut constants = teams.constants(width, dtype);
    constants.insert("two_pass", (variance == Variance::TwoPass).into());
    constants.insert("eps", f32_literal(eps).into());
    constants.insert("to_e4m3", false.into());
    constants.insert("keeps", true.into());
    constants
}

/// Returns the parameters `gamma` and `beta` of a LayerNorm kernel.
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

/// Returns the fill of the input. In f32, its mean is large compared to its deviation, to reveal cancellation in the variance. In 16-bit
/// types, the mean is 0, because an input with a large mean would be rounded to a few distinct values.
pub(super) fn input_fill(dtype: DType) -> Fill {
    let mean = if dtype == DType::F32 { 10.0 } else { 0.0 };
    Fill::Normal {
        mean,
        deviation: 1.0,
    }
}

/// Tolerance of every LayerNorm whose input is a sum of a few operands with deviation 1 and mean 10.
pub(super) fn tolerance(dtype: DType) -> Tolerance {
    rounded_once(
        dtype,
        2e-5,
        "the sums before the mean are near 10, where an f32 step is 1e-6, and a row has a few \
         thousand terms; the result, of magnitude 1, is then rounded to storage",
    )
}

/// Instances for the device check and the compile tests: every storage type, common and odd widths, the teams for few and for many rows,
/// and every candidate at one width.
pub fn representative() -> Vec<KernelSpec> {
    let mut kernels: Vec<KernelSpec> = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for width in [768, 384, 320, 1024, 1003, 128, 1536, 4096, 8191, 8192] {
            let eps = 1e-12;
            kernels.push(LayerNorm::new(width, eps, dtype).into());
            for bias in [true, false] {
                kernels.push(BiasResidualLayerNorm::new(width, eps, dtype, bias).into());
            }
        }
        for width in [768, 1003, 384] {
            let few = LayerNorm {
                teams: Teams::for_few_rows(width, dtype),
                ..LayerNorm::new(width, 1e-12, dtype)
            };
            let two_pass = LayerNorm {
                variance: Variance::TwoPass,
                ..few.clone()
            };
            let few_residual = BiasResidualLayerNorm {
                teams: few.teams,
                ..BiasResidualLayerNorm::new(width, 1e-12, dtype, false)
            };
            kernels.extend([few.into(), two_pass.into(), few_residual.into()]);
        }
    }
    let usual = BiasResidualLayerNorm::new(768, 1e-12, DType::F16, true);
    let others = usual.candidates().into_iter().filter(|k| *k != usual);
    kernels.extend(others.map(KernelSpec::from));
    kernels
}
