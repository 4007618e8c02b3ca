//! LayerNorm or RMSNorm, and the linear layer that alone reads it, for small M on Hopper.

use serde::{Deserialize, Serialize};

use super::{Epilogue, Gemm, GemmSplitK, SplitKTile};
use crate::{
    kernels::{
        Constants, Fill, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, TensorMap,
        Tolerance, f32_literal,
        layernorm::LayerNorm,
        rms_norm::RmsNorm,
        rows::{read, word},
    },
    machine::{Hopper, Machine},
    tensor::{DType, Extents, Shape},
};

/// `x [rows, k]`, `weight [n, k]`, (`bias [n]`), `gamma`, (`beta`) `[k]` → `out [rows, n]`: `act(norm(x) · weightᵀ + bias)`, in
/// f16 or bf16, on Hopper, as [`GemmSplitK`]. Every CTA normalises its part of x in shared memory, where all of it is; those of
/// a cluster exchange row statistics.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NormGemm {
    pub n: u32,
    pub k: u32,
    pub eps: f32,
    /// Whether it is LayerNorm, which subtracts the mean and adds beta; otherwise RMSNorm.
    pub centred: bool,
    pub dtype: DType,
    pub epilogue: Epilogue,
    pub tile: SplitKTile,
}

impl NormGemm {
    /// Most steps of k of a CTA: a lane keeps its part of a row, of gamma and of beta in registers.
    const MOST_STEPS: u32 = 32;
    /// Rows of candidate tiles: a warp normalises a fourth of them one after another.
    const MOST_TOKENS: u32 = 24;

    /// The tiles that serve a GEMM on a card with `instructions`, fewest tokens first.
    pub fn tiles(n: u32, k: u32, dtype: DType, instructions: Instructions) -> Vec<SplitKTile> {
        let tiles = GemmSplitK::tiles(n, k, dtype, instructions).into_iter();
        tiles.filter(|&tile| Self::takes(tile, k)).collect()
    }

    fn takes(tile: SplitKTile, k: u32) -> bool {
        tile.tokens <= Self::MOST_TOKENS && tile.steps(k) <= Self::MOST_STEPS
    }

    /// Whether the kernel can be generated as described; otherwise what is wrong.
    pub fn check(&self) -> Result<(), String> {
        self.product().check()?;
        if self.epilogue.residual {
            return Err("no GEMM of a norm adds a residual".to_owned());
        }
        match Self::takes(self.tile, self.k) {
            true => Ok(()),
            false => Err(format!(
                "{:?} is no tile of a GEMM of a norm of depth {}: it has up to {} tokens, and up to {} products for a CTA",
                self.tile,
                self.k,
                Self::MOST_TOKENS,
                64 * Self::MOST_STEPS
            )),
        }
    }

    /// The GEMM of what is normalised.
    pub fn product(&self) -> GemmSplitK {
        GemmSplitK {
            n: self.n,
            k: self.k,
            dtype: self.dtype,
            epilogue: self.epilogue,
            tile: self.tile,
        }
    }

    /// The norm by itself.
    pub fn norm(&self) -> KernelSpec {
        match self.centred {
            true => LayerNorm::new(self.k, self.eps, self.dtype).into(),
            false => RmsNorm::of_rows(self.k, self.eps, self.dtype).into(),
        }
    }

    /// CTAs that share an SM.
    pub fn side_by_side(&self, machine: &Machine) -> u32 {
        machine
            .ctas_by_shared(self.tile.shared_bytes(self.k))
            .min(16)
    }

    /// Gamma, and beta if there is one.
    fn n_weights(&self) -> usize {
        1 + usize::from(self.centred)
    }

    fn plain(&self) -> Gemm {
        self.product().plain()
    }
}

