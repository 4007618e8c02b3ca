use super::{
    Pass, Report,
    matching::{kept, operands},
    report::Group,
};
use crate::{
    graph::{Graph, GraphError, NodeId, Op},
    kernels::gemm::Epilogue,
};

/// `act(x·Wᵀ + b) = linear{b, act}(x, W, b)`: bias and activation act on the accumulators while
/// they are in registers (ByteTransformer III.C.2). Either may be missing.
pub(super) struct FuseBiasActivation;

impl Pass for FuseBiasActivation {
    fn name(&self) -> &'static str {
        "fuse_bias_activation"
    }

    fn equation(&self) -> &'static str {
        "act(add_bias(linear(x, W), b)) = linear{bias, act}(x, W, b)"
    }

    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError> {
        for id in graph.topological() {
            // The loop removes readers of what it visits, which come later in the order.
            if graph.contains(id)
                && let Op::Linear { epilogue } = *graph.op(id)
            {
                self.extend(graph, report, id, epilogue)?;
            }
        }
        Ok(())
    }
}

impl FuseBiasActivation {
    /// Gives the epilogue of `linear` what follows it.
    fn extend(
        &self,
        graph: &mut Graph,
        report: &mut Report,
        linear: NodeId,
        mut epilogue: Epilogue,
    ) -> Result<(), GraphError> {
        let mut arguments = graph.operands(linear);
        let mut group = vec![linear];
        let mut last = linear;
        while epilogue.activation.is_none() {
            let Some((reader, step)) = next(graph, last, epilogue) else {
                break;
            };
            if let Some(condition) = kept(graph, last, reader) {
                report.refuse(self.name(), graph.node(reader).name.clone(), condition);
                break;
            }
            match step {
                Step::Bias(bias) => {
                    epilogue.bias = true;
                    arguments.push(bias);
                }
                Step::Activation(activation) => epilogue.activation = Some(activation),
            }
            group.push(reader);
            last = reader;
        }
        if last != linear {
            let group = Group::of(graph, group);
            graph.rewrite(last, Op::Linear { epilogue }, &arguments)?;
            group.fused(self.name(), graph, last, &[], report);
        }
        Ok(())
    }
}

enum Step {
    Bias(NodeId),
    Activation(crate::kernels::gemm::Activation),
}

/// A reader of `id` that an epilogue so far like `epilogue` can take in.
fn next(graph: &Graph, id: NodeId, epilogue: Epilogue) -> Option<(NodeId, Step)> {
    graph.consumers(id).into_iter().find_map(|reader| {
        let step = match *graph.op(reader) {
            Op::AddBias if !epilogue.bias => {
                let [x, bias] = operands(graph, reader)?;
                (x == id).then_some(Step::Bias(bias))?
            }
            Op::Activate(activation) => Step::Activation(activation),
            _ => return None,
        };
        Some((reader, step))
    })
}
