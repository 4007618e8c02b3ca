//! Which kernel computes a GEMM on Hopper, by its rows.

use super::{
    Epilogue, Gemm, GemmOneTile, GemmWgmma, OneTile, Tile,
    ranges::{Kernels, RowRange, Served, ranges_among, ranges_with_more},
    wgmma::SMS,
};
use crate::{kernels::Instructions, tensor::DType};

/// Kernels that one GEMM is compiled with beside those for few rows, and more of them where each is worth it.
const USUAL_KERNELS: usize = 4;
const MOST_KERNELS: usize = 7;
/// What a further kernel of a GEMM must save, of its time, times the multiply-adds of a row: a kernel takes NVRTC as long for
/// small GEMMs as for large ones, of which a hundredth is more microseconds.
const WORTH_A_KERNEL: f64 = 0.009 * 3072.0 * 768.0;
/// Kernels of one tile a block that one GEMM is compiled with.
const MOST_ONE_TILE: usize = 2;
/// Such a kernel must save this part of the time on the rows that it may serve.
const WORTH_ONE_TILE: f64 = 0.02;
/// As [`WORTH_A_KERNEL`], on the rows that others leave, which are fewer.
const WORTH_A_KERNEL_FOR_THE_REST: f64 = 3.0 * WORTH_A_KERNEL;

/// The fastest of several kernels for one GEMM.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EitherGemm {
    Any(Gemm),
    Hopper(GemmWgmma),
    OneTile(GemmOneTile),
}

impl EitherGemm {
    fn multiply_adds_of_row(&self) -> f64 {
        let (n, k) = match self {
            Self::Any(g) => (g.n, g.k),
            Self::Hopper(g) => (g.n, g.k),
            Self::OneTile(g) => (g.n, g.k),
        };
        f64::from(n) * f64::from(k)
    }

    /// Estimated cycles of an H200 at 1755 MHz.
    pub(super) fn cycles(&self, rows: u64) -> f64 {
        match self {
            Self::Any(g) => g.tile.cycles(rows, g.n, g.k, g.dtype, SMS as u32),
            Self::Hopper(g) => g.tile.cycles(rows, g.n, g.k, g.epilogue, SMS as u32),
            Self::OneTile(g) => g.tile.cycles(rows, g.n, g.k, g.epilogue, SMS as u32),
        }
    }

    /// As [`Gemm::variants`], for a card with Hopper's instructions: whichever kernel is faster.
    ///
    /// Four to seven kernels at most, each of which may serve several ranges: large tiles change places
    /// wherever one of them needs a further wave. For rows that fill the card about once, at most two of
    /// one tile a block take the place of those that serve any card. Up to `after` rows other kernels serve.
    pub fn variants(
        n: u32,
        k: u32,
        dtype: DType,
        epilogue: Epilogue,
        after: u64,
    ) -> Vec<(Option<u64>, Self)> {
        let any = Tile::fitting(n, dtype).into_iter().map(|tile| {
            Self::Any(Gemm {
                n,
                k,
                dtype,
                epilogue,
                tile,
            })
        });
        let walking = GemmWgmma::tiles(n, k, dtype, Instructions::Hopper).into_iter();
        let walking = walking.map(|tile| {
            Self::Hopper(GemmWgmma {
                n,
                k,
                dtype,
                epilogue,
                tile,
            })
        });
        let of = |candidates: &[Self], ranges: Vec<(Option<u64>, usize)>| {
            let each = ranges.into_iter();
            each.map(|(end, at)| (end, candidates[at].clone()))
                .collect::<Vec<_>>()
        };
        let candidates: Vec<Self> = any.chain(walking).collect();
        let cycles = |rows, at: usize| candidates[at].cycles(rows);
        let ranges = ranges_among(
            Served::up_to(after),
            Kernels {
                usual: USUAL_KERNELS,
                most: MOST_KERNELS,
                worth: WORTH_A_KERNEL / (f64::from(n) * f64::from(k)),
            },
            candidates.len(),
            cycles,
        );
        let ranges = of(&candidates, ranges);
        let single = GemmOneTile::tiles(n, k, dtype, Instructions::Hopper);
        if single.is_empty() {
            return ranges;
        }
        // Where what serves any card is best for few rows only, one tile a block is better.
        let mut candidates: Vec<Self> = Vec::new();
        for (end, kernel) in ranges {
            let stays =
                matches!(kernel, Self::Hopper(_)) || end.is_none_or(|end| end > OneTile::MOST_ROWS);
            if stays && !candidates.contains(&kernel) {
                candidates.push(kernel);
            }
        }
        let given = candidates.len();
        candidates.extend(single.into_iter().map(|tile| {
            Self::OneTile(GemmOneTile {
                n,
                k,
                dtype,
                epilogue,
                tile,
            })
        }));
        let cycles = |rows, at: usize| candidates[at].cycles(rows);
        let ranges = ranges_with_more(
            after,
            (given, MOST_ONE_TILE, WORTH_ONE_TILE),
            OneTile::MOST_ROWS,
            candidates.len(),
            cycles,
        );
        of(&candidates, ranges)
    }

