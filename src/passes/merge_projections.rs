use std::collections::{BTreeSet, HashMap};

use super::{
    Pass, Report,
    matching::{first, kept, operands, quoted, scaled},
    report::Group,
};
use crate::{
    graph::{Graph, GraphError, MAX_WIDTH, NodeId, Op, WeightExpr},
    ops::Epilogue,
};

/// `[x·W₁ᵀ + b₁ | x·W₂ᵀ + b₂ | …] = x·[W₁; W₂; …]ᵀ + [b₁; b₂; …]`: projections of one attention
/// that read the same value become one GEMM (TurboTransformers 4.1, figure 3). Each projection
/// remains as a slice of the columns, which [`FoldHeadLayout`] removes.
///
/// [`FoldHeadLayout`]: super::fold_head_layout::FoldHeadLayout
pub(super) struct MergeProjections;

impl Pass for MergeProjections {
    fn name(&self) -> &'static str {
        "merge_projections"
    }

    fn equation(&self) -> &'static str {
        "[x·W₁ᵀ + b₁ | x·W₂ᵀ + b₂ | …] = x·[W₁; W₂; …]ᵀ + [b₁; b₂; …]"
    }

    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError> {
        let order = graph.topological();
        let mut names = Names::of(graph, &order);
        // The pass neither adds nor removes `Op::Context` nodes, so their ids stay valid.
        for context in order {
            for group in self.candidates(graph, report, context) {
                self.merge(graph, report, &mut names, &group)?;
            }
        }
        Ok(())
    }
}

/// A linear layer with an optional bias. `value` is the node of the result.
pub(super) struct Projection {
    pub value: NodeId,
    pub linear: NodeId,
    pub x: NodeId,
    pub weight: WeightExpr,
    pub bias: Option<WeightExpr>,
}

impl MergeProjections {
    /// Returns the mergeable projections of the attention that ends in `context`, in the order q, k, v, grouped by the value that they
    /// read. Each group has at least two projections.
    fn candidates(
        &self,
        graph: &Graph,
        report: &mut Report,
        context: NodeId,
    ) -> Vec<Vec<Projection>> {
        let mut groups: Vec<Vec<Projection>> = Vec::new();
        for value in projected(graph, context).unwrap_or_default() {
            match projection(graph, value) {
                None => {}
                Some(Err(condition)) => {
                    report.refuse(self.name(), graph.node(value).name.clone(), condition);
                }
                Some(Ok(new)) => {
                    let same = groups.iter_mut().find(|group| group[0].x == new.x);
                    match same {
                        // Query and key may be the same projection.
                        Some(group) if group.iter().any(|p| p.linear == new.linear) => {}
                        Some(group) => group.push(new),
                        None => groups.push(vec![new]),
                    }
                }
            }
        }
        if let [one, rest @ ..] = groups.as_slice()
            && !rest.is_empty()
        {
            for alone in groups.iter().filter(|group| group.len() == 1) {
                let other = if alone[0].x == one[0].x {
                    &rest[0]
                } else {
                    one
                };
                report.refuse(
                    self.name(),
                    graph.node(alone[0].value).name.clone(),
                    format!(
                        "it projects {}, and {} projects {}",
                        quoted(graph, alone[0].x),
                        quoted(graph, other[0].value),
                        quoted(graph, other[0].x)
                    ),
                );
            }
        }
        groups.retain(|group| {
            if group.len() < 2 {
                return false;
            }
            let with = group.iter().find(|p| p.bias.is_some());
            let without = group.iter().find(|p| p.bias.is_none());
            if let (Some(with), Some(without)) = (with, without) {
                report.refuse(
                    self.name(),
                    graph.node(without.value).name.clone(),
                    format!("it has no bias, and {} has one", quoted(graph, with.value)),
                );
                return false;
            }
            true
        });
        groups
    }

