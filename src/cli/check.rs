use std::process::ExitCode;

use miette::Report;

use super::{
    Outcome,
    model::{Card, Model},
    print,
};
use crate::{
    DType, EngineError,
    engine::{Compiled, compile, open_checkpoint, unread},
    machine::Machine,
    model::{Description, Module, Problem},
    runtime::weights::{CheckpointError, Found},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    card: Card,
}

pub(super) fn run(args: Args) -> Outcome {
    args.model.fetch_weights()?;
    let described = args.model.description()?;
    let compiled = match args.model.config() {
        // Without sizes, only the description itself is checked.
        Err(EngineError::NoConfig) => {
            print(&format!(
                "`{}` is valid as far as can be checked without sizes; give --config or --weights to check shapes and fusion\n",
                described.name()
            ))?;
            return Ok(ExitCode::SUCCESS);
        }
        Err(error) => return Err(error.into()),
        Ok(_) => compiled_for(&args, &described, args.card.machine(&[])?, None)?,
    };
    let mut notes = unmet(&args, &compiled, None)?;
    compiled.check_everywhere()?;
    let own = args
        .model
        .options(DType::F16, compiled.options.machine.clone())?;
    if own.modules != compiled.options.modules {
        compile(&described, &args.model.config()?, &own)?.check_everywhere()?;
    }
    let held = match notes.is_empty() {
        true => format!("; {} expectations hold", compiled.model.expectations.len()),
        false => String::new(),
    };
    let mut lines = format!(
        "`{}` is valid: {} launches as described, {} after fusion{held}\n",
        described.name(),
        compiled.model.graph.n_launches(),
        compiled.graph.n_launches(),
    );
    notes.push_str(&others(&args, &described, &compiled)?);
    lines.push_str(&notes);
    lines.push_str(&weights(&args, &described, &compiled)?);
    print(&lines)?;
    Ok(ExitCode::SUCCESS)
}

/// Compiles the model to check the expectations (`expect:`) of its layers. Disables the pass `hoist_pooled_token`, which would compute only
/// one row per sequence in the last layer if the output needs no other rows.
fn compiled_for(
    args: &Args,
    described: &Description,
    machine: Machine,
    output: Option<&str>,
) -> Result<Compiled, EngineError> {
    let mut options = args.model.options(DType::F16, machine)?;
    if let Some(output) = output {
        options.outputs = Some(vec![output.to_owned()]);
    }
    options.without.insert("hoist_pooled_token".to_owned());
    // Descriptions expect fused attention. Fused attention cannot mask the tokens that pad a query (ColBERT's query expansion), so compile
    // without this mask.
    for module in &mut options.modules {
        if let Module::NormalizeTokens { hides_expansion } = module {
            *hides_expansion = false;
        }
    }
    let config = args.model.config()?;
    match compile(described, &config, &options) {
        // An encoder-decoder model can only be compiled with a cache, which holds the results of its encoder.
        Err(EngineError::NeedsSource { .. }) => {
            options.cached = true;
            compile(described, &config, &options)
        }
        compiled => compiled,
    }
}

/// Checks the expectations (`expect:`) of a compiled model. For a description in a file, an unmet expectation is an error. For a built-in
/// description, it is only reported: the expectations are for usual sizes, and a model of other sizes can still be computed, with more
/// launches.
fn unmet(args: &Args, compiled: &Compiled, output: Option<&str>) -> Result<String, EngineError> {
    match compiled.model.check_expectations(&compiled.graph) {
        Ok(()) => Ok(String::new()),
        Err(error) if args.model.is_shipped() => {
            let output = output.map(|name| format!("`{name}`: "));
            Ok(format!(
                "{}fewer operators are fused than with usual sizes: {error}\n",
                output.unwrap_or_default()
            ))
        }
        Err(error) => Err(error.into()),
    }
}

/// Checks the outputs that are not computed by default. An output that config.json rules out is only reported. Any other problem is an
/// error if the description is in a file. For a built-in description, it is only reported, because the default outputs can be computed.
fn others(args: &Args, described: &Description, compiled: &Compiled) -> Result<String, Report> {
    let mut lines = String::new();
    for output in described.output_names() {
        if compiled
            .graph
            .outputs()
            .iter()
            .any(|(name, _)| name == output)
        {
            continue;
        }
        let machine = compiled.options.machine.clone();
        match compiled_for(args, described, machine, Some(output)) {
            Ok(other) => lines.push_str(&unmet(args, &other, Some(output))?),
            Err(error) if args.model.is_shipped() || is_of_config(&error) => {
                lines.push_str(&format!(
                    "`{output}` cannot be computed with this config: {error}\n"
                ));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(lines)
}

/// Returns whether config.json causes the error: it is for another task, or it lacks a value that the output requires.
fn is_of_config(error: &EngineError) -> bool {
    match error {
        EngineError::OtherTask { .. } => true,
        EngineError::Model(error) => matches!(
            error.problem(),
            Problem::Requirement { .. } | Problem::NoValue { .. }
        ),
        _ => false,
    }
}

/// Checks that the folder's weights, if there are any, match the weights that the model reads.
fn weights(args: &Args, described: &Description, compiled: &Compiled) -> Result<String, Report> {
    let Some(folder) = args.model.folder()? else {
        return Ok(String::new());
    };
    let names = &compiled.model.weight_names;
    let checkpoint = match open_checkpoint(folder, names, &compiled.program) {
        Err(EngineError::Checkpoint(CheckpointError::NoCheckpoint { found, .. })) => {
            return Ok(match found {
                Found::Nothing => "the folder has no weights\n".to_owned(),
                found => {
                    format!("the folder has no weights that the model reads; it has {found}\n")
                }
            });
        }
        opened => opened?,
    };
    let config = args.model.config()?;
    let unread = unread(&checkpoint, names, &compiled.program, described, &config)?;
    let mut lines =
        "the checkpoint has all weights that the model reads, and every layer is used\n".to_owned();
    for name in unread {
        lines.push_str(&format!(
            "no output reads the tensor `{}`\n",
            name.escape_debug()
        ));
    }
    Ok(lines)
}
