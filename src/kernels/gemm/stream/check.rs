//! Descriptions that the GEMM which streams its weight does not support.

use super::{super::UNSCALED, GemmStream, StreamNorm};
use crate::tensor::Format;

impl GemmStream {
    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), String> {
        let Self { n, k, dtype, .. } = *self;
        let tile = self.tile;
        match self.weight {
            Format::Plain(stored) if stored != dtype => {
                return Err(format!("a weight in {stored}, and x in {dtype}"));
            }
            Format::Plain(_) => {}
            Format::Scaled(scaled) => scaled.check()?,
            Format::E4m3 => return Err(UNSCALED.to_owned()),
        }
        if !dtype.has_mma() || !k.is_multiple_of(8) || n == 0 || k == 0 {
            return Err(format!(
                "the streaming GEMM does not support n = {n} and k = {k} in {dtype}; expected k in multiples of 8, in f16 or bf16"
            ));
        }
        let is_centred = self.input_norm().is_some_and(|(_, centred)| centred);
        let mma_n = tile.rows.saturating_add(if is_centred { 8 } else { 0 });
        // Two CTAs of 224 threads with accumulators of 136 rows would spill.
        let has_registers = match self.packed() {
            None => {
                tile.groups <= 2
                    && tile.per_sm <= 2
                    && !(tile.per_sm > 1 && is_centred && tile.rows > 64)
            }
            // Two blocks of the converted weight are in registers, too.
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
        // A greater depth would overflow the sizes below.
        if !is_tile || k > 1 << 20 || tile.splits > k.div_ceil(self.step_k()) {
            return Err(format!(
                "{tile:?} is not a tile of the streaming GEMM with k = {k}; expected 8 to 128 rows in multiples of 8, and 1 to 8 splits with a step of {} for each",
                self.step_k()
            ));
        }
        if self.layout().is_none() {
            return Err(format!(
                "{tile:?} has no room for two stages in shared memory"
            ));
        }
        let fits_gate = n.is_multiple_of(8) && !self.epilogue.residual;
        if self.gated && !(fits_gate && self.epilogue.activation.is_some()) {
            return Err(
                "a gate requires an activation, columns in multiples of 8, and no residual"
                    .to_owned(),
            );
        }
        match self.norm {
            StreamNorm::Before { .. } if self.gated || !n.is_multiple_of(8) => {
                Err("a norm after a GEMM requires columns in multiples of 8 and no gate".to_owned())
            }
            StreamNorm::After { .. } if self.epilogue.residual => {
                Err("a GEMM of normalised rows cannot add a residual".to_owned())
            }
            _ => Ok(()),
        }
    }
}
