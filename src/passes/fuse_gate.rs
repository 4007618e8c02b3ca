use super::{
    Pass, Report,
    matching::{first, kept, operands, quoted},
    merge_projections::{Names, Projection, columns, projection, stack},
    report::Group,
};
use crate::{
    graph::{Graph, GraphError, MAX_WIDTH, NodeId, Op},
    ops::Activation,
};

/// `act(x·W₁ᵀ + b₁) ⊙ (x·W₂ᵀ + b₂) = gate{act}(x·[W₁; W₂]ᵀ + [b₁; b₂])`: the two projections of a gated feed-forward network (Shazeer 2020)
/// become one GEMM. One kernel then multiplies the activated first half of the GEMM's result (the gate) by the second half. If the graph
/// already slices one projection into halves, the kernel reads these halves.
pub(super) struct FuseGate;

impl Pass for FuseGate {
    fn name(&self) -> &'static str {
        "fuse_gate"
    }

    fn equation(&self) -> &'static str {
        "act(x·W₁ᵀ + b₁) ⊙ (x·W₂ᵀ + b₂) = gate{act}(x·[W₁; W₂]ᵀ + [b₁; b₂])"
    }

    fn run(&self, graph: &mut Graph, report: &mut Report) -> Result<(), GraphError> {
        let order = graph.topological();
        let mut names = Names::of(graph, &order);
        for product in order {
            // The loop neither adds nor removes products. It only removes nodes before the product that reads them, so later ids in `order`
            // stay valid.
            if !graph.contains(product) || *graph.op(product) != Op::Multiply {
                continue;
            }
            if let Some(found) = halves(graph, product) {
                let group = Group::of(graph, found.nodes);
                graph.rewrite(product, Op::Gate(found.activation), &[found.x])?;
                group.fused(self.name(), graph, product, &[], report);
                continue;
            }
            match find(graph, product) {
                None => {}
                Some(Err(condition)) => {
                    report.refuse(self.name(), graph.node(product).name.clone(), condition);
                }
                Some(Ok(found)) => {
                    let [gate, up] = &found.projections;
                    let nodes = [
                        gate.linear,
                        gate.value,
                        found.activated,
                        up.linear,
                        up.value,
                        product,
                    ];
                    let group = Group::of(graph, nodes);
                    let (stacked, added) = stack(graph, &mut names, &found.projections)?;
                    graph.rewrite(product, Op::Gate(found.activation), &[stacked])?;
                    group.fused(self.name(), graph, product, &added, report);
                }
            }
        }
        Ok(())
    }
}

struct Match {
    activation: Activation,
    activated: NodeId,
    /// The projections of the gate and of the other factor.
    projections: [Projection; 2],
}

/// A gate that reads the halves of one projection.
struct Halves {
    activation: Activation,
    /// The two slices, the activation and the product.
    nodes: Vec<NodeId>,
    x: NodeId,
}

/// Matches `act(x[.. n]) ⊙ x[n ..]` on rows of `2·n` columns. No other node may read the halves.
fn halves(graph: &Graph, product: NodeId) -> Option<Halves> {
    let [a, b] = operands(graph, product)?;
    let sides = [(a, b), (b, a)].into_iter();
    let mut found = sides.filter_map(|(activated, up)| {
        let Op::Activate(activation) = *graph.op(activated) else {
            return None;
        };
        let gate = first(graph, activated)?;
        let (
            Op::SliceColumns { start: 0, width },
            Op::SliceColumns {
                start,
                width: other,
            },
        ) = (graph.op(gate), graph.op(up))
        else {
            return None;
        };
        let x = first(graph, gate)?;
        let whole = graph.shape(x).width()? == 2 * u64::from(*width);
        let alone = [(gate, activated), (activated, product), (up, product)];
        let is_one = whole && (start, other) == (width, width) && first(graph, up)? == x;
        let vanish = alone
            .iter()
            .all(|&(id, reader)| kept(graph, id, reader).is_none());
        (is_one && vanish).then(|| Halves {
            activation,
            nodes: vec![gate, up, activated, product],
            x,
        })
    });
    found.next()
}

