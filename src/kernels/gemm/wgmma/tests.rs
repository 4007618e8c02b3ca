//! Tests of the WGMMA GEMM's tiles and of their launches.

use super::*;
use crate::tensor::Format;

#[test]
fn every_tile_fits_the_shared_memory_and_registers_of_hopper() {
    for tile in WgmmaTile::CANDIDATES {
        let unswapped = [Store::Direct, Store::Tma];
        for store in if tile.swaps_ab() {
            &[Store::SwapAb][..]
        } else {
            &unswapped
        } {
            let store = *store;
            assert!(tile.shared_bytes(store, 2) <= 227 * 1024, "{tile:?}");
            assert!(
                (3..=MAX_STAGES).contains(&tile.stages(store, 2)),
                "{tile:?}"
            );
        }
        // A consumer thread has 240 registers. The accumulators use most of them.
        let rows = if tile.cooperative { tile.m / 2 } else { tile.m };
        assert!(rows * tile.n / 128 <= 192, "{tile:?}");
        if tile.swaps_ab() {
            assert_eq!(
                (tile.m % 8, tile.n, tile.cooperative),
                (0, RowOrder::BLOCK, false),
                "{tile:?}"
            );
            continue;
        }
        // TMA boxes start at multiples of 128 bytes of shared memory, and swizzled boxes at multiples of 1024 bytes.
        let (subtile, boxes) = tile.subtile();
        assert_eq!(SUBTILE_ROWS * subtile * 2 / boxes % 128, 0, "{tile:?}");
        assert_eq!((tile.n % subtile, tile.n % 16), (0, 0), "{tile:?}");
        assert!(boxes == 1 || subtile / boxes / 8 % 2 == 1, "{tile:?}");
        assert!(
            tile.m <= 256 && tile.n <= 256,
            "a TMA box has at most 256 rows: {tile:?}"
        );
    }
}

#[test]
fn tiles_of_groups_fit_the_shared_memory_and_registers_of_hopper() {
    for tile in WgmmaTile::OF_GROUPS {
        for store in [Store::Direct, Store::Tma] {
            let vectors = 1 + MAX_STAGES / 2;
            assert!(
                tile.shared_bytes(store, vectors) <= SHARED_LIMIT,
                "{tile:?}"
            );
            assert!(
                (4..=MAX_STAGES).contains(&tile.stages(store, vectors)),
                "{tile:?}"
            );
        }
        // The two sets of sums must leave some of a consumer thread's 240 registers for other values.
        assert!(2 * tile.outputs_of_warpgroup() / 128 <= 192, "{tile:?}");
        assert!(
            tile.cooperative && tile.n.is_multiple_of(RowOrder::GROUP),
            "{tile:?}"
        );
    }
}

#[test]
fn unsupported_kernels_are_rejected_with_a_reason() {
    let of = |n, tile| GemmWgmma {
        problem: GemmProblem::new(n, 768, DType::F16, Epilogue::default()),
        tile,
    };
    let gemm = of(770, WgmmaTile::CANDIDATES[0]);
    assert_eq!(
        gemm.check().unwrap_err(),
        "the Hopper GEMM does not support n = 770 and k = 768 in f16; expected multiples of 8 in f16 or bf16"
    );
    let tile = WgmmaTile { n: 96, ..gemm.tile };
    let gemm = of(768, tile);
    assert_eq!(
        gemm.check().unwrap_err(),
        "WgmmaTile { m: 256, n: 96, cooperative: true } is not a tile of the Hopper GEMM for a weight in f16"
    );
}

#[test]
fn pairs_and_groups_restrict_weights_and_tiles() {
    let refused = |n, weight, columns| {
        let problem = GemmProblem {
            weight,
            quantized_rows: true,
            ..GemmProblem::new(n, 768, DType::F16, Epilogue::default())
        };
        let tile = WgmmaTile::new(128, columns, false);
        GemmWgmma { problem, tile }.check().unwrap_err()
    };
    assert_eq!(
        refused(1000, Format::FP8, 128),
        "a packed weight of 1000 rows; the Hopper GEMM of quantized rows expects a multiple of 16"
    );
    assert_eq!(
        refused(768, Format::INT8, 112),
        "WgmmaTile { m: 128, n: 112, cooperative: false } with int8 operands; expected columns in multiples of 32"
    );
    assert_eq!(
        refused(768, Format::FP8_128, 128),
        "WgmmaTile { m: 128, n: 128, cooperative: false } is not a tile of the Hopper GEMM for a weight in fp8_g128"
    );
}

#[test]
fn packed_weights_are_refused() {
    let int8 = GemmProblem {
        weight: Format::INT8,
        ..GemmProblem::new(768, 768, DType::F16, Epilogue::default())
    };
    let gemm = GemmWgmma {
        problem: int8,
        tile: WgmmaTile::CANDIDATES[0],
    };
    assert_eq!(
        gemm.check().unwrap_err(),
        "the Hopper GEMM does not read a weight in int8; expected f16, or operands in E4M3 or int8"
    );
}
