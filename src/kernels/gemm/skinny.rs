//! The GEMM for the fewest rows on Hopper: the weight goes from memory to registers.

use serde::{Deserialize, Serialize};

use super::{
    Epilogue, Gemm, GemmWgmma, Tile,
    split_k::{cluster_attribute, few_rows, odd_sizes},
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Tolerance,
    },
    tensor::{DType, Extents},
};

/// How the GEMM for the fewest rows is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SkinnyTile {
    /// Rows of x in a tile: a multiple of 8 up to 64.
    pub tokens: u32,
    /// Columns of the output, that is rows of the weight, in a tile: 8 or 16.
    pub columns: u32,
    /// Blocks of a cluster, which share out k: 1 to 8, the most that every Hopper card takes.
    pub splits: u32,
    /// Warps of a block, which share out its part of k: 1 to 16.
    pub warps: u32,
}

/// `x [rows, k]`, `weight [n, k]`, `bias [n]` → `out [rows, n]` in f16 or bf16, as [`Gemm`], made for
/// a few rows, on Hopper. `n` and `k` are multiples of 8: lanes read 16 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GemmSkinny {
    pub n: u32,
    pub k: u32,
    pub dtype: DType,
    pub epilogue: Epilogue,
    pub tile: SkinnyTile,
}

/// Elements of k that a warp reads at once: 16 bytes of a row for each of four lanes.
const CHUNK: u32 = 32;
/// A lane holds its part of the weight in 8 registers for each chunk.
const MOST_CHUNKS: u32 = 12;
/// Bytes of a warp's accesses to shared memory.
const WARP_BYTES: u32 = 32 * 16;
/// Shared memory of a block, so that two of them fit beside each other.
const SHARED_LIMIT: u32 = 110 * 1024;

impl SkinnyTile {
    /// The tiles that a GEMM may have, fewest tokens first.
    pub const CANDIDATES: [SkinnyTile; 4] = [
        SkinnyTile::new(8, 8, 1, 8),
        SkinnyTile::new(8, 8, 1, 16),
        SkinnyTile::new(16, 16, 1, 8),
        SkinnyTile::new(16, 16, 1, 16),
    ];

    const fn new(tokens: u32, columns: u32, splits: u32, warps: u32) -> Self {
        Self {
            tokens,
            columns,
            splits,
            warps,
        }
    }

    /// More rows are not few: other kernels serve them in less time.
    pub fn most_rows(self) -> u64 {
        self.tokens.into()
    }

    pub fn cycles(self, _rows: u64, _n: u32, _k: u32, _n_sms: u32) -> f64 {
        1.0
    }

    /// As in symbols.
    pub fn name(self) -> String {
        format!(
            "skinny{}x{}_splits{}_warps{}",
            self.tokens, self.columns, self.splits, self.warps
        )
    }

    /// Chunks of k of a warp.
    const fn chunks(self, k: u32) -> u32 {
        k.div_ceil(CHUNK).div_ceil(self.splits * self.warps)
    }

    /// For a block's part of x, and the sums that it receives.
    const fn shared_bytes(self, k: u32) -> u32 {
        let products = self.tokens.div_ceil(16) * (self.columns / 8);
        let received = products.div_ceil(self.splits) * self.splits;
        self.warps * (self.chunks(k) * (self.tokens / 8) + received) * WARP_BYTES
    }

    /// Whether a GEMM of depth k can be cut so.
    fn fits(self, k: u32) -> bool {
        self.chunks(k) <= MOST_CHUNKS && self.shared_bytes(k) <= SHARED_LIMIT
    }
}

impl GemmSkinny {
    /// The tiles that serve a GEMM on a card with these instructions, fewest tokens first.
    pub fn tiles(n: u32, k: u32, dtype: DType, instructions: Instructions) -> Vec<SkinnyTile> {
        if !GemmWgmma::serves(n, k, dtype) || instructions != Instructions::Hopper {
            return Vec::new();
        }
        SkinnyTile::CANDIDATES
            .into_iter()
            .filter(|tile| tile.fits(k))
            .collect()
    }

    /// Whether the kernel can be generated as described; otherwise what is wrong.
    pub fn check(&self) -> Result<(), String> {
        let SkinnyTile {
            tokens,
            columns,
            splits,
            warps,
        } = self.tile;
        if !GemmWgmma::serves(self.n, self.k, self.dtype) {
            return Err(format!(
                "no GEMM for few rows with {} columns and {} products in {}: it takes multiples of 8 in f16 or bf16",
                self.n, self.k, self.dtype
            ));
        }
        let counts = (8..=64).contains(&tokens)
            && tokens.is_multiple_of(8)
            && [8, 16].contains(&columns)
            && (1..=8).contains(&splits)
            && (1..=16).contains(&warps);
        if !counts || !self.tile.fits(self.k) {
            return Err(format!(
                "{:?} is no tile for {} products: a warp has at most {} of them, and a block at most {SHARED_LIMIT} bytes",
                self.tile,
                self.k,
                MOST_CHUNKS * CHUNK
            ));
        }
        Ok(())
    }

