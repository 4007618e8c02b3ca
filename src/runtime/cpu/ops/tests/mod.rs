//! Tests that compare each kernel with its definition, written out in f64.

mod attention;
mod errors;
mod fp8;
mod gemm;
mod linear;
mod long_attention;
mod pooling;
mod prepared;
mod rows;

use super::{OpError, Read, run};
use crate::kernels::KernelSpec;
use crate::ops::HeadView;
use crate::tensor::{DType, Extents};

const F32: DType = DType::F32;

/// Returns `n` pseudorandom numbers in (−1, 1) that depend only on `seed`.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x2545_F491_4F6C_DD1D;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// A batch with the arrays that describe it.
#[derive(Clone)]
struct Batch {
    extents: Extents,
    lens: Vec<usize>,
    cu_lens: Vec<i32>,
    pair_offsets: Vec<i64>,
}

impl Batch {
    fn new(lens: &[u32]) -> Self {
        let (mut cu_lens, mut pair_offsets) = (vec![0], vec![0]);
        let (mut token, mut pair) = (0, 0);
        for &n in lens {
            token += n as i32;
            pair += i64::from(n) * i64::from(n);
            cu_lens.push(token);
            pair_offsets.push(pair);
        }
        Self {
            extents: Extents::of(lens).unwrap(),
            lens: lens.iter().map(|&n| n as usize).collect(),
            cu_lens,
            pair_offsets,
        }
    }

    fn tokens(&self) -> usize {
        self.extents.tokens as usize
    }

    fn pairs(&self) -> usize {
        self.extents.pairs as usize
    }

    /// First token, first pair and length of each sequence.
    fn sequences(&self) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        self.lens
            .iter()
            .enumerate()
            .map(|(b, &len)| (self.cu_lens[b] as usize, self.pair_offsets[b] as usize, len))
    }
}

/// Batches with one token, with ragged lengths, with lengths around the width of a vector, and with a length that needs several blocks of
/// queries and of keys.
fn batches() -> Vec<Batch> {
    [&[1][..], &[2, 1, 3], &[15, 16, 17, 33, 5], &[600, 7]]
        .map(Batch::new)
        .into()
}

/// Runs a kernel and returns its output of `n` elements, which is filled with NaN before the run. Panics if the kernel fails.
fn output(spec: &KernelSpec, extents: &Extents, reads: &[Read<'_>], n: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; n];
    run(spec, extents, reads, &mut [&mut out]).unwrap();
    out
}

/// Checks `|got − want| ≤ tolerance · (1 + |want|)` everywhere.
#[track_caller]
fn assert_close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(
            error <= tolerance * (1.0 + want.abs()),
            "element {i}: got {got}, want {want}"
        );
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Index of an element, computed by the documented formula of the view.
fn at(view: HeadView, tokens: usize, head: usize, h: usize, t: usize, c: usize) -> usize {
    match view {
        HeadView::HeadMajor => (h * tokens + t) * head + c,
        HeadView::TokenMajor { offset, stride } => {
            t * stride as usize + offset as usize + h * head + c
        }
    }
}

/// Computes `erf` by a series whose terms all have the same sign, to avoid cancellation.
fn erf(x: f64) -> f64 {
    if x.abs() >= 6.0 {
        return x.signum();
    }
    // 2/√π · e^(−x²) · Σ 2ⁿ x^(2n+1) / (1·3·5···(2n+1))
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term.abs() > 1e-17 * sum.abs() {
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

fn gelu_exact(x: f64) -> f64 {
    0.5 * x * (1.0 + erf(x / 2.0_f64.sqrt()))
}

fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}
