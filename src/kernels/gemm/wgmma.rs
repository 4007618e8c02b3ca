//! The persistent, warp-specialized GEMM for Hopper: `wgmma` on tiles that TMA loads.

mod estimate;
mod instances;

use serde::{Deserialize, Serialize};

pub(super) use self::instances::{fp8_problems, representative};
use super::{
    Gemm,
    problem::{GemmProblem, check_k_of_fp8},
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, Launch, Param, RowOrder, TensorMap,
        Tolerance,
    },
    machine::Machine,
    ops::Epilogue,
    tensor::{DType, Extents, quantized},
};

/// CTA tile of the Hopper GEMM, and the schedule of the consumer warpgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WgmmaTile {
    /// Rows per tile: 64, 128 or 256, or another multiple of 8 up to 256 for swap-AB tiles. Swap-AB tiles, in which x is the N operand of
    /// the MMAs, are ping-pong tiles of 128 columns.
    pub m: u32,
    /// Columns per tile: a multiple of 16 up to 256.
    pub n: u32,
    /// Whether both consumer warpgroups compute halves of one tile. Otherwise, the warpgroups work in ping-pong: each has its own tile, and
    /// the epilogue of one warpgroup overlaps the mainloop of the other.
    pub cooperative: bool,
}

/// The GEMM for Hopper. `n` and `k` are multiples of 8, because rows of a tensor map start at multiples of 16 bytes. With operands in E4M3
/// that are not packed, `k` is a multiple of 16. A packed weight has a multiple of 16 rows.
///
/// Tensor cores add E4M3 products to f32 accumulators with only 14 bits of mantissa. If groups of 128 columns have scales, the kernel
/// multiplies the sum of each group by the scales and adds it to a second f32 sum with FMAs (*promotion*). Sums of int8 products are exact,
/// in 32-bit integers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GemmWgmma {
    /// The weight has the type of the activations (f16 or bf16), or x and the weight are both in E4M3 or both in int8. If the rows of x are
    /// quantized, the weight is packed, and the kernel loads its blocks of 64 columns unchanged.
    pub problem: GemmProblem,
    pub tile: WgmmaTile,
}

/// The way in which the epilogue stores the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Store {
    /// From registers to global memory. The weight's rows are loaded in groups of 32, in the order [`RowOrder::Quads`], or
    /// [`RowOrder::PairsOfQuads`] if the weight is packed.
    Direct,
    /// From registers to global memory, with swap-AB. The weight's rows are loaded in the order [`RowOrder::Fours`], or
    /// [`RowOrder::PairsOfFours`] if the weight is packed.
    SwapAb,
    /// Through shared memory, with TMA.
    Tma,
}

/// Bytes of shared memory of a CTA on Hopper.
const SHARED_LIMIT: u32 = 227 * 1024;
/// Number of 16-bit elements of k per stage: 128 bytes, the span of the widest swizzle. A stage has twice as many 8-bit elements.
const BLOCK_K: u32 = 64;
/// Max stages. More would hide no more latency.
const MAX_STAGES: u32 = 8;
/// Min number of stages that hides the latency of the loads.
const ENOUGH_STAGES: u32 = 4;
/// Number of rows of a warpgroup's 64-row MMA that each warp holds.
const SUBTILE_ROWS: u32 = 16;
/// Threads of a CTA: one producer and two consumer warpgroups.
const THREADS: u32 = 384;
/// If a ping-pong warpgroup has at most this number of outputs, it loads the scales of 8-bit operands before its mainloop. Otherwise, it
/// loads the scales after the mainloop, because the mainloop leaves no registers for them.
const EARLY_OUTPUTS: u32 = 128 * 128;

