use std::collections::{BTreeSet, HashMap};

use super::{
    Pass, Report,
    matching::{first, kept, operands, quoted, scaled},
    report::Group,
};
use crate::{
    graph::{Graph, GraphError, NodeId, Op, WeightExpr},
    kernels::gemm::Epilogue,
};

/// `[x·W₁ᵀ + b₁ | x·W₂ᵀ + b₂ | …] = x·[W₁; W₂; …]ᵀ + [b₁; b₂; …]`: the projections of one
/// attention that read the same value become one GEMM (TurboTransformers 4.1, figure 3). Each
/// projection's value stays, as a slice of the columns, for [`FoldHeadLayout`] to read through.
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
        // Contexts are neither removed nor added here, so their ids hold throughout.
        for context in order {
            for group in self.candidates(graph, report, context) {
                self.merge(graph, report, &mut names, &group)?;
            }
        }
        Ok(())
    }
}

/// `linear`, then perhaps a bias; `value` is the last of them.
struct Projection {
    value: NodeId,
    linear: NodeId,
    x: NodeId,
    weight: WeightExpr,
    bias: Option<WeightExpr>,
}

impl MergeProjections {
    /// Projections of the attention that ends in `context`, in the order q, k, v, by what they
    /// read. Every group has at least two, which can be merged.
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
                        // Query and key may be one value.
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
                "together they are wider than 32 bits count".to_owned(),
            );
            return Ok(());
        };
        let nodes = group.iter().flat_map(|p| [p.linear, p.value]);
        let before = Group::of(graph, nodes);

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
        for (projection, &(start, width)) in group.iter().zip(&columns) {
            let slice = Op::SliceColumns { start, width };
            graph.rewrite(projection.value, slice, &[merged])?;
        }
        before.fused(self.name(), graph, merged, &added, report);
        Ok(())
    }
}

/// What q, k and v of the attention that ends in `context` were split from.
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
    Some(split.filter_map(|id| first(graph, id)).collect())
}

/// The projection that `value` is, or why it cannot be merged. `None` where it is something else.
fn projection(graph: &Graph, value: NodeId) -> Option<Result<Projection, String>> {
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

/// Where each projection's columns start in the merged one, and how many they are.
fn columns(graph: &Graph, group: &[Projection]) -> Option<Vec<(u32, u32)>> {
    let mut start = 0u32;
    group
        .iter()
        .map(|p| {
            let width = u32::try_from(graph.shape(p.value).width()?).ok()?;
            let column = (start, width);
            start = start.checked_add(width)?;
            Some(column)
        })
        .collect()
}

fn name_of(graph: &Graph, ids: impl Iterator<Item = NodeId>) -> Vec<&str> {
    ids.map(|id| graph.node(id).name.as_str()).collect()
}

/// Names of values in use, and the stacked weights there are: layers that share their weights
/// share the stack.
struct Names {
    used: BTreeSet<String>,
    stacked: HashMap<WeightExpr, NodeId>,
}

impl Names {
    fn of(graph: &Graph, ids: &[NodeId]) -> Self {
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

    /// `name`, or where it is taken, with a number after it.
    fn fresh(&mut self, name: String) -> String {
        let numbered = (2..).map(|n: u64| format!("{name}.{n}"));
        let mut names = std::iter::once(name.clone()).chain(numbered);
        let free = names.find(|n| !self.used.contains(n)).unwrap_or(name);
        self.used.insert(free.clone());
        free
    }

    /// The node of this weight, which is added where there is none.
    fn weight(&mut self, graph: &mut Graph, expr: WeightExpr) -> Result<NodeId, GraphError> {
        // A stack of the description may have gone into a higher one, and its id to another value.
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

/// One name for several: what they share up to a dot once, then the rest with `+`, so that
/// `layer.0.query` and `layer.0.key` become `layer.0.query+key`.
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
