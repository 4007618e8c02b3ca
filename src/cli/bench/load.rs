use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use miette::IntoDiagnostic;

use super::super::{
    Outcome, align_right,
    model::{Card, Model},
    print, table,
};
use crate::{
    DType,
    engine::emit,
    jit::{DiskCache, Jit, Nvrtc, Target},
    runtime::{Planner, cuda::CudaModel},
    tensor::Extents,
};

#[derive(clap::Args)]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    model: Model,
    #[arg(long, default_value = "f16")]
    dtype: DType,
    #[arg(long, default_value = "sm_90a")]
    arch: Target,
    #[command(flatten)]
    card: Card,
    /// Sequence lengths of the batch to plan
    #[arg(
        long = "lengths",
        alias = "lens",
        value_delimiter = ',',
        default_value = "128,48,65,26,89,61,96,61,89,115,86,29,95,62,65,114"
    )]
    lens: Vec<u32>,
    /// Number of runs of each step; the median time is shown
    #[arg(long, default_value_t = 15)]
    runs: usize,
}

pub(in crate::cli) fn run(args: Args) -> Outcome {
    let machine = args.card.machine(&[args.arch])?;
    let lowered = || args.model.compile_in(args.dtype, None, machine.clone());
    let program = lowered()?.program;
    let sources = emit(&CudaModel::kernels(&program))?;
    let extents = Extents::of(&args.lens).into_diagnostic()?;
    let nvrtc = Nvrtc::find().into_diagnostic()?;
    let folder = tempfile::tempdir().into_diagnostic()?;
    let fresh = || Jit::new(nvrtc.clone(), Some(DiskCache::at(folder.path())));
    let compile = |jit: Jit| {
        jit.compile_all(&sources, args.arch, &|_, _| ())
            .into_diagnostic()
    };

    let mut rows = table(&["step", "median", "of"]);
    let mut row = |step: &str, time: Duration, of: String| {
        rows.add_row([
            step.to_owned(),
            format!("{:.4} ms", time.as_secs_f64() * 1e3),
            of,
        ]);
    };
    let of = |n: usize| format!("{n} runs");
    let described = median(args.runs, || lowered().map(drop))?;
    row("description to program", described, of(args.runs));
    let emitted = median(args.runs, || {
        Ok(emit(&CudaModel::kernels(&program)).map(drop)?)
    })?;
    row("program to CUDA source", emitted, of(args.runs));
    let cold = median(1, || compile(fresh()).map(drop))?;
    row(
        &format!("NVRTC, {} kernels, {}", sources.len(), args.arch),
        cold,
        of(1),
    );
    let cached = median(args.runs, || compile(fresh()).map(drop))?;
    row("the same from the cache", cached, of(args.runs));
    let plan = median(args.runs * 20, || {
        Planner::default()
            .plan(&program, &extents)
            .map(drop)
            .into_diagnostic()
    })?;
    row("plan, first time", plan, of(args.runs * 20));
    let mut planner = Planner::default();
    let again = median(args.runs * 200, || {
        planner.plan(&program, &extents).map(drop).into_diagnostic()
    })?;
    row("plan, a shape seen before", again, of(args.runs * 200));
    align_right(&mut rows, [1]);
    print(&format!(
        "{rows}\n{} threads\n",
        std::thread::available_parallelism().map_or(1, usize::from)
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn median(
    runs: usize,
    mut run: impl FnMut() -> Result<(), miette::Report>,
) -> Result<Duration, miette::Report> {
    let mut times = Vec::with_capacity(runs);
    for _ in 0..runs.max(1) {
        let began = Instant::now();
        run()?;
        times.push(began.elapsed());
    }
    times.sort();
    Ok(times[times.len() / 2])
}
