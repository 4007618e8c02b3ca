//! The constants of the cost model: cycles of [`Machine::clock_mhz`](super::Machine), bytes a cycle and multiply-adds a
//! cycle, each for one SM unless its name or its text says otherwise. What they were fitted to is in `docs/history.md`.

use serde::{Deserialize, Serialize};

/// The constants of one card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    pub mma_sync: MmaSync,
    pub norm: Norm,
    /// The kernels with Hopper's instructions; `None` on cards without them.
    pub hopper: Option<Hopper>,
}

/// The GEMM by `mma.sync`, or in f32 outside of the tensor cores, fed by `cp.async`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MmaSync {
    /// Multiply-adds of 16-bit elements that `mma.sync` reaches.
    pub tensor: f64,
    /// Bytes from L2, for one SM, and for all of them together.
    pub l2_per_sm: f64,
    pub l2: f64,
    /// The barrier and the first fragments of a k-step, where no other CTA fills the gap.
    pub barrier: f64,
    /// From the launch to the first MMA, and the last stores.
    pub launch: f64,
    /// Bias, activation, rounding and storing of an output.
    pub output: f64,
    /// The part of the work hidden behind the slowest unit that shows all the same in f32; in tensor cores none does.
    pub exposed_simt: f64,
}

/// The constants of the kernels with Hopper's instructions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hopper {
    pub wgmma: Wgmma,
    pub one_tile: OneTile,
    pub split_k: SplitK,
    pub skinny: Skinny,
    pub small_m: SmallM,
    pub gemm_norm: GemmNorm,
    pub norm_prologue: NormPrologue,
}

/// The persistent GEMM by `wgmma`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wgmma {
    /// Bytes from L2, for one SM, and for all of them together: that all ask at once is what makes full waves of tiles
    /// with up to 112 rows slow.
    pub l2_per_sm: f64,
    pub l2: f64,
    /// Cycles for each byte that all SMs read at a time: the card is at the limit of its power, so that what is read
    /// costs clock.
    pub power: f64,
    /// How sharply the slower of MMA and L2 decides: the exponent of their norm.
    pub overlap: f64,
    /// Rounding and storing of an output; how many times as long swap-AB takes, which stores fewer bytes of a row at a time;
    /// and how much longer an output takes that leaves through shared memory.
    pub output: f64,
    pub swap_ab: f64,
    pub boxed: f64,
    /// An activation by two warpgroups, and by one.
    pub activation: f64,
    pub activation_by_one: f64,
    /// What storing by one warpgroup takes of the time that it takes two, which is what memory takes.
    pub one_warpgroup: f64,
    /// An activation under another tile's MMA, whose registers it competes for; the part of that which is left with
    /// `spread_from` outputs of a warpgroup or more: with registers as scarce as that, its instructions are far enough apart
    /// to lie between the MMAs.
    pub contention: f64,
    pub spread: f64,
    pub spread_from: f64,
    /// From the launch to the end without MMA; each byte of the first stage, which all SMs ask for at once; and each tile.
    pub launch: f64,
    pub stage_byte: f64,
    pub tile: f64,
}

/// The GEMM by `wgmma` with one tile per CTA.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OneTile {
    pub l2_per_sm: f64,
    /// As [`Wgmma::power`].
    pub power: f64,
    pub output: f64,
    pub activation: f64,
    pub launch: f64,
    pub stage_byte: f64,
    pub tile: f64,
    /// CTAs of a cluster that wait for each other, and a byte of f32 sums that one sends to another.
    pub cluster: f64,
    pub exchange_byte: f64,
}

/// The GEMM for small M whose CTAs hold all their operands in shared memory, with split-K over a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SplitK {
    pub launch: f64,
    /// A further wave of CTAs.
    pub wave: f64,
    /// Where the next kernel finds no room beside this one.
    pub crowd: f64,
    pub step: f64,
    /// CTAs that wait for each other; CTAs that must find room at once beside those of the kernel before, by the square of
    /// how many more than one; and a byte of the sums that they send.
    pub cluster: f64,
    pub cluster_at_once: f64,
    pub exchange_byte: f64,
    /// Bytes to one SM: of weights, which are on their way before the kernel before is done; of x; and of rows that a tile
    /// has and x has not.
    pub weight_byte: f64,
    pub x_byte: f64,
    pub zero_byte: f64,
    /// A byte to all SMs together.
    pub l2_byte: f64,
    /// What two warpgroups save that share out k, in the two kernels with deferred normalisation.
    pub two_warpgroups: f64,
}

/// The GEMM for the smallest M, whose weights go from memory to registers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Skinny {
    pub launch: f64,
    /// A further CTA on the busiest SM.
    pub beside: f64,
    pub x_byte: f64,
    pub warp: f64,
    /// A warp's part of k.
    pub chunk: f64,
    pub l2_byte: f64,
}

/// Rows up to which M is small: kernels made for it are timed as they run in a program, where each begins while the one before
/// still runs.
pub const SMALL_M: u64 = 128;

/// What the estimates of kernels for large M leave out at small M.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmallM {
    /// One warpgroup's step takes no less than some cycles, however short its MMA: where that is shorter than `short_mma`,
    /// each step beyond `fitted_steps` takes `wait` more.
    pub short_mma: f64,
    pub wait: f64,
    pub fitted_steps: u32,
    /// The sums that CTAs of a cluster exchange.
    pub exchange: f64,
}

/// The GEMM with LayerNorm in its epilogue, whose rows lie across a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmNorm {
    /// Multiply-adds that it reaches.
    pub tensor: f64,
    /// Bytes from L2, for all SMs together.
    pub l2: f64,
    /// As [`Wgmma::power`].
    pub power: f64,
    /// A step of which both warpgroups read all of x from shared memory.
    pub x_again: f64,
    /// An output by two warpgroups, and by one: residual, row statistics, those of the other CTAs, rounding and storing.
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
    /// As `launch`, for at most [`SMALL_M`] rows.
    pub launch_small_m: f64,
    /// An element, on the whole card.
    pub element: f64,
}

/// The GEMM that normalises its rows in its prologue.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NormPrologue {
    pub launch: f64,
    /// A further tile of 16 rows, whether there are rows in it or not.
    pub tile: f64,
    /// A byte of x and the residual to one SM.
    pub row_byte: f64,
    /// A byte of the weight to all SMs together.
    pub weight_byte: f64,
}
