use std::{path::PathBuf, process::ExitCode};

use miette::IntoDiagnostic;

use super::{
    Outcome,
    model::{Card, Model, Types},
    print, write_file,
};
use crate::{
    EngineError,
    engine::{emit, read_timings, timings_for},
    jit::{Jit, Target},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    types: Types,
    /// Write source that is only for this target and may use its special instructions, and also write the cubins. By default, write source
    /// that runs on all targets
    #[arg(long, value_name = "sm_XX", requires = "out")]
    arch: Option<Target>,
    #[command(flatten)]
    card: Card,
    /// Choose kernels by the timings in this file, which `gemmule tune --export` wrote
    #[arg(long, value_name = "FILE")]
    timings: Option<PathBuf>,
    /// Folder for one .cu file per kernel; by default the source is written to standard output
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub(super) fn run(args: Args) -> Outcome {
    let targets: Vec<Target> = args.arch.into_iter().collect();
    // Read the file only once, because it may be a pipe.
    let timings = match args.timings {
        Some(file) => Some((read_timings(&file)?, file)),
        None => None,
    };
    let timed_on = timings.as_ref().map(|((_, on), _)| on);
    let machine = args.card.machine_of(&targets, timed_on)?;
    let mut compiled = args.model.compile_with(&args.types, machine)?;
    if let Some((read, file)) = timings {
        if compiled.options.invariant {
            return Err(EngineError::TuneInvariant.into());
        }
        // Only source is written, so the version of NVRTC that the timings belong to does not matter.
        let timings = timings_for(&file, read, &compiled.options.machine, None)?;
        compiled = compiled.with_timings(Some(timings))?;
    }
    let sources = emit(&compiled.program.kernels)?;
    let Some(folder) = args.out else {
        for source in &sources {
            print(&format!("// {}.cu\n{}\n", source.symbol, source.text))?;
        }
        return Ok(ExitCode::SUCCESS);
    };
    std::fs::create_dir_all(&folder).map_err(|source| crate::EngineError::Write {
        file: folder.clone(),
        source,
    })?;
    for source in &sources {
        write_file(
            &folder.join(format!("{}.cu", source.symbol)),
            source.text.as_bytes(),
        )?;
    }
    if let Some(target) = args.arch {
        let cubins = Jit::open()
            .and_then(|jit| jit.compile_all(&sources, target, &|_, _| ()))
            .into_diagnostic()?;
        for cubin in &cubins {
            write_file(
                &folder.join(format!("{}.{target}.cubin", cubin.symbol)),
                &cubin.bytes,
            )?;
        }
    }
    print(&format!(
        "{} kernels written to {}\n",
        sources.len(),
        folder.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}
