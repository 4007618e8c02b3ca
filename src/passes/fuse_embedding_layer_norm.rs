use super::{
    Pass, Report,
    matching::{kept, operands, quoted},
    report::Group,
};
use crate::graph::{Graph, GraphError, MAX_TABLES, NodeId, Op};

/// `layer_norm(T₁[i₁] + … + Tₙ[iₙ]) = embedding_layer_norm(i₁…iₙ, T₁…Tₙ)`: the sum of the rows
/// stays in registers. The tables are listed in the order of the sum, from left to right.
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
    /// The embeddings in the sum, from left to right.
    tables: Vec<Table>,
    /// The other terms.
    others: Vec<NodeId>,
    /// The additions, in topological order.
    additions: Vec<NodeId>,
    /// Reasons for keeping some nodes of the tree.
    kept: Vec<String>,
}

impl Sum {
    /// Collects the tree of additions under `root`, which `reader` reads. Stops when there are too many terms, because a value that is
    /// repeatedly added to itself has exponentially many terms.
    fn of(graph: &Graph, root: NodeId, reader: NodeId) -> Self {
        let mut sum = Self::default();
        let mut stack = vec![(root, reader)];
        while let Some((id, reader)) = stack.pop() {
            if sum.tables.len() + sum.others.len() > MAX_TABLES {
                break;
            }
            let kept = kept(graph, id, reader);
            match (graph.op(id), graph.operands(id).as_slice()) {
                // An addition that must be kept is a separate value, such as the residual stream of a pre-norm model.
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

#[cfg(test)]
mod tests {
    use super::super::tests::{alone, models::Builder, refusals, story};
    use crate::{graph::Op, ops::BatchInput};

    /// Returns the LayerNorm of a sum of `n` tables, added from left to right.
    fn tables(n: usize) -> Builder {
        let mut b = Builder::default();
        let mut sum = b.tokens(16);
        for i in 1..n {
            let ids = [
                BatchInput::TokenIds,
                BatchInput::Positions,
                BatchInput::TypeIds,
            ][i % 3];
            let more = b.embedding(&format!("table.{i}"), ids, 13, 16);
            sum = b.add(&format!("sum.{i}"), Op::Add, &[sum, more]);
        }
        b.layer_norm("normed", "norm", sum);
        b
    }

    fn refused(b: Builder, outputs: &[&str]) -> String {
        refusals("fuse_embedding_layer_norm", b.with_outputs(outputs))
    }

    #[test]
    fn embeddings_and_their_norm_become_one() {
        let pass = "fuse_embedding_layer_norm";
        let graph = tables(3).with_outputs(&["normed"]);
        insta::assert_snapshot!(pass, story(pass, graph));
    }

    #[test]
    fn one_to_four_tables_are_fused_in_the_order_of_the_sum() {
        for n in 1..=4 {
            let graph = tables(n).with_outputs(&["normed"]);
            let (fused, _) = alone("fuse_embedding_layer_norm", &graph);
            assert_eq!(fused.n_launches(), 1, "{n}");
        }
        let mut b = Builder::default();
        let (x, width) = (b.tokens(16), 16);
        let first = Op::Embedding { offset: 2 };
        let ids = b.add("positions", Op::Input(BatchInput::Positions), &[]);
        let table = b.weight("rows", &[11, width]);
        let first = b.add("first", first, &[ids, table]);
        let right = b.add("right", Op::Add, &[x, x]);
        let sum = b.add("sum", Op::Add, &[first, right]);
        b.layer_norm("normed", "norm", sum);
        let (fused, _) = alone("fuse_embedding_layer_norm", &b.with_outputs(&["normed"]));
        insta::assert_snapshot!(fused, @r"
        positions = input(Positions) : [tokens]
        TokenIds = input(TokenIds) : [tokens]
        normed = embedding_layer_norm(eps=1e-12, offsets=[2, 0, 0]) positions TokenIds TokenIds @rows @tokens.weight @tokens.weight @norm.weight @norm.bias : [tokens, 16]
        output normed = normed
        ");
    }

    #[test]
    fn a_fifth_table_is_refused() {
        insta::assert_snapshot!(refused(tables(5), &["normed"]), @r"
        refused `normed` by fuse_embedding_layer_norm
            because more than 4 tables are added, and the kernel takes at most 4
        ");
    }

    #[test]
    fn a_repeatedly_doubled_value_is_refused_at_once() {
        let mut b = Builder::default();
        let mut x = b.tokens(16);
        for i in 0..64 {
            x = b.add(&format!("double.{i}"), Op::Add, &[x, x]);
        }
        b.layer_norm("normed", "norm", x);
        insta::assert_snapshot!(refused(b, &["normed"]), @r"
        refused `normed` by fuse_embedding_layer_norm
            because more than 4 tables are added, and the kernel takes at most 4
        ");
    }

    #[test]
    fn an_embedding_that_is_an_output_stays() {
        insta::assert_snapshot!(refused(tables(2), &["normed", "tokens"]), @r"
        refused `normed` by fuse_embedding_layer_norm
            because `tokens` is an output, so it must be stored
        ");
    }

    #[test]
    fn a_sum_with_another_reader_stays() {
        let mut b = tables(2);
        let sum = b.get("sum.1");
        b.add("residual", Op::Scale { by: 2.0 }, &[sum]);
        insta::assert_snapshot!(refused(b, &["normed", "residual"]), @r"
        refused `normed` by fuse_embedding_layer_norm
            because `sum.1` is also read by `residual`
        ");
    }

    #[test]
    fn a_sum_with_something_else_stays() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let y = b.embedding("position", BatchInput::Positions, 13, 16);
        let y = b.linear("projected", "projection", y, 16);
        let sum = b.add("sum", Op::Add, &[x, y]);
        b.layer_norm("normed", "norm", sum);
        insta::assert_snapshot!(refused(b, &["normed"]), @r"
        refused `normed` by fuse_embedding_layer_norm
            because the sum also adds `projected`, which is add_bias and not an embedding
        ");
    }

    #[test]
    fn a_sum_without_embeddings_is_ignored() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let y = b.linear("y", "y", x, 16);
        let z = b.linear("z", "z", x, 16);
        let sum = b.add("sum", Op::Add, &[y, z]);
        b.layer_norm("normed", "norm", sum);
        assert_eq!(refused(b, &["normed"]), "");
    }
}
