use std::process::ExitCode;

use super::{Outcome, model::Model, print};
use crate::DType;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Model,
}

pub(super) fn run(args: Args) -> Outcome {
    let described = args.model.description()?;
    let compiled = match args.model.config() {
        // Without sizes only the description itself can be checked.
        Err(crate::EngineError::NoConfig) => {
            print(&format!(
                "`{}` is sound as far as it can be told without sizes; give --config or --weights to check shapes and fusion\n",
                described.name()
            ))?;
            return Ok(ExitCode::SUCCESS);
        }
        Err(error) => return Err(error.into()),
        Ok(_) => args.model.compile(DType::F16)?,
    };
    compiled
        .model
        .check_expectations(&compiled.graph)
        .map_err(crate::EngineError::from)?;
    compiled.check_everywhere()?;
    print(&format!(
        "`{}` is sound: {} launches as described, {} after fusion; {} expectations hold\n",
        described.name(),
        compiled.model.graph.n_launches(),
        compiled.graph.n_launches(),
        compiled.model.expectations.len()
    ))?;
    Ok(ExitCode::SUCCESS)
}
