//! Utilities of the kernels that process rows: the distribution of rows over accesses, lanes and CTAs, and the corresponding parts of
//! parameter lists and symbols.

use serde::{Deserialize, Serialize};

use super::{Constant, Constants, Fill, Launch, Param, Role, Tolerance, f32_literal};
use crate::{
    machine::Machine,
    ops::BatchInput,
    tensor::{DType, Element, Shape, Size, Symbol},
};

/// Default number of threads per CTA.
pub(super) const STREAM_THREADS: u32 = 256;

/// Bytes of a thread's widest access.
const ACCESS_BYTES: u32 = 16;

/// Elements per access. Accesses start at multiples of the `pitches`, which are in elements. The result is the largest power of two that
/// fits 16 bytes and keeps every access aligned to its size.
pub(super) fn vector_width(dtype: DType, pitches: &[u32]) -> u32 {
    let widest = ACCESS_BYTES / dtype.bytes() as u32;
    pitches.iter().fold(widest, |n, &pitch| gcd(n, pitch))
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Number of CTAs for `items` with `per_block` items per CTA, clamped to the range from 1 to the max grid.
pub(super) fn blocks(items: u64, per_block: u64) -> u32 {
    items.div_ceil(per_block).clamp(1, i32::MAX as u64) as u32
}

/// Returns a launch with one pack (the elements of one vector access) per thread and [`STREAM_THREADS`] threads per CTA. The kernels are
/// grid-stride loops, so a grid that is clamped to the device's limit still covers all packs.
pub(super) fn stream_launch(packs: u64) -> Launch {
    Launch {
        grid: [blocks(packs, STREAM_THREADS.into()), 1, 1],
        threads: STREAM_THREADS,
        shared_bytes: 0,
    }
}

/// Distribution of rows over warps in kernels that keep whole rows in registers.
///
/// A team of warps processes `x_rows` rows at a time, so that the shuffles of different rows overlap (TurboTransformers 4.1.2). A team of
/// several warps is a whole CTA, whose warps exchange partial results once for all rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Teams {
    /// Warps per team.
    pub warps: u32,
    /// Rows that a team reduces at the same time: 1, 2 or 4.
    pub x_rows: u32,
}

impl Teams {
    /// Max elements per thread in the default teams. The elements, gamma, beta and addresses fit in 128 registers, so that an SM holds 16
    /// warps.
    const DEFAULT_PER_THREAD: u32 = 32;
    /// Max elements per thread, over all rows of its team, without spills.
    const MAX_PER_THREAD: u32 = 64;
    /// Max number of rows per SM for which [`by_rows`](Self::by_rows) selects [`for_few_rows`](Self::for_few_rows) if rows are not wide
    /// (`is_wide`). The limit was measured at a width of 384.
    const FEW_ROWS_PER_SM: u64 = 27;
    /// Max resident warps per SM.
    const WARPS_PER_SM: u32 = 64;
    /// Number of 32-bit registers in each of the four partitions of an SM.
    const REGISTERS_PER_PARTITION: u32 = 16384;
    /// Resident threads per SM that every GPU supports.
    const THREADS_PER_SM: u32 = 1024;

    /// Returns the default for many rows. A warp processes several narrow rows, so that their shuffles overlap. A CTA of several warps
    /// processes a row that is too wide for the registers of a warp.
    pub fn usual(width: u32, dtype: DType) -> Self {
        let elements = |warps| Self { warps, x_rows: 1 }.per_thread(width, dtype);
        let mut warps = 1;
        while warps < 32 && elements(warps) > Self::DEFAULT_PER_THREAD {
            warps *= 2;
        }
        let x_rows = match elements(1) {
            0..=8 => 4,
            9..=16 => 2,
            _ => 1,
        };
        Self { warps, x_rows }
    }