    /// Those of [`EitherGemm::variants`] that are worth it where others serve these rows.
    pub fn variants_beside(
        variants: Vec<(Option<u64>, Self)>,
        after: u64,
        others: &[RowRange],
    ) -> Vec<(Option<u64>, Self)> {
        if others.is_empty() {
            return variants;
        }
        let mut kernels: Vec<Self> = variants.into_iter().map(|(_, kernel)| kernel).collect();
        kernels.sort_unstable();
        kernels.dedup();
        let cycles = |rows, at: usize| match &kernels[at] {
            Self::OneTile(_) if rows > OneTile::MOST_ROWS => f64::INFINITY,
            kernel => kernel.cycles(rows),
        };
        let served = Served {
            beside: others,
            ..Served::up_to(after)
        };
        let multiply_adds = kernels.first().map_or(1.0, Self::multiply_adds_of_row);
        let worth = WORTH_A_KERNEL_FOR_THE_REST / multiply_adds;
        let most = Kernels::worth(kernels.len(), worth);
        ranges_among(served, most, kernels.len(), cycles)
            .into_iter()
            .map(|(end, at)| (end, kernels[at].clone()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::gemm::WgmmaTile;

    #[test]
    fn one_tile_a_block_serves_some_of_few_rows_and_a_walk_over_tiles_many() {
        let epilogue = Epilogue::default();
        for (n, k) in [(2304, 768), (768, 768), (3072, 768), (768, 3072)] {
            let variants = EitherGemm::variants(n, k, DType::F16, epilogue, 128);
            let (_, first) = &variants[0];
            let (end, last) = variants.last().expect("one serves all");
            assert!(!matches!(first, EitherGemm::Any(_)), "{first:?}");
            let single = |(_, kernel): &(_, EitherGemm)| matches!(kernel, EitherGemm::OneTile(_));
            // Fewer columns make fewer tiles, so that more of them have a multiprocessor each.
            assert!(
                n > 768 || k > 768 || variants.iter().any(single),
                "{variants:?}"
            );
            assert!(matches!(last, EitherGemm::Hopper(_)), "{last:?}");
            assert_eq!(*end, None);
        }
        for (n, k, dtype) in [
            (3, 768, DType::F16),
            (768, 36, DType::F16),
            (768, 768, DType::F32),
        ] {
            let variants = EitherGemm::variants(n, k, dtype, epilogue, 0);
            assert!(
                variants
                    .iter()
                    .all(|(_, v)| matches!(v, EitherGemm::Any(_))),
                "{n} {k}"
            );
        }
    }

    #[test]
    fn beside_others_a_gemm_has_fewer_of_its_kernels_and_no_more() {
        let (n, k) = (768, 768);
        let cost = |variants: &[(Option<u64>, EitherGemm)], rows| {
            let serves = |(end, _): &&(Option<u64>, _)| end.is_none_or(|end| rows <= end);
            variants.iter().find(serves).map(|(_, g)| g.cycles(rows))
        };
        let all = EitherGemm::variants(n, k, DType::F16, Epilogue::default(), 128);
        let beside = |others: &[RowRange]| EitherGemm::variants_beside(all.clone(), 128, others);
        assert_eq!(beside(&[]), all);
        let some = beside(&[(1000, Some(4000)), (5000, None)]);
        assert!(some.len() < all.len(), "{some:?}");
        for (_, kernel) in &some {
            assert!(all.iter().any(|(_, k)| k == kernel), "{kernel:?}");
        }
        for rows in (129..=1000).chain(4001..=5000) {
            let (some, all) = (cost(&some, rows), cost(&all, rows));
            assert!(
                some <= all.map(|all| all * 1.25),
                "{rows}: {some:?} {all:?}"
            );
        }
        assert_eq!(beside(&[(700, None)]).len(), 1);
        assert!(!beside(&[(0, None)]).is_empty());
    }

    #[test]
    fn a_few_kernels_lose_little_against_the_best_tile_for_each_row_count() {
        let epilogue = Epilogue::default();
        for (n, k) in [(2304, 768), (768, 768), (3072, 768), (768, 3072), (8, 8)] {
            let variants = EitherGemm::variants(n, k, DType::F16, epilogue, 128);
            let ends: Vec<u64> = variants
                .iter()
                .map(|(end, _)| end.unwrap_or(u64::MAX))
                .collect();
            assert!(ends.is_sorted_by(|a, b| a < b), "{ends:?}");
            assert_eq!(ends.last(), Some(&u64::MAX));
            let mut kernels: Vec<_> = variants.iter().map(|(_, kernel)| kernel).collect();
            for pair in kernels.windows(2) {
                assert_ne!(pair[0], pair[1], "neighbours that are equal are one");
            }
            kernels.sort_unstable();
            kernels.dedup();
            assert!(kernels.len() <= MOST_KERNELS + MOST_ONE_TILE, "{kernels:?}");

            let (mut sum, mut count) = (0.0, 0.0);
            for rows in (300..12_000).step_by(97) {
                let (_, kernel) = &variants[ends.iter().position(|&e| rows <= e).unwrap()];
                let best = WgmmaTile::CANDIDATES
                    .iter()
                    .filter(|tile| tile.serves(n))
                    .map(|t| t.cycles(rows, n, k, epilogue, SMS as u32))
                    .fold(f64::INFINITY, f64::min);
                sum += kernel.cycles(rows) / best;
                count += 1.0;
            }
            assert!(sum / count < 1.07, "{n} {k}: {}", sum / count);
        }
    }
}
