//! A linear layer with all that follows it up to LayerNorm, for Hopper: the blocks of a cluster hold
//! whole rows of the result, so that its rows are normalised before they leave the registers.

use serde::{Deserialize, Serialize};

use super::{
    EitherGemm, Epilogue, FewRows, Gemm, GemmSkinny, GemmSplitK, GemmWgmma, Tile, WgmmaTile,
    ranges::{Kernels, LAST_ROWS, RowRange, Served, ranges_among},
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Role,
        RowOrder, TensorMap, Tolerance, f32_literal, layernorm::BiasResidualLayerNorm, rows::word,
    },
    tensor::{DType, Extents},
};

/// `x [rows, k]`, `weight [n, k]`, (`bias [n]`), `residual [rows, n]`, `gamma`, `beta [n]`
/// → `out [rows, n]`: LayerNorm of `x · weightᵀ + bias + residual`, in f16 or bf16, on Hopper. What
/// [`Gemm`] and [`BiasResidualLayerNorm`] compute one after the other, but for one rounding
/// between them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GemmResidualLayerNorm {
    pub n: u32,
    pub k: u32,
    pub eps: f32,
    pub dtype: DType,
    /// Whether there is a bias.
    pub bias: bool,
    /// Of a block. A cluster has `n / tile.n` of them, side by side.
    pub tile: WgmmaTile,
}

/// Shared memory of a block on Hopper.
const SHARED_LIMIT: u32 = 227 * 1024;
/// Stages start at a multiple of this.
const STAGE_ALIGNMENT: u32 = 1024;
/// More stages than this hide nothing more.
const MOST_STAGES: u32 = 8;
/// Products of an output with which even tens of thousands of rows are checked in no time.
const FEW_PRODUCTS: u32 = 72;
/// Kernels for one pair of operators that [`GemmResidualLayerNorm::by_rows`] takes, and none for both apart.
const MOST_KERNELS: usize = 5;
/// The most blocks of a cluster that every card with clusters takes.
const MOST_BLOCKS: u32 = 8;
/// Multiprocessors of an H100 or H200 SXM.
const SMS: u32 = 132;
/// One warpgroup that copies and two that compute.
const THREADS: u32 = 384;

/// Elements of k in a stage: 128 bytes, the width of the widest swizzle.
const BLOCK_K: u32 = 64;

/// Both estimates may be off by a few per cent, that of the GEMM alone to its favour, as it is of the best of all tiles
/// and not of those that are compiled: only what is no faster at all is no further range.
const WORTH_JOINING: f64 = 1.01;

/// Where more rows than some are joined, launches apart are a GEMM of its own and LayerNorm more to compile and to
/// launch: they have to be faster by this.
const WORTH_PARTING: f64 = 1.03;

/// Clusters of 2, 3, … 8 blocks, each block on a multiprocessor of its own, that an H200 runs at once: what
/// its driver says of 2, 3, 4, 6 and 8, and at most what it can be for 5 and 7. More than there is room
/// for wait for their turn.
const CLUSTERS_AT_ONCE: [u64; 7] = [66, 39, 30, 22, 17, 16, 15];

/// What times are estimated for: an H200. Fitted to 236 timings, at 1843 to 16,384 rows of the GEMMs before
/// LayerNorm of two encoders, before blocks of a cluster shared x: those within a fifth of the best were met within 5 %
/// (root mean square). What sharing saves, and that one warpgroup takes twice as long to finish as two, are set so
/// that at 1229 to 2458 rows the tiles are taken that an encoder was fastest with.
mod machine {
    /// Multiply-adds a cycle; 2048 by the data sheet.
    pub const TENSOR_RATE: f64 = 1912.0;
    /// Bytes a cycle from L2, for all multiprocessors together.
    pub const L2_BANDWIDTH: f64 = 8050.0;
    /// Cycles for each byte that all multiprocessors read at a time: the card is at the limit of its
    /// power, so that what is read costs clock.
    pub const POWER: f64 = 0.00049;
    /// Of a step of which both warpgroups read all of x, 8 KiB from shared memory.
    pub const X_AGAIN: f64 = 32.0;
    /// Of an output, by two warpgroups and by one: residual, moments, what other blocks know of the row, rounding
    /// and storing.
    pub const FINISH: f64 = 0.112;
    pub const FINISH_BY_ONE: f64 = 0.224;
    /// From launch to the first product, and the end.
    pub const FILL: f64 = 3650.0;
    pub const FILL_OF_TILE: f64 = 2120.0;
    /// LayerNorm as a launch of its own, and for each element.
    pub const APART: f64 = 3000.0;
    pub const APART_ELEMENT: f64 = 2.4e-3;
}

