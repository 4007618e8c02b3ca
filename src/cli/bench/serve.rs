//! `gemmule bench serve`: measures latencies under load, of a server or of a model in this process.
//!
//! In an open loop, requests are sent at planned times without waiting for responses, and latencies are measured from the planned times. A
//! slow server therefore does not reduce the load, as it would in a closed loop (coordinated omission).

mod client;
mod inputs;
mod inside;

use std::{
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use miette::{IntoDiagnostic, Report, miette};
use serde::Serialize;

use super::super::{Outcome, align_right, allow_connections, print, table, write_json};
use crate::{
    schedule::Micros,
    simulate::{Lengths, Load},
};
use client::{Route, Server};

#[derive(clap::Args)]
pub(in crate::cli) struct Args {
    /// Address of the server, such as http://127.0.0.1:8080
    #[arg(required_unless_present = "in_process", conflicts_with = "in_process")]
    url: Option<String>,
    /// Requests per second (open loop); they are sent without waiting for responses
    #[arg(
        long,
        value_name = "R",
        required_unless_present = "closed",
        conflicts_with = "closed"
    )]
    rate: Option<f64>,
    /// Number of clients (closed loop), instead of a rate; each client sends its next request after the previous response
    #[arg(long, value_name = "N")]
    closed: Option<usize>,
    /// Duration of the measurement in seconds, after --warm-up
    #[arg(long, value_name = "S", default_value_t = 10.0)]
    seconds: f64,
    /// Seconds of load before the measurement
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    warm_up: f64,
    /// Text lengths in tokens, including two special tokens: normal:MIN,MAX,MEAN,DEVIATION, uniform:MIN,MAX or fixed:N. Each word of a text
    /// is about one token
    #[arg(
        long = "lengths",
        alias = "lens",
        value_name = "LENGTHS",
        default_value = "normal:5,500,250,90"
    )]
    lens: Lengths,
    #[command(flatten)]
    inputs: inputs::InputOptions,
    /// Route to test: embeddings, or streamed completions
    #[arg(long, default_value = "embeddings")]
    route: Route,
    /// New tokens of a completion
    #[arg(long, value_name = "N", default_value_t = 32)]
    new: u32,
    /// Request completions as whole responses instead of streams
    #[arg(long)]
    whole: bool,
    /// Name of the model in requests
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// File with the API key
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Max number of connections, which are opened as needed. If all are in use, a request waits. Its latency includes the wait, and such
    /// requests are counted
    #[arg(long, value_name = "N", default_value_t = 16_384)]
    connections: usize,
    /// Deadline in milliseconds after the planned time. It is sent to the server, and responses within it are counted
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    deadline_ms: Option<u64>,
    /// Seed of requests and times
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Test a model in this process without HTTP, and compare it with its engine alone. For embeddings, the engine runs batches. For
    /// completions, it runs decode steps, and --closed is needed. Needs --weights
    #[arg(long, requires = "weights")]
    in_process: bool,
    #[command(flatten)]
    inside: inside::InsideOptions,
    /// Write all numbers to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Counts during a measurement.
struct Counted {
    latency: Histogram<u64>,
    first: Histogram<u64>,
    /// Number of responses by status; status 0 means that there was no response.
    statuses: std::collections::BTreeMap<u16, u64>,
    tokens: u64,
    /// Number of successful responses that arrived within the measured time, and the number of their tokens. Their requests may have been
    /// sent before that time.
    came: (u64, u64),
    /// Number of successful responses that arrived before their deadlines, and the number of their tokens.
    in_time: (u64, u64),
    /// Number of requests that waited for a connection.
    waited: u64,
    /// Distinct problems, at most 64.
    problems: Vec<String>,
    last: Duration,
    latest: Duration,
}

/// Result of one request.
#[derive(Default)]
struct Answered {
    status: u16,
    tokens: u64,
    /// Time when the first part of a stream arrived.
    first: Option<Instant>,
    /// Whether the request waited because all connections were in use.
    has_waited: bool,
    problem: Option<String>,
}

/// Receiver of requests: a server, or a model in this process.
trait Target: Clone + Send + Sync + 'static {
    fn ask(&self, number: u64, tokens: u32) -> impl Future<Output = Answered> + Send;
}

#[derive(Serialize)]
struct Times {
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    most: f64,
}

