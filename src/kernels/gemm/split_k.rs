//! Tiles of the GEMMs for small M on Hopper that LayerNorm lies between: swap-AB, with split-K over the CTAs of a cluster.

use serde::{Deserialize, Serialize};

use crate::{
    kernels::{Constants, RowOrder, TensorMap},
    machine::{Hopper, Machine},
};

/// The tile of the GEMM for small M.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SplitKTile {
    /// Rows of x in a tile, the N side of an MMA: a multiple of 8 up to 256.
    pub tokens: u32,
    /// CTAs of a cluster, which share k: 1 to 8, the portable cluster size.
    pub splits: u32,
}

/// Rows of the weight in a tile, the M side of an MMA, and elements of k in a step: 128 bytes, the span
/// of the widest swizzle.
pub(super) const BLOCK_N: u32 = 64;
pub(super) const BLOCK_K: u32 = 64;
/// Bytes of the weights of a step.
pub(super) const STEP_BYTES: u32 = BLOCK_N * BLOCK_K * 2;
/// Threads of a CTA: one warpgroup.
const THREADS: u32 = 128;
/// Alignment of swizzled TMA boxes in shared memory, in bytes.
pub(super) const ALIGNMENT: u32 = 1024;
/// Bytes of dynamic shared memory of a CTA, besides static barriers.
pub(super) const SHARED_LIMIT: u32 = 226 * 1024;
/// Bytes of a CTA's accumulators for eight tokens.
pub(super) const PARTIAL_BYTES: u32 = THREADS * 16;

impl SplitKTile {
    pub const fn new(tokens: u32, splits: u32) -> Self {
        Self { tokens, splits }
    }

    /// The most rows: two tiles of tokens, as more read the weights too often.
    pub const fn most_rows(self) -> u64 {
        2 * self.tokens as u64
    }

    /// Estimated cycles on a card with Hopper's instructions, comparable with [`WgmmaTile::cycles`](super::WgmmaTile::cycles)
    /// under programmatic dependent launch.
    pub fn cycles(self, rows: u64, n: u32, k: u32, machine: &Machine) -> f64 {
        let Some(Hopper { split_k: cost, .. }) = &machine.costs.hopper else {
            return f64::INFINITY;
        };
        let n_sms = u64::from(machine.sms);
        let here = rows.min(self.tokens.into()) as f64;
        let steps = f64::from(self.steps(k));
        let ctas = self.ctas(rows, n);
        let side_by_side = machine.ctas_by_shared(self.shared_bytes(k)).clamp(1, 16);
        let waves = ctas.div_ceil(n_sms * u64::from(side_by_side)) as f64;
        let room = (n_sms * u64::from(side_by_side)) as f64;
        let crowd = (2.0 * ctas as f64 / room - 1.0).clamp(0.0, 1.0);
        let of_busiest = ctas.div_ceil(n_sms) as f64;
        let (weight_bytes, x_bytes) = (steps * 8192.0, steps * here * 128.0);
        let zeros = steps * f64::from(self.tokens) * 128.0 - x_bytes;
        let reduction = match self.splits {
            1 => 0.0,
            splits => {
                cost.cluster
                    + f64::from((splits - 1).pow(2)) * cost.cluster_at_once
                    + of_busiest * here * 256.0 * cost.exchange_byte
            }
        };
        cost.launch
            + (waves - 1.0) * cost.wave
            + crowd * cost.crowd
            + steps * cost.step
            + of_busiest
                * (weight_bytes * cost.weight_byte + x_bytes * cost.x_byte + zeros * cost.zero_byte)
            + ctas as f64 * (weight_bytes + x_bytes) * cost.l2_byte
            + reduction
    }

    /// CTAs of a launch.
    pub fn ctas(self, rows: u64, n: u32) -> u64 {
        rows.div_ceil(self.tokens.into())
            .saturating_mul(n.div_ceil(BLOCK_N).into())
            .saturating_mul(self.splits.into())
    }

    /// The part of a symbol that names the tile.
    pub fn name(self) -> String {
        format!("tokens{}_splits{}", self.tokens, self.splits)
    }

    /// The most steps of k of a CTA.
    pub(super) const fn steps(self, k: u32) -> u32 {
        k.div_ceil(BLOCK_K).div_ceil(self.splits)
    }

    /// Bytes of the partial accumulators that a CTA receives.
    pub(super) const fn received_bytes(self) -> u32 {
        match self.splits {
            1 => 0,
            splits => (self.tokens / 8).div_ceil(splits) * splits * PARTIAL_BYTES,
        }
    }

    pub(super) const fn shared_bytes(self, k: u32) -> u32 {
        ALIGNMENT + self.steps(k) * (BLOCK_N + self.tokens) * BLOCK_K * 2 + self.received_bytes()
    }

    /// What `partials/split_k_sizes.cu` reads, and the cluster attribute of the kernel.
    pub(super) fn constants(self) -> Constants {
        let Self { tokens, splits } = self;
        let cluster = match splits {
            // The attribute costs time even where a cluster is one CTA.
            1 => String::new(),
            _ => format!("__cluster_dims__({splits}, 1, 1) "),
        };
        let acc = tokens / 2;
        let list = |of: &dyn Fn(u32) -> String| (0..acc).map(of).collect::<Vec<_>>().join(", ");
        Constants::from([
            ("tokens", tokens.into()),
            ("splits", splits.into()),
            ("cluster", cluster.into()),
            ("accumulators", acc.into()),
            ("acc_registers", list(&|i| format!("%{i}")).into()),
            (
                "acc_operands",
                list(&|i| format!("\"+f\"(acc[{i}])")).into(),
            ),
        ])
    }

    /// Tensor maps of x and of the weight.
    pub(super) fn tensor_maps(self, x: &'static str) -> Vec<TensorMap> {
        let map = |param, box_rows| TensorMap {
            param,
            box_rows,
            box_columns: BLOCK_K,
            order: RowOrder::Plain,
        };
        vec![map(x, self.tokens), map("weight", BLOCK_N)]
    }

    /// Whether there is a step of k for each CTA of a cluster.
    pub(super) const fn shares(self, k: u32) -> bool {
        // A depth beyond this would overflow the sizes above, and fits nowhere.
        k <= 1 << 16 && self.splits <= k.div_ceil(BLOCK_K)
    }
}
