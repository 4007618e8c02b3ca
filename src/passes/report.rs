//! Reports of fusions and refusals by passes.

use std::{borrow::Cow, fmt};

use serde::Serialize;

use crate::{
    graph::{Graph, GraphError, NodeId, Op},
    tensor::{DType, Extents, Size, Symbol},
};

/// All fusions and refusals, in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    pub entries: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Entry {
    Fused {
        pass: &'static str,
        /// Name of the remaining value, by which the report identifies the fusion.
        anchor: String,
        /// The merged operators in their original form, in topological order.
        merged: Vec<Part>,
        /// Number of kernel launches saved per run. It is negative for a pass that only prepares the graph for another pass.
        launches_saved: i64,
        moved: Moved,
    },
    Refused {
        pass: &'static str,
        /// Name of the value where the pattern was found.
        at: String,
        /// Description of the failed condition.
        condition: String,
    },
    Quantized {
        pass: &'static str,
        /// Name of the linear layer, or of the cache.
        at: String,
        /// Subject and verb of the report's sentence about the format, such as "its weight is".
        what: &'static str,
        /// Name of the format.
        format: String,
    },
}

/// An operator and the name of its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    pub name: String,
    /// The operator's name; see [`Op::name`].
    pub op: Cow<'static, str>,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} `{}`", self.op, self.name)
    }
}

/// Number of elements of intermediate results that a group of operators reads from and writes to device memory. Each operand of an operator
/// is counted once. Weights and the batch's ids are excluded, since no pass reduces their memory traffic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Moved {
    pub before: Size,
    pub after: Size,
}

impl Moved {
    /// Returns the bytes of memory traffic that a batch saves, with intermediate results stored as
    /// `dtype`; negative if the traffic increases. Returns `None` if the counts do not fit in 64 bits.
    pub fn bytes_saved(&self, extents: &Extents, dtype: DType) -> Option<i64> {
        let stored = |size: &Size| size.eval(extents)?.checked_mul(dtype.bytes());
        let (before, after) = (stored(&self.before)?, stored(&self.after)?);
        i64::try_from(i128::from(before) - i128::from(after)).ok()
    }
}

impl Report {
    pub(super) fn refuse(&mut self, pass: &'static str, at: String, condition: String) {
        let entry = Entry::Refused {
            pass,
            at,
            condition,
        };
        // A pattern may be found more than once, for example if the same value is both query and key.
        if !self.entries.contains(&entry) {
            self.entries.push(entry);
        }
    }

    /// Returns the number of kernel launches that all passes save per run.
    pub fn launches_saved(&self) -> i64 {
        self.entries
            .iter()
            .map(|entry| match entry {
                Entry::Fused { launches_saved, .. } => *launches_saved,
                Entry::Refused { .. } | Entry::Quantized { .. } => 0,
            })
            .sum()
    }

    /// Returns the bytes of memory traffic of intermediate results that all passes save for a
    /// batch. Returns `None` if the counts do not fit in 64 bits.
    pub fn bytes_saved(&self, extents: &Extents, dtype: DType) -> Option<i64> {
        self.entries.iter().try_fold(0i64, |sum, entry| {
            sum.checked_add(match entry {
                Entry::Fused { moved, .. } => moved.bytes_saved(extents, dtype)?,
                Entry::Refused { .. } | Entry::Quantized { .. } => 0,
            })
        })
    }
}

/// Merges `reader` with the operator that computes its first operand. `op` replaces both nodes. It reads the first operand of the earlier
/// operator, and the other operands of `reader`.
pub(super) fn absorb(
    pass: &'static str,
    graph: &mut Graph,
    reader: NodeId,
    op: Op,
    report: &mut Report,
) -> Result<(), GraphError> {
    let mut operands = graph.operands(reader);
    let merged = operands[0];
    let group = Group::of(graph, [merged, reader]);
    operands[0] = graph.operands(merged)[0];
    graph.rewrite(reader, op, &operands)?;
    group.fused(pass, graph, reader, &[], report);
    Ok(())
}

