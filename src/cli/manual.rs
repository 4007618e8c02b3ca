//! Shell completions and man pages, from the arguments of the command line.

use std::{fs, path::PathBuf, process::ExitCode};

use clap::CommandFactory as _;
use clap_complete::Shell;

use super::{Cli, Outcome, print_raw};
use crate::EngineError;

#[derive(clap::Args)]
pub(super) struct CompletionsArgs {
    /// Shell that reads them
    shell: Shell,
}

#[derive(clap::Args)]
pub(super) struct ManPagesArgs {
    /// Folder for the pages; it is created if it does not exist
    folder: PathBuf,
}

/// Prints a script that the shell evaluates.
pub(super) fn completions(args: CompletionsArgs) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "gemmule", &mut script);
    print_raw(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes `gemmule.1`, and a page such as `gemmule-run.1` for each command.
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
