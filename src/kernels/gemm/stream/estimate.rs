//! Cost estimate of the GEMM that streams its weight.

use super::{BLOCK_K, GemmStream, STATICS, StreamTile, packed};
use crate::{
    kernels::Kernel,
    machine::{Hopper, Machine},
};

/// Registers, besides accumulators and residuals, of a thread that converts a packed weight.
const CONVERTING: u32 = 64;

impl GemmStream {
    /// Returns the cycles per k-step to convert and multiply a packed weight. `ctas` CTAs share an SM, and each of the SM's four schedulers
    /// issues instructions of one warp of each warpgroup.
    fn conversion(&self, ctas: f64) -> f64 {
        let Some(weight) = self.problem.packed() else {
            return 0.0;
        };
        let by_warps = self.multiplies_by_warps();
        // Issue slots of the MMAs that multiply 16 weight rows by an octet of rows of x, over 128 columns.
        let octet = if by_warps { 35.0 } else { 16.0 };
        let converted = packed::conversion_slots(weight, by_warps);
        let slots = converted + octet * f64::from(self.tile.rows / 8);
        (slots * f64::from(self.tile.groups) * ctas).hypot(packed::STEP_LATENCY)
    }

    /// Returns an upper bound on the number of CTAs per SM, due to registers.
    fn ctas_by_registers(&self, mma_n: u32, machine: &Machine) -> u32 {
        let residuals = if self.problem.epilogue.residual {
            self.tile.rows / 4
        } else {
            0
        };
        let (accumulators, others) = match (self.problem.packed(), self.multiplies_by_warps()) {
            (None, _) => (mma_n / 2, 52),
            (Some(_), false) => (mma_n / 2, CONVERTING),
            (Some(_), true) => (mma_n, CONVERTING),
        };
        let registers = (accumulators + residuals + others).next_multiple_of(8);
        let by_registers = machine.registers_per_sm / (registers * self.threads());
        match self.problem.packed() {
            None => by_registers,
            // `__launch_bounds__` limits registers, so at least `per_sm` CTAs fit.
            Some(_) => by_registers.max(self.tile.per_sm),
        }
    }

    /// Estimates the cycles of a launch. Reads of the weight, reads from L2, and MMAs overlap. A second wave of clusters begins when the
    /// first wave ends. A stage of the ring is refilled after the MMAs that read it, and these MMAs wait for x.
    pub(super) fn estimate(&self, rows: u64, machine: &Machine) -> f64 {
        let (Some(Hopper { stream: cost, .. }), Some(layout)) =
            (&machine.costs.hopper, self.layout())
        else {
            return f64::INFINITY;
        };
        let StreamTile {
            rows: tile_rows,
            splits,
            groups,
            ..
        } = self.tile;
        let machine_sms = u64::from(machine.sms);
        let by_registers = self.ctas_by_registers(layout.mma_n, machine);
        let by_shared = machine.ctas_by_shared(layout.shared_bytes() + STATICS);
        let per_sm = u64::from(by_registers.min(by_shared).clamp(1, 8));
        let ctas = self.ctas(rows, machine);
        let clusters = ctas / u64::from(splits);
        let at_once = machine.clusters_at_once(splits).max(1) * per_sm;
        let more_waves = (clusters.div_ceil(at_once).max(1) - 1) as f64;
        let (tiles, _) = self.tiles_of(rows);
        let tiles_each = tiles.div_ceil(clusters.max(1)) as f64;
        let steps = f64::from(self.tile.steps(self.depth(), self.step_k()));
        let all_steps = steps * tiles_each;
        let side_by_side = ctas.div_ceil(machine_sms).min(per_sm) as f64;
        let of_weight = self.problem.packed().map_or(2.0, packed::bytes_per_element);
        let weights = f64::from(self.problem.weight_rows()) * f64::from(self.depth()) * of_weight;
        // A step has the MMAs of one block of 64 columns, or of two blocks with a packed weight.
        let blocks = f64::from(self.step_k() / BLOCK_K);
        let mma = f64::from(2 * layout.mma_n * groups) * cost.mma * side_by_side * blocks;
        let limits = [
            weights / machine.rates.dram,
            ctas as f64 * all_steps * f64::from(layout.stage_bytes) / cost.l2,
            all_steps * mma.max(cost.step),
            // Conversion takes as long in each further wave as in the first wave.
            all_steps * self.conversion(side_by_side) * (1.0 + more_waves),
        ];
        let norm: f64 = limits.iter().map(|l| l.powf(cost.overlap)).sum();
        let main = norm.powf(cost.overlap.recip());
        let refill = match all_steps > f64::from(layout.stages) {
            true => cost.refill,
            false => 0.0,
        };
        let outputs = f64::from(tile_rows * groups);
        let cluster = match splits {
            1 => 0.0,
            _ => {
                let room = (machine_sms * per_sm) as f64;
                f64::from((splits - 1).pow(2)) * cost.cluster_at_once
                    + outputs * 64.0 * cost.exchange
                    + (ctas as f64 / room - 0.5).max(0.0) * cost.crowd
            }
        };
        let unaligned = match self.is_staged() {
            true => 0.0,
            false => f64::from(self.problem.n % 2) * cost.odd_output,
        };
        let normals = match self.input_norm() {
            Some(_) => f64::from(tile_rows) * cost.normal,
            None => 0.0,
        };
        cost.launch
            + main * (1.0 + cost.wave_again * more_waves)
            + cost.wave * more_waves
            + refill
            + cost.depth * steps / f64::from(layout.stages)
            + cluster
            + outputs * tiles_each * (cost.output + unaligned)
            + normals
    }
}
