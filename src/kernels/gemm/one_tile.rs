//! The GEMM on Hopper for as many rows as make a tile for each multiprocessor, or fewer: a block has
//! one tile, or one part of k of it.

use serde::{Deserialize, Serialize};

use super::{Epilogue, Gemm, GemmWgmma, instances::at_odd_sizes};
use crate::{
    kernels::{
        Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, RowOrder,
        TensorMap, Tolerance,
    },
    machine::{Hopper, Machine, SMALL_M},
    tensor::{DType, Extents},
};

/// How the GEMM of one tile a block is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OneTile {
    /// Rows of a tile: 64 or 128.
    pub m: u32,
    /// Columns of a tile: a multiple of 64 for each of `splits`, up to 256.
    pub n: u32,
    /// Blocks of a cluster, which share out k: 1 to 4.
    pub splits: u32,
    /// Whether a block leaves half of the shared memory to another one.
    pub two: bool,
}

/// `x [rows, k]`, `weight [n, k]`, `bias [n]` → `out [rows, n]` in f16 or bf16, as [`Gemm`], on
/// Hopper. `n` and `k` are multiples of 8: rows of a tensor map start at multiples of 16 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GemmOneTile {
    pub n: u32,
    pub k: u32,
    pub dtype: DType,
    pub epilogue: Epilogue,
    pub tile: OneTile,
}

/// Elements of k in a stage: 128 bytes, the width of the widest swizzle.
const BLOCK_K: u32 = 64;
/// Stages start at a multiple of this.
const ALIGNMENT: u32 = 1024;
/// Dynamic shared memory of a block, beside the barriers.
const SHARED_LIMIT: u32 = 226 * 1024;
/// The same where two blocks lie side by side.
const SHARED_OF_TWO: u32 = 112 * 1024;
/// More stages than this hide nothing more.
const MOST_STAGES: u32 = 8;
/// Bytes of a warp's 16 rows by 64 columns on their way to memory.
const PATCH_BYTES: u32 = 16 * 128;

impl OneTile {
    /// The tiles that a GEMM may have, smallest first.
    pub const CANDIDATES: [OneTile; 9] = [
        OneTile::new(64, 64, 1, false),
        OneTile::new(64, 64, 1, true),
        OneTile::new(64, 128, 1, false),
        OneTile::new(64, 128, 1, true),
        OneTile::new(64, 128, 2, false),
        OneTile::new(64, 192, 1, false),
        OneTile::new(64, 192, 3, false),
        OneTile::new(128, 64, 1, false),
        OneTile::new(128, 128, 1, false),
    ];

    /// Beyond so many rows a walk over tiles, [`GemmWgmma`], was as fast or faster wherever it was timed.
    pub const MOST_ROWS: u64 = 1280;

    const fn new(m: u32, n: u32, splits: u32, two: bool) -> Self {
        Self { m, n, splits, two }
    }

    /// As in symbols.
    pub fn name(self) -> String {
        let Self { m, n, .. } = self;
        let two = if self.two { "_two" } else { "" };
        match self.splits {
            1 => format!("one{m}x{n}{two}"),
            splits => format!("one{m}x{n}_splits{splits}{two}"),
        }
    }

    /// Estimated cycles on a card with these instructions, comparable with [`WgmmaTile::cycles`](super::WgmmaTile::cycles).
    ///
    /// A block that is gone hides nothing of the next one's beginning, so a further wave costs all of it once more.
    pub fn cycles(self, rows: u64, n: u32, k: u32, epilogue: Epilogue, machine: &Machine) -> f64 {
        let Some(Hopper {
            one_tile: cost,
            small_m,
            ..
        }) = &machine.costs.hopper
        else {
            return f64::INFINITY;
        };
        let n_sms = u64::from(machine.sms);
        let blocks = self.blocks(rows, n);
        let slots = if self.two { 2 } else { 1 };
        let waves = blocks.div_ceil(n_sms * slots) as f64;
        let beside = blocks.div_ceil(n_sms).min(slots) as f64;
        let busy = blocks.min(n_sms) as f64 / n_sms as f64;
        let outputs = f64::from(self.m) * f64::from(self.n);
        let bytes = f64::from(self.stage_bytes());
        let step = (outputs * f64::from(BLOCK_K) / machine.rates.tensor)
            .max(bytes / cost.l2_per_sm)
            + bytes * busy * cost.power;
        let products = f64::from(k.div_ceil(BLOCK_K).div_ceil(self.splits)) * step;
        let own = outputs / f64::from(self.splits);
        let activated = own * f64::from(u8::from(epilogue.activation.is_some()));
        let finish = own * cost.output + activated * cost.activation;
        let exchange = match self.splits {
            1 => 0.0,
            splits if rows <= SMALL_M => {
                small_m.exchange + cost.cluster + f64::from(splits - 1) * own * cost.exchange_byte
            }
            splits => cost.cluster + f64::from(splits - 1) * own * cost.exchange_byte,
        };
        let fill = cost.launch + bytes * cost.stage_byte;
        waves * (fill + beside * (cost.tile + products) + finish + exchange)
    }

