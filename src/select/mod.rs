//! Kernel selection: which kernel computes what, for which batches, on which card. No other module decides that.
//!
//! 1. A [`Site`] is the problem of one node of a graph; sites that feed each other form a [`Chain`].
//! 2. An implementation covers the first sites of a chain by launches, each with candidate kernels
//!    (`implementations`, one file each).
//! 3. A kernel estimates its time for a number of rows on a [`Machine`](crate::machine::Machine)
//!    ([`Kernel::cycles`](crate::kernels::Kernel::cycles)); timings on the card correct the estimate ([`Timings`]).
//! 4. For one number of rows, the cheapest cover of a chain by implementations is a shortest path (`cover`).
//! 5. Kernels that save too little over all numbers of rows are dropped, as each costs compile time (`prune`).
//! 6. Over all numbers of rows, the covers that lose least with few changes make a [`Dispatch`] for each launch.
//!
//! Attention is dispatched by the longest sequence instead of rows, by fixed rules ([`Attention`]), and that of decoding steps by
//! sequences and keys ([`CachedAttention`]).
//! The lowering builds the chains and emits the launches of the answer.

mod attention;
mod cover;
mod dispatch;
mod implementations;
mod measure;
mod prune;
mod site;
#[cfg(test)]
mod testing;

pub use attention::{Attention, CachedAttention};
pub use cover::{Alternative, Covered, Question};
pub use dispatch::{Batches, Dispatch, Entry, Interval};
pub use implementations::{Operand, candidates};
pub use measure::Timings;
pub use site::{Chain, Link, Site};
