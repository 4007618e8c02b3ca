//! Times of single kernels by shape, for all our variants and PyTorch's kernels: figure 5 of
//! TurboTransformers and figures 9 to 12 of ByteTransformer.

mod attention;
mod cached;
mod gemm;
mod layernorm;
mod problem;
mod report;
mod softmax;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, path::PathBuf, process::ExitCode};

use gemmule::{
    DType, DeviceChoice,
    cli::{Bars, Outcome, bench::sets, print, say, write_file, write_json},
    engine::{EngineError, TimedOn, TimingsError, emit, read_timings},
    jit::{Cubin, Jit},
    kernels::KernelSpec,
    machine::Machine,
    runtime::cuda::{Device, Lap, Stopwatch},
    select::Timings,
};
use miette::{IntoDiagnostic, Report, WrapErr, miette};
use serde::Serialize;

use crate::{
    launched::Launched,
    peers::{self, Answers, Peers},
};
use problem::{Family, Problem, Task};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Kernels to time: softmax, layernorm, attention, cached (attention to a KV cache), windows
    /// (attention with a window), gemm; default: all
    #[arg(long, value_delimiter = ',', value_name = "KERNELS")]
    only: Vec<Family>,
    /// CUDA device
    #[arg(long, default_value = "cuda:0")]
    device: DeviceChoice,
    #[arg(long, default_value = "f16")]
    dtype: DType,
    /// Sets of lengths for attention as JSON, {"encoder": [{"name": …, "lens": […]}, …]}, instead
    /// of the built-in ones
    #[arg(long, value_name = "FILE")]
    workloads: Option<PathBuf>,
    /// Also time PyTorch's kernels (the peers): auto (with python3, if it has PyTorch), off, or the
    /// path of a Python interpreter
    #[arg(long, value_name = "auto|off|PYTHON", default_value = "auto", num_args = 0..=1, default_missing_value = "auto")]
    peers: peers::Choice,
    /// Correct the cost model, which selects kernels, by the timings in this file, written by
    /// `gemmule tune --export`
    #[arg(long, value_name = "FILE")]
    timings: Option<PathBuf>,
    /// Show the times of every kernel variant and every peer, not only the fastest
    #[arg(long)]
    all: bool,
    /// Write a JSON file with one row per variant and peer: op, shape, who, us, rate, unit, picked,
    /// ratio_to_best_peer, …
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the papers' figures as SVG into this folder
    #[arg(long, value_name = "DIR")]
    figures: Option<PathBuf>,
    /// Only print the problems, in the format that bench/scripts/kernel_peers.py reads; needs no
    /// device
    #[arg(long, conflicts_with_all = ["json", "figures", "timings"])]
    problems: bool,
}

/// Request to the script that times the peers, `kernel_peers.py`.
#[derive(Serialize)]
struct Request<'a> {
    dtype: &'static str,
    problems: Vec<&'a Task>,
}

