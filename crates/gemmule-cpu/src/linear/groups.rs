//! Register tiles of AVX-512 instructions that multiply groups of adjacent elements along k: pairs of bf16 or quads of 8-bit
//! integers.

use rayon::prelude::*;

use crate::lines::Lines;

/// Number of lanes of a vector of sums.
pub(super) const LANES: usize = 16;
/// Number of vectors of a panel.
pub(super) const VECTORS: usize = 3;
/// Number of rows of a vector tile. Its `VECTOR_ROWS · VECTORS` vectors of sums fit in the registers together with the operands.
pub(super) const VECTOR_ROWS: usize = 8;
/// Number of rows of a tile: one AMX tile or two vector tiles.
pub(super) const TILE_ROWS: usize = 16;
/// Number of columns of a panel.
pub(super) const COLS: usize = VECTORS * LANES;

/// Two bf16 or four 8-bit integers that are adjacent along k, the first in the lowest bits.
pub(super) type Group = u32;

/// A weight `[n, k]`, split into panels of [`COLS`] rows of the weight, which are columns of the result. A panel is stored as
/// `[depth, COLS]`, where `depth` is the number of groups in a row. The last panel is padded with zeros.
pub(super) struct Panels {
    groups: Lines,
    depth: usize,
}

impl Panels {
    /// Packs a weight of `n` rows of `depth` groups. `pack` receives the index of a panel's first row in the weight, and fills the panel.
    pub fn new(n: usize, depth: usize, pack: impl Fn(usize, &mut [Group]) + Sync) -> Self {
        let size = COLS * depth;
        let mut groups = Lines::zeros::<Group>(n.div_ceil(COLS) * size);
        let panels = groups.all_mut().par_chunks_mut(size.max(1));
        panels
            .enumerate()
            .for_each(|(i, panel)| pack(i * COLS, panel));
        Self { groups, depth }
    }

    /// Returns the panel that starts at column `col`, a multiple of [`COLS`].
    pub fn panel_of(&self, col: usize) -> &[Group] {
        &self.groups.all()[col * self.depth..][..COLS * self.depth]
    }

    pub fn bytes(&self) -> u64 {
        self.groups.bytes()
    }
}

/// Defines `sums_of`, which multiplies rows by a panel. It uses AMX if available, else an AVX-512 instruction that adds products of groups
/// to 32-bit sums.
macro_rules! tiles {
    ($features:literal, $sum:ty, $amx:path, |$sums:ident, $x:ident, $w:ident| $product:expr) => {
        /// Multiplies up to [`TILE_ROWS`] rows of `depth` groups by a panel.
        ///
        /// # Safety
        /// The CPU must have the vector instructions.
        unsafe fn sums_of(
            x: &[Group],
            panel: &[Group],
            depth: usize,
            to: &mut [[$sum; COLS]; TILE_ROWS],
        ) {
            // SAFETY: AMX support is checked, and the caller guarantees the vector instructions.
            unsafe {
                match amx::is_supported() {
                    true => $amx(x, panel, depth, to),
                    false => by_vectors(x, panel, depth, to),
                }
            }
        }

        /// Like [`sums_of`], with vector tiles.
        #[target_feature(enable = $features)]
        fn by_vectors(
            x: &[Group],
            panel: &[Group],
            depth: usize,
            to: &mut [[$sum; COLS]; TILE_ROWS],
        ) {
            let parts = x.chunks(VECTOR_ROWS * depth.max(1));
            for (x, to) in parts.zip(to.as_chunks_mut::<VECTOR_ROWS>().0) {
                match x.len() / depth.max(1) {
                    1 => tile::<1>(x, panel, depth, to),
                    2 => tile::<2>(x, panel, depth, to),
                    3 | 4 => tile::<4>(x, panel, depth, to),
                    _ => tile::<VECTOR_ROWS>(x, panel, depth, to),
                }
            }
        }

        /// Like [`by_vectors`], for up to `M` rows. If there are fewer, the last row is repeated.
        #[target_feature(enable = $features)]
        #[inline]
        fn tile<const M: usize>(
            x: &[Group],
            panel: &[Group],
            depth: usize,
            to: &mut [[$sum; COLS]; VECTOR_ROWS],
        ) {
            use std::arch::x86_64::{
                _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_si512, _mm512_storeu_si512,
            };
            let last = (x.len() / depth.max(1)).saturating_sub(1);
            let mut rows: [&[Group]; M] = [&[]; M];
            for i in 0..M {
                rows[i] = &x[i.min(last) * depth..][..depth];
            }
            let mut sums = [[_mm512_setzero_si512(); VECTORS]; M];
            for (at, weights) in panel.chunks_exact(COLS).enumerate() {
                let mut w = [_mm512_setzero_si512(); VECTORS];
                for j in 0..VECTORS {
                    let from = &weights[j * LANES..][..LANES];
                    // SAFETY: this reads 16 of the 48 groups.
                    w[j] = unsafe { _mm512_loadu_si512(from.as_ptr().cast()) };
                }
                for i in 0..M {
                    let $x = _mm512_set1_epi32(rows[i][at].cast_signed());
                    for j in 0..VECTORS {
                        let ($sums, $w) = (sums[i][j], w[j]);
                        sums[i][j] = $product;
                    }
                }
            }
            for i in 0..M {
                for j in 0..VECTORS {
                    let to = &mut to[i][j * LANES..][..LANES];
                    // SAFETY: the destination has room for 16 lanes of 32 bits.
                    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), sums[i][j]) };
                }
            }
        }
    };
}
pub(super) use tiles;