    /// Returns the teams for launches whose rows are all resident at once. To finish a row in the fewest steps, a team has one row and up
    /// to eight warps, in which each lane has at least one pack (the elements of one vector access). Returns [`Teams::usual`] if it has
    /// more warps, or if a row has fewer than 32 packs.
    pub fn for_few_rows(width: u32, dtype: DType) -> Self {
        let packs = width / vector_width(dtype, &[width]);
        let usual = Self::usual(width, dtype);
        match (packs / 32).min(8) {
            warps if warps >= usual.warps => Self { warps, x_rows: 1 },
            _ => usual,
        }
    }

    /// Returns the default dispatch by number of rows for kernels that read one row operand. Each entry is a max number of rows (inclusive)
    /// and the teams for launches up to this number. The last entry has no max.
    ///
    /// Several warps per row are fastest if the rows fill at most half of the GPU. With more rows, one warp per row is faster, because more
    /// rows are resident. This was measured on an H200 with 16-bit rows of 768 and 1024 elements.
    pub fn by_rows(width: u32, dtype: DType, machine: &Machine) -> Vec<(Option<u64>, Self)> {
        let few = Self::for_few_rows(width, dtype);
        let many = Self::usual(width, dtype);
        let limit = match Self::is_wide(width, dtype) {
            true => few.resident_rows(width, dtype, machine) / 2,
            false => Self::FEW_ROWS_PER_SM * u64::from(machine.sms),
        };
        match few == many {
            true => vec![(None, few)],
            false => vec![(Some(limit), few), (None, many)],
        }
    }

    /// Returns the default dispatch by number of rows, like [`Teams::by_rows`], for kernels that also read a residual.
    ///
    /// If slightly more rows are launched than are resident at once, a second wave doubles the time. Three kinds of teams are therefore
    /// tried in this order: those for few rows, the same with two rows each, and the usual teams with two rows each. The first kind that
    /// keeps all rows of the launch resident is selected. If there is none, the teams for few rows are selected, because their small CTAs
    /// leave the smallest tail. For f32 and for narrow rows, the dispatch is that of [`Teams::by_rows`].
    pub fn by_rows_with_residual(
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
            let rows = teams.resident_rows(width, dtype, machine);
            if rows > most && teams.fits(width, dtype) {
                ranges.push((Some(rows), teams));
                most = rows;
            }
        }
        ranges.push((None, few));
        ranges
    }

    /// Returns whether elements have 16 bits and the teams for few rows have more than two warps. The limits of the dispatch by resident
    /// rows were measured on such rows.
    fn is_wide(width: u32, dtype: DType) -> bool {
        dtype != DType::F32 && Self::for_few_rows(width, dtype).warps > 2
    }

    /// Number of registers per thread to which the compiler can be limited. The registers hold the row's elements, gamma and beta in their
    /// storage type, addresses (eight registers) and statistics (eight registers per row).
    fn registers(self, width: u32, dtype: DType) -> u32 {
        let vector = vector_width(dtype, &[width]);
        let elements = self.per_thread(width, dtype);
        let pack_registers = (vector * dtype.bytes() as u32).div_ceil(4);
        let all =
            elements * self.x_rows + 2 * (elements / vector) * pack_registers + 8 + 8 * self.x_rows;
        all.next_multiple_of(8)
    }

    /// Resident CTAs per SM.
    fn ctas_per_sm(self, width: u32, dtype: DType) -> u32 {
        let warps_per_partition =
            Self::REGISTERS_PER_PARTITION / (32 * self.registers(width, dtype));
        let warps = (4 * warps_per_partition).min(Self::WARPS_PER_SM);
        (warps / (self.threads() / 32)).clamp(1, 32)
    }

    /// Resident rows on the whole GPU.
    fn resident_rows(self, width: u32, dtype: DType, machine: &Machine) -> u64 {
        let rows_per_cta = self.threads() / (32 * self.warps) * self.x_rows;
        u64::from(machine.sms) * u64::from(self.ctas_per_sm(width, dtype) * rows_per_cta)
    }

    /// Min CTAs per SM for `__launch_bounds__`: the number that [`Teams::resident_rows`] assumes, but at most the number that fits on every
    /// GPU.
    pub(super) fn min_ctas_per_sm(self, width: u32, dtype: DType) -> u32 {
        let most = match self.x_rows {
            1 => (Self::THREADS_PER_SM / self.threads()).max(1),
            // Kernels with several rows per team use few registers anyway, and a bound above 1 makes some of them spill.
            _ => 1,
        };
        self.ctas_per_sm(width, dtype).min(most)
    }

    /// Returns the default teams, and all other teams of one to eight warps and one, two or four rows in which each warp has work and no
    /// thread spills registers.
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

    /// Returns whether a kernel with these teams can be generated.
    pub fn fits(self, width: u32, dtype: DType) -> bool {
        let elements = || self.per_thread(width, dtype).saturating_mul(self.x_rows);
        (1..=32).contains(&self.warps)
            && [1, 2, 4].contains(&self.x_rows)
            && (self == Self::usual(width, dtype) || elements() <= Self::MAX_PER_THREAD)
    }

    /// Part of a kernel's symbol that names the teams; empty for the default teams.
    pub(super) fn suffix(self, width: u32, dtype: DType) -> String {
        if self == Self::usual(width, dtype) {
            return String::new();
        }
        format!("_warps{}_x{}", self.warps, self.x_rows)
    }

    /// Number of elements of one row that a thread holds.
    fn per_thread(self, width: u32, dtype: DType) -> u32 {
        let vector = vector_width(dtype, &[width]);
        (width / vector).div_ceil(32 * self.warps) * vector
    }

    /// Threads per CTA. If teams have one warp, a CTA has four teams: small CTAs spread few rows over more SMs.
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

    /// Constants of `partials/rows.cu`.
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

