//! Rule: an attention kernel also converts its result to E4M3.

use super::quoted;
use crate::{
    graph::{Graph, NodeId, Op},
    kernels::{KernelSpec, attention::MhaOnline},
    program::{AttentionChoice, fusions::RuleName, lower::LowerOptions},
    select::{Attention, Dispatch, Unfit, require},
};

pub(in crate::program::lower) const ATTENTION_TO_E4M3: RuleName = (
    "attention+conversion to E4M3",
    "e4m3(softmax(q · kᵀ) · v / scale)",
);

/// An attention that converts its result to E4M3.
#[derive(Clone)]
pub(in crate::program::lower) struct Converting {
    /// The attention node. Its 16-bit result is not stored.
    pub attention: NodeId,
    pub dispatch: Dispatch<KernelSpec>,
}

/// Returns the attention whose result is converted by `conversion`.
pub(in crate::program::lower) fn attention_to_e4m3(
    graph: &Graph,
    options: &LowerOptions,
    conversion: NodeId,
) -> Result<Converting, Unfit> {
    let id = graph.operand(conversion, "x").ok_or(Unfit::Sites)?;
    let &Op::Attention(of) = graph.op(id) else {
        return Err(Unfit::Sites);
    };
    let reads_cache = graph
        .operands(id)
        .into_iter()
        .any(|operand| matches!(graph.op(operand), Op::Cache { .. } | Op::CrossCache { .. }));
    require(!reads_cache, "the attention reads a cache")?;
    let may_choose = match options.attention {
        AttentionChoice::Auto | AttentionChoice::Wgmma => true,
        AttentionChoice::Short | AttentionChoice::Online | AttentionChoice::Grouped => false,
    };
    require(may_choose, "another attention kernel was requested")?;
    let is_only = graph.sole_consumer(id) == Some(conversion);
    require(is_only, format!("{} has other readers", quoted(graph, id)))?;
    let dtype = options.dtype;
    let attention = Attention(MhaOnline { of, dtype });
    let dispatch = attention.to_e4m3(options.machine, options.invariant);
    let problem = "no kernel for this card supports the sizes and types";
    Ok(Converting {
        attention: id,
        dispatch: dispatch.ok_or_else(|| Unfit::Because(problem.to_owned()))?,
    })
}
