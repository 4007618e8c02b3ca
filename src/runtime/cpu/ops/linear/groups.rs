//! Tiles of AVX-512 instructions that multiply groups of neighbours along k: pairs of bf16, quads of 8-bit integers.

use rayon::prelude::*;

use super::super::lines::Lines;

/// Lanes of a vector of sums.
pub(super) const LANES: usize = 16;
/// Vectors of a panel, and rows of a tile of them: as many sums as fit the registers together with what is multiplied.
pub(super) const VECTORS: usize = 3;
pub(super) const VECTOR_ROWS: usize = 8;
/// Rows of a tile, which are those of AMX and two tiles of vectors.
pub(super) const TILE_ROWS: usize = 16;
/// Columns of a panel.
pub(super) const COLS: usize = VECTORS * LANES;

/// Neighbours along k, the first in the lowest bits.
pub(super) type Group = u32;

/// A weight `[n, k]` as panels `[groups, 48]`, the last one filled up with zeros.
pub(super) struct Panels {
    groups: Lines,
    depth: usize,
}

impl Panels {
    /// A weight of so many groups in each row, of which `pack` makes a panel's rows from a first one on.
    pub fn new(n: usize, depth: usize, pack: impl Fn(usize, &mut [Group]) + Sync) -> Self {
        let size = COLS * depth;
        let mut groups = Lines::zeros::<Group>(n.div_ceil(COLS) * size);
        let panels = groups.all_mut().par_chunks_mut(size.max(1));
        panels
            .enumerate()
            .for_each(|(i, panel)| pack(i * COLS, panel));
        Self { groups, depth }
    }

    /// The panel of the columns from `col` on, a multiple of [`COLS`].
    pub fn panel_of(&self, col: usize) -> &[Group] {
        &self.groups.all()[col * self.depth..][..COLS * self.depth]
    }

    pub fn bytes(&self) -> u64 {
        self.groups.bytes()
    }
}

/// Defines `sums_of`, the products of rows with a panel: by AMX where it is, else by an instruction that adds those of groups to
/// 32-bit sums.
macro_rules! tiles {
    ($features:literal, $sum:ty, $amx:path, |$sums:ident, $x:ident, $w:ident| $product:expr) => {
        /// The products of up to [`TILE_ROWS`] rows of `depth` groups with a panel.
        ///
        /// # Safety
        /// The CPU has the instructions of vectors.
        unsafe fn sums_of(
            x: &[Group],
            panel: &[Group],
            depth: usize,
            to: &mut [[$sum; COLS]; TILE_ROWS],
        ) {
            // SAFETY: AMX is asked for, and the caller answers for the others.
            unsafe {
                match amx::is_supported() {
                    true => $amx(x, panel, depth, to),
                    false => by_vectors(x, panel, depth, to),
                }
            }
        }

        /// As [`sums_of`], in tiles of vectors.
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

        /// As [`by_vectors`], for up to `M` rows: behind the last one, it is computed again.
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
                    // SAFETY: 16 of the 48 groups.
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
                    // SAFETY: room for the 16 lanes, each of 32 bits.
                    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), sums[i][j]) };
                }
            }
        }
    };
}
pub(super) use tiles;
