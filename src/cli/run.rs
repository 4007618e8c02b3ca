use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    Outcome, align_right, human,
    input::{Input, Read, Texts},
    model::Runnable,
    print, print_json, table,
};
use crate::{Engine, Output, Outputs, engine::LOGITS, model::EMBEDDING};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Runnable,
    #[command(flatten)]
    input: Input,
    /// Print a table of similarities between sentence embeddings
    #[arg(long)]
    similarities: bool,
    /// Print all values as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(mut args: Args) -> Outcome {
    args.input.check()?;
    let role = args.model.route(args.input.take_role())?;
    let builder = args.model.builder()?;
    // Check the input before kernels are compiled and weights are loaded.
    let began = Instant::now();
    let read = args.input.read(role, || args.model.opened())?;
    let encoding = began.elapsed();
    let engine = match args.similarities {
        true => args.model.build_for(builder, EMBEDDING)?,
        false => Runnable::build(builder)?,
    };
    let mut session = engine.session()?;
    let began = Instant::now();
    let outputs = session.run(&read.batch).map_err(|e| read.refused(e))?;
    let Read {
        texts, batch, late, ..
    } = read;
    let first = began.elapsed();
    outputs.check_finite()?;
    let began = Instant::now();
    session.run(&batch)?;
    let again = began.elapsed();
    let memory = session.memory();
    let scores = match (&texts, &late) {
        (Texts::Pairs(_), Some(late)) => Some(late.scores(&outputs)?),
        (Texts::Pairs(_), None) if outputs.get(LOGITS).is_ok() => Some(engine.scores(&outputs)?),
        _ => None,
    };
    if args.json {
        let values: serde_json::Map<String, Value> = outputs
            .iter()
            .chain(&scores)
            .map(|o| {
                (
                    o.name.clone(),
                    json!({"shape": o.shape, "values": o.values}),
                )
            })
            .collect();
        let mut report = json!({
            "device": engine.device().to_string(),
            "dtype": engine.precision().name(),
            "lens": batch.lens(),
            "outputs": values,
            "seconds": {"first": first.as_secs_f64(), "again": again.as_secs_f64()},
            "bytes": {"weights": memory.weights, "activations": memory.activations, "batch": memory.batch_data},
        });
        if let Some(by) = engine.chosen_by() {
            report["kernels"] = by.to_string().into();
        }
        print_json(&report)?;
        return Ok(ExitCode::SUCCESS);
    }
    match (&texts, &scores) {
        _ if args.similarities => print(&similarities(&texts, outputs.get(EMBEDDING)?))?,
        (Texts::Pairs(pairs), Some(scores)) => print(&scored(pairs, scores))?,
        _ => print(&summary(&outputs))?,
    }
    print(&times(&engine, encoding, first, again))?;
    print(&format!(
        "memory: weights {}, activations {}, batch data {}\n",
        human(memory.weights),
        human(memory.activations),
        human(memory.batch_data)
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Lists the shape and the first values of each output.
fn summary(outputs: &Outputs) -> String {
    let mut rows = table(&["output", "shape", "first values"]);
    for output in outputs.iter() {
        let first: Vec<String> = output
            .values
            .iter()
            .take(4)
            .map(|v| format!("{v:.5}"))
            .collect();
        rows.add_row([
            output.name.clone(),
            format!("{:?}", output.shape),
            format!("{} …", first.join(", ")),
        ]);
    }
    format!("{rows}\n")
}

/// Shortens a text to at most `n` characters.
fn shortened(text: &str, n: usize) -> String {
    match text.chars().count() > n {
        true => format!("{}…", text.chars().take(n - 1).collect::<String>()),
        false => text.to_owned(),
    }
}

/// Lists the cosine similarity of each pair of embeddings.
fn similarities(texts: &Texts, embeddings: &Output) -> String {
    let width = embeddings.shape.last().copied().unwrap_or(1).max(1) as usize;
    let vectors: Vec<&[f32]> = embeddings.values.chunks_exact(width).collect();
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
    let mut header = vec!["".to_owned(), "text".to_owned()];
    header.extend((1..=vectors.len()).map(|i| i.to_string()));
    let mut rows = table(&header.iter().map(String::as_str).collect::<Vec<_>>());
    for (i, a) in vectors.iter().enumerate() {
        let text = match texts {
            Texts::Single(texts) => texts.get(i).map(|text| shortened(text, 56)),
            Texts::Pairs(pairs) => pairs
                .get(i)
                .map(|(a, b)| shortened(&format!("{a} / {b}"), 56)),
            Texts::None => None,
        };
        let mut row = vec![(i + 1).to_string(), text.unwrap_or_default()];
        row.extend(vectors.iter().map(|b| {
            let lengths = (dot(a, a) * dot(b, b)).sqrt();
            format!("{:.3}", dot(a, b) / lengths.max(f32::MIN_POSITIVE))
        }));
        rows.add_row(row);
    }
    align_right(&mut rows, 2..2 + vectors.len());
    format!("{rows}\n")
}

/// Lists the score of each pair for each label.
fn scored(pairs: &[(String, String)], scores: &Output) -> String {
    let n_labels = scores.shape.get(1).copied().unwrap_or(1).max(1) as usize;
    let mut header = vec!["query".to_owned(), "document".to_owned()];
    match n_labels {
        1 => header.push("score".to_owned()),
        n => header.extend((0..n).map(|label| format!("label {label}"))),
    }
    let mut rows = table(&header.iter().map(String::as_str).collect::<Vec<_>>());
    for ((query, document), scores) in pairs.iter().zip(scores.values.chunks(n_labels)) {
        let mut row = vec![shortened(query, 40), shortened(document, 56)];
        row.extend(scores.iter().map(|score| format!("{score:.5}")));
        rows.add_row(row);
    }
    align_right(&mut rows, 2..2 + n_labels);
    format!("{rows}\n")
}

fn times(engine: &Engine, encoding: Duration, first: Duration, again: Duration) -> String {
    let t = engine.load_times();
    let ms = |d: Duration| format!("{:.1} ms", d.as_secs_f64() * 1e3);
    let mut rows = table(&["step", "time"]);
    rows.add_row(["description to program", &ms(t.compile)]);
    if t.cached + t.compiled > 0 {
        rows.add_row(["CUDA source", &ms(t.emit)]);
        let kernels = format!(
            "{} kernels compiled, {} from the cache",
            t.compiled, t.cached
        );
        rows.add_row(["cubins", &ms(t.jit), &kernels]);
    }
    rows.add_row(["weights", &ms(t.weights)]);
    rows.add_row(["reading the input", &ms(encoding)]);
    rows.add_row(["first run", &ms(first)]);
    rows.add_row(["second run", &ms(again)]);
    align_right(&mut rows, [1]);
    let chosen = engine.chosen_by();
    let chosen = chosen.map_or_else(String::new, |by| format!("kernels: {by}\n"));
    format!(
        "{rows}\ndevice: {}, {}\n{chosen}",
        engine.device(),
        engine.precision()
    )
}
