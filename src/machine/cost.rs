//! Constants of the cost model, in cycles at [`Machine::clock_mhz`](super::Machine), bytes per
//! cycle, or multiply-adds per cycle. Each constant is for one SM unless its comment says
//! otherwise. `docs/history` has the timings to which the constants were fitted.

use serde::{Deserialize, Serialize};

/// Cost constants of one card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    pub mma_sync: MmaSync,
    pub norm: Norm,
    /// Constants of the kernels with Hopper instructions; `None` on cards without them.
    pub hopper: Option<Hopper>,
}

/// Constants of the GEMM with `mma.sync`, or FMAs in f32, and a `cp.async` pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MmaSync {
    /// Multiply-adds of 16-bit elements that `mma.sync` sustains, per cycle.
    pub tensor: f64,
    /// Multiply-adds of E4M3 elements that `mma.sync` sustains, per cycle; `None` on cards whose tensor cores do not have such MMAs.
    pub tensor_e4m3: Option<f64>,
    /// Multiply-adds of 8-bit integers that `mma.sync` sustains, per cycle; `None` on cards where another instruction multiplies integers
    /// faster.
    pub tensor_int8: Option<f64>,
    /// L2 bandwidth to one SM, in bytes per cycle.
    pub l2_per_sm: f64,
    /// L2 bandwidth to all SMs together, in bytes per cycle.
    pub l2: f64,
    /// Latency of the barrier and of the loads of the first fragments of a k-step, in cycles, if no other CTA on the SM hides it.
    pub barrier: f64,
    /// Cycles from the launch to the first MMA, plus the cycles of the last stores.
    pub launch: f64,
    /// Cycles of the epilogue per output: bias, activation, rounding, store.
    pub output: f64,
    /// In f32, fraction of the faster units' work that does not overlap with the work of the slowest unit. With tensor cores, all work
    /// overlaps.
    pub exposed_simt: f64,
}

/// Constants of the kernels with Hopper instructions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hopper {
    pub wgmma: Wgmma,
    pub split_k: SplitK,
    pub stream: Stream,
    pub small_m: SmallM,
    pub gemm_norm: GemmNorm,
}

/// Constants of the persistent GEMM with `wgmma`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wgmma {
    /// L2 bandwidth to one SM, in bytes per cycle.
    pub l2_per_sm: f64,
    /// L2 bandwidth to all SMs together, in bytes per cycle. It limits full waves of tiles with up to 112 rows.
    pub l2: f64,
    /// Additional cycles per byte that an SM reads while all SMs read. At the card's power limit, memory traffic lowers the clock.
    pub power: f64,
    /// Exponent p of the p-norm that combines the times of MMA and L2. With a larger exponent, the longer time dominates more.
    pub overlap: f64,
    /// Cycles to round and store an output.
    pub output: f64,
    /// Factor by which `output` is multiplied with swap-AB, which stores fewer bytes of a row at a time.
    pub swap_ab: f64,
    /// Additional cycles of an output that is stored by TMA through shared memory.
    pub boxed: f64,
    /// Cycles to compute the activation of an output with two consumer warpgroups.
    pub activation: f64,
    /// Cycles to compute the activation of an output with one consumer warpgroup.
    pub activation_by_one: f64,
    /// Ratio of the store time with one warpgroup to the store time with two warpgroups. Memory limits the stores of two warpgroups.
    pub one_warpgroup: f64,
    /// Additional cycles of the activation of an output if it overlaps with the MMAs of another tile, with which it competes for registers.
    pub contention: f64,
    /// Fraction of `contention` that applies if a warpgroup has at least `spread_from` outputs. Registers are then so scarce that the
    /// compiler spreads out the instructions of the activation between MMAs.
    pub spread: f64,
    /// Min outputs per warpgroup for which [`Wgmma::spread`] applies.
    pub spread_from: f64,
    /// Fraction by which MMAs of a ping-pong kernel take longer if each SM has a single tile. One warpgroup then multiplies alone and
    /// does not keep the tensor cores busy.
    pub alone: f64,
    /// Min cycles of a k-step, due to latency, if each SM has a single tile.
    pub alone_step: f64,
    /// Cycles of a launch that are not due to its MMAs.
    pub launch: f64,
    /// Cycles per byte of the first stage, which all SMs load at the same time.
    pub stage_byte: f64,
    /// Cycles per tile.
    pub tile: f64,
    /// Bandwidth of weights from device memory to all SMs together, in bytes per cycle.
    pub dram: f64,
}

