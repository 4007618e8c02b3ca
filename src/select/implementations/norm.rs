//! LayerNorm, with or without a preceding sum, or RMSNorm, in a separate launch.

use super::{Bindings, Candidate, Implementation, Operand, Unfit};
use crate::{
    kernels::e4m3::Norm,
    machine::Machine,
    select::site::{Link, Site},
};

pub(super) fn implement(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    let norms = chain.first().and_then(|link| kernels(&link.site, machine));
    let norms = norms.ok_or(Unfit::Sites)?.into_iter();
    let bindings = Bindings::to_operands_of(&[0]).with("out", Operand::Value(0));
    let candidates = norms.map(|norm| Candidate::new(norm.spec()));
    Implementation::one_launch(1, bindings, candidates.collect())
}

/// Returns the distinct kernels of a norm for all numbers of rows; `None` if the site is not a norm.
pub(super) fn kernels(site: &Site, machine: &Machine) -> Option<Vec<Norm>> {
    let all: Vec<Norm> = match site {
        Site::LayerNorm(norm) => {
            let kernels = norm.by_rows(machine).into_iter();
            kernels.map(|(_, kernel)| Norm::Layer(kernel)).collect()
        }
        Site::SumLayerNorm(norm) => {
            let kernels = norm.by_rows(machine).into_iter();
            kernels.map(|(_, kernel)| Norm::Sum(kernel)).collect()
        }
        Site::RmsNorm(norm) => vec![Norm::Rms(norm.clone())],
        Site::Linear(_)
        | Site::ToE4m3(_)
        | Site::Gate(_)
        | Site::NormSum { .. }
        | Site::Prepare { .. } => return None,
    };
    // A kernel may be used for several ranges of rows.
    let mut distinct: Vec<Norm> = Vec::new();
    for kernel in all {
        if !distinct.contains(&kernel) {
            distinct.push(kernel);
        }
    }
    Some(distinct)
}
