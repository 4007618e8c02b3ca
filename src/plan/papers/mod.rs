//! Allocators for comparison: the published allocator of TurboTransformers, two baselines, and the caching allocator of PyTorch.

mod baselines;
mod caching;

pub use baselines::{Gsoc, Maximum, Turbo};
pub use caching::Caching;
