//! LayerNorm that is deferred into the following linear layer, for few rows on Hopper. It uses row statistics from the previous GEMM.

use serde::{Deserialize, Serialize};

use super::{
    Gemm, GemmWgmma, SplitKTile,
    residual_row_stats::{SlicedK, room_to_exchange},
    row_stats::{row_stats_of, row_stats_shape},
};
use crate::{
    kernels::{
        Case, Constants, Fill, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Role,
        TensorMap, Tolerance, f32_literal, layernorm::BiasResidualLayerNorm, limits, rows::word,
    },
    machine::Machine,
    ops::Epilogue,
    tensor::{DType, Extents},
};

/// `scaled [rows, k]`, `row_stats [rows, ⌈k / 64⌉, 2]` in f32, `gamma`, `beta [k]`, `weight [n, k]`, (`bias [n]`) → `normal [rows, k]`,
/// `out [rows, n]`. `normal` is LayerNorm of the rows that [`GemmResidualRowStats`](super::GemmResidualRowStats) writes, and `out` is
/// `act(normal · weightᵀ + bias)`. The kernel is for f16 and bf16 on Hopper. Each CTA computes its outputs over the whole of k, like
/// [`GemmSplitK`](super::GemmSplitK) without splits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeferredLayerNormGemm {
    pub n: u32,
    pub k: u32,
    pub eps: f32,
    pub dtype: DType,
    pub epilogue: Epilogue,
    /// Rows of x per tile: a multiple of 8 from 8 to 64.
    pub tokens: u32,
}

/// Threads of a CTA: two consumer warpgroups, and a warpgroup that loads and normalizes.
const THREADS: u32 = 384;

impl DeferredLayerNormGemm {
    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), String> {
        GemmWgmma::check_serves(self.n, self.k, self.dtype)?;
        if self.epilogue.residual {
            return Err("a GEMM with a deferred LayerNorm cannot add a residual".to_owned());
        }
        let is_tile = self.tokens.is_multiple_of(8) && (8..=64).contains(&self.tokens);
        let has_room = || {
            let tile = SplitKTile::new(self.tokens, 1);
            self.k <= 1 << 16
                && self.operands().unaliased_steps().is_some()
                && room_to_exchange(tile, self.k, 1)
        };
        match is_tile && has_room() {
            true => Ok(()),
            false => Err(format!(
                "a tile of {} tokens does not suit a GEMM with k = {} and a deferred LayerNorm; expected 8 to 64 tokens in multiples of 8, k of at least 256, and room in shared memory for everything that a CTA reads",
                self.tokens, self.k
            )),
        }
    }

    /// Returns the tile of the MMAs. It has the rows of x, and eight more rows, of which two are gamma and beta.
    const fn product(&self) -> SplitKTile {
        SplitKTile::new(self.tokens + 8, 1)
    }

    fn operands(&self) -> SlicedK {
        SlicedK {
            steps: self.product().steps(self.k),
            rows: self.product().tokens,
            exchanged: (self.tokens / 8).div_ceil(2) + 1,
            besides: 0,
        }
    }

    /// Whether shared memory has room for x and all weights of a CTA at once.
    pub fn has_room_for_all(&self) -> bool {
        let operands = self.operands();
        operands.unaliased_steps() == Some(operands.steps)
    }

    /// Number of unaliased steps ([`SlicedK::unaliased_steps`]), and bytes of dynamic shared memory per CTA.
    pub(super) fn layout(&self) -> (u32, u32) {
        let operands = self.operands();
        let before = operands.unaliased_steps().unwrap_or(operands.steps);
        (before, operands.bytes(before))
    }

    /// Returns the unfused kernels for any GPU: LayerNorm with a residual, and the GEMM.
    pub fn unfused(&self) -> (BiasResidualLayerNorm, Gemm) {
        let norm = BiasResidualLayerNorm::new(self.k, self.eps, self.dtype, false);
        let gemm = Gemm::of(self.n, self.k, self.dtype, self.epilogue);
        (norm, gemm)
    }
}

