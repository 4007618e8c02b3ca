//! Weights: from a published checkpoint, or random for benchmarks.
//!
//! Tensors are found under their published names, with the usual prefixes (`bert.`, …) tried in
//! order. Everything is checked before the first byte is copied.

mod checkpoint;
mod random;

use half::{bf16, f16};

pub use checkpoint::{Checkpoint, CheckpointError};
pub use random::RandomWeights;

use crate::{graph::WeightExpr, tensor::DType};

/// Something that yields stored tensors as f32.
pub trait WeightSource: Send + Sync {
    /// The tensor `name` of `dims`, row-major.
    fn read(&self, name: &str, dims: &[u64]) -> Result<Vec<f32>, CheckpointError>;

    /// Checks all of `stored` at once, so that one error names everything that is missing.
    fn check(&self, stored: &[(&str, &[u64])]) -> Result<(), CheckpointError>;

    /// Tensors that the source has and none of `used` is; published checkpoints carry some.
    fn surplus(&self, used: &[(&str, &[u64])]) -> Vec<String>;
}

/// Evaluates an expression over stored tensors.
pub fn evaluate(expr: &WeightExpr, source: &dyn WeightSource) -> Result<Vec<f32>, CheckpointError> {
    match expr {
        WeightExpr::Stored { name, dims } => source.read(name, dims),
        WeightExpr::ConcatRows(parts) => {
            let mut out = Vec::with_capacity(expr.dims().iter().product::<u64>() as usize);
            for part in parts {
                out.extend(evaluate(part, source)?);
            }
            Ok(out)
        }
    }
}

/// `values` in their storage type, little-endian.
pub fn encode(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F16 => values
            .iter()
            .flat_map(|&v| f16::from_f32(v).to_le_bytes())
            .collect(),
        DType::BF16 => values
            .iter()
            .flat_map(|&v| bf16::from_f32(v).to_le_bytes())
            .collect(),
        _ => values.iter().flat_map(|&v| v.to_le_bytes()).collect(),
    }
}

/// Stored elements as f32; trailing bytes that make no element are ignored.
pub fn decode(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let pairs = || bytes.as_chunks::<2>().0.iter();
    match dtype {
        DType::F16 => pairs().map(|&b| f16::from_le_bytes(b).to_f32()).collect(),
        DType::BF16 => pairs().map(|&b| bf16::from_le_bytes(b).to_f32()).collect(),
        _ => bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&b| f32::from_le_bytes(b))
            .collect(),
    }
}
