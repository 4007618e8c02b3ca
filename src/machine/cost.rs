//! Constants of the cost model: cycles at [`Machine::clock_mhz`](super::Machine), bytes per cycle
//! and multiply-adds per cycle. Each is for one SM unless its documentation says otherwise.
//! `docs/history` has the data that they were fitted to.

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
    /// Multiply-adds of 16-bit elements that `mma.sync` sustains.
    pub tensor: f64,
    /// L2 bandwidth to one SM (`l2_per_sm`) and to all SMs together (`l2`), in bytes per cycle.
    pub l2_per_sm: f64,
    pub l2: f64,
    /// Latency of the barrier and the first fragments of a k-step, where no other CTA on the SM hides it.
    pub barrier: f64,
    /// Prologue and tail: from the launch to the first MMA, plus the last stores.
    pub launch: f64,
    /// Epilogue per output: bias, activation, rounding, store.
    pub output: f64,
    /// Fraction of the work of the faster units that the slowest unit does not hide in f32. Tensor
    /// cores hide all of it.
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
    /// L2 bandwidth to one SM (`l2_per_sm`) and to all SMs together (`l2`), in bytes per cycle. The
    /// latter bounds full waves of tiles with up to 112 rows.
    pub l2_per_sm: f64,
    pub l2: f64,
    /// Cycles per byte that all SMs read at a time. At the card's power limit, traffic lowers the
    /// clock.
    pub power: f64,
    /// Exponent of the norm that combines the times of MMA and L2. The larger it is, the more the
    /// slower one dominates.
    pub overlap: f64,
    /// Cycles to round and store an output (`output`), the factor for swap-AB, which stores fewer
    /// bytes of a row at a time (`swap_ab`), and the extra cycles of an output stored by TMA
    /// through shared memory (`boxed`).
    pub output: f64,
    pub swap_ab: f64,
    pub boxed: f64,
    /// Cycles of an activation with two consumer warpgroups, and with one.
    pub activation: f64,
    pub activation_by_one: f64,
    /// Store time of one warpgroup over that of two, which is bounded by memory.
    pub one_warpgroup: f64,
    /// Cycles of an activation that overlaps the MMAs of another tile and competes with them for
    /// registers (`contention`). From `spread_from` outputs per warpgroup on, registers are so
    /// scarce that the activation's instructions are spread out between MMAs, and only the fraction
    /// `spread` applies.
    pub contention: f64,
    pub spread: f64,
    pub spread_from: f64,
    /// If each SM has a single tile, one warpgroup of a ping-pong kernel multiplies alone and does
    /// not keep the tensor cores busy. `alone` is the fraction by which its MMAs take longer.
    /// `alone_step` is the minimum number of cycles of a k-step, which latency bounds.
    pub alone: f64,
    pub alone_step: f64,
    /// Cycles of a launch without MMAs (`launch`), per byte of the first stage, which all SMs load
    /// at once (`stage_byte`), and per tile (`tile`).
    pub launch: f64,
    pub stage_byte: f64,
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
    /// Cycles of each further wave of CTAs.
    pub wave: f64,
    /// Extra cycles of a launch whose CTAs leave no room on an SM for a CTA of the next kernel.
    pub crowd: f64,
    pub step: f64,
    /// Cycles of a cluster barrier (`cluster`), of co-scheduling a cluster while CTAs of the
    /// previous kernel run, times (CTAs of the cluster − 1)² (`cluster_at_once`), and per byte of
    /// partial sums that CTAs exchange (`exchange_byte`).
    pub cluster: f64,
    pub cluster_at_once: f64,
    pub exchange_byte: f64,
    /// Cycles per byte loaded to one SM: of weights, whose loads overlap the previous kernel
    /// (`weight_byte`), of x (`x_byte`), and of the zero rows that pad x to a tile (`zero_byte`).
    pub weight_byte: f64,
    pub x_byte: f64,
    pub zero_byte: f64,
    /// Cycles per byte from L2 to all SMs together.
    pub l2_byte: f64,
    /// Cycles that the two kernels of deferred normalisation save by splitting k between two
    /// warpgroups.
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
    /// Minimum cycles of a k-step, which latency bounds (`step`), and the ratio of an MMA's cycles
    /// to those of the tensor cores (`mma`).
    pub step: f64,
    pub mma: f64,
    /// Exponent of the norm that combines the times of memory, L2 and MMAs.
    pub overlap: f64,
    /// Cycles of each further wave of clusters (`wave`), and the fraction of the time that it takes
    /// (`wave_again`).
    pub wave: f64,
    pub wave_again: f64,
    /// Cycles of a ring that is filled more than once (`refill`), and per ring of steps of a CTA
    /// (`depth`).
    pub refill: f64,
    pub depth: f64,
    /// Extra cycles of clusters that take more than half of the room, by the excess (`crowd`), of
    /// co-scheduling a cluster, times (CTAs of the cluster − 1)² (`cluster_at_once`), and per
    /// partial sum that CTAs exchange (`exchange`).
    pub crowd: f64,
    pub cluster_at_once: f64,
    pub exchange: f64,
    /// Cycles of 64 outputs of a row (`output`), and the extra cycles for rows with an odd number
    /// of columns (`odd_output`).
    pub output: f64,
    pub odd_output: f64,
    /// Cycles of the row statistics, per row of a tile.
    pub normal: f64,
}

/// Maximum M of the small-M kernels. These were timed as in a program: with programmatic dependent
/// launch, so that each kernel overlaps the previous one.
pub const SMALL_M: u64 = 128;

/// Corrections for small M in the estimates of kernels for large M.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmallM {
    /// Latency bounds a k-step of one warpgroup, however short its MMAs are. If the MMAs take less
    /// than `short_mma` cycles, each step beyond `fitted_steps` takes `wait` more cycles.
    pub short_mma: f64,
    pub wait: f64,
    pub fitted_steps: u32,
}

/// Constants of the GEMM with LayerNorm in its epilogue, whose rows are distributed over a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmNorm {
    /// Sustained multiply-adds per cycle.
    pub tensor: f64,
    /// L2 bandwidth to all SMs together, in bytes per cycle.
    pub l2: f64,
    /// See [`Wgmma::power`].
    pub power: f64,
    /// Cycles of a k-step in which both warpgroups read all of x from shared memory.
    pub x_again: f64,
    /// Epilogue per output with two warpgroups, and with one: residual, row statistics, cluster
    /// reduction, rounding, store.
    pub finish: f64,
    pub finish_by_one: f64,
    pub launch: f64,
    pub tile: f64,
}

/// Constants of LayerNorm in a separate launch, with or without preceding sums.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Norm {
    pub launch: f64,
    /// Cycles of a launch with at most [`SMALL_M`] rows.
    pub launch_small_m: f64,
    /// Cycles per element, for all SMs together.
    pub element: f64,
}
