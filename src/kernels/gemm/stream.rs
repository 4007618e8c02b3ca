//! The GEMM of decode steps on Hopper. It streams the weight through a ring buffer in shared memory. It can also compute a part of a norm
//! ([`StreamNorm`]): normalize its input, or prepare the norm of its output.

mod check;
mod estimate;
mod instances;
mod reference;
mod tile;

use serde::{Deserialize, Serialize};

pub(crate) use self::reference::{stream_normals, stream_scaled};
use self::tile::Layout;
pub use self::{instances::representative, tile::StreamTile};
use super::{
    GemmProblem, packed,
    problem::few_rows,
    row_stats::{row_stats_of, row_stats_shape},
    small_m::{ALIGNMENT, BLOCK_K},
};
use crate::{
    kernels::{
        Case, Constants, Fill, HostTensor, Instructions, Kernel, Launch, Param, RowOrder,
        TensorMap, Tolerance, f32_literal, limits,
        rows::{read, word, write},
    },
    machine::{Machine, SMALL_M},
    tensor::{DType, Extents, Shape, Size, Symbol},
};

/// Part of a norm that the kernel computes. A norm between two linear layers is split between their kernels.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum StreamNorm {
    None,
    /// Besides `out`, the kernel writes `scaled [rows, n]`, which is `SCALE · gamma · out`, and `row_stats [rows, ⌈n / 64⌉, 2]`: the sums
    /// of `out` and of its squares over each block of 64 columns. For LayerNorm, gamma and beta follow the rows of `scaled` as two more
    /// rows.
    Before {
        centered: bool,
    },
    /// x is the result `scaled` of an earlier kernel with [`StreamNorm::Before`]. The kernel normalizes its rows (LayerNorm if `centered`,
    /// otherwise RMSNorm) and multiplies them by the weight.
    After {
        eps: f32,
        centered: bool,
    },
}

/// The GEMM of decode steps on Hopper. `k` is a multiple of 8, or of 16 for operands in E4M3, because rows of a tensor map start at
/// multiples of 16 bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GemmStream {
    /// The weight has the type of the activations (f16 or bf16) or is packed, or x and the weight are both in E4M3.
    pub problem: GemmProblem,
    /// Must be [`StreamNorm::None`] if the operands are in E4M3.
    pub norm: StreamNorm,
    pub tile: StreamTile,
}

/// Factor by which `scaled` is multiplied, a power of two below 1. Without this factor, gamma times a row might exceed the range of f16.
pub(crate) const SCALE: f32 = 1.0 / 64.0;
/// Max bytes of dynamic shared memory per CTA, for one to four CTAs per SM. The rest of an SM's shared memory is for static arrays.
const SHARED: [u32; 4] = [224 * 1024, 112 * 1024, 74 * 1024, 55 * 1024];
/// Max bytes of barriers and other static arrays in a kernel without a norm.
const STATICS: u32 = 1024;
/// Max number of stages. Additional stages would not hide more latency.
const MAX_STAGES: u32 = 16;
/// Max bytes of received partial accumulators that have their own shared memory next to the ring. Larger accumulators reuse the memory of
/// the ring, so a CTA arrives at the cluster barrier only after its main loop.
const MAX_BESIDE: u32 = 16 * 1024;
/// Max number of octets (groups of eight) of output rows in shared memory at once. The output is stored through shared memory if rows have
/// an odd number of columns.
const STAGED_OCTETS: u32 = 2;
/// Padding of an output row in shared memory, in 4-byte words. It avoids bank conflicts when a warp writes eight rows at once.
const STAGED_PADDING: u32 = 4;
/// Max rows of a tile for which single warps, instead of warpgroups, multiply a packed weight. Each single warp reads all of x from shared
/// memory, whereas the four warps of a warpgroup read it once together.
const WARP_MMA_ROWS: u32 = 16;
/// Blocks of [`BLOCK_K`] columns in a stage of a packed weight.
const BLOCKS: u32 = 2;
/// Max rows of a tile with operands in E4M3. With more rows, [`GemmWgmma`](super::GemmWgmma) is at least as fast, because it reads the
/// weight at most as often as this kernel.
const MAX_ROWS_FP8: u32 = 32;
/// If a tile has at most this number of rows, the next kernel may start early. With more rows, the CTAs of the next kernel would take
/// bandwidth from the loads of x.
const EARLY_ROWS: u32 = 48;

