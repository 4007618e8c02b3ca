//! The GEMM for Hopper: warpgroup products (`wgmma`) fed by the tensor memory accelerator.

use serde::{Deserialize, Serialize};

use super::{Epilogue, Gemm, Tile, ranges::ranges};
use crate::{
    kernels::{
        Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, TensorMap,
        Tolerance,
    },
    tensor::{DType, Extents},
};

/// How a block of the Hopper GEMM is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WgmmaTile {
    /// Rows of a tile: 64, 128 or 256.
    pub m: u32,
    /// Columns of a tile: a multiple of 64 up to 256.
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

/// The faster of two kernels for one GEMM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EitherGemm {
    Any(Gemm),
    Hopper(GemmWgmma),
}

/// Shared memory of a block on Hopper, without what the bias of two tiles takes.
const SHARED_LIMIT: u32 = 227 * 1024 - 2 * 256 * 4;
/// Elements of k in a stage: 128 bytes, the width of the widest swizzle.
const BLOCK_K: u32 = 64;
/// Stages start at a multiple of this.
const STAGE_ALIGNMENT: u32 = 1024;
/// More stages than this hide nothing more.
const MOST_STAGES: u32 = 8;
/// Multiprocessors of an H100 or H200 SXM: a block of its own for each.
const SMS: u64 = 132;
/// One warpgroup that copies and two that compute.
const THREADS: u32 = 384;

/// What times are estimated for: an H200. The constants were fitted to 378 timings, at 128 to 9830
/// rows of the GEMMs of two encoders, which the estimate meets within 9 % (root mean square); the
/// tile that it picks is 3 % slower than the best one in the mean, and 20 % at worst.
mod machine {
    /// Multiply-adds a cycle; 2048 by the data sheet.
    pub const TENSOR_RATE: f64 = 1788.0;
    /// Bytes a cycle from L2, for one multiprocessor, and for all of them together.
    pub const L2_BANDWIDTH_OF_SM: f64 = 78.0;
    pub const L2_BANDWIDTH: f64 = 8600.0;
    /// Of an output: rounding and storing.
    pub const OUTPUT: f64 = 0.073;
    pub const ACTIVATION: f64 = 0.113;
    /// From launch to the first product, and the end.
    pub const FILL: f64 = 2540.0;
    pub const FILL_OF_TILE: f64 = 860.0;
}

impl WgmmaTile {
    /// The tiles that a GEMM may have, largest first.
    pub const CANDIDATES: [WgmmaTile; 9] = [
        WgmmaTile::new(256, 128, true),
        WgmmaTile::new(128, 256, true),
        WgmmaTile::new(128, 192, true),
        WgmmaTile::new(128, 128, true),
        WgmmaTile::new(128, 128, false),
        WgmmaTile::new(64, 256, false),
        WgmmaTile::new(128, 64, true),
        WgmmaTile::new(64, 128, false),
        WgmmaTile::new(64, 64, false),
    ];

    const fn new(m: u32, n: u32, together: bool) -> Self {
        Self { m, n, together }
    }

    /// As in symbols.
    pub fn name(self) -> String {
        let turns = if self.together { "" } else { "_turns" };
        format!("wgmma{}x{}{turns}", self.m, self.n)
    }

    /// Rows that a warpgroup computes.
    pub(super) const fn rows(self) -> u32 {
        if self.together { self.m / 2 } else { self.m }
    }

    /// 64 columns of a warpgroup's results.
    pub(super) const fn piece_bytes(self) -> u32 {
        self.rows() * 128
    }

    /// Pieces of results on their way to memory, for each of the two warpgroups.
    pub(super) const fn buffers(self) -> u32 {
        if self.rows() > 64 { 1 } else { 2 }
    }

    pub(super) const fn stage_bytes(self) -> u32 {
        (self.m + self.n) * BLOCK_K * 2
    }

