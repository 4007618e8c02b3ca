use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Storage type of values: weights, activations and logits. Arithmetic is always accumulated in f32.
///
/// Matches over storage types list every variant, so the compiler reports each place that must handle a new variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DType {
    F32,
    F16,
    BF16,
}

impl DType {
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::BF16];

    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            DType::F16 | DType::BF16 => 2,
            DType::F32 => 4,
        }
    }

    /// Returns the name used in symbols, in files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
        }
    }

    /// Returns whether tensor cores multiply values of this type. Products in f32 are computed by FMAs.
    pub const fn has_mma(self) -> bool {
        match self {
            DType::F16 | DType::BF16 => true,
            DType::F32 => false,
        }
    }

    /// Rounds `value` to this type and converts it back to f32.
    pub fn round(self, value: f32) -> f32 {
        match self {
            DType::F32 => value,
            DType::F16 => half::f16::from_f32(value).to_f32(),
            DType::BF16 => half::bf16::from_f32(value).to_f32(),
        }
    }

    /// Distance from 1 to the next larger value of this type: 2⁻²³ for f32, 2⁻¹⁰ for f16 and 2⁻⁷ for bf16.
    pub const fn epsilon(self) -> f32 {
        match self {
            DType::F32 => f32::EPSILON,
            DType::F16 => 1.0 / 1024.0,
            DType::BF16 => 1.0 / 128.0,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is not a storage type.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a storage type; expected f32, f16 or bf16")]
pub struct UnknownDType(String);

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(text: &str) -> Result<Self, UnknownDType> {
        match text {
            "f32" => Ok(DType::F32),
            "f16" => Ok(DType::F16),
            "bf16" => Ok(DType::BF16),
            _ => Err(UnknownDType(text.to_owned())),
        }
    }
}
