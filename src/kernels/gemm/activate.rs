//! Tests that compare the activations in `partials/activation.cu` with their definitions.

use crate::ops::{Activation, activate_f64};

/// Returns the float literals of the approximate (non-`precise`) form of `function`, in the order in which they occur in the partial.
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

/// Returns log2 of `P(−t)` for `t` ≥ 0, computed as on the device. The activation of x is `x · P(x)`.
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
