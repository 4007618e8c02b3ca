//! `gemmule bench generate`: times decode steps.

use std::{collections::BTreeMap, path::PathBuf, process::ExitCode, time::Instant};

use miette::{Report, miette};
use serde::Serialize;

use super::super::{
    Outcome, align_right, human, model::Runnable, numbers::up_to, print, table, write_json,
};
use crate::{
    Engine,
    generate::{DecodeStep, Event, Generator, MAX_TOKENS, Request, SamplingParams},
    runtime::batch::Limits,
    search::{Beams, Rules, Sampling},
    tensor::Format,
};

#[derive(clap::Args)]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    model: Runnable,
    /// Number of sequences that are generated at the same time
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "N,…",
        default_value = "1,32,128"
    )]
    batch: Vec<usize>,
    /// Tokens per prompt, or per source text for an encoder-decoder model
    #[arg(long, value_name = "N", default_value_t = 32)]
    prompt_tokens: usize,
    /// New tokens of each sequence
    #[arg(long, value_name = "N", default_value_t = 128)]
    new: usize,
    /// Take the most probable token instead of sampling
    #[arg(long)]
    greedy: bool,
    /// Sample from the N most probable tokens; 0 for all
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = up_to(MAX_TOKENS))]
    top_k: usize,
    /// Sample from the most probable tokens whose probabilities add up to this
    #[arg(long, value_name = "P", default_value_t = 0.9)]
    top_p: f32,
    /// Use beam search with N beams per sequence
    #[arg(long, value_name = "N", value_parser = up_to(Beams::MAX), conflicts_with = "greedy")]
    beams: Option<usize>,
    /// Also time the kernels of a step by class, halfway through the generation
    #[arg(long)]
    classes: bool,
    /// Write all times to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Times for one number of sequences.
#[derive(Serialize)]
struct Row {
    batch: usize,
    prompt_tokens: usize,
    new: usize,
    /// Number of beams. Set only for beam search; `top_k` and `top_p` are set only for sampling.
    #[serde(skip_serializing_if = "Option::is_none")]
    beams: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_k: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f32>,
    /// Time until all tokens have been generated.
    whole_ms: f64,
    /// Time until every prompt has its first new token, or until the first step of beam search.
    first_ms: f64,
    /// Median time of a step, which generates one token per sequence.
    step_ms: f64,
    slowest_ms: f64,
    tokens_per_second: f64,
    cache_bytes: u64,
    /// Time per step in milliseconds, by kernel class. The class `choosing` is the time of the step minus the time of all its kernels.
    #[serde(skip_serializing_if = "Option::is_none")]
    classes: Option<BTreeMap<&'static str, f64>>,
}

/// Number of timed runs, and number of warm-up runs, for the kernels of a step.
const RUNS: (usize, usize) = (20, 4);

/// Times a step's kernels by class.
fn classes(
    engine: &Engine,
    step: DecodeStep,
    step_ms: f64,
) -> Result<BTreeMap<&'static str, f64>, Report> {
    let found = engine.step_breakdown(step, RUNS.1, RUNS.0)?;
    let shares = found
        .shares
        .iter()
        .map(|s| (s.class.name(), f64::from(s.ms)));
    let choosing = (step_ms - f64::from(found.whole_ms)).max(0.0);
    Ok(shares.chain([("choosing", choosing)]).collect())
}

/// Times, in milliseconds, for generating tokens of several sequences at the same time.
pub(super) struct Together {
    whole_ms: f64,
    first_ms: f64,
    /// Times of the steps in which all sequences took part.
    steps_ms: Vec<f64>,
    /// Number of sequences, number of tokens per prompt, and number of new tokens per sequence.
    of: [usize; 3],
}

impl Together {
    /// Returns the median and the max time of the steps in which all sequences took part.
    pub(super) fn step_ms(&self) -> Result<(f64, f64), Report> {
        let mut steps = self.steps_ms.clone();
        steps.sort_by(f64::total_cmp);
        let [batch, prompt, new] = self.of;
        match (steps.get(steps.len() / 2), steps.last()) {
            (Some(&median), Some(&slowest)) => Ok((median, slowest)),
            _ => Err(miette!(
                "the {batch} sequences of {prompt} tokens never took a step together: prompts are processed in chunks, so some sequences had their {new} new tokens before others began; raise --new"
            )),
        }
    }
}

