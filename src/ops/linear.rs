//! The epilogue of a linear layer.

use serde::{Deserialize, Serialize};

use super::Activation;

/// Operations applied to the accumulators while they are still in registers.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct Epilogue {
    pub bias: bool,
    pub activation: Option<Activation>,
    /// Whether a tensor of the result's shape is added last, before rounding.
    pub residual: bool,
}

impl Epilogue {
    pub const fn new(bias: bool, activation: Option<Activation>) -> Self {
        Self {
            bias,
            activation,
            residual: false,
        }
    }

    /// Returns this epilogue with a residual added last.
    pub const fn with_residual(self) -> Self {
        Self {
            residual: true,
            ..self
        }
    }

    /// Number of operands of the epilogue: the bias and the residual, if present.
    pub const fn operands(self) -> usize {
        self.bias as usize + self.residual as usize
    }

    /// Name of the computation: `gemm`, `gemm_bias`, `gemm_bias_gelu`, `gemm_bias_residual`, …
    pub fn name(self) -> String {
        let mut name = String::from("gemm");
        if self.bias {
            name.push_str("_bias");
        }
        if let Some(activation) = self.activation {
            name.push('_');
            name.push_str(activation.name());
        }
        if self.residual {
            name.push_str("_residual");
        }
        name
    }
}
