//! The GEMM before a deferred LayerNorm, for few rows on Hopper. It also writes row statistics. The next GEMM normalizes its input with
//! these statistics, so LayerNorm needs no launch.

use serde::{Deserialize, Serialize};

use super::{
    Gemm, GemmWgmma, SplitKTile,
    row_stats::{row_stats_of, row_stats_shape},
    small_m::{ALIGNMENT, BLOCK_K, BLOCK_N, PARTIAL_BYTES, SHARED_LIMIT, STEP_BYTES},
};
use crate::{
    kernels::{
        Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Role, TensorMap,
        Tolerance, layernorm::BiasResidualLayerNorm,
    },
    machine::Machine,
    ops::Epilogue,
    tensor::{DType, Extents, Shape, Size, Symbol},
};

/// `x [rows, k]`, `weight [n, k]`, (`bias [n]`), `residual [rows, n]`, `gamma [n]` → `scaled [rows, n]` and `row_stats [rows, ⌈n / 64⌉, 2]`
/// in f32. With `s = x · weightᵀ + bias + residual`, `scaled` is `gamma · s`, and `row_stats` holds the sums of s and of s² over each block
/// of 64 columns. The kernel is for f16 and bf16 on Hopper, like [`GemmSplitK`](super::GemmSplitK).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GemmResidualRowStats {
    pub n: u32,
    pub k: u32,
    pub dtype: DType,
    /// Whether there is a bias.
    pub bias: bool,
    pub tile: SplitKTile,
}

/// Threads of a CTA: two consumer warpgroups and a producer warp.
const THREADS: u32 = 288;

/// Returns whether shared memory has room for the accumulators that the two warpgroups exchange. They reuse the memory of one warpgroup's
/// weights after the product. A warpgroup sends the accumulators of half of its octets (groups of eight) of tokens, and of `also` more
/// octets.
pub(super) fn room_to_exchange(tile: SplitKTile, k: u32, also: u32) -> bool {
    let steps = k.div_ceil(BLOCK_K) / tile.splits / 2;
    let exchanged = (tile.tokens / 8).div_ceil(2) + also;
    steps * BLOCK_N * BLOCK_K * 2 >= exchanged * PARTIAL_BYTES
}

/// Shared-memory layout of a CTA whose two consumer warpgroups split k (sliced-K).
pub(super) struct SlicedK {
    /// Steps of k per CTA.
    pub steps: u32,
    /// Rows of the second operand, x.
    pub rows: u32,
    /// Number of octets (groups of eight) of rows whose accumulators a warpgroup sends to the other warpgroup.
    pub exchanged: u32,
    /// Bytes of shared memory that a CTA needs besides the operands.
    pub besides: u32,
}

impl SlicedK {
    /// Max number of steps per warpgroup whose weights move to registers before x arrives.
    pub const MAX_RESIDENT: u32 = 6;

    /// Returns the max number of k-steps whose weights fit in shared memory together with x. The loads of x overwrite the weights of the
    /// remaining, later steps. The second warpgroup moves these weights to registers before x arrives. Returns `None` if there is no room
    /// for x.
    pub fn unaliased_steps(&self) -> Option<u32> {
        let of_group = self.steps.div_ceil(2);
        let kept = of_group.saturating_sub(Self::MAX_RESIDENT);
        let least = of_group + kept.max((self.exchanged * PARTIAL_BYTES).div_ceil(STEP_BYTES));
        let mut numbers = (least.min(self.steps)..=self.steps).rev();
        numbers.find(|&number| self.bytes(number) + self.besides <= SHARED_LIMIT)
    }

    /// Returns the bytes of shared memory for the operands if the weights of `unaliased_steps` steps are not overwritten by x.
    pub fn bytes(&self, unaliased_steps: u32) -> u32 {
        ALIGNMENT + unaliased_steps * STEP_BYTES + self.steps * self.rows * BLOCK_K * 2
    }
}

