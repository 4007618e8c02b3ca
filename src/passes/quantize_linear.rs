//! Quantization of the weights of linear layers.

use std::collections::HashSet;

use super::{Entry, Options, Report, quantize_inputs};
use crate::{
    graph::{Graph, GraphError, NodeId, Op, WeightExpr},
    tensor::{Format, Values},
};

/// Name of the pass in reports.
pub(super) const NAME: &str = "quantize_linear";

/// First words of the sentence that a report prints about a linear layer.
const WEIGHT: &str = "its weight is";

/// Stores the weight of every linear layer in the format of the options: `linear(x, w)` becomes `linear(x, quantize(w))`.
///
/// - Other readers of a weight, such as the embedding of a tied head, read it unquantized.
/// - A format with larger errors than int8 is not applied to output heads.
/// - A weight that keeps its published format has this format in all linear layers, including heads.
///
/// With `fp8_inputs`, the input of an fp8 linear layer is also converted to E4M3 if a bound of this input is known (`quantize_inputs`).
///
/// This pass changes results, so it is not in [`all`](super::all). It runs after all passes of that list, and only on request.
pub(super) fn run(
    graph: &mut Graph,
    options: &Options,
    report: &mut Report,
) -> Result<(), GraphError> {
    let inputs = options.fp8_inputs && !options.without.contains(quantize_inputs::NAME);
    for id in graph.topological() {
        let Op::Linear { epilogue } = *graph.op(id) else {
            continue;
        };
        let mut operands = graph.operands(id);
        let Some(weight) = graph.operand(id, "weight") else {
            continue;
        };
        let Op::Weight(expr) = graph.op(weight) else {
            continue;
        };
        let format = match options.quantize {
            Some(format) => format,
            None => match published(expr, options) {
                Ok(None) => continue,
                Ok(Some(format)) => format,
                Err(condition) => {
                    report.refuse(NAME, graph.node(id).name.clone(), condition);
                    continue;
                }
            },
        };
        let is_chosen = options.quantize.is_some();
        if is_chosen && !reaches_heads(format) && is_head(graph, id) {
            report.refuse(
                NAME,
                graph.node(id).name.clone(),
                format!("a head keeps its storage type, because {format} would change results more than in other layers"),
            );
            continue;
        }
        if inputs && is_chosen && format == Format::FP8 {
            let at = graph.node(id).name.clone();
            match quantize_inputs::rewrite(graph, id, epilogue)? {
                Ok(()) => {
                    report.entries.push(Entry::Quantized {
                        pass: quantize_inputs::NAME,
                        at,
                        what: WEIGHT,
                        format: format!(
                            "{format}, and its input in E4M3 with a scale that bounds it"
                        ),
                    });
                    continue;
                }
                Err(condition) => report.refuse(quantize_inputs::NAME, at, condition),
            }
        }
        let quantized = quantized(graph, weight, format)?;
        for operand in operands.iter_mut().filter(|o| **o == weight) {
            *operand = quantized;
        }
        graph.rewrite(id, Op::Linear { epilogue }, &operands)?;
        report.entries.push(Entry::Quantized {
            pass: NAME,
            at: graph.node(id).name.clone(),
            what: WEIGHT,
            format: format.to_string(),
        });
    }
    Ok(())
}

/// Returns the format in which all tensors of a weight are published; `None` if no tensor is quantized.
///
/// # Errors
/// Returns an error if the tensors have different formats.
fn published(expr: &WeightExpr, options: &Options) -> Result<Option<Format>, String> {
    let formats = match expr {
        WeightExpr::OrderedColumns { .. } => &options.ordered,
        _ => &options.published,
    };
    let mut parts = expr.stored().into_iter();
    let first = parts.next().and_then(|(name, _)| formats.get(name));
    match parts.find(|(name, _)| formats.get(*name) != first) {
        None => Ok(first.copied()),
        Some((name, _)) => Err(format!(
            "`{name}` is published in another format than other parts of the weight; all of them are dequantized"
        )),
    }
}

/// Returns whether the weights of output heads ([`is_head`]) are quantized to this format, like those of other linear layers.
fn reaches_heads(format: Format) -> bool {
    match format {
        Format::Plain(_) => true,
        Format::Scaled(scaled) => scaled.values == Values::Int8,
        Format::E4m3 => false,
    }
}

/// Returns whether a linear layer is a head: no other linear layer or norm is between its result and the outputs.
fn is_head(graph: &Graph, id: NodeId) -> bool {
    let mut reached = graph.consumers(id);
    let mut seen: HashSet<NodeId> = reached.iter().copied().collect();
    while let Some(reader) = reached.pop() {
        if matches!(
            graph.op(reader),
            Op::Linear { .. }
                | Op::LayerNorm { .. }
                | Op::ScaledLinear { .. }
                | Op::BiasResidualLayerNorm { .. }
                | Op::RmsNorm { .. }
        ) {
            return false;
        }
        let more = graph.consumers(reader).into_iter();
        reached.extend(more.filter(|&id| seen.insert(id)));
    }
    true
}

