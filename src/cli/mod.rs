//! The command line. Each subcommand is one file, which calls the public API.
//!
//! The other programs of this repository, such as `gemmule-bench`, use the public items. All programs therefore start, print and report
//! errors in the same way ([`start`]), and take the same arguments for a model ([`Runnable`]).

mod answer;
pub mod bench;
mod check;
mod classify;
mod compile;
#[cfg(feature = "corpora")]
mod corpus;
mod doctor;
#[cfg(feature = "corpora")]
mod embed;
mod emit;
mod explain;
mod fill_mask;
mod flags;
mod generate;
mod graph;
mod input;
mod kernels;
mod ledger;
mod location;
mod manual;
mod memory;
#[cfg(any(test, not(all(feature = "corpora", feature = "server"))))]
mod missing;
mod model;
mod models;
mod numbers;
mod plan;
mod progress;
#[cfg(feature = "corpora")]
mod rerank;
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
    ffi::OsString,
    io::Write,
    panic,
    process::ExitCode,
    sync::OnceLock,
    time::{Duration, Instant},
};

use clap::{Parser, Subcommand, error::ErrorKind as ParseError};
use miette::{IntoDiagnostic, Report, WrapErr as _};
use tracing_subscriber::{
    filter::{LevelFilter, Targets},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

pub use input::parse_ids;
pub use model::Runnable;
pub use progress::Bars;

/// Compiles a description of a transformer into CUDA kernels for that model, and runs it on batches of
/// sequences of any lengths without padding.
///
/// MODEL is a model on the Hugging Face hub (ORG/NAME), the path of a checkpoint, a built-in description (`gemmule models` lists
/// them) or the path of a RON file. It may be left out if a checkpoint is given with --weights. A checkpoint is a folder as published
/// on the hub, with config.json, model.safetensors and tokenizer.json, or a GGUF file.
#[derive(Parser)]
#[command(name = "gemmule", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// Also log decisions, such as selected kernels, and unused tensors of a checkpoint
    #[arg(short, long, global = true)]
    verbose: bool,
}

#[derive(Subcommand)]
enum Command {
    /// List the built-in descriptions, or print one as a starting point
    Models(models::Args),
    /// Parse, build and verify a description, and check that its `expect:` lines hold
    Check(check::Args),
    /// Print the graph of operators, as described or after a compiler pass
    Graph(graph::Args),
    /// Explain which operators are fused, by which rules and with which savings, and why other operators are not fused
    Explain(explain::Args),
    /// Write the CUDA source of a model's kernels
    Emit(emit::Args),
    /// Compile a model into one file that runs without NVRTC
    Compile(compile::Args),
    /// Time the most promising kernels in whole runs of a model on a device
    Tune(tune::Args),
    /// Show the memory plan of a batch's intermediate tensors, and draw their lifetimes
    Plan(plan::Args),
    /// Run a model on texts or token ids
    Run(run::Args),
    /// Embed the texts of a large file, or resume an interrupted run
    // Here, `--output` names the output file. The option that selects the outputs of the model is therefore renamed and hidden.
    #[cfg(feature = "corpora")]
    #[command(mut_arg("outputs", |arg| arg.long("model-output").hide(true)))]
    Embed(Box<embed::Args>),
    #[cfg(not(feature = "corpora"))]
    #[command(hide = true)]
    Embed(missing::Args),
    /// Score the pairs of queries and documents of a large file, or resume an interrupted run
    #[cfg(feature = "corpora")]
    #[command(mut_arg("outputs", |arg| arg.long("model-output").hide(true)))]
    Rerank(Box<rerank::Args>),
    #[cfg(not(feature = "corpora"))]
    #[command(hide = true)]
    Rerank(missing::Args),
    /// Generate text from prompts
    Generate(generate::Args),
    /// Translate a file with one text per line
    Translate(translate::Args),
    /// Classify texts, or label their tokens, or score labels that the model was not trained on
    // With `--input`, `--output` names the output file. The option that selects the outputs of the model is therefore renamed and hidden.
    #[cfg_attr(feature = "corpora", command(
        mut_arg("outputs", |arg| arg.long("model-output").hide(true)),
        mut_arg("texts", |arg| arg.required_unless_present("input")),
    ))]
    #[cfg_attr(not(feature = "corpora"), command(
        mut_arg("texts", |arg| arg.required_unless_present("input_file")),
    ))]
    Classify(Box<classify::Args>),
    /// Fill the masks of texts with a masked language model
    FillMask(fill_mask::Args),
    /// Answer questions about a text with passages from it
    Answer(answer::Args),
    /// Compute log-probabilities and perplexity of texts
    Score(score::Args),
    /// Serve models over HTTP: embeddings, scores and text generation
    #[cfg(feature = "server")]
    Serve(Box<serve::Args>),
    #[cfg(not(feature = "server"))]
    #[command(hide = true)]
    Serve(missing::Args),
    /// Compare schedulers on synthetic or recorded load, with a table of costs instead of a device
    Simulate(simulate::Args),
    /// Compare a model with stored results of another implementation
    Verify(verify::Args),
    /// Check kernels against their CPU references
    #[command(subcommand)]
    Kernels(kernels::Command),
    /// Run benchmarks
    #[command(subcommand)]
    Bench(bench::Command),
    /// Check the components that gemmule uses, and show how to install what is missing
    Doctor,
    /// Print the completions of commands and options for a shell
    Completions(manual::CompletionsArgs),
    /// Write a man page for each command
    #[command(hide = true)]
    ManPages(manual::ManPagesArgs),
}

