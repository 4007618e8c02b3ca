//! Preparation of attention's operands: in a separate launch, or in the epilogue of the preceding
//! GEMM if only rotary positions are applied.

use super::{Candidate, Implementation, Launch, Operand, operands};
use crate::{
    kernels::{Kernel, Role, gemm::GemmPrepareAttention, prepare_attention::PrepareAttention},
    machine::Machine,
    select::site::{Link, Site},
};

pub(super) fn alone(chain: &[Link], _: &Machine) -> Option<Implementation> {
    let Site::Prepare { kernel, .. } = &chain.first()?.site else {
        return None;
    };
    let launch = Launch {
        site: 0,
        operands: operands(0, 0..n_reads(kernel))
            .chain([Operand::Value(0), Operand::Second(0)])
            .collect(),
        candidates: vec![Candidate::new(kernel.clone())],
    };
    Some(Implementation {
        name: "prepare attention",
        sites: 1,
        launches: vec![launch],
        saved: 0.0,
    })
}

/// Launched at the second site, when all operands are available.
pub(super) fn after_gemm(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let [linear, prepare, ..] = chain else {
        return None;
    };
    let (
        &Site::Linear {
            n,
            k,
            dtype,
            epilogue,
        },
        Site::Prepare {
            kernel,
            is_alone: true,
        },
    ) = (&linear.site, &prepare.site)
    else {
        return None;
    };
    if epilogue.activation.is_some()
        || epilogue.residual
        || (kernel.row, kernel.dtype) != (n, dtype)
    {
        return None;
    }
    let tiles = GemmPrepareAttention::tiles(kernel, k, epilogue.bias, machine.instructions);
    let launch = Launch {
        site: 1,
        operands: operands(0, 0..2 + epilogue.operands())
            .chain(operands(1, 1..n_reads(kernel)))
            .chain([Operand::Value(0), Operand::Value(1), Operand::Second(1)])
            .collect(),
        candidates: tiles
            .into_iter()
            .map(|tile| {
                Candidate::new(GemmPrepareAttention {
                    k,
                    bias: epilogue.bias,
                    prepare: kernel.clone(),
                    tile,
                })
            })
            .collect(),
    };
    (!launch.candidates.is_empty()).then(|| Implementation {
        name: "gemm+prepare attention",
        sites: 2,
        launches: vec![launch],
        saved: 0.0,
    })
}

/// Returns the number of tensors that the kernel reads.
fn n_reads(kernel: &PrepareAttention) -> usize {
    let params = kernel.params();
    let is_read = |role: &Role| matches!(role, Role::Read { .. });
    params.iter().filter(|param| is_read(&param.role)).count()
}
