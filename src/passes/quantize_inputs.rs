//! Converts the inputs of fp8 linear layers to E4M3, the format of their weights.
//!
//! An input is divided by a single scale, which is computed from the weights when the model is loaded. The scale maps the largest possible
//! magnitude of the input ([`Bound`]) to that of E4M3. E4M3 has 3 mantissa bits over 15 binary orders of magnitude, so a bound that is
//! several times too large costs precision only for the smallest values. No calibration batch is needed, nothing overflows, and the kernel
//! that computes an input also converts it.

use crate::{
    graph::{Bound, BoundLinear, Graph, GraphError, NodeId, Op, WeightExpr},
    ops::{Epilogue, HeadView},
    tensor::{Format, Size},
};

/// Name of the rewrite, used in reports and to disable it.
pub const NAME: &str = "quantize_inputs";

/// Both dimensions of a weight must be multiples of this number. The rows of a weight in E4M3 then start at multiples of 16 bytes.
const STEP: u64 = 16;

/// Rewrites `linear(x, w)` to `scaled_linear(to_e4m3(x), quantize(w), scale)`.
///
/// The inner result is an error with the reason if the layer's input cannot be converted. The graph is then unchanged.
pub(super) fn rewrite(
    graph: &mut Graph,
    id: NodeId,
    epilogue: Epilogue,
) -> Result<Result<(), String>, GraphError> {
    let (Some(x), Some(weight)) = (graph.operand(id, "x"), graph.operand(id, "weight")) else {
        return Ok(Err("it has no input".to_owned()));
    };
    let Some(rows) = parts(graph, weight) else {
        return Ok(Err("its weight is computed, not stored".to_owned()));
    };
    let dims = graph.shape(weight).0.iter();
    let odd = dims.filter_map(Size::as_constant).find(|n| n % STEP != 0);
    if let Some(odd) = odd {
        return Ok(Err(format!(
            "its weight has {odd} rows or columns, and the kernels need a multiple of {STEP}"
        )));
    }
    let Some(bound) = bound(graph, x) else {
        return Ok(Err(
            "no bound of its input is known; norms have one, and linear layers, gates and attention after a norm".to_owned(),
        ));
    };
    let converted = converted(graph, x, &bound)?;
    let name = graph.node(weight).name.clone();
    let scales = WeightExpr::ProductScales {
        weight: rows,
        input: bound,
    };
    // The scales are named after the layer, because layers with different inputs may read the same weight.
    let scale = graph.add(
        format!("{}.product_scales", graph.node(id).name),
        Op::Weight(scales),
        &[],
    )?;
    let format = Op::Quantize(Format::E4m3);
    let mut known = graph.consumers(weight).into_iter();
    let quantized = match known.find(|&reader| *graph.op(reader) == format) {
        Some(known) => known,
        None => graph.add(format!("{name}.e4m3"), format, &[weight])?,
    };
    let mut operands = vec![converted, quantized, scale];
    operands.extend(
        ["bias", "residual"]
            .iter()
            .filter_map(|slot| graph.operand(id, slot)),
    );
    graph.rewrite(id, Op::ScaledLinear { epilogue }, &operands)?;
    Ok(Ok(()))
}

/// Returns the node that converts `x` to E4M3, adding it if necessary.
fn converted(graph: &mut Graph, x: NodeId, bound: &Bound) -> Result<NodeId, GraphError> {
    let mut known = graph.consumers(x).into_iter();
    if let Some(known) = known.find(|&reader| *graph.op(reader) == Op::ToE4m3) {
        return Ok(known);
    }
    let name = graph.node(x).name.clone();
    let scale = WeightExpr::Scale(bound.clone());
    let scale = graph.add(format!("{name}.e4m3_scale"), Op::Weight(scale), &[])?;
    graph.add(format!("{name}.e4m3"), Op::ToE4m3, &[x, scale])
}

