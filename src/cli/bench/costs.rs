//! `gemmule bench costs`: writes a cost table, which contains estimated times of batches by size, for `gemmule simulate` and `gemmule serve
//! --costs`.

use std::{path::PathBuf, process::ExitCode};

use miette::IntoDiagnostic;

use super::super::{
    Outcome,
    model::{Card, Model},
    say, write_file,
};
use crate::{DType, measure::estimated_costs};

#[derive(clap::Args)]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    model: Model,
    /// Estimate the time of a batch as the sum of the launch times in the cost model of --card. To measure times instead, use `gemmule
    /// serve --write-costs`
    #[arg(long, required = true)]
    estimated: bool,
    #[arg(long, default_value = "f16")]
    dtype: DType,
    #[command(flatten)]
    card: Card,
    /// File for the cost table
    #[arg(short = 'o', long = "to", value_name = "FILE")]
    to: PathBuf,
}

pub(in crate::cli) fn run(args: Args) -> Outcome {
    let machine = args.card.machine(&[])?;
    let compiled = args.model.compile_in(args.dtype, None, machine.clone())?;
    // Name the sizes, because models of several sizes may share a description.
    let dims = compiled.model.dims.iter();
    let dims: Vec<String> = dims.map(|(name, n)| format!("{name} {n}")).collect();
    let about = format!("{} ({})", compiled.model.name, dims.join(", "));
    let table = estimated_costs(&compiled.program, &machine, &about).into_diagnostic()?;
    let table = table.checked().into_diagnostic()?;
    let text = format!(
        "// {}. Written by `gemmule bench costs --estimated`.\n{}\n",
        table.about,
        table.to_ron().into_diagnostic()?
    );
    write_file(&args.to, text.as_bytes())?;
    say(&format!("{}: {}", args.to.display(), table.about));
    Ok(ExitCode::SUCCESS)
}
