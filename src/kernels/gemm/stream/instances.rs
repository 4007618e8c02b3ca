//! Instances of the GEMM that streams its weight, at odd sizes.

use super::{
    super::odd_sizes::{odd_formats, odd_sizes},
    GemmStream, StreamNorm, StreamTile,
};
use crate::{
    kernels::{Instructions, KernelSpec},
    ops::{Activation, Epilogue},
    tensor::DType,
};

/// Tiles of all kinds, with epilogues, gates and both parts of norms, and sizes that include odd multiples of 8.
pub fn representative() -> Vec<KernelSpec> {
    let mut kernels = Vec::new();
    let mut add = |kernel: GemmStream, few: bool| {
        for (at, tile) in kernel.tiles(Instructions::Hopper).into_iter().enumerate() {
            if !few || at % 5 == 0 {
                let kernel = kernel.clone();
                kernels.push(KernelSpec::from(GemmStream { tile, ..kernel }));
            }
        }
    };
    let of = |n, k, dtype: DType, epilogue| GemmStream {
        n,
        k,
        dtype,
        weight: dtype.into(),
        epilogue,
        gated: false,
        norm: StreamNorm::None,
        tile: StreamTile::new(8, 1, 1, 1),
    };
    for (n, k, dtype, epilogue) in odd_sizes() {
        add(of(n, k, dtype, epilogue), dtype != DType::F16);
    }
    let plain = Epilogue::default();
    let bias = Epilogue::new(true, None);
    let gelu = Epilogue::new(true, Some(Activation::GeluTanh));
    let silu = |bias| Epilogue::new(bias, Some(Activation::Silu));
    for dtype in [DType::F16, DType::BF16] {
        // Odd vocabulary sizes, and weights with many tiles per CTA.
        add(of(5003, 136, dtype, bias), true);
        add(of(20_001, 72, dtype, plain.with_residual()), true);
        for centred in [false, true] {
            let before = StreamNorm::Before { centred };
            let after = StreamNorm::After { eps: 1e-5, centred };
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
            let gate = |gemm| GemmStream {
                gated: true,
                ..gemm
            };
            add(gate(with(after, of(1000, 328, dtype, silu(false)))), true);
        }
        let gate = GemmStream {
            gated: true,
            ..of(3080, 328, dtype, silu(true))
        };
        add(gate.clone(), true);
        for (at, weight) in odd_formats().enumerate() {
            let packed = |gemm| GemmStream { weight, ..gemm };
            let few = dtype != DType::F16;
            add(packed(of(1000, 328, dtype, gelu)), few || at > 0);
            add(packed(of(5003, 136, dtype, bias)), true);
            add(packed(of(8, 8, dtype, plain)), true);
            add(packed(of(2056, 1096, dtype, plain.with_residual())), true);
            add(packed(gate.clone()), true);
            // Norms are independent of the type and of the format.
            for centred in [false, true] {
                if few && at % 2 == 1 {
                    continue;
                }
                let before = StreamNorm::Before { centred };
                let after = StreamNorm::After { eps: 1e-5, centred };
                let with = |norm, gemm| GemmStream {
                    norm,
                    ..packed(gemm)
                };
                let residual = bias.with_residual();
                add(with(before, of(328, 1000, dtype, residual)), true);
                add(with(after, of(1000, 768, dtype, gelu)), true);
                let gated = with(after, of(1000, 328, dtype, silu(false)));
                add(
                    GemmStream {
                        gated: true,
                        ..gated
                    },
                    true,
                );
            }
        }
    }
    kernels.extend(super::fp8::representative());
    kernels
}
