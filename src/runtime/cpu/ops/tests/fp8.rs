use std::collections::HashSet;

use super::{long_attention::agree, *};
use crate::{
    kernels::{attention::FusedMha, e4m3::Norm, representative},
    tensor::DType,
};

/// Tests one kernel for each `Kernel::definition` (kernels that differ only in tiles share one), with sizes that take little time.
#[test]
fn products_and_conversions_in_fp8_agree_with_their_references() {
    let is_small = |kernel: &KernelSpec| match kernel {
        KernelSpec::GemmWgmma(k) => {
            // Products in int8 take a packed weight; `program::lower` tests them.
            let is_e4m3 = k.problem.quantized_rows && !k.problem.multiplies_int8();
            (k.problem.is_fp8() || is_e4m3) && k.problem.k < 500
        }
        KernelSpec::QuantizeRows(k) => k.k < 800,
        KernelSpec::QuantizeGroups(k) => k.k < 800,
        KernelSpec::Gemm(k) => k.problem.is_fp8() && k.problem.k < 500,
        KernelSpec::ToE4m3(k) => k.width < 500,
        KernelSpec::GateToE4m3(k) => k.gate.width < 500,
        KernelSpec::NormToE4m3(k) => match &k.norm {
            Norm::Layer(norm) => norm.width == 336,
            Norm::Sum(norm) => norm.width == 336,
            Norm::Rms(norm) => norm.width == 336,
        },
        KernelSpec::MhaToE4m3(k) => match &k.attention {
            FusedMha::Wgmma(attention) => attention.of.head == 32 && attention.of.causal,
            FusedMha::Online(attention) => attention.of.head == 32,
            FusedMha::Short(attention) => attention.of.head == 8,
        },
        _ => false,
    };
    let mut seen = HashSet::new();
    let in_f16 = |kernel: &KernelSpec| kernel.as_kernel().dtype() == Some(DType::F16);
    let mut kernels = representative();
    kernels.retain(|kernel| is_small(kernel) && in_f16(kernel));
    kernels.retain(|kernel| seen.insert(kernel.as_kernel().definition()));
    let of = |is: fn(&KernelSpec) -> bool| kernels.iter().filter(|kernel| is(kernel)).count();
    assert_eq!(of(|k| matches!(k, KernelSpec::GemmWgmma(_))), 9);
    assert_eq!(of(|k| matches!(k, KernelSpec::QuantizeRows(_))), 6);
    assert_eq!(of(|k| matches!(k, KernelSpec::QuantizeGroups(_))), 3);
    assert_eq!(of(|k| matches!(k, KernelSpec::Gemm(_))), 6);
    assert_eq!(of(|k| matches!(k, KernelSpec::NormToE4m3(_))), 6);
    assert_eq!(of(|k| matches!(k, KernelSpec::MhaToE4m3(_))), 5);
    assert_eq!(of(|k| matches!(k, KernelSpec::GateToE4m3(_))), 1);
    agree(kernels);
}

#[test]
fn conversions_of_packed_weights_agree_with_their_references() {
    let mut kernels = representative();
    kernels.retain(|kernel| matches!(kernel, KernelSpec::UnpackWeight(_)));
    assert_eq!(kernels.len(), 72);
    agree(kernels);
}
