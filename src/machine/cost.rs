//! Constants of the cost model: cycles of [`Machine::clock_mhz`](super::Machine), bytes per cycle and multiply-adds per
//! cycle, each for one SM unless its name or its text says otherwise. `docs/history` has the data that they were fitted to.

use serde::{Deserialize, Serialize};

/// Constants of one card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    pub mma_sync: MmaSync,
    pub norm: Norm,
    /// Constants of the kernels with Hopper's instructions; `None` on cards without them.
    pub hopper: Option<Hopper>,
}

/// The GEMM by `mma.sync`, or by FMAs in f32, with a `cp.async` pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MmaSync {
    /// Multiply-adds of 16-bit elements that `mma.sync` sustains.
    pub tensor: f64,
    /// Bytes from L2, to one SM, and to all of them together.
    pub l2_per_sm: f64,
    pub l2: f64,
    /// Latency of the barrier and the first fragments of a k-step, where no other CTA on the SM hides it.
    pub barrier: f64,
    /// Prologue and tail: from the launch to the first MMA, and the last stores.
    pub launch: f64,
    /// Epilogue of an output: bias, activation, rounding, store.
    pub output: f64,
    /// In f32, the fraction of the work of the faster units that the slowest one does not hide; tensor cores hide all of it.
    pub exposed_simt: f64,
}

/// Constants of the kernels with Hopper's instructions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hopper {
    pub wgmma: Wgmma,
    pub split_k: SplitK,
    pub stream: Stream,
    pub small_m: SmallM,
    pub gemm_norm: GemmNorm,
}

/// The persistent GEMM by `wgmma`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wgmma {
    /// Bytes from L2, to one SM, and to all of them together: the latter bounds full waves of tiles with up to 112 rows.
    pub l2_per_sm: f64,
    pub l2: f64,
    /// Cycles for each byte that all SMs read at a time: at the card's power limit, traffic lowers the clock.
    pub power: f64,
    /// Exponent of the norm that combines the times of MMA and L2: the larger it is, the more the slower one alone decides.
    pub overlap: f64,
    /// Rounding and storing of an output; the factor of swap-AB, which stores fewer bytes of a row at a time; and what an
    /// output takes more that is stored through shared memory by TMA.
    pub output: f64,
    pub swap_ab: f64,
    pub boxed: f64,
    /// An activation by two consumer warpgroups, and by one.
    pub activation: f64,
    pub activation_by_one: f64,
    /// The time that stores take one warpgroup, over that of two: memory bounds it.
    pub one_warpgroup: f64,
    /// An activation under the MMAs of another tile, with which it competes for registers; and the fraction of that from
    /// `spread_from` outputs of a warpgroup on, where registers are so scarce that the instructions of the activation are
    /// far enough apart to be issued between MMAs.
    pub contention: f64,
    pub spread: f64,
    pub spread_from: f64,
    /// Where the SMs have one tile each, one warpgroup of a ping-pong kernel multiplies alone: the fraction that its MMAs take
    /// longer, as it does not keep the tensor cores busy, and the least cycles of a k-step, which latency bounds.
    pub alone: f64,
    pub alone_step: f64,
    /// A launch without MMAs; each byte of the first stage, which all SMs load at once; and each tile.
    pub launch: f64,
    pub stage_byte: f64,
    pub tile: f64,
    /// Bytes of the weight from device memory, to all SMs together.
    pub dram: f64,
}

/// The GEMM for small M with all operands of a CTA resident in shared memory, and split-K over a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SplitK {
    pub launch: f64,
    /// A further wave of CTAs.
    pub wave: f64,
    /// A launch beside whose CTAs none of the next kernel fits on an SM.
    pub crowd: f64,
    pub step: f64,
    /// A cluster barrier; co-scheduling of a cluster beside the CTAs of the kernel before, by the square of its CTAs less one;
    /// and a byte of the partial sums that CTAs send.
    pub cluster: f64,
    pub cluster_at_once: f64,
    pub exchange_byte: f64,
    /// Bytes to one SM: of weights, whose loads overlap the kernel before; of x; and of rows of a tile beyond those of x,
    /// which are zero.
    pub weight_byte: f64,
    pub x_byte: f64,
    pub zero_byte: f64,
    /// A byte from L2 to all SMs together.
    pub l2_byte: f64,
    /// What the two kernels of deferred normalisation save by splitting k between two warpgroups.
    pub two_warpgroups: f64,
}

/// The GEMM whose weight is streamed through a ring in shared memory, under programmatic dependent launch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stream {
    pub launch: f64,
    /// Bytes from L2, to all SMs together.
    pub l2: f64,
    /// The least cycles of a k-step, which latency bounds, and the cycles of an MMA over those of the tensor cores.
    pub step: f64,
    pub mma: f64,
    /// Exponent of the norm that combines the times of memory, L2 and MMAs.
    pub overlap: f64,
    /// A further wave of clusters, and the fraction of that time that it takes.
    pub wave: f64,
    pub wave_again: f64,
    /// A ring that is filled more than once; and the steps of a CTA, in rings.
    pub refill: f64,
    pub depth: f64,
    /// Clusters that take more than half of the room, by what they take more; co-scheduling of a cluster, by the square of its
    /// CTAs less one; and a partial sum that CTAs send.
    pub crowd: f64,
    pub cluster_at_once: f64,
    pub exchange: f64,
    /// 64 outputs of a row, and what they take more where rows are of an odd number of columns.
    pub output: f64,
    pub odd_output: f64,
    /// Row statistics of a row of a tile.
    pub normal: f64,
}

/// Most rows of small M, for which kernels were timed as in a program: with programmatic dependent launch, each overlaps the
/// one before.
pub const SMALL_M: u64 = 128;

/// Terms that the estimates of kernels for large M need at small M.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmallM {
    /// Latency bounds a k-step of one warpgroup, however short its MMAs: where these take less than `short_mma` cycles, each
    /// step beyond `fitted_steps` takes `wait` more.
    pub short_mma: f64,
    pub wait: f64,
    pub fitted_steps: u32,
}

/// The GEMM with LayerNorm in its epilogue, whose rows are spread over a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmNorm {
    /// Multiply-adds that it sustains.
    pub tensor: f64,
    /// Bytes from L2, to all SMs together.
    pub l2: f64,
    /// As [`Wgmma::power`].
    pub power: f64,
    /// A k-step in which both warpgroups read all of x from shared memory.
    pub x_again: f64,
    /// Epilogue of an output by two warpgroups, and by one: residual, row statistics, cluster reduction, rounding, store.
    pub finish: f64,
    pub finish_by_one: f64,
    pub launch: f64,
    pub tile: f64,
}

/// LayerNorm by a launch of its own, with or without sums before it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Norm {
    pub launch: f64,
    /// A launch of at most [`SMALL_M`] rows.
    pub launch_small_m: f64,
    /// An element, for all SMs together.
    pub element: f64,
}
