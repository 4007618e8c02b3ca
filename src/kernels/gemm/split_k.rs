//! The GEMM for few rows of x (small M) on Hopper, with split-K over the CTAs of a cluster. The operands are swapped (swap-AB): rows of the
//! weight are the M extent of an MMA, and rows of x the N extent.

use serde::{Deserialize, Serialize};

use super::{
    GemmProblem, GemmWgmma,
    odd_sizes::odd_sizes,
    small_m::{ALIGNMENT, BLOCK_K, BLOCK_N, PARTIAL_BYTES, SHARED_LIMIT, THREADS},
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, RowOrder,
        TensorMap, Tolerance,
    },
    machine::{Hopper, Machine},
    tensor::Extents,
};

/// Tile of the GEMM for small M.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SplitKTile {
    /// Rows of x per tile, the N extent of an MMA: a multiple of 8 up to 256.
    pub tokens: u32,
    /// CTAs per cluster, among which k is split: 1 to 8, the portable max cluster size.
    pub splits: u32,
}

/// The GEMM for small M on Hopper. `n` and `k` are multiples of 8, because rows of a tensor map start at multiples of 16 bytes. Shared
/// memory holds all operands of a CTA at once, which limits k.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GemmSplitK {
    /// Must be in f16 or bf16, with a weight of the same type, and without a gate.
    pub problem: GemmProblem,
    pub tile: SplitKTile,
}

impl SplitKTile {
    /// Available tiles, in ascending order of tokens. [`GemmStream`](super::GemmStream) serves batches with fewer tokens.
    pub const CANDIDATES: [SplitKTile; 8] = [
        SplitKTile::new(48, 1),
        SplitKTile::new(48, 2),
        SplitKTile::new(48, 4),
        SplitKTile::new(48, 8),
        SplitKTile::new(64, 1),
        SplitKTile::new(64, 2),
        SplitKTile::new(64, 4),
        SplitKTile::new(64, 8),
    ];

    pub const fn new(tokens: u32, splits: u32) -> Self {
        Self { tokens, splits }
    }

    /// Max number of rows of x: two tiles. Each tile of rows reads the whole weight, so more tiles would read it too often.
    pub const fn max_rows(self) -> u64 {
        2 * self.tokens as u64
    }

    /// Estimates cycles on a GPU with Hopper's instructions. The constants are from kernels that were timed with programmatic dependent
    /// launch. The estimate is comparable with [`WgmmaTile::cycles`](super::WgmmaTile::cycles).
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

    /// Max number of rows of x for which all clusters are resident at once. A second wave of clusters would start without loads in flight.
    pub fn max_rows_at_once(self, n: u32, k: u32, machine: &Machine) -> u64 {
        let per_sm = u64::from(machine.ctas_by_shared(self.shared_bytes(k)));
        let tiles = machine.clusters_at_once(self.splits) * per_sm / u64::from(n.div_ceil(BLOCK_N));
        (tiles * u64::from(self.tokens)).min(self.max_rows())
    }

    /// CTAs per launch.
    pub fn ctas(self, rows: u64, n: u32) -> u64 {
        rows.div_ceil(self.tokens.into())
            .saturating_mul(n.div_ceil(BLOCK_N).into())
            .saturating_mul(self.splits.into())
    }

    /// Part of a kernel's symbol that names the tile.
    pub fn name(self) -> String {
        format!("tokens{}_splits{}", self.tokens, self.splits)
    }

    /// Number of k-steps of the CTA with the most steps.
    pub(super) const fn steps(self, k: u32) -> u32 {
        k.div_ceil(BLOCK_K).div_ceil(self.splits)
    }

    /// Bytes of the partial accumulators that a CTA receives from the cluster's CTAs.
    pub(super) const fn received_bytes(self) -> u32 {
        match self.splits {
            1 => 0,
            splits => (self.tokens / 8).div_ceil(splits) * splits * PARTIAL_BYTES,
        }
    }

    pub(super) const fn shared_bytes(self, k: u32) -> u32 {
        ALIGNMENT + self.steps(k) * (BLOCK_N + self.tokens) * BLOCK_K * 2 + self.received_bytes()
    }

    /// Constants of `partials/split_k_sizes.cu`, and the kernel's cluster attribute.
    pub(super) fn constants(self) -> Constants {
        let Self { tokens, splits } = self;
        let cluster = match splits {
            // The attribute takes time even if a cluster has only one CTA.
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
            has_last_box: false,
            streams: false,
        };
        vec![map(x, self.tokens), map("weight", BLOCK_N)]
    }

    /// Whether a GEMM with this `k` can use the tile.
    pub(super) fn fits(self, k: u32) -> bool {
        self.shares(k) && self.shared_bytes(k) <= SHARED_LIMIT
    }

    /// Whether each CTA of a cluster has at least one step of k.
    pub(super) const fn shares(self, k: u32) -> bool {
        // A larger k never fits in shared memory. It is refused here, because sizes in bytes could overflow u32.
        k <= 1 << 16 && self.splits <= k.div_ceil(BLOCK_K)
    }
}

