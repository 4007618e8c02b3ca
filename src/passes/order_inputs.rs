//! Reordering of the inputs of quantized linear layers.

use std::collections::BTreeMap;

use super::{Report, matching::quoted};
use crate::{
    graph::{Graph, GraphError, NodeId, Op, WeightExpr},
    tensor::Format,
};

/// Name of the pass in reports.
pub(super) const NAME: &str = "order_inputs";

/// Reorders the inputs of linear layers whose weights have quantization groups of scattered columns (`ordered`). Kernels support only
/// groups of adjacent columns, so the columns of such a weight are sorted by group, and the preceding linear layer computes its outputs in
/// this order: `linear(act(linear(x, a)), b)` becomes `linear(act(linear(x, rows(a))), columns(b))`. If no linear layer can do this, the
/// weight is dequantized.
///
/// The rewrite is refused if a value between the two layers is an output or has another reader, because the order of its columns changes.
pub(super) fn run(
    graph: &mut Graph,
    ordered: &BTreeMap<String, Format>,
    report: &mut Report,
) -> Result<(), GraphError> {
    for id in graph.topological() {
        let Op::Linear { .. } = graph.op(id) else {
            continue;
        };
        let Some(weight) = graph.operand(id, "weight") else {
            continue;
        };
        let Op::Weight(expr) = graph.op(weight) else {
            continue;
        };
        if !expr
            .stored()
            .iter()
            .any(|&(name, _)| ordered.contains_key(name))
        {
            continue;
        }
        match reordered(graph, id, expr) {
            Ok(found) => found.rewrite(graph)?,
            Err(condition) => {
                let at = graph.node(id).name.clone();
                let condition = format!(
                    "its inputs are not in the order of the quantization groups (`desc_act`), and {condition}; its weight is dequantized"
                );
                report.refuse(NAME, at, condition);
            }
        }
    }
    Ok(())
}

/// New weights and biases of two linear layers.
struct Reordered {
    /// Linear layer, name of its operand, and the operand's new value.
    operands: Vec<(NodeId, &'static str, WeightExpr)>,
}

impl Reordered {
    fn rewrite(self, graph: &mut Graph) -> Result<(), GraphError> {
        for (layer, slot, expr) in self.operands {
            let Some(old) = graph.operand(layer, slot) else {
                continue;
            };
            let name = format!("{}.in_order", graph.node(old).name);
            let new = graph.add(name, Op::Weight(expr), &[])?;
            let mut operands = graph.operands(layer);
            let slots = graph.op(layer).slots();
            if let Some(at) = slots.iter().position(|name| name == slot) {
                operands[at] = new;
            }
            graph.rewrite(layer, graph.op(layer).clone(), &operands)?;
        }
        Ok(())
    }
}

/// Returns new operands for the linear layer `id`, whose weight is `expr`, and for the linear layer that computes the inputs of `id`. The
/// new operands sort these inputs by the quantization groups of `expr`.
///
/// # Errors
/// Returns an error with the reason if no linear layer can compute the inputs in this order.
fn reordered(graph: &Graph, id: NodeId, expr: &WeightExpr) -> Result<Reordered, String> {
    let WeightExpr::Stored { name, dims } = expr else {
        return Err("several weights are computed together".to_owned());
    };
    let &[_, columns] = dims.as_slice() else {
        return Err("the weight is not a matrix".to_owned());
    };
    let by_dims = [dims[0], columns];
    // Find the linear layer that computes the inputs. Operators that treat all columns alike may follow it.
    let (mut reader, mut parts) = (id, 1);
    let layer = loop {
        let x = graph.operand(reader, "x");
        let x = x.ok_or_else(|| "they are not computed".to_owned())?;
        if graph.sole_consumer(x) != Some(reader) {
            return Err(format!("{} has other readers", quoted(graph, x)));
        }
        match graph.op(x) {
            Op::Activate(_) => {}
            Op::Gate(_) if parts == 1 => parts = 2,
            Op::Linear { epilogue } if !epilogue.residual => break x,
            op => {
                return Err(format!(
                    "they are computed by {} ({}), which has no rows to reorder",
                    quoted(graph, x),
                    op.name()
                ));
            }
        }
        reader = x;
    };
    let in_order = |expr: &WeightExpr| match expr {
        WeightExpr::Stored { name: own, dims }
            if dims
                .first()
                .is_some_and(|rows| rows.is_multiple_of(columns)) =>
        {
            Ok(WeightExpr::OrderedRows {
                name: own.clone(),
                dims: dims.clone(),
                by: name.clone(),
                by_dims,
            })
        }
        _ => Err("the rows of the weight that computes them cannot be reordered".to_owned()),
    };
    let mut operands = Vec::new();
    for slot in ["weight", "bias"] {
        let Some(operand) = graph.operand(layer, slot) else {
            continue;
        };
        let Op::Weight(expr) = graph.op(operand) else {
            return Err(format!("{} is computed", quoted(graph, operand)));
        };
        if expr.dims().first() != Some(&(parts * columns)) {
            return Err("the weight that computes them has another number of rows".to_owned());
        }
        let expr = match expr {
            WeightExpr::ConcatRows(all) => {
                let all = all.iter().map(in_order).collect::<Result<_, _>>()?;
                WeightExpr::ConcatRows(all)
            }
            one => in_order(one)?,
        };
        operands.push((layer, slot, expr));
    }
    let expr = WeightExpr::OrderedColumns {
        name: name.clone(),
        dims: by_dims,
    };
    operands.push((id, "weight", expr));
    Ok(Reordered { operands })
}

#[cfg(test)]
mod tests {
    use super::super::{
        Options, optimize,
        tests::{
            interpret::{Batch, evaluate},
            models::Decoder,
        },
    };
    use super::*;

