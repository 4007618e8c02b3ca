//! Which kernel is launched for up to 128 rows on Hopper.

use super::{
    Epilogue, GemmOneTile, GemmSkinny, GemmSplitK, GemmWgmma, OneTile, SkinnyTile, SplitKTile,
    WgmmaTile,
    ranges::{ranges_of, sampled_rows},
};
use crate::{kernels::Instructions, tensor::DType};

/// A tile of one of the two kernels for few rows, or of those for more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FewRows {
    Skinny(SkinnyTile),
    SplitK(SplitKTile),
    Wgmma(WgmmaTile),
    OneTile(OneTile),
}

/// Up to so many rows a kernel for few may be launched: on an H200 both are faster than the others where
/// kernels begin early, up to 128 rows, for inputs 768 wide. Of wider ones a tile's operands leave room for less than all
/// products in a block, and of deep ones for few blocks at once, so that others are faster.
const MOST_ROWS: u64 = 128;
/// Multiprocessors of an H100 or H200 SXM.
const SMS: u32 = 132;
/// What the estimates for more rows leave out where a block has one small tile: one warpgroup's step takes no less than some
/// 220 cycles, however short its products, which tells where steps are more than those of the fit. 64 × 64 took 4.5 µs with
/// k = 1024 and 10.5 with 4096.
const SHORT_PRODUCTS: f64 = 190.0;
const WAIT: f64 = 59.0;
const FITTED_STEPS: u32 = 16;
/// And cycles for the sums that blocks of a cluster exchange: 9.2 µs by 64 × 128 with k = 4096 in two splits.
const EXCHANGE: f64 = 1000.0;

impl FewRows {
    fn most_rows(self) -> u64 {
        match self {
            FewRows::Skinny(tile) => tile.most_rows(),
            FewRows::SplitK(tile) => tile.most_rows(),
            FewRows::Wgmma(_) | FewRows::OneTile(_) => MOST_ROWS,
        }
    }

    fn cycles(self, rows: u64, n: u32, k: u32, epilogue: Epilogue) -> f64 {
        match self {
            FewRows::Skinny(tile) => tile.cycles(rows, n, k, SMS),
            FewRows::SplitK(tile) => tile.cycles(rows, n, k, SMS),
            FewRows::Wgmma(tile) => {
                let is_short = f64::from(tile.m * tile.n) / 32.0 < SHORT_PRODUCTS;
                let waits = match is_short {
                    true => WAIT * f64::from(k.div_ceil(64).saturating_sub(FITTED_STEPS)),
                    false => 0.0,
                };
                tile.cycles(rows, n, k, epilogue, SMS) + waits
            }
            FewRows::OneTile(tile) => {
                let exchange = if tile.splits > 1 { EXCHANGE } else { 0.0 };
                tile.cycles(rows, n, k, epilogue, SMS) + exchange
            }
        }
    }

    /// None where no kernel for few rows serves the shape.
    fn tiles(n: u32, k: u32, dtype: DType) -> Vec<FewRows> {
        let on = Instructions::Hopper;
        let skinny = GemmSkinny::tiles(n, k, dtype, on).into_iter();
        let split = GemmSplitK::tiles(n, k, dtype, on).into_iter();
        let few = (skinny.map(FewRows::Skinny)).chain(split.map(FewRows::SplitK));
        let mut tiles: Vec<FewRows> = few.collect();
        if !tiles.is_empty() {
            let walking = GemmWgmma::tiles(n, k, dtype, on).into_iter();
            let one = GemmOneTile::tiles(n, k, dtype, on).into_iter();
            tiles.extend(walking.map(FewRows::Wgmma));
            tiles.extend(one.map(FewRows::OneTile));
        }
        tiles
    }

