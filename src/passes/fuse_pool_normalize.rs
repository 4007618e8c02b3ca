use super::{
    Pass, Report,
    matching::{first, kept},
    report::Group,
};
use crate::graph::{Graph, GraphError, Op};

/// `l2_normalize(mean_pool(x)) = mean_pool_normalize(x)`: one block holds a sequence's mean, so
/// its norm needs no second launch.
pub(super) struct FusePoolNormalize;

impl Pass for FusePoolNormalize {
    fn name(&self) -> &'static str {
        "fuse_pool_normalize"
    }

    fn equation(&self) -> &'static str {
        "l2_normalize(mean_pool(x)) = mean_pool_normalize(x)"
    }

    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError> {
        for id in graph.topological() {
            let Op::L2Normalize { eps } = *graph.op(id) else {
                continue;
            };
            let Some(pool) = first(graph, id) else {
                continue;
            };
            if *graph.op(pool) != Op::MeanPool {
                continue;
            }
            if let Some(condition) = kept(graph, pool, id) {
                report.refuse(self.name(), graph.node(id).name.clone(), condition);
                continue;
            }
            let group = Group::of(graph, [pool, id]);
            let x = graph.operands(pool);
            graph.rewrite(id, Op::MeanPoolNormalize { eps }, &x)?;
            group.fused(self.name(), graph, id, &[], report);
        }
        Ok(())
    }
}
