//! GEMMs. A GEMM kernel consists of a problem ([`GemmProblem`]: operands and epilogue) and the tile of a main loop that computes the
//! problem. Some GEMM kernels also compute a part of a norm, or prepare the operands of attention. These kernels compute only a GEMM:
//!
//! | kernel | main loop | for |
//! |---|---|---|
//! | [`Gemm`] | `mma.sync`, or FMAs in f32 | any GPU (Ada or newer for E4M3); fuses the epilogue as in ByteTransformer III.C |
//! | [`GemmWgmma`] | `wgmma`, persistent CTAs | Hopper |
//! | [`GemmSplitK`] | `wgmma`, k split over a cluster | Hopper, few rows |
//! | [`GemmStream`] | `wgmma`, a ring of weight tiles | Hopper, decode steps |
//!
//! The fused kernels use the same main loops. [`GemmResidualNorm`], [`GemmResidualRowStats`] and [`DeferredLayerNormGemm`] include a norm.
//! [`GemmPrepareAttention`] includes rotary embeddings. Three kernels convert operands: [`UnpackWeight`] converts a packed weight for
//! kernels that read plain weights. [`QuantizeRows`] and [`QuantizeGroups`] convert x to 8 bits for [`GemmWgmma`] with a packed 8-bit
//! weight. [`Gemm`] also reads the int8 result of [`QuantizeRows`].

#[cfg(test)]
mod activate;
mod deferred_layernorm;
mod instances;
mod odd_sizes;
mod packed;
mod packed_rows;
mod prepare_attention;
mod problem;
mod quantize_groups;
mod quantize_rows;
mod quantized_problem;
mod residual_norm;
mod residual_row_stats;
mod row_stats;
mod small_m;
mod split_k;
mod stream;
mod tile;
mod unpack;
mod wgmma;

use serde::{Deserialize, Serialize};

pub use deferred_layernorm::DeferredLayerNormGemm;
pub use instances::representative;
pub use packed_rows::RowElement;
pub use prepare_attention::GemmPrepareAttention;
pub use problem::GemmProblem;
use problem::check_k_of_fp8;
pub use quantize_groups::QuantizeGroups;
pub use quantize_rows::QuantizeRows;
pub use residual_norm::GemmResidualNorm;
pub use residual_row_stats::GemmResidualRowStats;
pub use split_k::{GemmSplitK, SplitKTile};
pub use stream::{GemmStream, StreamNorm, StreamTile};
pub use unpack::UnpackWeight;
pub use wgmma::{GemmWgmma, WgmmaTile};
pub(crate) use {
    deferred_layernorm::normalized,
    packed_rows::{columns as row_columns, quantized, quantized_groups},
    residual_row_stats::scaled_and_row_stats,
    stream::{stream_normals, stream_scaled},
};

use super::{Case, Constants, HostTensor, Instructions, Kernel, Launch, Param, Tolerance};
use crate::{
    machine::Machine,
    ops::Epilogue,
    tensor::{DType, Extents},
};

/// CTA tile `m × n × k`, computed by `warps_m × warps_n` warps. Shared memory holds a pipeline of `stages` k tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Tile {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub warps_m: u32,
    pub warps_n: u32,
    pub stages: u32,
}

/// A GEMM for any GPU. In f16 and bf16, it uses `mma.sync`.
///
/// Operands in E4M3 need the instructions of Ada and a `k` that is a multiple of 16. For compute capabilities 9.0 and 10.0, ptxas replaces
/// an MMA of E4M3 elements by conversions and MMAs in f16.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Gemm {
    /// A problem without a gate. The types are one of these: the weight has the type of x, the weight is packed, or x and the weight are
    /// both in E4M3 or both in int8.
    pub problem: GemmProblem,
    pub tile: Tile,
}

impl Gemm {
    /// Number of row tiles in a rasterization group. With this number, the CTAs that run concurrently cover a roughly square part of the
    /// output, which minimizes the bytes read from DRAM into L2.
    const GROUP_M: u32 = 8;

    /// Creates a GEMM with the first candidate tile, for uses where the tile does not matter.
    pub fn of(n: u32, k: u32, dtype: DType, epilogue: Epilogue) -> Self {
        Self {
            problem: GemmProblem::new(n, k, dtype, epilogue),
            tile: Tile::candidates(dtype)[0],
        }
    }

    fn on_tensor_cores(&self) -> bool {
        self.problem.dtype.has_mma()
    }

    /// Returns the number of bytes of the widest access that is aligned in every row, at most `widest` and 16. Rows are `pitch` bytes
    /// apart.
    fn access_bytes(pitch: u64, widest: u64) -> u64 {
        widest.min(1 << pitch.trailing_zeros().min(4))
    }

