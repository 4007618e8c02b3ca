//! What the GEMM that streams its weight is generated as, and which descriptions it refuses.

use super::*;
use crate::{kernels::KernelSpec, machine::testing::hopper};

fn gemm(rows: u32, splits: u32) -> GemmStream {
    GemmStream {
        n: 768,
        k: 768,
        dtype: DType::F16,
        epilogue: Epilogue::new(true, None),
        gated: false,
        norm: StreamNorm::None,
        tile: StreamTile::new(rows, splits, 1, 2),
    }
}

#[test]
fn what_lies_in_shared_memory_fits_as_often_as_the_tile_says() {
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
fn a_launch_has_all_clusters_or_as_many_ctas_as_there_is_room_for() {
    let machine = hopper();
    let extents = Extents::of(&[100]).expect("a batch");
    assert_eq!(gemm(64, 4).launch(&extents, &machine).grid[0], 2 * 12 * 4);
    let wide = GemmStream {
        n: 1 << 20,
        ..gemm(64, 1)
    };
    assert_eq!(wide.launch(&extents, &machine).grid[0], 2 * machine.sms);
}

#[test]
fn what_the_kernel_does_not_serve_is_refused_with_the_reason() {
    let refused = |gemm: GemmStream| gemm.check().expect_err("refused");
    assert_eq!(
        refused(GemmStream {
            k: 770,
            ..gemm(8, 1)
        }),
        "no GEMM streams a weight of 768 columns and 770 products in f16: it takes products in multiples of 8, in f16 or bf16"
    );
    for (rows, splits) in [(0, 1), (12, 1), (136, 1), (8, 0), (8, 9)] {
        let message = refused(gemm(rows, splits));
        assert!(
            message.contains("is no tile of the GEMM that streams"),
            "{message}"
        );
    }
    let added = GemmStream {
        epilogue: Epilogue::default().with_residual(),
        norm: StreamNorm::Behind {
            eps: 1e-5,
            centred: true,
        },
        ..gemm(8, 1)
    };
    assert_eq!(refused(added), "no GEMM of a norm adds a residual");
}

#[test]
fn a_norm_between_two_gemms_is_that_of_the_rows_between_them() {
    // Rows 1, 3 and 2, 2 with gamma 2, 1 and beta 1/2, 0: means of 2, deviations of 1 and 0.
    let gamma_and_beta: [&[f32]; 2] = [&[2.0, 1.0], &[0.5, 0.0]];
    let rows = [1.0, 3.0];
    let (scaled, row_stats) = stream_scaled(&rows, &gamma_and_beta);
    assert_eq!(row_stats, [4.0, 10.0]);
    assert_eq!(scaled.len(), 3 * 2);
    let normal = stream_normals(&scaled, &row_stats, 1, 2, 1e-12, true);
    assert_eq!(normal, [-1.5, 1.0]);
    // A mean square of 25.
    let (scaled, row_stats) = stream_scaled(&[1.0, 7.0], &gamma_and_beta[..1]);
    let normal = stream_normals(&scaled, &row_stats, 1, 2, 0.0, false);
    assert_eq!(normal, [0.4, 1.4]);
}