    /// The least estimated time of so many rows, in cycles; `None` where no tile serves them.
    pub fn fastest(rows: u64, n: u32, k: u32, dtype: DType, epilogue: Epilogue) -> Option<f64> {
        Self::tiles(n, k, dtype)
            .into_iter()
            .filter(|tile| rows <= tile.most_rows())
            .map(|tile| tile.cycles(rows, n, k, epilogue))
            .min_by(f64::total_cmp)
    }

    /// The tiles for a GEMM on a card with Hopper's instructions, each up to a number of rows, by
    /// their estimated times. None where no tile serves the shape.
    pub fn variants(n: u32, k: u32, dtype: DType, epilogue: Epilogue) -> Vec<(u64, FewRows)> {
        // Longer than any time: a tile is not taken beyond the rows that it serves.
        const NEVER: f64 = 1e12;
        let tiles = Self::tiles(n, k, dtype);
        let most = tiles.iter().map(|tile| tile.most_rows()).max().unwrap_or(0);
        let most = most.min(MOST_ROWS);
        let mut rows = sampled_rows();
        rows.retain(|&rows| rows <= most);
        if rows.is_empty() {
            return Vec::new();
        }
        let cycles = |rows, at: usize| match tiles[at].most_rows() < rows {
            true => NEVER,
            false => tiles[at].cycles(rows, n, k, epilogue),
        };
        let ranges = ranges_of(&rows, tiles.len(), cycles).into_iter();
        ranges
            .map(|(end, at)| (end.unwrap_or(most), tiles[at]))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variants(n: u32, k: u32, dtype: DType) -> Vec<(u64, FewRows)> {
        FewRows::variants(n, k, dtype, Epilogue::default())
    }

    fn is_few(tile: FewRows) -> bool {
        matches!(tile, FewRows::Skinny(_) | FewRows::SplitK(_))
    }

    #[test]
    fn few_rows_of_the_shapes_of_encoders_have_ascending_ranges_that_their_tiles_serve() {
        let sizes = [768, 1024, 384].map(|w| [(3 * w, w), (w, w), (4 * w, w), (w, 4 * w)]);
        for (n, k) in sizes.concat() {
            let variants = variants(n, k, DType::F16);
            assert!((2..=4).contains(&variants.len()), "{n} {k}: {variants:?}");
            assert_eq!(variants.last().map(|v| v.0), Some(MOST_ROWS));
            assert!(variants.windows(2).all(|v| v[0].0 < v[1].0));
            for (end, tile) in variants {
                assert!(end <= tile.most_rows(), "{n} {k}: {end} {tile:?}");
            }
        }
        assert!(variants(768, 768, DType::F32).is_empty());
        assert!(variants(770, 768, DType::F16).is_empty());
        assert!(variants(768, 1 << 16, DType::F16).is_empty());
    }

    #[test]
    fn the_fewest_rows_take_weights_to_registers_where_every_block_has_a_multiprocessor() {
        let first = |n, k| variants(n, k, DType::F16).first().map(|v| v.1);
        assert!(matches!(first(768, 768), Some(FewRows::Skinny(_))));
        assert!(matches!(first(3072, 768), Some(FewRows::SplitK(_))));
    }

    #[test]
    fn kernels_for_more_rows_are_taken_where_blocks_for_few_do_not_fit_at_once() {
        let last = |n, k| variants(n, k, DType::F16).last().map(|v| v.1);
        for w in [384, 768] {
            for (n, k) in [(3 * w, w), (w, w), (4 * w, w), (w, 4 * w)] {
                let all = variants(n, k, DType::F16);
                assert!(
                    all.iter().all(|&(_, tile)| is_few(tile)),
                    "{n} {k}: {all:?}"
                );
            }
        }
        for (n, k) in [(3072, 1024), (4096, 1024), (1024, 4096), (6144, 2048)] {
            assert!(last(n, k).is_some_and(|tile| !is_few(tile)), "{n} {k}");
            let first = variants(n, k, DType::F16).first().map(|v| v.1);
            assert!(first.is_some_and(is_few), "{n} {k}");
        }
        assert!(last(1024, 1024).is_some_and(is_few));
    }
}