impl GemmResidualRowStats {
    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), String> {
        GemmWgmma::check_serves(self.n, self.k, self.dtype)?;
        let SplitKTile { tokens, splits } = self.tile;
        let is_tile =
            tokens.is_multiple_of(8) && (8..=64).contains(&tokens) && (1..=8).contains(&splits);
        let has_room = |tile: SplitKTile| {
            tile.shares(self.k)
                && self.operands().unaliased_steps().is_some()
                && room_to_exchange(tile, self.k, 0)
        };
        match is_tile && has_room(self.tile) {
            true => Ok(()),
            false => Err(format!(
                "{:?} is not a tile of a GEMM with k = {} and row statistics; expected 8 to 64 tokens in multiples of 8, 1 to 8 splits with k of at least 128 each, and room in shared memory for everything that a CTA reads",
                self.tile, self.k
            )),
        }
    }

    /// Number of row statistics for a row of `columns`.
    pub fn stats_of(columns: u32) -> u64 {
        row_stats_of(columns)
    }

    /// Returns the shared-memory layout of a CTA. Besides the operands, shared memory holds partial accumulators from the other CTAs of the
    /// cluster, and the row statistics of the warps.
    fn operands(&self) -> SlicedK {
        let tokens = self.tile.tokens;
        SlicedK {
            steps: self.tile.steps(self.k),
            rows: tokens,
            exchanged: (tokens / 8).div_ceil(2),
            besides: self.tile.received_bytes() + 4 * tokens * 8,
        }
    }

    /// Number of unaliased steps ([`SlicedK::unaliased_steps`]), and bytes of dynamic shared memory per CTA.
    pub(super) fn layout(&self) -> (u32, u32) {
        let operands = self.operands();
        let before = operands.unaliased_steps().unwrap_or(operands.steps);
        (before, operands.bytes(before) + self.tile.received_bytes())
    }

    /// Returns the unfused kernels for any GPU: the GEMM, and the LayerNorm whose sums this kernel computes.
    pub fn unfused(&self) -> (Gemm, BiasResidualLayerNorm) {
        // The sums do not depend on eps, so its value is arbitrary.
        const ANY: f32 = 1.0;
        (
            Gemm::of(self.n, self.k, self.dtype, Epilogue::default()),
            BiasResidualLayerNorm::new(self.n, ANY, self.dtype, self.bias),
        )
    }
}

impl Kernel for GemmResidualRowStats {
    facts! { template: "gemm_residual_row_stats", dtype: self.dtype, class: Gemm }

    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.tile.name())
    }

    fn definition(&self) -> String {
        format!(
            "gemm_{}residual_row_stats_{}_n{}_k{}",
            if self.bias { "bias_" } else { "" },
            self.dtype,
            self.n,
            self.k,
        )
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let mut constants = self.unfused().0.constants();
        constants.retain(|name, _| ["storage", "n", "k"].contains(name));
        constants.extend(self.tile.constants());
        constants.insert("bias", self.bias.into());
        constants.insert("unaliased_steps", self.layout().0.into());
        constants.insert("max_resident", SlicedK::MAX_RESIDENT.into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        let (gemm, norm) = self.unfused();
        let is_read = |p: &Param| matches!(p.role, Role::Read { .. });
        let mut params: Vec<Param> = gemm.params().into_iter().filter(is_read).collect();
        let of_norm = norm.params().into_iter().skip(1);
        params.extend(of_norm.filter(|p| ["bias", "residual", "gamma"].contains(&p.name)));
        let rows = Size::from(Symbol::Rows);
        params.push(Param {
            name: "scaled",
            role: Role::Write {
                element: self.dtype.into(),
                shape: Shape::new([rows.clone(), u64::from(self.n).into()]),
            },
        });
        params.push(Param {
            name: "row_stats",
            role: Role::Write {
                element: DType::F32.into(),
                shape: row_stats_shape(self.n),
            },
        });
        params.push(Param {
            name: "rows",
            role: Role::Count(rows),
        });
        params
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        self.tile.tensor_maps("x")
    }

    fn weight(&self) -> Option<[u32; 2]> {
        Some([self.n, self.k])
    }

    fn validate(&self) -> Result<(), String> {
        self.unfused().0.validate()?;
        self.check()
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let ctas = self.tile.ctas(extents.rows, self.n);
        Launch::of_ctas(ctas, self.threads(), self.layout().1)
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        Some(self.tile.cycles(rows, self.n, self.k, machine))
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (of_gemm, of_norm) = reads.split_at(2);
        let products = self.unfused().0.reference(extents, of_gemm);
        let (bias, residual, gamma) = match *of_norm {
            [bias, residual, gamma] => (Some(bias.real()), residual.real(), gamma.real()),
            [residual, gamma] => (None, residual.real(), gamma.real()),
            _ => unreachable!("the parameter list has two more operands, or three with a bias"),
        };
        let (scaled, row_stats) = scaled_and_row_stats(products[0].real(), bias, residual, gamma);
        vec![HostTensor::Real(scaled), HostTensor::Real(row_stats)]
    }

    fn tolerance(&self) -> Tolerance {
        let sums = self.unfused().0.tolerance();
        Tolerance {
            absolute: 4.0 * sums.absolute,
            relative: 2.0 * sums.relative,
            reason: "as the GEMM, times gamma, below 2; of 64 sums, and of their squares, errors are relative and add up like a random walk",
        }
    }
}

