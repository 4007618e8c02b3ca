//! Benchmarks of the CPU kernels that dominate a MiniLM-sized encoder (hidden size 384, 12 heads of 32, inner size 1536), on 32 sentences
//! of 5 to 60 tokens and on one sentence of 10.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use gemmule::kernels::KernelSpec;
use gemmule::kernels::gemm::Gemm;
use gemmule::kernels::layernorm::BiasResidualLayerNorm;
use gemmule::runtime::cpu::ops::{MatmulPrecision, PackedWeight, Read, run};
use gemmule::tensor::{DType, Extents};
use gemmule::{
    kernels::attention::MhaOnline,
    ops::{Activation, AttentionProblem, Epilogue, HeadView, default_scale},
};

const WIDTH: u32 = 384;
const INNER: u32 = 1536;
const HEADS: u32 = 12;
const HEAD: u32 = 32;

/// Returns `n` deterministic values in (−0.5, 0.5).
fn values(n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| ((i * 7919 + 13) % 1009) as f32 / 1009.0 - 0.5)
        .collect()
}

fn batches() -> [(&'static str, Vec<u32>); 2] {
    let ragged = (0..32).map(|i| 5 + i * 37 % 56).collect();
    [("32_sentences", ragged), ("1_sentence", vec![10])]
}

fn extents(lens: &[u32]) -> Extents {
    Extents::of(lens).expect("the lengths above are valid")
}

/// Runs a kernel. [`black_box`] keeps the compiler from removing the computation of the unused result.
fn launch(spec: &KernelSpec, extents: &Extents, reads: &[Read<'_>], out: &mut [f32]) {
    run(spec, extents, reads, &mut [out]).expect("the arguments fit the kernel");
    black_box(out);
}

fn gemm(c: &mut Criterion) {
    let shapes = [
        ("qkv", 3 * WIDTH, WIDTH, None),
        ("up_gelu", INNER, WIDTH, Some(Activation::GeluExact)),
        ("down", WIDTH, INNER, None),
    ];
    let mut group = c.benchmark_group("gemm");
    for (batch, lens) in batches() {
        let extents = extents(&lens);
        for (name, n, k, activation) in shapes {
            let rows = extents.tokens as usize;
            let x = values(rows * k as usize);
            let weight = values((n * k) as usize);
            // Pack the weight once, as when a model is loaded.
            let weight = PackedWeight::new(&weight, n as usize, k as usize, MatmulPrecision::F32);
            let bias = values(n as usize);
            let mut out = vec![0.0; rows * n as usize];
            // `Gemm::of` also chooses a tile, which the CPU ignores.
            let epilogue = Epilogue::new(true, activation);
            let spec = KernelSpec::from(Gemm::of(n, k, DType::F32, epilogue));
            let reads = [Read::Real(&x), Read::Packed(&weight), Read::Real(&bias)];
            // Throughput is in floating-point operations: one multiplication and one addition per product.
            group.throughput(Throughput::Elements(
                2 * extents.tokens * u64::from(n) * u64::from(k),
            ));
            group.bench_function(BenchmarkId::new(name, batch), |b| {
                b.iter(|| launch(&spec, &extents, &reads, &mut out));
            });
        }
    }
}

fn layernorm(c: &mut Criterion) {
    let mut group = c.benchmark_group("bias_residual_layernorm");
    for (batch, lens) in batches() {
        let extents = extents(&lens);
        let n = (extents.tokens * u64::from(WIDTH)) as usize;
        let (x, residual, vector) = (values(n), values(n), values(WIDTH as usize));
        let mut out = vec![0.0; n];
        let spec = KernelSpec::BiasResidualLayerNorm(BiasResidualLayerNorm::new(
            WIDTH,
            1e-12,
            DType::F32,
            true,
        ));
        let reads = [&x, &vector, &residual, &vector, &vector].map(|x| Read::Real(x));
        group.bench_function(batch, |b| {
            b.iter(|| launch(&spec, &extents, &reads, &mut out));
        });
    }
}

fn attention(c: &mut Criterion) {
    let mut group = c.benchmark_group("mha_online");
    let long = [("1x2048", vec![2048]), ("8x400", vec![400; 8])];
    for (batch, lens) in batches().into_iter().chain(long) {
        let extents = extents(&lens);
        let tokens = extents.tokens as usize;
        let qkv = values(tokens * 3 * WIDTH as usize);
        let cu_lens: Vec<i32> = std::iter::once(0)
            .chain(lens.iter().scan(0, |end, &n| {
                *end += n as i32;
                Some(*end)
            }))
            .collect();
        let mut out = vec![0.0; tokens * WIDTH as usize];
        let part = |i| HeadView::TokenMajor {
            offset: i * WIDTH,
            stride: 3 * WIDTH,
        };
        let spec = KernelSpec::MhaOnline(MhaOnline {
            of: AttentionProblem::full(HEADS, HEAD, default_scale(HEAD), [0, 1, 2].map(part)),
            dtype: DType::F32,
        });
        let reads = [
            Read::Real(&qkv),
            Read::Real(&qkv),
            Read::Real(&qkv),
            Read::I32(&cu_lens),
        ];
        group.bench_function(batch, |b| {
            b.iter(|| launch(&spec, &extents, &reads, &mut out));
        });
    }
}

criterion_group!(benches, gemm, layernorm, attention);
criterion_main!(benches);
