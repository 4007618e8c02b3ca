//! gemmule compiles a description of a transformer into CUDA kernels written for that model, and
//! runs it on variable-length batches without padding.

pub mod codegen;
pub mod graph;
pub mod jit;
pub mod kernels;
pub mod model;
mod names;
pub mod passes;
pub mod plan;
pub mod program;
pub mod runtime;
pub mod tensor;
