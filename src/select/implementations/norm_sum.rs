//! The sum of a norm and the residual stream, alone or in one launch with the norm before it and the norm after it.

use super::{Bindings, Candidate, IS_READ, Implementation, Operand, Unfit, require};
use crate::{
    kernels::rms_norm_sum::RmsNormSum,
    machine::Machine,
    select::site::{Link, Site},
};

pub(super) fn alone(chain: &[Link], _: &Machine) -> Result<Implementation, Unfit> {
    let Some(Site::NormSum { kernel, .. }) = chain.first().map(|link| &link.site) else {
        return Err(Unfit::Sites);
    };
    let bindings = Bindings::to_operands_of(&[0]).with("out", Operand::Value(0));
    Implementation::one_launch(1, bindings, vec![Candidate::new(kernel.clone())])
}

/// Implements `s = RMSNorm(x) + residual` and `RMSNorm(s)`. The first norm is not stored.
pub(super) fn with_norms(chain: &[Link], _: &Machine) -> Result<Implementation, Unfit> {
    let [branch, sum, next, ..] = chain else {
        return Err(Unfit::Sites);
    };
    let (Site::RmsNorm(norm), &Site::NormSum { residual, .. }, Site::RmsNorm(next)) =
        (&branch.site, &sum.site, &next.site)
    else {
        return Err(Unfit::Sites);
    };
    require(branch.is_private, IS_READ)?;
    require(norm == next, "the two norms differ in `eps`")?;
    let kernel = RmsNormSum {
        width: norm.width,
        eps: norm.eps,
        dtype: norm.dtype,
    };
    let input = |site, name| Operand::Input { site, name };
    let bindings = Bindings::to_operands_of(&[0])
        .with("residual", input(1, residual))
        .with("next_gamma", input(2, "gamma"))
        .with("sum", Operand::Value(1))
        .with("out", Operand::Value(2));
    Implementation::one_launch(3, bindings, vec![Candidate::new(kernel)])
}
