//! Rule: one launch appends keys and values to their caches if they are columns of the same rows.

use super::{Preparation, Writes, cached, prepare_attention::Heads, scales};
use crate::{
    graph::{Graph, NodeId, Op},
    kernels::cache::AppendCache,
    ops::{AttentionProblem, HeadView},
    program::{Program, fusions::RuleName, lower::width},
    select::{Unfit, require},
};

pub(super) const NAME: RuleName = ("append keys and values", "cache ← keys, values");

pub(super) fn find(
    graph: &Graph,
    program: &Program,
    attention: NodeId,
    of: &AttentionProblem,
) -> Result<Preparation, Unfit> {
    let operands = graph.operands(attention);
    let &[_, keys, values] = operands.first_chunk().ok_or(Unfit::Sites)?;
    if !matches!(graph.op(keys), Op::Cache { .. }) {
        return Err(Unfit::Sites);
    }
    let rows = graph.operands(keys)[0];
    let key = Heads::of(graph, rows, of.kv_heads, of.head).map_err(|_| Unfit::Sites)?;
    if !key.nodes.is_empty() {
        return Err(Unfit::Sites);
    }
    let [key_from, value_from] = cached(graph, program, [keys, values], of)?;
    let are_together = rows == graph.operands(values)[0];
    require(
        are_together,
        "keys and values are not columns of the same rows",
    )?;
    let are_adjacent = value_from == key_from + of.kv_heads * of.head;
    require(
        are_adjacent,
        "the columns of keys and values are not adjacent",
    )?;
    let stride = width(graph.shape(rows)).map_err(Unfit::Because)?;
    let kernel = AppendCache {
        heads: 2 * of.kv_heads,
        head: of.head,
        x: HeadView::TokenMajor {
            offset: key_from,
            stride,
        },
        of_sequence: false,
        pool: program.pool(),
        dtype: program.dtype,
    };
    let mut caches = [keys, values].into_iter();
    let is_only = caches.all(|cache| graph.consumers(cache).iter().eq([&attention]));
    let reads = [("x", rows)].into_iter();
    Ok(Preparation {
        kernel: kernel.into(),
        nodes: vec![keys, values],
        reads: reads.chain(scales(graph, [keys, values])).collect(),
        writes: Writes::Cache {
            queries: None,
            keys,
            values,
        },
        is_alone: false,
        attention: is_only.then_some(attention),
    })
}