impl GemmResidualLayerNorm {
    /// The tiles of a block.
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

    /// The tiles that serve rows of `n`: whole ones side by side, in two to eight blocks.
    pub fn tiles(n: u32) -> Vec<WgmmaTile> {
        let serves =
            |t: &WgmmaTile| n.is_multiple_of(t.n) && (2..=MOST_BLOCKS).contains(&(n / t.n));
        Self::TILES.into_iter().filter(serves).collect()
    }

    /// As [`GemmResidualLayerNorm::tiles`], if the kernel serves these sizes at all.
    pub fn candidates(n: u32, k: u32, dtype: DType) -> Vec<WgmmaTile> {
        match GemmWgmma::serves(n, k, dtype) {
            true => Self::tiles(n),
            false => Vec::new(),
        }
    }

    /// What computes this for every number of rows: each serves up to its number of rows, inclusive;
    /// the last serves all the rest. `None` where [`Gemm`] and [`BiasResidualLayerNorm`], one after the
    /// other, are faster, which they are for few rows.
    pub fn by_rows(
        n: u32,
        k: u32,
        eps: f32,
        dtype: DType,
        bias: bool,
    ) -> Vec<(Option<u64>, Option<Self>)> {
        let tiles = Self::candidates(n, k, dtype);
        if tiles.is_empty() {
            return vec![(None, None)];
        }
        let joined = |tile| Self {
            n,
            k,
            eps,
            dtype,
            bias,
            tile,
        };
        let ranges = |tiles: &[WgmmaTile], apart: &dyn Fn(u64) -> f64| {
            let cycles = |rows, at: usize| match at.checked_sub(1) {
                None => apart(rows),
                Some(at) => joined(tiles[at]).cycles(rows),
            };
            let all = 1 + tiles.len();
            without_slivers(ranges_among(
                Served::up_to(0),
                Kernels::worth(MOST_KERNELS, 0.0),
                all,
                cycles,
            ))
        };
        // Tiles are chosen against the best of all that a GEMM may have. What serves the rows that these leave has only
        // some of them, so that the ranges are then wider.
        let norm = |rows| cycles_of_norm(rows, n);
        let best = |rows| (cycles_of_gemm(rows, n, k, dtype) + norm(rows)) / WORTH_JOINING;
        let left = ranges(&tiles, &best);
        let is_chosen = |at: usize| left.iter().any(|&(_, chosen)| chosen == at + 1);
        let chosen = tiles.iter().enumerate().filter(|&(at, _)| is_chosen(at));
        let chosen: Vec<WgmmaTile> = chosen.map(|(_, &tile)| tile).collect();
        let few = FewRows::variants(n, k, dtype, Epilogue::default());
        let few = few.last().map_or(0, |&(end, _)| end);
        let beside = joined_ranges(&left);
        let many = EitherGemm::variants(n, k, dtype, Epilogue::default(), few);
        let many = EitherGemm::variants_beside(many, few, &beside);
        let first = beside.first().map_or(u64::MAX, |&(above, _)| above);
        let apart = |rows| {
            let serves = |(end, _): &&(Option<u64>, _)| end.is_none_or(|end| rows <= end);
            let gemm = match many.iter().find(serves).filter(|_| rows > few) {
                Some((_, kernel)) => kernel.cycles(rows),
                None => cycles_of_gemm(rows, n, k, dtype),
            };
            match rows > first {
                true => (gemm + norm(rows)) * WORTH_PARTING,
                false => gemm + norm(rows),
            }
        };
        ranges(&chosen, &apart)
            .into_iter()
            .map(|(end, at)| (end, at.checked_sub(1).map(|at| joined(chosen[at]))))
            .collect()
    }

