use super::{
    Pass, Report,
    matching::{first, kept},
    report::Group,
};
use crate::graph::{Graph, GraphError, Op};

/// `l2_normalize(mean_pool(x)) = mean_pool_normalize(x)`: a single CTA computes a sequence's mean, so normalizing the mean needs no second
/// launch.
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

#[cfg(test)]
mod tests {
    use super::super::tests::{models::Builder, refusals, story};
    use crate::graph::Op;

    const PASS: &str = "fuse_pool_normalize";

    fn pooled() -> Builder {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let mean = b.add("mean", Op::MeanPool, &[x]);
        b.add("unit", Op::L2Normalize { eps: 1e-12 }, &[mean]);
        b
    }

    #[test]
    fn mean_and_norm_become_one() {
        insta::assert_snapshot!(PASS, story(PASS, pooled().with_outputs(&["unit"])));
    }

    #[test]
    fn a_mean_that_is_an_output_stays() {
        let graph = pooled().with_outputs(&["unit", "mean"]);
        insta::assert_snapshot!(refusals(PASS, graph), @r"
        refused `unit` by fuse_pool_normalize
            because `mean` is an output, so it must be stored
        ");
    }

    #[test]
    fn a_mean_with_another_reader_stays() {
        let mut b = pooled();
        let mean = b.get("mean");
        b.add("double", Op::Scale { by: 2.0 }, &[mean]);
        let graph = b.with_outputs(&["unit", "double"]);
        insta::assert_snapshot!(refusals(PASS, graph), @r"
        refused `unit` by fuse_pool_normalize
            because `mean` is also read by `double`
        ");
    }
}
