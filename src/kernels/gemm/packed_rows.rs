//! Quantized rows of x: 8-bit elements with a scale for each row, or E4M3 elements with a scale for each group of columns. Columns are in
//! the order of a packed weight ([`column_at`]).

use serde::{Deserialize, Serialize};

use crate::{
    kernels::{
        Fill, Param, Tolerance,
        rows::{count, read, rows_by, write},
    },
    machine::Machine,
    tensor::{
        DType, Element, Format, Group, Scaled, Shape, Size, Symbol, Values, int8_row_scale,
        quantized::{BLOCK, COLUMNS, E4M3_WORD, INT8_WORD, column_at},
        row_scale,
    },
};

/// Element type of quantized rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RowElement {
    E4m3,
    /// Integers from −127 to 127. A row has a scale and the sum of its integers. Kernels need the sum because they multiply the row by the
    /// codes of the weight, which are its integers plus 128, and then subtract 128 times the sum.
    Int8,
}

/// Max columns of x in int8. With more columns, a 32-bit sum of products might overflow: a code of the weight has 8 bits, and an integer of
/// x 7 bits and a sign.
const MAX_K_OF_INT8: u32 = 1 << 16;
/// Standard deviation of E4M3 operands in checks. It is so small that nearly all values are below 2⁻⁶, where E4M3 values are multiples of
/// 2⁻⁹. Their products are therefore small integers times a constant, which tensor cores add exactly.
pub(super) const DEVIATION: f32 = 1.5 / 512.0;

/// Columns that a thread of a conversion kernel reads in one access.
pub(super) const PACK: u32 = 8;
/// Tolerance of the elements and scales of a conversion to E4M3.
pub(super) const IN_E4M3: Tolerance = Tolerance {
    absolute: 1.0 / 1024.0 + 1e-5,
    relative: 1.0 / 16.0 + 1e-5,
    reason: "half a step of E4M3 (2^-4, and 2^-10 below 2^-6); the multiplication by the reciprocal of a scale",
};

/// Returns the number of columns of quantized rows for x with `k` columns. The columns after `k` are zero.
pub(crate) const fn columns(k: u32) -> u32 {
    k.next_multiple_of(COLUMNS as u32)
}

/// Number of columns that share a scale, as in a weight in [`Format::FP8_128`].
pub(super) const GROUP: u32 = 128;

/// Returns the number of groups of columns per row for x with `k` columns.
pub(super) const fn groups(k: u32) -> u32 {
    k.div_ceil(GROUP)
}

/// Shape of the scales of groups: `[groups, rows]`. The scales of neighboring rows are adjacent, because the lanes of a warp read the
/// scales of eight rows at once.
pub(super) fn group_scales_shape(k: u32) -> Shape {
    Shape::new([u64::from(groups(k)).into(), Symbol::Rows.into()])
}

/// Returns the parameters of a conversion of rows of `k` elements of type `from` to elements of type `to`.
pub(super) fn params(k: u32, from: DType, to: Element, scales: Shape) -> Vec<Param> {
    // The deviation is large, so the scales are far above the absolute tolerance.
    let x = Fill::Normal {
        mean: 0.0,
        deviation: 1000.0,
    };
    vec![
        read("x", from, rows_by(Symbol::Rows, k), x),
        write("quantized", to, rows_by(Symbol::Rows, columns(k))),
        write("row_scale", DType::F32, scales),
        count(Symbol::Rows),
    ]
}

/// Estimates the cycles of a conversion from the cost of a norm with a residual, which moves twice as many bytes.
pub(super) fn cycles(k: u32, rows: u64, machine: &Machine) -> f64 {
    let cost = &machine.costs.norm;
    let elements = rows as f64 * f64::from(k);
    cost.launch_of(rows) + elements * cost.element * 0.5
}

impl RowElement {
    /// Returns the element type of the quantized rows that kernels multiply with a weight in this format. Returns `None` unless the weight
    /// has 8-bit values with a scale for each row.
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

    /// Format of the weight with which kernels multiply the rows.
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

    /// Number of f32 values that are stored for each row: the scale, and in int8 also the sum of the integers.
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

    /// Returns the scale for the `elements` of a row or of a group of its columns.
    fn scale(self, elements: &[f32]) -> f32 {
        match self {
            Self::E4m3 => row_scale(elements),
            Self::Int8 => int8_row_scale(elements),
        }
    }