    /// Whether the kernel can be generated as described; otherwise what is wrong.
    pub fn check(&self) -> Result<(), String> {
        GemmWgmma::check_serves(self.n, self.k, self.dtype)?;
        match Self::tiles(self.n).contains(&self.tile) {
            true => Ok(()),
            false => Err(format!(
                "{:?} is no tile for a cluster that holds rows of {}",
                self.tile, self.n
            )),
        }
    }

    /// The two kernels that compute the same, for any card, which are its definition.
    pub fn apart(&self) -> (Gemm, BiasResidualLayerNorm) {
        let gemm = Gemm::of(self.n, self.k, self.dtype, Epilogue::default());
        let norm = BiasResidualLayerNorm::new(self.n, self.eps, self.dtype, self.bias);
        (gemm, norm)
    }

    /// Estimated cycles of the GEMM and of LayerNorm, one after the other.
    pub fn cycles_apart(rows: u64, n: u32, k: u32, dtype: DType) -> f64 {
        cycles_of_gemm(rows, n, k, dtype) + cycles_of_norm(rows, n)
    }

    /// Estimated cycles at 1755 MHz, comparable with [`WgmmaTile::cycles`], whose form this has.
    pub fn cycles(&self, rows: u64) -> f64 {
        let row_tiles = rows.div_ceil(self.tile.m.into());
        let clusters = row_tiles.clamp(1, self.at_once());
        let of_busiest = row_tiles.div_ceil(clusters) as f64;
        let outputs = f64::from(self.tile.m) * f64::from(self.tile.n);
        let blocks = (clusters * u64::from(self.blocks())) as f64;
        let l2 = machine::L2_BANDWIDTH / blocks;
        // One block of a cluster fetches what all of them read of x: timed where a cluster has one tile.
        let of_x = match of_busiest > 1.0 {
            true => f64::from(self.tile.m),
            false => f64::from(self.tile.m) / f64::from(self.blocks()),
        };
        let bytes = (of_x + f64::from(self.tile.n)) * f64::from(BLOCK_K) * 2.0;
        let again = match self.is_by_columns() {
            true => machine::X_AGAIN,
            false => 0.0,
        };
        let step = (outputs * f64::from(BLOCK_K) / machine::TENSOR_RATE + again).max(bytes / l2)
            + bytes * blocks / f64::from(SMS) * machine::POWER;
        let residual = outputs * 2.0 / l2;
        let products = f64::from(self.k.div_ceil(BLOCK_K)) * step + residual;
        let work = if self.tile.together {
            of_busiest * (products + outputs * machine::FINISH)
        } else {
            let finish = outputs * machine::FINISH_BY_ONE;
            (of_busiest - 1.0) * products.max((products + finish) / 2.0) + products + finish
        };
        machine::FILL + of_busiest * machine::FILL_OF_TILE + work
    }

    /// Clusters that run at once.
    fn at_once(&self) -> u64 {
        CLUSTERS_AT_ONCE[(self.blocks() - 2) as usize]
    }

    /// Blocks of a cluster.
    fn blocks(&self) -> u32 {
        self.n / self.tile.n
    }

    /// Whether two warpgroups share the columns of a tile, as 64 rows are one's.
    fn is_by_columns(&self) -> bool {
        self.tile.together && self.tile.m == 64
    }

    /// Columns that a warpgroup computes.
    fn columns_of_warpgroup(&self) -> u32 {
        match self.is_by_columns() {
            true => self.tile.n / 2,
            false => self.tile.n,
        }
    }

    /// Rows that a warpgroup computes.
    fn rows_of_warpgroup(&self) -> u32 {
        match self.tile.together && !self.is_by_columns() {
            true => self.tile.m / 2,
            false => self.tile.m,
        }
    }

    fn stage_bytes(&self) -> u32 {
        (self.tile.m + self.tile.n) * BLOCK_K * 2
    }

    /// Shared memory that the source declares: moments of rows, and constants of columns.
    fn declared_bytes(&self) -> u32 {
        let parts = 2 * 2 * self.blocks() * self.rows_of_warpgroup() * 8;
        parts + self.tile.n * 3 * 4
    }

