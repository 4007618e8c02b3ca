//! Runs programs on CUDA devices.
