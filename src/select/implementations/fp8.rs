//! The conversion of operands of E4M3 products, either in a separate launch or in the preceding kernel.

use super::{Bindings, Candidate, Implementation, Launch, Operand, gate::gated, norm};
use crate::{
    kernels::{
        e4m3::NormToE4m3,
        gemm::{GemmProblem, GemmStream, GemmWgmma},
    },
    machine::Machine,
    select::site::{Link, Site},
};

/// Converts a value in a separate launch.
pub(super) fn conversion(chain: &[Link], _: &Machine) -> Option<Implementation> {
    let Site::ToE4m3(conversion) = &chain.first()?.site else {
        return None;
    };
    let candidates = vec![Candidate::new(conversion.clone())];
    let bindings = Bindings::to_operands_of(&[0]).with("out", Operand::Value(0));
    implementation("conversion to E4M3", 1, bindings, candidates)
}

/// Converts the result of a norm in the norm's kernel.
pub(super) fn after_norm(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let [before, conversion, ..] = chain else {
        return None;
    };
    let Site::ToE4m3(_) = &conversion.site else {
        return None;
    };
    let norms = norm::kernels(&before.site, machine)?.into_iter();
    let keeps = !before.is_private;
    let candidates = norms.map(|norm| Candidate::new(NormToE4m3 { norm, keeps }));
    let candidates = candidates.collect();
    let mut bindings = Bindings::to_operands_of(&[0, 1]);
    if keeps {
        bindings = bindings.with("out", Operand::Value(0));
    }
    let bindings = bindings.with("converted", Operand::Value(1));
    implementation("norm+conversion to E4M3", 2, bindings, candidates)
}

/// Converts the result of a linear layer in the GEMM's epilogue.
pub(super) fn after_gemm(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let [linear, conversion, ..] = chain else {
        return None;
    };
    let Site::Linear(problem) = &linear.site else {
        return None;
    };
    if !(linear.is_private && matches!(conversion.site, Site::ToE4m3(_))) {
        return None;
    }
    let bindings = Bindings::to_operands_of(&[0, 1]).with("out", Operand::Value(1));
    let candidates = converting(problem, machine);
    implementation("gemm+conversion to E4M3", 2, bindings, candidates)
}

/// Computes a gate in the GEMM's epilogue, and converts the result.
pub(super) fn after_gate(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let problem = gated(chain)?;
    let (gate, conversion) = (&chain[1], chain.get(2)?);
    if !(gate.is_private && matches!(conversion.site, Site::ToE4m3(_))) {
        return None;
    }
    let bindings = Bindings::to_operands_of(&[0, 2]).with("out", Operand::Value(2));
    let candidates = converting(&problem, machine);
    implementation("gemm+gate+conversion to E4M3", 3, bindings, candidates)
}

/// Returns the kernels that compute a problem and convert its result.
fn converting(problem: &GemmProblem, machine: &Machine) -> Vec<Candidate> {
    if !problem.is_fp8() {
        return Vec::new();
    }
    let problem = GemmProblem {
        to_e4m3: true,
        ..problem.clone()
    };
    let persistent = GemmWgmma::kernels(&problem, machine.instructions).into_iter();
    let streaming = GemmStream::of(problem)
        .tiles(machine.instructions)
        .into_iter();
    persistent
        .map(Candidate::new)
        .chain(streaming.map(Candidate::new))
        .collect()
}

/// Returns an implementation that covers the first `sites` sites with a single launch at the last of them.
fn implementation(
    name: &'static str,
    sites: usize,
    bindings: Bindings,
    candidates: Vec<Candidate>,
) -> Option<Implementation> {
    (!candidates.is_empty()).then(|| Implementation {
        name,
        sites,
        launches: vec![Launch {
            site: sites - 1,
            bindings,
            candidates,
        }],
        saved: 0.0,
    })
}