impl WgmmaTile {
    /// Available tiles, largest first.
    pub const CANDIDATES: [WgmmaTile; 24] = [
        WgmmaTile::new(256, 128, true),
        WgmmaTile::new(128, 256, true),
        WgmmaTile::new(128, 192, true),
        WgmmaTile::new(128, 192, false),
        WgmmaTile::new(128, 176, false),
        WgmmaTile::new(128, 160, false),
        WgmmaTile::new(128, 144, false),
        WgmmaTile::new(128, 128, true),
        WgmmaTile::new(128, 128, false),
        WgmmaTile::new(128, 112, false),
        WgmmaTile::new(128, 96, false),
        WgmmaTile::new(64, 256, false),
        WgmmaTile::new(64, 208, false),
        WgmmaTile::new(64, 192, false),
        WgmmaTile::new(64, 128, false),
        WgmmaTile::new(64, 96, false),
        WgmmaTile::new(64, 64, false),
        WgmmaTile::new(176, 128, false),
        WgmmaTile::new(160, 128, false),
        WgmmaTile::new(136, 128, false),
        WgmmaTile::new(120, 128, false),
        WgmmaTile::new(112, 128, false),
        WgmmaTile::new(96, 128, false),
        WgmmaTile::new(88, 128, false),
    ];

    /// Available tiles for operands with scales for groups of columns, largest first. A warpgroup holds two sets of sums: those of the
    /// current group and those of all groups. All tiles are cooperative: in ping-pong, only one warpgroup multiplies at a time, and the
    /// tensor cores would be idle while it adds the sums of a group to the sums of all groups.
    pub const OF_GROUPS: [WgmmaTile; 5] = [
        WgmmaTile::new(128, 192, true),
        WgmmaTile::new(128, 160, true),
        WgmmaTile::new(128, 128, true),
        WgmmaTile::new(128, 96, true),
        WgmmaTile::new(128, 64, true),
    ];

    const fn new(m: u32, n: u32, cooperative: bool) -> Self {
        Self { m, n, cooperative }
    }

