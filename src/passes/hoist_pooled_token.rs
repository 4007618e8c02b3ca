use std::collections::{HashMap, HashSet};

use super::{
    Pass, Report,
    matching::{first, names, quoted, stored},
    merge_projections::Names,
    report::Group,
};
use crate::{
    graph::{Graph, GraphError, NodeId, Op},
    tensor::Symbol,
};

/// `pool(f(x, y, …)) = f(pool(x), pool(y), …)`, where `pool` takes the first or the last token of
/// each sequence, and `f` computes each row of its result from the same rows of its operands.
///
/// If only the pooled tokens of a value are read, the value is computed only for these tokens. After the last attention of an encoder,
/// linear layers have `[batch]` rows instead of `[tokens]`, which saves a sixteenth of the multiplications of BERT-base.
pub(super) struct HoistPooledToken;

impl Pass for HoistPooledToken {
    fn name(&self) -> &'static str {
        "hoist_pooled_token"
    }

    fn equation(&self) -> &'static str {
        "pool(f(x, y, …)) = f(pool(x), pool(y), …) for f by rows"
    }

    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError> {
        for pool in [Op::FirstToken, Op::LastToken] {
            let order = graph.topological();
            let pools: Vec<NodeId> = order
                .iter()
                .copied()
                .filter(|&id| *graph.op(id) == pool)
                .collect();
            let hoisted = self.hoisted(graph, &order, &pools, report);
            if !hoisted.is_empty() {
                self.hoist(graph, &order, &pools, &hoisted, report)?;
            }
        }
        Ok(())
    }
}

impl HoistPooledToken {
    /// Returns the set of values that need to be computed only for pooled tokens. Every reader of such a value is a pool, or is itself in
    /// the set. The set is empty if the graph has caches. It is also empty if it would contain no linear layer, because the additional
    /// pools would then save nothing.
    fn hoisted(
        &self,
        graph: &Graph,
        order: &[NodeId],
        pools: &[NodeId],
        report: &mut Report,
    ) -> HashSet<NodeId> {
        let mut hoisted = HashSet::new();
        for &id in order.iter().rev().filter(|&&id| is_by_rows(graph, id)) {
            let of_others = || {
                let readers = graph.consumers(id).into_iter();
                let others: Vec<NodeId> = readers
                    .filter(|reader| !pools.contains(reader) && !hoisted.contains(reader))
                    .collect();
                (!others.is_empty()).then(|| {
                    let others = names(graph, others);
                    format!("every token of {} is read by {others}", quoted(graph, id))
                })
            };
            let Some(condition) = stored(graph, id).or_else(of_others) else {
                hoisted.insert(id);
                continue;
            };
            for &pool in pools.iter().filter(|&&p| first(graph, p) == Some(id)) {
                report.refuse(
                    self.name(),
                    graph.node(pool).name.clone(),
                    condition.clone(),
                );
            }
        }
        let n_linear = hoisted.iter().filter(|&&id| is_linear(graph, id)).count();
        let condition = if graph.has_caches() {
            "a decode step has one token of each sequence, which is the pooled one"
        } else if n_linear == 0 {
            "no linear layer is computed for the pooled tokens alone"
        } else {
            return hoisted;
        };
        for &pool in pools {
            if first(graph, pool).is_some_and(|x| hoisted.contains(&x)) {
                let at = graph.node(pool).name.clone();
                report.refuse(self.name(), at, condition.to_owned());
            }
        }
        HashSet::new()
    }

