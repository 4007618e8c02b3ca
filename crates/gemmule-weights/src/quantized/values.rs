//! A quantized matrix in memory, and its dequantization.

use super::error::{QuantizedError, Result};

/// A matrix `[rows, columns]` of quantized values, with the scales and zero points of its groups.
///
/// A value is `scale * (code - zero)` for integers and `scale * value` for E4M3.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    pub rows: usize,
    pub columns: usize,
    pub values: Values,
    /// Scales in row-major order. There is a row for every `block_rows` rows of the matrix, and a column for each group of columns.
    pub scales: Vec<f32>,
    /// Number of rows that share a row of `scales`.
    pub block_rows: usize,
    pub columns_by_group: Groups,
}

/// Codes in row-major order, one per byte.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    E4M3(Vec<u8>),
    Integers { codes: Vec<u8>, zeros: Zeros },
}

/// Zero points of integers.
#[derive(Clone, Debug, PartialEq)]
pub enum Zeros {
    /// One zero point for all groups.
    One(u16),
    /// One zero point per scale, in the order of the scales.
    Each(Vec<u16>),
}

impl Zeros {
    /// Returns the zero point of the group with the scale of index `scale`.
    pub(super) fn at(&self, scale: usize) -> u16 {
        match self {
            Self::One(zero) => *zero,
            Self::Each(zeros) => zeros[scale],
        }
    }
}

/// Assignment of the columns of a matrix to groups. Each group has one column of [`Quantized::scales`].
#[derive(Clone, Debug, PartialEq)]
pub enum Groups {
    /// Each group has this many adjacent columns.
    Runs(usize),
    /// The group of each column.
    Listed(Vec<u32>),
}

impl Quantized {
    /// Number of groups of columns.
    fn n_groups(&self) -> usize {
        self.scales.len() / self.rows.div_ceil(self.block_rows)
    }

    /// Writes the dequantized values of a row.
    ///
    /// # Panics
    /// Panics if the row does not exist, or if `out` does not have `columns` elements.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.columns);
        let n_groups = self.n_groups();
        let first = row / self.block_rows * n_groups;
        let scales = &self.scales[first..][..n_groups];
        match &self.values {
            Values::E4M3(values) => {
                let values = &values[row * self.columns..][..self.columns];
                self.fill(values, out, |value, group| {
                    E4M3[usize::from(value)] * scales[group]
                });
            }
            Values::Integers { codes, zeros } => {
                let codes = &codes[row * self.columns..][..self.columns];
                match zeros {
                    Zeros::One(zero) => self.fill(codes, out, |code, group| {
                        f32::from(difference(code, *zero)) * scales[group]
                    }),
                    Zeros::Each(zeros) => {
                        let zeros = &zeros[first..][..n_groups];
                        self.fill(codes, out, |code, group| {
                            f32::from(difference(code, zeros[group])) * scales[group]
                        });
                    }
                }
            }
        }
    }

    fn fill(&self, codes: &[u8], out: &mut [f32], value: impl Fn(u8, usize) -> f32) {
        match &self.columns_by_group {
            Groups::Runs(size) => {
                let runs = codes.chunks(*size).zip(out.chunks_mut(*size));
                for (group, (codes, out)) in runs.enumerate() {
                    for (out, &code) in out.iter_mut().zip(codes) {
                        *out = value(code, group);
                    }
                }
            }
            Groups::Listed(groups) => {
                for ((out, &code), &group) in out.iter_mut().zip(codes).zip(groups) {
                    *out = value(code, group as usize);
                }
            }
        }
    }

    /// Returns all dequantized values in row-major order. `name` is the name of the matrix in messages.
    ///
    /// # Errors
    /// Returns an error if memory runs out.
    pub fn dequantize(&self, name: &str) -> Result<Vec<f32>> {
        let n = self.rows * self.columns;
        let mut out: Vec<f32> = room(name, n)?;
        out.resize(n, 0.0);
        for (row, out) in out.chunks_exact_mut(self.columns).enumerate() {
            self.row(row, out);
        }
        Ok(out)
    }
}

/// Returns the difference of a code and a zero point, both of which have at most 9 bits.
fn difference(code: u8, zero: u16) -> i16 {
    i16::from(code) - zero as i16
}

/// Allocates room for `n` elements.
pub(super) fn room<T>(tensor: &str, n: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values
        .try_reserve_exact(n)
        .map_err(|_| QuantizedError::Memory {
            tensor: tensor.to_owned(),
            bytes: (n as u64).saturating_mul(size_of::<T>() as u64),
        })?;
    Ok(values)
}

/// Values of the 256 codes of E4M3 (the variant without infinities).
static E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = e4m3(code as u8);
        code += 1;
    }
    values
};

/// Returns the value of a code of E4M3 without infinities: a sign, 4 bits of exponent with bias 7, and 3 bits of mantissa.
pub const fn e4m3(code: u8) -> f32 {
    let sign = (code as u32 >> 7) << 31;
    let exponent = (code as u32 >> 3) & 15;
    let mantissa = code as u32 & 7;
    if exponent == 15 && mantissa == 7 {
        return f32::NAN;
    }
    if exponent == 0 {
        // Subnormal numbers are multiples of 2⁻⁹.
        let size = mantissa as f32 / 512.0;
        return if sign == 0 { size } else { -size };
    }
    f32::from_bits(sign | ((exponent + 120) << 23) | (mantissa << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_e4m3_have_the_values_of_their_definition() {
        for code in 0..=255u8 {
            let (sign, exponent, mantissa) = (code >> 7, code >> 3 & 15, code & 7);
            let size = match exponent {
                0 => f32::from(mantissa) / 8.0 * 2f32.powi(-6),
                _ => (1.0 + f32::from(mantissa) / 8.0) * 2f32.powi(i32::from(exponent) - 7),
            };
            let expected = if sign == 1 { -size } else { size };
            let value = E4M3[usize::from(code)];
            match code & 0x7f {
                0x7f => assert!(value.is_nan()),
                _ => assert_eq!(value.to_bits(), expected.to_bits(), "{code:#x}"),
            }
        }
        assert_eq!(E4M3[0x7e], 448.0);
    }

    #[test]
    fn groups_of_columns_and_blocks_of_rows_have_their_scales() {
        let quantized = Quantized {
            rows: 3,
            columns: 5,
            values: Values::Integers {
                codes: (0..15).collect(),
                zeros: Zeros::Each(vec![0, 1, 2, 16, 15, 14]),
            },
            scales: vec![1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
            block_rows: 2,
            columns_by_group: Groups::Runs(2),
        };
        let values = quantized.dequantize("w").expect("there is room");
        let expected = [
            0.0, 1.0, 2.0, 4.0, 8.0, 5.0, 6.0, 12.0, 14.0, 28.0, -48.0, -40.0, -48.0, -32.0, 0.0,
        ];
        assert_eq!(values, expected);
        let listed = Quantized {
            columns_by_group: Groups::Listed(vec![2, 1, 0, 0, 1]),
            ..quantized
        };
        let mut row = [0.0; 5];
        listed.row(2, &mut row);
        assert_eq!(row, [-128.0, -64.0, -32.0, -24.0, -16.0]);
    }
}
