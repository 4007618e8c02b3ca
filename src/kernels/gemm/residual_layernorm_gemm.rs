//! LayerNorm with what is summed before it, and the linear layer that reads it, for the fewest rows
//! on Hopper: every block of the GEMM normalises the rows that it multiplies.

use serde::{Deserialize, Serialize};

use super::{Epilogue, Gemm, GemmWgmma, normalised_tile::NormalisedTile};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Role,
        Tolerance, f32_literal, layernorm::BiasResidualLayerNorm, rows::word,
    },
    machine::Machine,
    tensor::{DType, Extents},
};

/// `x [rows, k]`, (`x_bias [k]`), `residual [rows, k]`, `gamma`, `beta [k]`, `weight [n, k]`,
/// (`bias [n]`) → `normal [rows, k]`: LayerNorm of `x + x_bias + residual`; and `out [rows, n]`:
/// `act(normal · weightᵀ + bias)`, in f16 or bf16, on Hopper. What [`BiasResidualLayerNorm`] and
/// [`Gemm`] compute one after the other. `n` and `k` are multiples of 8: lanes read 16 bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResidualLayerNormGemm {
    pub n: u32,
    pub k: u32,
    pub eps: f32,
    pub dtype: DType,
    /// Whether there is a bias in what is normalised.
    pub x_bias: bool,
    pub epilogue: Epilogue,
    pub tile: NormalisedTile,
}

impl ResidualLayerNormGemm {
    /// The tiles for these sizes, fewest tokens first; none where the kernel does not serve them.
    pub fn tiles(n: u32, k: u32, dtype: DType, machine: &Machine) -> Vec<NormalisedTile> {
        match GemmWgmma::serves(n, k, dtype) && machine.instructions == Instructions::Hopper {
            true => NormalisedTile::candidates(n, k, machine),
            false => Vec::new(),
        }
    }

    /// Whether the kernel can be generated as described; otherwise what is wrong.
    pub fn check(&self) -> Result<(), String> {
        GemmWgmma::check_serves(self.n, self.k, self.dtype)?;
        match self.tile.fits(self.k) {
            true => Ok(()),
            false => Err(format!(
                "{:?} is no tile for rows of {} that are normalised on load: it has 8 to 32 tokens and columns, multiples of 8, 1 to 16 warps, and registers for all that a lane reads",
                self.tile, self.k
            )),
        }
    }

    /// The two kernels that compute the same, for any card, which are its definition.
    pub fn apart(&self) -> (BiasResidualLayerNorm, Gemm) {
        let norm = BiasResidualLayerNorm::new(self.k, self.eps, self.dtype, self.x_bias);
        let gemm = Gemm::of(self.n, self.k, self.dtype, self.epilogue);
        (norm, gemm)
    }
}

impl Kernel for ResidualLayerNormGemm {
    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.tile.name())
    }

    fn definition(&self) -> String {
        format!(
            "{}residual_layernorm_eps{}_{}",
            if self.x_bias { "bias_" } else { "" },
            word(self.eps),
            self.apart().1.definition(),
        )
    }

    fn template(&self) -> &'static str {
        "residual_layernorm_gemm"
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let mut constants = self.apart().1.constants();
        constants.retain(|name, _| {
            ["storage", "n", "k", "bias", "activation", "precise"].contains(name)
        });
        constants.extend([
            ("tokens", self.tile.tokens.into()),
            ("columns", self.tile.columns.into()),
            ("warps", self.tile.warps.into()),
            ("x_bias", self.x_bias.into()),
            ("eps", f32_literal(self.eps).into()),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        let (norm, gemm) = self.apart();
        let mut params = norm.params();
        params.retain(|p| matches!(p.role, Role::Read { .. }));
        // Its parameters have names that the other's have, too.
        for param in &mut params {
            if param.name == "bias" {
                param.name = "x_bias";
            }
        }
        let normal = norm.params().into_iter().find_map(|p| match p.role {
            Role::Write { .. } => Some(Param {
                name: "normal",
                role: p.role,
            }),
            _ => None,
        });
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

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let blocks = self.tile.blocks(extents.rows, self.n);
        Launch::of_blocks(blocks, self.threads(), self.tile.shared_bytes())
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        Some(self.tile.cycles(rows, self.n, self.k, machine))
    }

    fn threads(&self) -> u32 {
        32 * self.tile.warps
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (norm, gemm) = self.apart();
        let (of_norm, of_gemm) = reads.split_at(4 + usize::from(self.x_bias));
        let normal = norm.reference(extents, of_norm);
        let rounded = normal[0].real().iter().map(|&v| self.dtype.round(v));
        let rounded = HostTensor::Real(rounded.collect());
        let mut operands = vec![&rounded];
        operands.extend(of_gemm);
        let products = gemm.reference(extents, &operands);
        normal.into_iter().chain(products).collect()
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = Case::standard();
        // Octets of rows, and tiles of them, that are whole, begun and empty.
        let rows = [5, 8, 9, 16, 20, 25, 32, 33, 64, 100];
        cases.extend(rows.map(|rows| Case::new("few_rows", &[rows])));
        cases
    }

    fn tolerance(&self) -> Tolerance {
        let (norm, gemm) = self.apart();
        let (rounding, sums) = (norm.tolerance(), gemm.tolerance());
        Tolerance {
            absolute: sums.absolute + rounding.absolute + 6.0 * rounding.relative,
            relative: sums.relative.max(rounding.relative),
            reason: "as LayerNorm and the GEMM behind it; k sums, and weights times gamma, are rounded to storage, each by a third of its bound or so, and what a row's products of deviation 1 lose by that adds up like a random walk (8 deviations)",
        }
    }
}

