//! Vector arithmetic on slices for any instruction set.
//!
//! The crate is compiled for the base instruction set of its architecture. Hot loops are therefore written against [`pulp::Simd`], and
//! [`dispatch`] selects the instruction set at run time. Everything generic over `S` is `inline(always)`: only code that is inlined into
//! the dispatched function may use its instruction set.

use std::iter::zip;

use pulp::{Arch, Simd, WithSimd};

/// Runs `op` with the widest vectors of this machine.
pub(crate) fn dispatch<Op: WithSimd>(op: Op) -> Op::Output {
    Arch::new().dispatch(op)
}

/// Computes `eˣ` with a relative error of at most 3e-7. The result is `e^−87.3` for `x` below −87.3, where `eˣ` would be subnormal, and
/// `e^88.3` for `x` above 88.3. NaN stays NaN.
///
/// Uses `x = n·ln 2 + r` with `|r| ≤ ln 2 / 2`, a polynomial of degree 6 for `eʳ` (Cephes `expf`), and `2ⁿ` assembled from
/// exponent bits.
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Adding this constant rounds to the nearest integer, which is then in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let x = clamp(simd, x, -87.3, 88.3);
    let shifted = simd.mul_add_e_f32s(
        x,
        simd.splat_f32s(std::f32::consts::LOG2_E),
        simd.splat_f32s(ROUND),
    );
    let n = simd.sub_f32s(shifted, simd.splat_f32s(ROUND));
    // ln 2 is split in two, so that the subtraction is exact without fused multiply-add.
    let r = simd.mul_add_e_f32s(n, simd.splat_f32s(-0.693_359_4), x);
    let r = simd.mul_add_e_f32s(n, simd.splat_f32s(2.121_944_4e-4), r);
    let tail = polynomial(
        simd,
        r,
        &[
            1.987_569_1e-4,
            1.398_199_9e-3,
            8.333_452e-3,
            4.166_579_6e-2,
            1.666_666_5e-1,
            0.5,
        ],
    );
    let r2 = simd.mul_f32s(r, r);
    let mantissa = simd.mul_add_e_f32s(tail, r2, simd.add_f32s(r, simd.splat_f32s(1.0)));
    let biased = simd.add_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(127));
    let power = simd.wrapping_dyn_shl_u32s(biased, simd.splat_u32s(23));
    simd.mul_f32s(mantissa, simd.transmute_f32s_u32s(power))
}

/// Computes `2ˣ` for `x ≤ 0` with a relative error of at most 3e-7. The result is `2^−126` for `x` below −126, where `2ˣ` would be
/// subnormal. NaN stays NaN.
///
/// Uses a polynomial for the fraction of `x` between −½ and ½, times `2ⁿ` assembled from exponent bits.
#[inline(always)]
pub(crate) fn exp2_of_negative<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Adding this constant rounds to the nearest integer. The integer plus the exponent bias is then in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    let low = simd.splat_f32s(-126.0);
    let x = simd.select_f32s(simd.less_than_f32s(x, low), low, x);
    let shifted = simd.add_f32s(x, simd.splat_f32s(ROUND));
    let r = simd.sub_f32s(x, simd.sub_f32s(shifted, simd.splat_f32s(ROUND)));
    #[expect(clippy::approx_constant, reason = "fitted with the others")]
    let mantissa = polynomial(
        simd,
        r,
        &[
            1.326_472_7e-3,
            9.671_514e-3,
            5.550_733_7e-2,
            2.402_224_2e-1,
            6.931_47e-1,
            1.0,
        ],
    );
    let power = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    // Use a multiplication. Adding to the exponent bits would turn some NaNs into numbers.
    simd.mul_f32s(mantissa, simd.transmute_f32s_u32s(power))
}

/// Computes `tanh x` with an absolute error of at most 1e-6, as an odd polynomial divided by an even one, like Eigen's `ptanh`.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let x = clamp(simd, x, -7.905_311, 7.905_311);
    let x2 = simd.mul_f32s(x, x);
    let p = polynomial(
        simd,
        x2,
        &[
            -2.760_768_4e-16,
            2.000_188e-13,
            -8.604_672e-11,
            5.122_297e-8,
            1.485_722_4e-5,
            6.372_619e-4,
            4.893_524_6e-3,
        ],
    );
    let q = polynomial(
        simd,
        x2,
        &[1.198_258_4e-6, 1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3],
    );
    simd.div_f32s(simd.mul_f32s(x, p), q)
}