    /// The same GEMM for any card, which is its definition.
    pub fn plain(&self) -> Gemm {
        Gemm {
            n: self.n,
            k: self.k,
            dtype: self.dtype,
            epilogue: self.epilogue,
            tile: Tile::candidates(self.dtype)[0],
        }
    }
}

impl Kernel for GemmSkinny {
    fn symbol(&self) -> String {
        format!(
            "{}_{}_n{}_k{}_{}",
            self.epilogue.name(),
            self.dtype,
            self.n,
            self.k,
            self.tile.name(),
        )
    }

    fn template(&self) -> &'static str {
        "gemm_skinny"
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let mut constants = self.plain().constants();
        constants.retain(|name, _| {
            ["storage", "n", "k", "bias", "activation", "precise"].contains(name)
        });
        constants.extend([
            ("tokens", self.tile.tokens.into()),
            ("columns", self.tile.columns.into()),
            ("splits", self.tile.splits.into()),
            ("warps", self.tile.warps.into()),
            ("cluster", cluster_attribute(self.tile.splits).into()),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        self.plain().params()
    }

    fn launch(&self, extents: &Extents) -> Launch {
        let tiles = extents
            .rows
            .div_ceil(self.tile.tokens.into())
            .saturating_mul(self.n.div_ceil(self.tile.columns).into());
        let blocks = tiles.saturating_mul(self.tile.splits.into());
        Launch {
            // The driver refuses a grid of so many blocks.
            grid: [u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1],
            threads: self.threads(),
            shared_bytes: self.tile.shared_bytes(self.k),
        }
    }

    fn threads(&self) -> u32 {
        32 * self.tile.warps
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.plain().reference(extents, reads)
    }

    fn cases(&self) -> Vec<Case> {
        few_rows()
    }

    fn tolerance(&self) -> Tolerance {
        self.plain().tolerance()
    }
}

/// Every tile, with epilogues, and sizes that divide by 8 and nothing else.
pub fn representative() -> Vec<KernelSpec> {
    let mut kernels = Vec::new();
    for (n, k, dtype, epilogue) in odd_sizes() {
        for tile in GemmSkinny::tiles(n, k, dtype, Instructions::Hopper) {
            kernels.push(KernelSpec::from(GemmSkinny {
                n,
                k,
                dtype,
                epilogue,
                tile,
            }));
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gemm(n: u32, k: u32, dtype: DType, tile: SkinnyTile) -> GemmSkinny {
        GemmSkinny {
            n,
            k,
            dtype,
            epilogue: Epilogue::default(),
            tile,
        }
    }

    #[test]
    fn every_tile_is_valid_and_fits_the_shared_memory() {
        for (n, k, dtype, _) in odd_sizes() {
            for tile in GemmSkinny::tiles(n, k, dtype, Instructions::Hopper) {
                assert_eq!(gemm(n, k, dtype, tile).check(), Ok(()));
            }
        }
        assert!(GemmSkinny::tiles(768, 768, DType::F16, Instructions::Ampere).is_empty());
        assert!(GemmSkinny::tiles(768, 768, DType::F32, Instructions::Hopper).is_empty());
    }

    #[test]
    fn a_launch_has_a_cluster_for_every_tile() {
        let extents = Extents::of(&[20]).expect("a batch");
        let launch = gemm(1000, 768, DType::F16, SkinnyTile::new(16, 16, 2, 4)).launch(&extents);
        assert_eq!((launch.grid, launch.threads), ([2 * 63 * 2, 1, 1], 128));
        // Three chunks of sixteen tokens, and one of two products from two blocks, for four warps.
        assert_eq!(launch.shared_bytes, 4 * (3 * 2 + 2) * 512);
    }

    #[test]
    fn what_the_kernel_does_not_serve_is_refused_with_the_reason() {
        let refused = |gemm: GemmSkinny| gemm.check().expect_err("refused");
        let tile = SkinnyTile::new(8, 8, 1, 8);
        assert_eq!(
            refused(gemm(768, 36, DType::F16, tile)),
            "no GEMM for few rows with 768 columns and 36 products in f16: it takes multiples of 8 in f16 or bf16"
        );
        for wrong in [
            SkinnyTile { tokens: 0, ..tile },
            SkinnyTile { tokens: 12, ..tile },
            SkinnyTile { tokens: 72, ..tile },
            SkinnyTile {
                columns: 24,
                ..tile
            },
            SkinnyTile { splits: 0, ..tile },
            SkinnyTile { splits: 9, ..tile },
            SkinnyTile { warps: 17, ..tile },
        ] {
            let message = refused(gemm(768, 768, DType::F16, wrong));
            assert!(message.contains("is no tile for 768 products"), "{message}");
        }
        let message = refused(gemm(768, 8192, DType::F16, tile));
        assert!(
            message.contains("is no tile for 8192 products"),
            "{message}"
        );
    }
}