impl Kernel for DeferredLayerNormGemm {
    facts! { template: "deferred_layernorm_gemm", dtype: self.dtype, class: Gemm }

    fn symbol(&self) -> String {
        format!("{}_tokens{}", self.definition(), self.tokens)
    }

    fn definition(&self) -> String {
        format!(
            "deferred_layernorm_eps{}_{}",
            word(self.eps),
            self.unfused().1.definition(),
        )
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let mut constants = self.unfused().1.constants();
        constants.retain(|name, _| {
            ["storage", "n", "k", "bias", "activation", "precise"].contains(name)
        });
        constants.extend(self.product().constants());
        constants.insert("eps", f32_literal(self.eps).into());
        constants.insert("unaliased_steps", self.layout().0.into());
        constants.insert("max_resident", SlicedK::MAX_RESIDENT.into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        let (norm, gemm) = self.unfused();
        let mut params = Vec::new();
        let mut normal = None;
        for param in norm.params() {
            match (param.name, param.role) {
                ("x", role) => params.push(Param {
                    name: "scaled",
                    role,
                }),
                // With this fill, Σ s and Σ s² of a row are about half the number of columns. Both the mean and the deviation of a row are
                // then 1/2.
                ("residual", _) => params.push(Param {
                    name: "row_stats",
                    role: Role::Read {
                        element: DType::F32.into(),
                        shape: row_stats_shape(self.k),
                        fill: Fill::Normal {
                            mean: self.k as f32 / row_stats_of(self.k) as f32,
                            deviation: 0.02 * self.k as f32 / row_stats_of(self.k) as f32,
                        },
                    },
                }),
                ("out", role) => {
                    normal = Some(Param {
                        name: "normal",
                        role,
                    });
                }
                ("rows", _) => {}
                (name, role) => params.push(Param { name, role }),
            }
        }
        let (reads, rest): (Vec<Param>, Vec<Param>) = gemm
            .params()
            .into_iter()
            .skip(1)
            .partition(|p| matches!(p.role, Role::Read { .. }));
        params.extend(reads);
        params.extend(normal);
        params.extend(rest);
        params
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        SplitKTile::new(self.tokens, 1).tensor_maps("scaled")
    }

    fn weight(&self) -> Option<[u32; 2]> {
        Some([self.n, self.k])
    }

    fn validate(&self) -> Result<(), String> {
        self.unfused().1.validate()?;
        self.check()?;
        limits::eps(self.eps)
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let ctas = SplitKTile::new(self.tokens, 1).ctas(extents.rows, self.n);
        Launch::of_ctas(ctas, THREADS, self.layout().1)
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        Some(SplitKTile::new(self.tokens, 1).cycles(rows, self.n, self.k, machine))
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [scaled, row_stats, gamma, beta] = [0, 1, 2, 3].map(|i| reads[i].real());
        let normal = HostTensor::Real(normalized(scaled, row_stats, gamma, beta, self.eps));
        let mut operands = vec![&normal];
        operands.extend(&reads[4..]);
        let products = self.unfused().1.reference(extents, &operands);
        [normal].into_iter().chain(products).collect()
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = Case::standard();
        // These numbers of rows result in tiles, and octets (groups of eight) of rows, that are full, partial or empty.
        let rows = [8, 33, 40, 47, 48, 49, 63, 64, 65, 96, 100, 128];
        cases.extend(rows.map(|rows| Case::new("few_rows", &[rows])));
        cases
    }

    fn tolerance(&self) -> Tolerance {
        let (norm, gemm) = self.unfused();
        let (rounding, sums) = (norm.tolerance(), gemm.tolerance());
        Tolerance {
            absolute: 8.0 * sums.absolute + rounding.absolute,
            relative: sums.relative.max(rounding.relative),
            reason: "errors of f32 sums are divided by the deviation of a row, 1/2 with these operands, and so are those of the products of gamma, of size 2; the result is rounded once",
        }
    }
}

/// Returns the LayerNorm of rows, computed from the outputs `scaled` and `row_stats` of
/// [`GemmResidualRowStats`](super::GemmResidualRowStats).
pub(crate) fn normalized(
    scaled: &[f32],
    row_stats: &[f32],
    gamma: &[f32],
    beta: &[f32],
    eps: f32,
) -> Vec<f32> {
    let width = gamma.len();
    let numbers = row_stats_of(width as u32) as usize;
    let rows = scaled
        .chunks_exact(width)
        .zip(row_stats.chunks_exact(numbers));
    rows.flat_map(|(row, stats)| {
        let sum = |first| stats.iter().skip(first).step_by(2).map(|&v| f64::from(v));
        let mean = sum(0).sum::<f64>() / width as f64;
        let variance = (sum(1).sum::<f64>() / width as f64 - mean * mean).max(0.0);
        let deviation = (variance + f64::from(eps)).sqrt();
        let columns = row.iter().zip(gamma.iter().zip(beta));
        columns.map(move |(&s, (&g, &b))| {
            ((f64::from(s) - mean * f64::from(g)) / deviation + f64::from(b)) as f32
        })
    })
    .collect()
}

/// Instances with tiles of several sizes, with and without bias and activation, and with values of `k` that include odd multiples of 8.
pub fn representative() -> Vec<KernelSpec> {
    let plain = Epilogue::default();
    let gelu = Epilogue::new(true, Some(crate::ops::Activation::GeluExact));
    let mut kernels = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for (n, k, epilogue, tiles) in [
            (768, 768, gelu, &[24, 48, 64][..]),
            (1000, 328, plain, &[40, 56, 64]),
            // At this size and the next size, x overwrites weights that have moved to registers.
            (384, 1024, gelu, &[40, 64]),
            (328, 936, plain, &[64]),
            (8, 200, gelu, &[8, 64]),
        ] {
            for &tokens in tiles {
                kernels.push(KernelSpec::from(DeferredLayerNormGemm {
                    n,
                    k,
                    eps: 1e-12,
                    dtype,
                    epilogue,
                    tokens,
                }));
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Element;

    fn kernel(tokens: u32) -> DeferredLayerNormGemm {
        DeferredLayerNormGemm {
            n: 3072,
            k: 768,
            eps: 1e-12,
            dtype: DType::F16,
            epilogue: Epilogue::default(),
            tokens,
        }
    }

    #[test]
    fn unsupported_kernels_are_rejected_with_a_reason() {
        assert_eq!(kernel(64).check(), Ok(()));
        for tokens in [0, 12, 72, 136] {
            let message = kernel(tokens).check().expect_err("refused");
            assert!(message.contains("tokens does not suit a GEMM"), "{message}");
        }
    }

    #[test]
    fn rows_are_normalized_by_their_statistics() {
        // The row s = (1, 3) has mean 2 and deviation 1. gamma is (2, 1).
        let y = normalized(&[2.0, 3.0], &[4.0, 10.0], &[2.0, 1.0], &[0.5, 0.0], 1e-12);
        assert_eq!(y, [-1.5, 1.0]);
    }

    #[test]
    fn reads_come_before_writes_and_row_stats_are_f32() {
        let params = kernel(48).params();
        let names: Vec<&str> = params.iter().map(|p| p.name).collect();
        assert_eq!(
            names[..5],
            ["scaled", "row_stats", "gamma", "beta", "weight"]
        );
        assert_eq!(names[5..], ["normal", "out", "rows"]);
        let is_f32 = |p: &&Param| {
            matches!(
                p.role,
                Role::Read {
                    element: Element::Value(DType::F32),
                    ..
                }
            )
        };
        assert_eq!(params.iter().filter(is_f32).count(), 1);
    }
}
