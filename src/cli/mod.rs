//! The command line: one file per subcommand, each a caller of the public API.
//!
//! What is public here is for the other programs of this repository: a command line starts, prints and
//! complains in one way ([`start`]), and says by the same arguments which model it is of ([`Runnable`]).

pub mod bench;
mod check;
mod compile;
mod doctor;
mod emit;
mod explain;
mod generate;
mod graph;
mod input;
mod kernels;
mod ledger;
mod memory;
mod model;
mod models;
mod plan;
mod progress;
mod run;
mod score;
#[cfg(feature = "server")]
mod serve;
mod shown;
mod simulate;
mod translate;
mod tune;
mod verify;

use std::{
    io::Write,
    panic,
    process::ExitCode,
    sync::OnceLock,
    time::{Duration, Instant},
};

use clap::{Parser, Subcommand, error::ErrorKind as ParseError};
use miette::{IntoDiagnostic, Report};
use tracing_subscriber::{
    filter::{LevelFilter, Targets},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

pub use input::parse_ids;
pub use model::Runnable;
pub use progress::Bars;

/// Compiles a description of a transformer into CUDA kernels written for that model, and runs it
/// on batches of any lengths without padding.
///
/// MODEL is a description that comes with gemmule (`gemmule models` lists them) or the path of a RON file; where a
/// checkpoint is given with --weights, it may be left out. A checkpoint is a folder as published on the Hugging Face hub, with config.json,
/// model.safetensors and tokenizer.json.
#[derive(Parser)]
#[command(name = "gemmule", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Say more: what was chosen, and which tensors of a checkpoint are not used
    #[arg(short, long, global = true)]
    verbose: bool,
}

#[derive(Subcommand)]
enum Command {
    /// List the descriptions that come with gemmule, or print one to start from
    Models(models::Args),
    /// Parse, build and verify a description, and check what it expects of the compiler
    Check(check::Args),
    /// Print the graph, as it is described or after a pass
    Graph(graph::Args),
    /// Say what was fused, by which rule, what it saves, and what was refused and why
    Explain(explain::Args),
    /// Write the CUDA source of a model's kernels
    Emit(emit::Args),
    /// Compile a model into one file that runs without NVRTC
    Compile(compile::Args),
    /// Time the kernels that may be fastest for a model in whole runs on a device, and show what each took
    Tune(tune::Args),
    /// Show where the intermediate tensors of a batch lie, and draw their lifetimes
    Plan(plan::Args),
    /// Run a model on texts or token ids
    Run(run::Args),
    /// Write on from prompts
    Generate(generate::Args),
    /// Translate a file, one text a line
    Translate(translate::Args),
    /// Say how probable texts are: log-probabilities and perplexity
    Score(score::Args),
    /// Serve models over HTTP: embeddings, scores, texts
    #[cfg(feature = "server")]
    Serve(Box<serve::Args>),
    /// Compare schedulers of requests on made-up or recorded load, with costs of a device that need not be there
    Simulate(simulate::Args),
    /// Compare a model with stored results of another implementation
    Verify(verify::Args),
    /// Kernels against their CPU references
    #[command(subcommand)]
    Kernels(kernels::Command),
    /// Measure
    #[command(subcommand)]
    Bench(bench::Command),
    /// Look for everything that gemmule uses, and say how to mend what is missing
    Doctor,
}

/// When the command line began, which is when the process did but for loading it.
static START: OnceLock<Instant> = OnceLock::new();

fn since_start() -> Duration {
    START.get_or_init(Instant::now).elapsed()
}

/// Runs the command line.
pub fn main() -> ExitCode {
    start(|cli: &Cli| cli.verbose, |cli| run(cli.command))
}

fn run(command: Command) -> Outcome {
    match command {
        Command::Models(args) => models::run(args),
        Command::Check(args) => check::run(args),
        Command::Graph(args) => graph::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Emit(args) => emit::run(args),
        Command::Compile(args) => compile::run(args),
        Command::Tune(args) => tune::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Run(args) => run::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Translate(args) => translate::run(args),
        Command::Score(args) => score::run(args),
        #[cfg(feature = "server")]
        Command::Serve(args) => serve::run(*args),
        Command::Simulate(args) => simulate::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Kernels(command) => kernels::run(command),
        Command::Bench(command) => bench::run(command),
        Command::Doctor => doctor::run(),
    }
}

