//! E4M3, the 8-bit floating-point type of fp8 weights: 4 exponent bits with a bias of 7, 3 mantissa bits, no infinities
//! (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").

pub(crate) use gemmule_weights::quantized::e4m3 as decode;

/// Largest magnitude of a value in E4M3.
pub(crate) const MAX: f32 = 448.0;

/// Rounds `value` to the nearest value of E4M3. Magnitudes above [`MAX`] become `MAX`, and NaN stays NaN.
pub(crate) fn round(value: f32) -> f32 {
    match value.is_nan() {
        true => value,
        false => decode(encode(value)),
    }
}

/// Returns the 8-bit code of the nearest value of E4M3, with ties to even mantissas. Magnitudes above [`MAX`] become `MAX`, and NaN stays
/// NaN.
///
/// The codes for a subnormal and for a normal result are both computed and one is selected, so that the compiler can vectorize loops.
#[inline]
pub(crate) fn encode(value: f32) -> u8 {
    /// 2¹⁴. From 2¹⁴ to 2¹⁵, neighboring f32 values are 2⁻⁹ apart, like E4M3 values below 2⁻⁶. Adding 2¹⁴ therefore rounds a magnitude
    /// below 2⁻⁶ to the spacing of E4M3.
    const SPACED: f32 = 16384.0;
    let magnitude = value.abs().min(MAX);
    let small = (magnitude + SPACED).to_bits() - SPACED.to_bits();
    let bits = magnitude.to_bits();
    let rounded = (bits + 0x7_ffff + (bits >> 20 & 1)) >> 20;
    let large = rounded.wrapping_sub((127 - 7) << 3);
    let code = if magnitude < 1.0 / 64.0 { small } else { large };
    let signed = code | value.to_bits() >> 31 << 7;
    (if value.is_nan() { 0x7f } else { signed }) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_keeps_its_code() {
        for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(encode(decode(code)), code, "{code:#x}");
        }
    }

    #[test]
    fn values_of_the_format_are_the_published_ones() {
        assert_eq!(decode(0x7e), 448.0);
        assert_eq!(decode(0x08), 0.015625);
        assert_eq!(decode(0x01), 0.001953125);
        assert_eq!(decode(0xb8), -1.0);
        assert!(decode(0x7f).is_nan());
    }

    #[test]
    fn numbers_between_two_values_go_to_the_nearest_and_ties_to_an_even_mantissa() {
        for code in 0..0x7eu8 {
            let (low, high) = (decode(code), decode(code + 1));
            let even = if code % 2 == 0 { low } else { high };
            assert_eq!(decode(encode((low + high) / 2.0)), even);
            assert_eq!(decode(encode(low * 0.51 + high * 0.49)), low);
            assert_eq!(decode(encode(low * 0.49 + high * 0.51)), high);
        }
        assert_eq!(decode(encode(1e9)), 448.0);
        assert_eq!(decode(encode(-1e9)), -448.0);
        assert!(decode(encode(f32::NAN)).is_nan());
    }
}
