use std::fmt;

use serde::{Deserialize, Serialize};

use super::DType;

/// How a tensor is stored: each element as it is, or integers with scales.
///
/// A match over formats names each of them, so that the compiler finds every place that a new one concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Format {
    /// Each element is stored in this type.
    Plain(DType),
    /// Values of few bits that are multiplied by scales.
    Scaled(Scaled),
}

/// Values of few bits, and the elements that share a scale in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Scaled {
    pub values: Values,
    pub group: Group,
}

/// Values that a scale multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Values {
    /// Integers from −127 to 127, symmetric around 0.
    Int8,
}

/// Elements that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Group {
    /// A row of the matrix: one output of a linear layer.
    Row,
}

impl Format {
    /// 8-bit integers with a scale for each row.
    pub const INT8: Self = Self::Scaled(Scaled {
        values: Values::Int8,
        group: Group::Row,
    });

    /// Returns a matrix with rows of `columns` elements as it is after it was stored in this format.
    pub fn round(self, matrix: &[f64], columns: usize) -> Vec<f64> {
        match self {
            Self::Plain(dtype) => {
                let rounded = matrix.iter().map(|&v| f64::from(dtype.round(v as f32)));
                rounded.collect()
            }
            Self::Scaled(scaled) => scaled.round(matrix, columns),
        }
    }
}

impl Scaled {
    /// Bytes of one element, without its share of the scale.
    pub const fn bytes(self) -> u64 {
        match self.values {
            Values::Int8 => 1,
        }
    }

    /// Returns the name used in symbols and reports.
    pub const fn name(self) -> &'static str {
        match (self.values, self.group) {
            (Values::Int8, Group::Row) => "int8",
        }
    }

    fn round(self, matrix: &[f64], columns: usize) -> Vec<f64> {
        let group = match self.group {
            Group::Row => columns.max(1),
        };
        let mut rounded = Vec::with_capacity(matrix.len());
        for elements in matrix.chunks(group) {
            let largest = elements.iter().fold(0.0f64, |most, v| most.max(v.abs()));
            match self.values {
                Values::Int8 if largest == 0.0 => rounded.extend(elements),
                Values::Int8 => {
                    let scale = largest / 127.0;
                    rounded.extend(elements.iter().map(|v| (v / scale).round() * scale));
                }
            }
        }
        rounded
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
            assert!((got - want).abs() < 1e-12, "{got}, expected {want}");
        }
    }

    #[test]
    fn plain_formats_round_each_element() {
        let third = 1.0 / 3.0;
        let rounded = Format::Plain(DType::BF16).round(&[third, 1.0], 2);
        assert_eq!(rounded, [f64::from(DType::BF16.round(third as f32)), 1.0]);
    }
}