/// Returns the gate that ends in `product`, or the reason why it cannot be fused. Returns `None` if neither operand is an activated
/// projection.
fn find(graph: &Graph, product: NodeId) -> Option<Result<Match, String>> {
    let [a, b] = operands(graph, product)?;
    let sides = [(a, b), (b, a)].into_iter();
    let mut gates = sides.filter_map(|(activated, other)| {
        let Op::Activate(activation) = *graph.op(activated) else {
            return None;
        };
        let gate = projection(graph, first(graph, activated)?)?;
        Some((activation, activated, gate, other))
    });
    let (activation, activated, gate, other) = gates.next()?;
    let checked = || -> Result<Match, String> {
        let gate = gate?;
        if activated == other {
            return Err(format!("{} is multiplied by itself", quoted(graph, other)));
        }
        let up = match projection(graph, other) {
            Some(up) => up?,
            None => return Err(format!("{} is not a linear layer", quoted(graph, other))),
        };
        for (id, reader) in [
            (gate.value, activated),
            (activated, product),
            (up.value, product),
        ] {
            if let Some(condition) = kept(graph, id, reader) {
                return Err(condition);
            }
        }
        if gate.x != up.x {
            return Err(format!(
                "{} projects {}, and {} projects {}",
                quoted(graph, gate.value),
                quoted(graph, gate.x),
                quoted(graph, up.value),
                quoted(graph, up.x)
            ));
        }
        if gate.bias.is_some() != up.bias.is_some() {
            let (with, without) = match gate.bias {
                Some(_) => (&gate, &up),
                None => (&up, &gate),
            };
            return Err(format!(
                "{} has a bias, and {} has none",
                quoted(graph, with.value),
                quoted(graph, without.value)
            ));
        }
        let projections = [gate, up];
        if columns(graph, &projections).is_none() {
            return Err(format!("together they are wider than a row of {MAX_WIDTH}"));
        }
        Ok(Match {
            activation,
            activated,
            projections,
        })
    };
    Some(checked())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{alone, models::Builder, refusals, story};
    use crate::{
        graph::{NodeId, Op},
        ops::Activation,
    };

    const PASS: &str = "fuse_gate";

    /// Adds the node `gated`: the activation of a projection of `x`, times a projection of `y`.
    fn gated(b: &mut Builder, [x, y]: [NodeId; 2], biases: [bool; 2]) {
        let sides = [("gate", x, biases[0]), ("up", y, biases[1])];
        let [gate, up] = sides.map(|(name, x, bias)| match bias {
            true => b.linear(name, name, x, 24),
            false => b.matmul(name, name, x, 24),
        });
        let gate = b.add("activated", Op::Activate(Activation::Silu), &[gate]);
        b.add("gated", Op::Multiply, &[gate, up]);
    }

    fn network(biases: [bool; 2]) -> Builder {
        let mut b = Builder::default();
        let x = b.tokens(16);
        gated(&mut b, [x, x], biases);
        b
    }

    fn refused(b: Builder, outputs: &[&str]) -> String {
        refusals(PASS, b.with_outputs(outputs))
    }

    #[test]
    fn two_projections_and_a_product_become_a_gate() {
        let graph = network([true; 2]).with_outputs(&["gated"]);
        insta::assert_snapshot!(PASS, story(PASS, graph));
    }

    #[test]
    fn the_gate_may_be_on_the_right_and_have_no_bias() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let [gate, up] = ["gate", "up"].map(|name| b.matmul(name, name, x, 24));
        let gate = b.add("activated", Op::Activate(Activation::GeluTanh), &[gate]);
        b.add("gated", Op::Multiply, &[up, gate]);
        let (fused, _) = alone(PASS, &b.with_outputs(&["gated"]));
        insta::assert_snapshot!(fused, @r"
        TokenIds = input(TokenIds) : [tokens]
        tokens = embedding TokenIds @tokens.weight : [tokens, 16]
        gate.matmul+up.matmul = linear tokens [gate.weight; up.weight] : [tokens, 48]
        gated = gelu_tanh_gate gate.matmul+up.matmul : [tokens, 24]
        output gated = gated
        ");
    }

    #[test]
    fn a_product_of_two_gates_takes_the_first() {
        let mut b = network([false; 2]);
        let up = b.get("up.matmul");
        let up = b.add("up", Op::Activate(Activation::Tanh), &[up]);
        let gate = b.get("activated");
        b.add("both", Op::Multiply, &[gate, up]);
        insta::assert_snapshot!(refused(b, &["both"]), @r"
        refused `both` by fuse_gate
            because `up` is not a linear layer
        ");
    }

    #[test]
    fn projections_of_different_values_stay_apart() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let y = b.add("y", Op::Scale { by: 2.0 }, &[x]);
        gated(&mut b, [x, y], [false; 2]);
        insta::assert_snapshot!(refused(b, &["gated"]), @r"
        refused `gated` by fuse_gate
            because `gate.matmul` projects `tokens`, and `up.matmul` projects `y`
        ");
    }

    #[test]
    fn projections_with_and_without_bias_stay_apart() {
        insta::assert_snapshot!(refused(network([true, false]), &["gated"]), @r"
        refused `gated` by fuse_gate
            because `gate` has a bias, and `up.matmul` has none
        ");
        insta::assert_snapshot!(refused(network([false, true]), &["gated"]), @r"
        refused `gated` by fuse_gate
            because `up` has a bias, and `gate.matmul` has none
        ");
    }

    #[test]
    fn values_that_are_outputs_stay() {
        for output in ["gate.matmul", "activated", "up.matmul"] {
            let report = refused(network([false; 2]), &["gated", output]);
            assert!(
                report.contains(&format!("`{output}` is an output, so it must be stored")),
                "{report}"
            );
        }
    }

    #[test]
    fn a_projection_with_another_reader_stays() {
        let mut b = network([false; 2]);
        let up = b.get("up.matmul");
        b.add("other", Op::Scale { by: 2.0 }, &[up]);
        insta::assert_snapshot!(refused(b, &["gated", "other"]), @r"
        refused `gated` by fuse_gate
            because `up.matmul` is also read by `other`
        ");
    }

    #[test]
    fn a_product_with_a_value_other_than_a_projection_stays() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let gate = b.matmul("gate", "gate", x, 16);
        let gate = b.add("activated", Op::Activate(Activation::Silu), &[gate]);
        b.add("gated", Op::Multiply, &[gate, x]);
        insta::assert_snapshot!(refused(b, &["gated"]), @r"
        refused `gated` by fuse_gate
            because `tokens` is not a linear layer
        ");
    }

    #[test]
    fn an_activated_projection_times_itself_stays() {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let gate = b.matmul("gate", "gate", x, 16);
        let gate = b.add("activated", Op::Activate(Activation::Silu), &[gate]);
        b.add("gated", Op::Multiply, &[gate, gate]);
        insta::assert_snapshot!(refused(b, &["gated"]), @r"
        refused `gated` by fuse_gate
            because `activated` is multiplied by itself
        ");
    }

    /// Returns a graph with the node `gated`: the activation of some columns of a projection, times other columns of the projection.
    fn of_columns(columns: [(u32, u32); 2]) -> Builder {
        let mut b = Builder::default();
        let x = b.tokens(16);
        let both = b.linear("both", "both", x, 48);
        let [gate, up] = ["gate", "up"].map(|name| {
            let (start, width) = columns[usize::from(name == "up")];
            b.add(name, Op::SliceColumns { start, width }, &[both])
        });
        let gate = b.add("activated", Op::Activate(Activation::GeluExact), &[gate]);
        b.add("gated", Op::Multiply, &[up, gate]);
        b
    }

    #[test]
    fn the_halves_of_one_projection_become_a_gate() {
        let graph = of_columns([(0, 24), (24, 24)]).with_outputs(&["gated"]);
        let (fused, report) = alone(PASS, &graph);
        assert_eq!(report.launches_saved(), 3);
        insta::assert_snapshot!(fused, @r"
        TokenIds = input(TokenIds) : [tokens]
        tokens = embedding TokenIds @tokens.weight : [tokens, 16]
        both.matmul = linear tokens @both.weight : [tokens, 48]
        both = add_bias both.matmul @both.bias : [tokens, 48]
        gated = gelu_gate both : [tokens, 24]
        output gated = gated
        ");
    }

    #[test]
    fn columns_that_are_not_halves_or_have_another_reader_stay() {
        for (columns, outputs) in [
            ([(24, 24), (0, 24)], &["gated"][..]),
            ([(0, 20), (20, 20)], &["gated"]),
            ([(0, 24), (24, 24)], &["gated", "up"]),
        ] {
            let graph = of_columns(columns).with_outputs(outputs);
            let (_, report) = alone(PASS, &graph);
            assert_eq!(report.launches_saved(), 0, "{columns:?} {outputs:?}");
        }
    }
}