/// Returns the bound of a value; `None` if none is known.
fn bound(graph: &Graph, id: NodeId) -> Option<Bound> {
    let stored = |slot| parts(graph, graph.operand(id, slot)?);
    match graph.op(id) {
        Op::LayerNorm { .. } | Op::BiasResidualLayerNorm { .. } | Op::EmbeddingLayerNorm { .. } => {
            Some(Bound {
                gamma: stored("gamma")?,
                beta: stored("beta")?,
                linear: None,
            })
        }
        Op::RmsNorm {
            heads: 1,
            from: 0,
            centered: false,
            ..
        } if graph.shape(id) == graph.shape(graph.operand(id, "x")?) => Some(Bound {
            gamma: stored("gamma")?,
            beta: Vec::new(),
            linear: None,
        }),
        Op::Linear { epilogue } | Op::ScaledLinear { epilogue } if !epilogue.residual => {
            linear(graph, id, None, false)
        }
        // The magnitude of an activation's result is at most that of its operand.
        Op::Activate(_) => bound(graph, graph.operand(id, "x")?),
        Op::Gate(_) => {
            let x = graph.operand(id, "x")?;
            match graph.op(x) {
                Op::Linear { epilogue } | Op::ScaledLinear { epilogue }
                    if epilogue.activation.is_none() && !epilogue.residual =>
                {
                    linear(graph, x, None, true)
                }
                _ => None,
            }
        }
        // The result is a weighted mean of the rows of `v`, so it has the bound of `v`.
        Op::Attention(of) => mean_of(graph, id, of.v, of.kv_heads, of.head),
        &Op::Context {
            kv_heads, head, v, ..
        } => mean_of(graph, id, v, kv_heads, head),
        Op::FirstToken | Op::LastToken => bound(graph, graph.operand(id, "x")?),
        _ => None,
    }
}

/// Returns the bound of weighted means of the rows of `v`. Returns `None` if `v` is not a range of columns of a linear layer's result, or
/// if no bound of these columns is known.
fn mean_of(graph: &Graph, id: NodeId, view: HeadView, kv_heads: u32, head: u32) -> Option<Bound> {
    let values = graph.operand(id, "v")?;
    let columns = u64::from(kv_heads) * u64::from(head);
    let from = match view {
        HeadView::TokenMajor { offset, .. } => offset.into(),
        HeadView::HeadMajor => return None,
    };
    match graph.op(values) {
        Op::Linear { epilogue } | Op::ScaledLinear { epilogue }
            if *epilogue == Epilogue::new(epilogue.bias, None) =>
        {
            linear(graph, values, Some((from, columns)), false)
        }
        _ => None,
    }
}

/// Returns the bound of the outputs of a linear layer. Returns `None` if its input is not a norm, or if [`parts`] of its weight or bias is
/// `None`. `columns` is the first output and the number of outputs; `None` means all outputs.
fn linear(graph: &Graph, id: NodeId, columns: Option<(u64, u64)>, gated: bool) -> Option<Bound> {
    let mut x = graph.operand(id, "x")?;
    if *graph.op(x) == Op::ToE4m3 {
        x = graph.operand(x, "x")?;
    }
    let norm = bound(graph, x).filter(|bound| bound.linear.is_none())?;
    let weight = parts(graph, graph.operand(id, "weight")?)?;
    let bias = match graph.operand(id, "bias") {
        Some(bias) => parts(graph, bias)?,
        None => Vec::new(),
    };
    let rows = graph.shape(id).0.last()?.as_constant()?;
    let (from, outputs) = columns.unwrap_or((0, rows));
    Some(Bound {
        linear: Some(BoundLinear {
            weight,
            bias,
            from,
            outputs,
            gated,
        }),
        ..norm
    })
}

