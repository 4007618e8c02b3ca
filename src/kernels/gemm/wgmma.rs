//! The GEMM for Hopper: warpgroup products (`wgmma`) fed by the tensor memory accelerator.

use serde::{Deserialize, Serialize};

use super::{Epilogue, Gemm};
use crate::{
    kernels::{
        Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, RowOrder,
        TensorMap, Tolerance,
    },
    machine::{Hopper, Machine, SMALL_M},
    tensor::{DType, Extents},
};

/// How a block of the Hopper GEMM is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WgmmaTile {
    /// Rows of a tile: 64, 128 or 256; or another multiple of 8 up to 256, in turns and with 128 columns,
    /// where rows of the weight, not of x, are rows of the products.
    pub m: u32,
    /// Columns of a tile: a multiple of 16 up to 256.
    pub n: u32,
    /// Whether two warpgroups compute the halves of one tile. Otherwise each has a tile of its own,
    /// and the epilogue of one runs under the products of the other.
    pub together: bool,
}

/// `x [rows, k]`, `weight [n, k]`, `bias [n]` → `out [rows, n]` in f16 or bf16, as [`Gemm`], on
/// Hopper. `n` and `k` are multiples of 8: rows of a tensor map start at multiples of 16 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GemmWgmma {
    pub n: u32,
    pub k: u32,
    pub dtype: DType,
    pub epilogue: Epilogue,
    pub tile: WgmmaTile,
}

/// How results leave a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Results {
    /// From registers to memory: the weight's rows are loaded in [`RowOrder::Quads`], of multiples of 32.
    ByLanes,
    /// From registers to memory, of products with the weight's rows, in [`RowOrder::Fours`], as rows.
    Swapped,
    /// Through shared memory, as boxes.
    ByBoxes,
}

/// Shared memory of a block on Hopper.
const SHARED_LIMIT: u32 = 227 * 1024;
/// Elements of k in a stage: 128 bytes, the width of the widest swizzle.
const BLOCK_K: u32 = 64;
/// More stages than this hide nothing more.
const MOST_STAGES: u32 = 8;
/// Fewer stages than this show what a copy takes.
const ENOUGH_STAGES: u32 = 4;
/// Rows of one warp in 64 rows of a warpgroup.
const PIECE_ROWS: u32 = 16;
/// One warpgroup that copies and two that compute.
const THREADS: u32 = 384;
impl WgmmaTile {
    /// The tiles that a GEMM may have, largest first.
    pub const CANDIDATES: [WgmmaTile; 24] = [
        WgmmaTile::new(256, 128, true),
        WgmmaTile::new(128, 256, true),
        WgmmaTile::new(128, 192, true),
        WgmmaTile::new(128, 192, false),
        WgmmaTile::new(128, 176, false),
        WgmmaTile::new(128, 160, false),
        WgmmaTile::new(128, 144, false),
        WgmmaTile::new(128, 128, true),
        WgmmaTile::new(128, 128, false),
        WgmmaTile::new(128, 112, false),
        WgmmaTile::new(128, 96, false),
        WgmmaTile::new(64, 256, false),
        WgmmaTile::new(64, 208, false),
        WgmmaTile::new(64, 192, false),
        WgmmaTile::new(64, 128, false),
        WgmmaTile::new(64, 96, false),
        WgmmaTile::new(64, 64, false),
        WgmmaTile::new(176, 128, false),
        WgmmaTile::new(160, 128, false),
        WgmmaTile::new(136, 128, false),
        WgmmaTile::new(120, 128, false),
        WgmmaTile::new(112, 128, false),
        WgmmaTile::new(96, 128, false),
        WgmmaTile::new(88, 128, false),
    ];

    const fn new(m: u32, n: u32, together: bool) -> Self {
        Self { m, n, together }
    }

    /// As in symbols.
    pub fn name(self) -> String {
        let turns = if self.together { "" } else { "_turns" };
        format!("wgmma{}x{}{turns}", self.m, self.n)
    }

    /// Columns of a piece of a warp's results, and the boxes that it is stored as.
    ///
    /// Rows of 64 columns are swizzled. Where they do not divide a tile, a piece is two boxes whose
    /// rows are an odd number of 16 bytes: eight of them lie in different banks without a swizzle.
    const fn piece(self) -> (u32, u32) {
        match self.n.is_multiple_of(64) {
            true => (64, 1),
            false => (self.n >> (self.n.trailing_zeros() - 4), 2),
        }
    }

