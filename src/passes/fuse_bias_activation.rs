use super::{
    Pass, Report,
    matching::{kept, operands},
    report::Group,
};
use crate::{
    graph::{Graph, GraphError, NodeId, Op},
    ops::Epilogue,
};

/// `act(x·Wᵀ + b) = linear{b, act}(x, W, b)`: bias and activation are applied to the accumulators while they are in registers
/// (ByteTransformer III.C.2). The bias or the activation may be missing.
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
            // Merging removes readers of a visited node, so later nodes in the order may no longer exist.
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
    /// Merges the bias and the activation that follow `linear` into its epilogue.
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
        while epilogue.activation.is_none() && !epilogue.residual {
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
    Activation(crate::ops::Activation),
}

/// Returns a reader of `id` that can still be merged into `epilogue`, and the step that it adds.
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

#[cfg(test)]
mod tests {
    use super::super::tests::{alone, models::Builder, refusals, story};
    use crate::{graph::Op, ops::Activation};

    const PASS: &str = "fuse_bias_activation";

    fn biased() -> Builder {
        let mut b = Builder::default();
        let x = b.tokens(16);
        b.linear("y", "y", x, 24);
        b
    }

    fn activated(activation: Activation) -> Builder {
        let mut b = biased();
        let y = b.get("y");
        b.add("act", Op::Activate(activation), &[y]);
        b
    }

    #[test]
    fn bias_and_activation_become_the_epilogue() {
        let graph = activated(Activation::GeluExact).with_outputs(&["act"]);
        insta::assert_snapshot!(PASS, story(PASS, graph));
    }

    #[test]
    fn every_activation_is_taken() {
        for activation in Activation::ALL {
            let graph = activated(activation).with_outputs(&["act"]);
            let (fused, _) = alone(PASS, &graph);
            assert_eq!(fused.n_launches(), 2);
            let op = fused.op(fused.outputs()[0].1);
            assert_eq!(op.name(), format!("bias_{}_linear", activation.name()));
        }
    }

    #[test]
    fn a_bias_or_an_activation_alone_is_fused() {
        let (bias, _) = alone(PASS, &biased().with_outputs(&["y"]));
        assert_eq!(bias.op(bias.outputs()[0].1).name(), "bias_linear");
        let mut b = Builder::default();
        let x = b.tokens(16);
        let y = b.matmul("y", "y", x, 24);
        b.add("act", Op::Activate(Activation::Relu), &[y]);
        let (relu, _) = alone(PASS, &b.with_outputs(&["act"]));
        assert_eq!(relu.op(relu.outputs()[0].1).name(), "linear_relu");
    }

    #[test]
    fn a_bias_after_the_activation_stays_outside() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let y = b.matmul("y", "y", x, 24);
        let y = b.add("act", Op::Activate(Activation::Relu), &[y]);
        let bias = b.weight("bias", &[24]);
        b.add("z", Op::AddBias, &[y, bias]);
        let (fused, _) = alone(PASS, &b.with_outputs(&["z"]));
        insta::assert_snapshot!(fused, @r"
        TokenIds = input(TokenIds) : [tokens]
        tokens = embedding TokenIds @tokens.weight : [tokens, 16]
        act = linear_relu tokens @y.weight : [tokens, 24]
        z = add_bias act @bias : [tokens, 24]
        output z = z
        ");
    }

    #[test]
    fn a_biased_value_that_is_an_output_ends_the_epilogue() {
        let graph = activated(Activation::Tanh).with_outputs(&["act", "y"]);
        insta::assert_snapshot!(alone(PASS, &graph).1, @r"
        refused `act` by fuse_bias_activation
            because `y` is an output, so it must be stored
        fused `y` by fuse_bias_activation
            merges linear `y.matmul`, add_bias `y`
            as act(add_bias(linear(x, W), b)) = linear{bias, act}(x, W, b)
            saves 1 launch, moves 40·tokens elements instead of 88·tokens
        ");
    }

    #[test]
    fn a_product_with_another_reader_stays() {
        let mut b = activated(Activation::Tanh);
        let y = b.get("y.matmul");
        b.add("other", Op::Scale { by: 2.0 }, &[y]);
        let graph = b.with_outputs(&["act", "other"]);
        insta::assert_snapshot!(refusals(PASS, graph), @r"
        refused `y` by fuse_bias_activation
            because `y.matmul` is also read by `other`
        ");
    }
}
