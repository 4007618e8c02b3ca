//! The vector code on every instruction set that this machine has, not only on the widest.

use pulp::{Scalar, Simd, WithSimd};

use super::*;
use crate::runtime::cpu::ops::parallel::SharedOut;
use crate::runtime::cpu::ops::product::DotRows;
use crate::runtime::cpu::ops::simd::{self, GeluExact, GeluTanh, Pointwise, Running, Silu, Tanh};

fn on_every_instruction_set<Op: WithSimd + Clone>(op: Op) -> Vec<(&'static str, Op::Output)> {
    let mut results = vec![("scalar", Scalar::new().vectorize(op.clone()))];
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(simd) = pulp::x86::V3::try_new() {
            results.push(("AVX2", Simd::vectorize(simd, op.clone())));
        }
        if let Some(simd) = pulp::x86::V4::try_new() {
            results.push(("AVX-512", Simd::vectorize(simd, op.clone())));
        }
    }
    results.push(("dispatched", simd::dispatch(op)));
    results
}

#[derive(Clone, Copy)]
struct Exp;

impl Pointwise for Exp {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::f32s) -> S::f32s {
        simd::exp(simd, x)
    }
}

#[derive(Clone)]
struct Mapped<'a, F>(F, &'a [f32]);

impl<F: Pointwise> WithSimd for Mapped<'_, F> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.1.len()];
        simd::map(simd, self.0, self.1, &mut out);
        out
    }
}

#[test]
fn exp_is_within_a_few_units_in_the_last_place() {
    let x: Vec<f32> = (-87_300..=88_300).map(|i| i as f32 / 1000.0).collect();
    for (set, got) in on_every_instruction_set(Mapped(Exp, &x)) {
        for (&x, &got) in x.iter().zip(&got) {
            let want = f64::from(x).exp();
            let error = (f64::from(got) / want - 1.0).abs();
            assert!(error < 3e-7, "{set}: exp({x}): got {got}, want {want}");
        }
    }
}

#[test]
fn exp_of_values_out_of_range_stays_finite_and_nan_stays_nan() {
    let x = [f32::NEG_INFINITY, -1e30, 1e30, f32::INFINITY, f32::NAN];
    for (set, got) in on_every_instruction_set(Mapped(Exp, &x)) {
        assert!(
            got[..2].iter().all(|&e| (0.0..1.3e-38).contains(&e)),
            "{set}: {got:?}"
        );
        assert!(
            got[2..4].iter().all(|&e| e > 2e38 && e.is_finite()),
            "{set}: {got:?}"
        );
        assert!(got[4].is_nan(), "{set}: {got:?}");
    }
}

#[test]
fn activations_are_near_their_definitions_on_every_instruction_set() {
    fn check(f: impl Pointwise, definition: fn(f64) -> f64) {
        let x: Vec<f32> = (-8000..=8000).map(|i| i as f32 / 1000.0).collect();
        for (set, got) in on_every_instruction_set(Mapped(f, &x)) {
            // Without fused products, each step of a polynomial rounds twice.
            let bound = if set == "scalar" { 2e-6 } else { 1e-6 };
            for (&x, &got) in x.iter().zip(&got) {
                let want = definition(f64::from(x));
                let error = (f64::from(got) - want).abs();
                assert!(error < bound, "{set}: of {x}: got {got}, want {want}");
            }
        }
    }
    check(GeluExact, gelu_exact);
    check(GeluTanh, gelu_tanh);
    check(Tanh, f64::tanh);
    check(Silu, |x| x / (1.0 + (-x).exp()));
}

/// Numerators of a row that is met in two parts, brought to one maximum, over their sum.
#[derive(Clone)]
struct SoftmaxInTwo<'a>(&'a [f32], usize);

impl WithSimd for SoftmaxInTwo<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
        let mut row = self.0.to_vec();
        let mut running = Running::START;
        let (a, b) = row.split_at_mut(self.1);
        simd::softmax_numerators(simd, a, 1.0, &mut running);
        let correction = simd::softmax_numerators(simd, b, 1.0, &mut running);
        for x in a {
            *x *= correction;
        }
        for x in &mut row {
            *x /= running.sum;
        }
        row
    }
}

#[test]
fn online_softmax_of_two_parts_is_the_softmax_of_the_whole() {
    for (n, at, rise) in [
        (2, 1, 0.0),
        (40, 17, 30.0),
        (67, 32, -30.0),
        (33, 32, 200.0),
    ] {
        let mut x = noise(n, 1);
        x[at..].iter_mut().for_each(|x| *x += rise);
        let max = x.iter().copied().fold(f32::MIN, f32::max);
        let e: Vec<f64> = x
            .iter()
            .map(|&x| (f64::from(x) - f64::from(max)).exp())
            .collect();
        let sum: f64 = e.iter().sum();
        let want: Vec<f64> = e.iter().map(|e| e / sum).collect();
        for (_, got) in on_every_instruction_set(SoftmaxInTwo(&x, at)) {
            assert_close(&got, &want, 1e-6);
        }
    }
}

#[derive(Clone)]
struct Normalized<'a> {
    x: &'a [f32],
    gamma: &'a [f32],
    beta: &'a [f32],
}

impl WithSimd for Normalized<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
        let mut row = self.x.to_vec();
        simd::normalize(simd, &mut row, self.gamma, self.beta, 1e-5);
        row
    }
}

#[test]
fn normalize_is_its_definition_on_every_instruction_set() {
    for n in [1, 3, 8, 31, 100] {
        let (x, gamma, beta) = (noise(n, 1), noise(n, 2), noise(n, 3));
        let op = Normalized {
            x: &x,
            gamma: &gamma,
            beta: &beta,
        };
        let mean = wide(&x).iter().sum::<f64>() / n as f64;
        let variance = wide(&x).iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        let want: Vec<f64> = (0..n)
            .map(|i| {
                let unit = (f64::from(x[i]) - mean) / (variance + f64::from(1e-5_f32)).sqrt();
                unit * f64::from(gamma[i]) + f64::from(beta[i])
            })
            .collect();
        for (_, got) in on_every_instruction_set(op) {
            assert_close(&got, &want, 2e-6);
        }
    }
}

/// Both the tile of 4 × 4 and, with few registers, that of 3 × 3.
#[derive(Clone)]
struct Dots<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    rows: usize,
    cols: usize,
    k: usize,
}

impl WithSimd for Dots<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.rows * self.cols];
        let op = DotRows {
            x: self.x,
            weight: self.weight,
            rows: self.rows,
            cols: self.cols,
            k: self.k,
            out: SharedOut::new(&mut out),
            at: 0,
            stride: self.cols,
        };
        op.with_simd(simd);
        out
    }
}

#[test]
fn dot_products_are_the_product_on_every_instruction_set() {
    for (rows, cols, k) in [(1, 1, 1), (3, 4, 20), (4, 3, 33), (7, 10, 64), (2, 5, 7)] {
        let (x, weight) = (noise(rows * k, 1), noise(cols * k, 2));
        let want: Vec<f64> = (0..rows * cols)
            .map(|i| {
                let (row, col) = (i / cols, i % cols);
                (0..k)
                    .map(|j| f64::from(x[row * k + j]) * f64::from(weight[col * k + j]))
                    .sum()
            })
            .collect();
        let op = Dots {
            x: &x,
            weight: &weight,
            rows,
            cols,
            k,
        };
        for (_, got) in on_every_instruction_set(op) {
            assert_close(&got, &want, 1e-5);
        }
    }
}
