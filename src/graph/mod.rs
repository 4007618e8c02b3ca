//! The model as a graph over petgraph: one node per operator and its one result, one edge per
//! operand. Shapes are symbolic and inferred; [`Graph::verify`] infers them anew after every pass.

mod heads;
mod infer;
mod op;
mod print;
mod weight;
mod weight_names;

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
};

use petgraph::{
    Direction,
    stable_graph::{NodeIndex, StableDiGraph},
    visit::EdgeRef,
};

/// The output that a program writes by: the logits of the token behind each sequence.
pub const NEXT_LOGITS: &str = "next_token_logits";

pub use infer::{HEAD_STEP, MAX_HEAD, MAX_PARTS, MAX_TABLES, MAX_WIDTH};
pub use op::Op;
pub use weight::{Buckets, Positions, Sinusoid, WeightExpr, resized_heads_at, slope};
pub use weight_names::{WeightNames, in_folder};

use serde::{Deserialize, Serialize};

use crate::tensor::Shape;

/// A node of a [`Graph`].
pub type NodeId = NodeIndex<u32>;

/// An operator with its result.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Name of the result; unique in the graph. A weight is named as in the checkpoint.
    pub name: String,
    pub op: Op,
    /// Shape of the result, inferred.
    pub shape: Shape,
    /// The part of the model that computes it, an index into [`Graph::parts`]; 0 of weights, which all parts share.
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
    #[error("the name `{name}` is given to two values; rename one")]
    DuplicateName { name: String },
    #[error("the value `{node}` depends on itself")]
    Cycle { node: String },
    #[error("`{node}` holds the shape {stored}, but its operands give {inferred}")]
    StaleShape {
        node: String,
        stored: Shape,
        inferred: Shape,
    },
    #[error("the output `{output}` names no value of the graph")]
    DanglingOutput { output: String },
}

/// A model, from inputs and weights to named outputs.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    inner: StableDiGraph<Node, u32>,
    outputs: Vec<(String, NodeId)>,
    /// Empty where the model is one graph.
    parts: Vec<Part>,
}

/// A part of a model that runs by itself, on a batch of its own. Parts meet in caches only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    pub name: String,
    /// What its caches are of.
    pub stream: String,
}

impl Graph {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an operator on `operands`; its shape is inferred.
    pub fn add(
        &mut self,
        name: impl Into<String>,
        op: Op,
        operands: &[NodeId],
    ) -> Result<NodeId, GraphError> {
        let name = name.into();
        let shape = self.infer(&name, &op, operands)?;
        // What is computed of a part's values is the part's.
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

    /// Names the parts of a model that has several.
    pub fn set_parts(&mut self, parts: Vec<Part>) {
        self.parts = parts;
    }

    /// The parts, where there are several, in the order in which they run.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Makes a value without operands one of a part.
    pub fn set_part(&mut self, id: NodeId, part: u32) {
        self.inner[id].part = part;
    }

    /// What must be computed, part by part: the outputs, and what a part leaves for others.
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

    /// Makes `id` a result of the model under `name`.
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

    /// Operands in the order of their slots.
    pub fn operands(&self, id: NodeId) -> Vec<NodeId> {
        let mut edges: Vec<(u32, NodeId)> = self
            .inner
            .edges_directed(id, Direction::Incoming)
            .map(|e| (*e.weight(), e.source()))
            .collect();
        edges.sort_unstable();
        edges.into_iter().map(|(_, source)| source).collect()
    }

    /// Nodes that read `id`, each once, in index order.
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

    /// The only reader of `id`; `None` where there are several, none, or `id` is an output.
    pub fn sole_consumer(&self, id: NodeId) -> Option<NodeId> {
        match self.consumers(id).as_slice() {
            [one] if !self.is_output(id) => Some(*one),
            _ => None,
        }
    }

    /// Nodes that the outputs need, and the caches of a model in parts, operands before readers and part by part. The order follows the outputs and
    /// the operands' slots only, so that it does not depend on how the graph came about.
    pub fn topological(&self) -> Vec<NodeId> {
        let mut order = Vec::with_capacity(self.inner.node_count());
        let mut seen = HashSet::new();
        let mut stack: Vec<(NodeId, bool)> = Vec::new();
        for root in self.roots() {
            stack.push((root, false));
            while let Some((id, done)) = stack.pop() {
                if done {
                    order.push(id);
                } else if seen.insert(id) {
                    stack.push((id, true));
                    stack.extend(self.operands(id).into_iter().rev().map(|o| (o, false)));
                }
            }
        }
        order
    }

    /// Makes every reader of `old` read `new`, and every output `old` be `new`.
    pub fn replace(&mut self, old: NodeId, new: NodeId) {
        let edges: Vec<_> = self
            .inner
            .edges_directed(old, Direction::Outgoing)
            .map(|e| (e.id(), e.target(), *e.weight()))
            .collect();
        for (edge, target, slot) in edges {
            // The replacement may read what it replaces; that edge stays.
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

    /// Makes `id` the result of another operator: its name, readers and place among the outputs
    /// stay, its shape is inferred anew. What only `id` needed is removed. Nothing changes on an
    /// error.
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

    /// Removes those of `candidates` that nothing reads, then their operands likewise.
    fn remove_unread(&mut self, mut candidates: Vec<NodeId>) {
        while let Some(id) = candidates.pop() {
            let is_kept = |id| self.is_output(id) || matches!(self.op(id), Op::Cache { .. });
            if self.contains(id) && self.consumers(id).is_empty() && !is_kept(id) {
                candidates.extend(self.operands(id));
                self.inner.remove_node(id);
            }
        }
    }

    /// The graph for sequences that are whole in one batch, whose caches hold what they are given.
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

    /// A value that reads what another part left, if there is one.
    pub fn remembered(&self) -> Option<NodeId> {
        let mut nodes = self.topological().into_iter();
        nodes.find(|&id| matches!(self.op(id), Op::Remembered { .. }))
    }

    /// Whether sequences leave something for their later tokens.
    pub fn has_caches(&self) -> bool {
        let mut nodes = self.topological().into_iter();
        nodes.any(|id| matches!(self.op(id), Op::Cache { .. }))
    }

    /// Whether `id` still names a value. An id that was removed may be given again by
    /// [`add`](Self::add): ask before adding.
    pub fn contains(&self, id: NodeId) -> bool {
        self.inner.contains_node(id)
    }

    /// Removes what no output needs.
    pub fn prune(&mut self) {
        let needed: HashSet<NodeId> = self.topological().into_iter().collect();
        self.inner.retain_nodes(|_, id| needed.contains(&id));
    }

    /// Keeps only the outputs with these names, in this order, and what they need.
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

    /// Nodes that launch a kernel.
    pub fn n_launches(&self) -> usize {
        self.topological()
            .into_iter()
            .filter(|&id| self.op(id).is_compute())
            .count()
    }

    /// Checks everything that the other rooms rely on.
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
