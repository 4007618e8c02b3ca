use std::{path::PathBuf, process::ExitCode};

use miette::{IntoDiagnostic, miette};

use super::{Outcome, model::Model, print, write_file};
use crate::{DType, graph::Graph, machine::Machine, passes};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Model,
    /// Show the graph after this compiler pass, or after all passes with `all`; by default as described
    #[arg(long, value_name = "PASS")]
    after: Option<String>,
    /// Write Graphviz source to FILE instead of printing text
    #[arg(long, value_name = "FILE")]
    dot: Option<PathBuf>,
    /// Include weights in the Graphviz source
    #[arg(long, requires = "dot")]
    with_weights: bool,
}

pub(super) fn run(args: Args) -> Outcome {
    let options = args.model.options(
        DType::F16,
        Machine::usual().map_err(crate::EngineError::from)?,
    )?;
    let outputs: Option<Vec<&str>> = options
        .outputs
        .as_ref()
        .map(|o| o.iter().map(String::as_str).collect());
    let model = args
        .model
        .description()?
        .build_with(&args.model.config()?, outputs.as_deref(), &options.modules)
        .map_err(crate::EngineError::from)?;
    let graph = match &args.after {
        None => model.graph,
        Some(after) => graph_after(model.graph, after, options.without)?,
    };
    match args.dot {
        Some(file) => write_file(&file, graph.dot(args.with_weights).as_bytes())?,
        None => print(&graph.text())?,
    }
    Ok(ExitCode::SUCCESS)
}

fn graph_after(
    graph: Graph,
    after: &str,
    without: std::collections::BTreeSet<String>,
) -> Result<Graph, miette::Report> {
    let mut wanted = None;
    let options = passes::Options {
        without,
        ..passes::Options::default()
    };
    let (last, _) = passes::optimize_observed(graph, &options, |name, graph| {
        if name == after {
            wanted = Some(graph.clone());
        }
    })
    .into_diagnostic()?;
    if after == "all" {
        return Ok(last);
    }
    let names: Vec<&str> = passes::all().iter().map(|p| p.name()).collect();
    wanted.ok_or_else(|| {
        miette!(
            "no pass `{after}` ran; the passes are {}, or `all`",
            names.join(", ")
        )
    })
}
