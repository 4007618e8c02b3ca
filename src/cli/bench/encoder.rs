//! `gemmule bench encoder`: times runs on sets of sequence lengths, from token ids to last hidden state.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use miette::Report;
use serde::Serialize;
use serde_json::Value;

use super::{
    super::{
        Outcome, align_right, human, model::Runnable, print, progress::Bars, since_start, table,
        write_json,
    },
    scan::Scan,
    sets::{self, Set},
};
use crate::{EngineError, engine::Engine};

/// Arguments for the model, the sets and the number of runs.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: Runnable,
    /// Sets of sequence lengths as JSON, {"encoder": [{"name": …, "lens": […]}, …]}, instead of the built-in ones
    #[arg(long, value_name = "FILE")]
    workloads: Option<PathBuf>,
    /// Names of the sets to time; all by default
    #[arg(long, value_delimiter = ',')]
    sets: Vec<String>,
    #[command(flatten)]
    pub scan: Scan,
    /// Write a JSON file with one row per set: its name, tokens, ms, …
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[arg(long, default_value_t = 8)]
    pub warm_up: usize,
    /// Milliseconds of rest before each set. Under sustained load, a card reaches its power limit and lowers its clock, so earlier sets
    /// would slow down later sets
    #[arg(long, value_name = "MS", default_value_t = 500)]
    rest_ms: u64,
    #[arg(long, default_value_t = 60, value_parser = crate::cli::numbers::at_least_one())]
    pub runs: usize,
    /// Number of rounds over all sets; the time of a set is the median of its rounds
    #[arg(long, default_value_t = 1, value_parser = crate::cli::numbers::from_one_to(1000))]
    pub rounds: usize,
}

/// An engine that has produced its first result, and the sets of sequence lengths to time.
pub struct Ready {
    pub engine: Engine,
    /// Sets that fit the model's position table.
    pub sets: Vec<Set>,
    /// A line of text about each skipped set.
    skipped: Vec<String>,
    /// Line of text about the time of the first result.
    started: String,
}

/// Times of one set.
#[derive(Serialize)]
pub struct Row {
    pub set: String,
    pub tokens: u64,
    pub ms: f64,
    /// Host time in microseconds from receiving the batch to enqueueing the last launch.
    pub host_us: Option<f64>,
    /// Bytes of intermediate tensors.
    #[serde(skip)]
    pub bytes: u64,
}

pub(super) fn run(args: Args) -> Outcome {
    let ready = args.prepare()?;
    let rows = ready.time(&args)?;
    if let Some(file) = &args.json {
        write_json(file, &rows)?;
    }
    let mut shown = table(&Row::HEADER);
    for row in &rows {
        shown.add_row(row.cells());
    }
    align_right(&mut shown, 1..Row::HEADER.len());
    print(&format!("{shown}\n{}", ready.in_words(&args, &rows, "")))?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// Builds the engine, reads the sets, and runs the first set once.
    pub fn prepare(&self) -> Result<Ready, Report> {
        let sets = match self.scan.sets() {
            Some(sets) => sets,
            None => sets::named(sets::load(self.workloads.as_deref())?, &self.sets)?,
        };
        let engine = Runnable::build(self.model.builder()?.outputs(self.outputs()))?;
        let (sets, skipped) = served(sets, engine.limits().longest);
        let started = match sets.first() {
            Some(set) => first_result(&engine, set)?,
            None => String::new(),
        };
        Ok(Ready {
            engine,
            sets,
            skipped,
            started,
        })
    }

    /// Returns the outputs to compute: the requested ones, or else the last hidden state.
    fn outputs(&self) -> Vec<String> {
        let usual = || vec!["last_hidden_state".to_owned()];
        self.model.outputs().unwrap_or_else(usual)
    }

    /// Returns the config.json that contains the model's sizes.
    pub fn config(&self) -> Result<Value, EngineError> {
        self.model.config()
    }
}

impl Ready {
    /// Times all sets. The time of a set is the median over its rounds, and the time of a round is the median over its runs.
    pub fn time(&self, args: &Args) -> Result<Vec<Row>, Report> {
        let mut session = self.engine.session()?;
        let bars = Bars::new();
        let mut rounds: Vec<Vec<Row>> = self.sets.iter().map(|_| Vec::new()).collect();
        let n_all = self.sets.len() * args.rounds;
        for round in 0..args.rounds {
            for (nth, set) in self.sets.iter().enumerate() {
                let batch = set.batch(&self.engine.limits())?;
                std::thread::sleep(Duration::from_millis(args.rest_ms));
                let timing = session.time(&batch, args.warm_up, args.runs)?;
                rounds[nth].push(Row {
                    set: set.name.clone(),
                    tokens: set.tokens(),
                    ms: timing.median().into(),
                    host_us: timing.host_median().map(Into::into),
                    bytes: self.engine.bytes_needed(&batch)?,
                });
                bars.show("sets", round * self.sets.len() + nth + 1, n_all);
            }
        }
        let median = |mut rows: Vec<Row>| {
            rows.sort_by(|a, b| a.ms.total_cmp(&b.ms));
            let middle = (rows.len() - 1) / 2;
            rows.swap_remove(middle)
        };
        Ok(rounds.into_iter().map(median).collect())
    }

