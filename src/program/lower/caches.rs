//! Lowering of cache nodes to tensors and to the launches that append rows.

use super::{LowerError, Lowering, unsupported, width};
use crate::{
    graph::{Graph, MAX_HEAD, NodeId, Op},
    kernels::{
        KernelSpec,
        cache::{AppendCache, SCALES},
    },
    ops::HeadView,
    program::{Cache, Storage, TensorIndex},
    select::Dispatch,
    tensor::{DType, Shape, Symbol},
};

impl Lowering<'_> {
    /// Lowers the launch that appends rows to a cache, and returns the tensor of the cache, from which attention reads the rows.
    pub(super) fn cache(&mut self, id: NodeId) -> Result<TensorIndex, LowerError> {
        let node = self.graph.node(id);
        let &Op::Cache {
            from, heads, head, ..
        } = &node.op
        else {
            return Err(unsupported(
                self.graph,
                id,
                &node.op,
                "is not a cache".to_owned(),
            ));
        };
        self.only_attended(id)?;
        let part = node.part;
        let is_other =
            |c: &Cache| c.part == part && c.one_position != is_one_position(self.graph, id);
        if let Some(other) = self.program.caches.iter().find(|c| is_other(c)) {
            let problem = format!(
                "all caches of a part must keep one row per token or one row per sequence, but `{}` of this part differs",
                other.name
            );
            return Err(unsupported(self.graph, id, &node.op, problem));
        }
        let wrong = |problem: String| unsupported(self.graph, id, &node.op, problem);
        if self.graph.is_output(id) {
            return Err(wrong(
                "it is an output; request its input instead".to_owned(),
            ));
        }
        let x = self.graph.operands(id)[0];
        let stride = width(self.graph.shape(x)).map_err(wrong)?;
        let kernel = AppendCache {
            heads,
            head,
            x: HeadView::TokenMajor {
                offset: from,
                stride,
            },
            of_sequence: is_one_position(self.graph, id),
            pool: self.program.pool(),
            dtype: self.dtype,
        };
        let cache = self.cache_tensor(id);
        let dispatch = Dispatch::always(KernelSpec::from(kernel));
        let mut operands = self.bind(&dispatch, |lowering, name| match SCALES.contains(&name) {
            true => lowering.cache_scale(id),
            false => lowering.operand(id, name),
        });
        operands.push(cache);
        self.step(id, dispatch, operands);
        Ok(cache)
    }

    /// Returns the tensor with the scale of a cache; `None` if the cache has no scale. `cache` is the node that appends to the cache, or a
    /// node that reads a cache of another part.
    pub(super) fn cache_scale(&self, cache: NodeId) -> Option<TensorIndex> {
        let added = match self.graph.op(cache) {
            Op::CrossCache { name, .. } => self.adder(name)?,
            _ => cache,
        };
        let scale = self.graph.operand(added, "scale")?;
        self.tensor_of.get(&scale).copied()
    }

    /// Returns the node that appends to the cache named `cache`; `None` if no node lowered so far does.
    fn adder(&self, cache: &str) -> Option<NodeId> {
        let mut added = self.tensor_of.keys();
        let is_own = |&&node: &&NodeId| matches!(self.graph.op(node), Op::Cache { name, .. } if name == cache);
        added.find(is_own).copied()
    }

    pub(super) fn cache_tensor(&mut self, id: NodeId) -> TensorIndex {
        let node = self.graph.node(id);
        let is_own = |c: &Cache| matches!(&node.op, Op::Cache { name, .. } if *name == c.name);
        let index = self.program.caches.iter().position(is_own);
        let index = index.expect("all caches of the graph were listed") as u32;
        let pool = self.program.pool();
        let shape = Shape::new([Symbol::Blocks.into(), pool.stride.into()]);
        self.tensor(&node.name, pool.format, shape, Storage::Cached(index))
    }

    /// Checks that only attention reads a cache, with heads of a supported size.
    fn only_attended(&self, id: NodeId) -> Result<(), LowerError> {
        let mut consumers = self.graph.consumers(id).into_iter();
        let other = consumers.find(|&c| !matches!(self.graph.op(c), Op::Attention(_)));
        let Some(other) = other.map(|other| self.graph.node(other)) else {
            return Ok(());
        };
        if let Op::Cache { head, .. } | Op::CrossCache { head, .. } = *self.graph.op(id)
            && head > MAX_HEAD
        {
            let problem = format!(
                "its heads have {head} elements, and a KV cache takes heads of at most {MAX_HEAD}"
            );
            return Err(unsupported(self.graph, id, self.graph.op(id), problem));
        }
        let problem = format!(
            "it is read by `{}` ({}), but only fused attention can read a cache; `gemmule explain` shows why this was not fused",
            other.name, other.op
        );
        Err(unsupported(self.graph, id, self.graph.op(id), problem))
    }

    /// Returns the tensor of the cache `name`, to which an earlier part of the model, such as the encoder, appends.
    pub(super) fn remembered(&self, id: NodeId, name: &str) -> Result<TensorIndex, LowerError> {
        self.only_attended(id)?;
        let found = self.adder(name);
        found.map(|node| self.tensor_of[&node]).ok_or_else(|| {
            let problem = format!("no earlier part of the model appends to the cache `{name}`");
            unsupported(self.graph, id, self.graph.op(id), problem)
        })
    }
}

/// Returns the caches that the nodes of a graph append to, in order. `dtype` is the type of the activations.
pub(super) fn caches(graph: &Graph, dtype: DType) -> Vec<Cache> {
    let nodes = graph.topological().into_iter();
    let of = |id| match graph.op(id) {
        Op::Cache {
            name,
            heads,
            head,
            format,
            scaled,
            ..
        } => Some(Cache {
            name: name.clone(),
            heads: *heads,
            head: *head,
            part: graph.node(id).part,
            one_position: is_one_position(graph, id),
            format: format.unwrap_or(dtype.into()),
            scaled: *scaled,
        }),
        _ => None,
    };
    nodes.filter_map(of).collect()
}

/// Returns whether a cache has one row per sequence.
fn is_one_position(graph: &Graph, id: NodeId) -> bool {
    graph.shape(id).0.first() == Some(&Symbol::Batch.into())
}
