//! What the kernels over rows share: how rows are cut over accesses, lanes and blocks, and the
//! words for it in parameter lists and symbols.

use serde::{Deserialize, Serialize};

use super::{Constant, Constants, Fill, Launch, Meta, Param, Role, Tolerance, f32_literal};
use crate::{
    machine::Machine,
    tensor::{DType, Shape, Size, Symbol},
};

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

/// How rows are shared out among warps by the kernels that hold whole rows in registers.
///
/// A team of warps takes `x_rows` rows together (TurboTransformers 4.1.2): the shuffles of the X rows
/// overlap, and a team of several warps, which is then a block, meets once for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Teams {
    /// Warps of a team.
    pub warps: u32,
    /// Rows that a team reduces together: 1, 2 or 4.
    pub x_rows: u32,
}

impl Teams {
    /// Elements that one thread holds in what is picked without measuring: with gamma, beta and
    /// addresses beside them they fit the 128 registers with which 16 warps of a multiprocessor run
    /// side by side.
    const USUAL_HELD: u32 = 32;
    /// Elements that one thread can hold, over all rows of its team, without spilling.
    const MAX_HELD: u32 = 64;
    /// Narrow rows that an SM has at once, measured at a width of 384.
    const FEW_ROWS_PER_SM: u64 = 27;
    /// Warps that a multiprocessor of it runs side by side, and 32-bit registers of each of its four parts.
    const WARPS_AT_ONCE: u32 = 64;
    const PART_REGISTERS: u32 = 16384;
    /// Threads that every multiprocessor takes.
    const THREADS_EVERYWHERE: u32 = 1024;

    /// For many rows: narrow ones share a warp, whose shuffles then overlap; one too wide for the
    /// registers of a warp has a block of several for itself.
    pub fn usual(width: u32, dtype: DType) -> Self {
        let held = |warps| Self { warps, x_rows: 1 }.held(width, dtype);
        let mut warps = 1;
        while warps < 32 && held(warps) > Self::USUAL_HELD {
            warps *= 2;
        }
        let x_rows = match held(1) {
            0..=8 => 4,
            9..=16 => 2,
            _ => 1,
        };
        Self { warps, x_rows }
    }

    /// For so few rows that all are on the card at once: one row a team, and as many warps as it has
    /// whole packs for, up to eight, so that the row is read, reduced and written in the fewest steps.
    pub fn for_few_rows(width: u32, dtype: DType) -> Self {
        let packs = width / vector_width(dtype, &[width]);
        let usual = Self::usual(width, dtype);
        match (packs / 32).min(8) {
            warps if warps >= usual.warps => Self { warps, x_rows: 1 },
            _ => usual,
        }
    }

    /// The sharing for every number of rows of which each thread reads one operand: each serves up to its
    /// number of rows, inclusive; the last serves all the rest.
    ///
    /// Several warps a row are the fastest while their rows fill half of the card; then a warp for a row, which has
    /// more rows at once. Measured on an H200 with 16-bit rows of 768 and 1024.
    pub fn by_rows(width: u32, dtype: DType, machine: &Machine) -> Vec<(Option<u64>, Self)> {
        let few = Self::for_few_rows(width, dtype);
        let many = Self::usual(width, dtype);
        let limit = match Self::is_wide(width, dtype) {
            true => few.rows_at_once(width, dtype, machine) / 2,
            false => Self::FEW_ROWS_PER_SM * u64::from(machine.sms),
        };
        match few == many {
            true => vec![(None, few)],
            false => vec![(Some(limit), few), (None, many)],
        }
    }

