//! Instances of the GEMM that streams its weight, at odd sizes.

use super::{
    super::{
        odd_sizes::{odd_formats, odd_sizes},
        wgmma,
    },
    GemmProblem, GemmStream, StreamNorm,
};
use crate::{
    kernels::{Instructions, KernelSpec},
    ops::{Activation, Epilogue},
    tensor::DType,
};

/// Instances with all kinds of tiles, epilogues and gates, both parts of a split norm ([`StreamNorm`]), and sizes that include odd
/// multiples of 8.
pub fn representative() -> Vec<KernelSpec> {
    let mut kernels = Vec::new();
    let mut add = |kernel: GemmStream, few: bool| {
        let tiles = kernel.tiles(Instructions::Hopper).into_iter().enumerate();
        let chosen = tiles.filter(|(at, _)| !few || at % 5 == 0);
        kernels.extend(chosen.map(|(_, kernel)| KernelSpec::from(kernel)));
    };
    let of = |n, k, dtype: DType, epilogue| GemmStream::of(GemmProblem::new(n, k, dtype, epilogue));
    for problem in odd_sizes() {
        let few = problem.dtype != DType::F16;
        add(GemmStream::of(problem), few);
    }
    let plain = Epilogue::default();
    let bias = Epilogue::new(true, None);
    let gelu = Epilogue::new(true, Some(Activation::GeluTanh));
    let gate = |gemm: GemmStream| GemmStream {
        problem: gemm.problem.with_gate(Activation::Silu),
        ..gemm
    };
    for dtype in [DType::F16, DType::BF16] {
        // Vocabularies with an odd number of tokens. The second weight is so large that a CTA computes more than one tile.
        add(of(5003, 136, dtype, bias), true);
        add(of(20_001, 72, dtype, plain.with_residual()), true);
        for centered in [false, true] {
            let before = StreamNorm::Before { centered };
            let after = StreamNorm::After {
                eps: 1e-5,
                centered,
            };
            let with = |norm, gemm| GemmStream { norm, ..gemm };
            add(
                with(before, of(768, 1000, dtype, bias.with_residual())),
                true,
            );
            add(
                with(before, of(328, 328, dtype, plain.with_residual())),
                true,
            );
            add(with(after, of(1000, 768, dtype, gelu)), true);
            add(with(after, of(328, 328, dtype, plain)), true);
            add(gate(with(after, of(2000, 328, dtype, plain))), true);
        }
        let gated = gate(of(6160, 328, dtype, bias));
        add(gated.clone(), true);
        for (at, weight) in odd_formats().enumerate() {
            let packed = |gemm: GemmStream| GemmStream {
                problem: GemmProblem {
                    weight,
                    ..gemm.problem
                },
                ..gemm
            };
            let few = dtype != DType::F16;
            add(packed(of(1000, 328, dtype, gelu)), few || at > 0);
            add(packed(of(5003, 136, dtype, bias)), true);
            add(packed(of(8, 8, dtype, plain)), true);
            add(packed(of(2056, 1096, dtype, plain.with_residual())), true);
            add(packed(gated.clone()), true);
            // In bf16, add norms only for every other format, because their code depends neither on the storage type nor on the weight's
            // format.
            for centered in [false, true] {
                if few && at % 2 == 1 {
                    continue;
                }
                let before = StreamNorm::Before { centered };
                let after = StreamNorm::After {
                    eps: 1e-5,
                    centered,
                };
                let with = |norm, gemm| GemmStream {
                    norm,
                    ..packed(gemm)
                };
                let residual = bias.with_residual();
                add(with(before, of(328, 1000, dtype, residual)), true);
                add(with(after, of(1000, 768, dtype, gelu)), true);
                add(gate(with(after, of(2000, 328, dtype, plain))), true);
            }
        }
    }
    kernels.extend(in_e4m3());
    kernels
}

/// Instances of the problems with which [`GemmWgmma`](super::super::GemmWgmma) is tested in E4M3, and of a problem with an odd number of
/// columns.
fn in_e4m3() -> impl Iterator<Item = KernelSpec> {
    let odd = GemmProblem::new(5003, 144, DType::F16, Epilogue::new(true, None)).in_e4m3();
    let problems = wgmma::fp8_problems().chain([odd]).enumerate();
    problems.flat_map(|(at, problem)| {
        let tiles = GemmStream::of(problem).tiles(Instructions::Hopper);
        // Take all tiles of the first problem, and some tiles of the other problems.
        let tiles = tiles.into_iter().enumerate();
        let chosen = tiles.filter(move |(tile, _)| at == 0 || tile % 5 == at % 5);
        chosen.map(|(_, kernel)| KernelSpec::from(kernel))
    })
}