    /// Steps of k, or pieces of the residual, in shared memory: as many as there is room for.
    fn stages(&self) -> u32 {
        let rest = SHARED_LIMIT - self.declared_bytes() - self.bytes_beside(MOST_STAGES);
        (rest / self.stage_bytes()).min(MOST_STAGES)
    }

    /// Dynamic shared memory without the stages themselves.
    fn bytes_beside(&self, stages: u32) -> u32 {
        let barriers = (2 * stages + 2 + 4) * 8;
        STAGE_ALIGNMENT + barriers
    }

    fn shared_bytes(&self) -> u32 {
        let stages = self.stages();
        stages * self.stage_bytes() + self.bytes_beside(stages)
    }
}

/// Ranges without the joined ones (candidates above 0) that end hardly above where they begin: each would
/// cost every layer further steps for few batches. Where rows are many, one wave of clusters is little more than a
/// twentieth of them.
pub fn without_slivers(ranges: Vec<(Option<u64>, usize)>) -> Vec<(Option<u64>, usize)> {
    const LEAST_REACH: f64 = 1.04;
    let mut kept: Vec<(Option<u64>, usize)> = Vec::new();
    let mut above = 0;
    let ranges = match ranges.as_slice() {
        // More rows than were looked at have what serves the most of those.
        [.., (Some(end), at), (None, 0)] if *at > 0 && *end >= LAST_ROWS => {
            let mut ranges = ranges[..ranges.len() - 1].to_vec();
            ranges.last_mut().into_iter().for_each(|last| last.0 = None);
            ranges
        }
        _ => ranges,
    };
    for run in ranges.chunk_by(|a, b| (a.1 == 0) == (b.1 == 0)) {
        let end = run.last().and_then(|last| last.0);
        let reaches = |end: u64| end as f64 >= above as f64 * LEAST_REACH;
        match kept.last_mut() {
            _ if run[0].1 > 0 && end.is_none_or(reaches) => kept.extend(run),
            Some((before, 0)) => *before = end,
            _ => kept.push((end, 0)),
        }
        above = end.unwrap_or(u64::MAX);
    }
    kept
}

/// Those of the joined ones (candidates above 0).
fn joined_ranges(ranges: &[(Option<u64>, usize)]) -> Vec<RowRange> {
    let begins = [0]
        .into_iter()
        .chain(ranges.iter().filter_map(|range| range.0));
    let of = |(above, &(end, at)): (u64, &(Option<u64>, usize))| (at > 0).then_some((above, end));
    begins.zip(ranges).filter_map(of).collect()
}

/// Estimated cycles of LayerNorm as a launch of its own.
fn cycles_of_norm(rows: u64, n: u32) -> f64 {
    machine::APART + rows as f64 * f64::from(n) * machine::APART_ELEMENT
}

/// Estimated cycles of the GEMM by the best of all tiles.
fn cycles_of_gemm(rows: u64, n: u32, k: u32, dtype: DType) -> f64 {
    let any = Tile::fitting(n, dtype).into_iter();
    let any = any.map(|t| t.cycles(rows, n, k, dtype, SMS));
    // Swapped tiles fill the last wave where others do not, which in an encoder gains less than by itself.
    let hopper = WgmmaTile::CANDIDATES.into_iter();
    let hopper = hopper.filter(|tile| !tile.is_swapped());
    let hopper = hopper.map(|t| t.cycles(rows, n, k, Epilogue::default(), SMS));
    let skinny = GemmSkinny::tiles(n, k, dtype, Instructions::Hopper);
    let skinny = skinny.into_iter().filter(|t| rows <= t.most_rows());
    let skinny = skinny.map(|t| t.cycles(rows, n, k, SMS));
    let split = GemmSplitK::tiles(n, k, dtype, Instructions::Hopper);
    let split = split.into_iter().filter(|t| rows <= t.most_rows());
    let split = split.map(|t| t.cycles(rows, n, k, SMS));
    let all = any.chain(hopper).chain(skinny).chain(split);
    all.fold(f64::INFINITY, f64::min)
}

const fn tile(m: u32, n: u32, together: bool) -> WgmmaTile {
    WgmmaTile { m, n, together }
}

