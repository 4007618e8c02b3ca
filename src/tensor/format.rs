use std::fmt;

use serde::{Deserialize, Serialize};

use super::{DType, e4m3};

/// Storage of a tensor: elements of a plain type, or low-bit values with scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Format {
    /// Each element is stored in this type.
    Plain(DType),
    /// Low-bit values that are multiplied by scales.
    Scaled(Scaled),
    /// E4M3, stored without scales. A matrix product applies the scales to its results. Each row of a weight is scaled so that its largest
    /// magnitude becomes that of E4M3. Rows of a KV cache are not scaled.
    E4m3,
}

/// Low-bit values, and the elements that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Scaled {
    pub values: Values,
    pub group: Group,
}

/// Values that a scale multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Values {
    /// Integers from −128 to 127, without a zero point. Rounding scales the largest magnitude of a group to 127. Weights that a checkpoint
    /// stores in 8 bits may also contain −128.
    Int8,
    /// Floating-point values of 4 exponent and 3 mantissa bits, up to 448.
    E4m3,
    /// Integers from 0 to 15, from which a zero point of the group is subtracted.
    Int4,
}

/// Elements that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Group {
    /// A row of the matrix: one output of a linear layer. The scale is an f32.
    Row,
    /// This number of neighboring elements of a row. The scale is an f32 for E4M3, and an f16 for integers.
    Columns(u32),
}

impl Format {
    /// 8-bit integers with a scale for each row.
    pub const INT8: Self = Self::Scaled(Scaled {
        values: Values::Int8,
        group: Group::Row,
    });

    /// 8-bit integers with a scale for each 32 elements of a row, like Q8_0 of GGUF files.
    pub const INT8_32: Self = Self::Scaled(Scaled {
        values: Values::Int8,
        group: Group::Columns(32),
    });

    /// E4M3 with a scale for each row.
    pub const FP8: Self = Self::Scaled(Scaled {
        values: Values::E4m3,
        group: Group::Row,
    });

    /// E4M3 with a scale for every 128 elements of a row. This format can also represent checkpoints with a scale for each block of 128 ×
    /// 128 elements.
    pub const FP8_128: Self = Self::Scaled(Scaled {
        values: Values::E4m3,
        group: Group::Columns(128),
    });

    /// 4-bit integers with a scale and a zero point for every 128 elements of a row.
    pub const INT4: Self = Self::Scaled(Scaled {
        values: Values::Int4,
        group: Group::Columns(128),
    });

    /// Rounds a matrix with rows of `columns` elements as if it were stored in this format. In [`Format::E4m3`], each row remains divided
    /// by its scale.
    pub fn round(self, matrix: &[f64], columns: usize) -> Vec<f64> {
        match self {
            Self::Plain(dtype) => {
                let rounded = matrix.iter().map(|&v| f64::from(dtype.round(v as f32)));
                rounded.collect()
            }
            Self::Scaled(scaled) => {
                let matrix: Vec<f32> = matrix.iter().map(|&v| v as f32).collect();
                let rounded = scaled.quantize(&matrix, columns).values();
                rounded.into_iter().map(f64::from).collect()
            }
            Self::E4m3 => {
                let rows = matrix.chunks(columns.max(1));
                let rows = rows.map(|row| row.iter().map(|&v| v as f32).collect::<Vec<_>>());
                let round = |row: Vec<f32>| {
                    let scale = row_scale(&row);
                    let scaled = row.into_iter().map(move |v| e4m3::round(v / scale));
                    scaled.map(f64::from).collect::<Vec<_>>()
                };
                rows.flat_map(round).collect()
            }
        }
    }
}

/// Returns the divisor that maps the largest magnitude of a row to that of E4M3; 1 for a row of zeros.
pub fn row_scale(row: &[f32]) -> f32 {
    // A subnormal scale would lose precision.
    match largest(row) / e4m3::MAX {
        scale if scale >= f32::MIN_POSITIVE => scale,
        _ => 1.0,
    }
}

