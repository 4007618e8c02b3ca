//! The gate of a feed-forward network, either in a separate launch or in the epilogue of the preceding GEMM.

use super::{Bindings, Candidate, Implementation, Launch, Operand};
use crate::{
    kernels::gemm::{GemmProblem, GemmStream, GemmWgmma},
    machine::Machine,
    select::site::{Link, Site},
};

pub(super) fn alone(chain: &[Link], _: &Machine) -> Option<Implementation> {
    let Site::Gate(gate) = &chain.first()?.site else {
        return None;
    };
    let launch = Launch {
        site: 0,
        bindings: Bindings::to_operands_of(&[0]).with("out", Operand::Value(0)),
        candidates: vec![Candidate::new(gate.clone())],
    };
    Some(Implementation {
        name: "gate",
        sites: 1,
        launches: vec![launch],
        saved: 0.0,
    })
}

pub(super) fn after_gemm(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let problem = gated(chain)?;
    let on = machine.instructions;
    let streaming = GemmStream::of(problem.clone()).tiles(on).into_iter();
    let persistent = GemmWgmma::kernels(&problem, on).into_iter();
    let launch = Launch {
        site: 1,
        bindings: Bindings::to_operands_of(&[0]).with("out", Operand::Value(1)),
        candidates: streaming
            .map(Candidate::new)
            .chain(persistent.map(Candidate::new))
            .collect(),
    };
    (!launch.candidates.is_empty()).then(|| Implementation {
        name: "gemm+gate",
        sites: 2,
        launches: vec![launch],
        saved: 0.0,
    })
}

/// Returns the GEMM of a linear layer whose only reader is a gate, fused with the gate.
pub(super) fn gated(chain: &[Link]) -> Option<GemmProblem> {
    let [linear, gate, ..] = chain else {
        return None;
    };
    let (Site::Linear(problem), Site::Gate(gate)) = (&linear.site, &gate.site) else {
        return None;
    };
    let serves =
        linear.is_private && problem.epilogue.activation.is_none() && problem.n == 2 * gate.width;
    serves.then(|| problem.clone().with_gate(gate.activation))
}