/// Results of a measurement. Durations from the arguments are in seconds, latencies in milliseconds.
#[derive(Serialize)]
struct Run {
    target: String,
    mode: String,
    lens: String,
    seconds: f64,
    sent: u64,
    answered: u64,
    statuses: std::collections::BTreeMap<u16, u64>,
    requests_per_second: f64,
    tokens_per_second: f64,
    latency: Option<Times>,
    /// Time until the first part of a stream.
    first: Option<Times>,
    /// Max delay between the planned and the actual time of sending. If it is large, this machine cannot send at this rate.
    late_ms: f64,
    /// Number of requests that found all connections in use. If it is not 0, the load differs from the plan.
    waited_for_connection: u64,
    in_time: Option<InTime>,
    /// Tokens per second of the engine without the server, for lengths from the same distribution as those of the requests. `share` is the
    /// fraction of this throughput that the server reached.
    offline_tokens_per_second: Option<f64>,
    share: Option<f64>,
    /// Reason why the engine alone was not measured.
    offline_problem: Option<String>,
    problems: Vec<String>,
}

/// Responses before a deadline.
#[derive(Serialize)]
struct InTime {
    deadline_ms: u64,
    answered: u64,
    share: f64,
    requests_per_second: f64,
    tokens_per_second: f64,
}

const MOST_SECONDS: f64 = 86_400.0;
const MOST_REQUESTS: f64 = 5e7;

