//! Quantization of the KV cache.

use super::{Entry, Report};
use crate::{
    graph::{Graph, GraphError, Op},
    tensor::Format,
};

/// Name in reports.
pub(super) const NAME: &str = "quantize_cache";

/// Stores every cache in `format`: `attention(q, cache(k), cache(v))` becomes `attention(q, cache(round(k)), cache(round(v)))`. All parts
/// of a model share blocks, so all caches have the same format.
///
/// This pass changes results, so it is not in [`all`](super::all). It runs after all passes of that list, and only on request.
pub(super) fn run(
    graph: &mut Graph,
    format: Format,
    report: &mut Report,
) -> Result<(), GraphError> {
    for id in graph.topological() {
        let mut op = graph.op(id).clone();
        let Op::Cache { format: stored, .. } = &mut op else {
            continue;
        };
        *stored = Some(format);
        let operands = graph.operands(id);
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

#[cfg(test)]
mod tests {
    use super::super::{
        Options, optimize,
        tests::{
            interpret::{Batch, evaluate},
            models::Decoder,
        },
    };
    use crate::{
        graph::Op,
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
}
