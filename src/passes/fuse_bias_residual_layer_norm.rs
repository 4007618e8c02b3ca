use super::{
    Pass, Report,
    matching::{kept, operands, quoted},
    report::Group,
};
use crate::graph::{Graph, GraphError, NodeId, Op};

/// `layer_norm((x + b) + r) = bias_residual_layer_norm(x, b, r)`, the residual on either side of
/// the sum (ByteTransformer III.C.1). Without a bias that may vanish,
/// `layer_norm(x + r) = residual_layer_norm(x, r)`.
pub(super) struct FuseBiasResidualLayerNorm;

impl Pass for FuseBiasResidualLayerNorm {
    fn name(&self) -> &'static str {
        "fuse_bias_residual_layer_norm"
    }

    fn equation(&self) -> &'static str {
        "layer_norm(add_bias(x, b) + r) = bias_residual_layer_norm(x, b, r)"
    }

    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError> {
        for id in graph.topological() {
            let Op::LayerNorm { eps } = *graph.op(id) else {
                continue;
            };
            let Some([sum, gamma, beta]) = operands(graph, id) else {
                continue;
            };
            if *graph.op(sum) != Op::Add {
                continue;
            }
            let Some([a, b]) = operands(graph, sum) else {
                continue;
            };
            if let Some(condition) = kept(graph, sum, id) {
                report.refuse(self.name(), graph.node(id).name.clone(), condition);
                continue;
            }
            let mut group = vec![sum, id];
            let mut arguments = vec![a, b];
            if let Some(found) = self.find_bias(graph, report, id, sum, [a, b]) {
                group.insert(0, found.node);
                arguments = vec![found.x, found.bias, found.residual];
            }
            let bias = arguments.len() == 3;
            arguments.extend([gamma, beta]);
            let group = Group::of(graph, group);
            graph.rewrite(id, Op::BiasResidualLayerNorm { eps, bias }, &arguments)?;
            group.fused(self.name(), graph, id, &[], report);
        }
        Ok(())
    }
}

struct Bias {
    node: NodeId,
    x: NodeId,
    bias: NodeId,
    residual: NodeId,
}

impl FuseBiasResidualLayerNorm {
    /// The side of `sum` whose bias the kernel can add. Refusals are written down where neither
    /// side's bias can vanish.
    fn find_bias(
        &self,
        graph: &Graph,
        report: &mut Report,
        layer_norm: NodeId,
        sum: NodeId,
        [a, b]: [NodeId; 2],
    ) -> Option<Bias> {
        let mut conditions = Vec::new();
        for (node, residual) in [(a, b), (b, a)] {
            if *graph.op(node) != Op::AddBias {
                continue;
            }
            let [x, bias] = operands(graph, node)?;
            let condition = if node == residual {
                Some(format!("{} is added to itself", quoted(graph, node)))
            } else {
                kept(graph, node, sum)
            };
            match condition {
                Some(condition) => conditions.push(condition),
                None => {
                    return Some(Bias {
                        node,
                        x,
                        bias,
                        residual,
                    });
                }
            }
        }
        conditions.dedup();
        for condition in conditions {
            report.refuse(
                self.name(),
                graph.node(layer_norm).name.clone(),
                format!("{condition}; its bias stays outside"),
            );
        }
        None
    }
}
