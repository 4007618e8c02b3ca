//! A model as a petgraph graph. A node is an operator together with its only result, and an edge is an operand. Shapes are symbolic. They
//! are inferred when a node is added, and [`Graph::verify`] infers them again after every pass.

mod heads;
mod infer;
mod iterations;
mod op;
mod print;
mod weight;
mod weight_names;

use std::{borrow::Cow, collections::BTreeMap};

use petgraph::{
    Direction,
    stable_graph::{NodeIndex, StableDiGraph},
    visit::{EdgeRef, NodeIndexable},
};

/// Name of the output for text generation: the logits of the token after each sequence.
pub const NEXT_LOGITS: &str = "next_token_logits";

/// Name of the output for late interaction (ColBERT): an L2-normalized vector for each token, `[tokens, width]`.
pub const TOKEN_VECTORS: &str = "colbert";

pub use infer::{HEAD_STEP, MAX_HEAD, MAX_PARTS, MAX_TABLES, MAX_WIDTH};
pub use iterations::{Iterated, alike};
pub use op::Op;
pub use weight::{
    Bound, BoundLinear, Buckets, CacheRows, Factor, Positions, Sinusoid, WeightExpr,
    interleaved_row, resized_heads_at, slope,
};
pub use weight_names::{Adapter, WeightNames, in_folder};

use serde::{Deserialize, Serialize};

use crate::tensor::Shape;

/// Index of a node of a [`Graph`].
pub type NodeId = NodeIndex<u32>;

/// An operator and its result.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Name of the result, unique in the graph. A weight has its name in the checkpoint.
    pub name: String,
    pub op: Op,
    /// Inferred shape of the result.
    pub shape: Shape,
    /// Index in [`Graph::parts`] of the part that computes the value; 0 for weights, which all parts share.
    pub part: u32,
}

#[derive(Debug, PartialEq, thiserror::Error)]
pub enum GraphError {
    #[error("`{node}` ({op}) takes {expected} operands, found {found}")]
    Arity {
        node: String,
        op: Cow<'static, str>,
        expected: usize,
        found: usize,
    },
    #[error("`{node}` ({op}): {problem}; operands are {operands}")]
    Shape {
        node: String,
        op: Cow<'static, str>,
        problem: String,
        operands: String,
    },
    #[error("two values have the name `{name}`; rename one of them")]
    DuplicateName { name: String },
    #[error("the value `{node}` depends on itself")]
    Cycle { node: String },
    #[error(
        "`{node}` has the stored shape {stored}, but the shape inferred from its operands is {inferred}"
    )]
    StaleShape {
        node: String,
        stored: Shape,
        inferred: Shape,
    },
    #[error("the output `{output}` is not a value of the graph")]
    DanglingOutput { output: String },
}

/// A model: a graph from inputs and weights to named outputs.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    inner: StableDiGraph<Node, u32>,
    outputs: Vec<(String, NodeId)>,
    /// Parts of the model that run separately, such as an encoder and a decoder; empty if the model is a single graph.
    parts: Vec<Part>,
}

/// A part of a model that runs separately, on its own batch. Parts exchange values only through caches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    pub name: String,
    /// Name of the token stream that the part processes, such as "source". Positions in the part's caches are positions in this stream.
    pub stream: String,
}

impl Graph {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an operator on `operands` and infers its shape.
    ///
    /// # Errors
    /// Returns an error if the operands do not suit the operator.
    pub fn add(
        &mut self,
        name: impl Into<String>,
        op: Op,
        operands: &[NodeId],
    ) -> Result<NodeId, GraphError> {
        let name = name.into();
        let shape = self.infer(&name, &op, operands)?;
        // A value belongs to the part of its operands. Weights belong to all parts and have part 0, so the maximum is the part of the
        // operands that are not weights.
        let parts = operands.iter().map(|&o| self.node(o).part);
        let part = parts.max().unwrap_or(0);
        let node = Node {
            name,
            op,
            shape,
            part,
        };
        let id = self.inner.add_node(node);
        for (slot, &operand) in operands.iter().enumerate() {
            self.inner.add_edge(operand, id, slot as u32);
        }
        Ok(id)
    }

    /// Sets the parts of a model with several parts.
    pub fn set_parts(&mut self, parts: Vec<Part>) {
        self.parts = parts;
    }

    /// Returns the parts in the order in which they run; empty for a model of one graph.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Assigns a value without operands to a part.
    pub fn set_part(&mut self, id: NodeId, part: u32) {
        self.inner[id].part = part;
    }

