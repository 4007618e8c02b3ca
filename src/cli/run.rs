use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use miette::{IntoDiagnostic, WrapErr, miette};
use serde_json::{Value, json};

use super::{
    Outcome, align_right, human,
    model::{Runnable, chosen_by},
    print, print_json, table,
};
use crate::{
    Batch, Engine, EngineError, Output, Outputs,
    engine::TextEncoder,
    files::{self, Kind},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Runnable,
    /// A text (several times for several)
    #[arg(long = "text", value_name = "TEXT")]
    texts: Vec<String>,
    /// A file with one text a line
    #[arg(long, value_name = "FILE", conflicts_with = "texts")]
    texts_file: Option<PathBuf>,
    /// Token ids as JSON: [[101, 102], …], or {"ids": …, "mask": …} for a padded batch
    #[arg(long, value_name = "FILE", conflicts_with_all = ["texts", "texts_file"])]
    ids: Option<PathBuf>,
    /// Print a table of the similarities of the sentence embeddings
    #[arg(long)]
    similarities: bool,
    /// Print all values as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Outcome {
    let mut builder = args.model.builder()?;
    if args.similarities {
        builder = builder.outputs(["sentence_embedding"]);
    }
    // What is wrong with the input is known before kernels are compiled and weights loaded.
    let texts = args.texts()?;
    let began = Instant::now();
    let batch = args.batch(&texts)?;
    let encoding = began.elapsed();
    let engine = Runnable::build(builder)?;
    let mut session = engine.session()?;
    let began = Instant::now();
    let outputs = session.run(&batch)?;
    let first = began.elapsed();
    outputs.check_finite()?;
    let began = Instant::now();
    session.run(&batch)?;
    let again = began.elapsed();
    let memory = session.memory();
    if args.json {
        let values: serde_json::Map<String, Value> = outputs
            .iter()
            .map(|o| {
                (
                    o.name.clone(),
                    json!({"shape": o.shape, "values": o.values}),
                )
            })
            .collect();
        let report = json!({
            "device": engine.device().to_string(),
            "dtype": engine.program().dtype.name(),
            "kernels": engine.origins(),
            "lens": batch.lens(),
            "outputs": values,
            "seconds": {"first": first.as_secs_f64(), "again": again.as_secs_f64()},
            "bytes": {"weights": memory.weights, "activations": memory.activations, "batch": memory.batch_data},
        });
        print_json(&report)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.similarities {
        print(&similarities(&texts, outputs.get("sentence_embedding")?))?;
    } else {
        print(&summary(&outputs))?;
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

impl Args {
    fn texts(&self) -> Result<Vec<String>, EngineError> {
        match &self.texts_file {
            None => Ok(self.texts.clone()),
            Some(file) => {
                let text = files::text(file, Kind::Batch).map_err(EngineError::from)?;
                Ok(text
                    .lines()
                    .filter(|l| !l.trim().is_empty())
                    .map(str::to_owned)
                    .collect())
            }
        }
    }
}

impl Args {
    fn batch(&self, texts: &[String]) -> Result<Batch, miette::Report> {
        if let Some(file) = &self.ids {
            return ids(file);
        }
        if texts.is_empty() {
            return Err(match &self.texts_file {
                Some(file) => miette!("`{}` holds no text; expected one a line", file.display()),
                None => miette!("there is nothing to run on; give --text, --texts-file or --ids"),
            });
        }
        let folder = self.model.weights.as_ref().ok_or_else(|| {
            miette!("texts need the tokenizer.json of a checkpoint; give --weights, or --ids instead of texts")
        })?;
        Ok(TextEncoder::open(folder)?.encode(texts)?)
    }
}

/// Reads a batch of token ids, packed or padded.
fn ids(file: &Path) -> Result<Batch, miette::Report> {
    let text = files::text(file, Kind::Batch).map_err(EngineError::from)?;
    parse_ids(file, &text)
}

/// Reads a batch of token ids from JSON text; `file` is its name in errors.
pub fn parse_ids(file: &Path, text: &str) -> Result<Batch, miette::Report> {
    let expected = || {
        format!(
            "`{}`: expected [[101, 102], …], or {{\"ids\": [[…], …], \"mask\": [[…], …]}} with rows of one length",
            file.display()
        )
    };
    let value: Value = serde_json::from_str(text)
        .into_diagnostic()
        .wrap_err_with(expected)?;
    let rows = |value: &Value| serde_json::from_value::<Vec<Vec<u32>>>(value.clone());
    let (Some(padded), Some(mask)) = (value.get("ids"), value.get("mask")) else {
        let rows = rows(&value).into_diagnostic().wrap_err_with(expected)?;
        return Ok(Batch::from_sequences(&rows).map_err(EngineError::from)?);
    };
    let padded = rows(padded).into_diagnostic().wrap_err_with(expected)?;
    let mask = rows(mask).into_diagnostic().wrap_err_with(expected)?;
    let width = padded.first().map_or(0, Vec::len);
    if padded.iter().chain(&mask).any(|row| row.len() != width) {
        return Err(miette!("{}; the rows differ in length", expected()));
    }
    Ok(Batch::from_padded(&padded.concat(), &mask.concat(), width).map_err(EngineError::from)?)
}

/// Each output's shape and first values.
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

/// Cosines between all pairs; the embeddings have unit length.
fn similarities(texts: &[String], embeddings: &Output) -> String {
    let width = embeddings.shape.last().copied().unwrap_or(1).max(1) as usize;
    let vectors: Vec<&[f32]> = embeddings.values.chunks_exact(width).collect();
    let mut header = vec!["".to_owned(), "text".to_owned()];
    header.extend((1..=vectors.len()).map(|i| i.to_string()));
    let mut rows = table(&header.iter().map(String::as_str).collect::<Vec<_>>());
    for (i, a) in vectors.iter().enumerate() {
        let text: String = texts
            .get(i)
            .map_or(String::new(), |t| t.chars().take(56).collect());
        let mut row = vec![(i + 1).to_string(), text];
        row.extend(
            vectors
                .iter()
                .map(|b| format!("{:.3}", a.iter().zip(*b).map(|(x, y)| x * y).sum::<f32>())),
        );
        rows.add_row(row);
    }
    align_right(&mut rows, 2..2 + vectors.len());
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
    format!(
        "{rows}\ndevice: {}, {}\n{}",
        engine.device(),
        engine.program().dtype,
        chosen_by(engine).map_or_else(String::new, |line| format!("kernels: {line}\n"))
    )
}