    /// Available tiles, largest first. `of_groups` is whether groups of columns have scales.
    const fn candidates(of_groups: bool) -> &'static [Self] {
        match of_groups {
            true => &Self::OF_GROUPS,
            false => &Self::CANDIDATES,
        }
    }

    /// Part of a kernel's symbol that names the tile.
    pub fn name(self) -> String {
        let schedule = if self.cooperative { "" } else { "_pingpong" };
        format!("wgmma{}x{}{schedule}", self.m, self.n)
    }

    /// Returns the number of columns of a warp's epilogue subtile, and the number of TMA boxes that store the subtile.
    ///
    /// A box of 64 columns is swizzled. If the tile's columns are not a multiple of 64, a subtile has two narrower boxes, whose rows are an
    /// odd number of 16-byte chunks. Eight rows of this length are free of bank conflicts without a swizzle.
    const fn subtile(self) -> (u32, u32) {
        match self.n.is_multiple_of(64) {
            true => (64, 1),
            false => (self.n >> (self.n.trailing_zeros() - 4), 2),
        }
    }

    /// Whether the operands of the MMAs are swapped: the weight is the M operand (multiples of 64 rows), and x is the N operand.
    pub(super) const fn swaps_ab(self) -> bool {
        !self.m.is_multiple_of(64)
    }

    /// Whether the tile supports a weight of `n` rows.
    pub(super) const fn serves(self, n: u32) -> bool {
        !self.swaps_ab() || n.is_multiple_of(RowOrder::GROUP)
    }

    /// Whether a consumer thread has enough registers for this epilogue of a GEMM with `n` columns. With the largest ping-pong tiles, it
    /// has too few for a residual in combination with stores through TMA.
    pub(crate) fn has_registers(self, n: u32, epilogue: Epilogue) -> bool {
        let is_large = !self.cooperative && self.m * self.n >= 128 * 144;
        !(epilogue.residual && is_large && self.store(n) == Store::Tma)
    }

    /// Whether the epilogue can compute a gate with `n` result columns. A lane must hold the same columns of both halves of the product,
    /// and must have enough registers if there is a bias.
    const fn gates(self, n: u32, bias: bool) -> bool {
        let has_registers = !bias || self.outputs_of_warpgroup() < 128 * 128;
        let halves = self.n.is_multiple_of(2 * RowOrder::GROUP);
        has_registers && halves && self.stores_directly(n)
    }

    /// Whether integer wgmma supports the N extent of this tile. Without swap-AB, N is half of the columns, because each of two MMAs
    /// multiplies one row of each pair ([`RowOrder::Pairs`]).
    const fn has_n_of_integers(self) -> bool {
        match self.swaps_ab() {
            true => self.m.is_multiple_of(16),
            false => self.n.is_multiple_of(2 * 16),
        }
    }

    /// Outputs per consumer warpgroup.
    pub(super) const fn outputs_of_warpgroup(self) -> u32 {
        self.m * self.n / if self.cooperative { 2 } else { 1 }
    }

    /// Whether the epilogue of a GEMM with `n` columns stores directly from registers to global memory, without swap-AB. Each lane then
    /// stores whole groups of eight columns.
    pub(super) const fn stores_directly(self, n: u32) -> bool {
        matches!(self.store(n), Store::Direct)
    }

    /// The way in which the epilogue of a GEMM with `n` columns stores its output.
    const fn store(self, n: u32) -> Store {
        if self.swaps_ab() {
            return Store::SwapAb;
        }
        match n.is_multiple_of(RowOrder::GROUP) && self.n.is_multiple_of(RowOrder::GROUP) {
            true => Store::Direct,
            false => Store::Tma,
        }
    }

    /// Number of subtiles that each of the eight consumer warps can have in flight to global memory. It is the number of subtiles in 16
    /// rows of the tile, or half of it if the pipeline would otherwise have fewer than `ENOUGH_STAGES` stages.
    fn buffers(self, store: Store, vectors: u32) -> u32 {
        let (subtile, _) = self.subtile();
        let all = self.n / subtile;
        match store {
            Store::Direct | Store::SwapAb => 0,
            Store::Tma if self.stages_beside(all, vectors) >= ENOUGH_STAGES => all,
            Store::Tma => (all / 2).max(1),
        }
    }

    const fn stage_bytes(self) -> u32 {
        (self.m + self.n) * BLOCK_K * 2
    }

    /// Number of pipeline stages that fit in shared memory, up to `MAX_STAGES`. `vectors` is the number of f32 vectors in shared memory
    /// that the epilogue reads.
    fn stages(self, store: Store, vectors: u32) -> u32 {
        self.stages_beside(self.buffers(store, vectors), vectors)
    }

    fn stages_beside(self, buffers: u32, vectors: u32) -> u32 {
        let rest = SHARED_LIMIT - self.bytes_besides_stages(buffers, MAX_STAGES, vectors);
        (rest / self.stage_bytes()).min(MAX_STAGES)
    }

    /// Bytes of shared memory for output subtiles, barriers, and the vectors of both consumer warpgroups.
    const fn bytes_besides_stages(self, buffers: u32, stages: u32, vectors: u32) -> u32 {
        let (subtile, _) = self.subtile();
        let vectors = vectors * 2 * self.n * 4;
        8 * buffers * SUBTILE_ROWS * subtile * 2 + (2 * stages + 2) * 8 + vectors
    }

    fn shared_bytes(self, store: Store, vectors: u32) -> u32 {
        let stages = self.stages(store, vectors);
        let buffers = self.buffers(store, vectors);
        stages * self.stage_bytes() + self.bytes_besides_stages(buffers, stages, vectors)
    }

    /// Number of tiles of the output.
    fn tiles(self, rows: u64, n: u32) -> u64 {
        rows.div_ceil(self.m.into())
            .saturating_mul(n.div_ceil(self.n).into())
    }
}

impl GemmWgmma {
    /// Returns the kernel with every tile that supports the problem on a GPU with `instructions`, largest tiles first.
    pub fn kernels(problem: &GemmProblem, instructions: Instructions) -> Vec<Self> {
        if instructions != Instructions::Hopper {
            return Vec::new();
        }
        let tiles = WgmmaTile::candidates(problem.multiplies_groups());
        let kernels = tiles.iter().map(|&tile| Self {
            problem: problem.clone(),
            tile,
        });
        kernels.filter(|kernel| kernel.check().is_ok()).collect()
    }

