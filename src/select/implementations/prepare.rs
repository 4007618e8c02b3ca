//! Preparation of attention's operands in a separate launch, or in the epilogue of the preceding GEMM if the preparation consists only of
//! rotary embeddings.

use super::{Bindings, Candidate, Implementation, Operand, Unfit, require};
use crate::{
    kernels::gemm::{GemmPrepareAttention, GemmProblem, WgmmaTile},
    machine::Machine,
    ops::Epilogue,
    select::site::{Link, Site},
};

pub(super) fn alone(chain: &[Link], _: &Machine) -> Result<Implementation, Unfit> {
    let Some(Site::Prepare { kernel, .. }) = chain.first().map(|link| &link.site) else {
        return Err(Unfit::Sites);
    };
    let bindings = Bindings::to_operands_of(&[0])
        .with("queries", Operand::Value(0))
        .with(kernel.keys_param(), Operand::Second(0));
    Implementation::one_launch(1, bindings, vec![Candidate::new(kernel.clone())])
}

/// Prepares operands in the GEMM's epilogue. The launch has the position of the second site in the program, where all operands are
/// available.
pub(super) fn after_gemm(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    let [linear, prepare, ..] = chain else {
        return Err(Unfit::Sites);
    };
    let (Site::Linear(problem), Site::Prepare { kernel, is_alone }) = (&linear.site, &prepare.site)
    else {
        return Err(Unfit::Sites);
    };
    let &GemmProblem {
        n,
        k,
        dtype,
        epilogue,
        ..
    } = problem;
    let fp8 = problem.is_fp8();
    require(problem.is_plain() || fp8, "the weight is packed")?;
    require(
        *is_alone,
        "another operator reads columns that it would not store",
    )?;
    let is_plain = epilogue == Epilogue::new(epilogue.bias, None);
    let fits = is_plain && (kernel.row, kernel.dtype) == (n, dtype);
    require(
        fits,
        "the linear layer has an epilogue that its kernels lack",
    )?;
    let kernel_of = GemmPrepareAttention {
        k,
        bias: epilogue.bias,
        fp8,
        prepare: kernel.clone(),
        tile: WgmmaTile::CANDIDATES[0],
    };
    let tiles = kernel_of.tiles(machine.instructions).into_iter();
    let bindings = Bindings::to_operands_of(&[0, 1])
        .with("out", Operand::Value(0))
        .with("queries", Operand::Value(1))
        .with(kernel.keys_param(), Operand::Second(1));
    Implementation::one_launch(2, bindings, tiles.map(Candidate::new).collect())
}