    fn merge(
        &self,
        graph: &mut Graph,
        report: &mut Report,
        names: &mut Names,
        group: &[Projection],
    ) -> Result<(), GraphError> {
        let Some(columns) = columns(graph, group) else {
            let at = graph.node(group[0].value).name.clone();
            report.refuse(
                self.name(),
                at,
                format!("together they are wider than a row of {MAX_WIDTH}"),
            );
            return Ok(());
        };
        let nodes = group.iter().flat_map(|p| [p.linear, p.value]);
        let before = Group::of(graph, nodes);

        let (merged, added) = stack(graph, names, group)?;
        for (projection, &(start, width)) in group.iter().zip(&columns) {
            let slice = Op::SliceColumns { start, width };
            graph.rewrite(projection.value, slice, &[merged])?;
        }
        before.fused(self.name(), graph, merged, &added, report);
        Ok(())
    }
}

/// Adds a single projection with the concatenated columns of all projections. Returns its value and all compute nodes that were added.
/// Either all projections or none of them must have biases.
pub(super) fn stack(
    graph: &mut Graph,
    names: &mut Names,
    group: &[Projection],
) -> Result<(NodeId, Vec<NodeId>), GraphError> {
    let linears: Vec<&str> = name_of(graph, group.iter().map(|p| p.linear));
    let linear_name = names.fresh(joined(&linears));
    let values: Vec<&str> = name_of(graph, group.iter().map(|p| p.value));
    let value_name = joined(&values);

    let weights = group.iter().map(|p| p.weight.clone()).collect();
    let weight = names.weight(graph, WeightExpr::ConcatRows(weights))?;
    let plain = Op::Linear {
        epilogue: Epilogue::default(),
    };
    let mut merged = graph.add(linear_name, plain, &[group[0].x, weight])?;
    let mut added = vec![merged];
    let biases: Option<Vec<WeightExpr>> = group.iter().map(|p| p.bias.clone()).collect();
    if let Some(biases) = biases {
        let bias = names.weight(graph, WeightExpr::ConcatRows(biases))?;
        merged = graph.add(names.fresh(value_name), Op::AddBias, &[merged, bias])?;
        added.push(merged);
    }
    Ok((merged, added))
}

/// Returns the values from which q, k and v of the attention ending in `context` were split.
fn projected(graph: &Graph, context: NodeId) -> Option<Vec<NodeId>> {
    if !matches!(graph.op(context), Op::Context { .. }) {
        return None;
    }
    let [softmax, v] = operands(graph, context)?;
    if !matches!(graph.op(softmax), Op::Softmax { .. }) {
        return None;
    }
    let mut scores = first(graph, softmax)?;
    while let Some(x) = scaled(graph, scores) {
        scores = x;
    }
    if !matches!(graph.op(scores), Op::Scores { .. }) {
        return None;
    }
    let [q, k] = operands(graph, scores)?;
    let split = [q, k, v].into_iter();
    let split = split.filter(|&id| matches!(graph.op(id), Op::SplitHeads { .. }));
    // Skip caches, norms of heads and rotary positions, which read columns of a projection.
    let projected = |id| {
        let mut value = first(graph, id)?;
        while let Op::Cache { .. } | Op::Rotary { .. } | Op::RmsNorm { .. } = graph.op(value) {
            value = first(graph, value)?;
        }
        Some(value)
    };
    Some(split.filter_map(projected).collect())
}

