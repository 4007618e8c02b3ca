//! Conversion of the operands of fp8 products to E4M3, either in a separate launch or in the preceding kernel.

use super::{
    Bindings, Candidate, IS_READ, Implementation, Operand, Unfit, gate::gated, gemm::any_gpu, norm,
    require,
};
use crate::{
    kernels::{
        e4m3::{GateToE4m3, NormToE4m3, ToE4m3},
        gemm::{GemmProblem, GemmStream, GemmWgmma},
    },
    machine::Machine,
    select::site::{Link, Site},
};

/// Converts a value in a separate launch.
pub(super) fn conversion(chain: &[Link], _: &Machine) -> Result<Implementation, Unfit> {
    let conversion = converted(chain, 0)?;
    let candidates = vec![Candidate::new(conversion.clone())];
    let bindings = Bindings::to_operands_of(&[0]).with("out", Operand::Value(0));
    Implementation::one_launch(1, bindings, candidates)
}

/// Converts the result of a norm in the norm's kernel.
pub(super) fn after_norm(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    converted(chain, 1)?;
    let norms = norm::kernels(&chain[0].site, machine).ok_or(Unfit::Sites)?;
    let keeps = !chain[0].is_private;
    let candidates = norms.into_iter();
    let candidates = candidates.map(|norm| Candidate::new(NormToE4m3 { norm, keeps }));
    let mut bindings = Bindings::to_operands_of(&[0, 1]);
    if keeps {
        bindings = bindings.with("out", Operand::Value(0));
    }
    let bindings = bindings.with("converted", Operand::Value(1));
    Implementation::one_launch(2, bindings, candidates.collect())
}

/// Converts the result of a linear layer to E4M3 in the GEMM's epilogue.
pub(super) fn after_gemm(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    converted(chain, 1)?;
    let Site::Linear(problem) = &chain[0].site else {
        return Err(Unfit::Sites);
    };
    require(chain[0].is_private, IS_READ)?;
    let bindings = Bindings::to_operands_of(&[0, 1]).with("out", Operand::Value(1));
    Implementation::one_launch(2, bindings, converting(problem, machine)?)
}

/// Converts the result of a gate to E4M3 in the gate's kernel.
pub(super) fn with_gate(chain: &[Link], _: &Machine) -> Result<Implementation, Unfit> {
    converted(chain, 1)?;
    let Site::Gate(gate) = &chain[0].site else {
        return Err(Unfit::Sites);
    };
    require(chain[0].is_private, IS_READ)?;
    let candidates = vec![Candidate::new(GateToE4m3 { gate: gate.clone() })];
    let bindings = Bindings::to_operands_of(&[0, 1]).with("out", Operand::Value(1));
    Implementation::one_launch(2, bindings, candidates)
}

/// Computes a gate and converts its result to E4M3, all in the epilogue of the linear layer's GEMM.
pub(super) fn after_gate(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    converted(chain, 2)?;
    let problem = gated(chain)?;
    require(chain[1].is_private, IS_READ)?;
    let bindings = Bindings::to_operands_of(&[0, 2]).with("out", Operand::Value(2));
    Implementation::one_launch(3, bindings, converting(&problem, machine)?)
}

/// Returns the conversion at a site of a chain.
fn converted(chain: &[Link], at: usize) -> Result<&ToE4m3, Unfit> {
    match chain.get(at).map(|link| &link.site) {
        Some(Site::ToE4m3(conversion)) => Ok(conversion),
        _ => Err(Unfit::Sites),
    }
}

/// Returns the kernels that compute a problem and convert its result to E4M3.
fn converting(problem: &GemmProblem, machine: &Machine) -> Result<Vec<Candidate>, Unfit> {
    require(problem.is_fp8(), "the linear layer is not in E4M3")?;
    let problem = GemmProblem {
        to_e4m3: true,
        ..problem.clone()
    };
    let any = any_gpu(&problem, machine).into_iter().map(Candidate::new);
    let persistent = GemmWgmma::kernels(&problem, machine.instructions).into_iter();
    let streaming = GemmStream::of(problem)
        .tiles(machine.instructions)
        .into_iter();
    let persistent = persistent.map(Candidate::new);
    let streaming = streaming.map(Candidate::new);
    Ok(any.chain(persistent).chain(streaming).collect())
}