/// Constants of `partials/stream.cu`.
pub(super) fn stream_constants(dtype: DType, vector: u32) -> Constants {
    Constants::from([("storage", storage(dtype)), ("vector", vector.into())])
}

/// Name of a storage type in `partials/types.cu`.
pub(super) fn storage(dtype: DType) -> Constant {
    match dtype {
        DType::F32 => "float",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
    }
    .into()
}

/// Returns `value` as part of a kernel's symbol: `1em12` for `1e-12`, `0p125` for `0.125`.
pub(super) fn word(value: f32) -> String {
    f32_literal(value)
        .trim_end_matches('f')
        .replace('-', "m")
        .replace('.', "p")
}

pub(super) fn read(
    name: &'static str,
    element: impl Into<Element>,
    shape: Shape,
    fill: Fill,
) -> Param {
    let element = element.into();
    Param {
        name,
        role: Role::Read {
            element,
            shape,
            fill,
        },
    }
}

pub(super) fn read_meta(name: &'static str, meta: BatchInput, shape: Shape) -> Param {
    read(name, meta.element(), shape, Fill::BatchInput(meta))
}

pub(super) fn write(name: &'static str, element: impl Into<Element>, shape: Shape) -> Param {
    let element = element.into();
    Param {
        name,
        role: Role::Write { element, shape },
    }
}

/// Returns a scalar parameter with the name and value of `symbol`.
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

/// Tolerance of an f32 result that is rounded once to `dtype`. It is the sum of half a unit in the last place, half of the smallest
/// subnormal of f16, and `absolute` for the preceding arithmetic.
pub(super) fn rounded_once(dtype: DType, absolute: f32, reason: &'static str) -> Tolerance {
    let (smallest, relative) = match dtype {
        DType::F16 => (3e-8, 4.9e-4),
        DType::BF16 => (0.0, 3.95e-3),
        DType::F32 => (0.0, 2.4e-7),
    };
    Tolerance {
        absolute: absolute + smallest,
        relative,
        reason,
    }
}

