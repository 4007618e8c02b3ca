use super::*;
use crate::{ops::Activation, tensor::Format};

const GELU: Epilogue = Epilogue::new(true, Some(Activation::GeluExact));

fn gemm(n: u32, k: u32, dtype: DType, epilogue: Epilogue) -> Gemm {
    Gemm::of(n, k, dtype, epilogue)
}

#[test]
fn the_reference_is_the_definition_on_a_worked_example() {
    let relu = Epilogue::new(true, Some(Activation::Relu));
    let kernel = gemm(2, 3, DType::F32, relu);
    let x = HostTensor::Real(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let weight = HostTensor::Real(vec![1.0, 0.0, -1.0, 2.0, 1.0, 0.5]);
    let bias = HostTensor::Real(vec![1.0, -0.5]);
    let extents = Extents::of(&[2]).expect("a batch");
    let out = kernel.reference(&extents, &[&x, &weight, &bias]);
    // Row 0: 1 − 3 + 1 = −1 → 0 and 2 + 2 + 1.5 − 0.5 = 5. Row 1: 4 − 6 + 1 → 0 and 15.5.
    assert_eq!(out, [HostTensor::Real(vec![0.0, 5.0, 0.0, 15.5])]);
}

#[test]
fn a_residual_is_added_after_the_activation() {
    let relu = Epilogue::new(true, Some(Activation::Relu)).with_residual();
    let kernel = gemm(1, 2, DType::F32, relu);
    let real = |values: &[f32]| HostTensor::Real(values.to_vec());
    let (x, weight) = (real(&[1.0, 2.0, 3.0, -9.0]), real(&[1.0, 1.0]));
    let (bias, residual) = (real(&[0.5]), real(&[10.0, -4.0]));
    let extents = Extents::of(&[2]).expect("a batch");
    let out = kernel.reference(&extents, &[&x, &weight, &bias, &residual]);
    assert_eq!(out, [real(&[13.5, -4.0])]);
}

#[test]
fn the_reference_sums_all_of_a_long_odd_row() {
    let k = 1003;
    let kernel = gemm(1, k, DType::F32, Epilogue::default());
    let x = HostTensor::Real((1..=k).map(|i| i as f32).collect());
    let ones = HostTensor::Real(vec![1.0; k as usize]);
    let extents = Extents::of(&[1]).expect("a batch");
    let out = kernel.reference(&extents, &[&x, &ones]);
    assert_eq!(out, [HostTensor::Real(vec![(k * (k + 1) / 2) as f32])]);
}

#[test]
fn the_symbol_names_the_epilogue_and_the_tile() {
    let mut kernel = gemm(3072, 768, DType::F16, GELU);
    kernel.tile = Tile::candidates(DType::F16)[0];
    assert_eq!(
        kernel.symbol(),
        "gemm_bias_gelu_f16_n3072_k768_t128x256x32_w2x4_s4"
    );
    kernel.problem.epilogue = Epilogue::default();
    assert!(kernel.symbol().starts_with("gemm_f16_"));
    kernel.problem.epilogue.activation = Some(Activation::Tanh);
    assert!(kernel.symbol().starts_with("gemm_tanh_f16_"));
}

#[test]
fn a_launch_covers_every_output_once() {
    for dtype in [DType::F32, DType::F16] {
        for &tile in Tile::candidates(dtype) {
            let kernel = Gemm {
                tile,
                ..gemm(1003, 320, dtype, GELU)
            };
            let extents = Extents::of(&[129]).expect("a batch");
            let launch = kernel.launch(&extents, &crate::machine::testing::hopper());
            let ctas = 129u32.div_ceil(tile.m) * 1003u32.div_ceil(tile.n);
            assert_eq!(launch.grid, [ctas, 1, 1]);
            assert_eq!(launch.threads, 32 * tile.warps_m * tile.warps_n);
            assert!(launch.shared_bytes <= 99 * 1024);
        }
    }
}

#[test]
fn bias_is_a_parameter_only_where_it_is_added() {
    let names = |epilogue| -> Vec<&str> {
        let params = gemm(768, 768, DType::F16, epilogue).params();
        params.iter().map(|p| p.name).collect()
    };
    assert_eq!(names(GELU), ["x", "weight", "bias", "out", "rows"]);
    assert_eq!(names(Epilogue::default()), ["x", "weight", "out", "rows"]);
}

#[test]
fn accesses_are_as_wide_as_every_row_is_aligned() {
    let widths = |n, k, dtype| {
        let constants = gemm(n, k, dtype, GELU).constants();
        (
            constants["copy_bytes"].clone(),
            constants["store_bytes"].clone(),
        )
    };
    let int = |bytes: u64| crate::kernels::Constant::Int(bytes);
    assert_eq!(widths(768, 768, DType::F16), (int(16), int(8)));
    assert_eq!(widths(2, 1004, DType::F16), (int(8), int(4)));
    assert_eq!(widths(1, 1002, DType::BF16), (int(4), int(2)));
    assert_eq!(widths(1003, 1003, DType::BF16), (int(2), int(2)));
    assert_eq!(widths(768, 768, DType::F32), (int(16), int(16)));
    assert_eq!(widths(1003, 1003, DType::F32), (int(4), int(4)));
    assert_eq!(widths(2, 6, DType::F32), (int(8), int(8)));
}

#[test]
fn symbols_are_equal_if_and_only_if_kernels_are_equal() {
    let mut symbols = std::collections::BTreeSet::new();
    let mut kernels = 0;
    let activations = Activation::ALL.map(Some).into_iter().chain([None]);
    for activation in activations {
        for bias in [false, true] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for &tile in Tile::candidates(dtype) {
                    let epilogue = Epilogue::new(bias, activation);
                    for epilogue in [epilogue, epilogue.with_residual()] {
                        let kernel = Gemm {
                            tile,
                            ..gemm(768, 320, dtype, epilogue)
                        };
                        symbols.insert(kernel.symbol());
                        kernels += 1;
                    }
                }
            }
        }
    }
    assert_eq!(symbols.len(), kernels);
}

