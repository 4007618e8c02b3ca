//! Which kernels compute a linear layer, the LayerNorm behind it and the next linear layer in two launches.

use super::{
    Epilogue, FewRows, GemmResidualMoments, MomentsLayerNormGemm, SplitKTile,
    normalised_tile::machine,
};
use crate::tensor::DType;

/// Multiprocessors of an H100 or H200 SXM.
const SMS: u32 = 132;
/// Rows that times were measured of.
const MOST_ROWS: u64 = 128;

/// Tokens of the tiles that are tried. Each that is chosen is a kernel to compile.
const FIRST_TOKENS: [u32; 3] = [32, 48, 64];
/// Tiles of tokens of the GEMM before: where each block has all of k, twice as many blocks of half the tokens are faster.
const MOST_TILES: u64 = 4;
/// Cycles that both kernels take less than one warpgroup, which times are estimated for: two of them, with weights in
/// registers. Of an encoder of 40 and 64 tokens, where it was 1400 for each.
const TWO_WARPGROUPS: f64 = 1500.0;
const SECOND_TOKENS: [u32; 2] = [48, 64];
/// And for rows of which 48 and all weights are too many for shared memory: those of a tile that do not exist take the longer
/// to copy the wider they are, 0.4 µs for eight of 1024.
const FIRST_OF_WIDE: [u32; 1] = [16];
const SECOND_OF_WIDE: [u32; 2] = [24, 40];

/// Which kernels compute a linear layer with the LayerNorm behind it, and the linear layer behind that, for
/// numbers of rows: above `above`, each up to its own, ascending.
#[derive(Clone, Debug)]
pub struct ByMoments {
    pub above: u64,
    pub before: Vec<(u64, GemmResidualMoments)>,
    pub behind: Vec<(u64, MomentsLayerNormGemm)>,
}

impl ByMoments {
    /// Tiles of so many tokens of [`ResidualLayerNormGemm`](super::ResidualLayerNormGemm) are faster, larger ones are not,
    pub const SLOWER_THAN_TOKENS: u32 = 16;
    /// and up to so many rows, where these have more than [`ByMoments::NARROW`] elements: with 9 to 16 tokens an encoder
    /// 768 wide took 0.163 ms by them and 0.146 by moments, one 1024 wide 0.438 and 0.339, one 384 wide 0.058 and 0.060.
    pub const SLOWER_THAN_ROWS: u64 = 8;
    pub const NARROW: u32 = 512;

    /// The last number of rows.
    pub fn most(&self) -> u64 {
        self.behind.last().map_or(self.above, |&(most, _)| most)
    }

    /// `before` is the GEMM whose products LayerNorm adds to the residual, with LayerNorm's bias; `behind` is
    /// what reads the normalised rows. None where no tiles serve them.
    pub fn find(
        above: u64,
        before: (u32, u32, bool),
        behind: (u32, Epilogue),
        eps: f32,
        dtype: DType,
    ) -> Option<Self> {
        let ((n, k, bias), (n_behind, epilogue)) = (before, behind);
        let first = |tile| GemmResidualMoments {
            n,
            k,
            dtype,
            bias,
            tile,
        };
        let second = |tokens| MomentsLayerNormGemm {
            n: n_behind,
            k: n,
            eps,
            dtype,
            epilogue,
            tokens,
        };
        // Of what reads the rows no more tiles than of the largest: with fewer blocks the weights of the next
        // kernel, too, are on their way.
        let fits = |tokens: &u32| second(*tokens).check().is_ok();
        let is_wide = !second(SECOND_TOKENS[0]).has_room_for_all();
        let of_wide = |tokens| if is_wide { tokens } else { &[][..] };
        let of_second = of_wide(&SECOND_OF_WIDE).iter().chain(&SECOND_TOKENS);
        let of_second: Vec<u32> = of_second.copied().filter(fits).collect();
        let tokens = of_wide(&FIRST_OF_WIDE).iter().chain(&FIRST_TOKENS);
        let tokens: Vec<u32> = tokens.copied().collect();
        let splits = [1, 2, 4, 8].into_iter();
        let of_first: Vec<SplitKTile> = splits
            .flat_map(|splits| (tokens.iter()).map(move |&tokens| SplitKTile::new(tokens, splits)))
            .filter(|&tile| first(tile).check().is_ok())
            .collect();
        let of_first_for = |rows: u64| {
            let cycles = |tile: &SplitKTile| tile.cycles(rows, n, k, SMS);
            let serves = |tile: &&SplitKTile| {
                let is_there_at_once = tile.blocks(rows, n) <= SMS.into();
                is_there_at_once && rows <= MOST_TILES * u64::from(tile.tokens)
            };
            let tiles = of_first.iter().filter(serves);
            tiles
                .map(|tile| (cycles(tile), *tile))
                .min_by(|a, b| a.0.total_cmp(&b.0))
        };
        let of_second_for = |rows: u64| {
            let largest = u64::from(*of_second.last()?);
            let each = rows.div_ceil(rows.div_ceil(largest));
            let tokens = of_second.iter().find(|&&tokens| each <= tokens.into())?;
            let tile = SplitKTile::new(*tokens, 1);
            let serves = rows <= tile.most_rows() && tile.blocks(rows, n_behind) <= SMS.into();
            serves.then(|| (tile.cycles(rows, n_behind, n, SMS), *tokens))
        };
        let apart = |rows: u64| {
            let before = FewRows::fastest(rows, n, k, dtype, Epilogue::default())?;
            let behind = FewRows::fastest(rows, n_behind, n, dtype, epilogue)?;
            Some(before + behind + machine::APART)
        };
        let mut found = Self {
            above,
            before: Vec::new(),
            behind: Vec::new(),
        };
        for rows in above + 1..=MOST_ROWS {
            let (Some((first_cycles, x)), Some((second_cycles, y)), Some(apart)) =
                (of_first_for(rows), of_second_for(rows), apart(rows))
            else {
                break;
            };
            if first_cycles + second_cycles - TWO_WARPGROUPS >= apart {
                break;
            }
            match found.before.last_mut() {
                Some((most, kernel)) if kernel.tile == x => *most = rows,
                _ => found.before.push((rows, first(x))),
            }
            match found.behind.last_mut() {
                Some((most, kernel)) if kernel.tokens == y => *most = rows,
                _ => found.behind.push((rows, second(y))),
            }
        }
        (!found.behind.is_empty()).then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        kernels::{Kernel, gemm::split_k::SHARED_LIMIT},
        tensor::Extents,
    };

