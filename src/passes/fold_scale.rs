use super::{
    Pass, Report,
    matching::{first, kept},
    report::Group,
};
use crate::graph::{Graph, GraphError, Op};

/// `softmax(t · (s·x)) = softmax((t·s) · x)`: the kernel multiplies by a factor anyway.
pub(super) struct FoldScale;

impl Pass for FoldScale {
    fn name(&self) -> &'static str {
        "fold_scale"
    }

    fn equation(&self) -> &'static str {
        "softmax(t·(s·x)) = softmax((t·s)·x)"
    }

    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError> {
        for id in graph.topological() {
            // Scales may stand in a row.
            while let Op::Softmax { scale } = *graph.op(id)
                && let Some(x) = first(graph, id)
                && let Op::Scale { by } = *graph.op(x)
                && let Some(source) = first(graph, x)
            {
                if let Some(condition) = kept(graph, x, id) {
                    report.refuse(self.name(), graph.node(id).name.clone(), condition);
                    break;
                }
                let group = Group::of(graph, [x, id]);
                // One rounding instead of two.
                let scale = (f64::from(scale) * f64::from(by)) as f32;
                graph.rewrite(id, Op::Softmax { scale }, &[source])?;
                group.fused(self.name(), graph, id, &[], report);
            }
        }
        Ok(())
    }
}
