use super::*;

#[test]
fn the_reference_normalizes_a_row_worked_by_hand() {
    let kernel = BiasResidualLayerNorm::new(4, 0.0, DType::F32, true);
    let real = |v: [f32; 4]| HostTensor::Real(v.to_vec());
    // The sums are 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5.
    let x = real([1.0, 1.0, 1.0, 1.0]);
    let bias = real([0.0, 1.0, 2.0, 3.0]);
    let residual = real([0.0, 1.0, 2.0, 3.0]);
    let gamma = real([1.0, 1.0, 2.0, 1.0]);
    let beta = real([0.0, 0.0, 0.0, 10.0]);
    let extents = Extents::of(&[1]).unwrap();
    let out = kernel.reference(&extents, &[&x, &bias, &residual, &gamma, &beta]);
    let r = 5f32.sqrt().recip();
    let want = [-3.0 * r, -r, 2.0 * r, 3.0 * r + 10.0];
    for (got, want) in out[0].real().iter().zip(want) {
        assert!((got - want).abs() < 1e-6, "{got} {want}");
    }

    let plain = LayerNorm::new(4, 4.0, DType::F32); // variance 5 + 4 = 9
    let x = real([1.0, 3.0, 5.0, 7.0]);
    let (one, zero) = (real([1.0; 4]), real([0.0; 4]));
    let out = plain.reference(&extents, &[&x, &one, &zero]);
    assert_eq!(out[0].real(), [-1.0, -1.0 / 3.0, 1.0 / 3.0, 1.0]);
}

#[test]
fn the_bias_is_a_parameter_only_where_there_is_one() {
    let names = |bias| -> Vec<&str> {
        let kernel = BiasResidualLayerNorm::new(768, 1e-12, DType::F16, bias);
        kernel.params().iter().map(|p| p.name).collect()
    };
    let without = ["x", "residual", "gamma", "beta", "out", "rows"];
    let with = ["x", "bias", "residual", "gamma", "beta", "out", "rows"];
    assert_eq!(
        (names(true), names(false)),
        (with.to_vec(), without.to_vec())
    );
}

#[test]
fn different_kernels_have_different_symbols() {
    let mut symbols = std::collections::BTreeSet::new();
    let mut n_kernels = 0;
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for width in [128, 768, 1003, 8192] {
            let plain = LayerNorm::new(width, 1e-12, dtype).candidates();
            let sums = BiasResidualLayerNorm::new(width, 1e-12, dtype, true).candidates();
            n_kernels += plain.len() + sums.len();
            symbols.extend(plain.iter().map(Kernel::symbol));
            symbols.extend(sums.iter().map(Kernel::symbol));
        }
    }
    assert_eq!(symbols.len(), n_kernels);
    // The symbol of the default kernel names neither teams nor variance. Other symbols name what differs from the default.
    assert!(symbols.contains("layernorm_f16_w768_eps1em12"));
    assert!(symbols.contains("bias_residual_layernorm_f16_w768_eps1em12_warps3_x1_two_pass"));
}

#[test]
fn few_rows_have_a_separate_kernel_and_the_last_serves_all_others() {
    let variants = BiasResidualLayerNorm::new(768, 1e-12, DType::F32, true)
        .by_rows(&crate::machine::testing::hopper());
    let limits: Vec<Option<u64>> = variants.iter().map(|(rows, _)| *rows).collect();
    assert_eq!(
        limits,
        [
            Some(27 * u64::from(crate::machine::testing::hopper().sms)),
            None
        ]
    );
    assert_eq!(
        variants[0].1.teams,
        Teams {
            warps: 6,
            x_rows: 1
        }
    );
    assert_eq!(
        variants[1].1,
        BiasResidualLayerNorm::new(768, 1e-12, DType::F32, true)
    );
}

/// Returns the sum of a row in f32, in the kernel's order of additions: each lane adds its packs (of `vector` elements) one after another,
/// then the lanes add their sums in the butterfly pattern of `warp_all_reduce_xelem`.
fn warp_sum(row: &[f32], vector: usize) -> f32 {
    let mut lanes = [0f32; 32];
    for (i, pack) in row.chunks(vector).enumerate() {
        pack.iter().for_each(|v| lanes[i % 32] += v);
    }
    for offset in [16, 8, 4, 2, 1] {
        let before = lanes;
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += before[lane ^ offset];
        }
    }
    lanes[0]
}

/// Returns a row of mean 1000 and deviation 0.1. A normal value is approximated by the sum of twelve uniform values.
fn far_from_zero(width: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 40) as f64 / (1u64 << 24) as f64
    };
    (0..width)
        .map(|_| {
            let normal = (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
            (1000.0 + 0.1 * normal) as f32
        })
        .collect()
}

#[test]
fn the_shifted_variance_survives_a_large_mean_and_the_naive_one_does_not() {
    let mut worst_shifted = 0f64;
    let mut best_naive = f64::INFINITY;
    for (width, vector) in [(768usize, 4usize), (1024, 4), (1003, 1)] {
        for seed in 1..=16 {
            let row = far_from_zero(width, seed);
            let n = width as f64;
            let mean = row.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
            let exact = row
                .iter()
                .map(|&v| (f64::from(v) - mean).powi(2))
                .sum::<f64>()
                / n;
            let variance = |s: f32| {
                let d: Vec<f32> = row.iter().map(|v| v - s).collect();
                let squares: Vec<f32> = d.iter().map(|d| d * d).collect();
                let share = 1.0 / width as f32;
                let mean = warp_sum(&d, vector) * share;
                warp_sum(&squares, vector) * share - mean * mean
            };
            let error = |v: f32| (f64::from(v) - exact).abs() / exact;
            worst_shifted = worst_shifted.max(error(variance(row[0])));
            best_naive = best_naive.min(error(variance(0.0)));
        }
    }
    assert!(worst_shifted < 1e-5, "relative error {worst_shifted}");
    assert!(best_naive > 0.1, "relative error {best_naive}");
}
