//! CPU arithmetic of gemmule: matrix products, linear layers, attention and row-wise operations on f32 slices.
//!
//! This crate holds every inner loop of the CPU executor, and nothing else. It is compiled as one unit with full optimization,
//! because code that is generic over an instruction set must be inlined into the function that enables the set. The rest of
//! gemmule can then be compiled without optimization across units, which takes half the time.
//!
//! Nothing public is generic over an instruction set, so all of it is compiled here. Slices must have the lengths that their
//! documentation says; otherwise functions panic.

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

/// Gives operations a method that runs them with the widest vectors of this machine.
macro_rules! runs {
    ($($name:ident),*) => {$(
        impl $name<'_> {
            /// Runs with the widest vectors of this machine.
            pub fn run(self) {
                crate::simd::dispatch(self);
            }
        }
    )*};
}
use runs;

#[cfg(test)]
mod tests;