    fn found(n: u32, k: u32, behind: u32, dtype: DType) -> Option<ByMoments> {
        let behind = (behind, Epilogue::default());
        ByMoments::find(32, (n, k, true), behind, 1e-12, dtype)
    }

    #[test]
    fn layers_of_encoders_have_kernels_for_few_rows_that_fit_and_are_there_at_once() {
        for (width, mosts) in [
            (320, [128, 128]),
            (384, [128, 128]),
            (512, [128, 128]),
            (768, [128, 128]),
            // With more rows the blocks of the deep GEMM would not be there at once.
            (1024, [128, 96]),
        ] {
            let layers = [(width, 4 * width), (4 * width, 3 * width)];
            for ((k, n), most) in layers.into_iter().zip(mosts) {
                let found = found(width, k, n, DType::F16).expect("kernels");
                assert_eq!(found.most(), most, "{width} {k}: {found:?}");
                assert_eq!(found.before.last().map(|b| b.0), Some(found.most()));
                for (most, kernel) in &found.before {
                    assert_eq!(kernel.check(), Ok(()));
                    let extents = Extents::default().with_rows(*most);
                    assert!(kernel.launch(&extents).grid[0] <= SMS, "{width} {k}");
                }
                for (most, kernel) in &found.behind {
                    assert_eq!(kernel.check(), Ok(()));
                    let extents = Extents::default().with_rows(*most);
                    assert!(kernel.launch(&extents).grid[0] <= SMS, "{width} {k}");
                }
                let mut tokens: Vec<u32> = found.behind.iter().map(|b| b.1.tokens).collect();
                tokens.sort_unstable();
                tokens.dedup();
                assert!(tokens.len() <= 4, "each takes time to compile: {tokens:?}");
            }
        }
    }

    #[test]
    fn x_takes_the_place_of_weights_in_registers_where_both_do_not_fit() {
        let found = found(1024, 4096, 3072, DType::F16).expect("kernels");
        let before = found.before.iter().map(|(_, kernel)| {
            let steps = kernel.tile.steps(kernel.k);
            (kernel.laid(), steps, kernel.tile.tokens)
        });
        let behind = (found.behind.iter()).map(|(_, kernel)| (kernel.laid(), 16, kernel.tokens));
        let all: Vec<_> = before.chain(behind).collect();
        assert!(
            all.iter()
                .any(|&((before_x, _), steps, _)| before_x < steps)
        );
        for ((before_x, bytes), steps, tokens) in all {
            assert!(bytes <= SHARED_LIMIT, "{tokens}: {bytes}");
            // Of the second half of the steps the last six are in registers.
            assert!(
                before_x >= steps / 2 + (steps / 2).saturating_sub(6),
                "{tokens}: {before_x}"
            );
            assert!(before_x <= steps, "{tokens}: {before_x}");
        }
    }

    #[test]
    fn other_shapes_and_types_have_no_such_kernels() {
        assert!(found(768, 768, 3072, DType::F32).is_none());
        assert!(found(770, 768, 3072, DType::F16).is_none());
        // Rows that do not fit shared memory, and more columns than there are multiprocessors for.
        assert!(found(2048, 2048, 8192, DType::F16).is_none());
        assert!(found(768, 768, 1 << 16, DType::F16).is_none());
    }
}
