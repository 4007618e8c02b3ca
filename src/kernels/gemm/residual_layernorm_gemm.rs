//! LayerNorm with what is summed before it, and the linear layer that reads it, for the fewest rows
//! on Hopper: every block of the GEMM normalises the rows that it multiplies.

use serde::{Deserialize, Serialize};

use super::{
    Epilogue, FewRows, Gemm, GemmWgmma,
    normalised_tile::{MOST_ROWS, NormalisedTile, machine},
    ranges::ranges_of,
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Role,
        Tolerance, f32_literal, layernorm::BiasResidualLayerNorm, rows::word,
    },
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
    /// The kernels for the fewest rows, each up to its number of rows; none for those of which a launch
    /// each is estimated to be faster.
    pub fn by_rows(
        n: u32,
        k: u32,
        eps: f32,
        dtype: DType,
        x_bias: bool,
        epilogue: Epilogue,
    ) -> Vec<(u64, Self)> {
        // Longer than any time: a tile is not taken beyond the rows that it serves.
        const NEVER: f64 = 1e12;
        let tiles = match GemmWgmma::serves(n, k, dtype) {
            true => NormalisedTile::candidates(n, k),
            false => Vec::new(),
        };
        let cycles = |rows, at: usize| match tiles[at].most_rows(n, k) < rows {
            true => NEVER,
            false => tiles[at].cycles(rows, n, k),
        };
        let faster = |&rows: &u64| {
            let least = (0..tiles.len()).map(|at| cycles(rows, at));
            let least = least.fold(f64::INFINITY, f64::min);
            let apart = FewRows::fastest(rows, n, k, dtype, epilogue);
            apart.is_some_and(|apart| least < apart + machine::APART)
        };
        let rows: Vec<u64> = (1..=MOST_ROWS).take_while(faster).collect();
        let Some(&most) = rows.last() else {
            return Vec::new();
        };
        let ranges = ranges_of(&rows, tiles.len(), cycles).into_iter();
        ranges
            .map(|(end, at)| {
                let kernel = Self {
                    n,
                    k,
                    eps,
                    dtype,
                    x_bias,
                    epilogue,
                    tile: tiles[at],
                };
                (end.unwrap_or(most), kernel)
            })
            .collect()
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

    fn launch(&self, extents: &Extents) -> Launch {
        let blocks = self.tile.blocks(extents.rows, self.n);
        Launch::of_blocks(blocks, self.threads(), self.tile.shared_bytes())
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
    use super::{super::normalised_tile::SMS, *};

    fn found(n: u32, k: u32, dtype: DType) -> Vec<(u64, ResidualLayerNormGemm)> {
        ResidualLayerNormGemm::by_rows(n, k, 1e-12, dtype, true, Epilogue::default())
    }

    fn any() -> ResidualLayerNormGemm {
        found(768, 768, DType::F16).remove(0).1
    }

    #[test]
    fn linear_layers_of_encoders_normalise_the_fewest_rows_with_all_blocks_at_once() {
        for width in [320, 384, 512, 768, 1024] {
            for n in [width, 3 * width, 4 * width] {
                let kernels = found(n, width, DType::F16);
                assert!((1..=2).contains(&kernels.len()), "{n} {width}: {kernels:?}");
                assert!(kernels.is_sorted_by_key(|&(most, _)| most));
                for (most, kernel) in kernels {
                    assert_eq!(kernel.check(), Ok(()));
                    assert!((8..=MOST_ROWS).contains(&most), "{n} {width}: {most}");
                    let extents = Extents::default().with_rows(most);
                    let room = SMS * kernel.tile.side_by_side(width);
                    assert!(kernel.launch(&extents).grid[0] <= room, "{n} {width}");
                }
            }
        }
    }

    #[test]
    fn what_was_measured_to_be_fastest_is_launched() {
        let tiles = |n, k| {
            let kernels = found(n, k, DType::F16).into_iter();
            let tile = |(most, kernel): (u64, ResidualLayerNormGemm)| {
                let NormalisedTile {
                    tokens,
                    columns,
                    warps,
                } = kernel.tile;
                (most, [tokens, columns, warps])
            };
            kernels.map(tile).collect::<Vec<_>>()
        };
        for n in [2304, 3072] {
            assert_eq!(tiles(n, 768), [(16, [16, 16, 8]), (32, [32, 24, 8])]);
        }
        for n in [1152, 1536] {
            assert_eq!(tiles(n, 384), [(32, [16, 24, 4])]);
        }
    }

    #[test]
    fn other_shapes_and_types_have_no_such_kernel() {
        assert_eq!(found(768, 768, DType::F32), []);
        assert_eq!(found(770, 768, DType::F16), []);
        // More columns than all multiprocessors have room for, and rows beyond the registers.
        assert_eq!(found(16384, 768, DType::F16), []);
        assert_eq!(found(768, 8192, DType::F16), []);
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
