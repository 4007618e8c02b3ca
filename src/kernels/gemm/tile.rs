//! Tiles of the `mma.sync` GEMM, and their cost model.

use super::{GemmProblem, Tile, packed};
use crate::{
    machine::Machine,
    tensor::{DType, Format},
};

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

/// Tiles for tensor cores. A stage is `(m + n)·k·2` bytes of shared memory. Warps with 64×64 outputs read the fewest bytes of shared memory
/// per MMA. Larger outputs would not fit in the registers.
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

/// Tiles for operands in E4M3. A stage is `(m + n)·k` bytes of shared memory. Warps have fewer than 64×64 outputs, because larger warp
/// tiles would spill registers on Hopper, where ptxas replaces the MMAs with conversions and MMAs in f16. These kernels are checked on
/// Hopper.
const E4M3_TILES: [Tile; 8] = [
    tile(128, 192, 64, 2, 4, 4),
    tile(128, 128, 128, 2, 4, 3),
    tile(128, 64, 128, 2, 2, 4),
    tile(64, 128, 128, 2, 2, 4),
    tile(64, 64, 128, 2, 2, 4),
    tile(32, 64, 128, 1, 4, 4),
    tile(16, 64, 128, 1, 4, 5),
    tile(16, 32, 128, 1, 2, 5),
];

/// Tiles for quantized rows in int8: those of [`E4M3_TILES`], and a tile whose warps have 64×64 outputs. In int8, this size does not spill
/// registers on any card, because the MMAs of int8, unlike those of E4M3, are never replaced by conversions and other MMAs.
const INT8_TILES: [Tile; 9] = {
    let mut tiles = [tile(128, 256, 64, 2, 4, 4); 9];
    let mut at = 0;
    while at < E4M3_TILES.len() {
        tiles[at + 1] = E4M3_TILES[at];
        at += 1;
    }
    tiles
};

/// Tiles for f32. Each thread computes 8×8 or 4×4 outputs. Shared memory holds two k tiles (double buffering).
const SCALAR_TILES: [Tile; 5] = [
    tile(128, 128, 16, 4, 2, 2),
    tile(128, 64, 16, 4, 1, 2),
    tile(64, 64, 16, 2, 2, 2),
    tile(32, 64, 16, 2, 2, 2),
    tile(16, 64, 16, 1, 2, 2),
];

