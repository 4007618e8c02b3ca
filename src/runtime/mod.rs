//! Runs programs: on the CPU and on CUDA devices, with the weights that they need.
//!
//! An executor comes in two parts. What never changes after loading (weights, modules) is shared;
//! a session owns what a run touches (chunks, a stream), so that sessions run side by side.

pub mod batch;
pub mod cpu;
pub mod cuda;
mod elements;
mod output;
mod planner;
mod replay;
pub mod weights;
mod workspace;

pub use elements::{decode_indices, decode_values, encode_tensor, extend_values};
pub use output::{MemoryUse, Output};
pub use planner::{AllocatorChoice, Footprint, Planner, PlannerError};
pub use replay::{GraphChoice, GraphUse};
pub use workspace::MemoryWork;