    /// Whether rows of the weight are rows of the products, which are multiples of 64.
    pub(super) const fn is_swapped(self) -> bool {
        !self.m.is_multiple_of(64)
    }

    /// Whether the tile serves a weight of so many rows.
    pub(super) const fn serves(self, n: u32) -> bool {
        !self.is_swapped() || n.is_multiple_of(RowOrder::GROUP)
    }

    /// How results of a GEMM with so many outputs leave.
    const fn results(self, n: u32) -> Results {
        if self.is_swapped() {
            return Results::Swapped;
        }
        match n.is_multiple_of(RowOrder::GROUP) && self.n.is_multiple_of(RowOrder::GROUP) {
            true => Results::ByLanes,
            false => Results::ByBoxes,
        }
    }

    /// Pieces on their way to memory, for each of the eight computing warps: 16 rows of the tile,
    /// or half as many where stages need the room.
    fn buffers(self, results: Results) -> u32 {
        let (piece, _) = self.piece();
        let all = self.n / piece;
        match results {
            Results::ByLanes | Results::Swapped => 0,
            Results::ByBoxes if self.stages_beside(all) >= ENOUGH_STAGES => all,
            Results::ByBoxes => (all / 2).max(1),
        }
    }

    const fn stage_bytes(self) -> u32 {
        (self.m + self.n) * BLOCK_K * 2
    }

    /// Steps of k in shared memory: as many as there is room for.
    fn stages(self, results: Results) -> u32 {
        self.stages_beside(self.buffers(results))
    }

    fn stages_beside(self, buffers: u32) -> u32 {
        let rest = SHARED_LIMIT - self.bytes_beside_stages(buffers, MOST_STAGES);
        (rest / self.stage_bytes()).min(MOST_STAGES)
    }

    /// Of pieces, barriers, and the bias of both computing warpgroups.
    const fn bytes_beside_stages(self, buffers: u32, stages: u32) -> u32 {
        let (piece, _) = self.piece();
        8 * buffers * PIECE_ROWS * piece * 2 + (2 * stages + 2) * 8 + 2 * self.n * 4
    }

    fn shared_bytes(self, results: Results) -> u32 {
        let stages = self.stages(results);
        stages * self.stage_bytes() + self.bytes_beside_stages(self.buffers(results), stages)
    }

    /// Estimated cycles on a card with these instructions, comparable with [`Tile::cycles`](super::Tile::cycles).
    ///
    /// `fill + tiles of the busiest multiprocessor × (k-steps × cost of a step + epilogue)`, where
    /// a step costs what the slower of products and L2 does, and what its bytes cost of the clock, both for as many
    /// multiprocessors as have a tile in the mean over the waves,
    /// and tiles that take turns hide what of the epilogues fits under products.
    pub fn cycles(self, rows: u64, n: u32, k: u32, epilogue: Epilogue, machine: &Machine) -> f64 {
        let Some(Hopper {
            wgmma: cost,
            small_m,
            ..
        }) = &machine.costs.hopper
        else {
            return f64::INFINITY;
        };
        let n_sms = u64::from(machine.sms);
        let tiles = self.tiles(rows, n);
        let of_busiest = tiles.div_ceil(n_sms) as f64;
        let busy = tiles as f64 / (of_busiest * n_sms as f64).max(1.0);
        let outputs = f64::from(self.m) * f64::from(self.n);
        let bytes = f64::from(self.stage_bytes());
        let limits = [
            outputs * f64::from(BLOCK_K) / machine.rates.tensor,
            bytes / cost.l2_per_sm,
            bytes * busy * n_sms as f64 / cost.l2,
        ];
        let norm: f64 = limits.iter().map(|l| l.powf(cost.overlap)).sum();
        let step = norm.powf(cost.overlap.recip()) + bytes * busy * cost.power;
        let products = f64::from(k.div_ceil(BLOCK_K)) * step;
        let activated = outputs * f64::from(u8::from(epilogue.activation.is_some()));
        let boxed = match self.results(n) {
            Results::ByLanes | Results::Swapped => 0.0,
            Results::ByBoxes => outputs * cost.boxed,
        };
        let work = if self.together {
            let finish = outputs * cost.output + boxed + activated * cost.activation;
            of_busiest * (products + finish)
        } else {
            let swapped = if self.is_swapped() { cost.swap_ab } else { 1.0 };
            let stored = outputs * cost.output * cost.one_warpgroup * swapped + boxed;
            let finish = stored + activated * cost.activation_by_one;
            let spread = match outputs < cost.spread_from {
                true => 1.0,
                false => cost.spread,
            };
            let contention = activated * cost.contention * spread;
            let hidden = products.max((products + finish) / 2.0) + contention;
            (of_busiest - 1.0) * hidden + products + finish
        };
        let waits = match rows <= SMALL_M && outputs / 32.0 < small_m.short_mma {
            true => {
                small_m.wait * f64::from(k.div_ceil(BLOCK_K).saturating_sub(small_m.fitted_steps))
            }
            false => 0.0,
        };
        cost.launch + bytes * cost.stage_byte + of_busiest * cost.tile + work + waits
    }