impl Tile {
    /// Available tiles of a GEMM with this storage type, largest first.
    pub fn candidates(dtype: DType) -> &'static [Tile] {
        match dtype {
            DType::F32 => &SCALAR_TILES,
            DType::F16 | DType::BF16 => &TENSOR_TILES,
        }
    }

    /// Returns the candidate tiles for a problem.
    pub fn of(problem: &GemmProblem) -> Vec<Tile> {
        match (problem.quantized_rows, problem.multiplies_int8()) {
            (true, true) => INT8_TILES.to_vec(),
            (true, false) => Vec::new(),
            (false, _) => Self::reading(problem.weight, problem.dtype),
        }
    }

    /// Returns the candidates for a weight in this format and rows that are not quantized. Tiles for a packed weight have a `k` of 64,
    /// because its blocks have 64 columns. A warp of these tiles has at most 32 columns, because the packed words of a thread take one
    /// register per two columns.
    pub fn reading(weight: Format, dtype: DType) -> Vec<Tile> {
        let all = Self::candidates(dtype).iter().copied();
        match (weight, dtype) {
            (Format::Plain(_), _) | (Format::Scaled(_), DType::F32) => all.collect(),
            (Format::Scaled(_), DType::F16 | DType::BF16) => all
                .filter(|tile| tile.k == 64 && tile.n / tile.warps_n <= 32)
                .collect(),
            (Format::E4m3, DType::F16 | DType::BF16) => E4M3_TILES.to_vec(),
            (Format::E4m3, DType::F32) => Vec::new(),
        }
    }

    /// Returns the candidates that are not much wider than the problem. Some tiles are narrow, so the list is empty only if the problem has
    /// no candidates: for an E4M3 weight with f32 as the storage type, and for quantized rows in E4M3.
    pub fn fitting(problem: &GemmProblem) -> Vec<Tile> {
        let n = problem.n;
        let widest = n.checked_next_power_of_two().unwrap_or(u32::MAX).max(64);
        let mut all = Self::of(problem);
        all.retain(|tile| tile.n <= widest);
        all
    }

    /// Estimates the cycles of a launch over `rows` rows. The formula is roughly `waves × (k-steps × cost of a step + fill)`.
    ///
    /// The cost of a step is the time of the slowest unit (MMAs, shared memory, L2). In f32, a fraction of the times of the faster units is
    /// added. CTAs on the same SM share its units, but hide each other's barriers and pipeline fills. The conversion time of a packed
    /// weight is added to the MMA time, because the MMAs wait for converted operands. The estimate is infinite for 8-bit operands on a card
    /// that does not multiply them faster than 16-bit operands.
    pub fn cycles(self, rows: u64, problem: &GemmProblem, machine: &Machine) -> f64 {
        let GemmProblem { n, k, dtype, .. } = *problem;
        let weight = problem.converted();
        let of_x = problem.x_bytes() as f64;
        let of_weight = weight.map_or(of_x, packed::bytes_per_element);
        let cost = &machine.costs.mma_sync;
        let tensor = match (problem.is_fp8(), problem.multiplies_int8()) {
            (true, _) => cost.tensor_e4m3,
            (_, true) => cost.tensor_int8,
            (false, false) => Some(cost.tensor),
        };
        let Some(tensor) = tensor else {
            return f64::INFINITY;
        };
        let ctas = self.ctas(rows, n);
        let n_sms = u64::from(machine.sms);
        let of_busiest_sm = ctas.div_ceil(n_sms);
        let resident = of_busiest_sm.min(self.resident(problem, machine).into()) as f64;
        let busy_sms = ctas.min(n_sms) as f64;

        let outputs = f64::from(self.m) * f64::from(self.n);
        let products = outputs * f64::from(self.k);
        let (warp_m, warp_n) = (
            f64::from(self.m / self.warps_m),
            f64::from(self.n / self.warps_n),
        );
        let warps = f64::from(self.warps_m * self.warps_n);
        // A warp issues instructions on one of the SM's four sub-partitions.
        let units = (warps * resident / 4.0).min(1.0);
        let bytes = f64::from(self.k) * (f64::from(self.m) * of_x + f64::from(self.n) * of_weight);
        let l2 = cost.l2_per_sm.min(cost.l2 / busy_sms);
        // Each warp converts the rows of the weight that it multiplies. The time is limited by the issue slots of an SM's four schedulers,
        // or, if few warps share a scheduler, by the latency of the instructions.
        let converted = weight.map_or(0.0, |weight| {
            let of_warp = warp_n / 16.0 * f64::from(self.k) / 128.0;
            let slots = warps / 4.0 * packed::conversion_slots(weight, false);
            of_warp * slots.max(units * packed::STEP_LATENCY / resident)
        });
        let (math, reads, exposed) = match dtype {
            // Each lane reads the elements of its own rows and columns from shared memory. These reads take issue slots from the FMAs.
            DType::F32 => (
                products / machine.rates.fma,
                warps * f64::from(self.k) * 64.0 * (warp_m / 4.0 + warp_n / 8.0),
                cost.exposed_simt,
            ),
            DType::F16 | DType::BF16 => (
                products / tensor + converted,
                warps * f64::from(self.k) * of_x * (warp_m + warp_n),
                0.0,
            ),
        };
        let shared = (reads + bytes) / machine.rates.shared;
        let parts = [math / units, shared, bytes / l2];
        let slowest = parts.into_iter().fold(0.0, f64::max);
        let step = slowest + exposed * (parts.iter().sum::<f64>() - slowest);

        let steps = f64::from(k.div_ceil(self.k));
        let fills = (of_busiest_sm as f64 / resident).ceil();
        let epilogue = outputs * cost.output / units;
        let estimate = of_busiest_sm as f64 * (steps * (step + cost.barrier / resident) + epilogue)
            + fills * cost.launch;
        // The time to read a large weight was measured only on GPUs with Hopper's instructions.
        match &machine.costs.hopper {
            Some(hopper) => {
                let bytes = f64::from(n) * f64::from(k) * of_weight;
                // Rows with an odd number of columns are stored with slow 2-byte accesses.
                let unaligned = f64::from(n % 2) * hopper.stream.odd_output / 32.0;
                let stored = f64::from(self.n) * rows.min(self.m.into()) as f64;
                estimate.max(cost.launch + bytes / hopper.wgmma.dram)
                    + of_busiest_sm as f64 * stored * unaligned
            }
            None => estimate,
        }
    }

    pub(super) const fn threads(self) -> u32 {
        32 * self.warps_m * self.warps_n
    }

    /// CTAs of a launch.
    pub(super) fn ctas(self, rows: u64, n: u32) -> u64 {
        rows.div_ceil(self.m.into())
            .saturating_mul(n.div_ceil(self.n).into())
    }

    /// Bytes of dynamic shared memory per CTA on tensor cores.
    pub(super) fn shared_bytes(self, problem: &GemmProblem) -> u32 {
        let row = self.k * problem.x_bytes() as u32;
        let of_weight = problem.converted().map_or(row, |weight| {
            packed::block_bytes(weight) + packed::scale_bytes(weight, self.k)
        });
        (self.m * row + self.n * of_weight) * self.stages
    }

    /// Resident CTAs per SM.
    fn resident(self, problem: &GemmProblem, machine: &Machine) -> u32 {
        let threads = self.threads();
        let sums = self.m * self.n / threads;
        // Registers for two sets of MMA fragments, or, in f32, for operands and loads in flight. The constant 40 below is for addresses.
        let operands = match problem.dtype {
            DType::F32 => 2 * self.k * (self.m + self.n) / threads,
            DType::F16 | DType::BF16 => (self.m / self.warps_m + self.n / self.warps_n) / 2,
        };
        let registers = (sums + operands + 40).min(255).next_multiple_of(8);
        let by_registers = machine.registers_per_sm / (registers * threads);
        let by_shared = machine.ctas_by_shared(self.shared_bytes(problem));
        by_registers
            .min(by_shared)
            .clamp(1, machine.threads_per_sm / threads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Epilogue;

    const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    fn in_int8(problem: &GemmProblem) -> GemmProblem {
        GemmProblem {
            weight: Format::INT8,
            quantized_rows: true,
            ..problem.clone()
        }
    }

    #[test]
    fn every_candidate_fits_the_smallest_gpu() {
        let problems = DTYPES.map(|dtype| GemmProblem::new(64, 64, dtype, Epilogue::default()));
        let in_e4m3 = problems[1].clone().in_e4m3();
        let in_int8 = in_int8(&problems[1]);
        for problem in problems.into_iter().chain([in_e4m3, in_int8]) {
            let dtype = problem.dtype;
            for t in Tile::of(&problem) {
                assert!(t.shared_bytes(&problem) <= 99 * 1024, "{t:?}");
                assert!((2..=5).contains(&t.stages), "{t:?}");
                let warp = (t.m / t.warps_m, t.n / t.warps_n);
                let granule = if dtype.has_mma() { (16, 16) } else { (16, 32) };
                assert_eq!((warp.0 % granule.0, warp.1 % granule.1), (0, 0), "{t:?}");
            }
        }
    }

    #[test]
    fn products_in_8_bits_are_estimated_to_take_less_time_than_in_16_bits_for_all_rows() {
        let fastest = |problem: &GemmProblem, rows, machine: &Machine| {
            let tiles = Tile::of(problem).into_iter();
            let cycles = tiles.map(|tile| tile.cycles(rows, problem, machine));
            cycles.fold(f64::INFINITY, f64::min)
        };
        let plain = GemmProblem::new(3072, 768, DType::F16, Epilogue::default());
        let (fp8, int8) = (plain.clone().in_e4m3(), in_int8(&plain));
        for machine in Machine::all().expect("the cards are described") {
            let cost = &machine.costs.mma_sync;
            for rows in [1, 16, 100, 1000, 10_000] {
                for (of, rate) in [(&fp8, cost.tensor_e4m3), (&int8, cost.tensor_int8)] {
                    let [plain, found] = [&plain, of].map(|of| fastest(of, rows, machine));
                    let is_as_expected = match rate {
                        Some(_) => found < plain,
                        None => found.is_infinite(),
                    };
                    let name = &machine.name;
                    assert!(is_as_expected, "{name}: {rows} rows, {found}, {plain}");
                }
            }
        }
    }
}