/// Tiles of every size, with and without what is optional, and depths that divide by 8 and nothing else.
pub fn representative() -> Vec<KernelSpec> {
    let plain = Epilogue::default();
    let gelu = Epilogue {
        bias: true,
        activation: Some(super::Activation::GeluExact),
    };
    let mut kernels = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for (n, k, x_bias, epilogue, tiles) in [
            (
                768,
                768,
                true,
                plain,
                &[(8, 16, 8), (16, 24, 8), (32, 24, 12)][..],
            ),
            (
                1000,
                328,
                false,
                gelu,
                &[(8, 8, 16), (16, 16, 4), (24, 24, 6), (32, 32, 11)],
            ),
            (384, 384, true, gelu, &[(16, 16, 4), (32, 8, 12)]),
            (256, 1024, false, plain, &[(16, 32, 8), (24, 16, 16)]),
            (8, 8, true, gelu, &[(8, 8, 1)]),
            (40, 320, true, plain, &[(32, 16, 5)]),
        ] {
            for &(tokens, columns, warps) in tiles {
                kernels.push(KernelSpec::from(ResidualLayerNormGemm {
                    n,
                    k,
                    eps: 1e-12,
                    dtype,
                    x_bias,
                    epilogue,
                    tile: NormalisedTile {
                        tokens,
                        columns,
                        warps,
                    },
                }));
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any() -> ResidualLayerNormGemm {
        ResidualLayerNormGemm {
            n: 768,
            k: 768,
            eps: 1e-12,
            dtype: DType::F16,
            x_bias: true,
            epilogue: Epilogue::default(),
            tile: NormalisedTile {
                tokens: 16,
                columns: 16,
                warps: 8,
            },
        }
    }

    #[test]
    fn what_the_kernel_does_not_serve_is_refused_with_the_reason() {
        let kernel = any();
        let odd = ResidualLayerNormGemm {
            n: 770,
            ..kernel.clone()
        };
        assert_eq!(
            odd.check(),
            Err("no Hopper GEMM for 770 columns and 768 products in f16: it takes multiples of 8 in f16 or bf16".to_owned())
        );
        let tile = kernel.tile;
        for tile in [
            NormalisedTile { tokens: 12, ..tile },
            NormalisedTile { tokens: 40, ..tile },
            NormalisedTile { columns: 4, ..tile },
            NormalisedTile { warps: 0, ..tile },
            NormalisedTile { warps: 17, ..tile },
            NormalisedTile { warps: 1, ..tile },
        ] {
            let kernel = ResidualLayerNormGemm {
                tile,
                ..kernel.clone()
            };
            let message = kernel.check().expect_err("refused");
            assert!(message.contains("is no tile for rows of 768"), "{message}");
        }
    }

    #[test]
    fn reads_come_before_writes_and_names_are_told_apart() {
        let kernel = any();
        let bias = Epilogue {
            bias: true,
            activation: None,
        };
        let kernel = ResidualLayerNormGemm {
            epilogue: bias,
            ..kernel
        };
        let names: Vec<&str> = kernel.params().iter().map(|p| p.name).collect();
        assert_eq!(
            names,
            [
                "x", "x_bias", "residual", "gamma", "beta", "weight", "bias", "normal", "out",
                "rows"
            ]
        );
    }
}