    /// Tiles of an output.
    fn tiles(self, rows: u64, n: u32) -> u64 {
        rows.div_ceil(self.m.into())
            .saturating_mul(n.div_ceil(self.n).into())
    }
}

impl GemmWgmma {
    /// The tiles that serve a GEMM on a card with these instructions.
    pub fn tiles(n: u32, k: u32, dtype: DType, instructions: Instructions) -> Vec<WgmmaTile> {
        if !Self::serves(n, k, dtype) || instructions != Instructions::Hopper {
            return Vec::new();
        }
        let all = WgmmaTile::CANDIDATES.into_iter();
        all.filter(|tile| tile.serves(n)).collect()
    }

    /// Whether there is a Hopper kernel for this shape and storage type.
    pub fn serves(n: u32, k: u32, dtype: DType) -> bool {
        dtype != DType::F32 && n.is_multiple_of(8) && k.is_multiple_of(8) && n > 0 && k > 0
    }

    /// [`GemmWgmma::serves`], with the reason where it does not.
    pub(super) fn check_serves(n: u32, k: u32, dtype: DType) -> Result<(), String> {
        match Self::serves(n, k, dtype) {
            true => Ok(()),
            false => Err(format!(
                "no Hopper GEMM for {n} columns and {k} products in {dtype}: it takes multiples of 8 in f16 or bf16"
            )),
        }
    }

    /// Whether the kernel can be generated as described; otherwise what is wrong.
    pub fn check(&self) -> Result<(), String> {
        Self::check_serves(self.n, self.k, self.dtype)?;
        if !WgmmaTile::CANDIDATES.contains(&self.tile) || !self.tile.serves(self.n) {
            return Err(format!("{:?} is no tile of the Hopper GEMM", self.tile));
        }
        Ok(())
    }

    fn results(&self) -> Results {
        self.tile.results(self.n)
    }

    /// The same GEMM for any card, which is its definition.
    pub fn plain(&self) -> Gemm {
        Gemm::of(self.n, self.k, self.dtype, self.epilogue)
    }
}

impl Kernel for GemmWgmma {
    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.tile.name())
    }

    fn definition(&self) -> String {
        self.plain().definition()
    }

    fn template(&self) -> &'static str {
        "gemm_wgmma"
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let mut constants = self.plain().constants();
        for name in [
            "block_k",
            "warps_m",
            "warps_n",
            "least_blocks",
            "copy_bytes",
            "store_bytes",
        ] {
            constants.remove(name);
        }
        let results = self.results();
        let products_n = match results {
            Results::Swapped => self.tile.m,
            _ => self.tile.n,
        };
        let sums = products_n / 2;
        let (piece, boxes) = self.tile.piece();
        let list = |of: &dyn Fn(u32) -> String| (0..sums).map(of).collect::<Vec<_>>().join(", ");
        constants.extend([
            ("block_m", self.tile.m.into()),
            ("block_n", self.tile.n.into()),
            ("stages", self.tile.stages(self.results()).into()),
            ("together", self.tile.together.into()),
            ("by_lanes", (results != Results::ByBoxes).into()),
            ("swapped", (results == Results::Swapped).into()),
            ("products_n", products_n.into()),
            ("piece", piece.into()),
            ("boxes", boxes.into()),
            ("buffers", self.tile.buffers(self.results()).into()),
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
        let operand = |param, box_rows, order| TensorMap {
            param,
            box_rows,
            box_columns: BLOCK_K,
            order,
        };
        let x = operand("x", self.tile.m, RowOrder::Plain);
        let weight = |order| operand("weight", self.tile.n, order);
        match self.results() {
            Results::ByLanes => vec![x, weight(RowOrder::Quads)],
            Results::Swapped => vec![x, weight(RowOrder::Fours)],
            Results::ByBoxes => {
                let (piece, boxes) = self.tile.piece();
                let out = TensorMap {
                    param: "out",
                    box_rows: PIECE_ROWS,
                    box_columns: piece / boxes,
                    order: RowOrder::Plain,
                };
                vec![x, weight(RowOrder::Plain), out]
            }
        }
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        Launch {
            grid: [
                self.tile
                    .tiles(extents.rows, self.n)
                    .min(machine.sms.into()) as u32,
                1,
                1,
            ],
            threads: THREADS,
            shared_bytes: self.tile.shared_bytes(self.results()),
        }
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        Some(
            self.tile
                .cycles(rows, self.n, self.k, self.epilogue, machine),
        )
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.plain().reference(extents, reads)
    }

    fn tolerance(&self) -> Tolerance {
        self.plain().tolerance()
    }
}