/// Returns the projection that computes `value`, or the reason why it cannot be merged. Returns `None` if `value` is not a projection.
pub(super) fn projection(graph: &Graph, value: NodeId) -> Option<Result<Projection, String>> {
    let (linear, bias) = match graph.op(value) {
        Op::AddBias => {
            let [x, bias] = operands(graph, value)?;
            (x, Some(bias))
        }
        _ => (value, None),
    };
    let Op::Linear { epilogue } = graph.op(linear) else {
        return None;
    };
    if *epilogue != Epilogue::default() {
        return Some(Err(format!(
            "{} has an epilogue already",
            quoted(graph, linear)
        )));
    }
    let [x, weight] = operands(graph, linear)?;
    if linear != value
        && let Some(condition) = kept(graph, linear, value)
    {
        return Some(Err(condition));
    }
    let constant = |id: NodeId| match graph.op(id) {
        Op::Weight(expr) => Ok(expr.clone()),
        _ => Err(format!(
            "{} is computed, and only weights can be stacked",
            quoted(graph, id)
        )),
    };
    let parts = || -> Result<Projection, String> {
        Ok(Projection {
            value,
            linear,
            x,
            weight: constant(weight)?,
            bias: bias.map(constant).transpose()?,
        })
    };
    Some(parts())
}

/// Returns the first column and the number of columns of each projection in the merged projection; `None` if the merged projection is wider
/// than [`MAX_WIDTH`].
pub(super) fn columns(graph: &Graph, group: &[Projection]) -> Option<Vec<(u32, u32)>> {
    let mut start = 0u32;
    group
        .iter()
        .map(|p| {
            let width = u32::try_from(graph.shape(p.value).width()?).ok()?;
            let column = (start, width);
            start = start.checked_add(width)?;
            (u64::from(start) <= MAX_WIDTH).then_some(column)
        })
        .collect()
}

fn name_of(graph: &Graph, ids: impl Iterator<Item = NodeId>) -> Vec<&str> {
    ids.map(|id| graph.node(id).name.as_str()).collect()
}

/// Names in use, and the nodes of stacked weights. Layers with shared weights also share the stacked weight.
pub(super) struct Names {
    used: BTreeSet<String>,
    stacked: HashMap<WeightExpr, NodeId>,
}

impl Names {
    pub fn of(graph: &Graph, ids: &[NodeId]) -> Self {
        let used = ids.iter().map(|&id| graph.node(id).name.clone()).collect();
        let stacked = ids.iter().filter_map(|&id| match graph.op(id) {
            Op::Weight(expr @ WeightExpr::ConcatRows(_)) => Some((expr.clone(), id)),
            _ => None,
        });
        Self {
            used,
            stacked: stacked.collect(),
        }
    }

    /// Returns `name`, with a number appended if it is taken.
    pub fn fresh(&mut self, name: String) -> String {
        let mut free = name.clone();
        let mut n = 1;
        while !self.used.insert(free.clone()) {
            n += 1;
            free = format!("{name}.{n}");
        }
        free
    }

    /// Returns the node of this weight, adding it if necessary.
    fn weight(&mut self, graph: &mut Graph, expr: WeightExpr) -> Result<NodeId, GraphError> {
        // The node may have been removed when a larger stack replaced it, and its id may have been reused.
        if let Some(&id) = self.stacked.get(&expr)
            && graph.contains(id)
            && matches!(graph.op(id), Op::Weight(there) if *there == expr)
        {
            return Ok(id);
        }
        let parts: Vec<&str> = expr.stored().into_iter().map(|(name, _)| name).collect();
        let name = self.fresh(joined(&parts));
        let id = graph.add(name, Op::Weight(expr.clone()), &[])?;
        self.stacked.insert(expr, id);
        Ok(id)
    }
}

