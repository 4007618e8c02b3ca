//! gemmule compiles a description of a transformer into CUDA kernels written for that model, and
//! runs it on variable-length batches without padding.

#[doc(hidden)]
pub mod cli;
pub mod codegen;
pub mod engine;
pub mod files;
pub mod graph;
#[cfg(feature = "server")]
pub mod http;
pub mod jit;
pub mod kernels;
pub mod machine;
pub mod model;
#[doc(hidden)]
pub mod names;
pub mod passes;
pub mod plan;
pub mod program;
pub mod runtime;
pub mod schedule;
pub mod search;
pub mod select;
#[cfg(feature = "serve")]
pub mod serve;
pub mod simulate;
pub mod tensor;

pub use engine::{Builder, DeviceChoice, Engine, EngineError, Outputs, Session};
pub use plan::ChunkPolicy;
pub use program::AttentionChoice;
pub use runtime::{AllocatorChoice, GraphChoice, Output, batch::Batch};
pub use tensor::DType;

/// The Rust code of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
