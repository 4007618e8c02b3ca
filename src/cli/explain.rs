use std::process::ExitCode;

use miette::IntoDiagnostic;

use super::{
    Outcome,
    model::{Card, Model, Types, cache_of, extents_for},
    print,
};
use crate::kernels::cache::BLOCK;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Model,
    /// Sequence lengths of the batch for which bytes and launches are shown. By default, one sequence of 128 tokens, or of the model's
    /// maximum if that is smaller
    #[arg(long = "lengths", alias = "lens", value_delimiter = ',')]
    lens: Vec<u32>,
    #[command(flatten)]
    types: Types,
    #[command(flatten)]
    card: Card,
}

/// Default length of a sequence in tokens.
const LENGTH: u32 = 128;

pub(super) fn run(args: Args) -> Outcome {
    let machine = args.card.machine(&[])?;
    let compiled = args.model.compile_with(&args.types, machine)?;
    let lens = match args.lens.is_empty() {
        true => vec![
            compiled
                .model
                .max_positions
                .map_or(LENGTH, |n| n.min(LENGTH)),
        ],
        false => args.lens,
    };
    let extents = extents_for(&lens, &compiled.model)?;
    print(
        &compiled
            .report
            .explain(extents, args.types.dtype)
            .to_string(),
    )?;
    let fusions = compiled.fusions(&extents)?;
    let machine = &compiled.options.machine;
    let launches = compiled.program.explain(fusions, &extents, machine);
    print(&format!("\n{}", launches.into_diagnostic()?))?;
    if args.types.kv_dtype.is_some() {
        let cache = cache_of(compiled.program.block_bytes(), &compiled.program);
        print(&format!("\nKV cache: {cache} for {BLOCK} tokens\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}
