use std::process::ExitCode;

use super::{Outcome, print, table};
use crate::{EngineError, model::Description, names::nearest};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Description to print as RON
    name: Option<String>,
}

pub(super) fn run(args: Args) -> Outcome {
    match args.name {
        None => print(&list()?)?,
        Some(name) => {
            let source = Description::shipped_source(&name).ok_or_else(|| {
                let known = Description::shipped_names();
                EngineError::NotShipped {
                    near: nearest(&name, known.iter().copied()).map(str::to_owned),
                    known: known.join(", "),
                    name,
                }
            })?;
            print(source)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Lists the descriptions with their purposes and outputs.
fn list() -> Result<String, EngineError> {
    let mut rows = table(&["MODEL", "model_type", "outputs"]);
    for description in Description::shipped_names()
        .iter()
        .filter_map(|n| Description::shipped(n))
    {
        let description = description?;
        rows.add_row([
            description.name().to_owned(),
            description.model_types().join(", "),
            description.output_names().join(", "),
        ]);
    }
    Ok(format!(
        "{rows}\n`gemmule models NAME` prints one; `gemmule run --weights DIR` uses the one for the `model_type` in config.json\n"
    ))
}
