//! Pointwise functions, and their definitions in f64. The definitions are the references for the faster implementations on devices.

use std::f64::consts::{FRAC_2_SQRT_PI, PI, SQRT_2};

use serde::{Deserialize, Serialize};

/// A pointwise function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Activation {
    /// `x·Φ(x)` with the error function, as in BERT's checkpoints.
    GeluExact,
    /// The tanh approximation of GELU. It differs from the exact function by at most about 5e-4.
    GeluTanh,
    Relu,
    Tanh,
    /// `x / (1 + exp(−x))`.
    Silu,
    /// `x / (1 + exp(−1.702 x))`, the approximation of GELU by a sigmoid (Hendrycks and Gimpel 2016, section 2).
    QuickGelu,
    /// `ln(1 + max(x, 0))`, the term weights of SPLADE (Formal et al. 2021, section 3.1).
    Log1pRelu,
}

impl Activation {
    pub const ALL: [Activation; 7] = [
        Activation::GeluExact,
        Activation::GeluTanh,
        Activation::Relu,
        Activation::Tanh,
        Activation::Silu,
        Activation::QuickGelu,
        Activation::Log1pRelu,
    ];

    /// Name in kernel symbols.
    pub const fn name(self) -> &'static str {
        match self {
            Activation::GeluExact => "gelu",
            Activation::GeluTanh => "gelu_tanh",
            Activation::Relu => "relu",
            Activation::Tanh => "tanh",
            Activation::Silu => "silu",
            Activation::QuickGelu => "quick_gelu",
            Activation::Log1pRelu => "log1p_relu",
        }
    }

    /// Max absolute error near 0 of the device function for 16-bit types, before its result is rounded to 16 bits. For GELU, this bound is
    /// 0.18 · 2⁻¹⁶, and it holds for results below 2⁻⁶ in magnitude.
    pub const fn error_at_zero(self) -> f32 {
        match self {
            Activation::GeluExact | Activation::GeluTanh => 2.8e-6,
            Activation::Relu
            | Activation::Tanh
            | Activation::Silu
            | Activation::QuickGelu
            | Activation::Log1pRelu => 1e-7,
        }
    }

    /// Name of the device function in `partials/activation.cu`.
    pub const fn function(self) -> &'static str {
        match self {
            Activation::GeluExact => "gelu_exact",
            Activation::GeluTanh => "gelu_tanh",
            Activation::Relu => "relu",
            Activation::Tanh => "tanh_of",
            Activation::Silu => "silu",
            Activation::QuickGelu => "quick_gelu",
            Activation::Log1pRelu => "log1p_relu",
        }
    }
}

impl From<Activation> for gemmule_cpu::Activation {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::GeluExact => Self::GeluExact,
            Activation::GeluTanh => Self::GeluTanh,
            Activation::Relu => Self::Relu,
            Activation::Tanh => Self::Tanh,
            Activation::Silu => Self::Silu,
            Activation::QuickGelu => Self::QuickGelu,
            Activation::Log1pRelu => Self::Log1pRelu,
        }
    }
}

/// Returns the activation of `x`, with a relative error of about 1e-15, including the tails.
pub fn activate_f64(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::GeluExact => x * 0.5 * erfc(-x / SQRT_2),
        Activation::GeluTanh => {
            let inner = (2.0 / PI).sqrt() * (x + 0.044715 * x * x * x);
            // This equals x · (1 + tanh(inner)) / 2, without its cancellation if `inner` is far below 0.
            x / (1.0 + (-2.0 * inner).exp())
        }
        // NaN is preserved, as by the other activations.
        Activation::Relu if x < 0.0 => 0.0,
        Activation::Relu => x,
        Activation::Tanh => x.tanh(),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::QuickGelu => x / (1.0 + (-1.702 * x).exp()),
        Activation::Log1pRelu if x < 0.0 => 0.0,
        Activation::Log1pRelu => x.ln_1p(),
    }
}

/// The error function.
pub fn erf(x: f64) -> f64 {
    if x.abs() < SERIES_BELOW {
        erf_series(x)
    } else {
        (1.0 - erfc_fraction(x.abs())).copysign(x)
    }
}

/// Returns `1 − erf(x)` without cancellation for large x.
pub fn erfc(x: f64) -> f64 {
    if x.is_nan() {
        x
    } else if x.abs() < SERIES_BELOW {
        1.0 - erf_series(x)
    } else if x > 0.0 {
        erfc_fraction(x)
    } else {
        2.0 - erfc_fraction(-x)
    }
}

