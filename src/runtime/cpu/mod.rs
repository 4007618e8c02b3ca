//! The CPU executor.
