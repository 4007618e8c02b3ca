//! Which tile a GEMM gets: a model of a GEMM's time, and the row counts where tiles change.

use super::{Epilogue, Gemm, Tile, ranges::ranges};
use crate::tensor::DType;

/// What the time of a GEMM is estimated for: an H200. Cycles are those of a streaming
/// multiprocessor (SM) at 1755 MHz, bandwidths are bytes a cycle. The constants of the tensor cores
/// were fitted to 108 timings of `gemmule-bench gemm --all-tiles`, which the model then meets within
/// 10 % (root mean square); the tile that it picks is at most 6 % slower than the best of them. Those
/// of f32 are estimates.
mod machine {
    pub const SMS: u32 = 132;
    /// f16 multiply-adds that mma.sync reaches: about half of what wgmma does.
    pub const TENSOR_RATE: f64 = 1100.0;
    /// f32 multiply-adds outside the tensor cores.
    pub const SCALAR_RATE: f64 = 128.0;
    pub const SHARED_BANDWIDTH: f64 = 128.0;
    /// From L2, for one SM, and for all of them together.
    pub const L2_BANDWIDTH_OF_SM: f64 = 72.0;
    pub const L2_BANDWIDTH: f64 = 9000.0;
    pub const SHARED_BYTES: u32 = 227 * 1024;
    pub const REGISTERS: u32 = 65536;
    /// Of a k-step's barrier and first fragments, where no other block fills the gap.
    pub const BARRIER: f64 = 35.0;
    /// From launch to the first product, and of the last stores.
    pub const FILL: f64 = 680.0;
    /// Of an output: bias, activation, rounding and storing.
    pub const OUTPUT: f64 = 0.2;
    /// Part of the work hidden behind the slowest unit that shows all the same in f32; with tensor
    /// cores none does.
    pub const EXPOSED_SCALAR: f64 = 0.5;
}

const fn tile(m: u32, n: u32, k: u32, warps_m: u32, warps_n: u32, stages: u32) -> Tile {
    Tile {
        m,
        n,
        k,
        warps_m,
        warps_n,
        stages,
    }
}

/// For tensor cores; a stage is `(m + n)·k·2` bytes of shared memory. Warps of 64×64 outputs read
/// the fewest shared bytes a product that the registers allow.
const TENSOR_TILES: [Tile; 9] = [
    tile(128, 256, 32, 2, 4, 4),
    tile(128, 192, 32, 2, 4, 4),
    tile(128, 128, 64, 2, 2, 3),
    tile(128, 64, 64, 2, 2, 4),
    tile(64, 128, 64, 2, 2, 4),
    tile(64, 64, 64, 2, 2, 4),
    tile(32, 64, 64, 1, 4, 4),
    tile(16, 64, 64, 1, 4, 5),
    tile(16, 32, 64, 1, 2, 5),
];

/// For f32: 8×8 or 4×4 outputs a thread, two steps of shared memory.
const SCALAR_TILES: [Tile; 5] = [
    tile(128, 128, 16, 4, 2, 2),
    tile(128, 64, 16, 4, 1, 2),
    tile(64, 64, 16, 2, 2, 2),
    tile(32, 64, 16, 2, 2, 2),
    tile(16, 64, 16, 1, 2, 2),
];