impl Kernel for NormGemm {
    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.tile.name())
    }

    fn definition(&self) -> String {
        let norm = if self.centred {
            "layernorm"
        } else {
            "rms_norm"
        };
        let product = self.product().definition();
        format!("{norm}_eps{}_{product}", word(self.eps))
    }

    fn template(&self) -> &'static str {
        "norm_gemm"
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let mut constants = self.product().constants();
        constants.extend([
            ("eps", f32_literal(self.eps).into()),
            ("centred", self.centred.into()),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        let mut params = self.product().params();
        // Before the result and the number of rows.
        let at = params.len() - 2;
        let width = Shape::fixed(&[self.k.into()]);
        let names = ["gamma", "beta"].into_iter().take(self.n_weights());
        let weights = names.map(|name| read(name, self.dtype, width.clone(), Fill::ACTIVATION));
        params.splice(at..at, weights);
        params
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        self.product().tensor_maps()
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        self.product().launch(extents, machine)
    }

    /// The GEMM, and the norm of the rows of a warp, of which four work side by side.
    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        let Some(Hopper { split_k: cost, .. }) = &machine.costs.hopper else {
            return Some(f64::INFINITY);
        };
        let rows_here = rows.min(self.tile.tokens.into()).div_ceil(4) as f64;
        let elements = f64::from(self.tile.steps(self.k)) * 64.0 / 32.0;
        let exchange = match self.tile.splits {
            1 => 0.0,
            _ => cost.cluster,
        };
        // Two passes over shared memory, and shuffles.
        let norm = rows_here * (250.0 + 10.0 * elements) + exchange;
        Some(self.product().cycles(rows, machine)? + norm)
    }

    fn most_rows(&self) -> Option<u64> {
        self.product().most_rows()
    }

    fn threads(&self) -> u32 {
        self.product().threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (product, weights) = reads.split_at(reads.len() - self.n_weights());
        let of_norm: Vec<&HostTensor> = product[..1].iter().chain(weights).copied().collect();
        let normal = self.norm().as_kernel().reference(extents, &of_norm);
        let operands: Vec<&HostTensor> =
            normal.iter().chain(product[1..].iter().copied()).collect();
        self.plain().reference(extents, &operands)
    }

    fn tolerance(&self) -> Tolerance {
        let plain = self.plain().tolerance();
        let rounding = match self.dtype {
            DType::F16 => 2e-3,
            _ => 1.6e-2,
        };
        Tolerance {
            absolute: plain.absolute + rounding,
            relative: plain.relative,
            reason: "as a GEMM, of rows that are rounded to storage when they are normalised: k errors of at most half a unit in the last place, which add up like a random walk (8 deviations)",
        }
    }
}

/// Both norms, with and without clusters, and depths that divide by 8 and nothing else.
pub fn representative() -> Vec<KernelSpec> {
    let plain = Epilogue::default();
    let gelu = Epilogue::new(true, Some(super::Activation::GeluTanh));
    let mut kernels = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for (n, k, epilogue) in [(2304, 768, gelu), (4096, 1024, plain), (1000, 328, gelu)] {
            for centred in [true, false] {
                for tile in NormGemm::tiles(n, k, dtype, Instructions::Hopper) {
                    kernels.push(KernelSpec::from(NormGemm {
                        n,
                        k,
                        eps: 1e-5,
                        centred,
                        dtype,
                        epilogue,
                        tile,
                    }));
                }
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(k: u32, tokens: u32, splits: u32) -> NormGemm {
        NormGemm {
            n: 768,
            k,
            eps: 1e-5,
            centred: true,
            dtype: DType::F16,
            epilogue: Epilogue::default(),
            tile: SplitKTile::new(tokens, splits),
        }
    }

    #[test]
    fn the_definition_is_the_gemm_of_the_norm() {
        let kernel = NormGemm {
            n: 1,
            k: 2,
            eps: 1.0,
            centred: false,
            epilogue: Epilogue::new(true, None),
            ..kernel(2, 16, 1)
        };
        let real = |values: &[f32]| HostTensor::Real(values.to_vec());
        // Mean squares 15 and 1 added: a norm of 4.
        let (x, weight, bias) = (real(&[5.0, 5f32.sqrt()]), real(&[4.0, 0.0]), real(&[0.5]));
        let gamma = real(&[2.0, 3.0]);
        let extents = Extents::of(&[1]).expect("a batch");
        let out = kernel.reference(&extents, &[&x, &weight, &bias, &gamma]);
        assert_eq!(out, [real(&[10.5])]);
        let names: Vec<&str> = kernel.params().iter().map(|p| p.name).collect();
        assert_eq!(names, ["x", "weight", "bias", "gamma", "out", "rows"]);
    }

    #[test]
    fn what_the_kernel_does_not_serve_is_refused_with_the_reason() {
        assert_eq!(kernel(768, 16, 1).check(), Ok(()));
        for (k, tokens, splits) in [(768, 48, 1), (3072, 16, 1), (2112, 16, 1)] {
            let message = kernel(k, tokens, splits).check().expect_err("refused");
            assert!(
                message.contains("is no tile of a GEMM of a norm")
                    || message.contains("does not fit"),
                "{message}"
            );
        }
        let added = NormGemm {
            epilogue: Epilogue::default().with_residual(),
            ..kernel(768, 16, 1)
        };
        assert_eq!(
            added.check().expect_err("refused"),
            "no GEMM of a norm adds a residual"
        );
    }
}