/// Computes `erf x` to about f32 precision, as an odd polynomial divided by an even one, like Eigen's `perf`.
#[inline(always)]
pub(crate) fn erf<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let x = clamp(simd, x, -4.0, 4.0);
    let x2 = simd.mul_f32s(x, x);
    let p = polynomial(
        simd,
        x2,
        &[
            -2.726_142_3e-10,
            2.770_681_5e-8,
            -2.101_024e-6,
            -5.692_506_3e-5,
            -7.349_906e-4,
            -2.954_6e-3,
            -1.609_603_3e-2,
        ],
    );
    let q = polynomial(
        simd,
        x2,
        &[
            -1.456_607_2e-5,
            -2.133_740_5e-4,
            -1.682_827e-3,
            -7.373_329e-3,
            -1.426_473_9e-2,
        ],
    );
    simd.div_f32s(simd.mul_f32s(x, p), q)
}

/// Computes `x·Φ(x)`. The absolute error is at most 1e-6 for `|x| ≤ 8` (2e-6 without fused multiply-add). For larger `|x|` the result is
/// exactly 0 or `x`.
#[inline(always)]
fn gelu_exact<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let half = simd.splat_f32s(0.5);
    let erf = erf(
        simd,
        simd.mul_f32s(x, simd.splat_f32s(std::f32::consts::FRAC_1_SQRT_2)),
    );
    let half_x = simd.mul_f32s(half, x);
    saturate(simd, x, simd.mul_add_e_f32s(half_x, erf, half_x))
}

#[inline(always)]
fn gelu_tanh<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    let x2 = simd.mul_f32s(x, x);
    let inner = simd.mul_add_e_f32s(
        x2,
        simd.splat_f32s(0.044_715 * SQRT_2_OVER_PI),
        simd.splat_f32s(SQRT_2_OVER_PI),
    );
    let tanh = tanh(simd, simd.mul_f32s(x, inner));
    let half_x = simd.mul_f32s(simd.splat_f32s(0.5), x);
    saturate(simd, x, simd.mul_add_e_f32s(half_x, tanh, half_x))
}

/// Replaces GELU by its limits, 0 and `x`, beyond ±5.66, where the difference is below 5e-8. Otherwise, a large `x` would multiply the
/// rounding error of `erf` or `tanh`.
#[inline(always)]
fn saturate<S: Simd>(simd: S, x: S::f32s, gelu: S::f32s) -> S::f32s {
    let low = simd.less_than_f32s(x, simd.splat_f32s(-5.66));
    let gelu = simd.select_f32s(low, simd.splat_f32s(0.0), gelu);
    let high = simd.less_than_f32s(simd.splat_f32s(5.66), x);
    simd.select_f32s(high, x, gelu)
}

/// Clamps `x` to `[low, high]`. Unlike a minimum and a maximum, it keeps NaN.
#[inline(always)]
fn clamp<S: Simd>(simd: S, x: S::f32s, low: f32, high: f32) -> S::f32s {
    let (low, high) = (simd.splat_f32s(low), simd.splat_f32s(high));
    let x = simd.select_f32s(simd.less_than_f32s(x, low), low, x);
    simd.select_f32s(simd.less_than_f32s(high, x), high, x)
}

/// Evaluates a polynomial with Horner's rule, highest degree first.
#[inline(always)]
fn polynomial<S: Simd, const N: usize>(simd: S, x: S::f32s, coefficients: &[f32; N]) -> S::f32s {
    let mut sum = simd.splat_f32s(coefficients[0]);
    for &c in &coefficients[1..] {
        sum = simd.mul_add_e_f32s(sum, x, simd.splat_f32s(c));
    }
    sum
}

/// A function of one value, implemented for vectors of any width.
pub(crate) trait Pointwise: Copy {
    fn apply<S: Simd>(self, simd: S, x: S::f32s) -> S::f32s;
}