    /// As [`Teams::by_rows`], with a residual to read beside.
    ///
    /// While all rows are on the card at once, what counts is that they are: a few rows more take as long as
    /// twice as many. So it is the first sharing that has them all at once, the one for few rows before others. When none
    /// has, its small blocks fill the gaps best. Measured on an H200 with 16-bit rows of 768 and 1024.
    pub fn by_rows_of_sums(
        width: u32,
        dtype: DType,
        machine: &Machine,
    ) -> Vec<(Option<u64>, Self)> {
        if !Self::is_wide(width, dtype) {
            return Self::by_rows(width, dtype, machine);
        }
        let few = Self::for_few_rows(width, dtype);
        let usual = Self::usual(width, dtype);
        let two = |teams: Self| Self { x_rows: 2, ..teams };
        let mut ranges: Vec<(Option<u64>, Self)> = Vec::new();
        let mut most = 0;
        for teams in [few, two(few), two(usual)] {
            let rows = teams.rows_at_once(width, dtype, machine);
            if rows > most && teams.fits(width, dtype) {
                ranges.push((Some(rows), teams));
                most = rows;
            }
        }
        ranges.push((None, few));
        ranges
    }

    /// Whether few rows have more than two warps each, of 16-bit elements: what the choices by rows were measured on.
    fn is_wide(width: u32, dtype: DType) -> bool {
        dtype != DType::F32 && Self::for_few_rows(width, dtype).warps > 2
    }

    /// Registers of a thread, as a compiler that is told to hold to them can: its elements, gamma and beta as they
    /// are stored, and for addresses and sums eight and eight a row.
    fn registers(self, width: u32, dtype: DType) -> u32 {
        let vector = vector_width(dtype, &[width]);
        let held = self.held(width, dtype);
        let of_pack = (vector * dtype.bytes() as u32).div_ceil(4);
        let all = held * self.x_rows + 2 * (held / vector) * of_pack + 8 + 8 * self.x_rows;
        all.next_multiple_of(8)
    }

    /// Blocks that a multiprocessor has at once.
    fn blocks_at_once(self, width: u32, dtype: DType) -> u32 {
        let of_part = Self::PART_REGISTERS / (32 * self.registers(width, dtype));
        let warps = (4 * of_part).min(Self::WARPS_AT_ONCE);
        (warps / (self.threads() / 32)).clamp(1, 32)
    }

    /// Rows that a card has at once.
    fn rows_at_once(self, width: u32, dtype: DType, machine: &Machine) -> u64 {
        let of_block = self.threads() / (32 * self.warps) * self.x_rows;
        u64::from(machine.sms) * u64::from(self.blocks_at_once(width, dtype) * of_block)
    }

    /// Blocks that the compiler is to leave room for on a multiprocessor: as many as are counted upon, and no
    /// more than every card takes.
    pub(super) fn least_blocks(self, width: u32, dtype: DType) -> u32 {
        let most = match self.x_rows {
            1 => (Self::THREADS_EVERYWHERE / self.threads()).max(1),
            // Held to the count, some kernels of several rows spill; they keep to it by themselves.
            _ => 1,
        };
        self.blocks_at_once(width, dtype).min(most)
    }

    /// Every sharing of one, two or four rows among one to eight warps in which each warp has work and
    /// no thread spills, and the usual one.
    pub fn candidates(width: u32, dtype: DType) -> Vec<Self> {
        let usual = Self::usual(width, dtype);
        let packs = width / vector_width(dtype, &[width]);
        let mut all: Vec<Self> = [1, 2, 3, 4, 6, 8]
            .into_iter()
            .flat_map(|warps| [1, 2, 4].map(|x_rows| Self { warps, x_rows }))
            .filter(|teams| (teams.warps - 1) * 32 < packs && teams.fits(width, dtype))
            .collect();
        if !all.contains(&usual) {
            all.push(usual);
        }
        all
    }

    /// Whether a kernel that shares rows so can be generated.
    pub fn fits(self, width: u32, dtype: DType) -> bool {
        let held = || self.held(width, dtype).saturating_mul(self.x_rows);
        (1..=32).contains(&self.warps)
            && [1, 2, 4].contains(&self.x_rows)
            && (self == Self::usual(width, dtype) || held() <= Self::MAX_HELD)
    }

    /// The part of a symbol that tells sharings apart: nothing for the usual one.
    pub(super) fn suffix(self, width: u32, dtype: DType) -> String {
        if self == Self::usual(width, dtype) {
            return String::new();
        }
        format!("_warps{}_x{}", self.warps, self.x_rows)
    }

