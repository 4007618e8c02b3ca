//! Preparation of attention's operands in a separate launch, or in the epilogue of the preceding GEMM if the preparation consists only of
//! rotary positions.

use super::{Bindings, Candidate, Implementation, Launch, Operand};
use crate::{
    kernels::gemm::{GemmPrepareAttention, GemmProblem, WgmmaTile},
    machine::Machine,
    ops::Epilogue,
    select::site::{Link, Site},
};

pub(super) fn alone(chain: &[Link], _: &Machine) -> Option<Implementation> {
    let Site::Prepare { kernel, .. } = &chain.first()?.site else {
        return None;
    };
    let launch = Launch {
        site: 0,
        bindings: Bindings::to_operands_of(&[0])
            .with("queries", Operand::Value(0))
            .with(kernel.keys_param(), Operand::Second(0)),
        candidates: vec![Candidate::new(kernel.clone())],
    };
    Some(Implementation {
        name: "prepare attention",
        sites: 1,
        launches: vec![launch],
        saved: 0.0,
    })
}

/// Prepares operands in the GEMM's epilogue. The launch is at the second site, where all operands are available.
pub(super) fn after_gemm(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let [linear, prepare, ..] = chain else {
        return None;
    };
    let Site::Linear(problem) = &linear.site else {
        return None;
    };
    let &GemmProblem {
        n,
        k,
        dtype,
        epilogue,
        ..
    } = problem;
    let fp8 = problem.is_fp8();
    if !problem.is_plain() && !fp8 {
        return None;
    }
    let Site::Prepare {
        kernel,
        is_alone: true,
    } = &prepare.site
    else {
        return None;
    };
    let is_plain = epilogue == Epilogue::new(epilogue.bias, None);
    if !is_plain || (kernel.row, kernel.dtype) != (n, dtype) {
        return None;
    }
    let kernel_of = GemmPrepareAttention {
        k,
        bias: epilogue.bias,
        fp8,
        prepare: kernel.clone(),
        tile: WgmmaTile::CANDIDATES[0],
    };
    let tiles = kernel_of.tiles(machine.instructions);
    let launch = Launch {
        site: 1,
        bindings: Bindings::to_operands_of(&[0, 1])
            .with("out", Operand::Value(0))
            .with("queries", Operand::Value(1))
            .with(kernel.keys_param(), Operand::Second(1)),
        candidates: tiles.into_iter().map(Candidate::new).collect(),
    };
    (!launch.candidates.is_empty()).then(|| Implementation {
        name: "gemm+prepare attention",
        sites: 2,
        launches: vec![launch],
        saved: 0.0,
    })
}
