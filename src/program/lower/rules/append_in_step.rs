//! Rule: the attention kernel of a decode step also appends the keys and values of each sequence's new token to the cache.

use super::Preparation;
use crate::{
    kernels::{KernelSpec, attention::MhaCached},
    machine::Machine,
    program::{TensorIndex, fusions::RuleName},
    select::{CachedAttention, Dispatch, Unfit, require},
};

pub(in crate::program::lower) const APPEND_IN_STEP: RuleName = (
    "append in the decode step",
    "cache ← keys, values, softmax(q · kᵀ) · v",
);

/// Kernels of an attention whose decode kernel also appends each sequence's new token to the cache. `steps` are the decode kernels, for
/// batches with one token per sequence. `pieces` are the attention kernels for batches in which a sequence has several tokens. For these
/// batches, a separate launch appends the rows.
pub(in crate::program::lower) struct Appending {
    pub steps: Dispatch<KernelSpec>,
    pub pieces: Dispatch<KernelSpec>,
    /// Operands that the decode kernels have in addition to those of attention: the operands of the append launch, including the cache. The
    /// scales are left out, because attention has them already.
    pub operands: Vec<TensorIndex>,
}

/// Returns the kernels of an attention that appends the rows of `launch` itself. The `operands` of the result are empty, and the caller
/// sets them. The parameter `plain` is the attention kernel that appends nothing. It is `None` if attention to the cache is not supported.
pub(in crate::program::lower) fn append_in_step(
    launch: &Preparation,
    plain: Option<MhaCached>,
    invariant: bool,
    machine: &Machine,
) -> Result<Appending, Unfit> {
    let KernelSpec::AppendCache(append) = &launch.kernel else {
        return Err(Unfit::Sites);
    };
    let is_only = launch.attention.is_some();
    require(is_only, "several attentions read the cache")?;
    require(
        !invariant,
        "an invariant program has one launch for each operator",
    )?;
    // If attention to the cache is not supported, the error is reported when the attention node is lowered.
    let both = plain.map(CachedAttention).ok_or(Unfit::Sites)?;
    let dispatches = both.appending(machine, append.x);
    let problem = "no decode kernel for this card supports the sizes and types";
    let [steps, pieces] = dispatches.ok_or_else(|| Unfit::Because(problem.to_owned()))?;
    Ok(Appending {
        steps,
        pieces,
        operands: Vec::new(),
    })
}
