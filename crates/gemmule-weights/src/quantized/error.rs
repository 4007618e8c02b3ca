//! Reasons for refusing a quantized checkpoint.

use thiserror::Error;

use crate::pickle::shown;

/// Supported values of `quant_method`.
pub(super) const METHODS: [&str; 6] = [
    "awq",
    "compressed-tensors",
    "fbgemm_fp8",
    "fp8",
    "gptq",
    "modelopt",
];

/// Reason for refusing a quantized checkpoint.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum QuantizedError {
    /// An unsupported `quant_method`.
    #[error(
        "its weights are quantized with the method `{found}`, which is not read; expected one of {}; use the model's checkpoint that is not quantized, or one of these methods{cure}",
        METHODS.join(", ")
    )]
    Method { found: String, cure: &'static str },
    /// A key of config.json.
    #[error("its key `{key}` {problem}")]
    Key { key: String, problem: String },
    /// A problem with a tensor in the weight files.
    #[error("the tensor `{tensor}` {problem}")]
    Tensor { tensor: String, problem: String },
    #[error(
        "out of memory for the tensor `{tensor}`, which takes {bytes} bytes; are its sizes right? Free memory, or use a smaller model"
    )]
    Memory { tensor: String, bytes: u64 },
}

impl QuantizedError {
    /// Returns whether the cause is in config.json rather than in the weight files.
    pub fn is_of_config(&self) -> bool {
        match self {
            Self::Method { .. } | Self::Key { .. } => true,
            Self::Tensor { .. } | Self::Memory { .. } => false,
        }
    }
}

pub(super) type Result<T, E = QuantizedError> = std::result::Result<T, E>;

pub(super) fn wrong_key(key: &str, problem: impl Into<String>) -> QuantizedError {
    QuantizedError::Key {
        key: shown(key),
        problem: problem.into(),
    }
}

pub(super) fn wrong_tensor(tensor: &str, problem: impl Into<String>) -> QuantizedError {
    QuantizedError::Tensor {
        tensor: shown(tensor),
        problem: problem.into(),
    }
}