/// Text for new users, printed if the program is started without a subcommand.
const FIRST: &str = "\
gemmule runs transformers: it embeds, ranks, generates, translates and serves. For a start:

  gemmule run --model sentence-transformers/all-MiniLM-L6-v2 --text 'It rained.' --text 'The rain came down.' --similarities
  gemmule generate --model Qwen/Qwen3-0.6B --chat --prompt 'What is rain?' --stream
  gemmule serve --model BAAI/bge-small-en-v1.5

These fetch their models. `gemmule doctor` says what this machine has and lacks, and `gemmule --help` lists all commands.
";

/// Time at which the command line started, soon after the start of the process.
static START: OnceLock<Instant> = OnceLock::new();

fn since_start() -> Duration {
    START.get_or_init(Instant::now).elapsed()
}

/// Runs the command line.
pub fn main() -> ExitCode {
    ExitCode::from(main_with(std::env::args_os()))
}

/// Runs the command line with these arguments, the first of which is the name of the program. Returns the exit code.
pub fn main_with(args: impl IntoIterator<Item = OsString>) -> u8 {
    let args: Vec<OsString> = args.into_iter().collect();
    match manual::completes(&args) {
        Ok(false) => {}
        Ok(true) => return 0,
        Err(error) => return u8::from(error.print().is_err() || error.use_stderr()),
    }
    let code = start_with(args, |cli: &Cli| cli.verbose, |cli| run(cli.command));
    let codes = (0..=u8::MAX).find(|&n| ExitCode::from(n) == code);
    codes.unwrap_or(u8::MAX)
}

fn run(command: Option<Command>) -> Outcome {
    let Some(command) = command else {
        print(FIRST)?;
        return Ok(ExitCode::SUCCESS);
    };
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
        #[cfg(feature = "corpora")]
        Command::Embed(args) => embed::run(*args),
        #[cfg(feature = "corpora")]
        Command::Rerank(args) => rerank::run(*args),
        #[cfg(not(feature = "corpora"))]
        Command::Embed(_) => missing::run("embed", "corpora"),
        #[cfg(not(feature = "corpora"))]
        Command::Rerank(_) => missing::run("rerank", "corpora"),
        Command::Generate(args) => generate::run(args),
        Command::Translate(args) => translate::run(args),
        Command::Classify(args) => classify::run(*args),
        Command::FillMask(args) => fill_mask::run(args),
        Command::Answer(args) => answer::run(args),
        Command::Score(args) => score::run(args),
        #[cfg(feature = "server")]
        Command::Serve(args) => serve::run(*args),
        #[cfg(not(feature = "server"))]
        Command::Serve(_) => missing::run("serve", "server"),
        Command::Simulate(args) => simulate::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Kernels(command) => kernels::run(command),
        Command::Bench(command) => bench::run(command),
        Command::Doctor => doctor::run(),
        Command::Completions(args) => manual::completions(args),
        Command::ManPages(args) => manual::man_pages(&args),
    }
}

