//! How the GEMM that normalises its rows on load is cut, and what that takes.

use serde::{Deserialize, Serialize};

use crate::machine::{Hopper, Machine};

/// How the kernel is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NormalisedTile {
    /// Rows of x in a tile: 8, 16, 24 or 32.
    pub tokens: u32,
    /// Columns of the output, that is rows of the weight, in a tile: 8, 16, 24 or 32.
    pub columns: u32,
    /// Warps of a block, which share out k: 1 to 16.
    pub warps: u32,
}

/// Elements of k that a warp reads at once: 16 bytes of a row for each of four lanes.
const CHUNK: u32 = 32;
/// Registers of a lane, at most.
const MOST_REGISTERS: u32 = 255;
/// Of them, for all but what is held: with fewer ptxas spills.
const OTHER_REGISTERS: u32 = 40;
/// Bytes of a warp's accesses to shared memory.
const WARP_BYTES: u32 = 32 * 16;

/// Registers of an SM on every card that has the instructions.
const REGISTERS: u32 = 1 << 16;
/// Rows that times were measured of.
const MOST_ROWS: u64 = 32;

impl NormalisedTile {
    /// The tiles for a GEMM, fewest tokens first.
    pub(super) fn candidates(n: u32, k: u32, machine: &Machine) -> Vec<Self> {
        let tiles = [16, 32].into_iter();
        tiles
            .filter_map(|tokens| Self::of(tokens, n, k, machine))
            .collect()
    }

    /// As wide a tile as loads its weights in one trip to memory, or where there would be too many
    /// blocks of it, as wide as needed for all to be there at once; by the fewest warps that share out k
    /// evenly in three chunks.
    fn of(tokens: u32, n: u32, k: u32, machine: &Machine) -> Option<Self> {
        const ONE_TRIP: u32 = 24 << 10;
        // Wider ones leave the GEMMs of narrow encoders too few blocks.
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

    /// Blocks of a multiprocessor, by their registers: what is held, and some for all else.
    fn side_by_side(self, k: u32, machine: &Machine) -> u32 {
        machine.registers_per_sm / (32 * self.warps * (self.held(k) + 16))
    }

    /// Up to two tiles of tokens, if all of their blocks are there at once.
    pub fn most_rows(self, n: u32, k: u32, machine: &Machine) -> u64 {
        let room = machine.sms * self.side_by_side(k, machine) / n.div_ceil(self.columns);
        u64::from(room.min(2) * self.tokens).min(MOST_ROWS)
    }

    /// Estimated cycles on a card with these instructions.
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

    /// As in symbols.
    pub(super) fn name(self) -> String {
        format!(
            "tokens{}_columns{}_warps{}",
            self.tokens, self.columns, self.warps
        )
    }

    /// Chunks of k of a warp.
    const fn chunks(self, k: u32) -> u32 {
        k.div_ceil(CHUNK).div_ceil(self.warps)
    }

    /// Registers for a lane's part of rows, weights and parameters of LayerNorm.
    const fn held(self, k: u32) -> u32 {
        self.chunks(k) * (self.tokens + (self.columns / 8 + 3) * 4)
    }

    /// Registers that a lane can have.
    fn registers(self) -> u32 {
        MOST_REGISTERS.min(REGISTERS / (32 * self.warps))
    }

    /// For what the warps of a block add up.
    pub(super) const fn shared_bytes(self) -> u32 {
        self.warps * self.tokens.div_ceil(16) * (self.columns / 8) * WARP_BYTES
    }

    /// Blocks of a launch.
    pub(super) fn blocks(self, rows: u64, n: u32) -> u64 {
        rows.div_ceil(self.tokens.into())
            .saturating_mul(n.div_ceil(self.columns).into())
    }

    /// Whether a GEMM of depth k can be cut so.
    pub(super) fn fits(self, k: u32) -> bool {
        let of_eight = |size: u32| (8..=32).contains(&size) && size.is_multiple_of(8);
        of_eight(self.tokens)
            && of_eight(self.columns)
            && (1..=16).contains(&self.warps)
            && self.chunks(k) <= 16
            && self.held(k) + OTHER_REGISTERS <= self.registers()
    }
}