/// Generates tokens for several prompts at the same time. The generator must be idle and have room for all prompts.
pub(super) fn write(
    generator: &mut Generator,
    limits: Limits,
    (batch, prompt_tokens): (usize, usize),
    options: &SamplingParams,
) -> Result<Together, Report> {
    for i in 0..batch as u64 {
        let ids = (0..prompt_tokens as u64).map(|t| limits.token_id(31 * t + 977 * i + 5));
        let request = Request {
            prompt: ids.collect(),
            options: SamplingParams {
                seed: i,
                ..options.clone()
            },
        };
        generator.admit(request).map_err(|e| miette!("{e}"))?;
    }
    let began = Instant::now();
    let (mut first, mut steps_ms) = (None, Vec::new());
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
        // Beam search returns its tokens at the end. Until then, each poll is a step.
        let is_step = n.count() == batch || (options.beams.is_some() && events.is_empty());
        match (first, is_step) {
            (None, true) => first = Some(began.elapsed().as_secs_f64() * 1e3),
            (Some(_), true) => steps_ms.push(step.elapsed().as_secs_f64() * 1e3),
            _ => {}
        }
    }
    Ok(Together {
        whole_ms: began.elapsed().as_secs_f64() * 1e3,
        first_ms: first.unwrap_or(f64::NAN),
        steps_ms,
        of: [batch, prompt_tokens, options.rules.max_new_tokens],
    })
}

pub(in crate::cli) fn run(args: Args) -> Outcome {
    if args.new < 2 || args.prompt_tokens == 0 || args.batch.contains(&0) {
        return Err(miette!(
            "there is no step to time; expected at least one sequence, one prompt token and two new tokens"
        ));
    }
    let engine = Runnable::build(args.model.builder_of_own_outputs()?.generating())?;
    let limits = engine.limits();
    let options = SamplingParams {
        rules: Rules {
            max_new_tokens: args.new,
            ..Rules::default()
        },
        sampling: (!args.greedy && args.beams.is_none()).then_some(Sampling {
            top_k: args.top_k,
            top_p: args.top_p,
            ..Sampling::default()
        }),
        beams: args.beams.map(Beams::of),
        // The tokens are random, so any decoder start token works.
        decoder_start: engine.has_source().then(|| limits.token_id(0)),
        ..SamplingParams::default()
    };
    let mut rows = Vec::new();
    for &batch in &args.batch {
        let lens = vec![args.prompt_tokens; batch];
        let cache_bytes = engine.cache_bytes_needed(&lens, &options)?;
        let mut generator = engine.generator(cache_bytes)?;
        // Run once to warm up memory, plans and clocks.
        write(
            &mut generator,
            limits,
            (batch, args.prompt_tokens),
            &options,
        )?;
        let written = write(
            &mut generator,
            limits,
            (batch, args.prompt_tokens),
            &options,
        )?;
        let (step_ms, slowest_ms) = written.step_ms()?;
        let step = DecodeStep {
            requests: batch,
            beams: args.beams.unwrap_or(1),
            source: args.prompt_tokens,
            cached: args.new / 2
                + if engine.has_source() {
                    0
                } else {
                    args.prompt_tokens
                },
        };
        let timed = args.classes.then(|| classes(&engine, step, step_ms));
        rows.push(Row {
            batch,
            prompt_tokens: args.prompt_tokens,
            new: args.new,
            beams: args.beams,
            top_k: options.sampling.map(|s| s.top_k),
            top_p: options.sampling.map(|s| s.top_p),
            whole_ms: written.whole_ms,
            first_ms: written.first_ms,
            step_ms,
            slowest_ms,
            tokens_per_second: batch as f64 / step_ms * 1e3,
            cache_bytes,
            classes: timed.transpose()?,
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
        "{}, {}{}; {} tokens of prompt, {} new, {}; the host's clock, median of the steps after the first token\n",
        engine.device(),
        engine.precision(),
        match engine.program().cache_format() {
            Format::Plain(_) => String::new(),
            format @ (Format::Scaled(_) | Format::E4m3) => format!(", KV cache in {format}"),
        },
        args.prompt_tokens,
        args.new,
        match (options.sampling, args.beams) {
            (Some(s), _) => format!("drawn by top-k {} and top-p {}", s.top_k, s.top_p),
            (None, None) => "greedy".to_owned(),
            (None, Some(n)) => format!("{n} beams"),
        },
    ))?;
    if args.classes {
        let names = rows.first().and_then(|row| row.classes.as_ref());
        let names = names.into_iter().flat_map(BTreeMap::keys).copied();
        let header: Vec<&str> = ["sequences"].into_iter().chain(names).collect();
        let mut shown = table(&header);
        for row in &rows {
            let times = row
                .classes
                .iter()
                .flat_map(BTreeMap::values)
                .map(|ms| format!("{ms:.4}"));
            shown.add_row([row.batch.to_string()].into_iter().chain(times));
        }
        align_right(&mut shown, 0..header.len());
        print(&format!("{shown}\n"))?;
    }
    if let Some(file) = &args.json {
        write_json(file, &rows)?;
    }
    Ok(ExitCode::SUCCESS)
}
