//! The schedulers of TurboTransformers and TCB.

mod composed;
mod das;
mod dp;
mod index;

pub use composed::{BatchLayout, Composed, Order, Trigger};
pub use dp::partition;
#[cfg(test)]
pub(super) use {
    das::{das, first_fit, slotted},
    index::Index,
};
