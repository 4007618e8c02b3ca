//! Activations in f64, the reference for the device's faster forms.

use std::f64::consts::{FRAC_2_SQRT_PI, PI, SQRT_2};

use super::Activation;

/// Returns the activation of `x`, with a relative error of about 1e-15, including the tails.
pub fn activate_f64(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::GeluExact => x * 0.5 * erfc(-x / SQRT_2),
        Activation::GeluTanh => {
            let inner = (2.0 / PI).sqrt() * (x + 0.044715 * x * x * x);
            // (1 + tanh u) / 2 without the cancellation where u is far below 0.
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

/// Bound below which the series needs few terms. From here on, the fraction needs few levels, and erfc (5e-3 here) would lose
/// digits as a difference.
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

/// Abramowitz and Stegun 7.1.14 for x ≥ 2, evaluated from its 80th level:
/// `exp(−x²)/√π · 1/(x + ½/(x + 1/(x + 3/2/(x + …))))`.
fn erfc_fraction(x: f64) -> f64 {
    let fraction = (1..=80)
        .rev()
        .fold(x, |below, level| x + f64::from(level) * 0.5 / below);
    (-x * x).exp() * FRAC_2_SQRT_PI * 0.5 / fraction
}

#[cfg(test)]
mod tests {
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

    /// Literals of a function's cheaper form in source order, read from the partial itself.
    fn device_literals(function: &str) -> Vec<f32> {
        let partial = include_str!("../../../templates/partials/activation.cu");
        let (_, body) = partial
            .split_once(&format!("float {function}("))
            .expect("the function is there");
        let (_, cheaper) = body.split_once("} else {").expect("it has two forms");
        let (polynomial, _) = cheaper
            .split_once("return")
            .expect("it returns what it computed");
        let code = polynomial.lines().filter(|l| !l.trim().starts_with("//"));
        code.flat_map(|line| line.split(['(', ')', ',', ' ', ';']))
            .filter_map(|word| word.strip_suffix('f')?.parse().ok())
            .collect()
    }

    /// log2 of `P(-t)` as computed by the device.
    fn device_exponent(activation: Activation, literals: &[f32], t: f32) -> f32 {
        match (activation, literals) {
            (Activation::GeluExact, &[a, b, c, d, e]) => {
                let z = a.mul_add(t, b).clamp(0.0, 1.0).mul_add(t, c);
                (-z.mul_add(z, d)).mul_add(t, e)
            }
            (Activation::GeluTanh, &[first, ref rest @ ..]) if rest.len() == 5 => {
                rest.iter().fold(first, |p, &c| p.mul_add(t, c))
            }
            _ => panic!("{activation:?} has other literals: {literals:?}"),
        }
    }

    #[test]
    fn the_device_forms_meet_the_error_bounds_in_the_partial() {
        for activation in [Activation::GeluExact, Activation::GeluTanh] {
            let literals = device_literals(activation.function());
            let (mut worst, mut worst_rounded, mut worst_small) = (0.0f64, 0.0f64, 0.0f64);
            let near = (-240_000..=240_000i32).map(|step| step as f32 * 5e-5);
            let far = (0..=400).map(|step| 12.0 * 1.05f32.powi(step));
            for x in near.chain(far.clone()).chain(far.map(|x| -x)) {
                let t = x.abs();
                let p = device_exponent(activation, &literals, t);
                let got = (-t).mul_add(p.exp2(), x.max(0.0));
                let want = activate_f64(activation, x.into());
                let ulp = |least: f64| {
                    let exponent = want.abs().max(least).log2().floor() as i32;
                    2f64.powi(exponent - 10)
                };
                worst = worst.max((f64::from(got) - want).abs() / ulp(2f64.powi(-6)));
                if want.abs() < 65_504.0 {
                    let rounded = f64::from(half::f16::from_f32(got).to_f32());
                    let off = (rounded - want).abs();
                    match want.abs() < 2f64.powi(-6) {
                        true => worst_small = worst_small.max(off),
                        false => worst_rounded = worst_rounded.max(off / ulp(2f64.powi(-14))),
                    }
                }
            }
            assert!(worst < 0.18, "{activation:?}: {worst}");
            assert!(worst_rounded < 0.68, "{activation:?}: {worst_rounded}");
            assert!(worst_small < 6.5e-6, "{activation:?}: {worst_small}");
        }
    }
}