/// Runs a program: parses its arguments, starts the log, which says more where they are `verbose`, and shows
/// how `run` ends.
pub fn start<C: Parser>(
    verbose: impl FnOnce(&C) -> bool,
    run: impl FnOnce(C) -> Outcome,
) -> ExitCode {
    since_start();
    silence_contained_panics();
    let cli = match C::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refused(&error),
    };
    start_log(if verbose(&cli) {
        LevelFilter::INFO
    } else {
        LevelFilter::WARN
    });
    match run(cli) {
        Ok(code) => code,
        // A reader that closed the pipe wanted no more.
        Err(error) if error.is::<OutputClosed>() => ExitCode::SUCCESS,
        Err(error) => {
            say_rendered(&shown::rendered(&*error));
            ExitCode::FAILURE
        }
    }
}

/// What the library says goes to standard error, from this level on.
fn start_log(level: LevelFilter) {
    let ours = Targets::new().with_target("gemmule", level);
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(|| shown::Log)
        .with_ansi(shown::has_colours())
        .without_time()
        .with_target(false)
        // It would say on standard error that standard error cannot be written.
        .log_internal_errors(false)
        .finish()
        .with(ours)
        .init();
}

/// Keeps quiet about panics that the library turns into errors; they are told as errors.
pub fn silence_contained_panics() {
    let otherwise = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !crate::engine::panics_are_contained() {
            otherwise(info);
        }
    }));
}

/// Says what is wrong with the arguments, or gives the help that was asked for.
fn refused(error: &clap::Error) -> ExitCode {
    let text = error.render();
    match error.kind() {
        ParseError::DisplayHelp | ParseError::DisplayVersion => {}
        // An argument with control characters is shown in one colour.
        _ if shown::clean(&text.to_string()) != text.to_string() => {
            say_rendered(shown::clean(&text.to_string()).trim_end());
            return ExitCode::from(2);
        }
        _ => {}
    }
    let _ = error.print();
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// What a subcommand returns: an error is shown by miette, a code says how a check went.
pub type Outcome = Result<ExitCode, Report>;

/// The reader of the standard output closed it.
#[derive(Debug, thiserror::Error, miette::Diagnostic)]
#[error("the standard output was closed")]
struct OutputClosed;

/// Says something on standard error. If that is closed or full, there is nobody to tell.
pub fn say(text: &str) {
    say_rendered(&shown::clean(text));
}

fn say_rendered(text: &str) {
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Prints to standard output what people read, with names and texts of others made harmless to a
/// terminal; a closed pipe is an error with which a program ends well, not a panic.
pub fn print(text: &str) -> Result<(), Report> {
    print_raw(&shown::clean(text))
}

/// Prints a line of JSON.
fn print_json(value: &serde_json::Value) -> Result<(), Report> {
    print_raw(&format!("{}\n", shown::clean_json(&value.to_string())))
}

fn print_raw(text: &str) -> Result<(), Report> {
    use std::io::ErrorKind;
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        written => written.into_diagnostic(),
    }
}

/// Writes what the user named, with its path in the error.
pub fn write_file(path: &std::path::Path, text: &[u8]) -> Result<(), Report> {
    crate::files::write(path, text).map_err(|source| {
        crate::EngineError::Write {
            file: path.to_owned(),
            source,
        }
        .into()
    })
}

/// Writes what was measured, or chosen, where the user named a file for it.
pub fn write_json<T: serde::Serialize + ?Sized>(
    path: &std::path::Path,
    value: &T,
) -> Result<(), Report> {
    write_file(path, &serde_json::to_vec_pretty(value).into_diagnostic()?)
}

/// Lets the process have as many connections open as the system grants: mostly a thousand are the usual, and many more are to be had.
#[cfg(feature = "server")]
fn allow_connections() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, most) {
        tracing::warn!("the limit of open files stays as it is: {error}");
    }
}

/// Bytes for people.
pub fn human(bytes: u64) -> String {
    indicatif::HumanBytes(bytes).to_string()
}

/// A table without lines between rows.
pub fn table(header: &[&str]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table
        .load_style(comfy_table::presets::UTF8_FULL_CONDENSED)
        .set_header(header.to_vec());
    table
}

/// Right-aligns columns of numbers.
pub fn align_right(table: &mut comfy_table::Table, columns: impl IntoIterator<Item = usize>) {
    for column in columns {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(comfy_table::CellAlignment::Right);
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_options_of_each_command_fit_together() {
        super::Cli::command().debug_assert();
    }
}