    /// Computes the hoisted values for the pooled rows only. The results are new nodes, because the meaning of an existing name must not
    /// change. A pool that is an output is rewritten and keeps its name. Any other pool is replaced by a new value.
    fn hoist(
        &self,
        graph: &mut Graph,
        order: &[NodeId],
        pools: &[NodeId],
        hoisted: &HashSet<NodeId>,
        report: &mut Report,
    ) -> Result<(), GraphError> {
        let pool = graph.op(pools[0]).clone();
        let pools: Vec<(NodeId, NodeId)> = pools
            .iter()
            .filter_map(|&id| Some((id, first(graph, id)?)))
            .filter(|(_, x)| hoisted.contains(x))
            .collect();
        let before = order.iter().copied();
        let before = before.filter(|id| hoisted.contains(id) || pools.iter().any(|(p, _)| p == id));
        let before = Group::of(graph, before);

        let mut names = Names::of(graph, order);
        let mut pooled: HashMap<NodeId, NodeId> = HashMap::new();
        let mut added = Vec::new();
        for &id in order.iter().filter(|&id| hoisted.contains(id)) {
            let mut operands = graph.operands(id);
            for operand in &mut operands {
                if !is_over_tokens(graph, *operand) {
                    continue;
                }
                *operand = match pooled.get(operand) {
                    Some(&known) => known,
                    None => {
                        // The name starts with the pool's name and not with the layer's. Otherwise, `expect:` in a model description would
                        // count this launch in the layer.
                        let name = format!("{}.{}", pool.name(), graph.node(*operand).name);
                        let row = graph.add(names.fresh(name), pool.clone(), &[*operand])?;
                        added.push(row);
                        pooled.insert(*operand, row);
                        row
                    }
                };
            }
            let name = format!("{}.{}", graph.node(id).name, pool.name());
            let op = graph.op(id).clone();
            let row = graph.add(names.fresh(name), op, &operands)?;
            added.push(row);
            pooled.insert(id, row);
        }
        let mut anchor = None;
        for (id, x) in pools {
            let row = pooled[&x];
            if graph.is_output(id) {
                let (op, operands) = (graph.op(row).clone(), graph.operands(row));
                graph.rewrite(id, op, &operands)?;
                anchor.get_or_insert(id);
            } else {
                graph.replace(id, row);
                anchor.get_or_insert(row);
            }
        }
        graph.prune();
        added.retain(|&id| graph.contains(id));
        if let Some(anchor) = anchor {
            before.fused(self.name(), graph, anchor, &added, report);
        }
        Ok(())
    }
}

/// Returns whether the value is `[tokens, width]` and each of its rows is computed from the same rows of its operands.
fn is_by_rows(graph: &Graph, id: NodeId) -> bool {
    let by_rows = matches!(
        graph.op(id),
        Op::Linear { .. }
            | Op::AddBias
            | Op::Add
            | Op::Multiply
            | Op::Activate(_)
            | Op::Scale { .. }
            | Op::SoftCap(_)
            | Op::LayerNorm { .. }
            | Op::RmsNorm { .. }
            | Op::L2Normalize { .. }
            | Op::Concat { .. }
            | Op::SliceColumns { .. }
    );
    by_rows && is_over_tokens(graph, id)
}

fn is_linear(graph: &Graph, id: NodeId) -> bool {
    matches!(graph.op(id), Op::Linear { .. })
}

