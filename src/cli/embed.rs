//! Embeds the texts of a large file.

use std::{
    collections::VecDeque,
    fs,
    path::PathBuf,
    process::ExitCode,
    sync::mpsc::sync_channel,
    thread,
    time::{Instant, UNIX_EPOCH},
};

use gemmule_corpus::{
    Embedded, Embedder, EmbedderError, Hooks, InputFormat, Job, Keep, OutputFormat, Progress,
    Vectors,
};
use indicatif::{ProgressBar, ProgressStyle};
use miette::{IntoDiagnostic, miette};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::{Outcome, model::Runnable, print, say};
use crate::{
    Engine, EngineError, Outputs,
    engine::{Pending, Pipeline, batches_of_texts},
    model::EMBEDDING,
    text::{Encoded, Folder, Input, Prompt, TextEncoder},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Runnable,
    /// File of texts: JSONL, CSV, TSV, Parquet, or lines, possibly compressed with gzip
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// Format of the input (jsonl, csv, tsv, parquet, lines) instead of the one that its name says
    #[arg(long, value_name = "FORMAT")]
    input_format: Option<InputFormat>,
    /// Column or field with the texts
    #[arg(long, value_name = "NAME", default_value = "text")]
    column: String,
    /// File of vectors: Parquet, Arrow, .npy or JSONL. Rows that cannot be embedded are listed in FILE.errors.jsonl
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Format of the output (parquet, arrow, npy, jsonl) instead of the one that its name says
    #[arg(long, value_name = "FORMAT")]
    output_format: Option<OutputFormat>,
    /// Columns of the input to copy to the output
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        conflicts_with = "keep_all"
    )]
    keep: Vec<String>,
    /// Copy all columns of the input but the texts
    #[arg(long)]
    keep_all: bool,
    /// Type of the values: f32, f16, int8 (with a scale for each row) or binary (a bit for each value)
    #[arg(long, value_name = "TYPE", default_value_t = Vectors::F32)]
    vectors: Vectors,
    /// Keep the first N values of each vector and scale it to length 1 (Matryoshka representation learning)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    dimensions: Option<u32>,
    /// Name of the folder's prompt that is put before each text
    #[arg(long, value_name = "NAME", conflicts_with = "prompt")]
    prompt_name: Option<String>,
    /// Text that is put before each text
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Max tokens of a batch
    #[arg(long, value_name = "N", default_value_t = 16_384)]
    batch_tokens: usize,
    /// Rows that are read, sorted by length and embedded at once. An interrupted run goes on after the last finished ones
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    window_rows: u32,
    /// Replace an output that exists, and start over if an interrupted run had other options
    #[arg(long)]
    overwrite: bool,
}

impl Args {
    fn job(&self) -> Job {
        let mut job = Job::new(&self.input, &self.output);
        job.input_format = self.input_format;
        job.output_format = self.output_format;
        job.column.clone_from(&self.column);
        job.keep = match (self.keep_all, self.keep.as_slice()) {
            (true, _) => Keep::All,
            (false, []) => Keep::None,
            (false, names) => Keep::Named(names.to_vec()),
        };
        job.vectors = self.vectors;
        job.overwrite = self.overwrite;
        job.limits.window_rows = self.window_rows as usize;
        job
    }

    fn prompt(&self) -> Prompt<'_> {
        match (&self.prompt_name, &self.prompt) {
            (Some(name), _) => Prompt::Named(name),
            (None, Some(text)) => Prompt::Text(text),
            (None, None) => Prompt::Default,
        }
    }
}

/// Number of texts that are tokenized at once.
const PIECE: usize = 1024;

/// An engine that embeds windows of texts.
struct Model<'a> {
    args: &'a Args,
    encoder: TextEncoder,
    pipeline: Pipeline,
    identity: String,
    /// Number of values of a vector of the model.
    width: usize,
}

