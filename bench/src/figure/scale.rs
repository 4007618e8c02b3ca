//! Ticks of axes, and formatting of numbers.

use std::ops::Range;

/// Returns 5 to 10 multiples of 1, 2 or 5 times a power of ten, from 0 to the end of the range.
pub(super) fn linear_ticks(range: &Range<f64>) -> Vec<f64> {
    let step = floor_125(range.end / 4.0);
    let last = (range.end / step).floor() as u32;
    (0..=last).map(|i| f64::from(i) * step).collect()
}

/// Returns the powers of ten in a range. If there are at most three, also returns 2 and 5 times powers of ten in the range.
pub(super) fn log_ticks(range: &Range<f64>) -> Vec<f64> {
    let decades = range.start.log10().floor() as i32..=range.end.log10().ceil() as i32;
    let of = |factors: &'static [f64]| -> Vec<f64> {
        let all = decades
            .clone()
            .flat_map(|d| factors.iter().map(move |f| f * 10f64.powi(d)));
        all.filter(|v| range.contains(v)).collect()
    };
    let powers = of(&[1.0]);
    if powers.len() > 3 {
        powers
    } else {
        of(&[1.0, 2.0, 5.0])
    }
}

/// Returns the largest of 1, 2 and 5 times a power of ten that does not exceed a positive value.
pub(super) fn floor_125(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let fits = [5.0, 2.0, 1.0].into_iter().find(|f| f * power <= value);
    fits.unwrap_or(1.0) * power
}

/// Formats a number with about three significant digits, without trailing zeros: `0.0123`, `1.23`, `45.6`, `789`, `12.3M`.
pub(super) fn number(value: f64) -> String {
    let plain = |v: f64| {
        let digits = match v.abs() {
            0.0 => return "0".to_owned(),
            v if v >= 99.95 => 0,
            v if v >= 9.995 => 1,
            v if v >= 0.9995 => 2,
            v if v >= 0.0995 => 3,
            v if v >= 1e-4 => 4,
            _ => return format!("{v:.1e}"),
        };
        let text = format!("{v:.digits$}");
        match text.contains('.') {
            true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
            false => text,
        }
    };
    match value.abs() {
        v if v >= 1e15 => format!("{value:.2e}"),
        v if v >= 1e12 => plain(value / 1e12) + "T",
        v if v >= 1e9 => plain(value / 1e9) + "G",
        v if v >= 1e6 => plain(value / 1e6) + "M",
        v if v >= 1e4 => plain(value / 1e3) + "k",
        _ => plain(value),
    }
}
