//! The GEMM for the smallest M on Hopper: the weight is loaded straight to registers.

use serde::{Deserialize, Serialize};

use super::{Epilogue, Gemm, GemmWgmma, instances::at_odd_sizes};
use crate::{
    kernels::{Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Tolerance},
    machine::{Hopper, Machine},
    tensor::{DType, Extents},
};

/// The tile of the GEMM for the smallest M.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SkinnyTile {
    /// Rows of x in a tile: a multiple of 8 up to 64.
    pub tokens: u32,
    /// Warps of a CTA, which share k (sliced-K): 1 to 16.
    pub warps: u32,
}

/// `x [rows, k]`, `weight [n, k]`, `bias [n]` → `out [rows, n]` in f16 or bf16, as [`Gemm`], made for
/// the smallest M, on Hopper. `n` and `k` are multiples of 8: lanes read 16 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GemmSkinny {
    pub n: u32,
    pub k: u32,
    pub dtype: DType,
    pub epilogue: Epilogue,
    pub tile: SkinnyTile,
}

/// Columns of the output, that is rows of the weight, in a tile: two n8 MMAs.
const COLUMNS: u32 = 16;
/// Elements of k that a warp reads at once: 16 bytes of a row for each of four lanes.
const CHUNK: u32 = 32;
/// The most chunks of k of a warp: a lane has 8 registers of the weight for each.
const MOST_CHUNKS: u32 = 12;
/// Bytes of a warp's accesses to shared memory.
const WARP_BYTES: u32 = 32 * 16;
/// Bytes of shared memory of a CTA.
const SHARED_LIMIT: u32 = 226 * 1024;

impl SkinnyTile {
    /// The tiles that a GEMM may have, fewest tokens first.
    pub const CANDIDATES: [SkinnyTile; 12] = [
        SkinnyTile::new(8, 4),
        SkinnyTile::new(8, 8),
        SkinnyTile::new(8, 16),
        SkinnyTile::new(16, 4),
        SkinnyTile::new(16, 8),
        SkinnyTile::new(16, 16),
        SkinnyTile::new(24, 4),
        SkinnyTile::new(24, 8),
        SkinnyTile::new(24, 16),
        SkinnyTile::new(32, 4),
        SkinnyTile::new(32, 8),
        SkinnyTile::new(32, 16),
    ];

    const fn new(tokens: u32, warps: u32) -> Self {
        Self { tokens, warps }
    }

    /// The part of a symbol that names the tile.
    pub fn name(self) -> String {
        format!("skinny{}_warps{}", self.tokens, self.warps)
    }

    /// The most rows: two tiles of tokens, as more read the weights too often.
    pub const fn most_rows(self) -> u64 {
        2 * self.tokens as u64
    }

    /// Estimated cycles on a card with Hopper's instructions, comparable with
    /// [`SplitKTile::cycles`](super::SplitKTile::cycles).
    pub fn cycles(self, rows: u64, n: u32, k: u32, machine: &Machine) -> f64 {
        let Some(Hopper { skinny: cost, .. }) = &machine.costs.hopper else {
            return f64::INFINITY;
        };
        let ctas = self.ctas(rows, n);
        let of_busiest = ctas.div_ceil(machine.sms.into()) as f64;
        // Chunks past k count, too: they are read as if they were there.
        let read = f64::from(self.chunks(k) * self.warps * CHUNK) * 2.0;
        let x_bytes = f64::from(self.tokens) * read;
        let weight_bytes = f64::from(COLUMNS) * read;
        cost.launch
            + (of_busiest - 1.0) * cost.beside
            + of_busiest
                * (x_bytes * cost.x_byte
                    + f64::from(self.warps) * cost.warp
                    + f64::from(self.chunks(k)) * cost.chunk)
            + ctas as f64 * (x_bytes + weight_bytes) * cost.l2_byte
    }

    /// CTAs of a launch.
    fn ctas(self, rows: u64, n: u32) -> u64 {
        rows.div_ceil(self.tokens.into())
            .saturating_mul(n.div_ceil(COLUMNS).into())
    }

    /// Chunks of k of each warp.
    const fn chunks(self, k: u32) -> u32 {
        k.div_ceil(CHUNK).div_ceil(self.warps)
    }

    /// Bytes of shared memory: a CTA's rows of x, and the accumulators that its warps sum.
    const fn shared_bytes(self, k: u32) -> u32 {
        let mma_tiles = self.tokens.div_ceil(16) * (COLUMNS / 8);
        self.warps * (self.chunks(k) * (self.tokens / 8) + mma_tiles) * WARP_BYTES
    }

