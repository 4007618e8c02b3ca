//! What the kernels over rows share: how rows are cut over accesses, lanes and blocks, and the
//! words for it in parameter lists and symbols.

use super::{Constant, Constants, Fill, Launch, Meta, Param, Role, Tolerance, f32_literal};
use crate::tensor::{DType, Shape, Size, Symbol};

/// Threads of a block where nothing else decides.
pub(super) const STREAM_THREADS: u32 = 256;

/// Bytes of the widest access of a thread.
const ACCESS_BYTES: u32 = 16;

/// Elements of one access where accesses start at multiples of each of `pitches` elements: the
/// most that fit 16 bytes and keep every access aligned to its size. A power of two.
pub(super) fn vector_width(dtype: DType, pitches: &[u32]) -> u32 {
    let widest = ACCESS_BYTES / dtype.bytes() as u32;
    pitches.iter().fold(widest, |n, &pitch| gcd(n, pitch))
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Blocks for `items` at `per_block`: one at least, and what a grid holds at most.
pub(super) fn blocks(items: u64, per_block: u64) -> u32 {
    items.div_ceil(per_block).clamp(1, i32::MAX as u64) as u32
}

/// A launch of [`STREAM_THREADS`] a block, one access of a thread for each of `packs`. The kernels
/// stride over the grid, so a grid that was cut to what the device takes still does all the work.
pub(super) fn stream_launch(packs: u64) -> Launch {
    Launch {
        grid: [blocks(packs, STREAM_THREADS.into()), 1, 1],
        threads: STREAM_THREADS,
        shared_bytes: 0,
    }
}

/// How rows are spread over warps by the kernels that hold whole rows in registers.
///
/// A team of warps takes `x_rows` rows together (TurboTransformers 4.1.2). Narrow rows share one
/// warp, whose shuffles then overlap; a row too wide for the registers of a warp has a block of
/// several warps for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowTeams {
    /// Elements of one access.
    pub vector: u32,
    pub warps_per_row: u32,
    /// Rows that a team reduces together: 1, 2 or 4.
    pub x_rows: u32,
}

impl RowTeams {
    /// Elements that one thread holds at most: with gamma, beta and addresses beside them they fit
    /// the 128 registers with which 16 warps of a multiprocessor run side by side.
    const HELD: u32 = 32;
    /// Warps of a block where a warp is a team. Small blocks spread few rows over more of the
    /// multiprocessors.
    const WARPS: u32 = 4;

    pub fn of(width: u32, dtype: DType) -> Self {
        let vector = vector_width(dtype, &[width]);
        let held = |warps: u32| (width / vector).div_ceil(32 * warps) * vector;
        let mut warps_per_row = 1;
        while warps_per_row < 32 && held(warps_per_row) > Self::HELD {
            warps_per_row *= 2;
        }
        let x_rows = match held(1) {
            0..=8 => 4,
            9..=16 => 2,
            _ => 1,
        };
        Self {
            vector,
            warps_per_row,
            x_rows,
        }
    }

    pub fn threads(self) -> u32 {
        32 * if self.warps_per_row == 1 {
            Self::WARPS
        } else {
            self.warps_per_row
        }
    }

    pub fn launch(self, rows: u64) -> Launch {
        let teams = self.threads() / (32 * self.warps_per_row);
        Launch {
            grid: [blocks(rows, (teams * self.x_rows).into()), 1, 1],
            threads: self.threads(),
            shared_bytes: 0,
        }
    }

    /// What `partials/rows.cu` reads.
    pub fn constants(self, width: u32, dtype: DType) -> Constants {
        Constants::from([
            ("storage", storage(dtype)),
            ("width", width.into()),
            ("vector", self.vector.into()),
            ("x_rows", self.x_rows.into()),
            ("warps_per_row", self.warps_per_row.into()),
        ])
    }
}

/// What `partials/stream.cu` reads.
pub(super) fn stream_constants(dtype: DType, vector: u32) -> Constants {
    Constants::from([("storage", storage(dtype)), ("vector", vector.into())])
}

/// The name of a storage type in `partials/types.cu`.
pub(super) fn storage(dtype: DType) -> Constant {
    match dtype {
        DType::F32 => "float",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::I32 => "int",
        DType::I64 => "long long",
    }
    .into()
}