/// Joins several names: their common part up to a dot, then the different parts with `+`. `layer.0.query` and `layer.0.key` become
/// `layer.0.query+key`.
fn joined(names: &[&str]) -> String {
    let Some((&one, rest)) = names.split_first() else {
        return String::new();
    };
    let shared = one
        .match_indices('.')
        .map(|(i, _)| i + 1)
        .take_while(|&n| rest.iter().all(|r| r.starts_with(&one[..n])))
        .last()
        .unwrap_or(0);
    let mut out = one.to_owned();
    for name in rest {
        out.push('+');
        out.push_str(&name[shared..]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{alone, models::Builder, refusals, story},
        joined,
    };
    use crate::graph::Op;

    fn self_attention(bias: bool) -> Builder {
        let mut b = Builder::default();
        let x = b.tokens(16);
        b.self_attention("a.", "", x, 2, bias);
        b
    }

    #[test]
    fn projections_with_biases_become_one() {
        let graph = self_attention(true).with_outputs(&["a.merged"]);
        insta::assert_snapshot!("merge_projections", story("merge_projections", graph));
    }

    #[test]
    fn projections_without_biases_become_one() {
        let graph = self_attention(false).with_outputs(&["a.merged"]);
        let (fused, _) = alone("merge_projections", &graph);
        insta::assert_snapshot!(fused, @r"
        TokenIds = input(TokenIds) : [tokens]
        tokens = embedding TokenIds @tokens.weight : [tokens, 16]
        a.query.matmul+key.matmul+value.matmul = linear tokens [query.weight; key.weight; value.weight] : [tokens, 48]
        a.query.matmul = slice_columns(0..16) a.query.matmul+key.matmul+value.matmul : [tokens, 16]
        a.query.heads = split_heads(heads=2) a.query.matmul : [2, tokens, 8]
        a.key.matmul = slice_columns(16..32) a.query.matmul+key.matmul+value.matmul : [tokens, 16]
        a.key.heads = split_heads(heads=2) a.key.matmul : [2, tokens, 8]
        a.scores = scores(heads=2, head=8, q=head_major, k=head_major) a.query.heads a.key.heads : [2, pairs]
        a.scaled = scale(by=0.35355338) a.scores : [2, pairs]
        a.probabilities = softmax(scale=1) a.scaled : [2, pairs]
        a.value.matmul = slice_columns(32..48) a.query.matmul+key.matmul+value.matmul : [tokens, 16]
        a.value.heads = split_heads(heads=2) a.value.matmul : [2, tokens, 8]
        a.context = context(heads=2, head=8, v=head_major, out=head_major) a.probabilities a.value.heads : [2, tokens, 8]
        a.merged = merge_heads a.context : [tokens, 16]
        output a.merged = a.merged
        ");
    }

    #[test]
    fn attentions_over_one_value_are_merged_apart() {
        let mut b = self_attention(true);
        let x = b.get("tokens");
        b.self_attention("b.", "other.", x, 4, true);
        let (fused, _) = alone(
            "merge_projections",
            &b.with_outputs(&["a.merged", "b.merged"]),
        );
        let linears = fused.topological().into_iter();
        let linears = linears.filter(|&id| matches!(fused.op(id), Op::Linear { .. }));
        assert_eq!(linears.count(), 2);
    }

    #[test]
    fn a_projection_that_is_an_output_is_still_there() {
        let graph = self_attention(true).with_outputs(&["a.merged", "a.key"]);
        let (fused, report) = alone("merge_projections", &graph);
        assert_eq!(report.entries.len(), 1);
        let key = fused.outputs()[1].1;
        assert!(matches!(
            fused.op(key),
            Op::SliceColumns {
                start: 16,
                width: 16
            }
        ));
    }

    #[test]
    fn a_projection_read_before_its_bias_stays_out() {
        let graph = self_attention(true).with_outputs(&["a.merged", "a.query.matmul"]);
        let (_, report) = alone("merge_projections", &graph);
        insta::assert_snapshot!(report, @r"
        refused `a.query` by merge_projections
            because `a.query.matmul` is an output, so it must be stored
        fused `a.key+value` by merge_projections
            merges linear `a.key.matmul`, add_bias `a.key`, linear `a.value.matmul`, add_bias `a.value`
            as [x·W₁ᵀ + b₁ | x·W₂ᵀ + b₂ | …] = x·[W₁; W₂; …]ᵀ + [b₁; b₂; …]
            saves 0 launches, moves 176·tokens elements instead of 128·tokens
        ");
    }

    #[test]
    fn projections_of_different_values_stay_apart() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let y = b.add("y", Op::Scale { by: 2.0 }, &[x]);
        let qkv = [("q", y), ("k", x), ("v", x)].map(|(name, from)| {
            let value = b.linear(name, name, from, 16);
            b.split(&format!("{name}.heads"), value, 2)
        });
        b.attention("", qkv, 1.0);
        let (_, report) = alone("merge_projections", &b.with_outputs(&["merged"]));
        insta::assert_snapshot!(report, @r"
        refused `q` by merge_projections
            because it projects `y`, and `k` projects `tokens`
        fused `k+v` by merge_projections
            merges linear `k.matmul`, add_bias `k`, linear `v.matmul`, add_bias `v`
            as [x·W₁ᵀ + b₁ | x·W₂ᵀ + b₂ | …] = x·[W₁; W₂; …]ᵀ + [b₁; b₂; …]
            saves 0 launches, moves 176·tokens elements instead of 128·tokens
        ");
    }

    #[test]
    fn projections_with_and_without_bias_stay_apart() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let q = b.linear("q", "q", x, 16);
        let k = b.matmul("k", "k", x, 16);
        let v = b.linear("v", "v", x, 16);
        let qkv = [("qh", q), ("kh", k), ("vh", v)].map(|(name, y)| b.split(name, y, 2));
        b.attention("", qkv, 1.0);
        let graph = b.with_outputs(&["merged"]);
        insta::assert_snapshot!(refusals("merge_projections", graph), @r"
        refused `k.matmul` by merge_projections
            because it has no bias, and `q` has one
        ");
    }

    #[test]
    fn a_value_that_is_query_and_key_is_projected_once() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let [q, v] = ["q", "v"].map(|name| {
            let y = b.linear(name, name, x, 16);
            b.split(&format!("{name}h"), y, 2)
        });
        b.attention("", [q, q, v], 1.0);
        let (fused, _) = alone("merge_projections", &b.with_outputs(&["merged"]));
        insta::assert_snapshot!(fused, @r"
        TokenIds = input(TokenIds) : [tokens]
        tokens = embedding TokenIds @tokens.weight : [tokens, 16]
        q.matmul+v.matmul = linear tokens [q.weight; v.weight] : [tokens, 32]
        q+v = add_bias q.matmul+v.matmul [q.bias; v.bias] : [tokens, 32]
        q = slice_columns(0..16) q+v : [tokens, 16]
        qh = split_heads(heads=2) q : [2, tokens, 8]
        scores = scores(heads=2, head=8, q=head_major, k=head_major) qh qh : [2, pairs]
        scaled = scale(by=1) scores : [2, pairs]
        probabilities = softmax(scale=1) scaled : [2, pairs]
        v = slice_columns(16..32) q+v : [tokens, 16]
        vh = split_heads(heads=2) v : [2, tokens, 8]
        context = context(heads=2, head=8, v=head_major, out=head_major) probabilities vh : [2, tokens, 8]
        merged = merge_heads context : [tokens, 16]
        output merged = merged
        ");
    }

    #[test]
    fn a_merged_name_that_is_taken_gets_a_number() {
        let mut b = self_attention(true);
        let x = b.get("tokens");
        b.add("a.query+key+value", Op::Scale { by: 2.0 }, &[x]);
        let graph = b.with_outputs(&["a.merged", "a.query+key+value"]);
        let (fused, _) = alone("merge_projections", &graph);
        let mut names = fused
            .topological()
            .into_iter()
            .map(|id| &fused.node(id).name);
        assert!(names.any(|name| name == "a.query+key+value.2"));
    }

    #[test]
    fn a_joined_name_has_the_common_part_once() {
        assert_eq!(
            joined(&["layer.0.query", "layer.0.key"]),
            "layer.0.query+key"
        );
        assert_eq!(joined(&["q", "k"]), "q+k");
        assert_eq!(joined(&["a.b", "a.b"]), "a.b+b");
    }
}
