//! A linear layer and the norm after it in one GEMM, with the norm in the epilogue. The CTAs of a cluster hold whole rows.

use super::{
    Bindings, Candidate, IS_READ, Implementation, NOT_PLAIN, ONLY_HOPPER, Operand, Unfit, require,
};
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

/// Implements a linear layer and the next node, which adds a residual and normalizes the sum.
pub(super) fn after_linear(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    let [linear, norm, ..] = chain else {
        return Err(Unfit::Sites);
    };
    let (Site::Linear(problem), Site::SumLayerNorm(norm)) = (&linear.site, &norm.site) else {
        return Err(Unfit::Sites);
    };
    let GemmProblem { n, k, dtype, .. } = *problem;
    let is_hopper = machine.instructions == Instructions::Hopper;
    require(is_hopper, ONLY_HOPPER)?;
    require(linear.is_private, IS_READ)?;
    require(problem.is_plain(), NOT_PLAIN)?;
    let has_no_epilogue = problem.epilogue == Epilogue::default();
    require(
        has_no_epilogue,
        "the linear layer has an epilogue of its own",
    )?;
    let candidates = |tile| GemmResidualNorm {
        n,
        k,
        eps: norm.eps,
        dtype,
        bias: norm.bias,
        keeps_sum: false,
        centered: true,
        tile,
    };
    let bindings = Bindings::to_operands_of(&[0, 1]).with("out", Operand::Value(1));
    Implementation::one_launch(2, bindings, of_tiles(n, k, dtype, candidates))
}

/// Implements a linear layer that adds to the residual stream, and the norm of the sum. The sum is stored, too.
pub(super) fn after_sum(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    let [linear, norm, ..] = chain else {
        return Err(Unfit::Sites);
    };
    let Site::Linear(problem) = &linear.site else {
        return Err(Unfit::Sites);
    };
    let GemmProblem {
        n,
        k,
        dtype,
        epilogue,
        ..
    } = *problem;
    let (eps, centered) = match &norm.site {
        Site::LayerNorm(norm) => (norm.eps, true),
        Site::RmsNorm(norm) => (norm.eps, false),
        _ => return Err(Unfit::Sites),
    };
    let adds = epilogue == Epilogue::new(epilogue.bias, None).with_residual();
    require(adds, "the linear layer does not add to a residual")?;
    let is_hopper = machine.instructions == Instructions::Hopper;
    require(is_hopper, ONLY_HOPPER)?;
    require(problem.is_plain(), NOT_PLAIN)?;
    let kernel = |tile| GemmResidualNorm {
        n,
        k,
        eps,
        dtype,
        bias: epilogue.bias,
        keeps_sum: true,
        centered,
        tile,
    };
    let bindings = Bindings::to_operands_of(&[0, 1])
        .with("sum", Operand::Value(0))
        .with("out", Operand::Value(1));
    Implementation::one_launch(2, bindings, of_tiles(n, k, dtype, kernel))
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
