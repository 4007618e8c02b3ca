use std::fmt;

use crate::tensor::{DType, Format, Values};

/// Precision to which the operands of an engine's matrix products are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    F32,
    F16,
    Bf16,
    Int8,
    /// Weights in 8-bit floating point.
    Fp8,
    /// Weights in 4-bit integers.
    Int4,
}

impl From<DType> for Precision {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F16 => Self::F16,
            DType::BF16 => Self::Bf16,
            DType::F32 => Self::F32,
        }
    }
}

impl From<Format> for Precision {
    fn from(format: Format) -> Self {
        match format {
            Format::Plain(dtype) => dtype.into(),
            Format::E4m3 => Self::Fp8,
            Format::Scaled(scaled) => match scaled.values {
                Values::Int8 => Self::Int8,
                Values::E4m3 => Self::Fp8,
                Values::Int4 => Self::Int4,
            },
        }
    }
}

impl Precision {
    /// Returns the name of the precision.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
            Self::Int4 => "int4",
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
