use std::{path::PathBuf, process::ExitCode, time::Duration};

use miette::{IntoDiagnostic, miette};
use serde::Serialize;

use super::{
    Outcome, align_right, model::Model, model::stage_name, print, progress::Bars, table, write_json,
};
use crate::{
    DType, DeviceChoice, EngineError,
    engine::{
        Chosen, Compiled, DeviceName, ModelFile, TuneMode, Tuner, shipped_programs, write_picks,
    },
    jit::Jit,
    kernels::Instructions,
    runtime::cuda::Device,
    tune::{Origin, Picks, Range, Timing},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Model,
    /// The CUDA device
    #[arg(long, default_value = "cuda:0")]
    device: DeviceChoice,
    /// Storage type; several, apart by commas, for all that come with gemmule
    #[arg(
        long,
        value_name = "DTYPE,…",
        value_delimiter = ',',
        default_value = "f16"
    )]
    dtype: Vec<DType>,
    /// quick: a few sizes and the candidates that the cost model puts first; full: all that are not
    /// hopeless, at as many sizes as there is time for; chain: in the whole model, with random weights, one
    /// choice exchanged at a time
    #[arg(long, value_name = "MODE", default_value = "quick")]
    tune: TuneMode,
    /// When to end, compiling included; what was not begun is left to the cost model's guess. full goes
    /// from coarse sizes to finer ones as long as there is time. By default 120 of full and of chain, no end of quick
    #[arg(long, value_name = "N")]
    seconds: Option<u64>,
    /// Take what this file has instead of measuring it
    #[arg(long, value_name = "FILE")]
    picks: Option<PathBuf>,
    /// Measure also what was measured before
    #[arg(long, conflicts_with = "picks")]
    again: bool,
    /// Write the picks, for --picks elsewhere
    #[arg(long, value_name = "FILE")]
    export: Option<PathBuf>,
    /// Write one row a range: problem, range, pick, timings
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A range with what was measured in it.
#[derive(Serialize)]
struct Row<'a> {
    problem: &'a str,
    /// Who chose: given, kept or measured.
    origin: Origin,
    /// Smallest and largest size; no largest for the last range.
    from: u64,
    up_to: Option<u64>,
    pick: String,
    /// By size.
    timings: Vec<&'a Timing>,
}

pub(super) fn run(args: Args) -> Outcome {
    let Chosen { picks, origins } = match of_artifact(&args.model)? {
        Some(chosen) => chosen,
        None => measure(&args)?,
    };
    let rows: Vec<Row> = picks
        .problems
        .iter()
        .flat_map(|(problem, picked)| {
            let origin = origins.get(problem).copied().unwrap_or(Origin::Given);
            rows(problem, origin, &picked.ranges, &picked.timings)
        })
        .collect();
    show(&picks, &rows)?;
    if let Some(file) = &args.json {
        write_json(file, &rows)?;
    }
    if let Some(file) = &args.export {
        write_picks(file, &picks)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The picks that an artifact keeps, if MODEL is one.
fn of_artifact(model: &Model) -> Result<Option<Chosen>, miette::Report> {
    if model.name() == SHIPPED {
        return Ok(None);
    }
    let ModelFile::Artifact { artifact, .. } = model.opened()? else {
        return Ok(None);
    };
    let picks = artifact.picks.clone().ok_or_else(|| {
        miette!(
            "`{}` was compiled without picks: its kernels are the cost model's guess; compile it again with --tune or --picks",
            model.name()
        )
    })?;
    let keys = picks.problems.keys();
    let origins = keys.map(|key| (key.clone(), Origin::Given)).collect();
    Ok(Some(Chosen { picks, origins }))
}

/// In the place of a model: all that come with gemmule, at their published sizes.
const SHIPPED: &str = "shipped";

fn programs(args: &Args, instructions: Instructions) -> Result<Vec<Compiled>, miette::Report> {
    if args.model.name() == SHIPPED {
        return Ok(shipped_programs(&args.dtype, instructions)?);
    }
    let mut programs = Vec::new();
    for &dtype in &args.dtype {
        let compiled = args.model.compile_with(dtype, instructions)?;
        if compiled.options.invariant {
            return Err(EngineError::TuneInvariant.into());
        }
        programs.push(compiled);
    }
    Ok(programs)
}

fn measure(args: &Args) -> Result<Chosen, miette::Report> {
    let DeviceName::Cuda(info) = args.device.resolve()? else {
        return Err(EngineError::TuneOnCpu {
            device: args.device.resolve()?.to_string(),
        }
        .into());
    };
    let device = Device::open(info.ordinal).into_diagnostic()?;
    let instructions = device.target().into_diagnostic()?.instructions();
    let programs = programs(args, instructions)?;
    let jit = Jit::open().into_diagnostic()?;
    let bars = Bars::new();
    let show = |stage, done, total| bars.show(stage_name(stage), done, total);
    Ok(Tuner::new(&device, &jit, args.tune)
        .given(args.picks.as_deref())
        .again(args.again)
        .within(args.seconds.map(Duration::from_secs))
        .progress(&show)
        .choose_in(&programs)?)
}

fn rows<'a>(
    problem: &'a str,
    origin: Origin,
    ranges: &[Range],
    timings: &'a [Timing],
) -> Vec<Row<'a>> {
    let mut from = 1;
    let mut rows = Vec::new();
    for range in ranges {
        let inside = |size: u64| size >= from && range.up_to.is_none_or(|most| size <= most);
        rows.push(Row {
            problem,
            origin,
            from,
            up_to: range.up_to,
            pick: range.choice.to_string(),
            timings: timings.iter().filter(|t| inside(t.size)).collect(),
        });
        from = range.up_to.map_or(from, |most| most.saturating_add(1));
    }
    rows
}