/// Arguments below this threshold use a series, which computes `erf` in few terms. Other arguments use a continued fraction, which
/// computes `erfc` in few levels. The series would be less precise for large arguments: `erfc` is small (5e-3 at 2), so `1 − erf` would
/// lose digits.
const SERIES_BELOW: f64 = 2.0;

/// Abramowitz and Stegun 7.1.6: `2/√π · exp(−x²) · Σ 2ⁿx²ⁿ⁺¹ / (1·3·…·(2n + 1))`. All terms have the same sign.
fn erf_series(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    let mut odd = 1.0;
    while term.abs() > sum.abs() * 1e-17 {
        odd += 2.0;
        term *= 2.0 * x * x / odd;
        sum += term;
    }
    FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// Abramowitz and Stegun 7.1.14 for x ≥ 2: `exp(−x²)/√π · 1/(x + ½/(x + 1/(x + 3/2/(x + …))))`. The continued fraction is cut off after
/// 80 levels, and evaluated from the innermost level outward.
fn erfc_fraction(x: f64) -> f64 {
    let fraction = (1..=80)
        .rev()
        .fold(x, |below, level| x + f64::from(level) * 0.5 / below);
    (-x * x).exp() * FRAC_2_SQRT_PI * 0.5 / fraction
}

#[cfg(test)]
mod tests {
    use std::f64::consts::LN_2;

    use super::*;

    /// Checks values from tables with 20 digits.
    #[test]
    fn the_error_function_matches_published_values() {
        for (x, want) in [
            (0.1, 0.112_462_916_018_284_89),
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.0, 0.995_322_265_018_952_7),
            (3.0, 0.999_977_909_503_001_4),
        ] {
            assert!((erf(x) - want).abs() < 3e-16, "erf({x}) = {}", erf(x));
            assert!((erf(-x) + want).abs() < 3e-16, "erf(-{x}) = {}", erf(-x));
        }
        for (x, want) in [
            (2.0, 4.677_734_981_047_266e-3),
            (3.0, 2.209_049_699_858_544e-5),
            (5.0, 1.537_459_794_428_035e-12),
        ] {
            assert!(
                (erfc(x) / want - 1.0).abs() < 1e-13,
                "erfc({x}) = {:e}",
                erfc(x)
            );
        }
    }

    #[test]
    fn activations_have_their_defined_values() {
        for (activation, at_one, at_minus_one) in [
            (
                Activation::GeluExact,
                0.841_344_746_068_543,
                -0.158_655_253_931_457,
            ),
            (
                Activation::GeluTanh,
                0.841_191_990_608_277,
                -0.158_808_009_391_723,
            ),
            (Activation::Relu, 1.0, 0.0),
            (
                Activation::Tanh,
                0.761_594_155_955_765,
                -0.761_594_155_955_765,
            ),
            (
                Activation::Silu,
                0.731_058_578_630_005,
                -0.268_941_421_369_995,
            ),
            (
                Activation::QuickGelu,
                0.845_795_765_932_821,
                -0.154_204_234_067_179,
            ),
            (Activation::Log1pRelu, LN_2, 0.0),
        ] {
            for (x, want) in [(1.0, at_one), (-1.0, at_minus_one), (0.0, 0.0)] {
                let found = activate_f64(activation, x);
                assert!(
                    (found - want).abs() < 1e-14,
                    "{activation:?} of {x} is {found}"
                );
            }
        }
    }

    #[test]
    fn series_and_fraction_agree_where_they_meet() {
        let below = 2.0f64.next_down();
        assert!((erfc(below) / erfc(2.0) - 1.0).abs() < 1e-13);
    }

    #[test]
    fn activations_have_their_limits() {
        for a in Activation::ALL {
            assert_eq!(activate_f64(a, 0.0), 0.0, "{a:?}");
            assert!(activate_f64(a, f64::NAN).is_nan(), "{a:?}");
        }
        for gelu in [Activation::GeluExact, Activation::GeluTanh] {
            assert_eq!(activate_f64(gelu, 40.0), 40.0);
            assert_eq!(activate_f64(gelu, -40.0), 0.0);
        }
        assert!((activate_f64(Activation::GeluExact, 1.0) - 0.841_344_746_068_542_9).abs() < 1e-15);
        assert!((activate_f64(Activation::GeluTanh, 1.0) - 0.841_191_990_608_276).abs() < 1e-12);
        assert_eq!(activate_f64(Activation::Relu, -3.0), 0.0);
        assert_eq!(activate_f64(Activation::Relu, 3.0), 3.0);
    }
}