    /// Elements of one row that a thread holds.
    fn held(self, width: u32, dtype: DType) -> u32 {
        let vector = vector_width(dtype, &[width]);
        (width / vector).div_ceil(32 * self.warps) * vector
    }

    /// Threads of a block. Where a warp is a team there are four in a block: small blocks spread few
    /// rows over more of the multiprocessors.
    pub(super) fn threads(self) -> u32 {
        32 * if self.warps == 1 { 4 } else { self.warps }
    }

    pub(super) fn launch(self, rows: u64) -> Launch {
        let teams = self.threads() / (32 * self.warps);
        Launch {
            grid: [blocks(rows, (teams * self.x_rows).into()), 1, 1],
            threads: self.threads(),
            shared_bytes: 0,
        }
    }

    /// What `partials/rows.cu` reads.
    pub(super) fn constants(self, width: u32, dtype: DType) -> Constants {
        Constants::from([
            ("storage", storage(dtype)),
            ("width", width.into()),
            ("vector", vector_width(dtype, &[width]).into()),
            ("x_rows", self.x_rows.into()),
            ("warps_per_row", self.warps.into()),
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
    use crate::machine::testing::hopper;

    #[test]
    fn accesses_are_as_wide_as_every_pitch_allows() {
        assert_eq!(vector_width(DType::F16, &[768]), 8);
        assert_eq!(vector_width(DType::F32, &[768]), 4);
        assert_eq!(vector_width(DType::BF16, &[1003]), 1);
        assert_eq!(vector_width(DType::F16, &[12]), 4);
        assert_eq!(vector_width(DType::F16, &[768, 770, 0]), 2);
    }

    const WIDTHS: [u32; 13] = [
        1, 31, 128, 320, 384, 768, 1000, 1003, 1024, 4096, 8191, 8192, 32768,
    ];
    const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    #[test]
    fn a_thread_holds_at_most_32_elements_of_a_row_where_nothing_was_measured() {
        for dtype in DTYPES {
            for width in WIDTHS {
                let usual = Teams::usual(width, dtype);
                let held = usual.held(width, dtype) * usual.x_rows;
                assert!(held <= 32, "{width} {dtype}: {usual:?}");
                assert!(
                    usual.warps == 1 || usual.x_rows == 1,
                    "{width} {dtype}: {usual:?}"
                );
                for (_, teams) in Teams::by_rows(width, dtype, &hopper()) {
                    assert!(teams.fits(width, dtype), "{width} {dtype}: {teams:?}");
                    assert!(teams.held(width, dtype) * teams.x_rows <= held.max(8));
                }
            }
        }
    }

    #[test]
    fn candidates_are_distinct_possible_and_have_the_usual_sharing_among_them() {
        for dtype in DTYPES {
            for width in WIDTHS {
                let all = Teams::candidates(width, dtype);
                assert!(all.contains(&Teams::usual(width, dtype)), "{width} {dtype}");
                for (i, teams) in all.iter().enumerate() {
                    assert!(teams.fits(width, dtype), "{width} {dtype}: {teams:?}");
                    assert!(
                        !all[..i].contains(teams),
                        "{width} {dtype}: {teams:?} twice"
                    );
                }
            }
        }
        let f16 = |warps, x_rows| Teams { warps, x_rows };
        // 96 packs: up to three warps have some, and four rows of 24 elements are too many.
        assert_eq!(
            Teams::candidates(768, DType::F16),
            [
                f16(1, 1),
                f16(1, 2),
                f16(2, 1),
                f16(2, 2),
                f16(2, 4),
                f16(3, 1),
                f16(3, 2),
                f16(3, 4)
            ]
        );
    }

    #[test]
    fn teams_that_no_kernel_can_have_do_not_fit() {
        for (warps, x_rows) in [
            (0, 1),
            (33, 1),
            (1, 0),
            (1, 3),
            (1, 8),
            (1, 4),
            (u32::MAX, 1),
        ] {
            let teams = Teams { warps, x_rows };
            assert!(!teams.fits(768, DType::F16), "{teams:?}");
        }
    }

    #[test]
    fn few_rows_have_as_many_warps_each_as_they_have_packs_for() {
        let few = |width, dtype| Teams::for_few_rows(width, dtype).warps;
        assert_eq!(few(768, DType::F16), 3);
        assert_eq!(few(1024, DType::F16), 4);
        assert_eq!(few(768, DType::F32), 6);
        assert_eq!(few(8192, DType::F16), 8);
        // One warp takes 31 elements, of four rows at a time.
        assert_eq!(
            Teams::by_rows(31, DType::F16, &hopper()),
            [(
                None,
                Teams {
                    warps: 1,
                    x_rows: 4
                }
            )]
        );
    }

    #[test]
    fn the_first_sharing_that_has_all_rows_at_once_takes_them() {
        let of_sums = |width| {
            let ranges = Teams::by_rows_of_sums(width, DType::F16, &hopper()).into_iter();
            ranges
                .map(|(rows, teams)| (rows, teams.warps, teams.x_rows))
                .collect::<Vec<_>>()
        };
        let sms = u64::from(hopper().sms);
        // 32 registers and 21 blocks of three warps, 48 and 13, 96 and 5 of four warps.
        assert_eq!(
            of_sums(768),
            [
                (Some(sms * 21), 3, 1),
                (Some(sms * 13 * 2), 3, 2),
                (Some(sms * 5 * 4 * 2), 1, 2),
                (None, 3, 1)
            ]
        );
        assert_eq!(
            of_sums(1024),
            [
                (Some(sms * 16), 4, 1),
                (Some(sms * 10 * 2), 4, 2),
                (Some(sms * 4 * 4 * 2), 1, 2),
                (None, 4, 1)
            ]
        );
        for dtype in DTYPES {
            for width in WIDTHS {
                let ranges = Teams::by_rows_of_sums(width, dtype, &hopper());
                let limits: Vec<u64> = ranges.iter().map_while(|(rows, _)| *rows).collect();
                assert_eq!(limits.len() + 1, ranges.len(), "{width} {dtype}");
                assert!(limits.is_sorted_by(|a, b| a < b), "{width} {dtype}");
                for (_, teams) in ranges {
                    assert!(teams.fits(width, dtype), "{width} {dtype}: {teams:?}");
                }
            }
        }
    }

    #[test]
    fn without_a_residual_a_warp_takes_a_row_where_rows_fill_half_of_the_card() {
        let alone = |width| Teams::by_rows(width, DType::BF16, &hopper());
        let teams = |warps| Teams { warps, x_rows: 1 };
        let sms = u64::from(hopper().sms);
        assert_eq!(
            alone(768),
            [(Some(sms * 21 / 2), teams(3)), (None, teams(1))]
        );
        assert_eq!(alone(1024), [(Some(sms * 8), teams(4)), (None, teams(1))]);
        assert_eq!(
            Teams::by_rows(384, DType::F16, &hopper())[0].0,
            Some(sms * 27)
        );
    }

    #[test]
    fn the_compiler_is_not_asked_for_more_threads_than_every_card_takes() {
        for dtype in DTYPES {
            for width in WIDTHS {
                for teams in Teams::candidates(width, dtype) {
                    let threads = teams.least_blocks(width, dtype) * teams.threads();
                    assert!((1..=1024).contains(&threads), "{width} {dtype}: {teams:?}");
                }
            }
        }
    }

    #[test]
    fn every_row_has_a_team() {
        let usual = |width| Teams::usual(width, DType::F16);
        for (teams, rows, grid, threads) in [
            (usual(768), 1229, 308, 128),   // one row a warp, four warps a block
            (usual(384), 1229, 154, 128),   // two rows a warp
            (usual(128), 1229, 77, 128),    // four rows a warp
            (usual(4096), 1229, 1229, 128), // a block a row
            (usual(8192), 3, 3, 256),
            (
                Teams {
                    warps: 3,
                    x_rows: 1,
                },
                40,
                40,
                96,
            ),
            (
                Teams {
                    warps: 2,
                    x_rows: 4,
                },
                41,
                11,
                64,
            ),
        ] {
            let launch = teams.launch(rows);
            assert_eq!(
                (launch.grid, launch.threads),
                ([grid, 1, 1], threads),
                "{teams:?}"
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
