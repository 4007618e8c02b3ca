//! CPU arithmetic of gemmule: matrix products, linear layers, attention and row-wise operations on f32 slices.
//!
//! This crate contains only the inner loops of the CPU executor, and the sums in the reference implementations of GEMM kernels. It is
//! compiled as one codegen unit with full optimization, because code that is generic over an instruction set must be inlined into the
//! function that enables the set. The rest of gemmule can then be compiled without optimization across units, in half the time.
//!
//! No public item is generic over an instruction set, so all code is compiled here. Functions panic if slices do not have the documented
//! lengths.

mod fused_attention;
mod lines;
mod simd;

pub mod attention;
pub mod linear;
pub mod max_sim;
pub mod parallel;
pub mod product;
pub mod rows;

pub use simd::{Activation, Running};

/// Adds a method `run` to operations.
macro_rules! runs {
    ($($name:ident),*) => {$(
        impl $name<'_> {
            /// Runs the operation with the widest vector instructions of this machine.
            pub fn run(self) {
                crate::simd::dispatch(self);
            }
        }
    )*};
}
use runs;

#[cfg(test)]
mod tests;