/// Returns the tensors that a weight concatenates, before quantization. Returns `None` unless each of them is filled with zeros, filled
/// with ones, or read from the checkpoint (possibly transposed, sliced, or with 1 added).
fn parts(graph: &Graph, mut id: NodeId) -> Option<Vec<WeightExpr>> {
    if matches!(graph.op(id), Op::Quantize(_)) {
        id = graph.operand(id, "weight")?;
    }
    let Op::Weight(expr) = graph.op(id) else {
        return None;
    };
    let parts = match expr {
        WeightExpr::ConcatRows(parts) => parts.clone(),
        one => vec![one.clone()],
    };
    let is_stored = |part: &WeightExpr| {
        matches!(
            part,
            WeightExpr::Stored { .. }
                | WeightExpr::Transposed { .. }
                | WeightExpr::Rows { .. }
                | WeightExpr::PlusOne { .. }
                | WeightExpr::Zeros { .. }
                | WeightExpr::Ones { .. }
        )
    };
    parts.iter().all(is_stored).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::super::{
        Options, Report, optimize,
        tests::{
            interpret::{Batch, evaluate},
            models::{Decoder, Encoder},
        },
    };
    use crate::{
        graph::{Graph, NodeId, Op},
        tensor::Format,
    };

    fn in_fp8(graph: &Graph, without: &[&str]) -> (Graph, Report) {
        let options = Options {
            quantize: Some(Format::FP8),
            fp8_inputs: true,
            without: without.iter().map(|&name| name.to_owned()).collect(),
            ..Options::default()
        };
        optimize(graph.clone(), &options).unwrap()
    }

    fn encoder() -> Graph {
        let encoder = Encoder {
            inner: 32,
            ..Encoder::SMALL
        };
        encoder.build()
    }

    fn decoder() -> Graph {
        Decoder::SMALL.build().without_caches()
    }

    #[test]
    fn inputs_are_within_their_bounds_and_results_near_the_exact_ones() {
        // The decoder's gates have 24 columns, which is not a multiple of 16. The layers that read them are therefore not converted.
        for (graph, n_products) in [(encoder(), 8), (decoder(), 6)] {
            let (plain, _) = optimize(graph.clone(), &Options::default()).unwrap();
            let batch = Batch::new(&[3, 1, 5]);
            let want = evaluate(&plain, &batch);
            let (graph, report) = in_fp8(&graph, &[]);
            let values = evaluate(&graph, &batch);
            let nodes = graph.topological();
            let is_product = |id: &&NodeId| matches!(graph.op(**id), Op::ScaledLinear { .. });
            let n = nodes.iter().filter(is_product).count();
            assert_eq!(n, n_products, "{report:?}");
            for &id in nodes.iter().filter(|&&id| *graph.op(id) == Op::ToE4m3) {
                let name = |slot| graph.node(graph.operand(id, slot).unwrap()).name.clone();
                let scale = values[&name("out_scale")][0];
                let x = &values[&name("x")];
                let largest = x.iter().fold(0.0f64, |most, v| most.max(v.abs())) / scale;
                // The values must not be far below the bound, because small values would then be lost.
                assert!((4.0..=448.0).contains(&largest), "{}: {largest}", name("x"));
            }
            for &(_, output) in plain.outputs() {
                let name = &plain.node(output).name;
                let (want, got) = (&want[name], &values[name]);
                let largest = want.iter().fold(0.0f64, |most, v| most.max(v.abs()));
                let off = want.iter().zip(got).map(|(a, b)| (a - b).abs());
                let off = off.fold(0.0f64, f64::max) / largest;
                assert!(off > 0.0 && off < 0.3, "{name}: {off}");
            }
        }
    }

    #[test]
    fn inputs_without_a_bound_or_of_odd_width_stay_as_they_are() {
        let is_scaled = |op: &Op| matches!(op, Op::ScaledLinear { .. });
        let count = |graph: &Graph| {
            let nodes = graph.topological().into_iter();
            nodes.filter(|&id| is_scaled(graph.op(id))).count()
        };
        // Four layers have 24 inputs or 24 outputs, which is not a multiple of 16, so they are not converted.
        assert_eq!(count(&in_fp8(&Encoder::SMALL.build(), &[]).0), 4);
        assert_eq!(count(&in_fp8(&encoder(), &[super::NAME]).0), 0);
    }
}
