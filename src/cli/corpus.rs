//! Commands that process files of texts: their common options, and the code that runs them and prints a report.

mod model;
mod pool;
mod window;

use std::{path::PathBuf, process::ExitCode, str::FromStr, time::Instant};

use gemmule_corpus::{Column, Hooks, InputFormat, Job, Keep, OutputFormat, Progress, Vectors};
use indicatif::{ProgressBar, ProgressStyle};
use miette::{IntoDiagnostic, Report, miette};
use sha2::{Digest, Sha256};

use super::{
    Outcome,
    model::{Runnable, identity::changed},
    numbers::at_least_one,
    print, say,
};
use crate::{
    Engine, EngineError,
    engine::{DeviceChoice, DeviceName},
    text::{Folder, Prompt, TextEncoder},
};
use pool::{Options, Pool};

pub(super) use model::{Task, Units};

/// Options of commands that read a file of texts.
#[derive(clap::Args)]
#[group(skip)]
pub(super) struct Files {
    /// Format of the input (jsonl, csv, tsv, parquet, lines). By default, the file name extension determines it
    #[arg(long, value_name = "FORMAT", requires = "input")]
    input_format: Option<InputFormat>,
    /// Format of the output (parquet, arrow, npy, jsonl). By default, the file name extension determines it
    #[arg(long, value_name = "FORMAT", requires = "input")]
    output_format: Option<OutputFormat>,
    /// Columns of the input to copy to the output
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        conflicts_with = "keep_all",
        requires = "input"
    )]
    keep: Vec<String>,
    /// Copy all columns of the input except the texts
    #[arg(long, requires = "input")]
    keep_all: bool,
    /// Rule for a text that has more tokens than the model accepts: cut the text, or refuse its row
    #[arg(long, value_enum, value_name = "RULE", default_value_t = TooLong::Cut, requires = "input")]
    too_long: TooLong,
    /// Devices that share the batches, such as 0,1 or cuda:0,cuda:1. Each holds the whole model. The output is the same as with one device
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        conflicts_with = "device",
        requires = "input"
    )]
    devices: Vec<Device>,
    /// Max tokens of a batch
    #[arg(long, value_name = "N", default_value_t = 16_384, requires = "input", value_parser = at_least_one())]
    batch_tokens: usize,
    /// Number of rows in a window. The rows of a window are read, sorted by length and computed together. An interrupted run continues
    /// after the last finished window
    #[arg(long, value_name = "N", default_value_t = 16_384, requires = "input", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    window_rows: u32,
    /// Replace an existing output, and start over if an interrupted run had other options
    #[arg(long, requires = "input")]
    overwrite: bool,
}

/// Rules for texts that are too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum TooLong {
    Cut,
    Refuse,
}

/// A device. A CUDA device may be given by its number alone.
#[derive(Clone, Copy, Debug)]
struct Device(DeviceChoice);

impl FromStr for Device {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        match text.parse() {
            Ok(n) => Ok(Self(DeviceChoice::Cuda(n))),
            Err(_) => text.parse().map(Self),
        }
    }
}

/// A prompt to put before texts.
#[derive(clap::Args)]
#[group(skip)]
pub(super) struct PromptArgs {
    /// Put the prompt with this name, from the checkpoint's folder, before each text, or before the query of each pair
    #[arg(long, value_name = "NAME", conflicts_with = "prompt")]
    prompt_name: Option<String>,
    /// Text to put before each text, or before the query of each pair
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
}

impl PromptArgs {
    /// Returns the text of the prompt.
    pub(super) fn text(&self, folder: &Folder) -> Result<String, EngineError> {
        let prompt = self.chosen().unwrap_or_default();
        Ok(folder.prompt(prompt)?.to_owned())
    }

    /// Returns the text of the prompt; `None` if no prompt is given. A late-interaction model then uses its own prompt for each role, if it
    /// has one.
    pub(super) fn given(&self, folder: &Folder) -> Result<Option<String>, EngineError> {
        let text = self.chosen().map(|prompt| folder.prompt(prompt));
        Ok(text.transpose()?.map(str::to_owned))
    }

    fn chosen(&self) -> Option<Prompt<'_>> {
        match (&self.prompt_name, &self.prompt) {
            (Some(name), _) => Some(Prompt::Named(name)),
            (None, Some(text)) => Some(Prompt::Text(text)),
            (None, None) => None,
        }
    }
}

/// The files and columns of a command.
pub(super) struct Places {
    pub(super) input: PathBuf,
    pub(super) columns: Vec<String>,
    pub(super) output: PathBuf,
    pub(super) vectors: Vectors,
    /// Singular and plural name of a result, for messages.
    pub(super) result: [&'static str; 2],
}

/// Opens the folder's tokenizer.
pub(super) fn encoder(model: &Runnable) -> Result<TextEncoder, Report> {
    let folder = model.opened_folder("texts")?;
    Ok(TextEncoder::of(folder).map_err(EngineError::from)?)
}

impl Files {
    /// Returns the job after checking its options. `columns` are the computed columns; the widths of their vectors are ignored.
    pub(super) fn job(&self, places: &Places, columns: &[Column]) -> Result<Job, Report> {
        let mut job = Job::new(&places.input, &places.output);
        job.input_format = self.input_format;
        job.output_format = self.output_format;
        job.columns.clone_from(&places.columns);
        job.keep = match (self.keep_all, self.keep.as_slice()) {
            (true, _) => Keep::All,
            (false, []) => Keep::None,
            (false, names) => Keep::Named(names.to_vec()),
        };
        job.vectors = places.vectors;
        job.overwrite = self.overwrite;
        job.limits.window_rows = self.window_rows as usize;
        job.check(columns).into_diagnostic()?;
        Ok(job)
    }

