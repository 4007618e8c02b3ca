//! Fusion.
