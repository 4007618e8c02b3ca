use std::process::ExitCode;

use miette::IntoDiagnostic;

use super::{Outcome, model::Model, print};
use crate::{DType, tensor::Extents};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Model,
    /// Sequence lengths of the batch for which bytes are counted
    #[arg(long, value_delimiter = ',', default_value = "128")]
    lens: Vec<u32>,
    #[arg(long, default_value = "f16")]
    dtype: DType,
}

pub(super) fn run(args: Args) -> Outcome {
    let compiled = args.model.compile(args.dtype)?;
    let extents = Extents::of(&args.lens).into_diagnostic()?;
    print(&compiled.report.explain(extents, args.dtype).to_string())?;
    Ok(ExitCode::SUCCESS)
}
