//! Rules that compute several nodes of the graph in one launch, one file per rule. They apply before `select` forms chains. The rules for
//! chains are in `select/implementations`.

mod append_in_step;
mod append_pair;
mod attention_to_e4m3;
mod prepare_attention;

pub(super) use append_in_step::{APPEND_IN_STEP, Appending, append_in_step};
pub(super) use attention_to_e4m3::{ATTENTION_TO_E4M3, Converting, attention_to_e4m3};

use crate::{
    graph::{Graph, NodeId, Op},
    kernels::{KernelSpec, cache::SCALES},
    ops::AttentionProblem,
    program::{Cache, Program, fusions::RuleName},
    select::{Unfit, require},
};

/// Returns the launch that prepares operands of an attention node, or the reason why there is none.
type Find = fn(&Graph, &Program, NodeId, &AttentionProblem) -> Result<Preparation, Unfit>;

/// The rules for launches that prepare the operands of an attention node. At most one of them applies to a node.
pub(super) const BEFORE_ATTENTION: [(RuleName, Find); 2] = [
    (append_pair::NAME, append_pair::find),
    (prepare_attention::NAME, prepare_attention::find),
];

fn quoted(graph: &Graph, id: NodeId) -> String {
    format!("`{}`", graph.node(id).name)
}

/// One launch that prepares operands of attention.
#[derive(Clone)]
pub(super) struct Preparation {
    pub kernel: KernelSpec,
    /// The nodes that the launch computes.
    pub nodes: Vec<NodeId>,
    /// Operands that are nodes of the graph, by parameter name. The first is `x`.
    pub reads: Vec<(&'static str, NodeId)>,
    pub writes: Writes,
    /// Whether only this launch reads the columns of `x` that it prepares.
    pub is_alone: bool,
    /// The attention node, if it is the only reader of the caches and the launch appends the rows unchanged; otherwise `None`.
    pub attention: Option<NodeId>,
}

/// Results of a launch.
#[derive(Clone, Copy)]
pub(super) enum Writes {
    /// Rows of queries and of keys.
    Rows([NodeId; 2]),
    /// Rows of queries, if any, and keys and values in two caches.
    Cache {
        queries: Option<NodeId>,
        keys: NodeId,
        values: NodeId,
    },
}

impl Preparation {
    /// Returns the node that a parameter reads.
    pub fn read(&self, param: &str) -> Option<NodeId> {
        let mut reads = self.reads.iter();
        reads
            .find(|(name, _)| *name == param)
            .map(|&(_, node)| node)
    }

    /// Returns the nodes of the queries and of the keys; `None` if the launch has no queries.
    pub fn values(&self) -> Option<[NodeId; 2]> {
        match self.writes {
            Writes::Rows(rows) => Some(rows),
            Writes::Cache { queries, keys, .. } => Some([queries?, keys]),
        }
    }
}

/// Returns two columns: the first column of the keys in the operand of the first cache node, and the first column of the values in the
/// operand of the second. One launch writes keys and values as the heads of a single cache, so the two caches must be adjacent.
fn cached(
    graph: &Graph,
    program: &Program,
    caches: [NodeId; 2],
    of: &AttentionProblem,
) -> Result<[u32; 2], Unfit> {
    let column = |cache: NodeId| {
        let Op::Cache {
            name,
            from,
            heads,
            head,
            ..
        } = graph.op(cache)
        else {
            return Err(Unfit::Sites);
        };
        let called = quoted(graph, cache);
        let fits = (*heads, *head) == (of.kv_heads, of.head);
        require(fits, format!("{called} has other heads than the attention"))?;
        let readers = graph.consumers(cache);
        let is_attention = |&reader: &NodeId| matches!(graph.op(reader), Op::Attention(_));
        let is_ours = !graph.is_output(cache) && readers.iter().all(is_attention);
        require(
            is_ours,
            format!("{called} is an output, or is read by an operator other than attention"),
        )?;
        let is_own = |c: &Cache| c.name == *name;
        let index = program.caches.iter().position(is_own);
        Ok((index.ok_or(Unfit::Sites)?, *from))
    };
    let [(key_cache, key_from), (value_cache, value_from)] =
        [column(caches[0])?, column(caches[1])?];
    require(
        value_cache == key_cache + 1,
        "the caches of keys and values are not adjacent",
    )?;
    Ok([key_from, value_from])
}

/// Returns the nodes of the scales of two caches, each with the name of the kernel parameter that reads it. Caches without a scale are
/// omitted.
fn scales(graph: &Graph, caches: [NodeId; 2]) -> impl Iterator<Item = (&'static str, NodeId)> {
    let caches = SCALES.into_iter().zip(caches);
    caches.filter_map(|(name, cache)| Some((name, graph.operand(cache, "scale")?)))
}
