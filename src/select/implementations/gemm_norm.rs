//! A linear layer and the norm after it in one GEMM, with the norm in the epilogue. The CTAs of a cluster hold whole rows.

use super::{Bindings, Candidate, Implementation, Launch, Operand};
use crate::{
    kernels::{
        Instructions,
        gemm::{GemmProblem, GemmResidualNorm, WgmmaTile},
    },
    machine::Machine,
    ops::Epilogue,
    select::site::{Link, Site},
    tensor::DType,
};

/// Implements a linear layer and the norm of a sum, which is a separate node of the graph.
pub(super) fn after_linear(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let [linear, norm, ..] = chain else {
        return None;
    };
    let (Site::Linear(problem), Site::SumLayerNorm(norm)) = (&linear.site, &norm.site) else {
        return None;
    };
    let GemmProblem { n, k, dtype, .. } = *problem;
    let serves = machine.instructions == Instructions::Hopper
        && linear.is_private
        && problem.is_plain()
        && problem.epilogue == Epilogue::default();
    if !serves {
        return None;
    }
    let candidates = |tile| GemmResidualNorm {
        n,
        k,
        eps: norm.eps,
        dtype,
        bias: norm.bias,
        keeps_sum: false,
        centred: true,
        tile,
    };
    let launch = Launch {
        site: 1,
        bindings: Bindings::to_operands_of(&[0, 1]).with("out", Operand::Value(1)),
        candidates: of_tiles(n, k, dtype, candidates),
    };
    (!launch.candidates.is_empty()).then(|| Implementation {
        name: "gemm+norm",
        sites: 2,
        launches: vec![launch],
        saved: 0.0,
    })
}

/// Implements a linear layer that adds to the residual stream, and the norm of the sum. The sum is stored, too.
pub(super) fn after_sum(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let [linear, norm, ..] = chain else {
        return None;
    };
    let Site::Linear(problem) = &linear.site else {
        return None;
    };
    let GemmProblem {
        n,
        k,
        dtype,
        epilogue,
        ..
    } = *problem;
    let (eps, centred) = match &norm.site {
        Site::LayerNorm(norm) => (norm.eps, true),
        Site::RmsNorm(norm) => (norm.eps, false),
        _ => return None,
    };
    let serves = machine.instructions == Instructions::Hopper
        && problem.is_plain()
        && epilogue == Epilogue::new(epilogue.bias, None).with_residual();
    if !serves {
        return None;
    }
    let kernel = |tile| GemmResidualNorm {
        n,
        k,
        eps,
        dtype,
        bias: epilogue.bias,
        keeps_sum: true,
        centred,
        tile,
    };
    let launch = Launch {
        site: 1,
        bindings: Bindings::to_operands_of(&[0, 1])
            .with("sum", Operand::Value(0))
            .with("out", Operand::Value(1)),
        candidates: of_tiles(n, k, dtype, kernel),
    };
    (!launch.candidates.is_empty()).then(|| Implementation {
        name: "gemm+sum+norm",
        sites: 2,
        launches: vec![launch],
        saved: 0.0,
    })
}

fn of_tiles(
    n: u32,
    k: u32,
    dtype: DType,
    kernel: impl Fn(WgmmaTile) -> GemmResidualNorm,
) -> Vec<Candidate> {
    let tiles = GemmResidualNorm::candidates(n, k, dtype).into_iter();
    tiles.map(|tile| Candidate::new(kernel(tile))).collect()
}