pub(in crate::cli) fn run(args: Args) -> Outcome {
    let numbers = [
        ("--seconds", args.seconds, 0.01),
        ("--warm-up", args.warm_up, 0.0),
        ("--rate", args.rate.unwrap_or(1.0), 0.001),
    ];
    for (option, value, least) in numbers {
        let most = if option == "--rate" {
            1e6
        } else {
            MOST_SECONDS
        };
        if !(least..=most).contains(&value) {
            return Err(miette!(
                "{option} is {value}; expected a number from {least} to {most}"
            ));
        }
    }
    for (option, value) in [
        ("--closed", args.closed.unwrap_or(1)),
        ("--connections", args.connections),
    ] {
        if !(1..=65_536).contains(&value) {
            return Err(miette!("{option} is {value}; expected from 1 to 65536"));
        }
    }
    allow_connections();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads((threads / 2).max(1))
        .thread_name("clients")
        .enable_all()
        .build()
        .into_diagnostic()?;
    let mut report = match (&args.url, args.in_process) {
        (Some(url), false) => {
            let server = Server::new(url, &args)?;
            drive(&runtime, &args, server, url.clone())?
        }
        _ => {
            let (target, offline) = inside::start(&args)?;
            let name = target.name();
            let mut report = drive(&runtime, &args, target, name)?;
            match offline {
                Ok(rate) => {
                    report.share = Some(report.tokens_per_second / rate.max(1e-9));
                    report.offline_tokens_per_second = Some(rate);
                }
                Err(problem) => report.offline_problem = Some(problem),
            }
            report
        }
    };
    report.problems.truncate(8);
    print(&shown(&report))?;
    if let Some(file) = &args.json {
        write_json(file, &report)?;
    }
    let failed = report.answered == 0;
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Sends requests to `target` as the arguments specify, and waits for the responses.
fn drive<T: Target>(
    runtime: &tokio::runtime::Runtime,
    args: &Args,
    target: T,
    name: String,
) -> Result<Run, Report> {
    let histogram = || Histogram::<u64>::new_with_bounds(1, 3_600_000_000, 3).into_diagnostic();
    let counted = Arc::new(Mutex::new(Counted {
        latency: histogram()?,
        first: histogram()?,
        statuses: Default::default(),
        tokens: 0,
        came: (0, 0),
        in_time: (0, 0),
        waited: 0,
        problems: Vec::new(),
        last: Duration::ZERO,
        latest: Duration::ZERO,
    }));
    let all = args.warm_up + args.seconds;
    // A closed loop sends requests with the same lengths and in the same order as an open loop, but not at planned times.
    let rate = args.rate.unwrap_or(MOST_REQUESTS / all / 10.0).max(0.001);
    let requests = match args.rate {
        Some(rate) => (rate * all).ceil(),
        None => 65_536.0,
    };
    if requests > MOST_REQUESTS {
        return Err(miette!(
            "{requests} requests are too many for one run; expected at most {MOST_REQUESTS}: change --rate or --seconds"
        ));
    }
    let load = Load {
        rate,
        requests: requests as usize,
        lengths: args.lens.clone(),
        steps: 1,
        deadlines: None,
        seed: args.seed,
    };
    let arrivals = load.arrivals();
    let began = Instant::now();
    let warm = began + Duration::from_secs_f64(args.warm_up);
    let over = warm + Duration::from_secs_f64(args.seconds);
    let deadline = args.deadline_ms.map(Duration::from_millis);
    let one = {
        let counted = Arc::clone(&counted);
        move |target: T, number: u64, tokens: u32, planned: Option<Instant>| {
            let counted = Arc::clone(&counted);
            async move {
                let sent = Instant::now();
                let planned = planned.unwrap_or(sent);
                let answered = target.ask(number, tokens).await;
                let done = Instant::now();
                if answered.status == 200 && (warm..over).contains(&done) {
                    let mut counted = counted.lock().unwrap_or_else(PoisonError::into_inner);
                    counted.came.0 += 1;
                    counted.came.1 += answered.tokens;
                }
                // Count only requests that were due within the measured time. After it, the clients of a closed loop stop one after
                // another, so the load decreases.
                if planned < warm || planned >= over {
                    return answered.status == 200;
                }
                let micros = |at: Instant| (at - planned).as_micros().max(1) as u64;
                let is_well = answered.status == 200;
                let mut counted = counted.lock().unwrap_or_else(PoisonError::into_inner);
                *counted.statuses.entry(answered.status).or_default() += 1;
                counted.latest = counted.latest.max(sent - planned);
                counted.waited += u64::from(answered.has_waited);
                if answered.status == 200 {
                    if deadline.is_some_and(|deadline| done - planned <= deadline) {
                        counted.in_time.0 += 1;
                        counted.in_time.1 += answered.tokens;
                    }
                    counted.latency.saturating_record(micros(done));
                    if let Some(first) = answered.first {
                        counted.first.saturating_record(micros(first));
                    }
                    counted.tokens += answered.tokens;
                    counted.last = counted.last.max(done - warm);
                }
                if let Some(problem) = answered.problem
                    && counted.problems.len() < 64
                    && !counted.problems.contains(&problem)
                {
                    counted.problems.push(problem);
                }
                is_well
            }
        }
    };
    match args.closed {
        None => {
            let tracker = Arc::new(tokio::sync::Semaphore::new(1 << 24));
            for (number, arrival) in arrivals.iter().enumerate() {
                let planned = began + Duration::from_micros(arrival.arrived.0);
                if planned >= over {
                    break;
                }
                // Sleeping on a thread has a precision of 0.1 ms; the timers of the runtime have 1 ms.
                std::thread::sleep(planned.saturating_duration_since(Instant::now()));
                let permit = tracker.clone().try_acquire_owned();
                let permit = permit.map_err(|_| miette!("too many requests have no answer"))?;
                let request = one(target.clone(), number as u64, arrival.tokens, Some(planned));
                runtime.spawn(async move {
                    request.await;
                    drop(permit);
                });
            }
            // Wait until all requests have a response or have failed.
            let _ = runtime.block_on(tracker.acquire_many(1 << 24));
        }
        Some(clients) => {
            let lens: Arc<[u32]> = arrivals.iter().map(|w| w.tokens).collect();
            let next = Arc::new(std::sync::atomic::AtomicU64::new(0));
            let clients: Vec<_> = (0..clients)
                .map(|_| {
                    let (target, one) = (target.clone(), one.clone());
                    let (lens, next) = (Arc::clone(&lens), Arc::clone(&next));
                    runtime.spawn(async move {
                        while Instant::now() < over {
                            let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                            let tokens = lens[at as usize % lens.len()];
                            if !one(target.clone(), at, tokens, None).await {
                                // The server is down or overloaded, so wait before the next request.
                                tokio::time::sleep(Duration::from_millis(100)).await;
                            }
                        }
                    })
                })
                .collect();
            for client in clients {
                let _ = runtime.block_on(client);
            }
        }
    }
    let counted = counted.lock().unwrap_or_else(PoisonError::into_inner);
    let answered = counted.latency.len();
    // In an open loop, responses after the last request are counted, and the measured time extends to the last response. In a closed loop,
    // only responses within the measured time are counted, regardless of when their requests were sent.
    let (n, tokens, seconds) = match args.rate {
        Some(_) => {
            let seconds = counted.last.as_secs_f64().max(args.seconds);
            (answered as f64, counted.tokens as f64, seconds)
        }
        None => {
            let (n, tokens) = counted.came;
            (n as f64, tokens as f64, args.seconds)
        }
    };
    let sent = counted.statuses.values().sum::<u64>();
    Ok(Run {
        target: name,
        mode: match (args.rate, args.closed) {
            (Some(rate), _) => format!("open loop, {rate} requests/s"),
            (None, clients) => format!("closed loop, {} clients", clients.unwrap_or(1)),
        },
        lens: args.lens.to_string(),
        seconds: args.seconds,
        sent,
        answered,
        statuses: counted.statuses.clone(),
        requests_per_second: n / seconds,
        tokens_per_second: tokens / seconds,
        latency: times(&counted.latency),
        first: times(&counted.first),
        late_ms: match args.rate {
            Some(_) => counted.latest.as_secs_f64() * 1e3,
            None => 0.0,
        },
        waited_for_connection: counted.waited,
        in_time: args.deadline_ms.map(|deadline_ms| InTime {
            deadline_ms,
            answered: counted.in_time.0,
            share: counted.in_time.0 as f64 / (sent as f64).max(1.0),
            requests_per_second: counted.in_time.0 as f64 / args.seconds,
            tokens_per_second: counted.in_time.1 as f64 / args.seconds,
        }),
        offline_tokens_per_second: None,
        share: None,
        offline_problem: None,
        problems: counted.problems.clone(),
    })
}

fn times(of: &Histogram<u64>) -> Option<Times> {
    let ms = |share: f64| Micros(of.value_at_quantile(share)).millis();
    (!of.is_empty()).then(|| Times {
        mean: of.mean() / 1e3,
        p50: ms(0.5),
        p90: ms(0.9),
        p99: ms(0.99),
        p999: ms(0.999),
        most: Micros(of.max()).millis(),
    })
}

fn shown(run: &Run) -> String {
    let mut rows = table(&["", "mean ms", "p50", "p90", "p99", "p99.9", "most"]);
    let named = [("answer", &run.latency), ("first part", &run.first)];
    for (name, times) in named {
        if let Some(t) = times {
            let ms = [t.mean, t.p50, t.p90, t.p99, t.p999, t.most];
            let cells = ms.map(|ms| format!("{ms:.2}"));
            rows.add_row([name.to_owned()].into_iter().chain(cells));
        }
    }
    align_right(&mut rows, 1..7);
    let statuses: Vec<String> = run
        .statuses
        .iter()
        .map(|(status, n)| match status {
            0 => format!("{n} without an answer"),
            status => format!("{n} × {status}"),
        })
        .collect();
    let mut text = format!(
        "{}: {}, lengths {}, {} s\n{rows}\n{:.1} requests/s, {:.0} tokens/s; sent {}: {}; sent late by {:.2} ms at most\n",
        run.target,
        run.mode,
        run.lens,
        run.seconds,
        run.requests_per_second,
        run.tokens_per_second,
        run.sent,
        statuses.join(", "),
        run.late_ms,
    );
    if let Some(of) = &run.in_time {
        text += &format!(
            "in time, within {} ms: {} of {}, {:.1} %; {:.1} requests/s, {:.0} tokens/s\n",
            of.deadline_ms,
            of.answered,
            run.sent,
            of.share * 100.0,
            of.requests_per_second,
            of.tokens_per_second,
        );
    }
    if run.waited_for_connection > 0 {
        text += &format!(
            "{} requests waited for a connection, so the load was not sent as planned; raise --connections\n",
            run.waited_for_connection
        );
    }
    if let (Some(offline), Some(share)) = (run.offline_tokens_per_second, run.share) {
        text += &format!(
            "the engine alone: {offline:.0} tokens/s; share {:.1} %\n",
            share * 100.0
        );
    }
    if let Some(problem) = &run.offline_problem {
        text += &format!("the engine alone was not measured: {problem}\n");
    }
    for problem in &run.problems {
        text += &format!("problem: {problem}\n");
    }
    text
}