    /// Blocks of a launch.
    fn blocks(self, rows: u64, n: u32) -> u64 {
        rows.div_ceil(self.m.into())
            .saturating_mul(n.div_ceil(self.n).into())
            .saturating_mul(self.splits.into())
    }

    /// A warpgroup for every 64 rows, and a warp that copies.
    const fn threads(self) -> u32 {
        self.m * 2 + 32
    }

    const fn stage_bytes(self) -> u32 {
        (self.m + self.n) * BLOCK_K * 2
    }

    /// Dynamic shared memory without the stages: sums from the cluster's other blocks, and results on
    /// their way to memory.
    const fn bytes_beside_stages(self) -> u32 {
        let part = self.m * (self.n / self.splits) * 4;
        ALIGNMENT + (self.splits - 1) * part + self.m / 16 * PATCH_BYTES
    }

    /// Steps of k in shared memory: as many as there is room for.
    fn stages(self) -> u32 {
        let limit = if self.two {
            SHARED_OF_TWO
        } else {
            SHARED_LIMIT
        };
        ((limit - self.bytes_beside_stages()) / self.stage_bytes()).min(MOST_STAGES)
    }

    fn shared_bytes(self) -> u32 {
        self.stages() * self.stage_bytes() + self.bytes_beside_stages()
    }
}

impl GemmOneTile {
    /// The tiles that serve a GEMM on a card with these instructions.
    pub fn tiles(n: u32, k: u32, dtype: DType, instructions: Instructions) -> Vec<OneTile> {
        if !GemmWgmma::serves(n, k, dtype) || instructions != Instructions::Hopper {
            return Vec::new();
        }
        let has_k = |tile: &OneTile| tile.splits <= k.div_ceil(BLOCK_K);
        OneTile::CANDIDATES.into_iter().filter(has_k).collect()
    }

    /// Whether the kernel can be generated as described; otherwise what is wrong.
    pub fn check(&self) -> Result<(), String> {
        GemmWgmma::check_serves(self.n, self.k, self.dtype)?;
        let tiles = Self::tiles(self.n, self.k, self.dtype, Instructions::Hopper);
        match tiles.contains(&self.tile) {
            true => Ok(()),
            false => Err(format!(
                "{:?} is no tile of the GEMM of one tile a block for {} products",
                self.tile, self.k
            )),
        }
    }

    /// The same GEMM for any card, which is its definition.
    pub fn plain(&self) -> Gemm {
        Gemm::of(self.n, self.k, self.dtype, self.epilogue)
    }
}