    /// Whether all warps have the same number of chunks, or they are the fewest of any candidate.
    fn shares_evenly(self, k: u32) -> bool {
        k.div_ceil(CHUNK).is_multiple_of(self.warps) || self.warps == 4
    }

    /// Whether the tile serves a GEMM of depth k.
    fn fits(self, k: u32) -> bool {
        self.chunks(k) <= MOST_CHUNKS && self.shared_bytes(k) <= SHARED_LIMIT
    }
}

impl GemmSkinny {
    /// The tiles that serve a GEMM on a card with `instructions`, fewest tokens first.
    pub fn tiles(n: u32, k: u32, dtype: DType, instructions: Instructions) -> Vec<SkinnyTile> {
        if !GemmWgmma::serves(n, k, dtype) || instructions != Instructions::Hopper {
            return Vec::new();
        }
        SkinnyTile::CANDIDATES
            .into_iter()
            .filter(|tile| tile.fits(k) && tile.shares_evenly(k))
            .collect()
    }

    /// Whether the kernel can be generated as described; otherwise what is wrong.
    pub fn check(&self) -> Result<(), String> {
        let SkinnyTile { tokens, warps } = self.tile;
        GemmWgmma::check_serves(self.n, self.k, self.dtype)?;
        let counts =
            (8..=64).contains(&tokens) && tokens.is_multiple_of(8) && (1..=16).contains(&warps);
        if !counts || !self.tile.fits(self.k) {
            return Err(format!(
                "{:?} is no tile for {} products: a warp has at most {} of them, and a CTA at most {SHARED_LIMIT} bytes",
                self.tile,
                self.k,
                MOST_CHUNKS * CHUNK
            ));
        }
        Ok(())
    }

    /// The same GEMM for any card, which is its definition.
    pub fn plain(&self) -> Gemm {
        Gemm::of(self.n, self.k, self.dtype, self.epilogue)
    }
}

impl Kernel for GemmSkinny {
    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.tile.name())
    }

    fn definition(&self) -> String {
        self.plain().definition()
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
            ("warps", self.tile.warps.into()),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        self.plain().params()
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let ctas = self.tile.ctas(extents.rows, self.n);
        Launch::of_blocks(ctas, self.threads(), self.tile.shared_bytes(self.k))
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        Some(self.tile.cycles(rows, self.n, self.k, machine))
    }

    fn most_rows(&self) -> Option<u64> {
        Some(self.tile.most_rows())
    }

    fn threads(&self) -> u32 {
        32 * self.tile.warps
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.plain().reference(extents, reads)
    }

    fn tolerance(&self) -> Tolerance {
        self.plain().tolerance()
    }
}

/// Every tile, with epilogues, and sizes that divide by 8 and nothing else.
pub fn representative() -> Vec<KernelSpec> {
    at_odd_sizes(GemmSkinny::tiles, |(n, k, dtype, epilogue), tile| {
        KernelSpec::from(GemmSkinny {
            n,
            k,
            dtype,
            epilogue,
            tile,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::gemm::instances::odd_sizes;

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
    fn a_launch_has_a_block_for_every_tile() {
        let extents = Extents::of(&[20]).expect("a batch");
        let launch = gemm(1000, 768, DType::F16, SkinnyTile::new(16, 4))
            .launch(&extents, &crate::machine::testing::hopper());
        assert_eq!((launch.grid, launch.threads), ([2 * 63, 1, 1], 128));
        // Six chunks of sixteen tokens, and two MMA tiles, for each of four warps.
        assert_eq!(launch.shared_bytes, 4 * (6 * 2 + 2) * 512);
    }

    #[test]
    fn what_the_kernel_does_not_serve_is_refused_with_the_reason() {
        let refused = |gemm: GemmSkinny| gemm.check().expect_err("refused");
        let tile = SkinnyTile::new(8, 8);
        assert_eq!(
            refused(gemm(768, 36, DType::F16, tile)),
            "no Hopper GEMM for 768 columns and 36 products in f16: it takes multiples of 8 in f16 or bf16"
        );
        for wrong in [
            SkinnyTile { tokens: 0, ..tile },
            SkinnyTile { tokens: 12, ..tile },
            SkinnyTile { tokens: 72, ..tile },
            SkinnyTile { warps: 0, ..tile },
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