impl GemmStream {
    /// Creates a GEMM without a norm and with an arbitrary tile.
    pub fn of(problem: GemmProblem) -> Self {
        Self {
            problem,
            norm: StreamNorm::None,
            tile: StreamTile::new(8, 1, 1, 1),
        }
    }

    /// Returns a copy of the kernel for each tile that a GPU with `instructions` supports, in ascending order of rows. The tile of `self`
    /// is ignored.
    pub fn tiles(&self, instructions: Instructions) -> Vec<Self> {
        if instructions != Instructions::Hopper {
            return Vec::new();
        }
        let with = |tile: StreamTile| Self {
            tile,
            ..self.clone()
        };
        let all: Vec<Self> = match self.problem.packed() {
            None => StreamTile::candidates().map(with).collect(),
            Some(_) => StreamTile::converting().map(with).collect(),
        };
        let all = all.into_iter();
        all.filter(|kernel| kernel.check().is_ok()).collect()
    }

    /// Length of a row of x, in units of 16 bits.
    fn depth(&self) -> u32 {
        self.problem.k.div_ceil(self.problem.elements_in_16_bits())
    }

    /// Whether the weight is packed and single warps, not warpgroups, compute the MMAs.
    fn multiplies_by_warps(&self) -> bool {
        self.problem.packed().is_some() && self.tile.rows <= WARP_MMA_ROWS
    }

    /// Length of the part of a row of x that a stage holds, in units of 16 bits.
    fn step_k(&self) -> u32 {
        match self.problem.packed() {
            None => BLOCK_K,
            Some(_) => BLOCKS * BLOCK_K,
        }
    }

    /// Epsilon of the norm of x, and whether the norm centers rows; `None` without [`StreamNorm::After`].
    fn input_norm(&self) -> Option<(f32, bool)> {
        match self.norm {
            StreamNorm::After { eps, centered } => Some((eps, centered)),
            _ => None,
        }
    }

    /// Number of tensors that the kernel writes.
    pub fn n_writes(&self) -> usize {
        match self.norm {
            StreamNorm::Before { .. } => 3,
            _ => 1,
        }
    }

    /// Number of rows of `scaled` after the rows of the batch. For LayerNorm (`centered`), these are gamma and beta. For RMSNorm, there are
    /// none.
    pub const fn more_rows(centered: bool) -> u64 {
        if centered { 2 } else { 0 }
    }

    fn x_rows(&self) -> Size {
        let more = self
            .input_norm()
            .map_or(0, |(_, centered)| Self::more_rows(centered));
        &Size::from(Symbol::Rows) + &more.into()
    }

    fn columns(&self) -> u32 {
        match self.problem.gated {
            true => self.tile.weight_rows() / 2,
            false => self.tile.weight_rows(),
        }
    }

    /// Whether a CTA collects its results in shared memory and stores whole rows from there in 4-byte words. A kernel without splits and
    /// without a residual does this if the number of columns is odd: every other row is then not aligned to 4 bytes.
    fn is_staged(&self) -> bool {
        self.problem.n % 2 == 1 && self.tile.splits == 1 && !self.problem.epilogue.residual
    }

    /// Octets of output rows that are in shared memory at once if [`is_staged`](Self::is_staged).
    fn staged_octets(&self) -> u32 {
        STAGED_OCTETS.min(self.tile.rows / 8)
    }

    /// Number of threads that read row statistics, a multiple of 32.
    fn stats_threads(&self) -> u32 {
        self.input_norm()
            .map_or(0, |_| 32 * self.tile.rows.div_ceil(64))
    }

