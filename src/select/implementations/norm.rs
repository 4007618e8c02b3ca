//! LayerNorm, with or without a preceding sum, or RMSNorm, in a separate launch.

use super::{Candidate, Implementation, Launch, Operand, operands};
use crate::{
    kernels::KernelSpec,
    machine::Machine,
    select::site::{Link, Site},
};

pub(super) fn implement(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let (n_operands, kernels): (usize, Vec<KernelSpec>) = match &chain.first()?.site {
        Site::LayerNorm(norm) => {
            let kernels = norm.by_rows(machine).into_iter();
            (3, kernels.map(|(_, kernel)| kernel.into()).collect())
        }
        Site::SumLayerNorm(norm) => {
            let kernels = norm.by_rows(machine).into_iter();
            let n_operands = 4 + usize::from(norm.bias);
            (
                n_operands,
                kernels.map(|(_, kernel)| kernel.into()).collect(),
            )
        }
        Site::RmsNorm(norm) => (2, vec![norm.clone().into()]),
        Site::Linear { .. } | Site::Gate(_) | Site::Prepare { .. } => return None,
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
        operands: operands(0, 0..n_operands)
            .chain([Operand::Value(0)])
            .collect(),
        candidates,
    };
    Some(Implementation {
        name: "norm",
        sites: 1,
        launches: vec![launch],
        saved: 0.0,
    })
}
