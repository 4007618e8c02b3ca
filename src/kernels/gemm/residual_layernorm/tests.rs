use super::*;

const EPS: f32 = 1e-12;

#[test]
fn every_tile_fits_the_shared_memory_and_registers_of_hopper() {
    for n in (128..=2048).step_by(64) {
        for tile in GemmResidualLayerNorm::tiles(n) {
            let kernel = GemmResidualLayerNorm {
                n,
                k: 768,
                eps: EPS,
                dtype: DType::F16,
                bias: true,
                tile,
            };
            assert_eq!(kernel.check(), Ok(()));
            let shared = kernel.shared_bytes() + kernel.declared_bytes();
            assert!(shared <= SHARED_LIMIT, "{n} {tile:?}: {shared}");
            assert!((3..=MOST_STAGES).contains(&kernel.stages()), "{n} {tile:?}");
            assert!(
                kernel.rows_of_warpgroup() / 64 * tile.n / 2 <= 128,
                "{tile:?}"
            );
        }
    }
}

#[test]
fn whole_rows_are_held_by_two_to_eight_blocks() {
    assert_eq!(GemmResidualLayerNorm::tiles(768).len(), 9);
    for n in [64, 128, 100, 832, 4096] {
        assert_eq!(GemmResidualLayerNorm::tiles(n), [], "{n}");
    }
    let ranges = GemmResidualLayerNorm::by_rows(832, 768, EPS, DType::F16, true);
    assert_eq!(ranges, [(None, None)]);
    let ranges = GemmResidualLayerNorm::by_rows(768, 768, EPS, DType::F32, true);
    assert_eq!(ranges, [(None, None)]);
}

#[test]
fn few_rows_are_computed_apart_and_many_together() {
    for (n, k, many) in [
        (768, 768, 1800),
        (768, 3072, 1800),
        (1024, 1024, 1800),
        (384, 384, 1800),
        (384, 1536, 4000),
    ] {
        let ranges = GemmResidualLayerNorm::by_rows(n, k, EPS, DType::F16, true);
        let at = |rows| {
            let holds = |(end, _): &&(Option<u64>, _)| end.is_none_or(|end| rows <= end);
            ranges
                .iter()
                .find(holds)
                .and_then(|(_, kernel)| kernel.as_ref())
        };
        assert!(at(1).is_none() && at(100).is_none(), "{n} {k}: {ranges:?}");
        assert!(at(many).is_some(), "{n} {k}: {ranges:?}");
    }
}

#[test]
fn rows_that_fill_the_card_in_one_wave_have_the_tile_that_does_so() {
    // 39 clusters of 3 blocks and 30 of 4 are there at once.
    for (k, rows, n) in [
        (3072, 39 * 128, 256),
        (768, 39 * 128, 256),
        (3072, 30 * 128, 192),
        (768, 30 * 128, 192),
    ] {
        let ranges = GemmResidualLayerNorm::by_rows(768, k, EPS, DType::F16, true);
        let (_, kernel) = ranges
            .into_iter()
            .find(|(end, _)| end.is_none_or(|end| rows <= end))
            .expect("the last range has no end");
        let at = kernel.map(|kernel| kernel.tile);
        assert_eq!(at, Some(tile(128, n, true)), "{k} {rows}");
    }
}

#[test]
fn ranges_that_hardly_serve_a_batch_are_left_out() {
    let ranges = vec![
        (Some(500), 0),
        (Some(515), 2),
        (Some(700), 0),
        (Some(760), 1),
        (Some(900), 2),
        (None, 0),
    ];
    let kept = without_slivers(ranges);
    assert_eq!(
        kept,
        [(Some(700), 0), (Some(760), 1), (Some(900), 2), (None, 0)]
    );
    let beyond = vec![(Some(500), 0), (Some(LAST_ROWS), 2), (None, 0)];
    assert_eq!(without_slivers(beyond), [(Some(500), 0), (None, 2)]);
}

#[test]
fn a_cluster_is_launched_whole_and_never_idle() {
    let kernel = |m, n, together| GemmResidualLayerNorm {
        n: 768,
        k: 768,
        eps: EPS,
        dtype: DType::F16,
        bias: true,
        tile: tile(m, n, together),
    };
    let grid = |kernel: GemmResidualLayerNorm, rows| {
        kernel.launch(&Extents::default().with_rows(rows)).grid[0]
    };
    assert_eq!(grid(kernel(64, 256, false), 1), 3);
    assert_eq!(grid(kernel(64, 256, false), 1229), 20 * 3);
    assert_eq!(grid(kernel(64, 256, false), 9830), 39 * 3);
    assert_eq!(grid(kernel(64, 128, false), 1229), 17 * 6);
}
