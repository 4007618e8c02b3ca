use super::*;
use crate::ops::{Bias, PositionBias, default_scale};

fn kernel(head: u32, tile: MhaTile) -> MhaWgmma {
    let column = |i: u32| HeadView::TokenMajor {
        offset: i * 12 * head,
        stride: 36 * head,
    };
    MhaWgmma {
        of: AttentionProblem::full(12, head, default_scale(head), [0, 1, 2].map(column)),
        dtype: DType::F16,
        tile,
    }
}

#[test]
fn as_many_ctas_fit_an_sm_as_the_tile_states() {
    for head in [32, 64, 96, 128, 256] {
        let tiles = MhaTile::candidates(head);
        for &tile in tiles {
            let stages = tile.stages(head);
            let bytes = tile.bytes(head, stages);
            let blocks = if tile.persistent { 1 } else { tile.blocks };
            assert!(
                blocks * (bytes + SHARED_OF_SYSTEM) <= SHARED_OF_SM && bytes <= SHARED_OF_BLOCK,
                "{head}: {tile:?}"
            );
            assert!(stages >= 2, "{head}: {tile:?}");
            assert!(tile.threads() <= 1024 && blocks * tile.threads() <= 2048);
            // Min registers per thread: accumulators of the scores, softmax weights packed in pairs, and accumulators of the output.
            let least = tile.keys / 2 + tile.keys / 4 + head / 2;
            let most = match tile.persistent {
                true => tile.registers(Origin::Batch).1,
                false => REGISTERS / (tile.blocks * tile.threads()),
            };
            assert!(least < most, "{head}: {tile:?}");
            assert!(tile.rows.is_multiple_of(64) && tile.keys.is_multiple_of(16));
            assert!(tile.persistent || tile.rows == 64, "{head}: {tile:?}");
            assert_eq!(kernel(head, tile).check(), Ok(()));
        }
        let guessed = MhaTile::by_length(head);
        assert!(
            guessed.iter().all(|(_, tile)| tiles.contains(tile)),
            "{head}"
        );
        assert_eq!(guessed.last().map(|&(up_to, _)| up_to), Some(None));
        assert!(
            guessed
                .windows(2)
                .all(|pair| pair[1].0.is_none() || pair[0].0 < pair[1].0)
        );
    }
    assert!(MhaTile::candidates(80).is_empty() && MhaTile::by_length(80).is_empty());
}

#[test]
fn a_grid_has_one_cta_per_head_and_tile() {
    let launch = |tile, lens: &[u32]| {
        let extents = Extents::of(lens).expect("a batch");
        kernel(64, tile).launch(&extents, &crate::machine::testing::hopper())
    };
    let one_tile = MhaTile::one_tile(64, 64, 4);
    assert_eq!(launch(one_tile, &[1]).grid, [12, 1, 1]);
    assert_eq!(launch(one_tile, &[128, 129, 1]).grid, [12 * (4 + 3), 1, 1]);
    assert_eq!(launch(one_tile, &[7]).threads, 128);
    let persistent = MhaTile::persistent(128, 64, 2);
    assert_eq!(launch(persistent, &[1]).grid, [12, 1, 1]);
    assert_eq!(
        launch(persistent, &[1000, 1000]).grid,
        [crate::machine::testing::hopper().sms, 1, 1]
    );
    assert_eq!(launch(persistent, &[7]).threads, 5 * 128);
}

#[test]
fn registers_of_a_persistent_cta_add_up_to_those_at_launch() {
    assert_eq!(
        MhaTile::persistent(64, 64, 4).registers(Origin::Batch),
        (32, 112)
    );
    assert_eq!(
        MhaTile::persistent(192, 80, 1).registers(Origin::Batch),
        (40, 152)
    );
}

#[test]
fn unsupported_kernels_are_rejected_with_a_reason() {
    let tile = MhaTile::candidates(64)[0];
    let good = kernel(64, tile);
    let refused = |kernel: MhaWgmma| kernel.check().expect_err("an error").to_string();
    assert_eq!(
        refused(kernel(80, tile)),
        "the head size is 80; warpgroup attention takes 32, 64, 96, 128 and 256, use the online kernel"
    );
    assert_eq!(
        refused(MhaWgmma {
            dtype: DType::F32,
            ..good.clone()
        }),
        "warpgroup attention over f32 elements; expected f16 or bf16"
    );
    assert_eq!(
        refused(MhaWgmma {
            of: AttentionProblem {
                k: HeadView::HeadMajor,
                ..good.of
            },
            ..good.clone()
        }),
        "`k` is head-major; warpgroup attention reads columns of rows of tokens, use the online kernel"
    );
    assert_eq!(
        refused(MhaWgmma {
            of: AttentionProblem {
                v: HeadView::TokenMajor {
                    offset: 8,
                    stride: 36 * 64
                },
                ..good.of
            },
            ..good.clone()
        }),
        "the heads of `v` begin at column 8 of rows of 2304; warpgroup attention takes multiples of 64, use the online kernel"
    );
    let odd = MhaTile { keys: 72, ..tile };
    assert_eq!(
        refused(MhaWgmma {
            tile: odd,
            ..good.clone()
        }),
        "128x72x2_persistent is not a tile of warpgroup attention with head size 64"
    );
    let with = |by| AttentionProblem { by, ..good.of };
    let windowed = with(PositionBias {
        window: Some(64),
        ..PositionBias::default()
    });
    let adjusted = with(PositionBias {
        bias: Some(Bias::Slopes),
        ..windowed.by
    });
    assert_eq!(
        refused(MhaWgmma {
            of: adjusted,
            ..good.clone()
        }),
        "128x64x2_persistent is not a tile of warpgroup attention with head size 64"
    );
    let one_tile = MhaTile::for_adjusted_scores(64).expect("there is one");
    let causal = |of| AttentionProblem { causal: true, ..of };
    for (of, tile) in [
        (adjusted, one_tile),
        (windowed, one_tile),
        (windowed, tile),
        (causal(windowed), tile),
    ] {
        let kernel = MhaWgmma {
            of,
            tile,
            ..good.clone()
        };
        assert_eq!(kernel.check(), Ok(()));
    }
    let tiles = |of, instructions| MhaWgmma::tiles(&of, DType::F16, instructions);
    assert!(tiles(good.of, Instructions::Ampere).is_empty());
    assert!(!tiles(good.of, Instructions::Hopper).is_empty());
    assert!(!tiles(causal(good.of), Instructions::Hopper).is_empty());
    assert!(!tiles(causal(windowed), Instructions::Hopper).is_empty());
    assert!(tiles(adjusted, Instructions::Hopper).is_empty());
    assert_eq!(
        refused(MhaWgmma {
            of: causal(adjusted),
            ..good.clone()
        }),
        "warpgroup attention does not support causal attention with biases or caps; use the online kernel"
    );
}