/// Returns the divisor that maps the largest magnitude of a row to 127; 1 for a row of zeros, and NaN if an element is not finite.
pub fn int8_row_scale(row: &[f32]) -> f32 {
    match largest(row) / 127.0 {
        _ if row.iter().any(|v| !v.is_finite()) => f32::NAN,
        scale if scale >= f32::MIN_POSITIVE => scale,
        _ => 1.0,
    }
}

/// Returns the largest magnitude. NaN is ignored.
pub(super) fn largest(elements: &[f32]) -> f32 {
    // Independent maxima, so that the compiler can vectorize the loop.
    let mut most = [0.0f32; 16];
    let (whole, rest) = elements.as_chunks::<16>();
    for elements in whole {
        for (most, v) in most.iter_mut().zip(elements) {
            *most = if v.abs() > *most { v.abs() } else { *most };
        }
    }
    let all = most.iter().chain(rest);
    all.fold(0.0, |most, v| most.max(v.abs()))
}

impl Scaled {
    /// Returns whether the CPU executor multiplies these values as integers, and rounds the inputs of a product to integers. Otherwise, it
    /// widens the values to f32.
    pub const fn is_multiplied_as_integers(self) -> bool {
        match (self.values, self.group) {
            (Values::Int8, Group::Row) => true,
            (Values::Int8, Group::Columns(_)) | (Values::E4m3 | Values::Int4, _) => false,
        }
    }

    /// Returns the name used in symbols and reports.
    pub const fn name(self) -> &'static str {
        match (self.values, self.group) {
            (Values::Int8, Group::Row) => "int8",
            (Values::Int8, Group::Columns(32)) => "int8_g32",
            (Values::E4m3, Group::Row) => "fp8",
            (Values::Int4, Group::Columns(128)) => "int4",
            (Values::Int4, Group::Columns(64)) => "int4_g64",
            (Values::Int4, Group::Columns(32)) => "int4_g32",
            (Values::E4m3, Group::Columns(128)) => "fp8_g128",
            (Values::Int8 | Values::E4m3, Group::Columns(_)) | (Values::Int4, _) => "unsupported",
        }
    }

    /// Checks that kernels support these values with these groups.
    ///
    /// # Errors
    /// Returns an error with the reason if they do not.
    pub fn check(self) -> Result<(), String> {
        match (self.values, self.group) {
            (Values::Int8 | Values::E4m3, Group::Row)
            | (Values::Int8, Group::Columns(32))
            | (Values::E4m3, Group::Columns(128))
            | (Values::Int4, Group::Columns(32 | 64 | 128)) => Ok(()),
            (Values::Int8 | Values::E4m3, Group::Columns(_)) | (Values::Int4, _) => Err(format!(
                "{:?} in groups of {:?}; expected 8-bit values with a scale for each row, 8-bit integers in groups of 32 columns, E4M3 in groups of 128 columns, or 4-bit integers in groups of 32, 64 or 128 columns",
                self.values, self.group
            )),
        }
    }
}

impl From<DType> for Format {
    fn from(dtype: DType) -> Self {
        Self::Plain(dtype)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain(dtype) => dtype.name(),
            Self::Scaled(scaled) => scaled.name(),
            Self::E4m3 => "e4m3",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn int8_rounds_each_row_to_127_steps_of_its_largest_magnitude() {
        let matrix = [1.27, 0.004, -0.006, 0.0, 0.0, 0.0, -254.0, 3.1, 0.9];
        let rounded = Format::INT8.round(&matrix, 3);
        let want = [1.27, 0.0, -0.01, 0.0, 0.0, 0.0, -254.0, 4.0, 0.0];
        for (got, want) in rounded.iter().zip(want) {
            assert!((got - want).abs() < 1e-6, "{got}, expected {want}");
        }
    }

    #[test]
    fn plain_formats_round_each_element() {
        let third = 1.0 / 3.0;
        let rounded = Format::Plain(DType::BF16).round(&[third, 1.0], 2);
        assert_eq!(rounded, [f64::from(DType::BF16.round(third as f32)), 1.0]);
    }
}
