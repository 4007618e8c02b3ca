//! The gate of a feed-forward network, either in a separate launch or in the epilogue of the preceding GEMM.

use super::{Bindings, Candidate, IS_READ, Implementation, Operand, Unfit, require};
use crate::{
    kernels::gemm::{GemmProblem, GemmStream, GemmWgmma},
    machine::Machine,
    select::site::{Link, Site},
};

pub(super) fn alone(chain: &[Link], _: &Machine) -> Result<Implementation, Unfit> {
    let Some(Site::Gate(gate)) = chain.first().map(|link| &link.site) else {
        return Err(Unfit::Sites);
    };
    let bindings = Bindings::to_operands_of(&[0]).with("out", Operand::Value(0));
    Implementation::one_launch(1, bindings, vec![Candidate::new(gate.clone())])
}

pub(super) fn after_gemm(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    let problem = gated(chain)?;
    let on = machine.instructions;
    let streaming = GemmStream::of(problem.clone()).tiles(on).into_iter();
    let persistent = GemmWgmma::kernels(&problem, on).into_iter();
    let candidates = streaming.map(Candidate::new);
    let candidates = candidates.chain(persistent.map(Candidate::new)).collect();
    let bindings = Bindings::to_operands_of(&[0]).with("out", Operand::Value(1));
    Implementation::one_launch(2, bindings, candidates)
}

/// Returns the GEMM of a linear layer whose only reader is a gate. The gate is part of the GEMM's epilogue.
pub(super) fn gated(chain: &[Link]) -> Result<GemmProblem, Unfit> {
    let [linear, gate, ..] = chain else {
        return Err(Unfit::Sites);
    };
    let (Site::Linear(problem), Site::Gate(gate)) = (&linear.site, &gate.site) else {
        return Err(Unfit::Sites);
    };
    require(linear.is_private, IS_READ)?;
    let is_plain = problem.epilogue.activation.is_none() && problem.n == 2 * gate.width;
    require(
        is_plain,
        "the linear layer has an activation or another width",
    )?;
    Ok(problem.clone().with_gate(gate.activation))
}