impl Tile {
    /// The tiles that a GEMM of this storage type may have, largest first.
    pub fn candidates(dtype: DType) -> &'static [Tile] {
        match dtype {
            DType::F32 => &SCALAR_TILES,
            _ => &TENSOR_TILES,
        }
    }

    /// The candidate whose estimated time is least for `rows × n` outputs of `k` products on a
    /// card like an H200 but with `n_sms` multiprocessors.
    pub fn pick(rows: u64, n: u32, k: u32, dtype: DType, n_sms: u32) -> Tile {
        let candidates = Self::fitting(n, dtype);
        let time = |tile: &Tile| tile.cycles(rows, n, k, dtype, n_sms);
        let mut best = candidates[0];
        for tile in &candidates[1..] {
            if time(tile) < time(&best) {
                best = *tile;
            }
        }
        best
    }

    /// The candidates that are not mostly empty on `n` columns; never none, as some are narrow.
    pub fn fitting(n: u32, dtype: DType) -> Vec<Tile> {
        let widest = n.checked_next_power_of_two().unwrap_or(u32::MAX).max(64);
        let fits = |tile: &Tile| tile.n <= widest;
        Self::candidates(dtype)
            .iter()
            .copied()
            .filter(fits)
            .collect()
    }

    /// Estimated cycles: `waves × (k-steps × cost of a step + fill) `.
    ///
    /// A step costs what its slowest unit does (products, shared memory, L2), in f32 also half of the
    /// others. Blocks that share an SM share its units, but hide each other's barriers and fills.
    pub fn cycles(self, rows: u64, n: u32, k: u32, dtype: DType, n_sms: u32) -> f64 {
        let blocks = self.blocks(rows, n);
        let n_sms = u64::from(n_sms.max(1));
        let of_busiest_sm = blocks.div_ceil(n_sms);
        let resident = of_busiest_sm.min(self.resident(dtype).into()) as f64;
        let busy_sms = blocks.min(n_sms) as f64;

        let outputs = f64::from(self.m) * f64::from(self.n);
        let products = outputs * f64::from(self.k);
        let (warp_m, warp_n) = (
            f64::from(self.m / self.warps_m),
            f64::from(self.n / self.warps_n),
        );
        let warps = f64::from(self.warps_m * self.warps_n);
        // A warp issues to one of four units.
        let units = (warps * resident / 4.0).min(1.0);
        let bytes = f64::from(self.m + self.n) * f64::from(self.k) * dtype.bytes() as f64;
        let l2 = machine::L2_BANDWIDTH_OF_SM.min(machine::L2_BANDWIDTH / busy_sms);
        let (math, reads, exposed) = match dtype {
            // Every lane reads its rows and columns, half of them shared with its neighbours; the
            // reads take issue slots from the products.
            DType::F32 => (
                products / machine::SCALAR_RATE,
                warps * f64::from(self.k) * 64.0 * (warp_m / 4.0 + warp_n / 8.0),
                machine::EXPOSED_SCALAR,
            ),
            _ => (
                products / machine::TENSOR_RATE,
                warps * f64::from(self.k) * 2.0 * (warp_m + warp_n),
                0.0,
            ),
        };
        let shared = (reads + bytes) / machine::SHARED_BANDWIDTH;
        let parts = [math / units, shared, bytes / l2];
        let slowest = parts.into_iter().fold(0.0, f64::max);
        let step = slowest + exposed * (parts.iter().sum::<f64>() - slowest);

        let steps = f64::from(k.div_ceil(self.k));
        let fills = (of_busiest_sm as f64 / resident).ceil();
        let epilogue = outputs * machine::OUTPUT / units;
        of_busiest_sm as f64 * (steps * (step + machine::BARRIER / resident) + epilogue)
            + fills * machine::FILL
    }

    pub(super) const fn threads(self) -> u32 {
        32 * self.warps_m * self.warps_n
    }

    /// Blocks of a launch.
    pub(super) fn blocks(self, rows: u64, n: u32) -> u64 {
        rows.div_ceil(self.m.into())
            .saturating_mul(n.div_ceil(self.n).into())
    }

    /// Dynamic shared memory of a block on tensor cores.
    pub(super) const fn shared_bytes(self, dtype: DType) -> u32 {
        (self.m + self.n) * self.k * self.stages * dtype.bytes() as u32
    }

    /// Blocks that one SM holds at a time.
    fn resident(self, dtype: DType) -> u32 {
        let threads = self.threads();
        let sums = self.m * self.n / threads;
        // Two sets of fragments, or operands and what is on its way, and the addresses.
        let operands = match dtype {
            DType::F32 => 2 * self.k * (self.m + self.n) / threads,
            _ => (self.m / self.warps_m + self.n / self.warps_n) / 2,
        };
        let registers = (sums + operands + 40).min(255).next_multiple_of(8);
        let by_registers = machine::REGISTERS / (registers * threads);
        let by_shared = machine::SHARED_BYTES / (self.shared_bytes(dtype) + 1024);
        by_registers.min(by_shared).clamp(1, 2048 / threads)
    }
}