impl<'a> Model<'a> {
    fn load(args: &'a Args) -> Result<Self, miette::Report> {
        let folder = args.model.tokenizer_folder("texts")?;
        let encoder = TextEncoder::of(Folder::open(folder)?).map_err(EngineError::from)?;
        let chosen = encoder.folder().prompt(args.prompt());
        let prompt = chosen.map_err(EngineError::from)?.to_owned();
        let builder = args.model.builder_of_own_outputs()?.outputs([EMBEDDING]);
        let engine = Runnable::build(builder)?;
        let identity = identity(args, encoder.folder(), &engine, &prompt).into_diagnostic()?;
        let pipeline = Pipeline::new(engine.session()?)?;
        let mut model = Self {
            args,
            encoder,
            pipeline,
            identity,
            width: 0,
        };
        // The first run gives the width.
        let first = model.encoder.encode_one(Input::Text("a"), args.prompt());
        let first = first.map_err(EngineError::from)?;
        let first = model
            .pipeline
            .submit(Encoded::batch([&first].into_iter()).map_err(EngineError::from)?)?;
        model.width = first.wait()?.sequence(EMBEDDING, 0)?.len();
        match args.dimensions {
            Some(n) if n as usize > model.width => Err(miette!(
                "--dimensions is {n}, and the model's vectors have {} values",
                model.width
            )),
            _ => Ok(model),
        }
    }

    /// Stores the vectors of a batch, each under the index of its text.
    fn store(
        &self,
        batch: &[usize],
        outputs: &Outputs,
        rows: &mut [Result<Vec<f32>, String>],
    ) -> Result<(), EngineError> {
        for (at, &index) in batch.iter().enumerate() {
            let vector = outputs.sequence(EMBEDDING, at)?;
            rows[index] = Ok(match self.args.dimensions {
                None => vector.to_vec(),
                Some(n) => shortened(vector, n as usize),
            });
        }
        Ok(())
    }
}

impl Embedder for Model<'_> {
    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn width(&self) -> usize {
        self.args.dimensions.map_or(self.width, |n| n as usize)
    }

    /// Texts are tokenized in pieces, of similar lengths, while batches of the piece before run.
    fn embed(&mut self, texts: &[&str]) -> Result<Embedded, EmbedderError> {
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.sort_by_key(|&index| texts[index].len());
        let mut rows = vec![Err("it was not embedded".to_owned()); texts.len()];
        let mut tokens = 0;
        let (encoder, prompt) = (&self.encoder, self.args.prompt());
        let encode = |&index: &usize| encoder.encode_one(Input::Text(texts[index]), prompt);
        thread::scope(|scope| {
            let (send, pieces) = sync_channel(1);
            let order = &order;
            scope.spawn(move || {
                for piece in order.chunks(PIECE) {
                    let encoded: Vec<_> = piece.par_iter().map(encode).collect();
                    // An error of a batch ends the window.
                    if send.send((piece, encoded)).is_err() {
                        break;
                    }
                }
            });
            // A batch is prepared while two others are in the executor.
            let mut running: VecDeque<(Vec<usize>, Pending)> = VecDeque::new();
            for (piece, encoded) in pieces {
                let mut sequences = Vec::with_capacity(piece.len());
                for (&index, encoded) in piece.iter().zip(encoded) {
                    match encoded {
                        Ok(encoded) => sequences.push((index, encoded)),
                        Err(error) => rows[index] = Err(error.to_string()),
                    }
                }
                let lens: Vec<usize> = sequences.iter().map(|(_, own)| own.ids.len()).collect();
                tokens += lens.iter().map(|&n| n as u64).sum::<u64>();
                for batch in batches_of_texts(&lens, self.args.batch_tokens) {
                    let own = batch.iter().map(|&at| &sequences[at].1);
                    let pending = self.pipeline.submit(Encoded::batch(own)?)?;
                    let indices = batch.iter().map(|&at| sequences[at].0).collect();
                    running.push_back((indices, pending));
                    if running.len() > 2
                        && let Some((batch, pending)) = running.pop_front()
                    {
                        self.store(&batch, &pending.wait()?, &mut rows)?;
                    }
                }
            }
            for (batch, pending) in running {
                self.store(&batch, &pending.wait()?, &mut rows)?;
            }
            let tokens = Some(tokens);
            Ok(Embedded { rows, tokens })
        })
    }
}