    fn layout(&self) -> Option<Layout> {
        let tile = self.tile;
        let steps = tile.steps(self.depth(), self.step_k());
        let is_centered = self.input_norm().is_some_and(|(_, centered)| centered);
        let mma_n = tile.rows + if is_centered { 8 } else { 0 };
        let x_bytes = mma_n * self.step_k() * 2;
        let stage_bytes = match self.problem.packed() {
            None => x_bytes + tile.weight_rows() * BLOCK_K * 2,
            Some(weight) => {
                let row = BLOCKS * packed::block_bytes(weight)
                    + packed::scale_bytes(weight, self.step_k());
                x_bytes + (tile.weight_rows() * row).next_multiple_of(ALIGNMENT)
            }
        };
        let partial = tile.groups * 128 * 16;
        let received = match tile.splits {
            1 => 0,
            splits => {
                let vectors = if is_centered { splits * partial / 4 } else { 0 };
                (tile.rows / 8).div_ceil(splits) * splits * partial + vectors
            }
        };
        let is_aliased = received > MAX_BESIDE;
        // Static arrays of the norm. For `Before`: row statistics of each warp. For `After`: two numbers with which each row is normalized,
        // and the products of gamma and of beta with the rows of the weight.
        let statics = match self.norm {
            StreamNorm::None => 0,
            StreamNorm::Before { .. } => tile.groups * 4 * tile.rows * 8,
            StreamNorm::After { .. } => tile.rows * 8 + 2 * tile.weight_rows() * 4,
        };
        let staged = match self.is_staged() {
            true => 2 * self.staged_octets() * 8 * (tile.weight_rows() / 2 + STAGED_PADDING) * 4,
            false => 0,
        };
        let beside = ALIGNMENT + statics + staged + if is_aliased { 0 } else { received };
        let room = SHARED[tile.per_sm as usize - 1].checked_sub(beside)?;
        let most = match tile.splits {
            1 => MAX_STAGES,
            _ => MAX_STAGES.min(steps),
        };
        let stages = (room / stage_bytes).min(most);
        let has_room = stages >= 2.min(steps) && !(is_aliased && stages * stage_bytes < received);
        has_room.then_some(Layout {
            stages,
            mma_n,
            stage_bytes,
            received,
            is_aliased,
        })
    }

    /// Returns the layout of a kernel that [`check`](Self::check) accepts. Panics otherwise.
    fn checked_layout(&self) -> Layout {
        self.layout().expect("the tile has room, as `check` says")
    }

    /// Returns the number of tiles of the output, and the number of tiles that cover the same columns (one per tile of rows).
    fn tiles_of(&self, rows: u64) -> (u64, u64) {
        let of_rows = rows.div_ceil(self.tile.rows.into()).max(1);
        (
            of_rows.saturating_mul(self.problem.n.div_ceil(self.columns()).into()),
            of_rows,
        )
    }

    fn ctas(&self, rows: u64, machine: &Machine) -> u64 {
        let (tiles, of_rows) = self.tiles_of(rows);
        match self.tile.splits {
            1 => {
                let room = u64::from(machine.sms) * u64::from(self.tile.per_sm);
                tiles.min((room / of_rows).max(1) * of_rows)
            }
            splits => tiles.saturating_mul(splits.into()),
        }
    }

    /// Parameters of a norm: gamma, and beta if the norm is LayerNorm (`centered`).
    fn gamma_and_beta(&self, centered: bool) -> Vec<Param> {
        let width = Shape::fixed(&[self.problem.n.into()]);
        let names = ["gamma", "beta"]
            .into_iter()
            .take(1 + usize::from(centered));
        names
            .map(|name| read(name, self.problem.dtype, width.clone(), Fill::ACTIVATION))
            .collect()
    }

