//! Compares memory allocators on a sequence of requests of random lengths, as in figure 7 of TurboTransformers.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use gemmule::{
    AllocatorChoice, Batch, DType, DeviceChoice, Engine, EngineError,
    cli::{Bars, Outcome, Runnable, align_right, human, print, table, write_file, write_json},
    engine::{CompileOptions, DeviceName, compile, description},
    machine::Machine,
    measure::shipped_configs,
    plan::lower_bound,
    program::{Buckets, Program},
    runtime::{GraphChoice, Planner, PlannerError, weights::RandomWeights},
    tensor::Extents,
    text::config,
};
use miette::{IntoDiagnostic, Report, WrapErr};
use serde::Serialize;

use crate::{
    figure::{Figure, Kind, Series},
    requests::Requests,
};

/// Number of passes that plan the memory of every request. The planning time of a request is its median over the passes.
const PLANNING_PASSES: usize = 5;
const MIB: f64 = (1u64 << 20) as f64;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A shipped description or the path of a RON file
    #[arg(default_value = "bert")]
    model: String,
    /// Read the sizes from this config.json; default: the sizes of the shipped description
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    requests: Requests,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// f32, f16 or bf16; by default f16 on CUDA, and f32 on the CPU and with --plan-only
    #[arg(long)]
    dtype: Option<DType>,
    /// Only plan the requests; needs no device
    #[arg(long, conflicts_with = "device")]
    plan_only: bool,
    /// Write the memory and the times of every request to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw figures of the bytes held and the bytes allocated into this folder
    #[arg(long, value_name = "DIR")]
    figures: Option<PathBuf>,
}

/// All measurements.
#[derive(Serialize)]
struct Measured {
    model: String,
    /// The device; `None` if the requests were only planned.
    device: Option<String>,
    dtype: &'static str,
    seed: u64,
    /// Lengths of the sequences of each request.
    lens: Vec<Vec<u32>>,
    /// Lower bound of the memory of each request, in bytes.
    lower_bound: Vec<u64>,
    allocators: Vec<Stream>,
}

/// Measurements of all requests with one allocator. Each list has one value per request. `footprint`, `newly_allocated`, `released` and
/// `held` are in bytes.
#[derive(Default, Serialize)]
struct Stream {
    allocator: &'static str,
    footprint: Vec<u64>,
    newly_allocated: Vec<u64>,
    released: Vec<u64>,
    held: Vec<u64>,
    planning_us: Vec<f64>,
    /// Time of each run from token ids to outputs, measured by the host's clock; empty if nothing ran.
    run_us: Vec<f64>,
    /// Part of `run_us` spent on planning, freeing and allocating.
    memory_us: Vec<f64>,
}

