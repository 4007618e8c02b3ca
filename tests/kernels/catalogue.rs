//! The catalogue of kernels (all kernels that the project tests) and their sources, which all tests share.

use std::sync::LazyLock;

use gemmule::{
    engine::emit,
    jit::Source,
    kernels::KernelSpec,
    measure::{Emitted, catalogue},
};

/// Every kernel of the catalogue.
pub static EMITTED: LazyLock<Vec<Emitted>> = LazyLock::new(|| {
    let kernels = catalogue().expect("the shipped models compile");
    kernels.into_values().collect()
});

/// Sources of the kernels in [`EMITTED`], in the same order.
pub static SOURCES: LazyLock<Vec<Source>> = LazyLock::new(render);

pub fn render() -> Vec<Source> {
    let kernels: Vec<KernelSpec> = EMITTED.iter().map(|e| e.kernel.clone()).collect();
    emit(&kernels).expect("every kernel renders")
}