    /// Whether the Hopper GEMM supports a weight `[n, k]` and activations of this type.
    pub fn serves(n: u32, k: u32, dtype: DType) -> bool {
        dtype.has_mma() && n.is_multiple_of(8) && k.is_multiple_of(8) && n > 0 && k > 0
    }

    /// Like [`GemmWgmma::serves`], but returns the reason as an error.
    pub(super) fn check_serves(n: u32, k: u32, dtype: DType) -> Result<(), String> {
        match Self::serves(n, k, dtype) {
            true => Ok(()),
            false => Err(format!(
                "the Hopper GEMM does not support n = {n} and k = {k} in {dtype}; expected multiples of 8 in f16 or bf16"
            )),
        }
    }

    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), String> {
        let GemmProblem {
            n,
            k,
            dtype,
            weight,
            epilogue,
            gated,
            ..
        } = self.problem;
        Self::check_serves(n, k, dtype)?;
        let tiles = WgmmaTile::candidates(self.problem.multiplies_groups());
        if !tiles.contains(&self.tile) || !self.tile.serves(n) {
            return Err(format!(
                "{:?} is not a tile of the Hopper GEMM for a weight in {weight}",
                self.tile
            ));
        }
        if !self.problem.is_plain() && !self.problem.multiplies_8_bits() {
            return Err(format!(
                "the Hopper GEMM does not read a weight in {weight}; expected {dtype}, or operands in E4M3 or int8"
            ));
        }
        let fits_gate = self.tile.gates(n, epilogue.bias) && !epilogue.residual;
        if gated && !(fits_gate && epilogue.activation.is_some()) {
            return Err(format!(
                "a gate of {n} columns is not supported with {:?} and {epilogue:?}; expected an activation, no residual, and whole groups of {} columns in each half of a tile",
                self.tile,
                RowOrder::GROUP
            ));
        }
        if !self.tile.has_registers(n, epilogue) {
            return Err(format!(
                "{:?} has no registers for a residual of {n} columns; expected a smaller or a cooperative tile",
                self.tile
            ));
        }
        match self.problem.multiplies_8_bits() {
            true => self.check_8_bits(),
            false => Ok(()),
        }
    }

    /// Checks the requirements that apply only to operands of 8 bits.
    fn check_8_bits(&self) -> Result<(), String> {
        let Self { problem, tile } = self;
        let GemmProblem { n, k, epilogue, .. } = *problem;
        match problem.packed() {
            None => check_k_of_fp8(k)?,
            // In integer MMAs, an N above 24 must be a multiple of 16. With swap-AB, N is the number of rows of the tile, otherwise half
            // the number of columns.
            Some(_) if problem.multiplies_int8() && !tile.has_n_of_integers() => {
                let expected = match tile.swaps_ab() {
                    true => "rows in multiples of 16",
                    false => "columns in multiples of 32",
                };
                return Err(format!("{tile:?} with int8 operands; expected {expected}"));
            }
            Some(_) if !problem.weight_rows().is_multiple_of(RowOrder::EIGHT_PAIRS) => {
                return Err(format!(
                    "a packed weight of {} rows; the Hopper GEMM of quantized rows expects a multiple of {}",
                    problem.weight_rows(),
                    RowOrder::EIGHT_PAIRS
                ));
            }
            Some(packed) => {
                let [rows, _] = packed.rows_of_blocks(problem.weight_rows().into(), k.into());
                if i32::try_from(rows).is_err() {
                    return Err(format!(
                        "a packed weight of {} x {k} elements, whose blocks have {rows} rows; expected less than 2^31",
                        problem.weight_rows()
                    ));
                }
            }
        }
        // With the largest ping-pong tiles, threads have enough registers for scales only if they store directly and add no residual.
        let is_large = !tile.cooperative && tile.outputs_of_warpgroup() >= 128 * 144;
        // Quantized rows need more registers, for the scales of rows.
        let spills = problem.quantized_rows
            && !tile.cooperative
            && (tile.n == 192 && tile.m == 128 && epilogue.activation.is_some()
                || tile.n == 256 && epilogue.residual);
        // Sums of integers also need registers for their conversion to f32.
        let spills_int8 = problem.multiplies_int8()
            && match (problem.gated, tile.cooperative) {
                (true, true) => tile.n == 192,
                (true, false) => tile.n >= 192,
                (false, _) => false,
            };
        if spills || spills_int8 || is_large && (epilogue.residual || !tile.stores_directly(n)) {
            return Err(format!(
                "{tile:?} has no registers for the scales of {n} columns with {epilogue:?}; expected a smaller or a cooperative tile"
            ));
        }
        let in_groups = tile.swaps_ab() || tile.stores_directly(n);
        match problem.to_e4m3 && (epilogue.residual || !in_groups) {
            true => Err(format!(
                "a result of {n} columns in E4M3 with {epilogue:?} and {tile:?}; expected no residual, and whole groups of 32 columns"
            )),
            false => Ok(()),
        }
    }

    fn store(&self) -> Store {
        self.tile.store(self.problem.n)
    }

    /// Number of f32 vectors in shared memory for each of the two consumer warpgroups: the bias, and the scales of 8-bit operands. If
    /// groups of columns have scales, the two warpgroups share one vector of scales per stage. It counts as half a vector for each
    /// warpgroup.
    fn vectors(&self) -> u32 {
        match self.problem.multiplies_groups() {
            true => 1 + MAX_STAGES / 2,
            false => 1 + u32::from(self.problem.multiplies_8_bits()),
        }
    }
}

