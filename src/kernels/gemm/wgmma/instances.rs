//! Instances of the Hopper GEMM, at odd sizes.

use super::{GemmProblem, GemmWgmma, WgmmaTile};
use crate::{
    kernels::{Instructions, KernelSpec},
    ops::{Activation, Epilogue},
    tensor::{DType, Format},
};

/// Instances with every tile, several epilogues, direct and TMA stores, and sizes that include odd multiples of 32 and of 8. Most instances
/// are in f16, because the storage type affects only conversions.
pub fn representative() -> Vec<KernelSpec> {
    let plain = Epilogue::default();
    let gelu = Epilogue::new(true, Some(Activation::GeluExact));
    let mut kernels = Vec::new();
    for (dtype, sizes) in [
        (
            DType::F16,
            &[
                (768, 768, plain),
                (992, 328, gelu),
                (8, 8, plain),
                (768, 328, Epilogue::new(true, None).with_residual()),
                (1000, 72, plain.with_residual()),
            ][..],
        ),
        (DType::BF16, &[(1000, 328, gelu)][..]),
    ] {
        let problems = sizes
            .iter()
            .map(|&(n, k, epilogue)| GemmProblem::new(n, k, dtype, epilogue));
        let bias = Epilogue::new(dtype == DType::BF16, None);
        let gate = GemmProblem::new(704, 328, dtype, bias).with_gate(Activation::Silu);
        let problems: Vec<_> = problems.chain([gate]).collect();
        for tile in WgmmaTile::CANDIDATES {
            let with_tile = |problem: &GemmProblem| GemmWgmma {
                problem: problem.clone(),
                tile,
            };
            let all = problems.iter().map(with_tile);
            let valid = all.filter(|kernel| kernel.check().is_ok());
            kernels.extend(valid.map(KernelSpec::from));
        }
    }
    let quantized = [Format::FP8, Format::FP8_128, Format::INT8]
        .into_iter()
        .flat_map(quantized_rows);
    kernels.extend(fp8_problems().chain(quantized).flat_map(|problem| {
        let kernels = GemmWgmma::kernels(&problem, Instructions::Hopper).into_iter();
        kernels.map(KernelSpec::from)
    }));
    kernels
}

/// Returns problems with quantized rows and a weight in this format: every epilogue, and sizes that are not multiples of a tile or of two
/// blocks of columns.
fn quantized_rows(weight: Format) -> impl Iterator<Item = GemmProblem> {
    let plain = Epilogue::default();
    let bias = Epilogue::new(true, None);
    let gelu = Epilogue::new(true, Some(Activation::GeluExact));
    let of = move |dtype, n, k, epilogue| GemmProblem {
        weight,
        quantized_rows: true,
        ..GemmProblem::new(n, k, dtype, epilogue)
    };
    let gate = move |dtype, epilogue| of(dtype, 704, 328, epilogue).with_gate(Activation::Silu);
    let (f16, bf16) = (DType::F16, DType::BF16);
    [
        of(f16, 992, 328, gelu),
        of(f16, 768, 768, plain),
        of(f16, 1008, 72, plain.with_residual()),
        of(f16, 768, 3072, bias.with_residual()),
        gate(f16, plain),
        of(bf16, 1008, 328, gelu),
        of(bf16, 16, 8, plain),
        gate(bf16, bias),
    ]
    .into_iter()
}

/// Returns problems in [`Format::E4m3`] with every epilogue and every type of result, at sizes that are not multiples of a tile.
pub(in crate::kernels::gemm) fn fp8_problems() -> impl Iterator<Item = GemmProblem> {
    let plain = Epilogue::default();
    let bias = Epilogue::new(true, None);
    let gelu = Epilogue::new(true, Some(Activation::GeluExact));
    let of = |dtype, n, k, epilogue| GemmProblem::new(n, k, dtype, epilogue).in_e4m3();
    let gate = |dtype, epilogue| of(dtype, 704, 336, epilogue).with_gate(Activation::Silu);
    let to_e4m3 = |problem| GemmProblem {
        to_e4m3: true,
        ..problem
    };
    let (f16, bf16) = (DType::F16, DType::BF16);
    [
        to_e4m3(of(f16, 992, 336, gelu)),
        of(f16, 768, 768, plain),
        of(f16, 1000, 80, plain.with_residual()),
        of(f16, 768, 3072, bias.with_residual()),
        to_e4m3(gate(f16, plain)),
        of(bf16, 1000, 336, gelu),
        to_e4m3(of(bf16, 768, 336, plain)),
        gate(bf16, bias),
    ]
    .into_iter()
}