impl Row<'_> {
    /// How much less time the pick takes than the first guess, as a part of the guess's time: the
    /// geometric mean over the sizes; `None` where none was timed.
    fn gain(&self) -> Option<f64> {
        let logs = self.timings.iter().map(|t| (t.us / t.guess_us).ln());
        let n = self.timings.len();
        (n > 0).then(|| 1.0 - (logs.sum::<f64>() / n as f64).exp())
    }
}

fn show(picks: &Picks, rows: &[Row]) -> Result<(), miette::Report> {
    let mut shown = table(&[
        "problem",
        "range",
        "pick",
        "timed at",
        "µs",
        "guess's µs",
        "gain",
        "",
    ]);
    let mut before = "";
    for row in rows {
        let range = match row.up_to {
            Some(up_to) => format!("{} to {up_to}", row.from),
            None => format!("{} and more", row.from),
        };
        let problem = if row.problem == before {
            ""
        } else {
            row.problem
        };
        before = row.problem;
        let last = row.timings.last();
        let of_last = |text: fn(&Timing) -> String| last.map_or("—".to_owned(), |t| text(t));
        shown.add_row([
            problem.to_owned(),
            range,
            row.pick.clone(),
            of_last(|t| t.size.to_string()),
            of_last(|t| format!("{:.2}", t.us)),
            of_last(|t| format!("{:.2}", t.guess_us)),
            row.gain()
                .map_or("—".to_owned(), |gain| format!("{:.1} %", 100.0 * gain)),
            row.origin.words().to_owned(),
        ]);
    }
    align_right(&mut shown, 3..7);
    let (major, minor) = picks.made.nvrtc;
    print(&format!(
        "{shown}\n{}, NVRTC {major}.{minor}; ranges are of rows, for attention of the longest sequence; times are at the largest size timed in a range, the gain is the mean over all of them\n",
        picks.made.card
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::Choice;

    #[test]
    fn a_range_shows_its_own_sizes_and_their_mean_gain() {
        let range = |up_to, choice| Range { up_to, choice };
        let ranges = [
            range(Some(32), Choice::MhaShort { max_len: 32 }),
            range(None, Choice::MhaOnline),
        ];
        let timing = |size, us, guess_us| Timing { size, us, guess_us };
        let timings = [
            timing(16, 1.0, 1.0),
            timing(32, 1.0, 4.0),
            timing(64, 2.0, 2.0),
        ];
        let rows = rows("mha", Origin::Measured, &ranges, &timings);
        assert_eq!((rows[0].from, rows[0].up_to), (1, Some(32)));
        assert_eq!((rows[1].from, rows[1].up_to), (33, None));
        assert_eq!([rows[0].timings.len(), rows[1].timings.len()], [2, 1]);
        assert_eq!(rows[0].gain(), Some(0.5));
        assert_eq!(rows[1].gain(), Some(0.0));
    }
}