    /// Returns the values that must be computed, part by part: the outputs and, in a model with parts, the caches.
    fn roots(&self) -> Vec<NodeId> {
        let outputs = self.outputs.iter().map(|&(_, id)| id);
        if self.parts.is_empty() {
            return outputs.collect();
        }
        let caches = self.inner.node_indices();
        let caches = caches.filter(|&id| matches!(self.op(id), Op::Cache { .. }));
        let mut roots: Vec<NodeId> = outputs.chain(caches).collect();
        roots.sort_by_key(|&id| self.node(id).part);
        roots
    }

    /// Makes `id` an output of the model, called `name`.
    pub fn add_output(&mut self, name: impl Into<String>, id: NodeId) {
        self.outputs.push((name.into(), id));
    }

    pub fn outputs(&self) -> &[(String, NodeId)] {
        &self.outputs
    }

    pub fn node(&self, id: NodeId) -> &Node {
        &self.inner[id]
    }

    pub fn op(&self, id: NodeId) -> &Op {
        &self.inner[id].op
    }

    pub fn shape(&self, id: NodeId) -> &Shape {
        &self.inner[id].shape
    }

    /// Returns the operands in slot order.
    pub fn operands(&self, id: NodeId) -> Vec<NodeId> {
        let mut edges: Vec<(u32, NodeId)> = self
            .inner
            .edges_directed(id, Direction::Incoming)
            .map(|e| (*e.weight(), e.source()))
            .collect();
        edges.sort_unstable();
        edges.into_iter().map(|(_, source)| source).collect()
    }

    /// Returns the operand in the slot named `slot` (see [`Op::slots`]); `None` if the operator has no such operand.
    pub fn operand(&self, id: NodeId, slot: &str) -> Option<NodeId> {
        let place = self.op(id).slots().iter().position(|name| name == slot)?;
        self.operands(id).get(place).copied()
    }

    /// Returns the distinct nodes that read `id`, in index order.
    pub fn consumers(&self, id: NodeId) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = self
            .inner
            .neighbors_directed(id, Direction::Outgoing)
            .collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    pub fn is_output(&self, id: NodeId) -> bool {
        self.outputs.iter().any(|&(_, o)| o == id)
    }

    /// Returns the only reader of `id`; `None` if there are none or several, or if `id` is an
    /// output.
    pub fn sole_consumer(&self, id: NodeId) -> Option<NodeId> {
        match self.consumers(id).as_slice() {
            [one] if !self.is_output(id) => Some(*one),
            _ => None,
        }
    }

    /// Returns the nodes that the outputs need, in topological order and part by part. In a model with parts, caches and the nodes that
    /// they need are included. The order depends only on the outputs and on the operands' slots, not on how the graph was built.
    pub fn topological(&self) -> Vec<NodeId> {
        let mut order = Vec::with_capacity(self.inner.node_count());
        let mut seen = vec![false; self.inner.node_bound()];
        let mut stack: Vec<(NodeId, bool)> = Vec::new();
        for root in self.roots() {
            stack.push((root, false));
            while let Some((id, done)) = stack.pop() {
                if done {
                    order.push(id);
                } else if !std::mem::replace(&mut seen[id.index()], true) {
                    stack.push((id, true));
                    stack.extend(self.operands(id).into_iter().rev().map(|o| (o, false)));
                }
            }
        }
        order
    }

    /// Makes all readers and outputs of `old` use `new` instead.
    pub fn replace(&mut self, old: NodeId, new: NodeId) {
        let edges: Vec<_> = self
            .inner
            .edges_directed(old, Direction::Outgoing)
            .map(|e| (e.id(), e.target(), *e.weight()))
            .collect();
        for (edge, target, slot) in edges {
            // If `new` itself reads `old`, keep this edge.
            if target != new {
                self.inner.remove_edge(edge);
                self.inner.add_edge(new, target, slot);
            }
        }
        for (_, output) in &mut self.outputs {
            if *output == old {
                *output = new;
            }
        }
    }

