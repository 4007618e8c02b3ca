//! gemmule compiles a description of a transformer into CUDA kernels written for that model, and
//! runs it on variable-length batches without padding. The same program also runs on a CPU.
//!
//! # Concepts
//!
//! - A *description* is a RON file that lists the operators of a model. The module [`model`] documents its language.
//! - A [`Program`](program::Program) is a compiled description: fused kernels, and tensors whose sizes
//!   depend on the batch.
//! - An [`Engine`] is a program and its weights on one device.
//! - A [`Session`] runs batches on its own stream and in its own memory. Sessions of one engine run
//!   concurrently.
//! - A [`Batch`] is a packed list of sequences of token ids.
//! - [`Outputs`] are the named tensors of a run, such as `sentence_embedding`.
//! - A [`Generator`](generate::Generator) generates text for several requests at once, with a KV cache.
//!   It admits a request as soon as the cache has room.
//!
//! # Examples
//!
//! Embedding texts with a checkpoint folder in the layout of the Hugging Face hub:
//!
//! ```no_run
//! # fn main() -> Result<(), gemmule::EngineError> {
//! let engine = gemmule::Engine::from_checkpoint("all-MiniLM-L6-v2").build()?;
//! let vectors = engine.embed(&["It rained.", "The rain came down."])?;
//! println!("{} vectors of {} values", vectors.len(), vectors[0].len());
//! # Ok(())
//! # }
//! ```
//!
//! Running a batch of token ids and reading an output by name:
//!
//! ```no_run
//! # fn main() -> Result<(), gemmule::EngineError> {
//! let engine = gemmule::Engine::from_checkpoint("all-MiniLM-L6-v2").build()?;
//! let batch = gemmule::Batch::from_sequences(&[vec![101, 2088, 102], vec![101, 102]])?;
//! let outputs = engine.session()?.run(&batch)?;
//! assert_eq!(outputs.get("sentence_embedding")?.shape, [2, 384]);
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "cli")]
#[doc(hidden)]
pub mod cli;
pub mod codegen;
pub mod engine;
pub mod files;
pub mod generate;
pub mod graph;
pub mod heads;
#[cfg(feature = "server")]
pub mod http;
pub mod jit;
pub mod kernels;
pub mod machine;
pub mod measure;
pub mod model;
#[doc(hidden)]
pub mod names;
pub mod ops;
pub mod passes;
pub mod plan;
pub mod program;
pub mod runtime;
pub mod schedule;
pub mod search;
pub mod select;
#[cfg(feature = "serve")]
pub mod serve;
#[cfg(feature = "simulate")]
pub mod simulate;
pub mod tensor;
pub mod text;

pub use engine::{Builder, DeviceChoice, Engine, EngineError, Outputs, Session};
pub use plan::ChunkPolicy;
pub use program::AttentionChoice;
pub use runtime::{AllocatorChoice, DeviceOutput, GraphChoice, Output, batch::Batch};
pub use tensor::{DType, Format};
pub use text::TextError;

/// Compiles the Rust code of the README as doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
