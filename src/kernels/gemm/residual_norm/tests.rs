use super::*;
use crate::machine::testing::hopper;

const EPS: f32 = 1e-12;

#[test]
fn every_tile_fits_the_shared_memory_and_registers_of_hopper() {
    for n in (128..=2048).step_by(64) {
        for tile in GemmResidualNorm::tiles(n) {
            let kernel = GemmResidualNorm {
                n,
                k: 768,
                eps: EPS,
                dtype: DType::F16,
                bias: true,
                keeps_sum: false,
                centered: true,
                tile,
            };
            assert_eq!(kernel.check(), Ok(()));
            let shared = kernel.shared_bytes() + kernel.declared_bytes();
            assert!(shared <= SHARED_LIMIT, "{n} {tile:?}: {shared}");
            assert!((3..=MAX_STAGES).contains(&kernel.stages()), "{n} {tile:?}");
            assert!(
                kernel.rows_of_warpgroup() / 64 * tile.n / 2 <= 128,
                "{tile:?}"
            );
        }
    }
}

#[test]
fn whole_rows_are_held_by_two_to_eight_ctas() {
    assert_eq!(GemmResidualNorm::tiles(768).len(), 9);
    for n in [64, 128, 100, 832, 4096] {
        assert_eq!(GemmResidualNorm::tiles(n), [], "{n}");
    }
    let candidates = |n, dtype| GemmResidualNorm::candidates(n, 768, dtype);
    assert_eq!(candidates(832, DType::F16), []);
    assert_eq!(candidates(768, DType::F32), []);
    assert_eq!(candidates(768, DType::F16).len(), 9);
}

#[test]
fn the_estimate_prefers_the_tile_that_fills_the_gpu_in_one_wave() {
    let machine = hopper();
    let rows = |n: u32| machine.clusters_at_once(768 / n) * 128;
    for k in [768, 3072] {
        for n in [256, 192] {
            let cycles = |&tile: &WgmmaTile| {
                let kernel = GemmResidualNorm {
                    n: 768,
                    k,
                    eps: EPS,
                    dtype: DType::F16,
                    bias: true,
                    keeps_sum: false,
                    centered: true,
                    tile,
                };
                kernel.cycles(rows(n), &machine).expect("an estimate")
            };
            let tiles = GemmResidualNorm::tiles(768);
            let best = tiles.iter().min_by(|a, b| cycles(a).total_cmp(&cycles(b)));
            assert_eq!(best, Some(&tile(128, n, true)), "{k} {n}");
        }
    }
}

#[test]
fn the_estimate_is_infinite_without_room_for_a_cluster() {
    let kernel = GemmResidualNorm {
        n: 768,
        k: 768,
        eps: EPS,
        dtype: DType::F16,
        bias: true,
        keeps_sum: false,
        centered: true,
        tile: tile(128, 128, true),
    };
    let cycles = |sms| kernel.cycles(1000, &hopper().with_sms(sms));
    assert_eq!(cycles(5), Some(f64::INFINITY));
    assert!(cycles(hopper().sms).is_some_and(f64::is_finite));
}

#[test]
fn a_cluster_is_launched_whole_and_never_idle() {
    let kernel = |m, n, cooperative| GemmResidualNorm {
        n: 768,
        k: 768,
        eps: EPS,
        dtype: DType::F16,
        bias: true,
        keeps_sum: false,
        centered: true,
        tile: tile(m, n, cooperative),
    };
    let grid = |kernel: GemmResidualNorm, rows| {
        kernel
            .launch(
                &Extents::default().with_rows(rows),
                &crate::machine::testing::hopper(),
            )
            .grid[0]
    };
    assert_eq!(grid(kernel(64, 256, false), 1), 3);
    assert_eq!(grid(kernel(64, 256, false), 1229), 20 * 3);
    assert_eq!(grid(kernel(64, 256, false), 9830), 39 * 3);
    assert_eq!(grid(kernel(64, 128, false), 1229), 17 * 6);
}
