use super::*;
use crate::{
    kernels::{
        HostTensor,
        gemm::{
            DeferredLayerNormGemm, Gemm, GemmPrepareAttention, GemmResidualNorm,
            GemmResidualRowStats, SplitKTile, WgmmaTile,
        },
        layernorm::BiasResidualLayerNorm,
        prepare_attention::PrepareAttention,
    },
    ops::{Activation, Epilogue, Rotation, activate_f64},
};

fn spec(n: usize, k: usize, bias: bool, activation: Option<Activation>) -> KernelSpec {
    // The tile is ignored on the CPU.
    Gemm::of(n as u32, k as u32, F32, Epilogue::new(bias, activation)).into()
}

fn check(rows: usize, n: usize, k: usize, bias: bool, activation: Option<Activation>) {
    let (x, weight) = (noise(rows * k, 1), noise(n * k, 2));
    let b = noise(n, 3);
    let mut reads = vec![Read::Real(&x), Read::Real(&weight)];
    if bias {
        reads.push(Read::Real(&b));
    }
    let mut want = vec![0.0; rows * n];
    for r in 0..rows {
        for c in 0..n {
            let mut sum = if bias { f64::from(b[c]) } else { 0.0 };
            for i in 0..k {
                sum += f64::from(x[r * k + i]) * f64::from(weight[c * k + i]);
            }
            want[r * n + c] = activation.map_or(sum, |f| activate_f64(f, sum));
        }
    }
    let extents = Batch::new(&[1]).extents.with_rows(rows as u64);
    let kernel = spec(n, k, bias, activation);
    let got = output(&kernel, &extents, &reads, rows * n);
    assert_close(&got, &want, 1e-5);
    let KernelSpec::Gemm(mut gemm) = kernel else {
        unreachable!("it is a GEMM")
    };
    let residual = noise(rows * n, 4);
    reads.push(Read::Real(&residual));
    gemm.problem.epilogue.residual = true;
    let kernel = KernelSpec::Gemm(gemm);
    let got = output(&kernel, &extents, &reads, rows * n);
    let sums = want.iter().zip(&residual);
    let want: Vec<f64> = sums.map(|(want, &r)| want + f64::from(r)).collect();
    assert_close(&got, &want, 1e-5);
}

#[test]
fn gemm_is_the_product_with_the_transposed_weight() {
    // Sizes just below and just above a tile, a panel and a block of rows.
    for rows in [1, 3, 4, 64, 65] {
        for n in [1, 5, 96, 100, 200] {
            for k in [1, 2, 3, 16, 37] {
                check(rows, n, k, false, None);
            }
        }
    }
}

#[test]
fn gemm_is_the_same_in_parallel_tasks_of_rows_and_columns() {
    check(12, 300, 400, true, Some(Activation::Relu));
    check(530, 100, 40, true, None);
    check(1100, 30, 24, true, Some(Activation::Tanh));
    check(130, 97, 60, false, Some(Activation::GeluExact));
}

#[test]
fn gemm_of_depth_zero_is_the_bias() {
    check(3, 5, 0, true, None);
    check(70, 5, 0, false, None);
}

#[test]
fn every_epilogue_is_applied_to_the_sum_with_the_bias() {
    let activations = [
        None,
        Some(Activation::GeluExact),
        Some(Activation::GeluTanh),
        Some(Activation::Relu),
        Some(Activation::Tanh),
    ];
    for activation in activations {
        for bias in [false, true] {
            check(5, 21, 12, bias, activation);
            check(70, 101, 12, bias, activation);
        }
    }
}

#[test]
fn products_residual_and_norm_are_those_of_the_reference() {
    let (rows, n, k) = (5, 256, 24);
    for (bias, keeps_sum, centered) in [
        (true, false, true),
        (false, false, true),
        (true, true, false),
        (false, true, true),
    ] {
        let spec = KernelSpec::GemmResidualNorm(GemmResidualNorm {
            n: n as u32,
            k: k as u32,
            eps: 1e-12,
            dtype: F32,
            bias,
            keeps_sum,
            centered,
            // Ignored on the CPU.
            tile: GemmResidualNorm::TILES[0],
        });
        let mut operands = vec![noise(rows * k, 1), noise(n * k, 2)];
        if bias {
            operands.push(noise(n, 3));
        }
        operands.extend([noise(rows * n, 4), noise(n, 5)]);
        if centered {
            operands.push(noise(n, 6));
        }
        let extents = Batch::new(&[1]).extents.with_rows(rows as u64);
        let reads: Vec<Read> = operands.iter().map(|o| Read::Real(o)).collect();
        let mut got = vec![vec![f32::NAN; rows * n]; spec.as_kernel().n_writes()];
        let mut writes: Vec<&mut [f32]> = got.iter_mut().map(Vec::as_mut_slice).collect();
        run(&spec, &extents, &reads, &mut writes).expect("the operands fit");
        let tensors: Vec<HostTensor> = operands.into_iter().map(HostTensor::Real).collect();
        let tensors: Vec<&HostTensor> = tensors.iter().collect();
        let want = spec.as_kernel().reference(&extents, &tensors);
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(&want) {
            assert_close(got, &wide(want.real()), 1e-4);
        }
    }
}

