//! Measurements and checks of an engine: the time of its kernels, deviations from references, the catalogue of kernels, and
//! estimated costs.

mod breakdown;
mod catalogue;
mod estimate;
mod verify;

pub use breakdown::{Breakdown, Share};
pub use catalogue::{Emitted, catalogue, shipped_configs};
pub use estimate::estimated_costs;
pub use verify::{Bound, Comparison, Reference, ReferenceCase};
