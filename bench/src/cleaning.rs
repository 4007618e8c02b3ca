//! Measures the use of the KV cache while sequences of random lengths are generated (TCB paper, section 4.2.2; see docs/papers.md). The
//! memory of a sequence is freed either when the sequence ends or when its whole batch ends.

use std::{collections::VecDeque, path::PathBuf, process::ExitCode};

use gemmule::{
    DeviceChoice, Engine, EngineError,
    cli::{Outcome, Runnable, align_right, human, print, table, write_file, write_json},
    generate::{AdmitError, Event, Generator, Request, SamplingParams, Ticket},
    kernels::trial::uniform,
    measure::shipped_configs,
    runtime::weights::RandomWeights,
    search::Rules,
    text::config,
};
use miette::{Report, miette};
use serde::Serialize;

use crate::figure::{Figure, Kind, Series};

const MIB: f64 = (1u64 << 20) as f64;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Name of a shipped description of a generative model, or the path of a RON file
    #[arg(default_value = "gpt2")]
    model: String,
    /// Read the sizes from this config.json; default: the sizes of the shipped description
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    device: DeviceChoice,
    /// Number of requests, all waiting from the start
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u16).range(1..))]
    requests: u16,
    /// Requests in a batch; the cache has room for this number of requests of maximum length
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Tokens of each prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 16)]
    prompt_tokens: u32,
    /// Minimum number of new tokens of a request
    #[arg(long, value_name = "TOKENS", default_value_t = 8)]
    shortest: u32,
    /// Maximum number of new tokens of a request
    #[arg(long, value_name = "TOKENS", default_value_t = 160)]
    longest: u32,
    /// Seed of all random values: lengths, ids and weights
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the state after each step to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the bytes in use after each step into this file
    #[arg(long, value_name = "FILE")]
    figure: Option<PathBuf>,
}

/// Policy that determines when the memory of a sequence is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Cleaning {
    /// When the sequence ends.
    Early,
    /// When all sequences of its batch have ended.
    ByBatch,
}

impl Cleaning {
    fn name(self) -> &'static str {
        match self {
            Self::Early => "freed when a sequence ends",
            Self::ByBatch => "freed when its batch ends",
        }
    }
}

/// Results of generation with one policy. `held`, `running` and `sequences` have one value per step.
#[derive(Serialize)]
struct Written {
    cleaning: Cleaning,
    /// Bytes of the cache that are not available to other sequences.
    held: Vec<u64>,
    /// Bytes of the cache that unfinished sequences use.
    running: Vec<u64>,
    /// Number of unfinished sequences.
    sequences: Vec<usize>,
    /// Tokens generated for each request, in request order.
    #[serde(skip)]
    tokens: Vec<Vec<u32>>,
}

#[derive(Serialize)]
struct Measured {
    model: String,
    seed: u64,
    /// Number of new tokens of each request.
    new_tokens: Vec<u32>,
    /// Size of the cache in bytes.
    cache: u64,
    policies: Vec<Written>,
}