    /// Returns the symbol without the tile.
    fn name(&self) -> String {
        let kind = |centered| if centered { "layernorm" } else { "rms_norm" };
        // If gamma and beta are stored after the rows of x, the kernel supports only one tile of rows, and its cases depend on the number
        // of rows of the tile. Kernels with equal definitions must have equal cases, so the name then contains this number.
        let before = match self.norm {
            StreamNorm::After { eps, centered } => {
                let most = match centered {
                    true => format!("rows{}_", self.tile.rows),
                    false => String::new(),
                };
                format!("scaled_{}_eps{}_{most}", kind(centered), word(eps))
            }
            _ => String::new(),
        };
        let after = match self.norm {
            StreamNorm::Before { centered } => format!("_before_{}", kind(centered)),
            _ => String::new(),
        };
        if before.is_empty() && after.is_empty() {
            return self.problem.definition();
        }
        let (epilogue, sizes) = (self.problem.epilogue_name(), self.problem.sizes_name());
        format!("{before}{epilogue}{after}{sizes}")
    }
}

impl Kernel for GemmStream {
    facts! { template: "gemm_stream", dtype: self.problem.dtype, class: Gemm }

    fn symbol(&self) -> String {
        format!("{}_{}", self.name(), self.tile.name())
    }

    fn definition(&self) -> String {
        let name = self.name();
        // Warpgroups round the converted elements of the weight, and single warps do not. Kernels of the two kinds have different results,
        // so their definitions differ.
        match self.multiplies_by_warps() {
            true => format!("{name}_by_warps"),
            false => name,
        }
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let StreamTile {
            rows,
            splits,
            groups,
            per_sm,
        } = self.tile;
        let layout = self.checked_layout();
        let mut constants = self.problem.constants();
        constants.extend(packed::constants(self.problem.packed()));
        let (eps, is_centered) = self.input_norm().unwrap_or((1.0, false));
        let cluster = match splits {
            // The attribute takes time even if a cluster has only one CTA.
            1 => String::new(),
            _ => format!("__cluster_dims__({splits}, 1, 1) "),
        };
        let acc = layout.mma_n / 2;
        let list = |of: &dyn Fn(u32) -> String| (0..acc).map(of).collect::<Vec<_>>().join(", ");
        constants.extend([
            ("hopper", true.into()),
            (
                "block_k",
                (BLOCK_K * self.problem.elements_in_16_bits()).into(),
            ),
            ("mma_k", (16 * self.problem.elements_in_16_bits()).into()),
            ("scaled", self.problem.is_fp8().into()),
            ("to_e4m3", self.problem.to_e4m3.into()),
            ("warp_mma", self.multiplies_by_warps().into()),
            ("rows", rows.into()),
            ("splits", splits.into()),
            ("groups", groups.into()),
            ("stages", layout.stages.into()),
            ("aliased", layout.is_aliased.into()),
            ("per_sm", per_sm.into()),
            ("early", (per_sm > 1 && rows <= EARLY_ROWS).into()),
            ("gated", self.problem.gated.into()),
            ("normed", self.input_norm().is_some().into()),
            ("centered", is_centered.into()),
            ("eps", f32_literal(eps).into()),
            (
                "emits",
                matches!(self.norm, StreamNorm::Before { .. }).into(),
            ),
            (
                "emits_vectors",
                (self.norm == StreamNorm::Before { centered: true }).into(),
            ),
            ("scale", f32_literal(SCALE).into()),
            ("unscale", f32_literal(SCALE.recip()).into()),
            ("staged", self.is_staged().into()),
            ("staged_octets", self.staged_octets().into()),
            ("staged_padding", STAGED_PADDING.into()),
            ("mma_n", layout.mma_n.into()),
            ("cluster", cluster.into()),
            ("accumulators", acc.into()),
            ("acc_registers", list(&|i| format!("%{i}")).into()),
            (
                "acc_operands",
                list(&|i| format!("\"+f\"(acc[{i}])")).into(),
            ),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        let GemmProblem { n, k, dtype, .. } = self.problem;
        let rows = Size::from(Symbol::Rows);
        let mut params = self.problem.params();
        // The result and the number of rows are the last parameters.
        let at = params.len() - 2;
        match self.norm {
            StreamNorm::None => {}
            StreamNorm::Before { centered } => {
                let more = Self::more_rows(centered);
                let shape = Shape::new([&rows + &more.into(), u64::from(n).into()]);
                let written = [
                    write("scaled", dtype, shape),
                    write("row_stats", DType::F32, row_stats_shape(n)),
                ];
                params.splice(at + 1..at + 1, written);
                params.splice(at..at, self.gamma_and_beta(centered));
            }
            StreamNorm::After { .. } => {
                let scaled = Fill::Normal {
                    mean: 0.0,
                    deviation: SCALE,
                };
                let shape = Shape::new([self.x_rows(), u64::from(k).into()]);
                params[0] = read("x", dtype, shape, scaled);
                // With this fill, Σ s and Σ s² of a row are about half the number of columns. Both the mean and the deviation of a row are
                // then 1/2.
                let mean = k as f32 / row_stats_of(k) as f32;
                let stats = Fill::Normal {
                    mean,
                    deviation: 0.02 * mean,
                };
                params.insert(at, read("row_stats", DType::F32, row_stats_shape(k), stats));
            }
        }
        params
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        let map = |param, box_rows, order| TensorMap {
            param,
            box_rows,
            box_columns: BLOCK_K * self.problem.elements_in_16_bits(),
            order,
            has_last_box: false,
            streams: true,
        };
        let order = match self.problem.gated {
            true => RowOrder::Halves,
            false => RowOrder::Plain,
        };
        let mut maps = vec![map("x", self.checked_layout().mma_n, RowOrder::Plain)];
        if self.problem.packed().is_none() {
            maps.push(map("weight", self.tile.weight_rows(), order));
        }
        maps
    }

    fn weight(&self) -> Option<[u32; 2]> {
        Some(self.problem.weight_shape())
    }

    fn validate(&self) -> Result<(), String> {
        self.problem.check()?;
        self.check()?;
        match self.norm {
            StreamNorm::After { eps: value, .. } => limits::eps(value),
            _ => Ok(()),
        }
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        let ctas = self.ctas(extents.rows, machine);
        Launch::of_ctas(ctas, self.threads(), self.checked_layout().shared_bytes())
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        Some(self.estimate(rows, machine))
    }

    /// Returns the rows of one tile if gamma and beta follow the rows of x. Otherwise returns the rows of two tiles, but at most
    /// [`SMALL_M`], the max number of rows that was timed. More tiles would read the weight too often.
    fn max_rows(&self) -> Option<u64> {
        let rows = u64::from(self.tile.rows);
        Some(match self.input_norm() {
            Some((_, true)) => rows,
            _ => (2 * rows).min(SMALL_M),
        })
    }

    fn threads(&self) -> u32 {
        128 * self.tile.groups + 32 + self.stats_threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.on_host(extents, reads)
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = self.problem.cases();
        if self.norm != StreamNorm::None && !self.problem.gated {
            cases.extend(few_rows());
        }
        if let Some((_, true)) = self.input_norm() {
            let tokens = |case: &Case| case.lens.iter().map(|&len| u64::from(len)).sum::<u64>();
            cases.retain(|case| tokens(case) <= u64::from(self.tile.rows));
        }
        cases
    }

    fn tolerance(&self) -> Tolerance {
        let sums = self.problem.tolerance_of_sums();
        match self.norm {
            StreamNorm::None => self.problem.tolerance(),
            StreamNorm::After { .. } => self.problem.tolerance_with_factors(),
            StreamNorm::Before { .. } => Tolerance {
                absolute: 4.0 * sums.absolute,
                relative: 2.0 * sums.relative + self.problem.storage_error() * 5e-4,
                reason: "as the GEMM, times gamma, below 4; of 64 sums, and of their squares, errors are relative and add up like a random walk",
            },
        }
    }
}

#[cfg(test)]
mod tests;