/// Constants of the GEMM for small M, with all operands of a CTA in shared memory and split-K over
/// a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SplitK {
    pub launch: f64,
    /// Additional cycles of each wave of CTAs after the first wave.
    pub wave: f64,
    /// Additional cycles of a launch whose CTAs leave no room on an SM for a CTA of the next kernel.
    pub crowd: f64,
    pub step: f64,
    /// Cycles of a cluster barrier.
    pub cluster: f64,
    /// Cycles to co-schedule a cluster while CTAs of the previous kernel run. They are multiplied by (CTAs of the cluster − 1)².
    pub cluster_at_once: f64,
    /// Cycles per byte of partial sums that CTAs exchange.
    pub exchange_byte: f64,
    /// Cycles per byte of weights loaded to one SM. These loads overlap with the previous kernel.
    pub weight_byte: f64,
    /// Cycles per byte of x loaded to one SM.
    pub x_byte: f64,
    /// Cycles per byte of the zero rows that pad x to a tile.
    pub zero_byte: f64,
    /// Cycles per byte from L2 to all SMs together.
    pub l2_byte: f64,
    /// Cycles that two fused GEMMs save in total by splitting k between two warpgroups: the GEMM that computes row statistics, and the GEMM
    /// that applies the deferred LayerNorm.
    pub two_warpgroups: f64,
}

/// Constants of the GEMM that streams its weight through a ring in shared memory, with programmatic
/// dependent launch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stream {
    pub launch: f64,
    /// L2 bandwidth to all SMs together, in bytes per cycle.
    pub l2: f64,
    /// Min cycles of a k-step, due to latency.
    pub step: f64,
    /// Factor by which the cycles that tensor cores need for an MMA are multiplied.
    pub mma: f64,
    /// Exponent p of the p-norm that combines the times of memory, L2 and MMAs.
    pub overlap: f64,
    /// Additional cycles of each wave of clusters after the first wave.
    pub wave: f64,
    /// Fraction of the main loop's time that each wave of clusters after the first wave adds.
    pub wave_again: f64,
    /// Additional cycles if stages of the ring are refilled.
    pub refill: f64,
    /// Cycles that are multiplied by the ratio of a tile's k-steps to the stages of the ring.
    pub depth: f64,
    /// Additional cycles of a launch whose clusters fill more than half of the GPU's capacity for CTAs. They are multiplied by the occupied
    /// fraction minus 1/2.
    pub crowd: f64,
    /// Cycles to co-schedule a cluster. They are multiplied by (CTAs of the cluster − 1)².
    pub cluster_at_once: f64,
    /// Cycles per partial sum that CTAs exchange.
    pub exchange: f64,
    /// Cycles of the epilogue for 64 outputs of a row.
    pub output: f64,
    /// Additional cycles of the epilogue for 64 outputs of a row, if rows have an odd number of columns.
    pub odd_output: f64,
    /// Cycles to compute the mean and deviation from row statistics, per row of a tile.
    pub normal: f64,
}

/// Max M (rows of x) of the small-M kernels. Their timings include programmatic dependent launch, as in a program: each kernel overlaps
/// with the previous kernel.
pub const SMALL_M: u64 = 128;

/// Corrections of the estimates of large-M kernels ([`Wgmma`]) for launches with small M.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmallM {
    /// If the MMAs of a k-step take fewer cycles than this number, latency determines the step's time.
    pub short_mma: f64,
    /// Additional cycles of each k-step after the first `fitted_steps` steps, if the MMAs of a step take fewer cycles than `short_mma`.
    pub wait: f64,
    /// Number of first k-steps to which `wait` does not apply.
    pub fitted_steps: u32,
}

/// Constants of the GEMM with LayerNorm in its epilogue. A cluster of CTAs holds whole rows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmNorm {
    /// Sustained multiply-adds per cycle.
    pub tensor: f64,
    /// L2 bandwidth to all SMs together, in bytes per cycle.
    pub l2: f64,
    /// See [`Wgmma::power`].
    pub power: f64,
    /// Additional cycles of a k-step if both warpgroups read all of x from shared memory.
    pub x_again: f64,
    /// Cycles of the epilogue per output with two warpgroups: residual, row statistics, cluster reduction, rounding, store.
    pub finish: f64,
    /// Cycles of the epilogue per output with one warpgroup.
    pub finish_by_one: f64,
    pub launch: f64,
    pub tile: f64,
}

/// Constants of a LayerNorm kernel, which may also add a bias and a residual before the norm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Norm {
    pub launch: f64,
    /// Cycles of a launch with at most [`SMALL_M`] rows.
    pub launch_small_m: f64,
    /// Cycles per element, for all SMs together.
    pub element: f64,
}

impl Norm {
    /// Returns the fixed cycles of a launch with this number of rows. The cycles of its elements are not included.
    pub fn launch_of(&self, rows: u64) -> f64 {
        match rows <= SMALL_M {
            true => self.launch_small_m,
            false => self.launch,
        }
    }
}