pub(crate) fn run(args: Args) -> Outcome {
    let measured = measure(&args)?;
    print(&summary(&measured))?;
    if let Some(file) = &args.json {
        write_json(file, &measured)?;
    }
    if let Some(file) = &args.figure {
        write_file(file, figure(&measured).svg()?.as_bytes())?;
        print(&format!("drawn in {}\n", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(args: &Args) -> Result<Measured, Report> {
    if args.shortest == 0 || args.shortest > args.longest {
        return Err(miette!(
            "the range from {} to {} new tokens is invalid; expected 1 ≤ --shortest ≤ --longest",
            args.shortest,
            args.longest
        ));
    }
    let config = match &args.config {
        Some(file) => config(file)?,
        None => {
            let mut shipped = shipped_configs()?.into_iter();
            let found = shipped.find(|&(_, model, _)| model == args.model);
            found.ok_or(EngineError::NoConfig)?.2
        }
    };
    let builder = Engine::builder(&args.model)
        .config_value(config)
        .device(args.device)
        .random_weights(RandomWeights {
            seed: args.seed,
            deviation: 0.02,
        });
    let engine = Runnable::build(builder.generating())?;
    let requests = requests(args, &engine);
    let longest = SamplingParams {
        rules: rules(args.longest),
        ..SamplingParams::default()
    };
    let prompts = vec![args.prompt_tokens as usize; args.batch.into()];
    let cache = engine.cache_bytes_needed(&prompts, &longest)?;
    let mut policies = Vec::new();
    for cleaning in [Cleaning::Early, Cleaning::ByBatch] {
        let mut generator = engine.generator(cache)?;
        policies.push(write(
            &mut generator,
            &requests,
            args.batch.into(),
            cleaning,
        )?);
    }
    Ok(Measured {
        model: args.model.clone(),
        seed: args.seed,
        new_tokens: requests
            .iter()
            .map(|r| r.options.rules.max_new_tokens as u32)
            .collect(),
        cache,
        policies,
    })
}

fn rules(new: u32) -> Rules {
    Rules {
        max_new_tokens: new as usize,
        ..Rules::default()
    }
}

/// Returns requests with prompts of equal length and random numbers of new tokens.
fn requests(args: &Args, engine: &Engine) -> Vec<Request> {
    let mut state = args.seed;
    let limits = engine.limits();
    let n_lengths = u64::from(args.longest - args.shortest) + 1;
    (0..args.requests)
        .map(|_| {
            let new = args.shortest + (uniform(&mut state) % n_lengths) as u32;
            let ids = (0..args.prompt_tokens).map(|_| limits.token_id(uniform(&mut state)));
            Request {
                prompt: ids.collect(),
                options: SamplingParams {
                    rules: rules(new),
                    ..SamplingParams::default()
                },
            }
        })
        .collect()
}

/// Generates all requests in order. Requests start either as soon as memory is available or batch by batch.
fn write(
    generator: &mut Generator,
    requests: &[Request],
    batch: usize,
    cleaning: Cleaning,
) -> Result<Written, Report> {
    let mut waiting: VecDeque<&Request> = requests.iter().collect();
    let mut tickets: Vec<Ticket> = Vec::new();
    let mut written = Written {
        cleaning,
        held: Vec::new(),
        running: Vec::new(),
        sequences: Vec::new(),
        tokens: Vec::new(),
    };
    let (mut running, mut reserved) = (0, 0);
    while !waiting.is_empty() || generator.is_busy() {
        let most = match cleaning {
            Cleaning::Early => usize::MAX,
            Cleaning::ByBatch if running == 0 => batch,
            Cleaning::ByBatch => 0,
        };
        let before = running;
        while running - before < most
            && let Some(next) = waiting.front()
        {
            match generator.admit((*next).clone()) {
                Ok(ticket) => tickets.push(ticket),
                Err(AdmitError::Full { .. }) if running > 0 => break,
                Err(problem) => return Err(miette!("{problem}")),
            }
            running += 1;
            waiting.pop_front();
        }
        written.tokens.resize(tickets.len(), Vec::new());
        let own = generator.cache_bytes().0;
        reserved = match cleaning {
            Cleaning::Early => own,
            Cleaning::ByBatch if before == 0 => own,
            Cleaning::ByBatch => reserved,
        };
        written.held.push(reserved);
        written.running.push(own);
        written.sequences.push(running);
        for event in generator.poll()? {
            match event {
                Event::Token { ticket, id, .. } => {
                    if let Some(at) = tickets.iter().position(|&t| t == ticket) {
                        written.tokens[at].push(id);
                    }
                }
                Event::Done { .. } => running -= 1,
                Event::Failed { problem, .. } => return Err(miette!("{problem}")),
                Event::Found { .. } => {}
            }
        }
    }
    Ok(written)
}

fn mean(values: impl ExactSizeIterator<Item = u64>) -> f64 {
    let n = values.len().max(1) as f64;
    values.sum::<u64>() as f64 / n
}

impl Written {
    /// Returns the mean fraction of the held bytes that belongs to unfinished sequences.
    fn used(&self) -> f64 {
        mean(self.running.iter().copied()) / mean(self.held.iter().copied()).max(1.0)
    }
}

fn summary(measured: &Measured) -> String {
    let mut rows = table(&[
        "memory",
        "steps",
        "sequences per step",
        "fraction of held bytes in use",
    ]);
    for policy in &measured.policies {
        rows.add_row([
            policy.cleaning.name().to_owned(),
            policy.held.len().to_string(),
            format!("{:.2}", mean(policy.sequences.iter().map(|&n| n as u64))),
            format!("{:.0} %", 100.0 * policy.used()),
        ]);
    }
    align_right(&mut rows, 1..4);
    format!(
        "{rows}\n{}, seed {}, {} requests of {} new tokens, a cache of {}\n",
        measured.model,
        measured.seed,
        measured.new_tokens.len(),
        measured.new_tokens.iter().sum::<u32>(),
        human(measured.cache),
    )
}

fn figure(measured: &Measured) -> Figure {
    let steps = measured.policies.iter().map(|p| p.held.len()).max();
    let steps = steps.unwrap_or(0);
    let series = |name: String, bytes: &[u64]| {
        let values = (0..steps).map(|i| bytes.get(i).map(|&bytes| bytes as f64 / MIB));
        Series::new(name, values.collect())
    };
    let mut all = Vec::new();
    for policy in &measured.policies {
        all.push(series(policy.cleaning.name().to_owned(), &policy.held));
        if policy.cleaning == Cleaning::ByBatch {
            all.push(series(
                "in use by unfinished sequences".to_owned(),
                &policy.running,
            ));
        }
    }
    Figure {
        title: format!(
            "KV cache during the generation of {} requests ({})",
            measured.new_tokens.len(),
            measured.model
        ),
        x_label: "step".to_owned(),
        y_label: "held, MiB".to_owned(),
        groups: (1..=steps).map(|i| i.to_string()).collect(),
        series: all,
        kind: Kind::Lines,
        log_y: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Arguments for a minimal generative model.
    fn args(folder: &std::path::Path) -> Args {
        let config = folder.join("config.json");
        let sizes = r#"{"model_type": "gpt2", "vocab_size": 61, "n_positions": 128, "n_embd": 16, "n_layer": 1,
            "n_head": 2, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}"#;
        std::fs::write(&config, sizes).expect("the folder is there");
        Args {
            model: "gpt2".to_owned(),
            config: Some(config),
            device: DeviceChoice::Cpu,
            requests: 12,
            batch: 3,
            prompt_tokens: 5,
            shortest: 3,
            longest: 100,
            seed: 7,
            json: None,
            figure: None,
        }
    }

    #[test]
    fn memory_of_finished_sequences_is_reused_while_others_run() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let measured = measure(&args(folder.path())).expect("it writes");
        let [early, batch] = &measured.policies[..] else {
            panic!("two policies")
        };
        // The tokens of a request do not depend on when memory is freed.
        assert_eq!(early.tokens, batch.tokens);
        let lens: Vec<u32> = early.tokens.iter().map(|t| t.len() as u32).collect();
        assert_eq!(lens, measured.new_tokens);
        // With early freeing, all held bytes belong to unfinished sequences and never exceed the size of the cache.
        assert_eq!(early.held, early.running);
        assert!(early.held.iter().all(|&bytes| bytes <= measured.cache));
        assert!(batch.used() < 0.9 && early.used() == 1.0);
        // A batch has three requests. With early freeing, further requests start while those of the first batch are still running, because
        // the cache has room for more than three short requests.
        let most = early.sequences.iter().max();
        assert!(most > Some(&3), "{most:?}");
        assert!(4 * early.held.len() < 3 * batch.held.len());
        assert!(!early.sequences[..early.sequences.len() - 1].contains(&0));
    }

    #[test]
    fn the_figure_has_a_line_for_each_policy_and_one_for_memory_in_use() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let measured = measure(&args(folder.path())).expect("it writes");
        let svg = figure(&measured).svg().expect("it can be drawn");
        for name in [
            "freed when a sequence ends",
            "freed when its batch ends",
            "in use by unfinished sequences",
        ] {
            assert!(svg.contains(name), "{name}");
        }
        assert!(summary(&measured).contains("100 %"));
    }

    #[test]
    fn invalid_lengths_are_rejected() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let wrong = Args {
            shortest: 9,
            longest: 8,
            ..args(folder.path())
        };
        let problem = measure(&wrong).map(|_| ()).expect_err("no such length");
        assert!(problem.to_string().contains("from 9 to 8"), "{problem}");
    }
}