macro_rules! pointwise {
    ($($(#[$doc:meta])* $name:ident($simd:ident, $x:ident) = $body:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name;
        impl Pointwise for $name {
            #[inline(always)]
            fn apply<S: Simd>(self, $simd: S, $x: S::f32s) -> S::f32s {
                $body
            }
        }
    )*};
}

pointwise! {
    Identity(_simd, x) = x;
    GeluExact(simd, x) = gelu_exact(simd, x);
    GeluTanh(simd, x) = gelu_tanh(simd, x);
    Tanh(simd, x) = tanh(simd, x);
    Silu(simd, x) = {
        let one = simd.splat_f32s(1.0);
        let below = simd.add_f32s(one, exp(simd, simd.neg_f32s(x)));
        simd.div_f32s(x, below)
    };
    QuickGelu(simd, x) = {
        let one = simd.splat_f32s(1.0);
        let power = exp(simd, simd.mul_f32s(x, simd.splat_f32s(-1.702)));
        simd.div_f32s(x, simd.add_f32s(one, power))
    };
    /// Computed element by element, because it is applied to only one row per sequence.
    Log1pRelu(simd, x) = {
        let zero = simd.splat_f32s(0.0);
        let mut positive = simd.select_f32s(simd.less_than_f32s(x, zero), zero, x);
        for element in bytemuck::cast_slice_mut::<S::f32s, f32>(std::slice::from_mut(&mut positive)) {
            *element = element.ln_1p();
        }
        positive
    };
    /// `max(x, 0)`, keeping NaN.
    Relu(simd, x) = {
        let zero = simd.splat_f32s(0.0);
        simd.select_f32s(simd.less_than_f32s(x, zero), zero, x)
    };
}

#[derive(Clone, Copy)]
pub(crate) struct Times(pub f32);

impl Pointwise for Times {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::f32s) -> S::f32s {
        simd.mul_f32s(x, simd.splat_f32s(self.0))
    }
}

/// `cap · tanh(x / cap)`.
#[derive(Clone, Copy)]
pub(crate) struct Capped {
    cap: f32,
    inverse: f32,
}

impl Capped {
    pub fn new(cap: f32) -> Self {
        Self {
            cap,
            inverse: 1.0 / cap,
        }
    }
}

impl Pointwise for Capped {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::f32s) -> S::f32s {
        let ratio = simd.mul_f32s(x, simd.splat_f32s(self.inverse));
        simd.mul_f32s(tanh(simd, ratio), simd.splat_f32s(self.cap))
    }
}

/// Softmax weight `exp(x − max) · factor`.
#[derive(Clone, Copy)]
pub(crate) struct Weight {
    pub max: f32,
    pub factor: f32,
}

impl Pointwise for Weight {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::f32s) -> S::f32s {
        let numerator = exp(simd, simd.sub_f32s(x, simd.splat_f32s(self.max)));
        simd.mul_f32s(numerator, simd.splat_f32s(self.factor))
    }
}

/// A pointwise function, selected at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x·Φ(x)` with the error function.
    GeluExact,
    /// The tanh approximation of GELU.
    GeluTanh,
    Relu,
    Tanh,
    /// `x / (1 + exp(−x))`.
    Silu,
    /// `x / (1 + exp(−1.702 x))`.
    QuickGelu,
    /// `ln(1 + max(x, 0))`.
    Log1pRelu,
}

/// Calls `$go` with the [`Pointwise`] function of an activation, or with [`Identity`] if there is none. The function is thus selected once
/// rather than per element.
macro_rules! with_activation {
    ($activation:expr, $f:ident => $go:expr) => {
        match $activation {
            None => {
                let $f = $crate::simd::Identity;
                $go
            }
            Some($crate::Activation::GeluExact) => {
                let $f = $crate::simd::GeluExact;
                $go
            }
            Some($crate::Activation::GeluTanh) => {
                let $f = $crate::simd::GeluTanh;
                $go
            }
            Some($crate::Activation::Relu) => {
                let $f = $crate::simd::Relu;
                $go
            }
            Some($crate::Activation::Tanh) => {
                let $f = $crate::simd::Tanh;
                $go
            }
            Some($crate::Activation::Silu) => {
                let $f = $crate::simd::Silu;
                $go
            }
            Some($crate::Activation::QuickGelu) => {
                let $f = $crate::simd::QuickGelu;
                $go
            }
            Some($crate::Activation::Log1pRelu) => {
                let $f = $crate::simd::Log1pRelu;
                $go
            }
        }
    };
}
pub(crate) use with_activation;

