//! The cost model of the Hopper GEMM.

use super::{BLOCK_K, Store, WgmmaTile};
use crate::{
    machine::{Hopper, Machine, SMALL_M},
    ops::Epilogue,
};

/// Issue slots to add the sum of one group to the total sum. They are for the product of two scales, an FMA, and a part of the loads of
/// scales.
const SLOTS_OF_SUM: f64 = 2.3;
/// Cycles of a k-step in which neither tensor cores nor FMAs are busy, if groups of columns have scales. They are due to barriers, and to
/// latencies of the MMAs and of the loads of scales.
const LATENCY_OF_GROUP: f64 = 200.0;
/// Exponent p of the p-norm that combines two overlapping times: reading the weight from DRAM, and everything else. The norm is close to
/// the larger time. Unlike the max of both times, it still depends on the tile if reading the weight takes longer than everything else.
const DRAM_OVERLAP: i32 = 12;

impl WgmmaTile {
    /// Estimated cycles on a GPU with Hopper's instructions, comparable with [`Tile::cycles`](crate::kernels::gemm::Tile::cycles).
    ///
    /// The formula is `fill + tiles of the busiest SM × (k-steps × cost of a step + epilogue)`. A step has three limits: the
    /// tensor cores, the L2 bandwidth of one SM, and the L2 bandwidth of all SMs. Its cost is the p-norm of the times at these limits, plus
    /// a time proportional to its bytes, because loads take power and thereby reduce the clock. The number of SMs that have a tile is
    /// averaged over the waves. With ping-pong, an epilogue overlaps the mainloop of the other warpgroup. Reading the weight from DRAM
    /// overlaps all of this.
    pub fn cycles(self, rows: u64, n: u32, k: u32, epilogue: Epilogue, machine: &Machine) -> f64 {
        self.cycles_of(rows, [n, k], epilogue, false, machine)
    }

    /// Estimates cycles like [`cycles`](Self::cycles), for a weight of `n` rows and `k` columns. With `of_groups` (scales of groups of
    /// columns), a step also takes the time in which FMAs multiply the sums of a group by its scales and add them. No MMA runs in this
    /// time, because both warpgroups wait for the same stage.
    pub(super) fn cycles_of(
        self,
        rows: u64,
        [n, k]: [u32; 2],
        epilogue: Epilogue,
        of_groups: bool,
        machine: &Machine,
    ) -> f64 {
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
        let mma = outputs * f64::from(BLOCK_K) / machine.rates.tensor;
        let promotion = match of_groups {
            true => LATENCY_OF_GROUP + outputs * SLOTS_OF_SUM / machine.rates.fma,
            false => 0.0,
        };
        let limits = [
            match self.cooperative || of_busiest > 1.0 {
                true => mma,
                false => (mma * (1.0 + cost.alone)).max(cost.alone_step),
            },
            bytes / cost.l2_per_sm,
            bytes * busy * n_sms as f64 / cost.l2,
        ];
        let norm: f64 = limits.iter().map(|l| l.powf(cost.overlap)).sum();
        let step = norm.powf(cost.overlap.recip()) + promotion + bytes * busy * cost.power;
        let mainloop = f64::from(k.div_ceil(BLOCK_K)) * step;
        let activated = outputs * f64::from(u8::from(epilogue.activation.is_some()));
        let staged = match self.store(n) {
            Store::Direct | Store::SwapAb => 0.0,
            Store::Tma => outputs * cost.boxed,
        };
        let work = if self.cooperative {
            let finish = outputs * cost.output + staged + activated * cost.activation;
            of_busiest * (mainloop + finish)
        } else {
            let swap_ab = if self.swaps_ab() { cost.swap_ab } else { 1.0 };
            let stored = outputs * cost.output * cost.one_warpgroup * swap_ab + staged;
            let finish = stored + activated * cost.activation_by_one;
            let spread = match outputs < cost.spread_from {
                true => 1.0,
                false => cost.spread,
            };
            let contention = activated * cost.contention * spread;
            let hidden = mainloop.max((mainloop + finish) / 2.0) + contention;
            (of_busiest - 1.0) * hidden + mainloop + finish
        };
        let waits = match rows <= SMALL_M && outputs / 32.0 < small_m.short_mma {
            true => {
                small_m.wait * f64::from(k.div_ceil(BLOCK_K).saturating_sub(small_m.fitted_steps))
            }
            false => 0.0,
        };
        // The epilogue loads each part of the residual just before it adds this part, so ping-pong does not hide the time of the loads.
        let added = outputs * cost.output * f64::from(u8::from(epilogue.residual));
        let tiles = of_busiest * (cost.tile + added);
        let on_chip = bytes * cost.stage_byte + tiles + work + waits;
        let read_weight = f64::from(n) * f64::from(k) * 2.0 / cost.dram;
        let (longer, shorter) = (on_chip.max(read_weight), on_chip.min(read_weight));
        let both = 1.0 + (shorter / longer).powi(DRAM_OVERLAP);
        cost.launch + longer * both.powf(f64::from(DRAM_OVERLAP).recip())
    }
}
