use super::*;
use crate::kernels::representative;

#[test]
fn attention_preparation_agrees_with_the_references() {
    let is_one = |k: &KernelSpec| match k {
        KernelSpec::PrepareAttention(k) => k.dtype == F32,
        KernelSpec::AppendCache(k) => k.dtype == F32,
        KernelSpec::RmsNorm(k) => k.dtype == F32 && k.width <= 128,
        KernelSpec::Rotary(k) => k.dtype == F32,
        KernelSpec::Gate(k) => k.dtype == F32 && k.width < 1010,
        _ => false,
    };
    let kernels: Vec<KernelSpec> = representative().into_iter().filter(is_one).collect();
    assert!(kernels.len() > 20, "{}", kernels.len());
    super::long_attention::agree(kernels);
}
