//! `gemmule bench generate`: the time of a step of a model that writes.

use std::{path::PathBuf, process::ExitCode, time::Instant};

use miette::miette;
use serde::Serialize;

use super::super::{Outcome, align_right, human, model::Runnable, print, table, write_json};
use crate::{
    engine::{Event, Generate, Request},
    search::{Beams, Rules, Sampling},
};

#[derive(clap::Args)]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    model: Runnable,
    /// Sequences that are written at once
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "N,…",
        default_value = "1,32,128"
    )]
    batch: Vec<usize>,
    /// Tokens of each prompt, or of each source where the model writes from one
    #[arg(long, value_name = "N", default_value_t = 32)]
    prompt_tokens: usize,
    /// New tokens of each sequence
    #[arg(long, value_name = "N", default_value_t = 128)]
    new: usize,
    /// Take the most probable token instead of drawing by top-k 50 and top-p 0.9
    #[arg(long)]
    greedy: bool,
    /// Search so many beams of each sequence
    #[arg(long, value_name = "N", conflicts_with = "greedy")]
    beams: Option<usize>,
    /// Write all times to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What writing with one number of sequences took.
#[derive(Serialize)]
struct Row {
    batch: usize,
    /// Until every prompt had its first new token, or the search of beams its first step.
    first_ms: f64,
    /// Median of a step of one token for each sequence.
    step_ms: f64,
    slowest_ms: f64,
    tokens_per_second: f64,
    cache_bytes: u64,
}

pub(in crate::cli) fn run(args: Args) -> Outcome {
    if args.new < 2 || args.prompt_tokens == 0 || args.batch.contains(&0) {
        return Err(miette!(
            "there is no step to time; expected at least one sequence, one token of a prompt and two new ones"
        ));
    }
    let engine = Runnable::build(args.model.builder_of_own_outputs()?.generating())?;
    let limits = engine.limits();
    let options = Generate {
        rules: Rules {
            max_new_tokens: args.new,
            ..Rules::default()
        },
        sampling: (!args.greedy && args.beams.is_none()).then_some(Sampling {
            top_p: 0.9,
            ..Sampling::default()
        }),
        beams: args.beams.map(Beams::of),
        // Any token will do in front of random ones.
        decoder_start: engine.has_source().then(|| limits.token_id(0)),
        ..Generate::default()
    };
    let mut rows = Vec::new();
    for &batch in &args.batch {
        let lens = vec![args.prompt_tokens; batch];
        let cache_bytes = engine.cache_bytes_needed(&lens, &options)?;
        let mut generator = engine.generator(cache_bytes)?;
        let mut write = || -> Result<(f64, Vec<f64>), miette::Report> {
            for i in 0..batch as u64 {
                let ids =
                    (0..args.prompt_tokens as u64).map(|t| limits.token_id(31 * t + 977 * i + 5));
                let request = Request {
                    prompt: ids.collect(),
                    options: Generate {
                        seed: i,
                        ..options.clone()
                    },
                };
                generator.admit(request).map_err(|e| miette!("{e}"))?;
            }
            let began = Instant::now();
            let (mut first, mut steps) = (None, Vec::new());
            while generator.is_busy() {
                let step = Instant::now();
                let events = generator.poll()?;
                let n = events.iter().filter(|e| matches!(e, Event::Token { .. }));
                if let Some(problem) = events.iter().find_map(|e| match e {
                    Event::Failed { problem, .. } => Some(problem),
                    _ => None,
                }) {
                    return Err(miette!("{problem}"));
                }
                // The tokens of beams come when their search is done; before, a poll is a step.
                let is_step = n.count() == batch || (args.beams.is_some() && events.is_empty());
                match (first, is_step) {
                    (None, true) => first = Some(began.elapsed().as_secs_f64() * 1e3),
                    (Some(_), true) => steps.push(step.elapsed().as_secs_f64() * 1e3),
                    _ => {}
                }
            }
            Ok((first.unwrap_or(f64::NAN), steps))
        };
        // Once for memory, plans and clocks.
        write()?;
        let (first_ms, mut steps) = write()?;
        steps.sort_by(f64::total_cmp);
        let step_ms = steps[steps.len() / 2];
        rows.push(Row {
            batch,
            first_ms,
            step_ms,
            slowest_ms: *steps.last().unwrap_or(&f64::NAN),
            tokens_per_second: batch as f64 / step_ms * 1e3,
            cache_bytes,
        });
    }
    let mut shown = table(&[
        "sequences",
        "first token ms",
        "step ms",
        "slowest",
        "tokens/s",
        "KV cache",
    ]);
    for row in &rows {
        shown.add_row([
            row.batch.to_string(),
            format!("{:.3}", row.first_ms),
            format!("{:.4}", row.step_ms),
            format!("{:.4}", row.slowest_ms),
            format!("{:.0}", row.tokens_per_second),
            human(row.cache_bytes),
        ]);
    }
    align_right(&mut shown, 0..6);
    print(&format!("{shown}\n"))?;
    print(&format!(
        "{}, {}; {} tokens of prompt, {} new, {}; the host's clock, median of the steps after the first token\n",
        engine.device(),
        engine.precision(),
        args.prompt_tokens,
        args.new,
        match (options.sampling, args.beams) {
            (Some(_), _) => "drawn by top-k 50 and top-p 0.9".to_owned(),
            (None, None) => "greedy".to_owned(),
            (None, Some(n)) => format!("{n} beams"),
        },
    ))?;
    if let Some(file) = &args.json {
        write_json(file, &rows)?;
    }
    Ok(ExitCode::SUCCESS)
}