    /// Builds an engine for each device.
    pub(super) fn engines(&self, model: &Runnable, output: &str) -> Result<Vec<Engine>, Report> {
        if self.devices.is_empty() {
            return Ok(vec![
                model.build_for(model.builder_of_own_outputs()?, output)?,
            ]);
        }
        let engines = self.devices.iter().map(|device| {
            let builder = model.builder_of_own_outputs()?.device(device.0);
            model.build_for(builder, output)
        });
        let engines = engines.collect::<Result<Vec<Engine>, Report>>()?;
        let names: Vec<String> = engines.iter().map(|e| kind(e.device())).collect();
        match names.iter().find(|name| **name != names[0]) {
            None => Ok(engines),
            Some(other) => Err(miette!(
                "--devices names devices of two kinds, {} and {other}, whose results differ by rounding, so a resumed run could write other results than an uninterrupted one; name devices of one kind",
                names[0]
            )),
        }
    }

    /// Computes the rows of a file with a task, and prints a report.
    pub(super) fn run<T: Task>(
        &self,
        job: &Job,
        model: &Runnable,
        engines: Vec<Engine>,
        task: T,
        [result, results]: [&str; 2],
    ) -> Outcome {
        let options = Options {
            batch_tokens: self.batch_tokens,
            refuses_long: self.too_long == TooLong::Refuse,
        };
        let folder = model.opened_folder("texts")?;
        let identity = self.identity(model, &folder, &engines[0], &task.identity());
        let mut pool = Pool::start(engines, task, identity.into_diagnostic()?, options)?;
        let bar = ProgressBar::no_length();
        let style = "{spinner} {pos} rows, {msg}, {elapsed} elapsed, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        let began = Instant::now();
        let mut first = None;
        let mut show = |progress: &Progress| {
            // Rows that earlier, interrupted runs computed do not count toward the rate.
            let window = self.window_rows.into();
            let before = *first.get_or_insert(progress.rows.saturating_sub(window));
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
        let report = gemmule_corpus::run(job, &mut pool, hooks).into_diagnostic();
        bar.finish_and_clear();
        let report = report?;
        let seconds = began.elapsed().as_secs_f64();
        let resumed = match report.resumed {
            0 => String::new(),
            n => format!(" ({n} by earlier runs)"),
        };
        print(&format!(
            "{}: {} {results} of {} rows{resumed} in {seconds:.1} s{}\n",
            report.output.display(),
            report.written,
            report.rows,
            match report.tokens {
                Some(tokens) if report.resumed == 0 =>
                    format!(", {:.0} tokens a second", tokens as f64 / seconds),
                _ => String::new(),
            }
        ))?;
        match pool.n_cut() {
            0 => {}
            n => say(&format!(
                "{n} rows had more tokens than the model takes and were cut; --too-long refuse lists such rows instead"
            )),
        }
        match report.errors {
            None => Ok(ExitCode::SUCCESS),
            Some(errors) => {
                say(&format!(
                    "{} rows have no {result}; `{}` lists them with the reasons",
                    report.refused,
                    errors.display()
                ));
                Ok(ExitCode::FAILURE)
            }
        }
    }

    /// Describes everything that affects a result: the files of the model, the device, the precision, and the options of a run. An
    /// interrupted run resumes only if this text is the same.
    fn identity(
        &self,
        model: &Runnable,
        folder: &Folder,
        engine: &Engine,
        task: &str,
    ) -> std::io::Result<String> {
        let mut files = Vec::new();
        for path in folder.root_files().paths()? {
            files.push(format!(
                "{} {}",
                path.file_name().unwrap_or_default().to_string_lossy(),
                changed(&path)
            ));
        }
        files.sort_unstable();
        let digest = Sha256::digest(files.join("\n"));
        let digest: String = digest.iter().take(8).map(|b| format!("{b:02x}")).collect();
        let too_long = match self.too_long {
            TooLong::Cut => "long texts cut",
            TooLong::Refuse => "long texts refused",
        };
        let route = match (folder.route(), folder.adapter()) {
            (Some(route), _) => format!(", route {route}"),
            (None, Some(task)) => format!(", adapter {task}"),
            (None, None) => String::new(),
        };
        Ok(format!(
            "{}{route}, files {digest}, {} on {}, {task}, batches of {} tokens, {too_long}, gemmule {}",
            model.identity(),
            engine.precision().name(),
            kind(engine.device()),
            self.batch_tokens,
            env!("CARGO_PKG_VERSION"),
        ))
    }
}

/// Describes a device without its number. Devices of the same kind compute the same bits. On a CPU, the bits do not depend on the number of
/// threads, because each sum is computed by a single thread.
fn kind(device: &DeviceName) -> String {
    match device {
        DeviceName::Cpu { .. } => "CPU".to_owned(),
        DeviceName::Cuda(info) => info.name.clone(),
    }
}

/// Estimates the total number of rows from the number of bytes read so far. Returns `None` if the size of the input is not known, or if
/// nothing has been read.
fn estimated_rows(progress: &Progress) -> Option<u64> {
    let total = progress.total_bytes?;
    let share = progress.bytes as f64 / total.max(1) as f64;
    (share > 0.0).then(|| (progress.rows as f64 / share) as u64)
}
