//! Shell completions and man pages, generated from the command-line arguments.

use std::{
    ffi::{OsStr, OsString},
    fs,
    path::PathBuf,
    process::ExitCode,
};

use clap::CommandFactory as _;
use clap_complete::{
    CompleteEnv, Shell,
    engine::{ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter as _},
    env::Shells,
};
use miette::{IntoDiagnostic as _, miette};

use super::{Cli, Outcome, print_raw};
use crate::{EngineError, engine::hub::Hub, model::Description};

/// Environment variable that the script of [`completions`] sets to get completions from the program.
const VARIABLE: &str = "GEMMULE_COMPLETE";

#[derive(clap::Args)]
pub(super) struct CompletionsArgs {
    /// Shell that evaluates the completions
    shell: Shell,
}

#[derive(clap::Args)]
pub(super) struct ManPagesArgs {
    /// Folder for the pages, which is created if it does not exist
    folder: PathBuf,
}

/// Prints a script for the shell to evaluate. For each completion, the script runs this program.
pub(super) fn completions(args: CompletionsArgs) -> Outcome {
    let shell = args.shell.to_string();
    let shells = Shells::builtins();
    let completer = shells.completer(&shell);
    let completer = completer.ok_or_else(|| miette!("there are no completions for {shell}"))?;
    let mut script = Vec::new();
    completer
        .write_registration(VARIABLE, "gemmule", "gemmule", "gemmule", &mut script)
        .into_diagnostic()?;
    print_raw(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}

/// If the script of [`completions`] asks for completions, prints them and returns true.
pub(super) fn completes(args: &[OsString]) -> clap::error::Result<bool> {
    let current = std::env::current_dir().ok();
    let complete = CompleteEnv::with_factory(Cli::command).var(VARIABLE);
    complete.try_complete(args, current.as_deref())
}

/// Completes an argument that names a model: a model in the hub's cache, a built-in description, or a path.
pub(super) fn model_completer() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let cached = Hub::from_env().map(|hub| hub.cached_models());
        let shipped = Description::shipped_names()
            .iter()
            .map(|name| (*name).to_owned());
        let names = cached.unwrap_or_default().into_iter().chain(shipped);
        let start = current.to_string_lossy();
        let names = names.filter(|name| name.starts_with(&*start));
        let mut found: Vec<CompletionCandidate> = names.map(CompletionCandidate::new).collect();
        found.extend(PathCompleter::any().complete(current));
        found
    })
}

/// Writes `gemmule.1`, and a page for each command, such as `gemmule-run.1`.
pub(super) fn man_pages(args: &ManPagesArgs) -> Outcome {
    let folder = &args.folder;
    let written =
        fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(Cli::command(), folder));
    written.map_err(|source| EngineError::Write {
        file: folder.clone(),
        source,
    })?;
    Ok(ExitCode::SUCCESS)
}