#[test]
fn operands_in_e4m3_need_whole_rows_of_16_bytes_and_have_no_gate() {
    let refused = |problem: GemmProblem| {
        let tile = Tile::reading(Format::E4m3, DType::F16)[0];
        let gemm = Gemm { problem, tile };
        assert_eq!(gemm.instructions(), Instructions::Ada);
        gemm.validate().err().unwrap_or_default()
    };
    let fp8 = |n, k, epilogue| GemmProblem::new(n, k, DType::F16, epilogue).in_e4m3();
    let to_e4m3 = |problem| GemmProblem {
        to_e4m3: true,
        ..problem
    };
    let plain = Epilogue::default();
    assert_eq!(refused(fp8(3, 48, GELU.with_residual())), "");
    assert_eq!(refused(to_e4m3(fp8(36, 48, GELU))), "");
    insta::assert_snapshot!(refused(fp8(64, 40, plain)), @"the GEMM of E4M3 does not support k = 40; expected a multiple of 16");
    assert!(
        refused(to_e4m3(fp8(34, 48, plain)))
            .contains("expected no residual, and a multiple of 4 columns")
    );
    let residual = to_e4m3(fp8(36, 48, plain.with_residual()));
    assert!(refused(residual).starts_with("a result of 36 columns in E4M3 with Epilogue"));
    let gated = fp8(64, 48, plain).with_gate(Activation::Silu);
    insta::assert_snapshot!(refused(gated), @"a gate, which only kernels for Hopper compute in a GEMM");
    let in_f32 = GemmProblem {
        dtype: DType::F32,
        ..fp8(64, 48, plain)
    };
    assert!(refused(in_f32).contains("is not a tile for f32 with a weight in"));
}

#[test]
fn k_is_measured_in_pairs_of_e4m3_elements() {
    let problem = GemmProblem::new(768, 768, DType::F16, GELU).in_e4m3();
    let int = |value: u32| crate::kernels::Constant::Int(value.into());
    for tile in Tile::reading(problem.weight, problem.dtype) {
        let problem = problem.clone();
        let constants = Gemm { problem, tile }.constants();
        assert_eq!(constants["k"], int(384));
        assert_eq!(constants["block_k"], int(tile.k / 2));
        assert_eq!(constants["copy_bytes"], int(16));
    }
}

#[test]
fn quantized_rows_in_int8_have_the_padding_of_the_packed_weight() {
    let with = |weight, k| GemmProblem {
        weight,
        quantized_rows: true,
        ..GemmProblem::new(1003, k, DType::BF16, GELU)
    };
    let problem = with(Format::INT8, 328);
    let int = |value: u32| crate::kernels::Constant::Int(value.into());
    let tiles = Tile::of(&problem);
    assert_eq!(tiles.len(), 9);
    for &tile in &tiles {
        let problem = problem.clone();
        let gemm = Gemm { problem, tile };
        gemm.validate().expect("any number of columns is supported");
        assert_eq!(gemm.instructions(), Instructions::Ampere);
        let constants = gemm.constants();
        assert_eq!(constants["k"], int(384 / 2));
        assert_eq!(constants["copy_bytes"], int(16));
    }
    let refused = |problem| {
        let tile = tiles[0];
        Gemm { problem, tile }.validate().unwrap_err()
    };
    let gated = with(Format::INT8, 328).with_gate(Activation::Silu);
    insta::assert_snapshot!(refused(gated), @"a gate, which only kernels for Hopper compute in a GEMM");
    insta::assert_snapshot!(refused(with(Format::FP8, 328)), @"quantized rows, which only the persistent GEMM for Hopper and, in int8, the GEMM for any GPU read");
    insta::assert_snapshot!(refused(with(Format::INT8_32, 328)), @"quantized rows of 328 columns, a weight in int8_g32 and results in bf16; expected a weight in fp8 or fp8_g128, or in int8 with at most 65536 columns, and results in f16 or bf16");
    insta::assert_snapshot!(refused(with(Format::INT8, 65544)), @"quantized rows of 65544 columns, a weight in int8 and results in bf16; expected a weight in fp8 or fp8_g128, or in int8 with at most 65536 columns, and results in f16 or bf16");
}
