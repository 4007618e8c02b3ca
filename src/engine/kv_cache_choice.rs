//! Choice of the KV cache's format.

use std::{fmt, str::FromStr};

use crate::tensor::Format;

/// Format of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KvCacheChoice {
    /// The storage type of activations.
    #[default]
    Auto,
    /// E4M3, an 8-bit floating-point type.
    Fp8,
}

/// Error for a name that is not a KV cache format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a format of a KV cache; expected auto (the type of activations) or fp8 (E4M3)"
)]
pub struct UnknownKvCacheChoice(String);

impl KvCacheChoice {
    /// Returns the format; `None` for the storage type of activations.
    pub fn format(self) -> Option<Format> {
        match self {
            Self::Auto => None,
            Self::Fp8 => Some(Format::E4m3),
        }
    }
}

impl FromStr for KvCacheChoice {
    type Err = UnknownKvCacheChoice;

    fn from_str(name: &str) -> Result<Self, UnknownKvCacheChoice> {
        match name {
            "auto" => Ok(Self::Auto),
            "fp8" => Ok(Self::Fp8),
            other => Err(UnknownKvCacheChoice(other.to_owned())),
        }
    }
}

impl fmt::Display for KvCacheChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Fp8 => "fp8",
        })
    }
}