/// Tolerance of zero, for results that are exact copies of an operand.
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
                let elements = usual.per_thread(width, dtype) * usual.x_rows;
                assert!(elements <= 32, "{width} {dtype}: {usual:?}");
                assert!(
                    usual.warps == 1 || usual.x_rows == 1,
                    "{width} {dtype}: {usual:?}"
                );
                for (_, teams) in Teams::by_rows(width, dtype, &hopper()) {
                    assert!(teams.fits(width, dtype), "{width} {dtype}: {teams:?}");
                    assert!(teams.per_thread(width, dtype) * teams.x_rows <= elements.max(8));
                }
            }
        }
    }

    #[test]
    fn candidates_are_distinct_and_valid_and_include_the_default() {
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
        // A row has 96 packs of 8 elements, enough for the lanes of three warps. In a team of one warp, a lane has 24 elements per row, so
        // four rows exceed the limit of 64 elements per thread.
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
    fn invalid_teams_do_not_fit() {
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
    fn few_rows_get_one_warp_per_32_packs() {
        let few = |width, dtype| Teams::for_few_rows(width, dtype).warps;
        assert_eq!(few(768, DType::F16), 3);
        assert_eq!(few(1024, DType::F16), 4);
        assert_eq!(few(768, DType::F32), 6);
        assert_eq!(few(8192, DType::F16), 8);
        // Rows of 31 elements fit in one warp, four rows at a time.
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
    fn the_first_teams_that_keep_all_rows_resident_are_chosen() {
        let with_residual = |width| {
            let ranges = Teams::by_rows_with_residual(width, DType::F16, &hopper()).into_iter();
            ranges
                .map(|(rows, teams)| (rows, teams.warps, teams.x_rows))
                .collect::<Vec<_>>()
        };
        let sms = u64::from(hopper().sms);
        // An SM holds 21 CTAs of three warps with 32 registers per thread, 13 CTAs of three warps with 48 registers, and 5 CTAs of four
        // warps with 96 registers.
        assert_eq!(
            with_residual(768),
            [
                (Some(sms * 21), 3, 1),
                (Some(sms * 13 * 2), 3, 2),
                (Some(sms * 5 * 4 * 2), 1, 2),
                (None, 3, 1)
            ]
        );
        assert_eq!(
            with_residual(1024),
            [
                (Some(sms * 16), 4, 1),
                (Some(sms * 10 * 2), 4, 2),
                (Some(sms * 4 * 4 * 2), 1, 2),
                (None, 4, 1)
            ]
        );
        for dtype in DTYPES {
            for width in WIDTHS {
                let ranges = Teams::by_rows_with_residual(width, dtype, &hopper());
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
    fn without_a_residual_rows_that_fill_half_of_the_gpu_get_one_warp_each() {
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
    fn min_ctas_never_exceed_the_resident_threads_of_any_gpu() {
        for dtype in DTYPES {
            for width in WIDTHS {
                for teams in Teams::candidates(width, dtype) {
                    let threads = teams.min_ctas_per_sm(width, dtype) * teams.threads();
                    assert!((1..=1024).contains(&threads), "{width} {dtype}: {teams:?}");
                }
            }
        }
    }

    #[test]
    fn every_row_has_a_team() {
        let usual = |width| Teams::usual(width, DType::F16);
        for (teams, rows, grid, threads) in [
            (usual(768), 1229, 308, 128),   // one row per warp, four warps per CTA
            (usual(384), 1229, 154, 128),   // two rows per warp
            (usual(128), 1229, 77, 128),    // four rows per warp
            (usual(4096), 1229, 1229, 128), // one CTA per row
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
    fn numbers_in_symbols_are_identifiers() {
        assert_eq!(word(1e-12), "1em12");
        assert_eq!(word(-0.125), "m0p125");
    }

    #[test]
    fn a_grid_has_at_least_one_cta_and_at_most_the_device_limit() {
        assert_eq!(blocks(0, 4), 1);
        assert_eq!(blocks(9, 4), 3);
        assert_eq!(blocks(u64::MAX, 1), 0x7fff_ffff);
    }
}