/// Returns the node of the weight in `format`, adding it if necessary.
fn quantized(graph: &mut Graph, weight: NodeId, format: Format) -> Result<NodeId, GraphError> {
    let op = Op::Quantize(format);
    let known = graph
        .consumers(weight)
        .into_iter()
        .find(|&reader| *graph.op(reader) == op);
    match known {
        Some(known) => Ok(known),
        None => graph.add(
            format!("{}.{format}", graph.node(weight).name),
            op,
            &[weight],
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::{
        Options, optimize,
        tests::{
            interpret::{Batch, evaluate},
            models::Encoder,
        },
    };
    use crate::{
        graph::{Graph, Op},
        tensor::{DType, Format},
    };

    #[test]
    fn weights_keep_their_published_formats_unless_they_are_multiplied_with_others() {
        let graph = Encoder::SMALL.build();
        let (fused, _) = optimize(graph.clone(), &Options::default()).unwrap();
        let stored = |graph: &Graph, id| match graph.op(id) {
            Op::Weight(expr) => expr.stored().iter().map(|s| s.0.to_owned()).collect(),
            _ => Vec::new(),
        };
        let layers = fused.topological().into_iter();
        let layers: Vec<(String, Vec<String>)> = layers
            .filter(|&id| matches!(fused.op(id), Op::Linear { .. }))
            .map(|id| {
                let weight = fused.operand(id, "weight").unwrap();
                (fused.node(id).name.clone(), stored(&fused, weight))
            })
            .collect();
        let (several, one) = (
            layers.iter().find(|(_, parts)| parts.len() > 1).unwrap(),
            layers.iter().find(|(_, parts)| parts.len() == 1).unwrap(),
        );
        // For one layer, all parts of the weight are published in a quantized format. For another layer, all parts except the first are.
        let mut published: BTreeMap<String, Format> = BTreeMap::new();
        published.insert(one.1[0].clone(), Format::FP8);
        for part in &several.1[1..] {
            published.insert(part.clone(), Format::INT4);
        }
        let options = Options {
            published,
            ..Options::default()
        };
        let (graph, report) = optimize(graph, &options).unwrap();
        let quantized = |name: &str| {
            let mut nodes = graph.topological().into_iter();
            let id = nodes.find(|&id| graph.node(id).name == name).unwrap();
            graph.op(graph.operand(id, "weight").unwrap()).clone()
        };
        assert_eq!(quantized(&one.0), Op::Quantize(Format::FP8));
        assert!(matches!(quantized(&several.0), Op::Weight(_)));
        let refused = report.entries.iter().filter_map(|entry| match entry {
            super::Entry::Refused {
                pass,
                at,
                condition,
            } if *pass == super::NAME => Some((at.as_str(), condition.as_str())),
            _ => None,
        });
        let refused: Vec<_> = refused.collect();
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert_eq!(refused[0].0, several.0);
        assert!(refused[0].1.contains(several.1[1].as_str()), "{refused:?}");
    }

    #[test]
    fn the_weights_of_linear_layers_are_rounded_and_no_others() {
        const HEAD: &str = "pooler.";
        let graph = Encoder::SMALL.build();
        let (plain, fusions) = optimize(graph.clone(), &Options::default()).unwrap();
        let batch = Batch::new(&[3, 1, 5]);
        let want = evaluate(&plain, &batch);
        let formats = [
            (Format::INT8, true, 0.03),
            (Format::Plain(DType::BF16), true, 0.03),
            (Format::FP8, false, 0.15),
            (Format::INT4, false, 0.4),
        ];
        for (format, with_head, bound) in formats {
            let options = Options {
                quantize: Some(format),
                ..Options::default()
            };
            let (graph, report) = optimize(graph.clone(), &options).unwrap();
            let linear = |op: &Op| matches!(op, Op::Linear { .. });
            let nodes = graph.topological();
            let layers: Vec<_> = nodes.iter().filter(|&&id| linear(graph.op(id))).collect();
            let kept = |id| {
                let weight = graph.operand(id, "weight").unwrap();
                !with_head && graph.node(weight).name.starts_with(HEAD)
            };
            let n_kept = layers.iter().filter(|&&&id| kept(id)).count();
            assert_eq!(n_kept, usize::from(!with_head));
            for &&id in &layers {
                let weight = graph.operand(id, "weight").unwrap();
                let is_quantized = *graph.op(weight) == Op::Quantize(format);
                assert_eq!(is_quantized, !kept(id), "{}", graph.node(id).name);
            }
            for id in &nodes {
                let reads = graph.operands(*id);
                let quantized = |id| matches!(graph.op(id), Op::Quantize(_));
                assert!(linear(graph.op(*id)) || !reads.into_iter().any(quantized));
            }
            // Each layer is either quantized or refused.
            assert_eq!(report.entries.len() - fusions.entries.len(), layers.len());
            let is_quantized =
                |entry: &&super::Entry| matches!(entry, super::Entry::Quantized { .. });
            let n_quantized = report.entries.iter().filter(is_quantized).count();
            assert_eq!(n_quantized, layers.len() - n_kept);
            let got = evaluate(&graph, &batch);
            for &(_, output) in plain.outputs() {
                let name = &plain.node(output).name;
                let (want, got) = (&want[name], &got[name]);
                let largest = want.iter().fold(0.0f64, |most, v| most.max(v.abs()));
                let off = want.iter().zip(got).map(|(a, b)| (a - b).abs());
                let off = off.fold(0.0f64, f64::max) / largest;
                assert!(off > 0.0 && off < bound, "{name} in {format}: {off}");
            }
        }
    }
}
