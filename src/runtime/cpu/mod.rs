//! The CPU executor.

pub mod ops;
