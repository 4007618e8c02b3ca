//! Allocators for comparison: those of TurboTransformers and its baselines, and the caching allocator of a framework.

mod baselines;
mod caching;

pub use baselines::{Gsoc, Maximum, Turbo};
pub use caching::Caching;