/// Every tile, with epilogues, results that leave by lanes and by boxes, and sizes that divide by 32 or 8
/// and nothing else; the storage type changes only conversions.
pub fn representative() -> Vec<KernelSpec> {
    let plain = Epilogue::default();
    let gelu = Epilogue {
        bias: true,
        activation: Some(super::Activation::GeluExact),
    };
    let mut kernels = Vec::new();
    for (dtype, sizes) in [
        (
            DType::F16,
            &[(768, 768, plain), (992, 328, gelu), (8, 8, plain)][..],
        ),
        (DType::BF16, &[(1000, 328, gelu)][..]),
    ] {
        for tile in WgmmaTile::CANDIDATES {
            for &(n, k, epilogue) in sizes.iter().filter(|(n, _, _)| tile.serves(*n)) {
                kernels.push(KernelSpec::from(GemmWgmma {
                    n,
                    k,
                    dtype,
                    epilogue,
                    tile,
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
    fn every_tile_fits_the_shared_memory_and_registers_of_hopper() {
        for tile in WgmmaTile::CANDIDATES {
            let unswapped = [Results::ByLanes, Results::ByBoxes];
            for results in if tile.is_swapped() {
                &[Results::Swapped][..]
            } else {
                &unswapped
            } {
                let results = *results;
                assert!(tile.shared_bytes(results) <= 227 * 1024, "{tile:?}");
                assert!(
                    (3..=MOST_STAGES).contains(&tile.stages(results)),
                    "{tile:?}"
                );
            }
            // A thread has 240 registers, and the sums take most of them.
            let rows = if tile.together { tile.m / 2 } else { tile.m };
            assert!(rows * tile.n / 128 <= 192, "{tile:?}");
            if tile.is_swapped() {
                assert_eq!(
                    (tile.m % 8, tile.n, tile.together),
                    (0, RowOrder::BLOCK, false),
                    "{tile:?}"
                );
                continue;
            }
            // Copies to and from shared memory start at a multiple of 128 bytes, swizzled ones of 1024.
            let (piece, boxes) = tile.piece();
            assert_eq!(PIECE_ROWS * piece * 2 / boxes % 128, 0, "{tile:?}");
            assert_eq!((tile.n % piece, tile.n % 16), (0, 0), "{tile:?}");
            assert!(boxes == 1 || piece / boxes / 8 % 2 == 1, "{tile:?}");
            assert!(
                tile.m <= 256 && tile.n <= 256,
                "a box has at most 256 rows: {tile:?}"
            );
        }
    }

    #[test]
    fn what_the_kernel_does_not_serve_is_refused_with_the_reason() {
        let gemm = GemmWgmma {
            n: 770,
            k: 768,
            dtype: DType::F16,
            epilogue: Epilogue::default(),
            tile: WgmmaTile::CANDIDATES[0],
        };
        assert_eq!(
            gemm.check().unwrap_err(),
            "no Hopper GEMM for 770 columns and 768 products in f16: it takes multiples of 8 in f16 or bf16"
        );
        let tile = WgmmaTile { n: 96, ..gemm.tile };
        let gemm = GemmWgmma {
            n: 768,
            tile,
            ..gemm
        };
        assert_eq!(
            gemm.check().unwrap_err(),
            "WgmmaTile { m: 256, n: 96, together: true } is no tile of the Hopper GEMM"
        );
    }
}
