use std::{path::PathBuf, process::ExitCode, time::Duration};

use miette::IntoDiagnostic;

use super::{
    Outcome, align_right,
    model::{Model, stage_name},
    print,
    progress::Bars,
    table, write_json,
};
use crate::{
    DType, DeviceChoice, EngineError,
    engine::{DeviceName, TuneMode, Tuner, write_timings},
    jit::Jit,
    runtime::cuda::Device,
    select::Timings,
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Model,
    #[arg(long, default_value = "f16")]
    dtype: DType,
    /// CUDA device on which kernels are timed
    #[arg(long, default_value = "cuda:0")]
    device: DeviceChoice,
    /// Tuning mode: quick (some seconds) or full (up to two minutes)
    #[arg(long, value_name = "MODE", default_value = "quick")]
    tune: TuneMode,
    /// Time limit in seconds. No further batch sizes are timed after it
    #[arg(long, value_name = "S")]
    seconds: Option<u64>,
    /// Start with the timings in this file
    #[arg(long, value_name = "FILE")]
    timings: Option<PathBuf>,
    /// Ignore earlier timings and measure again
    #[arg(long, conflicts_with = "timings")]
    again: bool,
    /// Write the timings to this file, for --timings on other machines
    #[arg(long, value_name = "FILE")]
    export: Option<PathBuf>,
    /// Write the timings as JSON, with kernel, rows and microseconds
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(super) fn run(args: Args) -> Outcome {
    let info = match args.device.resolve()? {
        DeviceName::Cuda(info) => info,
        device => {
            let device = device.to_string();
            return Err(EngineError::TuneOnCpu { device }.into());
        }
    };
    let device = Device::open(info.ordinal).into_diagnostic()?;
    let jit = Jit::open().into_diagnostic()?;
    let (machine, _) = info.machine().into_diagnostic()?;
    let compiled = args.model.compile_in(args.dtype, None, machine)?;
    if compiled.options.invariant {
        return Err(EngineError::TuneInvariant.into());
    }
    let bars = Bars::new();
    let show = |stage, done, total| bars.show(stage_name(stage), done, total);
    let tuner = Tuner::new(&device, &jit, args.tune)
        .given(args.timings.as_deref())
        .again(args.again)
        .within(args.seconds.map(Duration::from_secs))
        .progress(&show);
    let timings = tuner.time(&compiled)?;
    let now = compiled.program_with(&timings)?;
    show_timings(&timings)?;
    let changed = now
        .kernels
        .iter()
        .filter(|k| !compiled.program.kernels.contains(k));
    print(&format!(
        "{} timings; of {} kernels, {} differ from those of the cost model alone\n",
        timings.len(),
        now.kernels.len(),
        changed.count()
    ))?;
    if let Some(file) = &args.json {
        write_json(file, timings.by_symbol())?;
    }
    if let Some(file) = &args.export {
        write_timings(file, &timings, &tuner.timed_on())?;
        print(&format!("written to {}\n", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn show_timings(timings: &Timings) -> Result<(), miette::Report> {
    let mut rows = table(&["kernel", "rows", "µs in place"]);
    for (symbol, timed) in timings.by_symbol() {
        for (at, (number, us)) in timed.iter().enumerate() {
            let name = if at == 0 { symbol.as_str() } else { "" };
            rows.add_row([name.to_owned(), number.to_string(), format!("{us:.2}")]);
        }
    }
    align_right(&mut rows, 1..3);
    print(&format!("{rows}\n"))
}
