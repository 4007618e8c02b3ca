//! LayerNorm with what is summed before it, and the linear layer that reads it, for the fewest rows
//! on Hopper: every block of the GEMM normalises the rows that it multiplies.

use serde::{Deserialize, Serialize};

use super::{Epilogue, FewRows, Gemm, GemmWgmma, ranges::ranges_of};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Role,
        Tolerance, f32_literal, layernorm::BiasResidualLayerNorm, rows::word,
    },
    tensor::{DType, Extents},
};

/// How the kernel is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NormalisedTile {
    /// Rows of x in a tile: 8, 16, 24 or 32.
    pub tokens: u32,
    /// Columns of the output, that is rows of the weight, in a tile: 8, 16, 24 or 32.
    pub columns: u32,
    /// Warps of a block, which share out k: 1 to 16.
    pub warps: u32,
}

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

/// Elements of k that a warp reads at once: 16 bytes of a row for each of four lanes.
const CHUNK: u32 = 32;
/// Registers of a lane, at most.
const MOST_REGISTERS: u32 = 255;
/// Of them, for all but what is held: with fewer ptxas spills.
const OTHER_REGISTERS: u32 = 40;
/// Bytes of a warp's accesses to shared memory.
const WARP_BYTES: u32 = 32 * 16;

/// Multiprocessors of an H100 or H200 SXM, and registers of each.
const SMS: u32 = 132;
const REGISTERS: u32 = 1 << 16;
/// Rows that times were measured of.
const MOST_ROWS: u64 = 32;

/// What times are estimated for: an H200. Fitted to runs of two encoders at 5 to 32 rows, of which the difference
/// to launches apart is what is measured of a kernel. In cycles, and cycles a byte.
mod machine {
    pub const FILL: f64 = 1905.0;
    /// Of a further tile of 16 rows, whether there are rows in it or not.
    pub const TILE: f64 = 600.0;
    /// Of x and the residual, to one multiprocessor.
    pub const ROWS: f64 = 0.018;
    /// Of the weight, to all together.
    pub const WEIGHT: f64 = 0.00034;
    /// LayerNorm as a launch of its own.
    pub const APART: f64 = 1755.0;
}

impl NormalisedTile {
    /// The tiles for a GEMM, fewest tokens first.
    fn candidates(n: u32, k: u32) -> Vec<Self> {
        let tiles = [16, 32].into_iter();
        tiles.filter_map(|tokens| Self::of(tokens, n, k)).collect()
    }

    /// As wide a tile as loads its weights in one trip to memory, or where there would be too many
    /// blocks of it, as wide as needed for all to be there at once; by the fewest warps that share out k
    /// evenly in three chunks.
    fn of(tokens: u32, n: u32, k: u32) -> Option<Self> {
        const ONE_TRIP: u32 = 24 << 10;
        // Wider ones leave the GEMMs of narrow encoders too few blocks.
        const USUAL_COLUMNS: u32 = 24;
        let few_chunks = |&warps: &u32| k.div_ceil(CHUNK).div_ceil(warps) <= 3;
        let evenly = |&warps: &u32| k.div_ceil(CHUNK).is_multiple_of(warps);
        let all = || (1..=16).filter(few_chunks);
        let warps = all().find(evenly).or_else(|| all().next())?;
        let tile = |columns| Self {
            tokens,
            columns,
            warps,
        };
        let at_once = |t: &Self| n.div_ceil(t.columns) <= SMS * t.side_by_side(k);
        let widths = || {
            let widths = [8, 16, 24, 32].into_iter().map(tile);
            widths.filter(|t| t.fits(k)).filter(at_once)
        };
        let is_light = |t: &Self| t.columns <= USUAL_COLUMNS && t.columns * k * 2 <= ONE_TRIP;
        let light = widths().rfind(is_light);
        light.or_else(|| widths().next())
    }

    /// Blocks of a multiprocessor, by their registers: what is held, and some for all else.
    const fn side_by_side(self, k: u32) -> u32 {
        REGISTERS / (32 * self.warps * (self.held(k) + 16))
    }

    /// Up to two tiles of tokens, if all of their blocks are there at once.
    fn most_rows(self, n: u32, k: u32) -> u64 {
        let room = SMS * self.side_by_side(k) / n.div_ceil(self.columns);
        u64::from(room.min(2) * self.tokens).min(MOST_ROWS)
    }

    /// Estimated cycles at 1755 MHz, comparable with those of [`FewRows`].
    fn cycles(self, rows: u64, n: u32, k: u32) -> f64 {
        let tiles = rows.div_ceil(self.tokens.into()) * u64::from(self.tokens.div_ceil(16));
        let octets = rows.min(self.tokens.into()).div_ceil(8) as f64;
        let blocks = self.blocks(rows, n) as f64 / f64::from(SMS);
        let row_bytes = f64::from(k) * 2.0;
        machine::FILL
            + (tiles - 1) as f64 * machine::TILE
            + blocks.max(1.0) * octets * 8.0 * 2.0 * row_bytes * machine::ROWS
            + f64::from(n) * row_bytes * machine::WEIGHT
    }

    /// As in symbols.
    fn name(self) -> String {
        format!(
            "tokens{}_columns{}_warps{}",
            self.tokens, self.columns, self.warps
        )
    }

    /// Chunks of k of a warp.
    const fn chunks(self, k: u32) -> u32 {
        k.div_ceil(CHUNK).div_ceil(self.warps)
    }

    /// Registers for a lane's part of rows, weights and parameters of LayerNorm.
    const fn held(self, k: u32) -> u32 {
        self.chunks(k) * (self.tokens + (self.columns / 8 + 3) * 4)
    }

    /// Registers that a lane can have.
    fn registers(self) -> u32 {
        MOST_REGISTERS.min(REGISTERS / (32 * self.warps))
    }

    /// For what the warps of a block add up.
    const fn shared_bytes(self) -> u32 {
        self.warps * self.tokens.div_ceil(16) * (self.columns / 8) * WARP_BYTES
    }

    /// Blocks of a launch.
    fn blocks(self, rows: u64, n: u32) -> u64 {
        rows.div_ceil(self.tokens.into())
            .saturating_mul(n.div_ceil(self.columns).into())
    }

    /// Whether a GEMM of depth k can be cut so.
    fn fits(self, k: u32) -> bool {
        let of_eight = |size: u32| (8..=32).contains(&size) && size.is_multiple_of(8);
        of_eight(self.tokens)
            && of_eight(self.columns)
            && (1..=16).contains(&self.warps)
            && self.chunks(k) <= 16
            && self.held(k) + OTHER_REGISTERS <= self.registers()
    }
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
            let apart = FewRows::fastest(rows, n, k, dtype);
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
        Launch {
            // The driver refuses a grid of so many blocks.
            grid: [u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1],
            threads: self.threads(),
            shared_bytes: self.tile.shared_bytes(),
        }
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