pub(crate) fn run(args: Args) -> Outcome {
    let device = args.device()?;
    let problems = problems(&args, &args.launched(device.as_ref())?)?;
    let request = Request {
        dtype: args.dtype.name(),
        problems: problems.iter().map(|p| &p.task).collect(),
    };
    let Some(device) = device else {
        let text = serde_json::to_string(&request).into_diagnostic()?;
        print(&format!("{text}\n"))?;
        return Ok(ExitCode::SUCCESS);
    };
    let ordinal = device.info().ordinal;
    if let Some(folder) = &args.figures {
        std::fs::create_dir_all(folder)
            .into_diagnostic()
            .wrap_err_with(|| format!("`{}` cannot be created", folder.display()))?;
    }
    // Find PyTorch first. If the user names a Python without PyTorch, the error is then reported before anything is timed.
    let peers = Peers::find(&args.peers, peers::KERNELS, ordinal)?;
    let bars = Bars::new();
    let laps = time(&device, &problems, &bars)?;
    let answers = match &peers {
        Some(peers) => {
            let named = |p: &Problem| format!("{} {}", p.task.op(), p.task);
            let items: Vec<String> = problems.iter().map(named).collect();
            let total = items.len();
            peers.time(&request, &items, &|done| bars.show("peers", done, total))?
        }
        None => Answers::default(),
    };
    let rows = report::rows(&problems, &laps, &answers.times, args.dtype);
    report::show(&rows, args.all)?;
    let beside = peers.map_or_else(|| "no peers".to_owned(), |p| p.what);
    print(&format!(
        "{}, {}; compared with {beside}; median of 20 replays of a CUDA graph whose launches rotate over operands; the ratio is the best peer's time over ours: above 1, ours is faster\n",
        device.info().name,
        args.dtype
    ))?;
    for remark in &answers.remarks {
        say(remark);
    }
    if let Some(file) = &args.json {
        write_json(file, &rows)?;
    }
    if let Some(folder) = &args.figures {
        for (name, figure) in report::figures(&problems, &rows, &device.info().name, args.dtype) {
            let file = folder.join(name);
            write_file(&file, figure.svg()?.as_bytes())?;
            print(&format!("drew {}\n", file.display()))?;
        }
    }
    Ok(if rows.iter().any(|r| r.agrees == Some(false)) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

impl Args {
    /// Returns the selection of kernels for the card of the device, by its cost model and the given timings. Without a device, returns the
    /// selection for the default card. This suffices for printing the problems, which do not depend on the card.
    fn launched(&self, device: Option<&Device>) -> Result<Launched, Report> {
        let Some(device) = device else {
            let usual = Machine::usual().into_diagnostic()?;
            return Ok(Launched::new(usual, None));
        };
        let (machine, _) = device.info().machine().into_diagnostic()?;
        Ok(Launched::new(machine, self.timings(device)?))
    }

    /// Returns the timings in the given file, which must be for this device and this NVRTC.
    fn timings(&self, device: &Device) -> Result<Option<Timings>, Report> {
        let Some(file) = &self.timings else {
            return Ok(None);
        };
        let (timings, found) = read_timings(file)?;
        let nvrtc = Jit::open().into_diagnostic()?.nvrtc().version();
        let here = TimedOn::new(device.info(), nvrtc);
        match refusal(found, here) {
            None => Ok(Some(timings)),
            Some(problem) => Err(EngineError::Timings {
                file: file.clone(),
                problem: Box::new(problem),
            }
            .into()),
        }
    }

    /// Returns the device that kernels are timed on; `None` with `--problems`.
    fn device(&self) -> Result<Option<Device>, Report> {
        match self.device {
            _ if self.problems => Ok(None),
            DeviceChoice::Cuda(ordinal) => Ok(Some(Device::open(ordinal).into_diagnostic()?)),
            _ => Err(miette!(
                "kernels can only be timed on a CUDA device; use --device cuda:N"
            )),
        }
    }
}

/// Compares the card and the NVRTC version that timings were measured with (`found`) to those of this machine (`expected`). Returns an
/// error if one of them differs, else `None`.
fn refusal(found: TimedOn, expected: TimedOn) -> Option<TimingsError> {
    let of_card = TimedOn {
        nvrtc: expected.nvrtc,
        ..found.clone()
    };
    if of_card != expected {
        return Some(TimingsError::Card { found, expected });
    }
    (found != expected).then_some(TimingsError::Nvrtc {
        found: found.nvrtc,
        expected: expected.nvrtc,
    })
}

fn problems(args: &Args, launched: &Launched) -> Result<Vec<Problem>, Report> {
    let mut problems = Vec::new();
    for (_, family) in Family::ALL {
        if !args.only.is_empty() && !args.only.contains(&family) {
            continue;
        }
        problems.extend(match family {
            Family::Softmax => softmax::problems(args.dtype),
            Family::LayerNorm => layernorm::problems(args.dtype, launched)?,
            Family::Attention => {
                let sets = sets::load(args.workloads.as_deref())?;
                let own = args.workloads.is_some();
                attention::problems(args.dtype, &launched.machine, &sets, own)?
            }
            Family::Cached => cached::problems(args.dtype, &launched.machine)?,
            Family::Windows => {
                let mut own = attention::windows(args.dtype, &launched.machine)?;
                own.extend(cached::windows(args.dtype, &launched.machine)?);
                own
            }
            Family::Gemm => gemm::problems(args.dtype, launched)?,
        });
    }
    Ok(problems)
}

/// Times every contender of every problem. Returns the results by problem, in the order of the contenders.
fn time(device: &Device, problems: &[Problem], bars: &Bars) -> Result<Vec<Vec<Lap>>, Report> {
    let cubins = compile(device, problems, bars)?;
    let stopwatch = Stopwatch::new(device).into_diagnostic()?;
    let mut laps = Vec::new();
    for problem in problems {
        let chains: Vec<_> = problem
            .contenders
            .iter()
            .map(|contender| {
                let code = contender.chain.launches.iter().map(|launch| {
                    cubins
                        .get(&launch.kernel.as_kernel().symbol())
                        .expect("every launch of every problem was compiled")
                });
                (&contender.chain, code.collect())
            })
            .collect();
        let timed = stopwatch
            .compare(&problem.case, &chains)
            .into_diagnostic()
            .wrap_err_with(|| format!("{} {}", problem.task.op(), problem.task))?;
        laps.push(timed);
        bars.show("kernels", laps.len(), problems.len());
    }
    Ok(laps)
}

/// Compiles the kernels of all contenders, and returns their code by symbol.
fn compile(
    device: &Device,
    problems: &[Problem],
    bars: &Bars,
) -> Result<BTreeMap<String, Cubin>, Report> {
    let kernels: BTreeMap<String, KernelSpec> = problems
        .iter()
        .flat_map(|p| &p.contenders)
        .flat_map(|c| &c.chain.launches)
        .map(|launch| (launch.kernel.as_kernel().symbol(), launch.kernel.clone()))
        .collect();
    let specs: Vec<KernelSpec> = kernels.into_values().collect();
    let target = device.target().into_diagnostic()?;
    let cubins = Jit::open()
        .into_diagnostic()?
        .compile_all(&emit(&specs)?, target, &|done, total| {
            bars.show("compiling", done, total)
        })
        .into_diagnostic()?;
    Ok(cubins.into_iter().map(|c| (c.symbol.clone(), c)).collect())
}
