use std::{path::PathBuf, process::ExitCode};

use miette::IntoDiagnostic;

use super::{Outcome, human, model::Model, print, progress::Bars};
use crate::{
    DType,
    engine::{Artifact, emit},
    jit::{Jit, Target},
    runtime::cuda::CudaModel,
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Model,
    #[arg(long, default_value = "f16")]
    dtype: DType,
    /// Targets to hold code for (sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120)
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "sm_80,sm_86,sm_89,sm_90a"
    )]
    arch: Vec<Target>,
    /// The file to write
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
}

pub(super) fn run(args: Args) -> Outcome {
    let compiled = args.model.compile(args.dtype)?;
    let sources = emit(&CudaModel::kernels(&compiled.program))?;
    let jit = Jit::open().into_diagnostic()?;
    let bars = Bars::new();
    let mut cubins = Vec::new();
    for &target in &args.arch {
        let show = |done, total| bars.show(target.name(), done, total);
        cubins.extend(jit.compile_all(&sources, target, &show).into_diagnostic()?);
    }
    let artifact = Artifact::of(compiled, cubins);
    let bytes = artifact.write(&args.out)?;
    let targets: Vec<&str> = args.arch.iter().map(|t| t.name()).collect();
    print(&format!(
        "{}: {} launches of {} kernels in {}, for {}, {}\n",
        args.out.display(),
        artifact.program.steps.len(),
        artifact.program.kernels.len(),
        artifact.program.dtype,
        targets.join(", "),
        human(bytes)
    ))?;
    Ok(ExitCode::SUCCESS)
}