impl GemmSplitK {
    /// Returns the kernel with every tile that supports the problem on a GPU with `instructions`, in ascending order of tokens.
    pub fn kernels(problem: &GemmProblem, instructions: Instructions) -> Vec<Self> {
        if instructions != Instructions::Hopper {
            return Vec::new();
        }
        let kernels = SplitKTile::CANDIDATES.into_iter().map(|tile| Self {
            problem: problem.clone(),
            tile,
        });
        kernels.filter(|kernel| kernel.check().is_ok()).collect()
    }

    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), String> {
        let SplitKTile { tokens, splits } = self.tile;
        let GemmProblem {
            n,
            k,
            dtype,
            weight,
            ..
        } = self.problem;
        GemmWgmma::check_serves(n, k, dtype)?;
        self.problem.check_is_portable()?;
        if !self.problem.is_plain() {
            return Err(format!(
                "the split-K GEMM does not read a weight in {weight}; expected {dtype}"
            ));
        }
        if !tokens.is_multiple_of(8) || !(8..=256).contains(&tokens) || !(1..=8).contains(&splits) {
            return Err(format!(
                "{:?} is not a tile of the split-K GEMM; expected 8 to 256 tokens in multiples of 8, and 1 to 8 splits",
                self.tile
            ));
        }
        if !self.tile.fits(k) {
            return Err(format!(
                "{:?} does not fit k = {k}; expected at least one step of 64 for each CTA, and room in shared memory for everything that a CTA reads",
                self.tile
            ));
        }
        Ok(())
    }
}

impl Kernel for GemmSplitK {
    facts! { template: "gemm_split_k", dtype: self.problem.dtype, class: Gemm }

    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.tile.name())
    }

    fn definition(&self) -> String {
        self.problem.definition()
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let mut constants = self.problem.constants();
        constants.extend(self.tile.constants());
        constants
    }

    fn params(&self) -> Vec<Param> {
        self.problem.params()
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        self.tile.tensor_maps("x")
    }

    fn weight(&self) -> Option<[u32; 2]> {
        Some(self.problem.weight_shape())
    }

    fn validate(&self) -> Result<(), String> {
        self.problem.check()?;
        self.check()
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let GemmProblem { n, k, .. } = self.problem;
        let ctas = self.tile.ctas(extents.rows, n);
        Launch::of_ctas(ctas, THREADS, self.tile.shared_bytes(k))
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        let GemmProblem { n, k, .. } = self.problem;
        Some(self.tile.cycles(rows, n, k, machine))
    }

    fn max_rows(&self) -> Option<u64> {
        Some(self.tile.max_rows())
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.problem.reference(extents, reads, true)
    }

    fn cases(&self) -> Vec<Case> {
        self.problem.cases()
    }

    fn tolerance(&self) -> Tolerance {
        self.problem.tolerance()
    }
}

/// Instances with every tile and several epilogues, with sizes that include odd multiples of 8.
pub fn representative() -> Vec<KernelSpec> {
    let kernels = odd_sizes()
        .flat_map(|problem| GemmSplitK::kernels(&problem, Instructions::Hopper))
        .map(KernelSpec::from);
    kernels.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Epilogue;
    use crate::tensor::DType;

    fn gemm(n: u32, k: u32, dtype: DType, tokens: u32, splits: u32) -> GemmSplitK {
        GemmSplitK {
            problem: GemmProblem::new(n, k, dtype, Epilogue::default()),
            tile: SplitKTile { tokens, splits },
        }
    }

    #[test]
    fn every_tile_is_valid_and_fits_the_shared_memory() {
        let kernels = |n, k, instructions| {
            let problem = GemmProblem::new(n, k, DType::F16, Epilogue::default());
            GemmSplitK::kernels(&problem, instructions)
        };
        for problem in odd_sizes() {
            for kernel in GemmSplitK::kernels(&problem, Instructions::Hopper) {
                assert_eq!(kernel.validate(), Ok(()));
                assert!(kernel.tile.shared_bytes(problem.k) <= SHARED_LIMIT);
            }
        }
        assert!(!kernels(768, 768, Instructions::Hopper).is_empty());
        assert!(kernels(768, 768, Instructions::Ampere).is_empty());
        assert!(kernels(770, 768, Instructions::Hopper).is_empty());
        assert!(kernels(768, 1 << 16, Instructions::Hopper).is_empty());
    }

    #[test]
    fn a_launch_has_a_cluster_for_every_tile() {
        let extents = Extents::of(&[100]).expect("a batch");
        let launch =
            gemm(1000, 768, DType::F16, 64, 4).launch(&extents, &crate::machine::testing::hopper());
        assert_eq!(launch.grid, [2 * 16 * 4, 1, 1]);
        // Shared memory holds 64 weight rows and 64 tokens for each of three steps, and the accumulators of two octets (groups of eight) of
        // tokens from four CTAs.
        let bytes = 1024 + 3 * (64 + 64) * 128 + 2 * 4 * 2048;
        assert_eq!(launch.shared_bytes, bytes);
    }

    #[test]
    fn unsupported_kernels_are_rejected_with_a_reason() {
        let refused = |gemm: GemmSplitK| gemm.check().expect_err("refused");
        assert_eq!(
            refused(gemm(770, 768, DType::F16, 16, 1)),
            "the Hopper GEMM does not support n = 770 and k = 768 in f16; expected multiples of 8 in f16 or bf16"
        );
        for (tokens, splits) in [(0, 1), (12, 1), (264, 1), (16, 0), (16, 9)] {
            let message = refused(gemm(768, 768, DType::F16, tokens, splits));
            assert!(
                message.contains("is not a tile of the split-K GEMM"),
                "{message}"
            );
        }
        for (k, splits) in [(768, 1), (64, 2)] {
            let message = refused(gemm(768, k, DType::BF16, 256, splits));
            assert!(message.contains("does not fit"), "{message}");
        }
    }
}