#[test]
fn row_statistics_and_deferred_layer_norms_agree_with_the_references() {
    let (rows, n, k) = (5, 136, 24);
    let extents = Batch::new(&[1]).extents.with_rows(rows as u64);
    for bias in [true, false] {
        let before = KernelSpec::GemmResidualRowStats(GemmResidualRowStats {
            n: n as u32,
            k: k as u32,
            dtype: F32,
            bias,
            // Ignored on the CPU.
            tile: SplitKTile {
                tokens: 8,
                splits: 1,
            },
        });
        let normed = KernelSpec::DeferredLayerNormGemm(DeferredLayerNormGemm {
            n: k as u32,
            k: n as u32,
            eps: 1e-12,
            dtype: F32,
            epilogue: Epilogue::new(bias, Some(Activation::GeluTanh)),
            // Ignored on the CPU.
            tokens: 8,
        });
        // The statistics of a row consist of parts for 64, 64 and 8 columns.
        let (mut scaled, mut stats) = (vec![f32::NAN; rows * n], vec![f32::NAN; rows * 6]);
        let mut operands = vec![noise(rows * k, 1), noise(n * k, 2)];
        if bias {
            operands.push(noise(n, 3));
        }
        operands.extend([noise(rows * n, 4), noise(n, 5)]);
        let reads: Vec<Read> = operands.iter().map(|o| Read::Real(o)).collect();
        run(&before, &extents, &reads, &mut [&mut scaled, &mut stats]).unwrap();
        let want = reference(&before, &extents, operands.clone());
        assert_close(&scaled, &wide(want[0].real()), 1e-4);
        assert_close(&stats, &wide(want[1].real()), 1e-3);

        let (mut normal, mut out) = (vec![f32::NAN; rows * n], vec![f32::NAN; rows * k]);
        let beta = noise(n, 6);
        let mut normed_operands = vec![scaled, stats, operands.remove(operands.len() - 1), beta];
        normed_operands.push(noise(n * k, 7));
        if bias {
            normed_operands.push(noise(k, 8));
        }
        let reads: Vec<Read> = normed_operands.iter().map(|o| Read::Real(o)).collect();
        run(&normed, &extents, &reads, &mut [&mut normal, &mut out]).unwrap();
        let want = reference(&normed, &extents, normed_operands.clone());
        assert_close(&normal, &wide(want[0].real()), 1e-5);
        assert_close(&out, &wide(want[1].real()), 1e-4);

        // The two kernels together compute the LayerNorm of the sum.
        let norm = BiasResidualLayerNorm::new(n as u32, 1e-12, F32, bias);
        let product = Gemm::of(n as u32, k as u32, F32, Epilogue::default());
        let products = reference(&product.into(), &extents, operands[..2].to_vec());
        let mut of_norm = vec![products[0].real().to_vec()];
        of_norm.extend(operands[2..].iter().cloned());
        of_norm.extend(normed_operands[2..4].iter().cloned());
        let want = reference(&norm.into(), &extents, of_norm);
        assert_close(&normal, &wide(want[0].real()), 1e-4);

        let one = run(&before, &extents, &reads, &mut [&mut out]);
        assert_eq!(
            one.expect_err("a tensor is missing").to_string(),
            "gemm_residual_row_stats writes two tensors; 1 were given"
        );
        let one = run(&normed, &extents, &reads, &mut [&mut out]);
        assert_eq!(
            one.expect_err("a tensor is missing").to_string(),
            "deferred_layernorm_gemm writes two tensors; 1 were given"
        );
    }
}

/// Evaluates the reference of a kernel with these operands.
fn reference(spec: &KernelSpec, extents: &Extents, operands: Vec<Vec<f32>>) -> Vec<HostTensor> {
    let tensors: Vec<HostTensor> = operands.into_iter().map(HostTensor::Real).collect();
    let tensors: Vec<&HostTensor> = tensors.iter().collect();
    spec.as_kernel().reference(extents, &tensors)
}

#[test]
fn a_projection_prepared_for_attention_agrees_with_the_reference() {
    let (tokens, k) = (5, 24);
    let prepare = PrepareAttention {
        heads: 2,
        kv_heads: 1,
        head: 4,
        columns: [4, 12, 0],
        row: 16,
        norm: None,
        rotation: Some(Rotation {
            heads: 2,
            frequencies: vec![1.0, 0.1],
            factor: 1.0,
        }),
        pool: None,
        dtype: F32,
    };
    let spec = KernelSpec::GemmPrepareAttention(GemmPrepareAttention {
        k: k as u32,
        bias: true,
        fp8: false,
        prepare,
        // Ignored on the CPU.
        tile: WgmmaTile::CANDIDATES[0],
    });
    let operands = [tokens * k, 16 * k, 16].map(|n| noise(n, n as u64));
    let positions: Vec<i32> = (0..tokens as i32).collect();
    let extents = Batch::new(&[tokens as u32])
        .extents
        .with_rows(tokens as u64);
    let reads = operands.iter().map(|o| Read::Real(o));
    let reads: Vec<Read> = reads.chain([Read::I32(&positions)]).collect();
    let mut got = [16, 8, 4].map(|width| vec![f32::NAN; tokens * width]);
    let mut writes = got.each_mut().map(Vec::as_mut_slice);
    run(&spec, &extents, &reads, &mut writes).expect("the operands fit");
    let mut tensors = operands.map(HostTensor::Real).to_vec();
    tensors.push(HostTensor::Index(
        positions.into_iter().map(i64::from).collect(),
    ));
    let tensors: Vec<&HostTensor> = tensors.iter().collect();
    let want = spec.as_kernel().reference(&extents, &tensors);
    for (row, want) in got[0].chunks(16).zip(want[0].real().chunks(16)) {
        // Compare only the first 4 columns (v of attention), because the reference does not compute the other columns.
        assert_close(&row[..4], &wide(&want[..4]), 1e-4);
        assert!(want[4..].iter().all(|v| v.is_nan()));
    }
    assert_close(&got[1], &wide(want[1].real()), 1e-4);
    assert_close(&got[2], &wide(want[2].real()), 1e-4);
}
