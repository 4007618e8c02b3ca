//! `gemmule simulate`: compares schedulers on synthetic or recorded load.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use miette::{IntoDiagnostic, Report, miette};
use serde_json::json;

use super::{Outcome, align_right, print, print_json, say, table, write_file};
use crate::{
    EngineError,
    files::{self, Kind},
    schedule::{CostTable, Micros, NAMES, Settings, Waiting, scheduler},
    simulate::{
        Devices, Lengths, Line, Load, Panel, Rates, Summary, chart, parse_events, parse_trace,
        replay, simulate,
    },
};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Schedulers, separated by commas, or `all`
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "packed,dp,naive,no-batch"
    )]
    scheduler: Vec<String>,
    /// Cost table (times of batches by size) in RON, such as `examples/costs.ron`
    #[arg(long, value_name = "FILE")]
    costs: PathBuf,
    /// Requests per second: A..B, A..B/N for N rates, or a list separated by commas
    #[arg(long, value_name = "RATES", default_value = "20..1500")]
    rates: Rates,
    /// Lengths of requests in tokens: normal:MIN,MAX,MEAN,DEVIATION, uniform:MIN,MAX or fixed:N
    #[arg(
        long = "lengths",
        alias = "lens",
        value_name = "LENGTHS",
        default_value = "normal:5,500,250,90"
    )]
    lens: Lengths,
    /// Duration of the load in seconds
    #[arg(long, value_name = "S", default_value_t = 60.0)]
    seconds: f64,
    /// Simulate the requests that are recorded in this file, one per line, instead of synthetic requests
    #[arg(long, value_name = "FILE", conflicts_with_all = ["rates", "lens", "seconds", "deadline_ms"])]
    trace: Option<PathBuf>,
    /// Replay the trace of a server: run the scheduler at the recorded times, and check that it makes the same decisions. Needs the
    /// server's --scheduler, --costs and settings
    #[arg(long, requires = "trace", conflicts_with_all = ["devices", "depth", "bytes", "figure", "json"])]
    replay: bool,
    /// Deadlines in milliseconds after the arrival: N, or A..B to draw them uniformly
    #[arg(long, value_name = "MS")]
    deadline_ms: Option<Span>,
    /// Forward passes per request: 1 for an encoder, the number of new tokens for a decoder
    #[arg(long, value_name = "N", default_value_t = 1)]
    steps: u32,
    /// Seed of the arrivals
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Number of devices
    #[arg(long, value_name = "N", default_value_t = 1)]
    devices: u16,
    /// Max number of batches in a device's queue, including the running batch
    #[arg(long, value_name = "N", default_value_t = 2)]
    depth: u8,
    /// Max bytes of a batch's intermediate tensors
    #[arg(long, value_name = "BYTES", default_value_t = u64::MAX)]
    bytes: u64,
    #[command(flatten)]
    settings: Chosen,
    /// Draw throughput, latency and fraction of deadlines met over the load, as an SVG file
    #[arg(long, value_name = "FILE")]
    figure: Option<PathBuf>,
    /// Print all numbers as JSON
    #[arg(long)]
    json: bool,
}

/// Arguments for [`Settings`].
#[derive(clap::Args, Clone)]
pub(super) struct Chosen {
    /// Target latency in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 50.0)]
    slo_ms: f64,
    /// Max time in milliseconds for which the lazy schedulers (lazy-naive, lazy-dp) wait for further requests
    #[arg(long, value_name = "MS", default_value_t = 10.0)]
    lazy_ms: f64,
    /// Max requests in a batch, for the schedulers `naive` and `dp`
    #[arg(long, value_name = "N", default_value_t = 20)]
    most: usize,
    /// Rows per batch, for the schedulers of the TCB paper
    #[arg(long, value_name = "N", default_value_t = 64)]
    rows: u32,
    /// Tokens per row, for the schedulers of the TCB paper
    #[arg(long, value_name = "N", default_value_t = 512)]
    length: u32,
    /// Fraction of a row's requests that concat-das and slotted-das select by utility alone
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    dominance: f64,
}

impl Chosen {
    pub(super) fn settings(&self) -> Result<Settings, Report> {
        Ok(Settings {
            slo: millis("--slo-ms", self.slo_ms)?,
            timeout: millis("--lazy-ms", self.lazy_ms)?,
            most: self.most,
            rows: self.rows,
            length: self.length,
            dominance: self.dominance,
        })
    }
}