/// `value` as part of a symbol: `1e-12` is `1em12`, `0.125` is `0p125`.
pub(super) fn word(value: f32) -> String {
    f32_literal(value)
        .trim_end_matches('f')
        .replace('-', "m")
        .replace('.', "p")
}

pub(super) fn read(name: &'static str, dtype: DType, shape: Shape, fill: Fill) -> Param {
    Param {
        name,
        role: Role::Read { dtype, shape, fill },
    }
}

pub(super) fn read_meta(name: &'static str, meta: Meta, shape: Shape) -> Param {
    read(name, meta.dtype(), shape, Fill::Meta(meta))
}

pub(super) fn write(name: &'static str, dtype: DType, shape: Shape) -> Param {
    Param {
        name,
        role: Role::Write { dtype, shape },
    }
}

/// The argument that holds a symbol, under the symbol's name.
pub(super) fn count(symbol: Symbol) -> Param {
    Param {
        name: symbol.name(),
        role: Role::Count(symbol.into()),
    }
}

/// `[symbol, width]`.
pub(super) fn rows_by(symbol: Symbol, width: u32) -> Shape {
    Shape::new([symbol.into(), u64::from(width).into()])
}

/// `[symbol]`.
pub(super) fn one_per(symbol: Symbol) -> Shape {
    Shape::new([symbol.into()])
}

/// `[batch + 1]`.
pub(super) fn offsets() -> Shape {
    Shape::new([&Size::from(Symbol::Batch) + &Size::constant(1)])
}

/// One f32 result rounded once to `dtype`: half a unit in the last place, and half of the smallest
/// subnormal of f16, beside `absolute` for the arithmetic before it.
pub(super) fn rounded_once(dtype: DType, absolute: f32, reason: &'static str) -> Tolerance {
    let (smallest, relative) = match dtype {
        DType::F16 => (3e-8, 4.9e-4),
        DType::BF16 => (0.0, 3.95e-3),
        _ => (0.0, 2.4e-7),
    };
    Tolerance {
        absolute: absolute + smallest,
        relative,
        reason,
    }
}

/// Results that are bit patterns copied from an operand.
pub(super) const COPIED: Tolerance = Tolerance {
    absolute: 0.0,
    relative: 0.0,
    reason: "values are copied, not computed",
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_are_as_wide_as_every_pitch_allows() {
        assert_eq!(vector_width(DType::F16, &[768]), 8);
        assert_eq!(vector_width(DType::F32, &[768]), 4);
        assert_eq!(vector_width(DType::BF16, &[1003]), 1);
        assert_eq!(vector_width(DType::F16, &[12]), 4);
        assert_eq!(vector_width(DType::F16, &[768, 770, 0]), 2);
    }

    #[test]
    fn a_thread_holds_at_most_32_elements_of_a_row() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for width in [
                1, 31, 128, 320, 384, 768, 1000, 1003, 1024, 4096, 8191, 8192, 32768,
            ] {
                let t = RowTeams::of(width, dtype);
                let held = (width / t.vector).div_ceil(32 * t.warps_per_row) * t.vector;
                assert!(held * t.x_rows <= 32, "{width} {dtype}: {t:?}");
                assert!(
                    t.warps_per_row == 1 || t.x_rows == 1,
                    "{width} {dtype}: {t:?}"
                );
                assert!(t.threads() <= 1024);
            }
        }
    }

    #[test]
    fn every_row_has_a_team() {
        for (width, rows, grid, threads) in [
            (768, 1229, 308, 128),   // one row a warp, four warps a block
            (384, 1229, 154, 128),   // two rows a warp
            (128, 1229, 77, 128),    // four rows a warp
            (4096, 1229, 1229, 128), // a block a row
            (8192, 3, 3, 256),
        ] {
            let launch = RowTeams::of(width, DType::F16).launch(rows);
            assert_eq!(
                (launch.grid, launch.threads),
                ([grid, 1, 1], threads),
                "{width}"
            );
        }
    }

    #[test]
    fn numbers_are_words_in_symbols() {
        assert_eq!(word(1e-12), "1em12");
        assert_eq!(word(-0.125), "m0p125");
    }

    #[test]
    fn a_grid_has_at_least_one_block_and_at_most_what_a_device_takes() {
        assert_eq!(blocks(0, 4), 1);
        assert_eq!(blocks(9, 4), 3);
        assert_eq!(blocks(u64::MAX, 1), 0x7fff_ffff);
    }
}
