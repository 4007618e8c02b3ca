//! Checks that the GEMM that streams its weight supports a problem, a norm and a tile.

use super::{GemmProblem, GemmStream, MAX_ROWS_FP8, StreamNorm};
use crate::{
    kernels::gemm::problem::{QUANTIZED_ROWS, check_k_of_fp8},
    tensor::Format,
};

impl GemmStream {
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
            ..
        } = self.problem;
        let tile = self.tile;
        if self.problem.quantized_rows {
            return Err(QUANTIZED_ROWS.to_owned());
        }
        match weight {
            Format::Plain(stored) if stored != dtype => {
                return Err(format!("a weight in {stored}, and x in {dtype}"));
            }
            Format::Plain(_) => {}
            Format::Scaled(scaled) => scaled.check()?,
            Format::E4m3 => self.check_fp8()?,
        }
        if !dtype.has_mma() || !k.is_multiple_of(8) || n == 0 || k == 0 {
            return Err(format!(
                "the streaming GEMM does not support n = {n} and k = {k} in {dtype}; expected k in multiples of 8, in f16 or bf16"
            ));
        }
        let is_centered = self.input_norm().is_some_and(|(_, centered)| centered);
        let mma_n = tile.rows.saturating_add(if is_centered { 8 } else { 0 });
        // Two CTAs of 224 threads per SM have too few registers for accumulators of 136 rows: 128 rows of x, and eight for gamma and beta.
        let has_registers = match self.problem.packed() {
            None => {
                tile.groups <= 2
                    && tile.per_sm <= 2
                    && !(tile.per_sm > 1 && is_centered && tile.rows > 64)
            }
            // A packed weight takes more registers, for two blocks of its converted elements.
            Some(_) => match tile.groups.saturating_mul(tile.per_sm) {
                1 => true,
                2 => tile.per_sm == 1 || tile.rows <= 64,
                3 => mma_n <= 32,
                4 => mma_n <= 32 && (tile.per_sm < 4 || self.multiplies_by_warps()),
                _ => false,
            },
        };
        let is_tile = has_registers
            && tile.rows.is_multiple_of(8)
            && (8..=128).contains(&tile.rows)
            && (1..=8).contains(&tile.splits)
            && (1..=4).contains(&tile.groups)
            && (1..=4).contains(&tile.per_sm);
        // A k above 2²⁰ would overflow the sizes that are computed below.
        if !is_tile || k > 1 << 20 || tile.splits > self.depth().div_ceil(self.step_k()) {
            return Err(format!(
                "{tile:?} is not a tile of the streaming GEMM with k = {k}; expected 8 to 128 rows in multiples of 8, and 1 to 8 splits with a step of {} for each",
                self.step_k() * self.problem.elements_in_16_bits()
            ));
        }
        if self.layout().is_none() {
            return Err(format!(
                "{tile:?} has no room for two stages in shared memory"
            ));
        }
        let fits_gate = n.is_multiple_of(8) && !epilogue.residual;
        if self.problem.gated && !(fits_gate && epilogue.activation.is_some()) {
            return Err(
                "a gate requires an activation, columns in multiples of 8, and no residual"
                    .to_owned(),
            );
        }
        match self.norm {
            StreamNorm::Before { .. } if self.problem.gated || !n.is_multiple_of(8) => {
                Err("a norm after a GEMM requires columns in multiples of 8 and no gate".to_owned())
            }
            StreamNorm::After { .. } if epilogue.residual => {
                Err("a GEMM of normalized rows cannot add a residual".to_owned())
            }
            _ => Ok(()),
        }
    }
    /// Checks the requirements that apply only to operands in E4M3.
    fn check_fp8(&self) -> Result<(), String> {
        let GemmProblem { n, k, epilogue, .. } = self.problem;
        check_k_of_fp8(k)?;
        if self.norm != StreamNorm::None {
            return Err(
                "a norm split between two GEMMs requires operands in f16 or bf16".to_owned(),
            );
        }
        if self.tile.rows > MAX_ROWS_FP8 {
            return Err(format!(
                "{:?} is not a tile of the streaming GEMM of E4M3; expected at most {MAX_ROWS_FP8} rows",
                self.tile
            ));
        }
        match self.problem.to_e4m3 && (epilogue.residual || !n.is_multiple_of(8)) {
            true => Err(format!(
                "a result of {n} columns in E4M3 with {epilogue:?}; expected no residual, and columns in multiples of 8"
            )),
            false => Ok(()),
        }
    }
}
