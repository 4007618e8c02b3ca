//! Tests of programs and kernels: sources, kernel selection, compilation, the ledger of kernels that ran on a GPU, artifacts and launches.
//!
//! Tests that need a CUDA device are ignored by default. `cargo test --test kernels -- --ignored` runs them on a machine with a GPU and
//! NVRTC.

#[path = "../common/mod.rs"]
mod common;

mod allocators;
mod artifacts;
mod attention;
mod buckets;
mod catalogue;
mod device;
mod dispatch;
mod fused_launches;
mod invariant;
mod jit_compile;
mod jit_processes;
mod ledger;
mod low_precision;
mod padding;
mod plans;
mod sources;
mod timings;
