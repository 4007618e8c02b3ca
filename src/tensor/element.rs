use std::fmt;

use serde::{Deserialize, Serialize};

use super::{DType, Format, Scaled, e4m3};

/// Type of the elements of a tensor: values, or indices and counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Element {
    Value(DType),
    /// Low-bit values with scales: the weight of a linear layer.
    Scaled(Scaled),
    /// E4M3 without scales: an operand of an fp8 product.
    E4m3,
    /// 8-bit integers from −127 to 127 without scales: the input rows of an int8 product.
    I8,
    I32,
    I64,
}

impl Element {
    /// Returns the bytes of one element. Scaled elements are packed together with their scales into a matrix of bytes, so this returns 1
    /// for them. [`tensor_bytes`](Self::tensor_bytes) returns the size of the packed matrix.
    pub const fn bytes(self) -> u64 {
        match self {
            Element::Value(dtype) => dtype.bytes(),
            Element::Scaled(_) | Element::E4m3 | Element::I8 => 1,
            Element::I32 => 4,
            Element::I64 => 8,
        }
    }

    /// Bytes of a tensor with these dimensions; `None` if they do not fit in 64 bits.
    pub fn tensor_bytes(self, dims: &[u64]) -> Option<u64> {
        let product = |dims: &[u64]| dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        match (self, dims) {
            (Element::Scaled(scaled), [rows @ .., columns]) => {
                scaled.packed_bytes(product(rows)?, *columns)
            }
            (Element::Scaled(_), []) => None,
            (
                Element::Value(_) | Element::E4m3 | Element::I8 | Element::I32 | Element::I64,
                dims,
            ) => product(dims)?.checked_mul(self.bytes()),
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Element::Value(dtype) => dtype.name(),
            Element::Scaled(scaled) => scaled.name(),
            Element::E4m3 => "e4m3",
            Element::I8 => "i8",
            Element::I32 => "i32",
            Element::I64 => "i64",
        }
    }

    /// Rounds `value` as if it were stored in this type. Scaled elements are not rounded, because only a whole matrix can be quantized.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Element::Value(dtype) => dtype.round(value),
            Element::Scaled(_) => value,
            Element::E4m3 => e4m3::round(value),
            Element::I8 => value.round_ties_even().clamp(-127.0, 127.0),
            Element::I32 | Element::I64 => value.round(),
        }
    }
}

impl From<DType> for Element {
    fn from(dtype: DType) -> Self {
        Element::Value(dtype)
    }
}

impl From<Format> for Element {
    fn from(format: Format) -> Self {
        match format {
            Format::Plain(dtype) => Self::Value(dtype),
            Format::Scaled(scaled) => Self::Scaled(scaled),
            Format::E4m3 => Self::E4m3,
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
