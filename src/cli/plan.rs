use std::{path::PathBuf, process::ExitCode};

use miette::IntoDiagnostic;

use super::{
    Outcome, align_right, human,
    memory::Memory,
    model::{Card, Model, Types, extents_for},
    print, table, write_file,
};
use crate::{
    plan::{chart, lower_bound},
    runtime::{GraphChoice, Planner},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    memory: Memory,
    /// Sequence lengths, e.g. 17,18,52
    #[arg(
        long = "lengths",
        alias = "lens",
        value_delimiter = ',',
        required = true
    )]
    lens: Vec<u32>,
    #[command(flatten)]
    types: Types,
    #[command(flatten)]
    card: Card,
    /// Plan for exactly these lengths, like a session on the CPU. By default, plan for the bucket of similar batches that a CUDA device
    /// runs with the same launches
    #[arg(long)]
    exact: bool,
    /// Draw the lifetimes of the tensors into FILE, as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub(super) fn run(args: Args) -> Outcome {
    let machine = args.card.machine(&[])?;
    let compiled = args.model.compile_with(&args.types, machine)?;
    let extents = extents_for(&args.lens, &compiled.model)?;
    let program = compiled.program;
    let choice = args.memory.choice()?;
    let bucket = match args.exact {
        true => extents,
        false => GraphChoice::default()
            .buckets(&program, &choice)
            .of_batch(&extents),
    };
    let usage = program.usage(&bucket).into_diagnostic()?;
    let bound = lower_bound(&program.usage(&extents).into_diagnostic()?);
    let plan = Planner::new(&program, &choice)
        .and_then(|mut planner| planner.plan(&program, &bucket))
        .into_diagnostic()?;
    let names: Vec<String> = program.planned().map(|(_, t)| t.name.clone()).collect();
    let mut rows = table(&["tensor", "bytes", "first", "last", "chunk", "offset"]);
    for ((name, record), place) in names.iter().zip(&usage).zip(&plan.placements) {
        rows.add_row([
            name.clone(),
            record.bytes.to_string(),
            record.first_op.to_string(),
            record.last_op.to_string(),
            place.chunk.to_string(),
            place.offset.to_string(),
        ]);
    }
    align_right(&mut rows, 1..6);
    let footprint = plan.footprint();
    let planned = match (bucket.tokens, bucket.batch) == (extents.tokens, extents.batch) {
        true => String::new(),
        false => format!(
            "; planned for {} tokens in {} sequences, its bucket",
            bucket.tokens, bucket.batch
        ),
    };
    let chunks: Vec<String> = plan.chunks.iter().map(|&c| human(c)).collect();
    print(&format!(
        "{rows}\n{} tokens in {} sequences, {}{planned}\nchunks: {}\nfootprint: {} ({footprint} bytes), lower bound: {} ({bound} bytes), ratio {:.3}\n",
        extents.tokens,
        extents.batch,
        args.types.dtype,
        chunks.join(", "),
        human(footprint),
        human(bound),
        footprint as f64 / bound.max(1) as f64,
    ))?;
    if let Some(file) = args.svg {
        write_file(&file, chart::svg(&names, &usage, &plan).as_bytes())?;
        print(&format!("lifetimes drawn in {}\n", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}