    /// Checks the requirements that apply only to operands in E4M3.
    fn check_fp8(&self) -> Result<(), String> {
        let GemmProblem { n, k, epilogue, .. } = self.problem;
        check_k_of_fp8(k)?;
        // A lane stores four neighboring columns in E4M3.
        match self.problem.to_e4m3 && (epilogue.residual || !n.is_multiple_of(4)) {
            true => Err(format!(
                "a result of {n} columns in E4M3 with {epilogue:?}; expected no residual, and a multiple of 4 columns"
            )),
            false => Ok(()),
        }
    }
}

impl Kernel for Gemm {
    facts! { dtype: self.problem.dtype, class: Gemm }

    fn symbol(&self) -> String {
        let t = self.tile;
        format!(
            "{}_t{}x{}x{}_w{}x{}_s{}",
            self.definition(),
            t.m,
            t.n,
            t.k,
            t.warps_m,
            t.warps_n,
            t.stages
        )
    }

    fn definition(&self) -> String {
        self.problem.definition()
    }

    fn template(&self) -> &'static str {
        if self.on_tensor_cores() {
            "gemm_mma"
        } else {
            "gemm_simt"
        }
    }

    fn constants(&self) -> Constants {
        let GemmProblem { n, k, dtype, .. } = self.problem;
        let in_16_bits = self.problem.elements_in_16_bits();
        // On tensor cores a lane stores at most four neighboring columns, in 8 bytes.
        let store = if self.on_tensor_cores() { 8 } else { 16 };
        // Request only one CTA per SM for few columns (a classifier) and for packed weights. Otherwise, ptxas might spill registers to fit
        // more CTAs.
        let min_ctas = if n < 8 || self.problem.converted().is_some() {
            ", 1"
        } else {
            ""
        };
        // Quantized rows are padded to the number of columns of the packed weight.
        let k = match self.problem.quantized_rows {
            true => packed_rows::columns(k),
            false => k,
        };
        let x_pitch = u64::from(k) * self.problem.x_bytes();
        let out_pitch = u64::from(n) * dtype.bytes();
        let mut constants = self.problem.constants();
        constants.extend(packed::constants(self.problem.converted()));
        constants.extend([
            ("block_m", self.tile.m.into()),
            ("block_n", self.tile.n.into()),
            ("k", (k / in_16_bits).into()),
            ("block_k", (self.tile.k / in_16_bits).into()),
            ("warps_m", self.tile.warps_m.into()),
            ("warps_n", self.tile.warps_n.into()),
            ("stages", self.tile.stages.into()),
            ("group_m", Self::GROUP_M.into()),
            ("min_ctas", min_ctas.into()),
            ("copy_bytes", Self::access_bytes(x_pitch, 16).into()),
            ("store_bytes", Self::access_bytes(out_pitch, store).into()),
            ("scaled", self.problem.is_fp8().into()),
            ("int8", self.problem.multiplies_int8().into()),
            ("to_e4m3", self.problem.to_e4m3.into()),
            ("hopper", false.into()),
            ("warp_mma", false.into()),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        self.problem.params()
    }

    fn weight(&self) -> Option<[u32; 2]> {
        Some(self.problem.weight_shape())
    }

    fn cpu_only(&self) -> Option<String> {
        let GemmProblem { weight, dtype, .. } = self.problem;
        let is_read = self.problem.is_plain() || self.problem.packed().is_some();
        (!is_read && !self.problem.is_fp8())
            .then(|| format!("its weight is stored in {weight}, its input in {dtype}"))
    }

    fn validate(&self) -> Result<(), String> {
        self.problem.check()?;
        let GemmProblem { weight, dtype, .. } = self.problem;
        match self.problem.multiplies_int8() {
            true => self.problem.with_plain_rows().check_has_no_gate()?,
            false => self.problem.check_has_no_gate()?,
        }
        if !Tile::of(&self.problem).contains(&self.tile) {
            return Err(format!(
                "{:?} is not a tile for {dtype} with a weight in {weight}",
                self.tile
            ));
        }
        match self.problem.is_fp8() {
            true => self.check_fp8(),
            false => Ok(()),
        }
    }

    fn instructions(&self) -> Instructions {
        match self.problem.is_fp8() {
            true => Instructions::Ada,
            false => Instructions::Ampere,
        }
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let ctas = self.tile.ctas(extents.rows, self.problem.n);
        let shared_bytes = if self.on_tensor_cores() {
            self.tile.shared_bytes(&self.problem)
        } else {
            0 // Static in the source, within the 48 KB that need no opt-in.
        };
        Launch::of_ctas(ctas, self.threads(), shared_bytes)
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        Some(self.tile.cycles(rows, &self.problem, machine))
    }

    fn threads(&self) -> u32 {
        self.tile.threads()
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
