//! LayerNorm, with or without a preceding sum, or RMSNorm, in a separate launch.

use super::{Bindings, Candidate, Implementation, Launch, Operand};
use crate::{
    kernels::KernelSpec,
    machine::Machine,
    select::site::{Link, Site},
};

pub(super) fn implement(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let kernels: Vec<KernelSpec> = match &chain.first()?.site {
        Site::LayerNorm(norm) => {
            let kernels = norm.by_rows(machine).into_iter();
            kernels.map(|(_, kernel)| kernel.into()).collect()
        }
        Site::SumLayerNorm(norm) => {
            let kernels = norm.by_rows(machine).into_iter();
            kernels.map(|(_, kernel)| kernel.into()).collect()
        }
        Site::RmsNorm(norm) => vec![norm.clone().into()],
        Site::Linear { .. }
        | Site::ScaledLinear { .. }
        | Site::ToE4m3(_)
        | Site::Gate(_)
        | Site::Prepare { .. } => return None,
    };
    // A kernel may serve several ranges of rows.
    let mut candidates: Vec<Candidate> = Vec::new();
    for candidate in kernels.into_iter().map(Candidate::new) {
        if !candidates.contains(&candidate) {
            candidates.push(candidate);
        }
    }
    let launch = Launch {
        site: 0,
        bindings: Bindings::to_operands_of(&[0]).with("out", Operand::Value(0)),
        candidates,
    };
    Some(Implementation {
        name: "norm",
        sites: 1,
        launches: vec![launch],
        saved: 0.0,
    })
}
