use super::{
    Pass, Report,
    matching::{kept, names, operands, quoted, stored},
    report::Group,
};
use crate::{
    graph::{Graph, GraphError, NodeId, Op},
    ops::HeadView,
};

/// Folds `split_heads` and `merge_heads` into the operators that read or write the heads. These operators then access heads as columns of
/// rows: `scores(split_heads(y)) = scores(y as columns)`, and `merge_heads(context(…)) = context(…) as columns`. This saves transposed
/// copies, since `split_heads(y[:, o..])[h, t, c] = y[t, o + h·head + c]`. Caches, norms of heads and rotary positions can also read
/// columns of a wider value.
pub(super) struct FoldHeadLayout;

impl Pass for FoldHeadLayout {
    fn name(&self) -> &'static str {
        "fold_head_layout"
    }

    fn equation(&self) -> &'static str {
        "split_heads(y[:, o..])[h, t, c] = y[t, o + h·head + c]; merge_heads likewise"
    }

    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError> {
        for id in graph.topological() {
            // Nodes that this pass removes are skipped.
            if !graph.contains(id) {
                continue;
            }
            match graph.op(id) {
                Op::Scores { .. } | Op::Context { .. } => self.fold_operands(graph, report, id)?,
                Op::MergeHeads => self.fold_result(graph, report, id)?,
                Op::Cache { .. } | Op::RmsNorm { .. } | Op::Rotary { .. } => {
                    self.fold_columns(graph, report, id)?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl FoldHeadLayout {
    /// Removes the `split_heads` before an [`Op::Scores`] or [`Op::Context`]. The operator then reads columns of the unsplit values.
    fn fold_operands(
        &self,
        graph: &mut Graph,
        report: &mut Report,
        id: NodeId,
    ) -> Result<(), GraphError> {
        let Some(mut arguments) = operands::<2>(graph, id) else {
            return Ok(());
        };
        let mut op = graph.op(id).clone();
        let mut nodes = Vec::new();
        let views = match &mut op {
            Op::Scores { q, k, .. } => [Some(q), Some(k)],
            Op::Context { v, .. } => [None, Some(v)],
            _ => [None, None],
        };
        for (view, argument) in views.into_iter().zip(&mut arguments) {
            let Some(view) = view else { continue };
            let Some(split) = Split::of(graph, *argument) else {
                continue;
            };
            match split.kept(graph) {
                Some(condition) => {
                    report.refuse(self.name(), graph.node(id).name.clone(), condition);
                }
                None => {
                    nodes.extend(split.nodes);
                    *view = split.view;
                    *argument = split.source;
                }
            }
        }
        if !nodes.is_empty() {
            let group = Group::of(graph, nodes.into_iter().chain([id]));
            graph.rewrite(id, op, &arguments)?;
            group.fused(self.name(), graph, id, &[], report);
        }
        Ok(())
    }

    /// Redirects an operator that reads columns of its first operand to the value from which these columns were sliced.
    fn fold_columns(
        &self,
        graph: &mut Graph,
        report: &mut Report,
        id: NodeId,
    ) -> Result<(), GraphError> {
        let mut op = graph.op(id).clone();
        let (Op::Cache { from, .. } | Op::RmsNorm { from, .. } | Op::Rotary { from, .. }) = &mut op
        else {
            return Ok(());
        };
        let mut nodes = vec![id];
        let mut arguments = graph.operands(id);
        let Some(source) = arguments.first_mut() else {
            return Ok(());
        };
        while let Op::SliceColumns { start, .. } = *graph.op(*source) {
            nodes.insert(0, *source);
            let Some([x]) = operands(graph, *source) else {
                return Ok(());
            };
            *source = x;
            *from += start;
        }
        if nodes.len() > 1 {
            let group = Group::of(graph, nodes);
            graph.rewrite(id, op, &arguments)?;
            group.fused(self.name(), graph, id, &[], report);
        }
        Ok(())
    }

    /// Folds `merge_heads` into the [`Op::Context`] before it, which then writes its heads as adjacent columns of rows.
    fn fold_result(
        &self,
        graph: &mut Graph,
        report: &mut Report,
        merge: NodeId,
    ) -> Result<(), GraphError> {
        let Some([context]) = operands(graph, merge) else {
            return Ok(());
        };
        let mut op = graph.op(context).clone();
        let Op::Context {
            heads, head, out, ..
        } = &mut op
        else {
            return Ok(());
        };
        if let Some(condition) = kept(graph, context, merge) {
            report.refuse(self.name(), graph.node(merge).name.clone(), condition);
            return Ok(());
        }
        *out = HeadView::TokenMajor {
            offset: 0,
            stride: *heads * *head,
        };
        let group = Group::of(graph, [context, merge]);
        let arguments = graph.operands(context);
        graph.rewrite(merge, op, &arguments)?;
        group.fused(self.name(), graph, merge, &[], report);
        Ok(())
    }
}

/// Heads that [`Op::SplitHeads`] splits from the columns of a tensor.
struct Split {
    source: NodeId,
    view: HeadView,
    split: NodeId,
    /// The slices, if any, and the split, in topological order.
    nodes: Vec<NodeId>,
}

impl Split {
    fn of(graph: &Graph, split: NodeId) -> Option<Self> {
        let Op::SplitHeads { .. } = graph.op(split) else {
            return None;
        };
        let [mut source] = operands(graph, split)?;
        let mut offset = 0;
        let mut nodes = vec![split];
        // A slice that is an output or has other readers remains, but this operator can still read the slice's source instead. The offsets
        // of nested slices are added.
        while let Op::SliceColumns { start, .. } = *graph.op(source) {
            nodes.insert(0, source);
            [source] = operands(graph, source)?;
            offset += start;
        }
        // The width of a tensor with split heads is constant. Kernels use 32 bits for it.
        let stride = u32::try_from(graph.shape(source).width()?).ok()?;
        Some(Self {
            source,
            view: HeadView::TokenMajor { offset, stride },
            split,
            nodes,
        })
    }

    /// Returns the reason why the split heads must be stored, if there is one.
    fn kept(&self, graph: &Graph) -> Option<String> {
        if let Some(condition) = stored(graph, self.split) {
            return Some(condition);
        }
        let others = graph.consumers(self.split).into_iter();
        let others =
            others.filter(|&c| !matches!(graph.op(c), Op::Scores { .. } | Op::Context { .. }));
        let others = names(graph, others);
        (!others.is_empty()).then(|| {
            format!(
                "{} is also read by {others}, which is not attention",
                quoted(graph, self.split)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{alone, models::Builder, refusals, story};
    use crate::graph::{Graph, Op};

    /// Returns a graph with attention whose query, key and value are adjacent slices of 16 columns of one tensor.
    fn attention() -> Builder {
        let mut b = Builder::default();
        let x = b.tokens(48);
        let qkv = [("q", 0), ("k", 16), ("v", 32)].map(|(name, start)| {
            let slice = Op::SliceColumns { start, width: 16 };
            let columns = b.add(name, slice, &[x]);
            b.split(&format!("{name}h"), columns, 2)
        });
        b.attention("", qkv, 0.5);
        b
    }

    fn report(graph: &Graph) -> String {
        alone("fold_head_layout", graph).1.to_string()
    }

    #[test]
    fn heads_become_columns() {
        let graph = attention().with_outputs(&["merged"]);
        insta::assert_snapshot!("fold_head_layout", story("fold_head_layout", graph));
    }

    #[test]
    fn a_slice_of_a_slice_is_a_slice() {
        let mut b = Builder::default();
        let x = b.tokens(48);
        let slice = |start, width| Op::SliceColumns { start, width };
        let x = b.add("outer", slice(8, 32), &[x]);
        let x = b.add("inner", slice(12, 16), &[x]);
        let x = b.split("heads", x, 2);
        b.attention("", [x, x, x], 1.0);
        let (fused, _) = alone("fold_head_layout", &b.with_outputs(&["merged"]));
        insta::assert_snapshot!(fused, @r"
        TokenIds = input(TokenIds) : [tokens]
        tokens = embedding TokenIds @tokens.weight : [tokens, 48]
        scores = scores(heads=2, head=8, q=columns 20 of 48, k=columns 20 of 48) tokens tokens : [2, pairs]
        scaled = scale(by=1) scores : [2, pairs]
        probabilities = softmax(scale=1) scaled : [2, pairs]
        merged = context(heads=2, head=8, v=columns 20 of 48, out=columns 0 of 16) probabilities tokens : [tokens, 16]
        output merged = merged
        ");
    }

    #[test]
    fn split_heads_that_are_an_output_stay() {
        let graph = attention().with_outputs(&["probabilities", "kh", "context"]);
        insta::assert_snapshot!(report(&graph), @r"
        refused `scores` by fold_head_layout
            because `kh` is an output, so it must be stored
        fused `scores` by fold_head_layout
            merges slice_columns `q`, split_heads `qh`, scores `scores`
            as split_heads(y[:, o..])[h, t, c] = y[t, o + h·head + c]; merge_heads likewise
            saves 2 launches, moves 32·tokens + 2·pairs elements instead of 96·tokens + 2·pairs
        fused `context` by fold_head_layout
            merges slice_columns `v`, split_heads `vh`, context `context`
            as split_heads(y[:, o..])[h, t, c] = y[t, o + h·head + c]; merge_heads likewise
            saves 2 launches, moves 32·tokens + 2·pairs elements instead of 96·tokens + 2·pairs
        ");
    }

    #[test]
    fn split_heads_with_another_reader_stay() {
        let mut b = attention();
        let v = b.get("vh");
        b.add("v again", Op::MergeHeads, &[v]);
        insta::assert_snapshot!(report(&b.with_outputs(&["context", "v again"])), @r"
        fused `scores` by fold_head_layout
            merges slice_columns `q`, split_heads `qh`, slice_columns `k`, split_heads `kh`, scores `scores`
            as split_heads(y[:, o..])[h, t, c] = y[t, o + h·head + c]; merge_heads likewise
            saves 4 launches, moves 32·tokens + 2·pairs elements instead of 160·tokens + 2·pairs
        refused `context` by fold_head_layout
            because `vh` is also read by `v again`, which is not attention
        ");
    }

    #[test]
    fn a_context_that_is_an_output_keeps_its_heads_apart() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let x = b.split("heads", x, 2);
        b.attention("", [x, x, x], 1.0);
        let graph = b.with_outputs(&["merged", "context", "heads"]);
        insta::assert_snapshot!(refusals("fold_head_layout", graph), @r"
        refused `scores` by fold_head_layout
            because `heads` is an output, so it must be stored
        refused `context` by fold_head_layout
            because `heads` is an output, so it must be stored
        refused `merged` by fold_head_layout
            because `context` is an output, so it must be stored
        ");
    }
}