    /// Replaces the operator and the operands of node `id`. The node keeps its name, its readers and its position among the outputs, and
    /// its shape is inferred again. Former operands that no node reads anymore are removed.
    ///
    /// # Errors
    /// Returns an error, and changes nothing, if the operands do not suit the operator.
    pub fn rewrite(&mut self, id: NodeId, op: Op, operands: &[NodeId]) -> Result<(), GraphError> {
        let shape = self.infer(&self.inner[id].name, &op, operands)?;
        let before = self.operands(id);
        let edges: Vec<_> = self
            .inner
            .edges_directed(id, Direction::Incoming)
            .map(|e| e.id())
            .collect();
        for edge in edges {
            self.inner.remove_edge(edge);
        }
        for (slot, &operand) in operands.iter().enumerate() {
            self.inner.add_edge(operand, id, slot as u32);
        }
        let node = &mut self.inner[id];
        node.op = op;
        node.shape = shape;
        self.remove_unread(before);
        Ok(())
    }

    /// Removes the unread nodes of `candidates`, and recursively their unread operands. Outputs and caches are kept.
    fn remove_unread(&mut self, mut candidates: Vec<NodeId>) {
        while let Some(id) = candidates.pop() {
            let is_kept = |id| self.is_output(id) || matches!(self.op(id), Op::Cache { .. });
            if self.contains(id) && self.consumers(id).is_empty() && !is_kept(id) {
                candidates.extend(self.operands(id));
                self.inner.remove_node(id);
            }
        }
    }

    /// Returns the graph without caches, for batches that contain whole sequences.
    pub fn without_caches(mut self) -> Self {
        for id in self.topological() {
            if let (Op::Cache { .. }, [x]) = (self.op(id), self.operands(id).as_slice()) {
                let x = *x;
                self.replace(id, x);
                self.inner.remove_node(id);
            }
        }
        self.prune();
        self
    }

    /// Returns a node that reads a cache of another part of the model, such as a decoder's node that reads a cache of the encoder; `None`
    /// if there is no such node.
    pub fn remembered(&self) -> Option<NodeId> {
        let mut nodes = self.topological().into_iter();
        nodes.find(|&id| matches!(self.op(id), Op::CrossCache { .. }))
    }

    /// Returns whether the graph has caches.
    pub fn has_caches(&self) -> bool {
        let mut nodes = self.topological().into_iter();
        nodes.any(|id| matches!(self.op(id), Op::Cache { .. }))
    }

    /// Returns whether `id` is in the graph. [`add`](Self::add) may reuse the id of a removed node, so check before adding nodes.
    pub fn contains(&self, id: NodeId) -> bool {
        self.inner.contains_node(id)
    }

    /// Removes nodes that no output needs.
    pub fn prune(&mut self) {
        let mut is_needed = vec![false; self.inner.node_bound()];
        for id in self.topological() {
            is_needed[id.index()] = true;
        }
        self.inner.retain_nodes(|_, id| is_needed[id.index()]);
    }

    /// Keeps only the outputs with these names, in this order, and the nodes that they need.
    ///
    /// # Errors
    /// Returns an error if there is no output with one of the names.
    pub fn select_outputs(&mut self, names: &[&str]) -> Result<(), GraphError> {
        let mut outputs = Vec::with_capacity(names.len());
        for &name in names {
            match self.outputs.iter().find(|(n, _)| n == name) {
                Some(found) => outputs.push(found.clone()),
                None => {
                    return Err(GraphError::DanglingOutput {
                        output: name.to_owned(),
                    });
                }
            }
        }
        self.outputs = outputs;
        self.prune();
        Ok(())
    }

    /// Returns the number of nodes that launch a kernel.
    pub fn n_launches(&self) -> usize {
        self.topological()
            .into_iter()
            .filter(|&id| self.op(id).is_compute())
            .count()
    }

    /// Checks that every output exists, that the graph has no cycle, that names are unique, and that stored shapes equal the inferred ones.
    ///
    /// # Errors
    /// Returns an error for the first check that fails.
    pub fn verify(&self) -> Result<(), GraphError> {
        let mut names = BTreeMap::new();
        for (output, id) in &self.outputs {
            if !self.inner.contains_node(*id) {
                return Err(GraphError::DanglingOutput {
                    output: output.clone(),
                });
            }
        }
        if let Err(cycle) = petgraph::algo::toposort(&self.inner, None) {
            return Err(GraphError::Cycle {
                node: self.inner[cycle.node_id()].name.clone(),
            });
        }
        for id in self.topological() {
            let node = self.node(id);
            if names.insert(node.name.as_str(), id).is_some() {
                return Err(GraphError::DuplicateName {
                    name: node.name.clone(),
                });
            }
            let inferred = self.infer(&node.name, &node.op, &self.operands(id))?;
            if inferred != node.shape {
                return Err(GraphError::StaleShape {
                    node: node.name.clone(),
                    stored: node.shape.clone(),
                    inferred,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