/// Returns the first `n` values, scaled to length 1.
fn shortened(vector: &[f32], n: usize) -> Vec<f32> {
    let kept = &vector[..n.min(vector.len())];
    let norm = kept.iter().map(|v| v * v).sum::<f32>().sqrt();
    let norm = norm.max(f32::MIN_POSITIVE);
    kept.iter().map(|v| v / norm).collect()
}

/// Describes everything that changes a vector: the files of the model, the device, the precision, and the options of a run.
fn identity(
    args: &Args,
    folder: &Folder,
    engine: &Engine,
    prompt: &str,
) -> std::io::Result<String> {
    let mut files = Vec::new();
    for path in folder.root_files().paths()? {
        // A file of a hub's cache is a link, which metadata follows.
        let data = fs::metadata(&path)?;
        let changed = data.modified()?.duration_since(UNIX_EPOCH);
        let changed = changed.map_or(0, |since| since.as_nanos());
        files.push(format!(
            "{} {} {changed}",
            path.file_name().unwrap_or_default().to_string_lossy(),
            data.len()
        ));
    }
    files.sort_unstable();
    let digest = Sha256::digest(files.join("\n"));
    let digest: String = digest.iter().take(8).map(|b| format!("{b:02x}")).collect();
    let dimensions = args.dimensions.map_or("all".to_owned(), |n| n.to_string());
    Ok(format!(
        "{}, files {digest}, {} on {}, {dimensions} dimensions, batches of {} tokens, prompt {prompt:?}, gemmule {}",
        args.model.name(),
        engine.precision().name(),
        engine.device(),
        args.batch_tokens,
        env!("CARGO_PKG_VERSION"),
    ))
}

pub(super) fn run(args: Args) -> Outcome {
    let job = args.job();
    let mut model = Model::load(&args)?;
    let bar = ProgressBar::no_length();
    let style = "{spinner} {pos} rows, {msg}, {elapsed} elapsed, {eta} left";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    let began = Instant::now();
    let mut first = None;
    let mut show = |progress: &Progress| {
        // Rows of earlier, interrupted runs do not count for the rate.
        let before = *first.get_or_insert(progress.rows.saturating_sub(args.window_rows.into()));
        let seconds = began.elapsed().as_secs_f64();
        let total = progress.total_rows.or_else(|| estimated_rows(progress));
        if let Some(total) = total {
            bar.set_length(total.max(progress.rows));
        }
        bar.set_position(progress.rows);
        bar.set_message(format!(
            "{:.0} a second, {} refused",
            (progress.rows - before) as f64 / seconds,
            progress.refused
        ));
    };
    let hooks = Hooks {
        progress: Some(&mut show),
        ..Hooks::default()
    };
    let report = gemmule_corpus::run(&job, &mut model, hooks).into_diagnostic();
    bar.finish_and_clear();
    let report = report?;
    let seconds = began.elapsed().as_secs_f64();
    let resumed = match report.resumed {
        0 => String::new(),
        n => format!(" ({n} by earlier runs)"),
    };
    print(&format!(
        "{}: {} vectors of {} rows{resumed} in {seconds:.1} s{}\n",
        report.output.display(),
        report.written,
        report.rows,
        match report.tokens {
            Some(tokens) if report.resumed == 0 =>
                format!(", {:.0} tokens a second", tokens as f64 / seconds),
            _ => String::new(),
        }
    ))?;
    match report.errors {
        None => Ok(ExitCode::SUCCESS),
        Some(errors) => {
            say(&format!(
                "{} rows have no vector; `{}` lists them with the reasons",
                report.refused,
                errors.display()
            ));
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Estimates the number of rows from the bytes that were read.
fn estimated_rows(progress: &Progress) -> Option<u64> {
    let total = progress.total_bytes?;
    let share = progress.bytes as f64 / total.max(1) as f64;
    (share > 0.0).then(|| (progress.rows as f64 / share) as u64)
}