/// Computes `scaled` and `row_stats` ([`GemmResidualRowStats`]) from the GEMM's `products [rows, n]`, `residual [rows, n]`, `bias [n]` and
/// `gamma [n]`.
pub(crate) fn scaled_and_row_stats(
    products: &[f32],
    bias: Option<&[f32]>,
    residual: &[f32],
    gamma: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let mut scaled = Vec::with_capacity(products.len());
    let mut row_stats = Vec::new();
    let rows = products.chunks_exact(gamma.len());
    for (products, residual) in rows.zip(residual.chunks_exact(gamma.len())) {
        let sum = |c: usize| {
            let bias = bias.map_or(0.0, |bias| bias[c]);
            f64::from(products[c]) + f64::from(bias) + f64::from(residual[c])
        };
        let sums: Vec<f64> = (0..gamma.len()).map(sum).collect();
        let row = sums.iter().zip(gamma);
        scaled.extend(row.map(|(&s, &g)| (s * f64::from(g)) as f32));
        for part in sums.chunks(BLOCK_N as usize) {
            row_stats.push(part.iter().sum::<f64>() as f32);
            row_stats.push(part.iter().map(|s| s * s).sum::<f64>() as f32);
        }
    }
    (scaled, row_stats)
}

/// Instances with and without clusters, with sizes that include odd multiples of 8.
pub fn representative() -> Vec<KernelSpec> {
    let mut kernels = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for (n, k, bias, tiles) in [
            (768, 768, true, &[(24, 2), (48, 1), (64, 1), (64, 4)][..]),
            (1000, 328, false, &[(40, 1), (48, 2), (64, 3)]),
            (384, 1536, true, &[(48, 4), (64, 8)]),
            // At this size and the next size, x overwrites weights that have moved to registers.
            (392, 4096, true, &[(48, 4)]),
            (328, 936, false, &[(64, 1)]),
            (8, 136, true, &[(8, 1), (64, 1)]),
        ] {
            for &(tokens, splits) in tiles {
                kernels.push(KernelSpec::from(GemmResidualRowStats {
                    n,
                    k,
                    dtype,
                    bias,
                    tile: SplitKTile { tokens, splits },
                }));
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gemm(tokens: u32, splits: u32) -> GemmResidualRowStats {
        GemmResidualRowStats {
            n: 768,
            k: 3072,
            dtype: DType::F16,
            bias: true,
            tile: SplitKTile { tokens, splits },
        }
    }

    #[test]
    fn shared_memory_fits_or_the_kernel_is_rejected() {
        assert_eq!(gemm(64, 4).check(), Ok(()));
        for (tokens, splits) in [(64, 1), (72, 4), (12, 4), (0, 4), (64, 0), (64, 9)] {
            let message = gemm(tokens, splits).check().expect_err("refused");
            assert!(message.contains("is not a tile of a GEMM"), "{message}");
        }
    }

    #[test]
    fn each_part_of_a_row_has_its_sum_and_sum_of_squares() {
        let products: Vec<f32> = (0..65).map(|c| c as f32).collect();
        let (bias, residual) = (vec![1.0; 65], vec![-1.0; 65]);
        let gamma = vec![2.0; 65];
        let (scaled, row_stats) = scaled_and_row_stats(&products, Some(&bias), &residual, &gamma);
        assert_eq!(scaled[10], 20.0);
        assert_eq!(row_stats, [2016.0, 85344.0, 64.0, 4096.0]);
    }

    #[test]
    fn reads_come_before_writes() {
        let names: Vec<&str> = gemm(64, 4).params().iter().map(|p| p.name).collect();
        assert_eq!(names[..5], ["x", "weight", "bias", "residual", "gamma"]);
        assert_eq!(names[5..], ["scaled", "row_stats", "rows"]);
    }
}