impl Kernel for GemmWgmma {
    facts! { template: "gemm_wgmma", dtype: self.problem.dtype, class: Gemm }

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
        let (tile, store) = (self.tile, self.store());
        let pairs = self.problem.quantized_rows;
        let mma_n = match store {
            Store::SwapAb => tile.m,
            Store::Direct | Store::Tma if pairs => tile.n / 2,
            Store::Direct | Store::Tma => tile.n,
        };
        let acc = mma_n / 2;
        // In lane l, accumulator i = 4j + 2h + b of an MMA is the result of row l / 4 + 8h and column 8j + l % 4 · 2 + b. With pairs,
        // one MMA multiplies the first rows of all pairs (`of_pair` is 0), and another MMA the second rows (`of_pair` is 1). Their results
        // go to the elements of `acc` that a single MMA of all rows would use.
        let accumulator = |i: u32| {
            let (j, h, b) = (i / 4, i / 2 % 2, i % 2);
            match store {
                _ if !pairs => format!("acc[{i}]"),
                Store::SwapAb => format!("acc[{h}][{} + 2 * of_pair]", j * 4 + b),
                Store::Direct | Store::Tma => format!("acc[{} + of_pair]", (j * 2 + b) * 4 + h * 2),
            }
        };
        let (subtile, boxes) = tile.subtile();
        let list = |of: &dyn Fn(u32) -> String| (0..acc).map(of).collect::<Vec<_>>().join(", ");
        let in_8_bits = self.problem.multiplies_8_bits();
        let of_groups = self.problem.multiplies_groups();
        let late_scales =
            in_8_bits && !tile.cooperative && tile.outputs_of_warpgroup() > EARLY_OUTPUTS;
        // Register constraint of the accumulators in inline assembly.
        let register = if self.problem.multiplies_int8() {
            "r"
        } else {
            "f"
        };
        let mut constants = self.problem.constants();
        constants.extend([
            ("group_m", Gemm::GROUP_M.into()),
            ("block_m", tile.m.into()),
            ("block_n", tile.n.into()),
            (
                "block_k",
                (BLOCK_K * self.problem.elements_in_16_bits()).into(),
            ),
            ("mma_k", (16 * self.problem.elements_in_16_bits()).into()),
            ("scaled", (in_8_bits && !of_groups).into()),
            (
                "e4m3",
                (in_8_bits && !self.problem.multiplies_int8()).into(),
            ),
            ("int8", self.problem.multiplies_int8().into()),
            ("of_groups", of_groups.into()),
            ("late_scales", late_scales.into()),
            ("quantized_rows", pairs.into()),
            ("weight_rows", self.problem.weight_rows().into()),
            ("to_e4m3", self.problem.to_e4m3.into()),
            ("stages", tile.stages(store, self.vectors()).into()),
            ("cooperative", tile.cooperative.into()),
            ("direct_store", (store != Store::Tma).into()),
            ("swap_ab", (store == Store::SwapAb).into()),
            ("gated", self.problem.gated.into()),
            ("prepares", false.into()),
            ("mma_n", mma_n.into()),
            ("subtile", subtile.into()),
            ("boxes", boxes.into()),
            ("buffers", tile.buffers(store, self.vectors()).into()),
            ("accumulators", acc.into()),
            ("acc_registers", list(&|i| format!("%{i}")).into()),
            (
                "acc_operands",
                list(&|i| format!("\"+{register}\"({})", accumulator(i))).into(),
            ),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        self.problem.params()
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        let operand = |param, box_rows, order| TensorMap {
            param,
            box_rows,
            box_columns: BLOCK_K * self.problem.elements_in_16_bits(),
            order,
            has_last_box: false,
            streams: false,
        };
        let x = TensorMap {
            has_last_box: true,
            ..operand("x", self.tile.m, RowOrder::Plain)
        };
        // With a gate, separate copies load the two halves of the weight.
        let at_once = match self.problem.gated {
            true => self.tile.n / 2,
            false => self.tile.n,
        };
        let (order, out) = match self.store() {
            Store::Direct => ([RowOrder::Quads, RowOrder::PairsOfQuads], None),
            Store::SwapAb => ([RowOrder::Fours, RowOrder::PairsOfFours], None),
            Store::Tma => {
                let (subtile, boxes) = self.tile.subtile();
                let out = TensorMap {
                    param: "out",
                    box_rows: SUBTILE_ROWS,
                    box_columns: subtile / boxes,
                    order: RowOrder::Plain,
                    has_last_box: false,
                    streams: false,
                };
                ([RowOrder::Plain, RowOrder::Pairs], Some(out))
            }
        };
        let weight = match self.problem.quantized_rows {
            true => TensorMap {
                box_columns: quantized::BLOCK as u32,
                ..operand("weight", at_once, order[1])
            },
            false => operand("weight", at_once, order[0]),
        };
        [x, weight].into_iter().chain(out).collect()
    }

    fn weight(&self) -> Option<[u32; 2]> {
        Some(self.problem.weight_shape())
    }

    fn validate(&self) -> Result<(), String> {
        self.problem.check()?;
        self.check()
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        let tiles = self.tile.tiles(extents.rows, self.problem.weight_rows());
        Launch {
            grid: [tiles.min(machine.sms.into()) as u32, 1, 1],
            threads: THREADS,
            shared_bytes: self.tile.shared_bytes(self.store(), self.vectors()),
        }
    }

    /// Estimates the cycles. 8-bit operands are estimated as f16 operands with half of `k`. A stage of 8-bit operands has the same number
    /// of bytes as a stage of f16 operands. It has twice the number of products, but tensor cores compute these in the same time.
    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        let GemmProblem { k, epilogue, .. } = self.problem;
        let k = k.div_ceil(self.problem.elements_in_16_bits());
        let n = self.problem.weight_rows();
        let of_groups = self.problem.multiplies_groups();
        Some(
            self.tile
                .cycles_of(rows, [n, k], epilogue, of_groups, machine),
        )
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.problem.reference(extents, reads, true)
    }

    fn derived_inputs(&self, reads: &[&HostTensor]) -> Vec<(usize, HostTensor)> {
        self.problem.derived_inputs(reads)
    }

    fn cases(&self) -> Vec<Case> {
        self.problem.cases()
    }

    fn tolerance(&self) -> Tolerance {
        self.problem.tolerance()
    }
}

#[cfg(test)]
mod tests;
