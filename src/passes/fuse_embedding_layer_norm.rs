use super::{
    Pass, Report,
    matching::{kept, operands, quoted},
    report::Group,
};
use crate::graph::{Graph, GraphError, NodeId, Op};

/// More tables than any encoder adds; the kernel takes two pointers for each.
const MAX_TABLES: usize = 4;

/// `layer_norm(T₁[i₁] + … + Tₙ[iₙ]) = embedding_layer_norm(i₁…iₙ, T₁…Tₙ)`: the sum of the rows
/// stays in registers. The tables are listed as the sum reads from left to right.
pub(super) struct FuseEmbeddingLayerNorm;

impl Pass for FuseEmbeddingLayerNorm {
    fn name(&self) -> &'static str {
        "fuse_embedding_layer_norm"
    }

    fn equation(&self) -> &'static str {
        "layer_norm(T₁[i₁] + … + Tₙ[iₙ]) = embedding_layer_norm(i₁…iₙ, T₁…Tₙ), n ≤ 4"
    }

    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError> {
        for id in graph.topological() {
            let Op::LayerNorm { eps } = *graph.op(id) else {
                continue;
            };
            let Some([x, gamma, beta]) = operands(graph, id) else {
                continue;
            };
            let sum = Sum::of(graph, x, id);
            if sum.tables.is_empty() {
                continue;
            }
            if let Some(condition) = sum.condition(graph) {
                report.refuse(self.name(), graph.node(id).name.clone(), condition);
                continue;
            }
            let offsets = sum.tables.iter().map(|t| t.offset).collect();
            let ids = sum.tables.iter().map(|t| t.ids);
            let rows = sum.tables.iter().map(|t| t.table);
            let arguments: Vec<NodeId> = ids.chain(rows).chain([gamma, beta]).collect();
            let nodes = sum.tables.iter().map(|t| t.node);
            let group = Group::of(graph, nodes.chain(sum.additions).chain([id]));
            graph.rewrite(id, Op::EmbeddingLayerNorm { eps, offsets }, &arguments)?;
            group.fused(self.name(), graph, id, &[], report);
        }
        Ok(())
    }
}

struct Table {
    node: NodeId,
    offset: u32,
    ids: NodeId,
    table: NodeId,
}

/// A tree of additions.
#[derive(Default)]
struct Sum {
    /// The embeddings that are added, from left to right.
    tables: Vec<Table>,
    /// What else is added.
    others: Vec<NodeId>,
    /// The additions, operands before readers.
    additions: Vec<NodeId>,
    /// Why nodes of the tree must stay.
    kept: Vec<String>,
}

impl Sum {
    /// The tree under `root`, which `reader` reads. A sum that is too long is not walked to its
    /// end: a value added to itself again and again has more terms than there is memory.
    fn of(graph: &Graph, root: NodeId, reader: NodeId) -> Self {
        let mut sum = Self::default();
        let mut stack = vec![(root, reader)];
        while let Some((id, reader)) = stack.pop() {
            if sum.tables.len() + sum.others.len() > MAX_TABLES {
                break;
            }
            let kept = kept(graph, id, reader);
            match (graph.op(id), graph.operands(id).as_slice()) {
                // Below an addition that stays begins another value, such as the residual stream
                // of a model that normalises first.
                (Op::Add, &[a, b]) if kept.is_none() || id == root => {
                    sum.additions.push(id);
                    stack.extend([(b, id), (a, id)]);
                }
                (&Op::Embedding { offset }, &[ids, table]) => sum.tables.push(Table {
                    node: id,
                    offset,
                    ids,
                    table,
                }),
                _ => sum.others.push(id),
            }
            sum.kept.extend(kept);
        }
        sum.additions.reverse();
        sum
    }

    fn condition(&self, graph: &Graph) -> Option<String> {
        if let Some(&other) = self.others.first() {
            return Some(format!(
                "the sum also adds {}, which is {} and not an embedding",
                quoted(graph, other),
                graph.op(other).name()
            ));
        }
        if self.tables.len() > MAX_TABLES {
            return Some(format!(
                "more than {MAX_TABLES} tables are added, and the kernel takes at most {MAX_TABLES}"
            ));
        }
        self.kept.first().cloned()
    }
}
