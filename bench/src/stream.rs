//! Times a sequence of requests of random lengths in three ways: launched kernel by kernel, with CUDA graphs for exact shapes, and with
//! CUDA graphs for buckets of shapes.

use std::{path::PathBuf, process::ExitCode};

use gemmule::{
    Batch, Engine, EngineError, GraphChoice,
    cli::{Bars, Outcome, Runnable, align_right, human, print, table, write_json},
    engine::DeviceName,
};
use miette::miette;
use serde::Serialize;

use crate::requests::Requests;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: Runnable,
    #[command(flatten)]
    requests: Requests,
    /// Write the times of every request to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const CHOICES: [(&str, GraphChoice); 3] = [
    ("none", GraphChoice::Off),
    ("exact shapes", GraphChoice::Exact),
    ("buckets", GraphChoice::Buckets),
];

/// Results of all requests with one choice of CUDA graphs. `host_us` and `device_ms` have one value per request.
#[derive(Serialize)]
struct Stream {
    graphs: &'static str,
    /// Time from receiving the batch to the last launch, in microseconds on the host.
    host_us: Vec<f32>,
    /// Time from the upload of the ids to the end of the last kernel, in milliseconds on the device.
    device_ms: Vec<f32>,
    /// Number of requests that replayed a graph (`replayed`) and that captured one (`captured`).
    replayed: u64,
    captured: u64,
    kept: usize,
    /// Bytes of intermediate tensors held after the last request.
    held: u64,
}

pub(crate) fn run(args: Args) -> Outcome {
    let engine = Runnable::build(args.model.builder()?.outputs(["last_hidden_state"]))?;
    if !matches!(engine.device(), DeviceName::Cuda(_)) {
        return Err(miette!(
            "CUDA graphs can only be compared on a CUDA device, but the model runs on the {}; use --device cuda:N",
            engine.device()
        ));
    }
    let requests = &args.requests;
    requests.check(args.model.name(), engine.limits().longest)?;
    let batches = requests.batches(&requests.lens(), &engine.limits())?;
    // Run two requests first, so that one-time costs of the process are not included.
    for batch in batches.iter().take(2) {
        engine.session()?.run(batch)?;
    }
    let streams: Vec<Stream> = CHOICES
        .iter()
        .map(|&(name, graphs)| stream(&engine, name, graphs, &batches))
        .collect::<Result<_, _>>()?;
    print(&format!("{}\n", shown(&streams)))?;
    print(&format!(
        "{}, {}, {}; one run of each request, ids to last hidden state\n",
        engine.device(),
        engine.precision(),
        requests.in_words(),
    ))?;
    if let Some(file) = &args.json {
        write_json(file, &streams)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn stream(
    engine: &Engine,
    name: &'static str,
    graphs: GraphChoice,
    batches: &[Batch],
) -> Result<Stream, EngineError> {
    let mut session = engine.session_replaying(graphs)?;
    let (mut host_us, mut device_ms) = (Vec::new(), Vec::new());
    let bars = Bars::new();
    for (i, batch) in batches.iter().enumerate() {
        let timing = session.time(batch, 0, 1)?;
        host_us.extend(timing.host_us);
        device_ms.extend(timing.ms);
        bars.show(name, i + 1, batches.len());
    }
    let used = session.graph_use();
    Ok(Stream {
        graphs: name,
        host_us,
        device_ms,
        replayed: used.replayed,
        captured: used.captured,
        kept: used.kept,
        held: session.memory().activations,
    })
}

/// Returns the `p`-quantile: the smallest of `values` such that at least a fraction `p` of all values is not larger.
fn quantile(values: &[f32], p: f64) -> f32 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f32::total_cmp);
    let at = (p * sorted.len() as f64).ceil() as usize;
    sorted
        .get(at.saturating_sub(1))
        .copied()
        .unwrap_or(f32::NAN)
}

fn shown(streams: &[Stream]) -> comfy_table::Table {
    let header = [
        "graphs",
        "host us, median",
        "p99",
        "device ms, median",
        "p99",
        "replayed",
        "captured",
        "kept",
        "held",
    ];
    let mut rows = table(&header);
    for s in streams {
        let runs = s.host_us.len().max(1) as f64;
        rows.add_row([
            s.graphs.to_owned(),
            format!("{:.1}", quantile(&s.host_us, 0.5)),
            format!("{:.1}", quantile(&s.host_us, 0.99)),
            format!("{:.4}", quantile(&s.device_ms, 0.5)),
            format!("{:.4}", quantile(&s.device_ms, 0.99)),
            format!("{:.1} %", 100.0 * s.replayed as f64 / runs),
            s.captured.to_string(),
            s.kept.to_string(),
            human(s.held),
        ]);
    }
    align_right(&mut rows, 1..header.len());
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_measured_values() {
        let values: Vec<f32> = (1..=200).rev().map(|i| i as f32).collect();
        assert_eq!(quantile(&values, 0.5), 100.0);
        assert_eq!(quantile(&values, 0.99), 198.0);
        assert_eq!(quantile(&values[..1], 0.5), 200.0);
        assert!(quantile(&[], 0.5).is_nan());
    }
}
