//! Kernel selection: the kernels for each part of a graph, by batch and card. All such decisions
//! are made in this module.
//!
//! 1. A [`Site`] is the problem of one node of a graph. Sites that feed each other form a
//!    [`Chain`].
//! 2. An implementation covers the first sites of a chain by launches, each with candidate kernels
//!    (`implementations`, one file each).
//! 3. A kernel estimates its time for a number of rows on a [`Machine`](crate::machine::Machine)
//!    ([`Kernel::cycles`](crate::kernels::Kernel::cycles)). Timings on the card correct the
//!    estimate ([`Timings`]).
//! 4. For one number of rows, the cheapest cover of a chain by implementations is a shortest path
//!    (`cover`).
//! 5. Kernels that save too little over all numbers of rows are removed, because each costs compile
//!    time (`prune`).
//! 6. Over all numbers of rows, covers with the smallest loss and few changes are combined into a
//!    [`Dispatch`] for each launch.
//!
//! Attention is dispatched by fixed rules: by the longest sequence instead of rows ([`Attention`]),
//! and for decode steps by sequences and keys ([`CachedAttention`]). The lowering builds the chains
//! and emits the selected launches.

mod attention;
mod cover;
mod dispatch;
mod edges;
mod implementations;
mod measure;
mod prune;
mod site;
#[cfg(test)]
mod testing;

pub use attention::{Attention, CachedAttention};
pub use cover::{Alternative, ChosenLaunch, Refusal, SelectionInput};
pub use dispatch::{Batches, Dispatch, Entry, Interval};
pub use implementations::{Bindings, Operand, ScratchRows, Unfit, candidates, equation, require};
pub use measure::Timings;
pub use site::{Chain, Link, Site};
