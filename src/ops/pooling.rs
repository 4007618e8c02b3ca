//! Weights of tokens in pooling.

use serde::{Deserialize, Serialize};

/// Weights of the tokens in the pooled row of a sequence of `n` tokens. `xᵢ` is the row of token `i`, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PoolWeights {
    /// `Σ (i + 1) · xᵢ / Σ (i + 1)`: the mean, in which later tokens count more.
    Position,
    /// `Σ xᵢ / √n`: the sum, divided by the square root of the length.
    RootLength,
}

impl PoolWeights {
    pub const ALL: [Self; 2] = [Self::Position, Self::RootLength];

    /// Name of the operator, and first part of the kernel's symbol.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Position => "weighted_mean_pool",
            Self::RootLength => "root_length_pool",
        }
    }

    /// Returns the weight of token `i`, before the division by [`divisor`](Self::divisor).
    pub fn of(self, i: usize) -> f64 {
        match self {
            Self::Position => (i + 1) as f64,
            Self::RootLength => 1.0,
        }
    }

    /// Returns the divisor of a sequence of `n` tokens.
    pub fn divisor(self, n: usize) -> f64 {
        let n = n as f64;
        match self {
            Self::Position => n * (n + 1.0) / 2.0,
            Self::RootLength => n.sqrt(),
        }
    }
}