pub(crate) fn run(args: Args) -> Outcome {
    args.requests.check(&args.model, None)?;
    let (program, limit, engine) = args.model()?;
    args.requests.check(&args.model, limit)?;
    let lens = args.requests.lens();
    let extents: Vec<Extents> = lens
        .iter()
        .map(|lens| Extents::of(lens))
        .collect::<Result<_, _>>()
        .into_diagnostic()?;
    let usage = |e: &Extents| program.usage(e).map(|usage| lower_bound(&usage));
    let lower_bound: Vec<u64> = extents
        .iter()
        .map(usage)
        .collect::<Result<_, _>>()
        .into_diagnostic()?;
    let mut allocators = Vec::new();
    for (allocator, choice) in args.choices()? {
        // On a CUDA device, a session plans memory for a bucket, which contains batches of similar sizes. It does not plan for the exact
        // size of a batch.
        let buckets = match engine.as_ref().map(Engine::device) {
            Some(DeviceName::Cuda(_)) => GraphChoice::default().buckets(&program, &choice),
            _ => Buckets::none(),
        };
        let planned: Vec<Extents> = extents.iter().map(|e| buckets.of_batch(e)).collect();
        let mut stream = plan(&program, &choice, &planned).into_diagnostic()?;
        stream.allocator = allocator;
        if let Some(engine) = &engine {
            let batches = args.requests.batches(&lens, &engine.limits())?;
            run_stream(engine, &choice, &batches, &mut stream)?;
        }
        allocators.push(stream);
    }
    let measured = Measured {
        model: args.model.clone(),
        device: engine.as_ref().map(|engine| engine.device().to_string()),
        dtype: program.dtype.name(),
        seed: args.requests.seed,
        lens,
        lower_bound,
        allocators,
    };
    print(&summary(&measured, &args))?;
    if let Some(file) = &args.json {
        write_json(file, &measured)?;
    }
    if let Some(folder) = &args.figures {
        draw(&measured, folder)?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// Returns the program, its maximum sequence length if it has one, and the engine. With `--plan-only`, there is no engine.
    fn model(&self) -> Result<(Program, Option<u32>, Option<Engine>), Report> {
        let config = match &self.config {
            Some(file) => config(file)?,
            None => {
                let shipped = shipped_configs()?.into_iter();
                let mut fitting = shipped.filter(|&(_, model, _)| model == self.model);
                fitting.next().ok_or(EngineError::NoConfig)?.2
            }
        };
        let outputs = ["last_hidden_state"];
        if self.plan_only {
            let machine = Machine::usual().into_diagnostic()?;
            let options = CompileOptions {
                outputs: Some(outputs.map(str::to_owned).into()),
                ..CompileOptions::new(self.dtype.unwrap_or(DType::F32), machine)
            };
            let compiled = compile(&description(&self.model)?, &config, &options)?;
            return Ok((compiled.program, compiled.model.max_positions, None));
        }
        let mut builder = Engine::builder(&self.model)
            .config_value(config)
            .outputs(outputs)
            .device(self.device)
            .random_weights(RandomWeights {
                seed: self.requests.seed,
                deviation: 0.02,
            });
        if let Some(dtype) = self.dtype {
            builder = builder.dtype(dtype);
        }
        let engine = Runnable::build(builder)?;
        Ok((
            engine.program().clone(),
            engine.limits().longest,
            Some(engine),
        ))
    }

    /// Returns the allocators with their command-line names.
    fn choices(&self) -> Result<[(&'static str, AllocatorChoice); 5], Report> {
        let maximum = vec![self.requests.longest; self.requests.batch.into()];
        let maximum = Extents::of(&maximum).into_diagnostic()?;
        Ok([
            ("chunk", AllocatorChoice::default()),
            ("turbo", AllocatorChoice::Turbo),
            ("gsoc", AllocatorChoice::Gsoc),
            ("caching", AllocatorChoice::Caching),
            ("maximum", AllocatorChoice::Maximum(maximum)),
        ])
    }
}

/// Plans the memory of all requests [`PLANNING_PASSES`] times. Returns the memory and the median planning time of each request.
fn plan(
    program: &Program,
    choice: &AllocatorChoice,
    extents: &[Extents],
) -> Result<Stream, PlannerError> {
    let mut stream = Stream::default();
    let mut times = vec![Vec::new(); extents.len()];
    for pass in 0..PLANNING_PASSES {
        let mut planner = Planner::new(program, choice)?;
        for (e, times) in extents.iter().zip(&mut times) {
            planner.plan(program, e)?;
            times.push(planner.planning().as_secs_f64() * 1e6);
            if pass == 0 {
                let cost = planner.last_request();
                stream.footprint.push(cost.footprint);
                stream.newly_allocated.push(cost.newly_allocated);
                stream.released.push(cost.released);
                stream.held.push(cost.held);
            }
        }
    }
    stream.planning_us = times.iter().map(|times| median(times)).collect();
    Ok(stream)
}

/// Runs all requests in a session with the allocator `choice`, and adds the times to `stream`.
fn run_stream(
    engine: &Engine,
    choice: &AllocatorChoice,
    batches: &[Batch],
    stream: &mut Stream,
) -> Result<(), EngineError> {
    // Run two requests first, so that one-time costs of the process are not included.
    for batch in batches.iter().take(2) {
        engine.session_with(choice)?.run(batch)?;
    }
    let mut session = engine.session_with(choice)?;
    let bars = Bars::new();
    for (i, batch) in batches.iter().enumerate() {
        let began = Instant::now();
        session.run(batch)?;
        stream.run_us.push(began.elapsed().as_secs_f64() * 1e6);
        let work = session.memory_work();
        let memory = work.planning + work.allocating;
        stream.memory_us.push(memory.as_secs_f64() * 1e6);
        bars.show(stream.allocator, i + 1, batches.len());
    }
    Ok(())
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

fn mean(values: &[u64]) -> u64 {
    values.iter().sum::<u64>() / values.len().max(1) as u64
}

fn largest(values: &[u64]) -> u64 {
    values.iter().copied().max().unwrap_or(0)
}

impl Stream {
    /// Returns the ratio of the footprint to the lower bound for each request.
    fn ratios(&self, lower_bound: &[u64]) -> Vec<f64> {
        let pairs = self.footprint.iter().zip(lower_bound);
        pairs
            .map(|(&footprint, &bound)| footprint as f64 / bound.max(1) as f64)
            .collect()
    }

    /// Returns the fraction of the run time spent on memory management.
    fn share(&self) -> Option<f64> {
        let run: f64 = self.run_us.iter().sum();
        (run > 0.0).then(|| self.memory_us.iter().sum::<f64>() / run)
    }
}

fn summary(measured: &Measured, args: &Args) -> String {
    let mut rows = table(&[
        "allocator",
        "footprint, mean",
        "max",
        "held, max",
        "footprint / bound, median",
        "max",
        "held, max / bound, max",
        "allocated a request",
        "plan, us",
        "share of run",
    ]);
    let bound = &measured.lower_bound;
    for stream in &measured.allocators {
        let ratios = stream.ratios(bound);
        let worst = ratios.iter().copied().fold(0.0, f64::max);
        rows.add_row([
            stream.allocator.to_owned(),
            human(mean(&stream.footprint)),
            human(largest(&stream.footprint)),
            human(largest(&stream.held)),
            format!("{:.2}", median(&ratios)),
            format!("{worst:.2}"),
            format!(
                "{:.3}",
                largest(&stream.held) as f64 / largest(bound).max(1) as f64
            ),
            human(mean(&stream.newly_allocated)),
            format!("{:.1}", median(&stream.planning_us)),
            stream
                .share()
                .map_or("—".to_owned(), |share| format!("{:.2} %", 100.0 * share)),
        ]);
    }
    align_right(&mut rows, 1..10);
    let ran = match &measured.device {
        Some(device) => format!(
            "ran on {device}; share of run: planning, freeing and allocating, as a fraction of the time from token ids to outputs"
        ),
        None => "planned only: nothing ran".to_owned(),
    };
    format!(
        "{rows}\n{}, {}, {}; {ran}\nlower bound of a request: mean {}, max {}\n",
        measured.model,
        measured.dtype,
        args.requests.in_words(),
        human(mean(bound)),
        human(largest(bound)),
    )
}

/// Draws `allocators_held.svg` and `allocators_allocated.svg`.
fn draw(measured: &Measured, folder: &Path) -> Result<(), Report> {
    std::fs::create_dir_all(folder)
        .into_diagnostic()
        .wrap_err_with(|| format!("the folder `{}` cannot be created", folder.display()))?;
    for (name, figure) in figures(measured) {
        let file = folder.join(name);
        write_file(&file, figure.svg()?.as_bytes())?;
        print(&format!("drawn in {}\n", file.display()))?;
    }
    Ok(())
}

fn figures(measured: &Measured) -> [(&'static str, Figure); 2] {
    let series = |name: &str, bytes: &mut dyn Iterator<Item = u64>| {
        Series::new(name, bytes.map(|bytes| Some(bytes as f64 / MIB)).collect())
    };
    let figure = |title: &str, y_label: &str, series| Figure {
        title: format!("{title} ({}, {})", measured.model, measured.dtype),
        x_label: "request".to_owned(),
        y_label: y_label.to_owned(),
        groups: (1..=measured.lens.len()).map(|i| i.to_string()).collect(),
        series,
        kind: Kind::Lines,
        log_y: false,
    };
    let streams = &measured.allocators;
    let mut held: Vec<Series> = streams
        .iter()
        .map(|s| series(s.allocator, &mut s.held.iter().copied()))
        .collect();
    held.push(series(
        "lower bound",
        &mut measured.lower_bound.iter().copied(),
    ));
    let summed = |stream: &Stream| {
        let mut sum = 0;
        let so_far = stream.newly_allocated.iter().map(move |&bytes| {
            sum += bytes;
            sum
        });
        series(stream.allocator, &mut { so_far })
    };
    [
        (
            "allocators_held.svg",
            figure("Memory held at each request", "held, MiB", held),
        ),
        (
            "allocators_allocated.svg",
            Figure {
                log_y: true,
                ..figure(
                    "Memory newly allocated since the first request",
                    "allocated so far, MiB",
                    streams.iter().map(summed).collect(),
                )
            },
        ),
    ]
}
