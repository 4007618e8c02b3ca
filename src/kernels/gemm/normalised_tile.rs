//! The tile of the GEMM with a normalisation prologue, and its resources.

use serde::{Deserialize, Serialize};

use crate::machine::{Hopper, Machine};

/// The tile of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NormalisedTile {
    /// Rows of x in a tile: 8, 16, 24 or 32.
    pub tokens: u32,
    /// Columns of the output, that is rows of the weight, in a tile: 8, 16, 24 or 32.
    pub columns: u32,
    /// Warps of a CTA, which share k (sliced-K): 1 to 16.
    pub warps: u32,
}

/// Elements of k that a warp reads at once: 16 bytes of a row for each of four lanes.
const CHUNK: u32 = 32;
/// The most registers of a thread.
const MOST_REGISTERS: u32 = 255;
/// Registers for all but resident operands: with fewer ptxas spills.
const OTHER_REGISTERS: u32 = 40;
/// Bytes of a warp's accesses to shared memory.
const WARP_BYTES: u32 = 32 * 16;

/// Registers of an SM on every card that has Hopper's instructions.
const REGISTERS: u32 = 1 << 16;
/// The most rows that times were measured at.
const MOST_ROWS: u64 = 32;

impl NormalisedTile {
    /// The tiles that serve a GEMM, fewest tokens first.
    pub(super) fn candidates(n: u32, k: u32, machine: &Machine) -> Vec<Self> {
        let tiles = [16, 32].into_iter();
        tiles
            .filter_map(|tokens| Self::of(tokens, n, k, machine))
            .collect()
    }

    /// The widest tile whose weights are loaded in one round trip to memory; where it has too many CTAs, one
    /// wide enough for all to be resident at once. It has the fewest warps that share k evenly in three chunks.
    fn of(tokens: u32, n: u32, k: u32, machine: &Machine) -> Option<Self> {
        const ONE_TRIP: u32 = 24 << 10;
        // Wider tiles leave the GEMMs of narrow encoders too few CTAs.
        const USUAL_COLUMNS: u32 = 24;
        let few_chunks = |&warps: &u32| k.div_ceil(CHUNK).div_ceil(warps) <= 3;
        let evenly = |&warps: &u32| k.div_ceil(CHUNK).is_multiple_of(warps);
        let all = || (1..=16).filter(few_chunks);
        let warps = all().find(evenly).or_else(|| all().next())?;
        let tile = |columns| Self {
            tokens,
            columns,
            warps,
        };
        let at_once = |t: &Self| n.div_ceil(t.columns) <= machine.sms * t.side_by_side(k, machine);
        let widths = || {
            let widths = [8, 16, 24, 32].into_iter().map(tile);
            widths.filter(|t| t.fits(k)).filter(at_once)
        };
        let is_light = |t: &Self| t.columns <= USUAL_COLUMNS && t.columns * k * 2 <= ONE_TRIP;
        let light = widths().rfind(is_light);
        light.or_else(|| widths().next())
    }

    /// CTAs of an SM, by their registers: resident operands, and some for all else.
    fn side_by_side(self, k: u32, machine: &Machine) -> u32 {
        machine.registers_per_sm / (32 * self.warps * (self.resident(k) + 16))
    }

    /// The most rows: up to two tiles of tokens, if all of their CTAs are resident at once.
    pub fn most_rows(self, n: u32, k: u32, machine: &Machine) -> u64 {
        let room = machine.sms * self.side_by_side(k, machine) / n.div_ceil(self.columns);
        u64::from(room.min(2) * self.tokens).min(MOST_ROWS)
    }

    /// Estimated cycles on a card with Hopper's instructions.
    pub(super) fn cycles(self, rows: u64, n: u32, k: u32, machine: &Machine) -> f64 {
        let Some(Hopper {
            norm_prologue: cost,
            ..
        }) = &machine.costs.hopper
        else {
            return f64::INFINITY;
        };
        let tiles = rows.div_ceil(self.tokens.into()) * u64::from(self.tokens.div_ceil(16));
        let octets = rows.min(self.tokens.into()).div_ceil(8) as f64;
        let blocks = self.blocks(rows, n) as f64 / f64::from(machine.sms);
        let row_bytes = f64::from(k) * 2.0;
        cost.launch
            + (tiles - 1) as f64 * cost.tile
            + blocks.max(1.0) * octets * 8.0 * 2.0 * row_bytes * cost.row_byte
            + f64::from(n) * row_bytes * cost.weight_byte
    }

    /// The part of a symbol that names the tile.
    pub(super) fn name(self) -> String {
        format!(
            "tokens{}_columns{}_warps{}",
            self.tokens, self.columns, self.warps
        )
    }

    /// Chunks of k of each warp.
    const fn chunks(self, k: u32) -> u32 {
        k.div_ceil(CHUNK).div_ceil(self.warps)
    }

    /// Registers of a thread for resident rows, weights and parameters of LayerNorm.
    const fn resident(self, k: u32) -> u32 {
        self.chunks(k) * (self.tokens + (self.columns / 8 + 3) * 4)
    }

    /// Registers that a thread can have.
    fn registers(self) -> u32 {
        MOST_REGISTERS.min(REGISTERS / (32 * self.warps))
    }

    /// Bytes of shared memory for the accumulators that the warps of a CTA sum.
    pub(super) const fn shared_bytes(self) -> u32 {
        self.warps * self.tokens.div_ceil(16) * (self.columns / 8) * WARP_BYTES
    }

    /// CTAs of a launch.
    pub(super) fn blocks(self, rows: u64, n: u32) -> u64 {
        rows.div_ceil(self.tokens.into())
            .saturating_mul(n.div_ceil(self.columns).into())
    }

    /// Whether the tile serves a GEMM of depth k.
    pub(super) fn fits(self, k: u32) -> bool {
        let of_eight = |size: u32| (8..=32).contains(&size) && size.is_multiple_of(8);
        of_eight(self.tokens)
            && of_eight(self.columns)
            && (1..=16).contains(&self.warps)
            && self.chunks(k) <= 16
            && self.resident(k) + OTHER_REGISTERS <= self.registers()
    }
}