/// Parses an option in milliseconds.
fn millis(option: &str, ms: f64) -> Result<Micros, Report> {
    match (0.0..=1e9).contains(&ms) {
        true => Ok(Micros::of_seconds(ms / 1e3)),
        false => Err(miette!(
            "{option} is {ms}; expected milliseconds from 0 to 1e9"
        )),
    }
}

/// Range of milliseconds.
#[derive(Clone, Copy)]
struct Span(f64, f64);

impl std::str::FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (from, to) = text.split_once("..").unwrap_or((text, text));
        let ms = |text: &str| {
            let ms = text.trim().parse::<f64>().ok();
            ms.filter(|ms| (0.0..=1e9).contains(ms))
                .ok_or_else(|| format!("`{text}` is not a number of milliseconds from 0 to 1e9"))
        };
        match (ms(from)?, ms(to)?) {
            (from, to) if from <= to => Ok(Self(from, to)),
            (from, to) => Err(format!("{from} is more than {to}")),
        }
    }
}

/// Max number of requests that a command simulates per scheduler and rate.
const MOST_REQUESTS: f64 = 2e7;

/// Results of a scheduler under one load.
struct Point {
    summary: Summary,
    took: Duration,
    decisions: u64,
}

pub(super) fn run(args: Args) -> Outcome {
    let settings = args.settings.settings()?;
    let names: Vec<&str> = match args.scheduler.as_slice() {
        [all] if all == "all" => NAMES.to_vec(),
        names => names.iter().map(|name| name.trim()).collect(),
    };
    if args.devices == 0 || args.depth == 0 {
        return Err(miette!(
            "--devices and --depth must be at least 1; {} and {} were given",
            args.devices,
            args.depth
        ));
    }
    let text = files::text(&args.costs, Kind::Costs).map_err(EngineError::from)?;
    let costs =
        CostTable::parse(&text).map_err(|error| miette!("`{}`: {error}", args.costs.display()))?;
    if let (true, Some(file)) = (args.replay, &args.trace) {
        return replayed(file, &names, &settings, &costs);
    }
    let loads = loads(&args)?;
    let bytes = vec![args.bytes; usize::from(args.devices)];
    let on = Devices {
        costs: &costs,
        bytes,
        depth: args.depth,
    };
    let mut points: Vec<Vec<Point>> = Vec::new();
    for name in &names {
        let mut of_name = Vec::new();
        for arrivals in &loads {
            let mut scheduler = scheduler(name, &settings).into_diagnostic()?;
            let began = Instant::now();
            let outcome = simulate(arrivals, &mut *scheduler, &on).into_diagnostic()?;
            of_name.push(Point {
                took: began.elapsed(),
                decisions: outcome.decisions,
                summary: Summary::of(arrivals, &outcome, on.bytes.len()),
            });
        }
        points.push(of_name);
    }
    if let Some(file) = &args.figure {
        write_file(file, figure(&args, &names, &points, &costs).as_bytes())?;
    }
    if args.json {
        let all = names.iter().zip(&points).flat_map(|(name, points)| {
            points.iter().map(move |point| {
                json!({
                    "scheduler": name, "summary": point.summary, "decisions": point.decisions,
                    "seconds": point.took.as_secs_f64(),
                })
            })
        });
        print_json(&json!({"costs": costs.about, "runs": all.collect::<Vec<_>>()}))?;
        return Ok(ExitCode::SUCCESS);
    }
    print(&shown(&names, &points))?;
    let all = || points.iter().flatten();
    let seconds: f64 = all().map(|point| point.took.as_secs_f64()).sum();
    let requests: usize = all().map(|point| point.summary.requests).sum();
    say(&format!(
        "{requests} requests in {seconds:.2} s, {:.0} per second; costs: {}",
        requests as f64 / seconds.max(1e-9),
        costs.about
    ));
    Ok(ExitCode::SUCCESS)
}

fn replayed(file: &Path, names: &[&str], settings: &Settings, costs: &CostTable) -> Outcome {
    let &[name] = names else {
        return Err(miette!(
            "--replay runs one scheduler, the server's, but {} are named; give --scheduler one name",
            names.len()
        ));
    };
    let text = files::text(file, Kind::Trace).map_err(EngineError::from)?;
    let wrong = |e: &dyn std::fmt::Display| miette!("`{}`: {e}", file.display());
    let events = parse_events(&text).map_err(|e| wrong(&e))?;
    let mut scheduler = scheduler(name, settings).into_diagnostic()?;
    let done = replay(&events, &mut *scheduler, costs).map_err(|e| wrong(&e))?;
    say(&format!(
        "{} requests, {} decisions, {} batches: all decisions agree with the server's",
        done.requests, done.decisions, done.batches
    ));
    Ok(ExitCode::SUCCESS)
}

