//! A linear layer fused with the following residual addition and LayerNorm or RMSNorm, for Hopper. Together, the CTAs of a cluster hold
//! whole rows of the result in their accumulators. The CTAs exchange sums over their parts of the rows, and normalize the rows in
//! registers.

use serde::{Deserialize, Serialize};

use super::{Gemm, GemmWgmma, WgmmaTile};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Role,
        RowOrder, TensorMap, Tolerance, f32_literal, layernorm::LayerNorm, limits,
        rms_norm::RmsNorm, rows::word,
    },
    machine::{Hopper, Machine},
    ops::Epilogue,
    tensor::{DType, Extents},
};

/// `x [rows, k]`, `weight [n, k]`, (`bias [n]`), `residual [rows, n]`, `gamma`, (`beta [n]`) → (`sum [rows, n]`), `out [rows, n]`: the sum
/// `x · weightᵀ + bias + residual` and its LayerNorm or RMSNorm, in f16 or bf16, on Hopper. The kernel fuses [`Gemm`] with [`LayerNorm`] or
/// [`RmsNorm`], and does not round the sum before the norm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GemmResidualNorm {
    pub n: u32,
    pub k: u32,
    pub eps: f32,
    pub dtype: DType,
    /// Whether there is a bias.
    pub bias: bool,
    /// Whether the sum is stored, too. In pre-norm models, the sum is the residual stream to which the next layer adds.
    pub keeps_sum: bool,
    /// Whether the norm is LayerNorm, which centers rows and adds beta; otherwise RMSNorm.
    pub centered: bool,
    /// CTA tile. A cluster has `n / tile.n` tiles side by side.
    pub tile: WgmmaTile,
}

/// Bytes of shared memory of a CTA on Hopper.
const SHARED_LIMIT: u32 = 227 * 1024;
/// Alignment of stages in shared memory, in bytes.
const STAGE_ALIGNMENT: u32 = 1024;
/// Max stages. More would hide no more latency.
const MAX_STAGES: u32 = 8;
/// Max `k` of problems that are checked with tens of thousands of rows. With a larger `k`, such a check would be slow.
const FEW_PRODUCTS: u32 = 72;
/// A number of CTAs that exceeds the number of SMs of every Hopper GPU. If a launch has more tiles, at least one persistent cluster
/// processes several tiles.
const MAX_CTAS: u32 = 160;
/// The portable cluster size, which every GPU with clusters supports.
const MAX_CTAS_PER_CLUSTER: u32 = 8;
/// Threads of a CTA: one producer and two consumer warpgroups.
const THREADS: u32 = 384;

/// Elements of k per stage: 128 bytes, the span of the widest swizzle.
const BLOCK_K: u32 = 64;

impl GemmResidualNorm {
    /// Available CTA tiles.
    pub const TILES: [WgmmaTile; 9] = [
        tile(128, 256, true),
        tile(128, 192, true),
        tile(128, 128, true),
        tile(128, 128, false),
        tile(64, 256, true),
        tile(64, 256, false),
        tile(64, 192, true),
        tile(64, 192, false),
        tile(64, 128, false),
    ];

    /// Tiles for rows of `n` columns. A row consists of two to eight whole tiles side by side.
    pub fn tiles(n: u32) -> Vec<WgmmaTile> {
        let serves = |t: &WgmmaTile| {
            n.is_multiple_of(t.n) && (2..=MAX_CTAS_PER_CLUSTER).contains(&(n / t.n))
        };
        Self::TILES.into_iter().filter(serves).collect()
    }