impl Kernel for GemmResidualLayerNorm {
    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.tile.name())
    }

    fn definition(&self) -> String {
        format!(
            "gemm_{}residual_layernorm_{}_n{}_k{}_eps{}",
            if self.bias { "bias_" } else { "" },
            self.dtype,
            self.n,
            self.k,
            word(self.eps),
        )
    }

    fn template(&self) -> &'static str {
        "gemm_residual_layernorm"
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let (gemm, norm) = self.apart();
        let mut constants = gemm.constants();
        constants.retain(|name, _| ["storage", "n", "k"].contains(name));
        let sums = self.columns_of_warpgroup() / 2;
        let list = |of: &dyn Fn(u32) -> String| (0..sums).map(of).collect::<Vec<_>>().join(", ");
        constants.extend([
            ("block_m", self.tile.m.into()),
            ("block_n", self.tile.n.into()),
            ("together", self.tile.together.into()),
            ("cluster", self.blocks().into()),
            ("stages", self.stages().into()),
            ("columns", self.columns_of_warpgroup().into()),
            ("bias", norm.bias.into()),
            ("eps", f32_literal(norm.eps).into()),
            ("sums", sums.into()),
            ("sum_registers", list(&|i| format!("%{i}")).into()),
            (
                "sum_operands",
                list(&|i| format!("\"+f\"(sums[{i}])")).into(),
            ),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        let (gemm, norm) = self.apart();
        let is_read = |p: &Param| matches!(p.role, Role::Read { .. });
        // What the one reads, and what the other takes besides the products.
        let mut params: Vec<Param> = gemm.params().into_iter().filter(is_read).collect();
        params.extend(norm.params().into_iter().skip(1));
        params
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        let map = |param, box_rows, box_columns, order| TensorMap {
            param,
            box_rows,
            box_columns,
            order,
        };
        vec![
            map("x", self.tile.m, BLOCK_K, RowOrder::Plain),
            map("weight", self.tile.n, BLOCK_K, RowOrder::Quads),
            // Boxes that a warp's lanes read 16 bytes each of without a conflict of banks.
            map("residual", self.tile.m, RowOrder::GROUP, RowOrder::Plain),
        ]
    }

    fn launch(&self, extents: &Extents) -> Launch {
        let tiles = extents.rows.div_ceil(self.tile.m.into());
        let clusters = tiles.clamp(1, self.at_once());
        Launch {
            grid: [clusters as u32 * self.blocks(), 1, 1],
            threads: THREADS,
            shared_bytes: self.shared_bytes(),
        }
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (gemm, norm) = self.apart();
        let (of_gemm, of_norm) = reads.split_at(2);
        let products = gemm.reference(extents, of_gemm);
        let mut operands: Vec<&HostTensor> = products.iter().collect();
        operands.extend(of_norm);
        norm.reference(extents, &operands)
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = Case::standard();
        if self.k <= FEW_PRODUCTS {
            // Some block has five tiles whatever the tile: both warpgroups come to use what they used before.
            let rows = |tile: &WgmmaTile| {
                let at_once = CLUSTERS_AT_ONCE[(self.n / tile.n - 2) as usize];
                4 * at_once * u64::from(tile.m) + 1
            };
            let most = Self::tiles(self.n).iter().map(rows).max().unwrap_or(1);
            cases.push(Case::new("waves", &[most as u32]));
        }
        cases
    }

    fn tolerance(&self) -> Tolerance {
        let (gemm, norm) = self.apart();
        let (sums, rounding) = (gemm.tolerance(), norm.tolerance());
        Tolerance {
            absolute: 4.0 * sums.absolute + rounding.absolute,
            relative: 2.0 * rounding.relative,
            reason: "errors of f32 sums are divided by the deviation of a row, above 1 with these operands, and multiplied by gamma, below 2; the result is rounded once",
        }
    }
}

/// Every tile, in clusters of several sizes, and depths that divide by 8 and nothing else.
pub fn representative() -> Vec<KernelSpec> {
    let mut kernels = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for (n, k, bias) in [
            (768, FEW_PRODUCTS, true),
            (1024, 328, false),
            (384, 328, true),
        ] {
            for tile in GemmResidualLayerNorm::tiles(n) {
                kernels.push(KernelSpec::from(GemmResidualLayerNorm {
                    n,
                    k,
                    eps: 1e-12,
                    dtype,
                    bias,
                    tile,
                }));
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests;