/// Returns the requests that arrive, for each of --rates or from the trace.
fn loads(args: &Args) -> Result<Vec<Vec<Waiting>>, Report> {
    if let Some(file) = &args.trace {
        let text = files::text(file, Kind::Trace).map_err(EngineError::from)?;
        let arrivals = parse_trace(&text).map_err(|e| miette!("`{}`: {e}", file.display()))?;
        return Ok(vec![arrivals]);
    }
    if args.steps == 0 {
        return Err(miette!("--steps is 0; expected at least 1"));
    }
    let mut loads = Vec::new();
    for &rate in &args.rates.0 {
        let requests = (rate * args.seconds).round();
        if !(1.0..=MOST_REQUESTS).contains(&requests) {
            return Err(miette!(
                "{rate} requests per second for {} s are {requests} requests; expected from 1 to {MOST_REQUESTS}: change --rates or --seconds",
                args.seconds
            ));
        }
        let deadlines = args.deadline_ms.map(|Span(from, to)| {
            let span = |ms: f64| Micros::of_seconds(ms / 1e3);
            (span(from), span(to))
        });
        let load = Load {
            rate,
            requests: requests as usize,
            lengths: args.lens.clone(),
            steps: args.steps,
            deadlines,
            seed: args.seed,
        };
        loads.push(load.arrivals());
    }
    Ok(loads)
}

fn shown(names: &[&str], points: &[Vec<Point>]) -> String {
    let mut rows = table(&[
        "scheduler",
        "requests/s",
        "answers/s",
        "mean ms",
        "least",
        "most",
        "p99",
        "in time",
        "refused",
        "a batch",
        "valid tokens",
        "busy",
    ]);
    for (name, points) in names.iter().zip(points) {
        for Point { summary: s, .. } in points {
            let refused = s.expired + s.hopeless + s.too_large;
            let mut row = vec![
                (*name).to_owned(),
                format!("{:.0}", s.offered),
                format!("{:.0}", s.answered),
            ];
            // Under overload, latencies depend only on how long the load lasts, so they are shown as infinite.
            row.extend(
                [s.mean, s.least, s.most, s.p99].map(|ms| match s.is_saturated() {
                    true => "+∞".to_owned(),
                    false => format!("{ms:.2}"),
                }),
            );
            let answered = s.requests - refused;
            row.extend([
                format!("{:.1} %", s.in_time * 100.0),
                refused.to_string(),
                format!("{:.1}", answered as f64 / (s.batches as f64).max(1.0)),
                format!("{:.1} %", s.valid * 100.0),
                format!("{:.0} %", s.busy * 100.0),
            ]);
            rows.add_row(row);
        }
    }
    align_right(&mut rows, 1..12);
    format!("{rows}\n")
}

fn figure(args: &Args, names: &[&str], points: &[Vec<Point>], costs: &CostTable) -> String {
    let first = points.first().map(Vec::as_slice).unwrap_or_default();
    let loads: Vec<f64> = first.iter().map(|point| point.summary.offered).collect();
    let panel = |title: &str, log, value: &dyn Fn(&Summary) -> Option<f64>| Panel {
        title: title.to_owned(),
        log,
        lines: names
            .iter()
            .zip(points)
            .map(|(name, points)| Line {
                name: (*name).to_owned(),
                values: points.iter().map(|point| value(&point.summary)).collect(),
            })
            .collect(),
    };
    let kept_up = |s: &Summary| !s.is_saturated();
    let mut panels = vec![
        panel("answers a second", false, &|s| Some(s.answered)),
        panel(
            "mean latency in ms, while the device keeps up",
            true,
            &|s| kept_up(s).then_some(s.mean),
        ),
    ];
    if args.deadline_ms.is_some() || args.trace.is_some() {
        panels.push(panel("share of deadlines met", false, &|s| Some(s.in_time)));
    }
    let of = match &args.trace {
        Some(file) => format!("the trace {}", file.display()),
        None => format!("lengths {}", args.lens),
    };
    chart(
        &format!("Schedulers in simulation: {of}; costs: {}", costs.about),
        &loads,
        &panels,
    )
}