    /// Like [`GemmResidualNorm::tiles`], but empty if the kernel does not support these sizes.
    pub fn candidates(n: u32, k: u32, dtype: DType) -> Vec<WgmmaTile> {
        match GemmWgmma::serves(n, k, dtype) {
            true => Self::tiles(n),
            false => Vec::new(),
        }
    }

    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), String> {
        GemmWgmma::check_serves(self.n, self.k, self.dtype)?;
        match Self::tiles(self.n).contains(&self.tile) {
            true => Ok(()),
            false => Err(format!(
                "{:?} is not a tile for clusters that hold rows of {} columns; expected one of `GemmResidualNorm::tiles`",
                self.tile, self.n
            )),
        }
    }

    /// Returns the two unfused kernels that define the result on any GPU: the sum, and its norm.
    pub fn unfused(&self) -> (Gemm, KernelSpec) {
        let Self {
            n, k, eps, dtype, ..
        } = *self;
        let epilogue = Epilogue::new(self.bias, None).with_residual();
        let norm = match self.centered {
            true => LayerNorm::new(n, eps, dtype).into(),
            false => RmsNorm::of_rows(n, eps, dtype).into(),
        };
        (Gemm::of(n, k, dtype, epilogue), norm)
    }

    /// Number of operands of the sum: x, the weight, the residual, and the bias if there is one.
    pub fn of_sum(&self) -> usize {
        3 + usize::from(self.bias)
    }

    /// Estimated cycles on a GPU with Hopper's instructions, comparable with [`WgmmaTile::cycles`], whose formula has the same structure.
    fn estimate(&self, rows: u64, machine: &Machine) -> f64 {
        let Some(Hopper {
            gemm_norm: cost,
            wgmma,
            ..
        }) = &machine.costs.hopper
        else {
            return f64::INFINITY;
        };
        let at_once = machine.clusters_at_once(self.cluster_size());
        if at_once == 0 {
            return f64::INFINITY;
        }
        let row_tiles = rows.div_ceil(self.tile.m.into());
        let clusters = row_tiles.clamp(1, at_once);
        let of_busiest = row_tiles.div_ceil(clusters) as f64;
        let outputs = f64::from(self.tile.m) * f64::from(self.tile.n);
        let ctas = (clusters * u64::from(self.cluster_size())) as f64;
        let l2 = cost.l2 / ctas;
        // Multicast of x to a cluster saves L2 reads. The saving was timed only for clusters that process one row tile, so it is counted
        // only for such clusters.
        let of_x = match of_busiest > 1.0 {
            true => f64::from(self.tile.m),
            false => f64::from(self.tile.m) / f64::from(self.cluster_size()),
        };
        let bytes = (of_x + f64::from(self.tile.n)) * f64::from(BLOCK_K) * 2.0;
        let again = match self.is_by_columns() {
            true => cost.x_again,
            false => 0.0,
        };
        let step = (outputs * f64::from(BLOCK_K) / cost.tensor + again).max(bytes / l2)
            + bytes * ctas / f64::from(machine.sms) * cost.power;
        let residual = outputs * 2.0 / l2;
        let mainloop = f64::from(self.k.div_ceil(BLOCK_K)) * step + residual;
        // The exchange of row statistics waits for the stores of the sum. In measurements, this wait grows with the cluster size.
        let kept = match self.keeps_sum {
            true => outputs * wgmma.output * f64::from(self.cluster_size()) / 6.0,
            false => 0.0,
        };
        let work = if self.tile.cooperative {
            of_busiest * (mainloop + outputs * cost.finish)
        } else {
            let finish = outputs * cost.finish_by_one;
            (of_busiest - 1.0) * mainloop.max((mainloop + finish) / 2.0) + mainloop + finish
        };
        cost.launch + of_busiest * (cost.tile + kept) + work
    }

    /// CTAs per cluster.
    fn cluster_size(&self) -> u32 {
        self.n / self.tile.n
    }

    /// Whether the consumer warpgroups split the columns of a tile, because its 64 rows are a single m64 MMA.
    fn is_by_columns(&self) -> bool {
        self.tile.cooperative && self.tile.m == 64
    }

    /// Columns computed by a warpgroup.
    fn columns_of_warpgroup(&self) -> u32 {
        match self.is_by_columns() {
            true => self.tile.n / 2,
            false => self.tile.n,
        }
    }

    /// Rows computed by a warpgroup.
    fn rows_of_warpgroup(&self) -> u32 {
        match self.tile.cooperative && !self.is_by_columns() {
            true => self.tile.m / 2,
            false => self.tile.m,
        }
    }

    fn stage_bytes(&self) -> u32 {
        (self.tile.m + self.tile.n) * BLOCK_K * 2
    }

    /// Bytes of static shared memory: partial row statistics, and vectors with a value per column (such as the bias and gamma).
    fn declared_bytes(&self) -> u32 {
        let parts = 2 * 2 * self.cluster_size() * self.rows_of_warpgroup() * 8;
        parts + self.tile.n * 3 * 4
    }

    /// Number of pipeline stages (for k tiles and the residual) that fit in shared memory, up to `MAX_STAGES`.
    fn stages(&self) -> u32 {
        let rest = SHARED_LIMIT - self.declared_bytes() - self.bytes_beside(MAX_STAGES);
        (rest / self.stage_bytes()).min(MAX_STAGES)
    }

    /// Bytes of dynamic shared memory in addition to the stages.
    fn bytes_beside(&self, stages: u32) -> u32 {
        let barriers = (2 * stages + 2 + 4) * 8;
        STAGE_ALIGNMENT + barriers
    }

    fn shared_bytes(&self) -> u32 {
        let stages = self.stages();
        stages * self.stage_bytes() + self.bytes_beside(stages)
    }
}

const fn tile(m: u32, n: u32, cooperative: bool) -> WgmmaTile {
    WgmmaTile { m, n, cooperative }
}

