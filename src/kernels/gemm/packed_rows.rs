//! Quantized rows of x: elements of 8 bits with a scale for each row, in the column order of a packed weight ([`column_at`]).

use serde::{Deserialize, Serialize};

use crate::{
    kernels::{Fill, Param, rows::read},
    tensor::{
        DType, Element, Format, Group, Scaled, Shape, Size, Symbol, Values, int8_row_scale,
        quantized::{BLOCK, COLUMNS, E4M3_WORD, INT8_WORD, column_at},
        row_scale,
    },
};

/// Elements of quantized rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RowElement {
    E4m3,
    /// Integers from −127 to 127. A row has its scale and the sum of its integers, because kernels multiply the weight's codes, which are
    /// the weight's integers plus 128. They subtract 128 times the sum from each product.
    Int8,
}

/// Max columns of x in int8. Products with more columns might overflow 32 bits: a code has at most 8 bits, and an integer 7 bits and a sign.
const MAX_K_OF_INT8: u32 = 1 << 16;
/// Standard deviation of E4M3 operands in checks. Values below 2⁻⁶ are multiples of 2⁻⁹. Their products are therefore small integers times
/// a constant, which tensor cores add exactly.
pub(super) const DEVIATION: f32 = 1.5 / 512.0;
/// Max factor of the weight's elements in checks. The elements of a row are multiples of its largest magnitude divided by 7. In E4M3, they
/// are multiples of 64 up to 448, which are exact.
const LARGEST: u32 = 7;

/// Returns the number of columns of rows that are converted from `k` columns. The columns after `k` are zero.
pub(crate) const fn columns(k: u32) -> u32 {
    k.next_multiple_of(COLUMNS as u32)
}

impl RowElement {
    /// Returns the elements of rows that are multiplied with this weight. Returns `None` unless the weight has 8-bit values with a scale for
    /// each row.
    pub fn beside(weight: Format) -> Option<Self> {
        let Format::Scaled(Scaled { values, group }) = weight else {
            return None;
        };
        match (values, group) {
            (Values::E4m3, Group::Row) => Some(Self::E4m3),
            (Values::Int8, Group::Row) => Some(Self::Int8),
            (Values::E4m3 | Values::Int8, Group::Columns(_)) | (Values::Int4, _) => None,
        }
    }

    /// Storage of the weight that the rows are multiplied with.
    pub fn weight(self) -> Format {
        match self {
            Self::E4m3 => Format::FP8,
            Self::Int8 => Format::INT8,
        }
    }

    /// Storage type of the rows.
    pub fn element(self) -> Element {
        match self {
            Self::E4m3 => Element::E4m3,
            Self::Int8 => Element::I8,
        }
    }

    /// Max columns of x.
    pub(super) fn max_k(self) -> u32 {
        match self {
            Self::E4m3 => u32::MAX,
            Self::Int8 => MAX_K_OF_INT8,
        }
    }

    /// Numbers that are stored for each row: the scale, and in int8 the sum of the integers.
    pub fn scales(self) -> u64 {
        match self {
            Self::E4m3 => 1,
            Self::Int8 => 2,
        }
    }

    /// Shape of the scales of rows.
    pub(super) fn scales_shape(self) -> Shape {
        Shape::new([Symbol::Rows.into(), Size::constant(self.scales())])
    }

    /// Returns the scale of a row.
    fn scale(self, row: &[f32]) -> f32 {
        match self {
            Self::E4m3 => row_scale(row),
            Self::Int8 => int8_row_scale(row),
        }
    }

    /// Returns the element that is stored for `value`, not yet rounded to E4M3. In int8, elements of a row whose scale is NaN are zero.
    fn stored(self, value: f32, scale: f32) -> f32 {
        match self {
            Self::E4m3 => value / scale,
            Self::Int8 if scale.is_nan() => 0.0,
            // The operations of the kernel, so that both round to the same integer.
            Self::Int8 => Element::I8.round(value * scale.recip()),
        }
    }

    /// Returns the column whose value is stored at `position` of a row.
    fn column_of(self, position: usize) -> usize {
        let word = match self {
            Self::E4m3 => E4M3_WORD,
            Self::Int8 => INT8_WORD,
        };
        position / BLOCK * BLOCK + column_at(position % BLOCK, word)
    }
}

/// Converts rows of `k` elements. Returns their elements divided by the scales, in the order of storage, and the scales. Elements in E4M3
/// are not rounded.
pub(crate) fn quantized(x: &[f32], k: u32, to: RowElement) -> (Vec<f32>, Vec<f32>) {
    let columns = columns(k) as usize;
    let (mut quantized, mut scales) = (Vec::new(), Vec::new());
    for row in x.chunks_exact(k as usize) {
        let scale = to.scale(row);
        let value = |position| {
            let value = row.get(to.column_of(position));
            value.map_or(0.0, |&value| to.stored(value, scale))
        };
        let first = quantized.len();
        quantized.extend((0..columns).map(value));
        scales.push(scale);
        if to == RowElement::Int8 {
            scales.push(quantized[first..].iter().sum());
        }
    }
    (quantized, scales)
}