/// The operators that a pass is about to rewrite, and their cost before the rewrite.
pub(super) struct Group {
    parts: Vec<(NodeId, Op, Part)>,
    cost: Cost,
}

impl Group {
    /// Records the nodes `ids`, which must be in topological order. Repeated nodes count once.
    pub(super) fn of(graph: &Graph, ids: impl IntoIterator<Item = NodeId>) -> Self {
        let mut parts: Vec<(NodeId, Op, Part)> = Vec::new();
        for id in ids {
            if parts.iter().all(|(seen, ..)| *seen != id) {
                let node = graph.node(id);
                let part = Part {
                    name: node.name.clone(),
                    op: node.op.name(),
                };
                parts.push((id, node.op.clone(), part));
            }
        }
        let cost = Cost::of(graph, parts.iter().map(|&(id, ..)| id));
        Self { parts, cost }
    }

    /// Adds the fusion to the report. The cost after the rewrite counts the nodes `added`, and the group's nodes that are still in the
    /// graph. No other nodes may have been added to the graph since the group was recorded.
    pub(super) fn fused(
        self,
        pass: &'static str,
        graph: &Graph,
        anchor: NodeId,
        added: &[NodeId],
        report: &mut Report,
    ) {
        let left = self.parts.iter().map(|&(id, ..)| id);
        let left = left.filter(|&id| graph.contains(id) && !added.contains(&id));
        let after = Cost::of(graph, left.chain(added.iter().copied()));
        let took_part = |(id, op, _): &(NodeId, Op, Part)| {
            *id == anchor || !graph.contains(*id) || graph.op(*id) != op
        };
        report.entries.push(Entry::Fused {
            pass,
            anchor: graph.node(anchor).name.clone(),
            launches_saved: self.cost.launches - after.launches,
            moved: Moved {
                before: self.cost.elements,
                after: after.elements,
            },
            merged: self
                .parts
                .into_iter()
                .filter(took_part)
                .map(|(.., part)| part)
                .collect(),
        });
    }
}

#[derive(Default)]
struct Cost {
    launches: i64,
    elements: Size,
}

impl Cost {
    fn of(graph: &Graph, ids: impl IntoIterator<Item = NodeId>) -> Self {
        let mut cost = Self::default();
        for id in ids.into_iter().filter(|&id| graph.op(id).is_compute()) {
            cost.launches += 1;
            cost.elements = &cost.elements + &graph.shape(id).elements();
            for (slot, operand) in graph.operands(id).into_iter().enumerate() {
                if graph.op(operand).is_compute() {
                    cost.elements = &cost.elements + &elements_read(graph, id, slot, operand);
                }
            }
        }
        cost
    }
}

/// Returns the number of elements of `operand` that `id` reads. Some operators read only a part of it.
fn elements_read(graph: &Graph, id: NodeId, slot: usize, operand: NodeId) -> Size {
    let mut dims = graph.shape(operand).0.iter();
    let rows = match dims.any(|d| d.as_symbol() == Some(Symbol::SourceSlots)) {
        true => Symbol::SourceSlots,
        false => Symbol::Tokens,
    };
    let headed =
        |heads: u32, head: u32| &Size::constant(u64::from(heads) * u64::from(head)) * &rows.into();
    match graph.op(id) {
        Op::SliceColumns { .. }
        | Op::Cache { .. }
        | Op::RmsNorm { .. }
        | Op::Rotary { .. }
        | Op::FirstToken
        | Op::LastToken => graph.shape(id).elements(),
        Op::Scores {
            heads,
            kv_heads,
            head,
            ..
        } => headed([*heads, *kv_heads][slot.min(1)], *head),
        Op::Attention(of) if slot < 3 => headed([of.heads, of.kv_heads][slot.min(1)], of.head),
        Op::Context { kv_heads, head, .. } if slot == 1 => headed(*kv_heads, *head),
        _ => graph.shape(operand).elements(),
    }
}