impl Kernel for GemmResidualNorm {
    facts! { template: "gemm_residual_norm", dtype: self.dtype, class: Gemm }

    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.tile.name())
    }

    fn definition(&self) -> String {
        format!(
            "gemm_{}residual_{}{}_{}_n{}_k{}_eps{}",
            if self.bias { "bias_" } else { "" },
            if self.keeps_sum { "sum_" } else { "" },
            if self.centered {
                "layernorm"
            } else {
                "rms_norm"
            },
            self.dtype,
            self.n,
            self.k,
            word(self.eps),
        )
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let mut constants = self.unfused().0.constants();
        constants.retain(|name, _| ["storage", "n", "k"].contains(name));
        let acc = self.columns_of_warpgroup() / 2;
        let list = |of: &dyn Fn(u32) -> String| (0..acc).map(of).collect::<Vec<_>>().join(", ");
        constants.extend([
            ("block_m", self.tile.m.into()),
            ("block_n", self.tile.n.into()),
            ("cooperative", self.tile.cooperative.into()),
            ("cluster", self.cluster_size().into()),
            ("stages", self.stages().into()),
            ("columns", self.columns_of_warpgroup().into()),
            ("bias", self.bias.into()),
            ("keeps_sum", self.keeps_sum.into()),
            ("centered", self.centered.into()),
            ("eps", f32_literal(self.eps).into()),
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
        let (gemm, norm) = self.unfused();
        // The parameters are the operands of the sum, followed by the operands of the norm except its input.
        let mut params = gemm.params();
        let rows = params.pop();
        let sum = params.pop().filter(|_| self.keeps_sum);
        let mut of_norm = norm.as_kernel().params();
        of_norm.retain(|param| !matches!(param.role, Role::Count(_)));
        let out = of_norm.pop();
        params.extend(of_norm.into_iter().skip(1));
        params.extend(sum.map(|sum| Param { name: "sum", ..sum }));
        params.into_iter().chain(out).chain(rows).collect()
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        let map = |param, box_rows, box_columns, order| TensorMap {
            param,
            box_rows,
            box_columns,
            order,
            has_last_box: param != "weight",
            streams: false,
        };
        vec![
            map("x", self.tile.m, BLOCK_K, RowOrder::Plain),
            map("weight", self.tile.n, BLOCK_K, RowOrder::Quads),
            // Boxes of 32 columns, which lanes read in 16-byte accesses without bank conflicts.
            map("residual", self.tile.m, RowOrder::GROUP, RowOrder::Plain),
        ]
    }

    fn weight(&self) -> Option<[u32; 2]> {
        Some([self.n, self.k])
    }

    fn validate(&self) -> Result<(), String> {
        self.unfused().0.validate()?;
        self.check()?;
        limits::eps(self.eps)
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        let tiles = extents.rows.div_ceil(self.tile.m.into());
        let clusters = tiles.clamp(1, machine.clusters_at_once(self.cluster_size()).max(1));
        Launch {
            grid: [clusters as u32 * self.cluster_size(), 1, 1],
            threads: THREADS,
            shared_bytes: self.shared_bytes(),
        }
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        Some(self.estimate(rows, machine))
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (gemm, norm) = self.unfused();
        let (of_sum, of_norm) = reads.split_at(self.of_sum());
        let mut sum = gemm.reference(extents, of_sum);
        let mut operands: Vec<&HostTensor> = sum.iter().collect();
        operands.extend(of_norm);
        let out = norm.as_kernel().reference(extents, &operands);
        if !self.keeps_sum {
            return out;
        }
        sum.extend(out);
        sum
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = Case::standard();
        if self.k <= FEW_PRODUCTS {
            // With this number of rows, at least one CTA has five tiles, regardless of the tile size. Both warpgroups then reuse barriers
            // and stages.
            let rows = |tile: &WgmmaTile| {
                let at_once = MAX_CTAS / (self.n / tile.n);
                u64::from(4 * at_once * tile.m) + 1
            };
            let most = Self::tiles(self.n).iter().map(rows).max().unwrap_or(1);
            cases.push(Case::new("waves", &[most as u32]));
        }
        cases
    }

    fn tolerance(&self) -> Tolerance {
        let (gemm, norm) = self.unfused();
        let (sums, rounding) = (gemm.tolerance(), norm.as_kernel().tolerance());
        Tolerance {
            absolute: 4.0 * sums.absolute + rounding.absolute,
            relative: 2.0 * rounding.relative,
            reason: "errors of f32 sums are divided by the deviation of a row, above 1 with these operands, and multiplied by gamma, below 2; the result is rounded once",
        }
    }
}

/// Instances with every tile, several cluster sizes, both norms, with and without a stored sum, and values of `k` that include odd
/// multiples of 8.
pub fn representative() -> Vec<KernelSpec> {
    let mut kernels = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for (n, k, bias, keeps_sum, centered) in [
            (768, FEW_PRODUCTS, true, false, true),
            (1024, 328, false, false, true),
            (384, 328, true, false, true),
            (768, FEW_PRODUCTS, false, true, true),
            (1024, 328, true, true, false),
        ] {
            // Skip bf16 for this case, because kernels for f16 and bf16 differ only in conversions.
            if keeps_sum && dtype == DType::BF16 && centered {
                continue;
            }
            for tile in GemmResidualNorm::tiles(n) {
                kernels.push(KernelSpec::from(GemmResidualNorm {
                    n,
                    k,
                    eps: if centered { 1e-12 } else { 1e-6 },
                    dtype,
                    bias,
                    keeps_sum,
                    centered,
                    tile,
                }));
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests;
