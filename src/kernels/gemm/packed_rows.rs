//! Rows of x in E4M3, with a scale for each row, in the column order of a packed weight ([`column_at`]).

use crate::{
    kernels::{Fill, Param, rows::read},
    tensor::{
        DType, Element, Format, Shape, Size, Symbol,
        quantized::{BLOCK, COLUMNS, column_at},
        row_scale,
    },
};

/// Standard deviation of E4M3 operands in checks. Values below 2⁻⁶ are multiples of 2⁻⁹. Their products are therefore small integers times
/// a constant, which tensor cores add exactly.
pub(super) const DEVIATION: f32 = 1.5 / 512.0;
/// Max factor of the weight's elements in checks. The elements of a row are multiples of its largest magnitude divided by 7. In E4M3, they
/// are multiples of 64 up to 448, which are exact.
const LARGEST: u32 = 7;

/// Returns the number of columns of rows that are converted from `k` columns. The columns after `k` are zero.
pub(super) const fn columns(k: u32) -> u32 {
    k.next_multiple_of(COLUMNS as u32)
}

/// Shape of the scales of rows.
pub(super) fn scales_shape() -> Shape {
    Shape::new([Symbol::Rows.into(), Size::constant(1)])
}

/// Returns the column whose value is stored at `position` of a row.
fn column_of(position: usize) -> usize {
    position / BLOCK * BLOCK + column_at(position % BLOCK)
}

/// Converts rows of `k` elements. Returns their elements divided by the scales, in the order of storage, and the scales. Elements are not
/// rounded to E4M3.
pub(crate) fn quantized(x: &[f32], k: u32) -> (Vec<f32>, Vec<f32>) {
    let columns = columns(k) as usize;
    let rows = x.chunks_exact(k as usize);
    let scales: Vec<f32> = rows.clone().map(row_scale).collect();
    let of_row = |(row, &scale): (&[f32], &f32)| -> Vec<f32> {
        let value = |position| row.get(column_of(position)).map_or(0.0, |v| v / scale);
        (0..columns).map(value).collect()
    };
    let quantized = rows.zip(&scales).flat_map(of_row).collect();
    (quantized, scales)
}

/// Returns the rows of `k` elements that were converted to `quantized`.
pub(crate) fn restored(quantized: &[f32], scales: &[f32], k: u32) -> Vec<f32> {
    let mut x = vec![0.0; scales.len() * k as usize];
    let quantized = quantized.chunks_exact(columns(k) as usize);
    let rows = x.chunks_exact_mut(k as usize).zip(quantized);
    for ((x, quantized), scale) in rows.zip(scales) {
        for (position, value) in quantized.iter().enumerate() {
            if let Some(x) = x.get_mut(column_of(position)) {
                *x = value * scale;
            }
        }
    }
    x
}

/// Returns the parameters of a product of converted rows: the rows, the packed weight, and the scales of the rows. With their fills, sums of
/// products are exact, and results have standard deviation 1.
pub(super) fn operands(k: u32, weight: Format, matrix: Shape) -> Vec<Param> {
    let x = Fill::Normal {
        mean: 0.0,
        deviation: DEVIATION,
    };
    // Variance of the factors of the weight's elements.
    let variance = (LARGEST * (LARGEST + 1)) as f32 / 3.0;
    let elements = Fill::Multiples {
        largest: LARGEST,
        unit: (variance * k as f32).sqrt().recip(),
    };
    // Scales differ, so that the check detects a scale on a wrong row.
    let scale = Fill::Normal {
        mean: DEVIATION.recip(),
        deviation: DEVIATION.recip() / 8.0,
    };
    let rows = Shape::new([Symbol::Rows.into(), u64::from(columns(k)).into()]);
    vec![
        read("x", Element::E4m3, rows, x),
        read("weight", weight, matrix, elements),
        read("x_scale", DType::F32, scales_shape(), scale),
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
            let (quantized, scales) = quantized(&x, k);
            assert_eq!(quantized.len(), 3 * k.next_multiple_of(128) as usize);
            let codes: Vec<f32> = quantized.iter().map(|&v| e4m3::round(v)).collect();
            assert!(codes.iter().any(|v| v.abs() == e4m3::MAX));
            for (&got, &want) in restored(&codes, &scales, k).iter().zip(&x) {
                let bound = want.abs() / 16.0 + 1e-4;
                assert!((got - want).abs() <= bound, "{got}, {want}");
            }
        }
    }

    #[test]
    fn rows_of_zeros_stay_zero_and_values_that_are_not_finite_become_nan() {
        let mut x = vec![0.0; 24];
        (x[8], x[9]) = (f32::INFINITY, 2.0);
        (x[16], x[17]) = (f32::NAN, 2.0);
        let (quantized, scales) = quantized(&x, 8);
        assert_eq!(scales, [1.0, f32::INFINITY, 2.0 / e4m3::MAX]);
        assert!(quantized[..128].iter().all(|&v| v == 0.0));
        assert!(quantized[128].is_nan() && quantized[129] == 0.0);
        assert!(quantized[256].is_nan() && (quantized[257] - e4m3::MAX).abs() < 1e-3);
    }
}