    /// Steps of k in shared memory: as many as there is room for.
    fn stages(self) -> u32 {
        let barriers = (2 * MOST_STAGES + 2) * 8;
        let rest =
            SHARED_LIMIT - STAGE_ALIGNMENT - barriers - 2 * self.buffers() * self.piece_bytes();
        (rest / self.stage_bytes()).min(MOST_STAGES)
    }

    fn shared_bytes(self) -> u32 {
        let barriers = (2 * self.stages() + 2) * 8;
        STAGE_ALIGNMENT
            + self.stages() * self.stage_bytes()
            + 2 * self.buffers() * self.piece_bytes()
            + barriers
    }

    /// Estimated cycles at 1755 MHz, comparable with [`Tile::cycles`].
    ///
    /// `fill + tiles of the busiest multiprocessor × (k-steps × cost of a step + epilogue)`, where
    /// a step costs what the slower of products and L2 does, and tiles that take turns hide what of
    /// the epilogues fits under products.
    pub fn cycles(self, rows: u64, n: u32, k: u32, epilogue: Epilogue, n_sms: u32) -> f64 {
        let n_sms = u64::from(n_sms.max(1));
        let tiles = self.tiles(rows, n);
        let of_busiest = tiles.div_ceil(n_sms) as f64;
        let outputs = f64::from(self.m) * f64::from(self.n);
        let l2 =
            machine::L2_BANDWIDTH_OF_SM.min(machine::L2_BANDWIDTH / tiles.clamp(1, n_sms) as f64);
        let step = (outputs * f64::from(BLOCK_K) / machine::TENSOR_RATE)
            .max(f64::from(self.stage_bytes()) / l2);
        let products = f64::from(k.div_ceil(BLOCK_K)) * step;
        let activated = f64::from(u8::from(epilogue.activation.is_some()));
        let finish = outputs * (machine::OUTPUT + activated * machine::ACTIVATION);
        let work = if self.together {
            of_busiest * (products + finish)
        } else {
            // Half as many threads have the epilogue of a tile.
            let finish = 2.0 * finish;
            (of_busiest - 1.0) * products.max((products + finish) / 2.0) + products + finish
        };
        machine::FILL + of_busiest * machine::FILL_OF_TILE + work
    }

    /// Tiles of an output.
    fn tiles(self, rows: u64, n: u32) -> u64 {
        rows.div_ceil(self.m.into())
            .saturating_mul(n.div_ceil(self.n).into())
    }
}