/// Returns the rows of `k` elements that were converted to `quantized`.
pub(crate) fn restored(quantized: &[f32], scales: &[f32], k: u32, from: RowElement) -> Vec<f32> {
    let scales = scales.chunks_exact(from.scales() as usize);
    let mut x = vec![0.0; scales.len() * k as usize];
    let quantized = quantized.chunks_exact(columns(k) as usize);
    let rows = x.chunks_exact_mut(k as usize).zip(quantized);
    for ((x, quantized), scale) in rows.zip(scales) {
        for (position, value) in quantized.iter().enumerate() {
            if let Some(x) = x.get_mut(from.column_of(position)) {
                *x = value * scale[0];
            }
        }
    }
    x
}

/// Returns the parameters of a product of converted rows: the rows, the packed weight, and the scales of the rows. With their fills, sums of
/// products are exact, and results have standard deviation 1.
pub(super) fn operands(k: u32, to: RowElement, matrix: Shape) -> Vec<Param> {
    let normal = |mean, deviation| Fill::Normal { mean, deviation };
    // Scales differ, so that the check detects a scale on a wrong row.
    let (x, elements, scale) = match to {
        RowElement::E4m3 => {
            // Variance of the factors of the weight's elements.
            let variance = (LARGEST * (LARGEST + 1)) as f32 / 3.0;
            let elements = Fill::Multiples {
                largest: LARGEST,
                unit: (variance * k as f32).sqrt().recip(),
            };
            let scale = normal(DEVIATION.recip(), DEVIATION.recip() / 8.0);
            (normal(0.0, DEVIATION), elements, scale)
        }
        // With this mean, rows have large sums.
        RowElement::Int8 => {
            let elements = normal(0.0, (k as f32).sqrt().recip());
            (normal(8.0, 32.0), elements, normal(1.0 / 32.0, 1.0 / 256.0))
        }
    };
    let rows = Shape::new([Symbol::Rows.into(), u64::from(columns(k)).into()]);
    vec![
        read("x", to.element(), rows, x),
        read("weight", to.weight(), matrix, elements),
        read("x_scale", DType::F32, to.scales_shape(), scale),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::e4m3;

    #[test]
    fn rows_are_restored_within_a_rounding() {
        for k in [8, 72, 128, 328] {
            let x: Vec<f32> = (0..3 * k)
                .map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.3)
                .collect();
            let (codes, scales) = quantized(&x, k, RowElement::E4m3);
            assert_eq!(codes.len(), 3 * k.next_multiple_of(128) as usize);
            let codes: Vec<f32> = codes.iter().map(|&v| e4m3::round(v)).collect();
            assert!(codes.iter().any(|v| v.abs() == e4m3::MAX));
            let got = restored(&codes, &scales, k, RowElement::E4m3);
            for (&got, &want) in got.iter().zip(&x) {
                let bound = want.abs() / 16.0 + 1e-4;
                assert!((got - want).abs() <= bound, "{got}, {want}");
            }
            let (integers, scales) = quantized(&x, k, RowElement::Int8);
            let got = restored(&integers, &scales, k, RowElement::Int8);
            let rows = x.chunks(k as usize).zip(got.chunks(k as usize));
            for ((x, got), scales) in rows.zip(scales.chunks(2)) {
                for (got, want) in got.iter().zip(x) {
                    assert!((got - want).abs() <= scales[0] * 0.5001, "{got}, {want}");
                }
                let sum: f32 = got.iter().map(|v| (v / scales[0]).round()).sum();
                assert_eq!(sum, scales[1]);
            }
        }
    }

    #[test]
    fn rows_of_zeros_stay_zero_and_values_that_are_not_finite_become_nan() {
        let mut x = vec![0.0; 24];
        (x[8], x[9]) = (f32::INFINITY, 2.0);
        (x[16], x[17]) = (f32::NAN, 2.0);
        let (in_e4m3, scales) = quantized(&x, 8, RowElement::E4m3);
        assert_eq!(scales, [1.0, f32::INFINITY, 2.0 / e4m3::MAX]);
        assert!(in_e4m3[..128].iter().all(|&v| v == 0.0));
        assert!(in_e4m3[128].is_nan() && in_e4m3[129] == 0.0);
        assert!(in_e4m3[256].is_nan() && (in_e4m3[257] - e4m3::MAX).abs() < 1e-3);
        let (integers, scales) = quantized(&x, 8, RowElement::Int8);
        assert!(integers.iter().all(|&v| v == 0.0));
        assert_eq!(scales[..2], [1.0, 0.0]);
        assert!(scales[2].is_nan() && scales[4].is_nan());
        let restored = restored(&integers, &scales, 8, RowElement::Int8);
        assert!(restored[..8].iter().all(|&v| v == 0.0));
        assert!(restored[8..].iter().all(|v| v.is_nan()));
    }

    #[test]
    fn integers_are_rounded_to_nearest_with_ties_to_even() {
        // The scale is 1, and the columns are those of a lane's words: 0, 8, 1, 9.
        let mut x = [0.0f32; 16];
        (x[0], x[8], x[1], x[9]) = (127.0, 2.5, -3.5, 0.5);
        let (integers, scales) = quantized(&x, 16, RowElement::Int8);
        assert_eq!(integers[..4], [127.0, 2.0, -4.0, 0.0]);
        assert_eq!(scales, [1.0, 125.0]);
    }
}