    /// Returns the element that is stored for `value`, not yet rounded to E4M3. In int8, elements of a row whose scale is NaN are zero.
    fn stored(self, value: f32, scale: f32) -> f32 {
        match self {
            Self::E4m3 => value / scale,
            Self::Int8 if scale.is_nan() => 0.0,
            // Uses the same operations as the kernel, to round to the same integers.
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

/// Converts rows of `k` elements. Returns the elements divided by the scales, in the order of storage, and the scales (in int8, with the
/// sums of integers). The elements are rounded to integers in int8, but not to E4M3.
pub(crate) fn quantized(x: &[f32], k: u32, to: RowElement) -> (Vec<f32>, Vec<f32>) {
    let (quantized, scales) = quantized_by(x, k, k, to);
    let scales = match to {
        RowElement::E4m3 => scales,
        RowElement::Int8 => {
            let sums = quantized.chunks_exact(columns(k) as usize);
            let sums = sums.map(|row| row.iter().sum::<f32>());
            let both = scales.into_iter().zip(sums);
            both.flat_map(|(scale, sum)| [scale, sum]).collect()
        }
    };
    (quantized, scales)
}

/// Converts rows of `k` elements to E4M3 like [`quantized`], with a scale for each group of [`GROUP`] columns. The scales are
/// `[groups, rows]`.
pub(crate) fn quantized_groups(x: &[f32], k: u32) -> (Vec<f32>, Vec<f32>) {
    quantized_by(x, k, GROUP, RowElement::E4m3)
}

/// Converts rows of `k` elements, with a scale for each group of `width` columns. The scales are `[⌈k / width⌉, rows]`.
fn quantized_by(x: &[f32], k: u32, width: u32, to: RowElement) -> (Vec<f32>, Vec<f32>) {
    let (columns, k, width) = (columns(k) as usize, k as usize, width as usize);
    let rows = x.chunks_exact(k);
    let n_rows = rows.len();
    let mut scales = vec![1.0; k.div_ceil(width) * n_rows];
    let mut quantized = Vec::with_capacity(n_rows * columns);
    for (at, row) in rows.enumerate() {
        for (group, elements) in row.chunks(width).enumerate() {
            scales[group * n_rows + at] = to.scale(elements);
        }
        let value = |position| {
            let column = to.column_of(position);
            let stored = |&value| to.stored(value, scales[column / width * n_rows + at]);
            row.get(column).map_or(0.0, stored)
        };
        quantized.extend((0..columns).map(value));
    }
    (quantized, scales)
}

/// Inverts [`quantized`]: returns rows of `k` elements.
pub(super) fn restored(quantized: &[f32], scales: &[f32], k: u32, from: RowElement) -> Vec<f32> {
    let of_row = from.scales() as usize;
    restored_by(quantized, k, from, |row, _| scales[row * of_row])
}

/// Inverts [`quantized_groups`]: returns rows of `k` elements.
pub(super) fn restored_groups(quantized: &[f32], scales: &[f32], k: u32) -> Vec<f32> {
    let n_rows = quantized.len() / columns(k) as usize;
    let scale = |row: usize, column: usize| scales[column / GROUP as usize * n_rows + row];
    restored_by(quantized, k, RowElement::E4m3, scale)
}

/// Returns rows of `k` elements in the order of columns, each multiplied by `scale(row, column)`.
fn restored_by(
    quantized: &[f32],
    k: u32,
    from: RowElement,
    scale: impl Fn(usize, usize) -> f32,
) -> Vec<f32> {
    let (columns, k) = (columns(k) as usize, k as usize);
    let mut x = vec![0.0; quantized.len() / columns * k];
    let rows = x.chunks_exact_mut(k).zip(quantized.chunks_exact(columns));
    for (row, (x, quantized)) in rows.enumerate() {
        for (position, value) in quantized.iter().enumerate() {
            let column = from.column_of(position);
            if let Some(x) = x.get_mut(column) {
                *x = value * scale(row, column);
            }
        }
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::e4m3;

    #[test]
    fn rows_are_restored_within_a_rounding() {
        for k in [8u32, 72, 128, 328] {
            let x: Vec<f32> = (0..3 * k)
                .map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.3)
                .collect();
            let in_e4m3 = RowElement::E4m3;
            let (of_rows, scales) = quantized(&x, k, in_e4m3);
            assert_eq!(scales.len(), 3);
            let (of_groups, group_scales) = quantized_groups(&x, k);
            assert_eq!(group_scales.len(), 3 * k.div_ceil(128) as usize);
            let codes = |quantized: Vec<f32>| -> Vec<f32> {
                assert_eq!(quantized.len(), 3 * k.next_multiple_of(128) as usize);
                let codes: Vec<f32> = quantized.into_iter().map(e4m3::round).collect();
                assert!(codes.iter().any(|v| v.abs() == e4m3::MAX));
                codes
            };
            for got in [
                restored(&codes(of_rows), &scales, k, in_e4m3),
                restored_groups(&codes(of_groups), &group_scales, k),
            ] {
                for (&got, &want) in got.iter().zip(&x) {
                    let bound = want.abs() / 16.0 + 1e-4;
                    assert!((got - want).abs() <= bound, "{got}, {want}");
                }
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
    fn each_group_of_a_row_has_its_own_scale() {
        // Two rows of two groups, the last of which has 72 columns.
        let of = |largest: [f32; 2]| {
            let mut row = vec![0.5 * largest[0]; 128];
            row.extend([0.5 * largest[1]; 72]);
            (row[3], row[199]) = (largest[0], -largest[1]);
            row
        };
        let x = [of([448.0, 2.0]), of([7.0, 0.0])].concat();
        let (quantized, scales) = quantized_groups(&x, 200);
        assert_eq!(scales, [1.0, 7.0 / 448.0, 2.0 / 448.0, 1.0]);
        assert_eq!(quantized.len(), 2 * 256);
        for (got, want) in restored_groups(&quantized, &scales, 200).iter().zip(&x) {
            assert!((got - want).abs() <= 1e-6 * want.abs(), "{got}, {want}");
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
        // The scale is 1. The first four stored elements are columns 0, 8, 1 and 9.
        let mut x = [0.0f32; 16];
        (x[0], x[8], x[1], x[9]) = (127.0, 2.5, -3.5, 0.5);
        let (integers, scales) = quantized(&x, 16, RowElement::Int8);
        assert_eq!(integers[..4], [127.0, 2.0, -4.0, 0.0]);
        assert_eq!(scales, [1.0, 125.0]);
    }
}
