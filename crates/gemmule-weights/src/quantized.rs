//! Quantized checkpoints: safetensors whose config.json has a `quantization_config`.
//!
//! Such a checkpoint stores a matrix as several tensors: quantized values, scales, and sometimes zero points and an order of columns.
//! [`Config::parse`] reads the configuration. [`Config::matrices`] finds the tensors of each matrix and checks their types and shapes.
//! [`Matrix::read`] combines them into a [`Quantized`] matrix, whose rows are dequantized on request. The module does not depend on a file
//! format: callers pass names, types, shapes and bytes.
//!
//! The layouts are those of AutoGPTQ and GPTQModel, AutoAWQ (`gemm`), compressed-tensors, ModelOpt (fp8), and the fp8
//! checkpoints of Hugging Face transformers. Scales of activations are ignored, because products are computed in floating point.
//! [`CacheRows`] names the tensors with the scales of a KV cache.

mod cache_scales;
mod config;
mod error;
mod keys;
mod matrix;
mod modules;
mod names;
#[cfg(test)]
mod tests;
mod unpack;
mod values;

pub use cache_scales::{CacheRows, cache_scale, is_cache_scale};
pub use config::Config;
pub use error::QuantizedError;
pub use matrix::{Kind, Matrix, Runs};
pub use modules::{Matrices, check_plain};
pub use values::{Groups, Quantized, Values, Zeros, e4m3};

use crate::Element;

/// Type and shape of a stored tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    pub element: Element,
    pub dims: Vec<u64>,
}