/// Computes `out = f(x)`.
#[inline(always)]
pub(crate) fn map<S: Simd, F: Pointwise>(simd: S, f: F, x: &[f32], out: &mut [f32]) {
    let (x, x_tail) = S::as_simd_f32s(x);
    let (out, out_tail) = S::as_mut_simd_f32s(out);
    for (out, &x) in zip(out, x) {
        *out = f.apply(simd, x);
    }
    if !out_tail.is_empty() {
        let x = simd.partial_load_f32s(x_tail);
        simd.partial_store_f32s(out_tail, f.apply(simd, x));
    }
}

/// Computes `x = f(x)`.
#[inline(always)]
pub(crate) fn map_in_place<S: Simd, F: Pointwise>(simd: S, f: F, x: &mut [f32]) {
    let (x, tail) = S::as_mut_simd_f32s(x);
    for x in x {
        *x = f.apply(simd, *x);
    }
    if !tail.is_empty() {
        let x = simd.partial_load_f32s(tail);
        simd.partial_store_f32s(tail, f.apply(simd, x));
    }
}

/// Computes `x = f(x + bias)`.
#[inline(always)]
pub(crate) fn add_map_in_place<S: Simd, F: Pointwise>(simd: S, f: F, bias: &[f32], x: &mut [f32]) {
    let (bias, bias_tail) = S::as_simd_f32s(bias);
    let (x, tail) = S::as_mut_simd_f32s(x);
    for (x, &bias) in zip(x, bias) {
        *x = f.apply(simd, simd.add_f32s(*x, bias));
    }
    if !tail.is_empty() {
        let bias = simd.partial_load_f32s(bias_tail);
        let x = simd.add_f32s(simd.partial_load_f32s(tail), bias);
        simd.partial_store_f32s(tail, f.apply(simd, x));
    }
}

/// Computes `out = a + b`.
#[inline(always)]
pub(crate) fn add<S: Simd>(simd: S, a: &[f32], b: &[f32], out: &mut [f32]) {
    let (a, a_tail) = S::as_simd_f32s(a);
    let (b, b_tail) = S::as_simd_f32s(b);
    let (out, out_tail) = S::as_mut_simd_f32s(out);
    for (out, (&a, &b)) in zip(out, zip(a, b)) {
        *out = simd.add_f32s(a, b);
    }
    if !out_tail.is_empty() {
        let (a, b) = (
            simd.partial_load_f32s(a_tail),
            simd.partial_load_f32s(b_tail),
        );
        simd.partial_store_f32s(out_tail, simd.add_f32s(a, b));
    }
}

/// Computes `sum += x`.
#[inline(always)]
pub(crate) fn accumulate<S: Simd>(simd: S, x: &[f32], sum: &mut [f32]) {
    add_map_in_place(simd, Identity, x, sum);
}

/// Sums the elements of `x`, by means of four vectors of partial sums.
#[inline(always)]
pub(crate) fn sum<S: Simd>(simd: S, x: &[f32]) -> f32 {
    let (x, tail) = S::as_simd_f32s(x);
    let (quads, rest) = pulp::as_arrays::<4, _>(x);
    let mut sums = [simd.splat_f32s(0.0); 4];
    for quad in quads {
        for i in 0..4 {
            sums[i] = simd.add_f32s(sums[i], quad[i]);
        }
    }
    for &x in rest {
        sums[0] = simd.add_f32s(sums[0], x);
    }
    reduce(simd, sums) + tail.iter().sum::<f32>()
}

/// Sums the squares of `x − shift`.
#[inline(always)]
pub(crate) fn sum_of_squares<S: Simd>(simd: S, x: &[f32], shift: f32) -> f32 {
    let (x, tail) = S::as_simd_f32s(x);
    let (quads, rest) = pulp::as_arrays::<4, _>(x);
    let shifts = simd.splat_f32s(shift);
    let mut sums = [simd.splat_f32s(0.0); 4];
    for quad in quads {
        for i in 0..4 {
            let d = simd.sub_f32s(quad[i], shifts);
            sums[i] = simd.mul_add_e_f32s(d, d, sums[i]);
        }
    }
    for &x in rest {
        let d = simd.sub_f32s(x, shifts);
        sums[0] = simd.mul_add_e_f32s(d, d, sums[0]);
    }
    reduce(simd, sums) + tail.iter().map(|x| (x - shift) * (x - shift)).sum::<f32>()
}

