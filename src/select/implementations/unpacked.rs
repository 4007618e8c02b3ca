//! Linear layers with a packed weight, for many rows. A launch converts the whole weight to the type of the activations, and a kernel for
//! plain weights reads the result. The conversion takes the same time for any number of rows.

use super::{ALL, Bindings, Candidate, Implementation, Launch, Operand, ScratchRows};
use crate::{
    kernels::gemm::UnpackWeight,
    machine::Machine,
    select::site::{Link, Site},
};

/// Name of the rule.
pub(super) const NAME: &str = "unpacked weight";
pub(super) const EQUATION: &str =
    "weight = unpack(packed weight), and the launch of a rule for plain weights";

/// Returns the implementations for plain weights, each with a launch before it that converts the weight.
pub(super) fn all(chain: &[Link], machine: &Machine) -> Vec<(&'static str, Implementation)> {
    let plain: Vec<Link> = chain
        .iter()
        .map(|link| match conversion(link) {
            Some((_, site)) => Link {
                site,
                ..link.clone()
            },
            None => link.clone(),
        })
        .collect();
    if plain == chain {
        return Vec::new();
    }
    let all = ALL
        .iter()
        .filter_map(|rule| (rule.implement)(&plain, machine).ok());
    all.filter_map(|implementation| Some((NAME, after_conversion(chain, implementation)?)))
        .collect()
}

/// Returns the conversion of a linear layer's packed weight, and the linear layer with the converted weight.
fn conversion(link: &Link) -> Option<(UnpackWeight, Site)> {
    let Site::Linear(problem) = &link.site else {
        return None;
    };
    let (conversion, plain) = UnpackWeight::of(problem)?;
    Some((conversion, Site::Linear(plain)))
}

/// Adds to `implementation` a launch that converts the packed weight of a linear layer of `chain`. The other launch then reads the
/// converted weight. Returns `None` if `implementation` has several launches, reads no packed weight, or has only kernels with a max number
/// of rows.
fn after_conversion(chain: &[Link], implementation: Implementation) -> Option<Implementation> {
    // Implementations with several launches are only for few rows. They are left out, because for few rows the conversion alone takes
    // longer than a GEMM.
    let [mut launch] = <[Launch; 1]>::try_from(implementation.launches).ok()?;
    launch
        .candidates
        .retain(|candidate| candidate.max_rows.is_none());
    let mut sites = launch.bindings.operands_of.iter().copied();
    let (site, (kernel, _)) = sites.find_map(|site| Some((site, conversion(&chain[site])?)))?;
    let unpacked = Operand::Scratch {
        site,
        name: "unpacked",
        element: kernel.dtype.into(),
        columns: kernel.k.into(),
        rows: ScratchRows::Fixed(kernel.n.into()),
    };
    let convert = Launch {
        site: launch.site,
        bindings: Bindings::to_operands_of(&[site]).with("unpacked", unpacked),
        candidates: vec![Candidate::new(kernel)],
    };
    launch.bindings = launch.bindings.with("weight", unpacked);
    (!launch.candidates.is_empty()).then(|| Implementation {
        launches: vec![convert, launch],
        ..implementation
    })
}
