use super::{
    Pass, Report,
    matching::{kept, operands, quoted},
    report::Group,
};
use crate::{
    graph::{Graph, GraphError, NodeId, Op},
    ops::Epilogue,
};

/// `linear(x, W, b) + r = linear{residual}(x, W, b, r)`, with the residual on either side of the sum. The residual is added to the
/// accumulators before they are rounded. The sum may have other readers, as in pre-norm transformers.
pub(super) struct FuseResidual;

impl Pass for FuseResidual {
    fn name(&self) -> &'static str {
        "fuse_residual"
    }

    fn equation(&self) -> &'static str {
        "linear(x, W, b) + r = linear{residual}(x, W, b, r)"
    }

    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError> {
        for sum in graph.topological() {
            if *graph.op(sum) != Op::Add {
                continue;
            }
            let Some(found) = self.find(graph, report, sum) else {
                continue;
            };
            let mut arguments = graph.operands(found.linear);
            arguments.push(found.residual);
            let group = Group::of(graph, [found.linear, sum]);
            let epilogue = found.epilogue.with_residual();
            graph.rewrite(sum, Op::Linear { epilogue }, &arguments)?;
            group.fused(self.name(), graph, sum, &[], report);
        }
        Ok(())
    }
}

struct Match {
    linear: NodeId,
    epilogue: Epilogue,
    residual: NodeId,
}

impl FuseResidual {
    /// Returns the operand of `sum` that is a linear layer whose epilogue can add the other operand. Records refusals if there is a linear
    /// layer but none is suitable.
    fn find(&self, graph: &Graph, report: &mut Report, sum: NodeId) -> Option<Match> {
        let [a, b] = operands(graph, sum)?;
        let mut conditions = Vec::new();
        for (linear, residual) in [(a, b), (b, a)] {
            let Op::Linear { epilogue } = *graph.op(linear) else {
                continue;
            };
            let condition = match linear == residual {
                true => Some(format!("{} is added to itself", quoted(graph, linear))),
                false if epilogue.residual => Some(format!(
                    "{} has a residual in its epilogue already",
                    quoted(graph, linear)
                )),
                false => kept(graph, linear, sum),
            };
            match condition {
                Some(condition) => conditions.push(condition),
                None => {
                    return Some(Match {
                        linear,
                        epilogue,
                        residual,
                    });
                }
            }
        }
        for condition in conditions {
            report.refuse(self.name(), graph.node(sum).name.clone(), condition);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{alone, models::Builder, refusals, story};
    use crate::{
        graph::{Graph, Op},
        ops::{Activation, Epilogue},
    };

    const PASS: &str = "fuse_residual";

    /// Returns the sum of a projection and its input. `left` is whether the projection is the left operand. The sum is read twice.
    fn residual(left: bool) -> Builder {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let y = b.matmul("y", "y", x, 16);
        let sides = if left { [y, x] } else { [x, y] };
        let sum = b.add("sum", Op::Add, &sides);
        let normed = b.layer_norm("normed", "norm", sum);
        b.add("again", Op::Add, &[normed, sum]);
        b
    }

    fn refused(graph: Graph) -> String {
        refusals(PASS, graph)
    }

    #[test]
    fn the_sum_becomes_the_epilogue() {
        let graph = residual(true).with_outputs(&["again"]);
        insta::assert_snapshot!(PASS, story(PASS, graph));
    }

    #[test]
    fn the_residual_may_come_first() {
        let [left, right] = [true, false].map(|left| {
            let graph = residual(left).with_outputs(&["again"]);
            alone(PASS, &graph).0.text()
        });
        assert_eq!(left, right);
    }

    #[test]
    fn a_sum_that_is_an_output_is_fused() {
        let graph = residual(true).with_outputs(&["sum", "again"]);
        let (fused, _) = alone(PASS, &graph);
        assert_eq!(fused.op(fused.outputs()[0].1).name(), "residual_linear");
    }

    #[test]
    fn bias_and_activation_stay_before_the_residual() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let (weight, bias) = (b.weight("w", &[16, 16]), b.weight("b", &[16]));
        let epilogue = Epilogue::new(true, Some(Activation::Silu));
        let y = b.add("y", Op::Linear { epilogue }, &[x, weight, bias]);
        b.add("sum", Op::Add, &[x, y]);
        let (fused, _) = alone(PASS, &b.with_outputs(&["sum"]));
        insta::assert_snapshot!(fused, @r"
        TokenIds = input(TokenIds) : [tokens]
        tokens = embedding TokenIds @tokens.weight : [tokens, 16]
        sum = bias_silu_residual_linear tokens @w @b tokens : [tokens, 16]
        output sum = sum
        ");
    }

    #[test]
    fn of_two_linear_layers_one_takes_the_other() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let [y, z] = ["y", "z"].map(|name| b.matmul(name, name, x, 16));
        b.add("sum", Op::Add, &[y, z]);
        let (fused, _) = alone(PASS, &b.with_outputs(&["sum", "y.matmul"]));
        insta::assert_snapshot!(fused, @r"
        TokenIds = input(TokenIds) : [tokens]
        tokens = embedding TokenIds @tokens.weight : [tokens, 16]
        y.matmul = linear tokens @y.weight : [tokens, 16]
        sum = residual_linear tokens @z.weight y.matmul : [tokens, 16]
        output sum = sum
        output y.matmul = y.matmul
        ");
    }

    #[test]
    fn a_product_that_is_an_output_stays() {
        let graph = residual(true).with_outputs(&["again", "y.matmul"]);
        insta::assert_snapshot!(refused(graph), @r"
        refused `sum` by fuse_residual
            because `y.matmul` is an output, so it must be stored
        ");
    }

    #[test]
    fn a_product_with_another_reader_stays() {
        let mut b = residual(true);
        let y = b.get("y.matmul");
        b.add("other", Op::Scale { by: 2.0 }, &[y]);
        insta::assert_snapshot!(refused(b.with_outputs(&["again", "other"])), @r"
        refused `sum` by fuse_residual
            because `y.matmul` is also read by `other`
        ");
    }

    #[test]
    fn a_product_added_to_itself_stays() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let y = b.matmul("y", "y", x, 16);
        b.add("sum", Op::Add, &[y, y]);
        insta::assert_snapshot!(refused(b.with_outputs(&["sum"])), @r"
        refused `sum` by fuse_residual
            because `y.matmul` is added to itself
        ");
    }

    #[test]
    fn a_second_residual_stays_outside() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let y = b.matmul("y", "y", x, 16);
        let sum = b.add("sum", Op::Add, &[y, x]);
        b.add("more", Op::Add, &[sum, x]);
        let (fused, report) = alone(PASS, &b.with_outputs(&["more"]));
        assert_eq!(fused.op(fused.outputs()[0].1), &Op::Add);
        insta::assert_snapshot!(report, @r"
        fused `sum` by fuse_residual
            merges linear `y.matmul`, add `sum`
            as linear(x, W, b) + r = linear{residual}(x, W, b, r)
            saves 1 launch, moves 48·tokens elements instead of 80·tokens
        refused `more` by fuse_residual
            because `sum` has a residual in its epilogue already
        ");
    }
}