    /// Maps the name of each stored weight of a linear layer to the format int4.
    fn ordered(graph: &Graph) -> BTreeMap<String, Format> {
        let nodes = graph.topological().into_iter();
        let weights = nodes.filter_map(|id| match graph.op(id) {
            Op::Linear { .. } => graph.operand(id, "weight"),
            _ => None,
        });
        let names = weights.flat_map(|id| match graph.op(id) {
            Op::Weight(expr) => expr.stored().iter().map(|s| s.0.to_owned()).collect(),
            _ => Vec::new(),
        });
        names.map(|name| (name, Format::INT4)).collect()
    }

    #[test]
    fn only_layers_after_an_activation_are_put_in_order_and_results_stay() {
        for bias in [false, true] {
            let decoder = Decoder {
                bias,
                ..Decoder::SMALL
            };
            let (plain, _) = optimize(decoder.build(), &Options::default()).unwrap();
            let mut graph = plain.clone();
            let mut report = Report::default();
            let all = ordered(&graph);
            run(&mut graph, &all, &mut report).unwrap();
            graph.prune();
            graph.verify().unwrap();
            let nodes = graph.topological();
            let in_order = |id: &&NodeId| {
                let weight = graph.operand(**id, "weight").map(|id| graph.op(id));
                matches!(weight, Some(Op::Weight(WeightExpr::OrderedColumns { .. })))
            };
            let names = nodes.iter().filter(in_order);
            let names: Vec<&str> = names.map(|&id| graph.node(id).name.as_str()).collect();
            assert_eq!(names.len(), 2, "{names:?}");
            let refused = format!("{:?}", report.entries);
            assert!(
                refused.contains("which has no rows to reorder"),
                "{refused}"
            );
            let batch = Batch::new(&[3, 1, 5]);
            let (want, got) = (evaluate(&plain, &batch), evaluate(&graph, &batch));
            for (name, id) in plain.outputs() {
                let value = &plain.node(*id).name;
                for (want, got) in want[value].iter().zip(&got[value]) {
                    assert!((want - got).abs() < 1e-9, "{name}: {got}, expected {want}");
                }
            }
            assert!(want.keys().any(|name| want[name] != got[name]));
        }
    }
}
