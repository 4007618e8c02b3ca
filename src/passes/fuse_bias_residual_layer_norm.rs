use super::{
    Pass, Report,
    matching::{kept, operands, quoted},
    report::Group,
};
use crate::graph::{Graph, GraphError, NodeId, Op};

/// `layer_norm((x + b) + r) = bias_residual_layer_norm(x, b, r)`, with the residual on either side of the sum (ByteTransformer III.C.1). If
/// there is no bias or the bias must be kept, the rewrite is `layer_norm(x + r) = residual_layer_norm(x, r)`.
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
    /// Returns the operand of `sum` whose bias the kernel can add. Records refusals if no operand's bias can be merged.
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

#[cfg(test)]
mod tests {
    use super::super::tests::{alone, models::Builder, refusals, story};
    use crate::graph::{Graph, Op};

    const PASS: &str = "fuse_bias_residual_layer_norm";

    /// Returns LayerNorm of the sum of a projection and its input. `left` is whether the projection is the left operand.
    fn residual(left: bool) -> Builder {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let y = b.linear("y", "y", x, 16);
        let sides = if left { [y, x] } else { [x, y] };
        let sum = b.add("sum", Op::Add, &sides);
        b.layer_norm("normed", "norm", sum);
        b
    }

    fn fused(graph: &Graph) -> Graph {
        alone(PASS, graph).0
    }

    #[test]
    fn bias_residual_and_norm_become_one() {
        insta::assert_snapshot!(PASS, story(PASS, residual(true).with_outputs(&["normed"])));
    }

    #[test]
    fn the_residual_may_stand_on_either_side() {
        let [left, right] =
            [true, false].map(|left| fused(&residual(left).with_outputs(&["normed"])));
        assert_eq!(left.text(), right.text());
    }

    #[test]
    fn a_sum_without_bias_is_fused_too() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let y = b.matmul("y", "y", x, 16);
        let sum = b.add("sum", Op::Add, &[y, x]);
        b.layer_norm("normed", "norm", sum);
        insta::assert_snapshot!(fused(&b.with_outputs(&["normed"])), @r"
        TokenIds = input(TokenIds) : [tokens]
        tokens = embedding TokenIds @tokens.weight : [tokens, 16]
        y.matmul = linear tokens @y.weight : [tokens, 16]
        normed = residual_layer_norm(eps=1e-12) y.matmul tokens @norm.weight @norm.bias : [tokens, 16]
        output normed = normed
        ");
    }

    #[test]
    fn of_two_biases_the_first_is_taken() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let y = b.linear("y", "y", x, 16);
        let z = b.linear("z", "z", x, 16);
        let sum = b.add("sum", Op::Add, &[y, z]);
        b.layer_norm("normed", "norm", sum);
        insta::assert_snapshot!(fused(&b.with_outputs(&["normed"])), @r"
        TokenIds = input(TokenIds) : [tokens]
        tokens = embedding TokenIds @tokens.weight : [tokens, 16]
        y.matmul = linear tokens @y.weight : [tokens, 16]
        z.matmul = linear tokens @z.weight : [tokens, 16]
        z = add_bias z.matmul @z.bias : [tokens, 16]
        normed = bias_residual_layer_norm(eps=1e-12) y.matmul @y.bias z @norm.weight @norm.bias : [tokens, 16]
        output normed = normed
        ");
    }

    #[test]
    fn a_biased_value_that_is_an_output_stays() {
        let graph = residual(true).with_outputs(&["normed", "y"]);
        insta::assert_snapshot!(alone(PASS, &graph).1, @r"
        refused `normed` by fuse_bias_residual_layer_norm
            because `y` is an output, so it must be stored; its bias stays outside
        fused `normed` by fuse_bias_residual_layer_norm
            merges add `sum`, layer_norm `normed`
            as layer_norm(add_bias(x, b) + r) = bias_residual_layer_norm(x, b, r)
            saves 1 launch, moves 48·tokens elements instead of 80·tokens
        ");
    }

    #[test]
    fn a_biased_value_added_to_itself_stays() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let y = b.linear("y", "y", x, 16);
        let sum = b.add("sum", Op::Add, &[y, y]);
        b.layer_norm("normed", "norm", sum);
        insta::assert_snapshot!(alone(PASS, &b.with_outputs(&["normed"])).1, @r"
        refused `normed` by fuse_bias_residual_layer_norm
            because `y` is added to itself; its bias stays outside
        fused `normed` by fuse_bias_residual_layer_norm
            merges add `sum`, layer_norm `normed`
            as layer_norm(add_bias(x, b) + r) = bias_residual_layer_norm(x, b, r)
            saves 1 launch, moves 48·tokens elements instead of 80·tokens
        ");
    }

    #[test]
    fn a_sum_that_is_the_next_residual_stays() {
        let mut b = residual(false);
        let (sum, normed) = (b.get("sum"), b.get("normed"));
        b.add("next", Op::Add, &[sum, normed]);
        insta::assert_snapshot!(refusals(PASS, b.with_outputs(&["next"])), @r"
        refused `normed` by fuse_bias_residual_layer_norm
            because `sum` is also read by `next`
        ");
    }

    #[test]
    fn a_sum_that_is_an_output_stays() {
        let graph = residual(true).with_outputs(&["normed", "sum"]);
        insta::assert_snapshot!(refusals(PASS, graph), @r"
        refused `normed` by fuse_bias_residual_layer_norm
            because `sum` is an output, so it must be stored
        ");
    }
}