impl GemmWgmma {
    /// The tiles that serve a GEMM on a card with these instructions.
    pub fn tiles(n: u32, k: u32, dtype: DType, instructions: Instructions) -> &'static [WgmmaTile] {
        match Self::serves(n, k, dtype) && instructions == Instructions::Hopper {
            true => &WgmmaTile::CANDIDATES,
            false => &[],
        }
    }

    /// As [`Gemm::variants`], for a card with Hopper's instructions: whichever kernel is faster.
    pub fn variants(
        n: u32,
        k: u32,
        dtype: DType,
        epilogue: Epilogue,
    ) -> Vec<(Option<u64>, EitherGemm)> {
        let plain = Tile::fitting(n, dtype);
        let tiles = Self::tiles(n, k, dtype, Instructions::Hopper);
        let cycles = |rows, at: usize| match plain.get(at) {
            Some(tile) => tile.cycles(rows, n, k, dtype, SMS as u32),
            None => tiles[at - plain.len()].cycles(rows, n, k, epilogue, SMS as u32),
        };
        ranges(plain.len() + tiles.len(), cycles)
            .into_iter()
            .map(|(end, at)| {
                let kernel = match plain.get(at) {
                    Some(&tile) => EitherGemm::Any(Gemm {
                        n,
                        k,
                        dtype,
                        epilogue,
                        tile,
                    }),
                    None => EitherGemm::Hopper(Self {
                        n,
                        k,
                        dtype,
                        epilogue,
                        tile: tiles[at - plain.len()],
                    }),
                };
                (end, kernel)
            })
            .collect()
    }

    /// Whether there is a Hopper kernel for this shape and storage type.
    pub fn serves(n: u32, k: u32, dtype: DType) -> bool {
        dtype != DType::F32 && n.is_multiple_of(8) && k.is_multiple_of(8) && n > 0 && k > 0
    }

    /// Whether the kernel can be generated as described; otherwise what is wrong.
    pub fn check(&self) -> Result<(), String> {
        if !Self::serves(self.n, self.k, self.dtype) {
            return Err(format!(
                "no Hopper GEMM for {} columns and {} products in {}: it takes multiples of 8 in f16 or bf16",
                self.n, self.k, self.dtype
            ));
        }
        if !WgmmaTile::CANDIDATES.contains(&self.tile) {
            return Err(format!("{:?} is no tile of the Hopper GEMM", self.tile));
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
        for name in ["block_k", "warps_m", "warps_n", "copy_bytes", "store_bytes"] {
            constants.remove(name);
        }
        let sums = self.tile.n / 2;
        let list = |of: &dyn Fn(u32) -> String| (0..sums).map(of).collect::<Vec<_>>().join(", ");
        constants.extend([
            ("block_m", self.tile.m.into()),
            ("block_n", self.tile.n.into()),
            ("stages", self.tile.stages().into()),
            ("together", self.tile.together.into()),
            ("buffers", self.tile.buffers().into()),
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
        };
        vec![
            map("x", self.tile.m),
            map("weight", self.tile.n),
            map("out", self.tile.rows()),
        ]
    }

    fn launch(&self, extents: &Extents) -> Launch {
        Launch {
            grid: [self.tile.tiles(extents.rows, self.n).min(SMS) as u32, 1, 1],
            threads: THREADS,
            shared_bytes: self.tile.shared_bytes(),
        }
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

/// Every tile, with epilogues, and sizes that divide by 8 and nothing else.
pub fn representative() -> Vec<KernelSpec> {
    let plain = Epilogue::default();
    let gelu = Epilogue {
        bias: true,
        activation: Some(super::Activation::GeluExact),
    };
    let mut kernels = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for tile in WgmmaTile::CANDIDATES {
            for (n, k, epilogue) in [(768, 768, plain), (1000, 328, gelu), (8, 8, plain)] {
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
            assert!(
                tile.shared_bytes() + 2 * tile.n * 4 <= 227 * 1024,
                "{tile:?}"
            );
            assert!((3..=MOST_STAGES).contains(&tile.stages()), "{tile:?}");
            // A thread has 232 registers, and the sums take most of them.
            assert!(tile.rows() / 64 * tile.n / 2 <= 128, "{tile:?}");
            assert!(
                tile.m <= 256 && tile.n <= 256,
                "a box has at most 256 rows: {tile:?}"
            );
        }
    }

    #[test]
    fn products_by_warpgroups_serve_all_but_the_fewest_rows() {
        let epilogue = Epilogue::default();
        for (n, k) in [(2304, 768), (768, 768), (3072, 768), (768, 3072)] {
            let variants = GemmWgmma::variants(n, k, DType::F16, epilogue);
            let (_, first) = &variants[0];
            let (end, last) = variants.last().expect("one serves all");
            assert!(matches!(first, EitherGemm::Any(_)), "{first:?}");
            assert!(matches!(last, EitherGemm::Hopper(_)), "{last:?}");
            assert_eq!(*end, None);
        }
        for (n, k, dtype) in [
            (3, 768, DType::F16),
            (768, 36, DType::F16),
            (768, 768, DType::F32),
        ] {
            let variants = GemmWgmma::variants(n, k, dtype, epilogue);
            assert!(
                variants
                    .iter()
                    .all(|(_, v)| matches!(v, EitherGemm::Any(_))),
                "{n} {k}"
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
