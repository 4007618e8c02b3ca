//! How the GEMM that normalises its rows on load is cut, and what that takes.

use serde::{Deserialize, Serialize};

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

/// Multiprocessors of an H100 or H200 SXM, and registers of each.
pub(super) const SMS: u32 = 132;
const REGISTERS: u32 = 1 << 16;
/// Rows that times were measured of.
pub(super) const MOST_ROWS: u64 = 32;

/// What times are estimated for: an H200. Fitted to runs of two encoders at 5 to 32 rows, of which the difference
/// to launches apart is what is measured of a kernel. In cycles, and cycles a byte.
pub(super) mod machine {
    pub const FILL: f64 = 1905.0;
    /// Of a further tile of 16 rows, whether there are rows in it or not.
    pub const TILE: f64 = 600.0;
    /// Of x and the residual, to one multiprocessor.
    pub const ROWS: f64 = 0.018;
    /// Of the weight, to all together.
    pub const WEIGHT: f64 = 0.00034;
    /// LayerNorm as a launch of its own.
    pub const APART: f64 = 1755.0;
}

impl NormalisedTile {
    /// The tiles for a GEMM, fewest tokens first.
    pub(super) fn candidates(n: u32, k: u32) -> Vec<Self> {
        let tiles = [16, 32].into_iter();
        tiles.filter_map(|tokens| Self::of(tokens, n, k)).collect()
    }

    /// As wide a tile as loads its weights in one trip to memory, or where there would be too many
    /// blocks of it, as wide as needed for all to be there at once; by the fewest warps that share out k
    /// evenly in three chunks.
    fn of(tokens: u32, n: u32, k: u32) -> Option<Self> {
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
        let at_once = |t: &Self| n.div_ceil(t.columns) <= SMS * t.side_by_side(k);
        let widths = || {
            let widths = [8, 16, 24, 32].into_iter().map(tile);
            widths.filter(|t| t.fits(k)).filter(at_once)
        };
        let is_light = |t: &Self| t.columns <= USUAL_COLUMNS && t.columns * k * 2 <= ONE_TRIP;
        let light = widths().rfind(is_light);
        light.or_else(|| widths().next())
    }

    /// Blocks of a multiprocessor, by their registers: what is held, and some for all else.
    pub(super) const fn side_by_side(self, k: u32) -> u32 {
        REGISTERS / (32 * self.warps * (self.held(k) + 16))
    }

    /// Up to two tiles of tokens, if all of their blocks are there at once.
    pub(super) fn most_rows(self, n: u32, k: u32) -> u64 {
        let room = SMS * self.side_by_side(k) / n.div_ceil(self.columns);
        u64::from(room.min(2) * self.tokens).min(MOST_ROWS)
    }

    /// Estimated cycles at 1755 MHz, comparable with those of [`FewRows`](super::FewRows).
    pub(super) fn cycles(self, rows: u64, n: u32, k: u32) -> f64 {
        let tiles = rows.div_ceil(self.tokens.into()) * u64::from(self.tokens.div_ceil(16));
        let octets = rows.min(self.tokens.into()).div_ceil(8) as f64;
        let blocks = self.blocks(rows, n) as f64 / f64::from(SMS);
        let row_bytes = f64::from(k) * 2.0;
        machine::FILL
            + (tiles - 1) as f64 * machine::TILE
            + blocks.max(1.0) * octets * 8.0 * 2.0 * row_bytes * machine::ROWS
            + f64::from(n) * row_bytes * machine::WEIGHT
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
