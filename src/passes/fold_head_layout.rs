use super::{
    Pass, Report,
    matching::{kept, names, operands, quoted, stored},
    report::Group,
};
use crate::{
    graph::{Graph, GraphError, NodeId, Op},
    kernels::attention::HeadView,
};

/// `split_heads(y[:, o..])[h, t, c] = y[t, o + h·head + c]`, and the same for `merge_heads`: a
/// transpose that its reader or writer can do by addressing. So
/// `scores(split_heads(y)) = scores(y as columns)`, likewise the values of `context`, and
/// `merge_heads(context(…)) = context(…) as columns`.
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
            // Heads are merged after the context that is folded into the merge.
            if !graph.contains(id) {
                continue;
            }
            match graph.op(id) {
                Op::Scores { .. } | Op::Context { .. } => self.fold_operands(graph, report, id)?,
                Op::MergeHeads => self.fold_result(graph, report, id)?,
                _ => {}
            }
        }
        Ok(())
    }
}

impl FoldHeadLayout {
    /// Lets scores or context read what their operands' heads were split from.
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

    /// Lets a context write its heads side by side.
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

/// Heads that were split from the columns of a tensor.
struct Split {
    source: NodeId,
    view: HeadView,
    split: NodeId,
    /// The split, and the slice before it where there is one, in the order of the computation.
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
        // A slice that others read, or that is an output, stays for them; reading around it is
        // right all the same. Slices of slices add up.
        while let Op::SliceColumns { start, .. } = *graph.op(source) {
            nodes.insert(0, source);
            [source] = operands(graph, source)?;
            offset += start;
        }
        // Widths of tensors that heads are split from are constants, and 32 bits in a kernel.
        let stride = u32::try_from(graph.shape(source).width()?).ok()?;
        Some(Self {
            source,
            view: HeadView::TokenMajor { offset, stride },
            split,
            nodes,
        })
    }

    /// Why the split heads must be written down, where they must.
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
                "{} is also read by {others}, which is no attention",
                quoted(graph, self.split)
            )
        })
    }
}