#[inline(always)]
fn reduce<S: Simd>(simd: S, sums: [S::f32s; 4]) -> f32 {
    let [a, b, c, d] = sums;
    simd.reduce_sum_f32s(simd.add_f32s(simd.add_f32s(a, b), simd.add_f32s(c, d)))
}

/// Replaces `row` by its LayerNorm with the biased variance. The variance is computed in a second pass around the mean, which avoids
/// cancellation if the mean is far from zero.
#[inline(always)]
pub(crate) fn normalize<S: Simd>(simd: S, row: &mut [f32], gamma: &[f32], beta: &[f32], eps: f32) {
    let n = row.len() as f32;
    let mean = sum(simd, row) / n;
    let variance = sum_of_squares(simd, row, mean) / n;
    let scale = 1.0 / (variance + eps).sqrt();
    let (mean_v, scale_v) = (simd.splat_f32s(mean), simd.splat_f32s(scale));
    let (x, tail) = S::as_mut_simd_f32s(row);
    let (gamma, gamma_tail) = S::as_simd_f32s(gamma);
    let (beta, beta_tail) = S::as_simd_f32s(beta);
    for (x, (&gamma, &beta)) in zip(x, zip(gamma, beta)) {
        let unit = simd.mul_f32s(simd.sub_f32s(*x, mean_v), scale_v);
        *x = simd.mul_add_e_f32s(unit, gamma, beta);
    }
    for (x, (gamma, beta)) in zip(tail, zip(gamma_tail, beta_tail)) {
        *x = (*x - mean) * scale * gamma + beta;
    }
}

/// Running maximum of a row's scaled scores, and the sum of `e^(score − max)`.
#[derive(Clone, Copy, Debug)]
pub struct Running {
    pub max: f32,
    pub sum: f32,
}

impl Running {
    pub const START: Running = Running {
        max: f32::NEG_INFINITY,
        sum: 0.0,
    };

    /// Returns the state before the first key of a row: the sink alone, or [`START`](Self::START) if there is no sink.
    pub fn after(sink: Option<f32>) -> Self {
        sink.map_or(Self::START, |max| Self { max, sum: 1.0 })
    }
}

/// Performs one step of the online softmax (Milakov and Gimelshein, algorithm 3) on a part of a row. Replaces each element by
/// `e^(scale·x − max)`, where the maximum now includes this part. Returns the factor that rescales the numerators of the earlier
/// parts to the new maximum. The softmax is the numerators divided by the sum.
#[inline(always)]
pub(crate) fn softmax_numerators<S: Simd>(
    simd: S,
    row: &mut [f32],
    scale: f32,
    running: &mut Running,
) -> f32 {
    let scales = simd.splat_f32s(scale);
    let (x, tail) = S::as_mut_simd_f32s(row);
    let mut max_v = simd.splat_f32s(running.max);
    for &x in x.iter() {
        max_v = simd.max_f32s(max_v, simd.mul_f32s(x, scales));
    }
    let mut max = simd.reduce_max_f32s(max_v);
    for x in tail.iter() {
        max = max.max(x * scale);
    }
    let max_v = simd.splat_f32s(max);
    let mut sums = simd.splat_f32s(0.0);
    for x in x {
        *x = exp(simd, simd.sub_f32s(simd.mul_f32s(*x, scales), max_v));
        sums = simd.add_f32s(sums, *x);
    }
    let mut sum = simd.reduce_sum_f32s(sums);
    if !tail.is_empty() {
        let x = simd.mul_f32s(simd.partial_load_f32s(tail), scales);
        simd.partial_store_f32s(tail, exp(simd, simd.sub_f32s(x, max_v)));
        for x in tail {
            sum += *x;
        }
    }
    let correction = (running.max - max).exp();
    *running = Running {
        max,
        sum: running.sum * correction + sum,
    };
    correction
}