    /// Describes the measurement: its parameters, how kernels were chosen, the time of the first result, and the skipped sets. The text
    /// `beside` is appended to the first line.
    pub fn in_words<'a>(
        &self,
        args: &Args,
        rows: impl IntoIterator<Item = &'a Row>,
        beside: &str,
    ) -> String {
        let (engine, runs, warm_up) = (&self.engine, args.runs, args.warm_up);
        let rounds = match args.rounds {
            1 => String::new(),
            rounds => format!("{rounds} rounds of "),
        };
        let mut lines = vec![format!(
            "{}, {}; median of {rounds}{runs} runs after {} ms of rest and {warm_up} to warm up, ids to {}{beside}",
            engine.device(),
            engine.precision(),
            args.rest_ms,
            args.outputs().join(", ").replace('_', " "),
        )];
        lines.extend(engine.chosen_by().map(|by| format!("kernels: {by}")));
        lines.push(self.started.clone());
        lines.extend(self.skipped.iter().cloned());
        if args.scan.scan.is_some() {
            lines.push(
                slower_than_larger(rows)
                    .unwrap_or_else(|| "no batch takes longer than a larger one".to_owned()),
            );
        }
        lines.retain(|line| !line.is_empty());
        lines.iter().map(|line| format!("{line}\n")).collect()
    }
}

impl Row {
    /// Column headers for [`Row::cells`].
    pub const HEADER: [&str; 6] = ["set", "tokens", "ms", "tokens/s", "host µs", "activations"];

    /// Returns the cells of this row in a table with the columns [`HEADER`](Self::HEADER).
    pub fn cells(&self) -> [String; 6] {
        [
            self.set.clone(),
            self.tokens.to_string(),
            format!("{:.4}", self.ms),
            format!("{:.0}", self.tokens as f64 / self.ms * 1e3),
            self.host_us
                .map_or_else(|| "—".to_owned(), |us| format!("{us:.1}")),
            human(self.bytes),
        ]
    }
}

/// Runs a set once, and describes how long after the start of the process its result was available.
fn first_result(engine: &Engine, set: &Set) -> Result<String, Report> {
    engine.session()?.run(&set.batch(&engine.limits())?)?;
    let seconds = since_start().as_secs_f64();
    let times = engine.load_times();
    let part = |time: Duration| time.as_secs_f64();
    Ok(format!(
        "first result, of {}, {seconds:.3} s after the start: program {:.3} s, choosing kernels {:.3} s, source {:.3} s, {} kernels compiled and {} from the cache {:.3} s, weights {:.3} s",
        set.name,
        part(times.compile),
        part(times.tune),
        part(times.emit),
        times.compiled,
        times.cached,
        part(times.jit),
        part(times.weights),
    ))
}

/// Splits sets into those that fit the model's position table, and lines of text about the others.
fn served(sets: Vec<Set>, limit: Option<u32>) -> (Vec<Set>, Vec<String>) {
    let limit = limit.unwrap_or(u32::MAX);
    let (served, longer): (Vec<Set>, Vec<Set>) =
        sets.into_iter().partition(|set| set.longest() <= limit);
    let skipped = longer.iter().map(|set| {
        format!(
            "skipped {}: its longest sequence has {} tokens, and the model's position table serves {limit}",
            set.name,
            set.longest()
        )
    });
    (served, skipped.collect())
}

/// Finds pairs of batches in which the batch with fewer tokens takes longer. Describes the pair with the largest ratio of times. Returns
/// `None` if there is no such pair.
fn slower_than_larger<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Option<String> {
    let rows: Vec<&Row> = rows.into_iter().collect();
    let pairs = rows
        .iter()
        .flat_map(|small| rows.iter().map(move |large| (small, large)));
    let (small, large) = pairs
        .filter(|(small, large)| small.tokens < large.tokens && small.ms > large.ms)
        .max_by(|a, b| (a.0.ms / a.1.ms).total_cmp(&(b.0.ms / b.1.ms)))?;
    Some(format!(
        "{} tokens take {:.1} % longer than {}",
        small.tokens,
        (small.ms / large.ms - 1.0) * 100.0,
        large.tokens
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_beyond_the_position_table_are_skipped_with_the_reason() {
        let set = |name: &str, lens: &[u32]| Set {
            name: name.to_owned(),
            lens: lens.to_vec(),
        };
        let sets = vec![set("fits", &[512, 3]), set("long", &[7, 513])];
        let (kept, skipped) = served(sets.clone(), Some(512));
        assert_eq!(kept.len(), 1);
        assert_eq!(
            skipped,
            [
                "skipped long: its longest sequence has 513 tokens, and the model's position table serves 512"
            ]
        );
        assert_eq!(served(sets, None).0.len(), 2);
    }

    #[test]
    fn the_largest_slowdown_is_named() {
        let row = |tokens, ms| Row {
            set: String::new(),
            tokens,
            ms,
            host_us: None,
            bytes: 0,
        };
        let rows = [
            row(100, 1.0),
            row(300, 3.3),
            row(200, 2.0),
            row(400, 3.0),
            row(350, 3.1),
        ];
        assert_eq!(
            slower_than_larger(&rows).as_deref(),
            Some("300 tokens take 10.0 % longer than 400")
        );
        assert_eq!(slower_than_larger(&rows[..2]), None);
        assert_eq!(slower_than_larger(&[]), None);
    }
}
