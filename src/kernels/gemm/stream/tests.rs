//! Tests of the layout and launches of the GEMM that streams its weight, and of the kernels that it rejects.

use super::*;
use crate::{kernels::KernelSpec, machine::testing::hopper, ops::Epilogue};

fn gemm(rows: u32, splits: u32) -> GemmStream {
    GemmStream {
        tile: StreamTile::new(rows, splits, 1, 2),
        ..GemmStream::of(problem(768, 768))
    }
}

fn problem(n: u32, k: u32) -> GemmProblem {
    GemmProblem::new(n, k, DType::F16, Epilogue::new(true, None))
}

#[test]
fn shared_memory_has_room_for_the_ctas_that_the_tile_states() {
    let machine = hopper();
    for kernel in representative() {
        let KernelSpec::GemmStream(kernel) = kernel else {
            panic!("{kernel:?}");
        };
        assert_eq!(kernel.check(), Ok(()));
        let bytes = kernel.checked_layout().shared_bytes();
        assert!(
            machine.ctas_by_shared(bytes) >= kernel.tile.per_sm,
            "{kernel:?}"
        );
    }
}

#[test]
fn a_launch_has_all_clusters_or_as_many_ctas_as_fit() {
    let machine = hopper();
    let extents = Extents::of(&[100]).expect("a batch");
    assert_eq!(gemm(64, 4).launch(&extents, &machine).grid[0], 2 * 12 * 4);
    let wide = GemmStream {
        problem: problem(1 << 20, 768),
        ..gemm(64, 1)
    };
    assert_eq!(wide.launch(&extents, &machine).grid[0], 2 * machine.sms);
}

#[test]
fn unsupported_kernels_are_rejected_with_a_reason() {
    let refused = |gemm: GemmStream| gemm.check().expect_err("refused");
    assert_eq!(
        refused(GemmStream {
            problem: problem(768, 770),
            ..gemm(8, 1)
        }),
        "the streaming GEMM does not support n = 768 and k = 770 in f16; expected k in multiples of 8, in f16 or bf16"
    );
    for (rows, splits) in [(0, 1), (12, 1), (136, 1), (8, 0), (8, 9)] {
        let message = refused(gemm(rows, splits));
        assert!(
            message.contains("is not a tile of the streaming GEMM"),
            "{message}"
        );
    }
    let residual = Epilogue::default().with_residual();
    let added = GemmStream {
        problem: GemmProblem::new(768, 768, DType::F16, residual),
        norm: StreamNorm::After {
            eps: 1e-5,
            centered: true,
        },
        ..gemm(8, 1)
    };
    assert_eq!(
        refused(added),
        "a GEMM of normalized rows cannot add a residual"
    );
}

#[test]
fn a_result_in_e4m3_requires_pairs_of_columns_and_no_residual() {
    let function = |n, epilogue, to_e4m3| GemmProblem {
        to_e4m3,
        ..GemmProblem::new(n, 768, DType::F16, epilogue).in_e4m3()
    };
    let tiles = |problem| GemmStream::of(problem).tiles(Instructions::Hopper).len();
    let plain = Epilogue::default();
    assert!(tiles(function(768, plain, true)) > 0);
    assert!(tiles(function(761, plain, false)) > 0);
    assert_eq!(tiles(function(761, plain, true)), 0);
    assert_eq!(tiles(function(768, plain.with_residual(), true)), 0);
}

#[test]
fn a_norm_split_between_two_gemms_equals_the_norm_of_the_rows() {
    // The rows are (1, 3) and (2, 2), with gamma (2, 1) and beta (1/2, 0). Both means are 2, and the deviations are 1 and 0.
    let gamma_and_beta: [&[f32]; 2] = [&[2.0, 1.0], &[0.5, 0.0]];
    let rows = [1.0, 3.0];
    let (scaled, row_stats) = stream_scaled(&rows, &gamma_and_beta);
    assert_eq!(row_stats, [4.0, 10.0]);
    assert_eq!(scaled.len(), 3 * 2);
    let normal = stream_normals(&scaled, &row_stats, 1, 2, 1e-12, true);
    assert_eq!(normal, [-1.5, 1.0]);
    // The mean square is 25.
    let (scaled, row_stats) = stream_scaled(&[1.0, 7.0], &gamma_and_beta[..1]);
    let normal = stream_normals(&scaled, &row_stats, 1, 2, 0.0, false);
    assert_eq!(normal, [0.4, 1.4]);
}
