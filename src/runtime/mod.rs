//! Runs programs on the CPU and on CUDA devices, and loads their weights.
//!
//! An executor has two parts. A model holds the immutable state (weights, modules), which sessions share. A session owns the mutable state
//! of a run (memory chunks, a stream), so several sessions can run concurrently.

pub mod batch;
pub mod cpu;
pub mod cuda;
mod device_output;
mod elements;
mod model;
mod output;
mod planner;
mod replay;
pub mod weights;
mod workspace;

pub(crate) use model::LoadedModel;

pub use device_output::{DeviceOutput, DeviceOutputError};
pub use elements::{decode_indices, decode_values, encode_tensor, extend_values};
pub use output::{MemoryUse, Output};
pub use planner::{AllocatorChoice, Footprint, Planner, PlannerError};
pub use replay::{GraphChoice, GraphUse};
pub use workspace::MemoryWork;
