//! Products by AMX (Intel's SDM, volume 1, chapter 18). A tile register holds 16 rows of 64 bytes. One tile of activations is multiplied by
//! three tiles of a panel. Panels are stored as AMX expects them, in groups of adjacent elements along k.

use std::{arch::asm, sync::LazyLock};

use super::groups::{COLS, Group, LANES, TILE_ROWS};

/// Number of groups of a tile along k.
const DEPTH: usize = 16;
/// Bytes between consecutive rows of a panel or of the sums.
const STRIDE: usize = COLS * size_of::<Group>();

/// Returns whether this CPU has the instructions and the process may use them.
pub(super) fn is_supported() -> bool {
    static SUPPORTED: LazyLock<bool> = LazyLock::new(|| has_instructions() && is_permitted());
    *SUPPORTED
}

/// Returns whether the CPU has AMX-TILE, AMX-BF16 and AMX-INT8, which the standard library cannot detect yet.
fn has_instructions() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const BF16: u32 = 1 << 22;
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    let all = BF16 | TILE | INT8;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & all == all
}

/// Requests permission to use the tile registers. Linux saves these registers only for processes with this permission.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const REQUEST_PERMISSION: libc::c_int = 0x1023;
    const TILE_DATA: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers and writes nothing.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// Tile register configuration in the format of `ldtilecfg`.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// Returns the shapes of the tile registers. Registers 0 to 2 hold `rows` rows of sums. Register 3 holds `rows` rows of activations,
    /// each with `depth` [`Group`]s. Registers 4 to 6 hold `depth` rows of a panel, one row per group of an activation row.
    const fn new(rows: usize, depth: usize) -> Self {
        let mut shapes = Self {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        let mut i = 0;
        while i < 7 {
            shapes.row_bytes[i] = match i {
                3 => depth * size_of::<Group>(),
                _ => LANES * size_of::<Group>(),
            } as u16;
            shapes.rows[i] = if i < 4 { rows } else { depth } as u8;
            i += 1;
        }
        shapes
    }
}

/// Defines a function that multiplies up to 16 rows by a panel. `$product` is an instruction that adds products of groups to 32-bit sums.
macro_rules! by_tiles {
    ($name:ident, $sum:ty, $product:literal) => {
        /// Multiplies up to [`TILE_ROWS`] rows of `depth` groups by a panel.
        ///
        /// # Safety
        /// AMX must be [supported](is_supported).
        pub(super) unsafe fn $name(
            x: &[Group],
            panel: &[Group],
            depth: usize,
            to: &mut [[$sum; COLS]; TILE_ROWS],
        ) {
            let rows = x.len() / depth.max(1);
            assert!(rows <= TILE_ROWS && panel.len() == depth * COLS);
            *to = [[0 as $sum; COLS]; TILE_ROWS];
            let (whole, rest) = (depth / DEPTH, depth % DEPTH);
            for (first, steps, depth_of_tile) in [(0, whole, DEPTH), (whole * DEPTH, 1, rest)] {
                if rows == 0 || steps == 0 || depth_of_tile == 0 {
                    continue;
                }
                let shapes = Shapes::new(rows, depth_of_tile);
                let (x, panel) = (&x[first..], &panel[first * COLS..]);
                // SAFETY: the CPU has the instructions. A tile of activations has `rows` rows at distances of `depth` groups. A tile of the
                // panel has a row for each group of an activation row. Both slices contain all of their tiles, and `to` has 16 rows.
                // Nothing else uses tile registers.
                unsafe {
                    asm!(
                        "ldtilecfg [{shapes}]",
                        "tileloadd tmm0, [{to} + {stride}*1]",
                        "tileloadd tmm1, [{to} + {stride}*1 + 64]",
                        "tileloadd tmm2, [{to} + {stride}*1 + 128]",
                        "2:",
                        "tileloadd tmm3, [{x} + {apart}*1]",
                        "tileloadd tmm4, [{panel} + {stride}*1]",
                        "tileloadd tmm5, [{panel} + {stride}*1 + 64]",
                        "tileloadd tmm6, [{panel} + {stride}*1 + 128]",
                        concat!($product, " tmm0, tmm3, tmm4"),
                        concat!($product, " tmm1, tmm3, tmm5"),
                        concat!($product, " tmm2, tmm3, tmm6"),
                        "add {x}, {x_step}",
                        "add {panel}, {panel_step}",
                        "dec {steps}",
                        "jnz 2b",
                        "tilestored [{to} + {stride}*1], tmm0",
                        "tilestored [{to} + {stride}*1 + 64], tmm1",
                        "tilestored [{to} + {stride}*1 + 128], tmm2",
                        "tilerelease",
                        shapes = in(reg) &raw const shapes,
                        to = in(reg) to.as_mut_ptr(),
                        stride = in(reg) STRIDE,
                        apart = in(reg) depth * size_of::<Group>(),
                        x = inout(reg) x.as_ptr() => _,
                        panel = inout(reg) panel.as_ptr() => _,
                        steps = inout(reg) steps => _,
                        x_step = const DEPTH * size_of::<Group>(),
                        panel_step = const DEPTH * STRIDE,
                        options(nostack),
                    );
                }
            }
        }
    };
}

by_tiles!(of_pairs, f32, "tdpbf16ps");
by_tiles!(of_quads, i32, "tdpbusd");