/// Returns whether the shape is `[tokens, width]`.
fn is_over_tokens(graph: &Graph, id: NodeId) -> bool {
    match graph.shape(id).0.as_slice() {
        [rows, _] => rows.as_symbol() == Some(Symbol::Tokens),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        Options, optimize,
        tests::{
            alone,
            models::{Builder, Encoder},
            refusals, story,
        },
    };
    use crate::{
        graph::{Graph, Op},
        ops::Activation,
    };

    const PASS: &str = "hoist_pooled_token";

    /// Returns a layer (attention with one head, and a feed-forward network) whose result is pooled by `pool`.
    fn pooled(pool: Op) -> Builder {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let context = b.self_attention("", "", x, 1, false);
        let y = b.matmul("output", "output", context, 16);
        let attended = b.add("attended", Op::Add, &[y, x]);
        let y = b.linear("inner", "inner", attended, 24);
        let y = b.add("gelu", Op::Activate(Activation::GeluExact), &[y]);
        let y = b.matmul("outer", "outer", y, 16);
        let fed = b.add("fed", Op::Add, &[attended, y]);
        let hidden = b.layer_norm("hidden", "norm", fed);
        let pooled = b.add("pooled", pool, &[hidden]);
        b.linear("pooler", "pooler", pooled, 8);
        b
    }

    fn refused(graph: Graph) -> String {
        refusals(PASS, graph)
    }

    #[test]
    fn values_after_the_last_attention_are_computed_for_pooled_tokens() {
        let graph = pooled(Op::FirstToken).with_outputs(&["pooler"]);
        insta::assert_snapshot!(PASS, story(PASS, graph));
    }

    #[test]
    fn the_last_token_is_hoisted_likewise() {
        let graph = pooled(Op::LastToken).with_outputs(&["pooler"]);
        let (fused, _) = alone(PASS, &graph);
        let pools: Vec<String> = fused
            .topological()
            .into_iter()
            .filter(|&id| *fused.op(id) == Op::LastToken)
            .map(|id| fused.node(id).name.clone())
            .collect();
        assert_eq!(pools, ["last_token.merged", "last_token.tokens"]);
    }

    #[test]
    fn a_pool_that_is_an_output_keeps_its_name() {
        let graph = pooled(Op::FirstToken).with_outputs(&["pooled"]);
        let (fused, _) = alone(PASS, &graph);
        let id = fused.outputs()[0].1;
        assert_eq!(fused.node(id).name, "pooled");
        assert_eq!(fused.op(id).name(), "layer_norm");
    }

    #[test]
    fn first_and_last_tokens_of_different_values_are_both_hoisted() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        for (name, pool) in [("first", Op::FirstToken), ("last", Op::LastToken)] {
            let y = b.linear(&format!("{name}.linear"), name, x, 16);
            b.add(name, pool, &[y]);
        }
        let (fused, report) = alone(PASS, &b.with_outputs(&["first", "last"]));
        assert_eq!(report.entries.len(), 2);
        insta::assert_snapshot!(fused, @r"
        TokenIds = input(TokenIds) : [tokens]
        tokens = embedding TokenIds @tokens.weight : [tokens, 16]
        first_token.tokens = first_token tokens : [batch, 16]
        first.linear.matmul.first_token = linear first_token.tokens @first.weight : [batch, 16]
        first = add_bias first.linear.matmul.first_token @first.bias : [batch, 16]
        last_token.tokens = last_token tokens : [batch, 16]
        last.linear.matmul.last_token = linear last_token.tokens @last.weight : [batch, 16]
        last = add_bias last.linear.matmul.last_token @last.bias : [batch, 16]
        output first = first
        output last = last
        ");
    }

    #[test]
    fn the_fusions_are_those_of_all_tokens() {
        let graph = Encoder::SMALL.pooled();
        let n = |without: &[&str]| {
            let without = without.iter().map(|&name| name.to_owned()).collect();
            let (fused, _) = optimize(
                graph.clone(),
                &Options {
                    without,
                    ..Options::default()
                },
            )
            .unwrap();
            fused.n_launches()
        };
        // Two pools replace one pool: one pools the attention's result, the other the residual.
        assert_eq!(n(&[]), n(&[PASS]) + 1);
    }

    #[test]
    fn tokens_that_are_an_output_stay() {
        let graph = pooled(Op::FirstToken).with_outputs(&["pooler", "hidden"]);
        insta::assert_snapshot!(refused(graph), @r"
        refused `pooled` by hoist_pooled_token
            because `hidden` is an output, so it must be stored
        ");
    }

    #[test]
    fn tokens_with_another_reader_stay() {
        let mut b = pooled(Op::FirstToken);
        let hidden = b.get("hidden");
        b.add("mean", Op::MeanPool, &[hidden]);
        insta::assert_snapshot!(refused(b.with_outputs(&["pooler", "mean"])), @r"
        refused `pooled` by hoist_pooled_token
            because every token of `hidden` is read by `mean`
        ");
    }

    #[test]
    fn a_norm_alone_stays() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let y = b.layer_norm("norm", "norm", x);
        b.add("first", Op::FirstToken, &[y]);
        insta::assert_snapshot!(refused(b.with_outputs(&["first"])), @r"
        refused `first` by hoist_pooled_token
            because no linear layer is computed for the pooled tokens alone
        ");
    }

    #[test]
    fn a_model_that_writes_stays() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let cache = Op::Cache {
            name: "keys".to_owned(),
            from: 0,
            heads: 2,
            head: 8,
            format: None,
            scaled: false,
        };
        let kept = b.add("kept", cache, &[x]);
        let y = b.linear("y", "y", x, 16);
        b.add("last", Op::LastToken, &[y]);
        b.graph.add_output("kept", kept);
        insta::assert_snapshot!(refused(b.with_outputs(&["last"])), @r"
        refused `last` by hoist_pooled_token
            because a decode step has one token of each sequence, which is the pooled one
        ");
    }

    #[test]
    fn embeddings_are_no_rows_to_compute() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        b.add("first", Op::FirstToken, &[x]);
        assert_eq!(refused(b.with_outputs(&["first"])), "");
    }
}