/// Runs a program: parses its arguments, starts the log at a level that depends on `verbose`, calls `run`, and reports its error.
pub fn start<C: Parser>(
    verbose: impl FnOnce(&C) -> bool,
    run: impl FnOnce(C) -> Outcome,
) -> ExitCode {
    start_with(std::env::args_os(), verbose, run)
}

fn start_with<C: Parser>(
    args: impl IntoIterator<Item = OsString>,
    verbose: impl FnOnce(&C) -> bool,
    run: impl FnOnce(C) -> Outcome,
) -> ExitCode {
    since_start();
    silence_contained_panics();
    let cli = match C::try_parse_from(args) {
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
        // The reader has closed the pipe, which is not an error.
        Err(error) if error.is::<OutputClosed>() => ExitCode::SUCCESS,
        Err(error) => {
            say_rendered(&shown::rendered(&*error, flags::help(&error)));
            ExitCode::FAILURE
        }
    }
}

/// Writes the library's log messages of at least this level to standard error.
fn start_log(level: LevelFilter) {
    let ours = Targets::new().with_target("gemmule", level);
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(|| shown::Log)
        .with_ansi(shown::has_colors())
        .without_time()
        .with_target(false)
        // Otherwise, a failure to write to standard error would itself be logged to standard error.
        .log_internal_errors(false)
        .finish()
        .with(ours)
        .init();
}

/// Installs a panic hook that prints nothing for panics that the library catches. The library returns these as errors.
pub fn silence_contained_panics() {
    let otherwise = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !crate::text::panics_are_contained() {
            otherwise(info);
        }
    }));
}

/// Reports invalid arguments, or prints the help that was requested.
fn refused(error: &clap::Error) -> ExitCode {
    let text = error.render();
    match error.kind() {
        ParseError::DisplayHelp | ParseError::DisplayVersion => {}
        // If an argument contains control characters, the error is printed without colors.
        _ if shown::clean(&text.to_string()) != text.to_string() => {
            say_rendered(shown::clean(&text.to_string()).trim_end());
            return ExitCode::from(2);
        }
        _ => {}
    }
    let _ = error.print();
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// Result of a subcommand: the exit code, or an error, which miette shows.
pub type Outcome = Result<ExitCode, Report>;

/// The reader of standard output has closed the pipe.
#[derive(Debug, thiserror::Error, miette::Diagnostic)]
#[error("the standard output was closed")]
struct OutputClosed;

/// Writes a message to standard error. Failures are ignored.
pub fn say(text: &str) {
    say_rendered(&shown::clean(text));
}

fn say_rendered(text: &str) {
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Prints text for people to standard output. Characters that control a terminal are escaped.
///
/// # Errors
/// Returns an error if the text cannot be written. If the reader has closed the pipe, [`start`] turns this error into a successful exit.
pub fn print(text: &str) -> Result<(), Report> {
    print_raw(&shown::clean(text))
}

fn print_json(value: &serde_json::Value) -> Result<(), Report> {
    print_raw(&format!("{}\n", shown::clean_json(&value.to_string())))
}

fn print_raw(text: &str) -> Result<(), Report> {
    use std::io::ErrorKind;
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        written => written
            .into_diagnostic()
            .wrap_err("the standard output cannot be written"),
    }
}

/// Writes a file at a path from the user. The error contains the path.
pub fn write_file(path: &std::path::Path, text: &[u8]) -> Result<(), Report> {
    crate::files::write(path, text).map_err(|source| {
        crate::EngineError::Write {
            file: path.to_owned(),
            source,
        }
        .into()
    })
}

/// Writes a value as JSON to a file at a path from the user.
pub fn write_json<T: serde::Serialize + ?Sized>(
    path: &std::path::Path,
    value: &T,
) -> Result<(), Report> {
    write_file(path, &serde_json::to_vec_pretty(value).into_diagnostic()?)
}

/// Raises the limit on open files to its hard limit, because each connection is an open file. The default limit often allows only about a
/// thousand.
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

/// Formats a number of bytes with a unit, for example as `1.50 MiB`.
pub fn human(bytes: u64) -> String {
    indicatif::HumanBytes(bytes).to_string()
}

/// Creates a table without lines between its rows.
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
    fn the_options_of_each_command_are_consistent() {
        super::Cli::command().debug_assert();
    }
}
