//! Quantization of the KV cache.

use super::{Entry, Report};
use crate::{
    graph::{CacheRows, Graph, GraphError, NodeId, Op, WeightExpr},
    tensor::Format,
};

/// Name of the pass in reports.
pub(super) const NAME: &str = "quantize_cache";

/// Stores every cache in `format`: `attention(q, cache(k), cache(v))` becomes `attention(q, cache(round(k)), cache(round(v)))`. All parts
/// of a model share the blocks of one KV cache, so all caches have the same format. With published scales, `cache(k)` becomes
/// `s · round(k / s)`, and each cache has its own scale s.
///
/// This pass changes results, so it is not in [`all`](super::all). It runs after all passes of that list, and only on request.
pub(super) fn run(
    graph: &mut Graph,
    format: Format,
    has_scales: bool,
    report: &mut Report,
) -> Result<(), GraphError> {
    for id in graph.topological() {
        let mut op = graph.op(id).clone();
        let Op::Cache {
            format: stored,
            scaled,
            ..
        } = &mut op
        else {
            continue;
        };
        *stored = Some(format);
        let mut operands = graph.operands(id);
        if format == Format::E4m3 && has_scales {
            *scaled = true;
            let name = format!("{}.scale", graph.node(id).name);
            let scale = WeightExpr::CacheScale {
                linear: linear(graph, id),
                rows: rows(graph, id),
            };
            operands.push(graph.add(name, Op::Weight(scale), &[])?);
        }
        graph.rewrite(id, op, &operands)?;
        report.entries.push(Entry::Quantized {
            pass: NAME,
            at: graph.node(id).name.clone(),
            what: "its rows are",
            format: format.to_string(),
        });
    }
    Ok(())
}

/// Returns whether attention reads the rows of a cache as keys or as values.
fn rows(graph: &Graph, cache: NodeId) -> CacheRows {
    let Op::Cache { name, .. } = graph.op(cache) else {
        return CacheRows::Keys;
    };
    let is_read = |id: &NodeId| match graph.op(*id) {
        Op::CrossCache { name: of, .. } => of == name,
        _ => *id == cache,
    };
    let mut read = graph.topological().into_iter().filter(is_read);
    let is_value = read.any(|id| {
        let readers = graph.consumers(id).into_iter();
        let mut values = readers.map(|reader| graph.operand(reader, "v"));
        values.any(|value| value == Some(id))
    });
    match is_value {
        true => CacheRows::Values,
        false => CacheRows::Keys,
    }
}

/// Finds the linear layer that computes the rows of a cache, and returns the layer's name in the checkpoint. If there is no such layer,
/// returns the name of the cache's node.
fn linear(graph: &Graph, cache: NodeId) -> String {
    let traced = || {
        let (mut value, mut column) = (cache, 0);
        loop {
            match graph.op(value) {
                Op::Cache { from, .. } | Op::Rotary { from, .. } | Op::RmsNorm { from, .. } => {
                    column += u64::from(*from);
                }
                Op::SliceColumns { start, .. } => column += u64::from(*start),
                Op::AddBias | Op::Scale { .. } => {}
                Op::Linear { .. } => {
                    let mut weight = graph.operand(value, "weight")?;
                    if let Op::Quantize(_) = graph.op(weight) {
                        weight = graph.operand(weight, "weight")?;
                    }
                    let Op::Weight(expr) = graph.op(weight) else {
                        return None;
                    };
                    match expr {
                        // A product with this matrix resizes the heads, so convert the column to that of the head before the resizing.
                        WeightExpr::ResizedHeads { from, to, .. } => column = column / to * from,
                        _ => {
                            let name = expr.name_of_row(column)?;
                            return Some(name.strip_suffix(".weight").unwrap_or(name));
                        }
                    }
                }
                _ => return None,
            }
            value = graph.operand(value, "x")?;
        }
    };
    traced().unwrap_or(&graph.node(cache).name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::{
        Options, optimize,
        tests::{
            interpret::{Batch, cache_scale, evaluate},
            models::Decoder,
        },
    };
    use crate::{
        graph::{CacheRows, Op, WeightExpr},
        tensor::{Format, e4m3},
    };

    #[test]
    fn keys_and_values_are_rounded_and_attention_reads_the_rounded_ones() {
        let graph = Decoder::SMALL.build();
        let options = |cache| Options {
            cache,
            ..Options::default()
        };
        let (plain, before) = optimize(graph.clone(), &options(None)).unwrap();
        let (stored, report) = optimize(graph, &options(Some(Format::E4m3))).unwrap();
        let batch = Batch::new(&[3, 1, 5]);
        let (want, got) = (evaluate(&plain, &batch), evaluate(&stored, &batch));
        let caches = stored.topological().into_iter();
        let caches = caches.filter(|&id| matches!(stored.op(id), Op::Cache { .. }));
        let caches: Vec<&str> = caches.map(|id| stored.node(id).name.as_str()).collect();
        assert_eq!(report.entries.len(), before.entries.len() + caches.len());
        let first = caches[0];
        let rounded = want[first]
            .iter()
            .map(|&v| f64::from(e4m3::round(v as f32)));
        assert!(rounded.eq(got[first].iter().copied()), "{first}");
        for (name, want) in &want {
            let largest = want.iter().fold(0.0f64, |most, v| most.max(v.abs()));
            for (want, got) in want.iter().zip(&got[name]) {
                assert!(
                    (want - got).abs() <= 0.2 * largest,
                    "{name}: {got}, expected {want}"
                );
            }
        }
        assert!(want != got);
    }

    #[test]
    fn published_scales_are_those_of_the_layers_that_compute_keys_and_values() {
        let graph = Decoder {
            normed: true,
            turned: true,
            bias: true,
            ..Decoder::SMALL
        };
        let options = |cache_scales| Options {
            cache: Some(Format::E4m3),
            cache_scales,
            ..Options::default()
        };
        let (plain, _) = optimize(graph.build(), &options(false)).unwrap();
        let (scaled, _) = optimize(graph.build(), &options(true)).unwrap();
        let batch = Batch::new(&[3, 1, 5]);
        let (plain, values) = (evaluate(&plain, &batch), evaluate(&scaled, &batch));
        let caches = scaled.topological().into_iter();
        let caches = caches.filter(|&id| matches!(scaled.op(id), Op::Cache { .. }));
        let mut n = 0;
        for id in caches {
            let name = &scaled.node(id).name;
            let scale = scaled.operand(id, "scale").expect("it has one");
            let (stem, rows) = match name.ends_with("keys") {
                true => ("key", CacheRows::Keys),
                false => ("value", CacheRows::Values),
            };
            let (layer, _) = name.rsplit_once('.').expect("a layer");
            let linear = format!("{layer}.{stem}");
            let factor = cache_scale(&linear, rows);
            let expr = WeightExpr::CacheScale { linear, rows };
            assert_eq!(*scaled.op(scale), Op::Weight(expr), "{name}");
            // A row is divided by the scale and then rounded.
            for (got, unscaled) in values[name].iter().zip(&plain[name]) {
                let code = got / factor;
                assert_eq!(f64::from(e4m3::round(code as f32)), code, "{name}");
                assert!((got - unscaled).abs() <= 0.2 * unscaled.abs() + 1e-2);
            }
            n += 1;
        }
        assert_eq!(n, 2 * Decoder::SMALL.layers);
    }
}
