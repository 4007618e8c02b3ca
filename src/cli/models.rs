use std::process::ExitCode;

use super::{Outcome, print, table};
use crate::{EngineError, model::Description, names::nearest};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Description to print as RON
    name: Option<String>,
    /// Print the table of docs/models.md: tasks, options and restrictions of each description
    #[arg(long, conflicts_with = "name")]
    markdown: bool,
}

pub(super) fn run(args: Args) -> Outcome {
    match args.name {
        None if args.markdown => print(&markdown()?)?,
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

/// Lists the descriptions with their `model_type`s and outputs.
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

/// Returns the table of tasks, options and restrictions as Markdown.
fn markdown() -> Result<String, EngineError> {
    let mut text =
        "| description | `model_type` | tasks | options | refused |\n|---|---|---|---|---|\n"
            .to_owned();
    let all = Description::shipped_names().iter();
    for description in all.filter_map(|name| Description::shipped(name)) {
        let description = description?;
        let code = |names: &[String]| {
            let names = names.iter().map(|name| format!("`{name}`"));
            names.collect::<Vec<_>>().join(", ")
        };
        let cells = [
            format!("`{}`", description.name()),
            code(description.model_types()),
            description.tasks().join(", "),
            code(&description.options()),
            description.requirements().join("; "),
        ];
        text += &format!("| {} |\n", cells.join(" | ").replace("\n", " "));
    }
    Ok(text)
}