impl Kernel for GemmOneTile {
    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.tile.name())
    }

    fn definition(&self) -> String {
        self.plain().definition()
    }

    fn template(&self) -> &'static str {
        "gemm_one_tile"
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let OneTile { m, n, splits, .. } = self.tile;
        let mut constants = self.plain().constants();
        constants.retain(|name, _| {
            [
                "storage",
                "n",
                "k",
                "bias",
                "activation",
                "precise",
                "group_m",
            ]
            .contains(name)
        });
        let cluster = match splits {
            // The attribute costs time even where a cluster is one block.
            1 => String::new(),
            _ => format!("__cluster_dims__({splits}, 1, 1) "),
        };
        let sums = n / 2;
        let list = |of: &dyn Fn(u32) -> String| (0..sums).map(of).collect::<Vec<_>>().join(", ");
        constants.extend([
            ("block_m", m.into()),
            ("block_n", n.into()),
            ("splits", splits.into()),
            ("stages", self.tile.stages().into()),
            ("cluster", cluster.into()),
            ("sums", sums.into()),
            ("sum_registers", list(&|i| format!("%{i}")).into()),
            (
                "sum_operands",
                list(&|i| format!("\"+f\"(sums[{i}])")).into(),
            ),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        self.plain().params()
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        let map = |param, box_rows| TensorMap {
            param,
            box_rows,
            box_columns: BLOCK_K,
            order: RowOrder::Plain,
        };
        vec![map("x", self.tile.m), map("weight", self.tile.n)]
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let blocks = self.tile.blocks(extents.rows, self.n);
        Launch::of_blocks(blocks, self.tile.threads(), self.tile.shared_bytes())
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        Some(
            self.tile
                .cycles(rows, self.n, self.k, self.epilogue, machine),
        )
    }

    fn most_rows(&self) -> Option<u64> {
        Some(OneTile::MOST_ROWS)
    }

    fn threads(&self) -> u32 {
        self.tile.threads()
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
    at_odd_sizes(GemmOneTile::tiles, |(n, k, dtype, epilogue), tile| {
        KernelSpec::from(GemmOneTile {
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

    fn gemm(n: u32, k: u32, dtype: DType, tile: OneTile) -> GemmOneTile {
        GemmOneTile {
            n,
            k,
            dtype,
            epilogue: Epilogue::default(),
            tile,
        }
    }

    #[test]
    fn every_tile_fits_the_shared_memory_and_the_products_of_hopper() {
        for tile in OneTile::CANDIDATES {
            let limit = if tile.two {
                SHARED_OF_TWO
            } else {
                SHARED_LIMIT
            };
            assert!(tile.shared_bytes() <= limit, "{tile:?}");
            assert!((4..=MOST_STAGES).contains(&tile.stages()), "{tile:?}");
            assert_eq!(
                (tile.m % 64, tile.n % (64 * tile.splits)),
                (0, 0),
                "{tile:?}"
            );
            assert!(tile.n <= 256 && tile.splits <= 8, "{tile:?}");
            assert_eq!(gemm(768, 768, DType::BF16, tile).check(), Ok(()));
        }
        assert!(GemmOneTile::tiles(768, 768, DType::F16, Instructions::Ampere).is_empty());
        assert!(GemmOneTile::tiles(770, 768, DType::F16, Instructions::Hopper).is_empty());
        let narrow = GemmOneTile::tiles(768, 64, DType::F16, Instructions::Hopper);
        assert!(narrow.iter().all(|tile| tile.splits == 1), "{narrow:?}");
    }

    #[test]
    fn a_launch_has_a_cluster_for_every_tile() {
        let extents = Extents::default().with_rows(300);
        let launch = gemm(1000, 768, DType::F16, OneTile::new(64, 128, 2, false))
            .launch(&extents, &crate::machine::testing::hopper());
        assert_eq!(launch.grid, [5 * 8 * 2, 1, 1]);
        assert_eq!(launch.threads, 4 * 32 + 32);
        // Eight steps, sums of 64 rows and columns from the other block, four warps' results.
        let bytes = 1024 + 8 * (64 + 128) * 128 + 64 * 64 * 4 + 4 * 2048;
        assert_eq!(launch.shared_bytes, bytes);
    }

    #[test]
    fn one_tile_a_block_is_estimated_to_serve_what_fills_the_card_once() {
        let epilogue = Epilogue::default();
        let cycles = |tile: OneTile, rows| {
            tile.cycles(
                rows,
                768,
                3072,
                epilogue,
                &crate::machine::testing::hopper(),
            )
        };
        let [apart, split] = [1, 2].map(|splits| OneTile::new(64, 128, splits, false));
        // 120 CTAs, or 240 in two waves: k is not worth sharing out.
        assert!(cycles(apart, 1229) < cycles(split, 1229));
        assert!(cycles(apart, 1500) > 1.8 * cycles(apart, 1229));
    }

    #[test]
    fn what_the_kernel_does_not_serve_is_refused_with_the_reason() {
        let refused = |gemm: GemmOneTile| gemm.check().expect_err("refused");
        let tile = OneTile::CANDIDATES[0];
        assert_eq!(
            refused(gemm(770, 768, DType::F16, tile)),
            "no Hopper GEMM for 770 columns and 768 products in f16: it takes multiples of 8 in f16 or bf16"
        );
        for (k, tile) in [
            (768, OneTile { n: 72, ..tile }),
            (64, OneTile::new(64, 128, 2, false)),
        ] {
            let message = refused(gemm(768, k, DType::F16, tile));
            assert!(
                message.contains("is no tile of the GEMM of one tile a block"),
                "{message}"
            );
        }
    }
}