impl Gemm {
    /// The kernels of one GEMM for every number of rows: each serves up to its number of rows,
    /// inclusive; the last serves all the rest. At most four, by the estimated times.
    pub fn variants(n: u32, k: u32, dtype: DType, epilogue: Epilogue) -> Vec<(Option<u64>, Gemm)> {
        let candidates = Tile::fitting(n, dtype);
        let cycles = |rows, at: usize| candidates[at].cycles(rows, n, k, dtype, machine::SMS);
        ranges(candidates.len(), cycles)
            .into_iter()
            .map(|(end, at)| {
                let tile = candidates[at];
                let gemm = Gemm {
                    n,
                    k,
                    dtype,
                    epilogue,
                    tile,
                };
                (end, gemm)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    #[test]
    fn every_candidate_fits_the_smallest_card() {
        for dtype in DTYPES {
            for t in Tile::candidates(dtype) {
                assert!(t.shared_bytes(dtype) <= 99 * 1024, "{t:?}");
                assert!((2..=5).contains(&t.stages), "{t:?}");
                let warp = (t.m / t.warps_m, t.n / t.warps_n);
                let granule = if dtype == DType::F32 {
                    (16, 32)
                } else {
                    (16, 16)
                };
                assert_eq!((warp.0 % granule.0, warp.1 % granule.1), (0, 0), "{t:?}");
            }
        }
    }

    #[test]
    fn few_rows_get_small_tiles_and_many_get_large_ones() {
        for dtype in DTYPES {
            let few = Tile::pick(1, 768, 768, dtype, 132);
            let many = Tile::pick(16384, 3072, 768, dtype, 132);
            assert_eq!(few.m, 16, "{dtype}");
            assert!(many.m * many.n >= 128 * 64, "{dtype}: {many:?}");
        }
    }

    #[test]
    fn variants_cover_all_rows_in_ascending_ranges() {
        for dtype in DTYPES {
            for (n, k) in [
                (2304, 768),
                (768, 768),
                (3072, 768),
                (768, 3072),
                (1, 7),
                (1003, 320),
            ] {
                let variants = Gemm::variants(n, k, dtype, Epilogue::default());
                assert!((1..=super::super::ranges::MOST_RANGES).contains(&variants.len()));
                let ends: Vec<u64> = variants
                    .iter()
                    .map(|(end, _)| end.unwrap_or(u64::MAX))
                    .collect();
                assert!(ends.is_sorted_by(|a, b| a < b), "{ends:?}");
                assert_eq!(variants.last().map(|v| v.0), Some(None));
                for pair in variants.windows(2) {
                    assert_ne!(pair[0].1, pair[1].1, "neighbours that are equal are one");
                }
            }
        }
    }

    #[test]
    fn variants_lose_little_against_the_best_tile_for_each_row_count() {
        for dtype in DTYPES {
            for (n, k) in [(2304, 768), (768, 768), (3072, 768), (768, 3072)] {
                let variants = Gemm::variants(n, k, dtype, Epilogue::default());
                let (mut sum, mut weights) = (0.0, 0.0);
                for rows in super::super::ranges::sampled_rows() {
                    let serves = |v: &&(Option<u64>, Gemm)| v.0.is_none_or(|end| rows <= end);
                    let (_, gemm) = variants.iter().find(serves).expect("the last serves all");
                    let best = Tile::pick(rows, n, k, dtype, machine::SMS);
                    let time = |t: Tile| t.cycles(rows, n, k, dtype, machine::SMS);
                    sum += time(gemm.tile) / time(best).sqrt();
                    weights += time(best).sqrt();
                }
                let mean = sum / weights;
                assert!(mean < 1.2, "{dtype} n{n} k{k}: {mean}");
            }
        }
    }
}
