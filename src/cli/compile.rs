use std::{path::PathBuf, process::ExitCode};

use miette::{IntoDiagnostic, Report, miette};

use super::{
    Outcome, human,
    model::{Model, Tuning, stage_name},
    print,
    progress::Bars,
};
use crate::{
    DType, DeviceChoice, EngineError,
    engine::{
        Artifact, DeviceName, TuneMode, Tuner, emit, picks_for_targets, read_picks, target_of,
    },
    jit::{Jit, Target},
    runtime::cuda::{CudaModel, Device},
    tune::{Picks, Problem},
};

/// Those of the cards in data centres before Blackwell.
const DEFAULT_TARGETS: [Target; 4] = [Target::Sm80, Target::Sm86, Target::Sm89, Target::Sm90a];

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Model,
    #[arg(long, default_value = "f16")]
    dtype: DType,
    /// Targets to hold code for (sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120); by default the first four,
    /// or with picks that of their card
    #[arg(long, value_delimiter = ',')]
    arch: Option<Vec<Target>>,
    #[command(flatten)]
    tuning: Tuning,
    /// The CUDA device to tune on
    #[arg(long, default_value = "cuda:0")]
    device: DeviceChoice,
    /// The file to write
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
}

pub(super) fn run(args: Args) -> Outcome {
    let mut compiled = args.model.compile(args.dtype)?;
    let jit = Jit::open().into_diagnostic()?;
    let bars = Bars::new();
    let picks = args.picks(&compiled.problems()?, &jit, &bars)?;
    let targets = match (&args.arch, &picks) {
        (Some(targets), _) => targets.clone(),
        (None, Some(picks)) => target_of(&picks.made.card).into_iter().collect(),
        (None, None) => DEFAULT_TARGETS.to_vec(),
    };
    if picks.is_some() {
        compiled = compiled.with_picks(picks)?;
    }
    let sources = emit(&CudaModel::kernels(&compiled.program))?;
    let mut cubins = Vec::new();
    for &target in &targets {
        let show = |done, total| bars.show(target.name(), done, total);
        cubins.extend(jit.compile_all(&sources, target, &show).into_diagnostic()?);
    }
    let artifact = Artifact::of(compiled, cubins);
    let bytes = artifact.write(&args.out)?;
    let targets: Vec<&str> = targets.iter().map(|t| t.name()).collect();
    let picked = artifact.picks.as_ref().map(|picks| {
        let n = picks.problems.len();
        format!(", {n} problems as picked on {}", picks.made.card)
    });
    print(&format!(
        "{}: {} launches of {} kernels in {}, for {}{}, {}\n",
        args.out.display(),
        artifact.program.steps.len(),
        artifact.program.kernels.len(),
        artifact.program.dtype,
        targets.join(", "),
        picked.unwrap_or_default(),
        human(bytes)
    ))?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// The picks to compile with: measured on a device if asked for, else as a file says, which needs
    /// no device.
    fn picks(&self, problems: &[Problem], jit: &Jit, bars: &Bars) -> Result<Option<Picks>, Report> {
        let Tuning { tune, picks: file } = &self.tuning;
        match (tune, file) {
            (TuneMode::Off, None) => Ok(None),
            (TuneMode::Off, Some(file)) => {
                let targets = match &self.arch {
                    Some(targets) => targets.clone(),
                    None => target_of(&read_picks(file)?.made.card)
                        .into_iter()
                        .collect(),
                };
                let nvrtc = jit.nvrtc().version();
                Ok(Some(picks_for_targets(file, problems, &targets, nvrtc)?))
            }
            _ => {
                let device = match self.device.resolve()? {
                    DeviceName::Cuda(info) => Device::open(info.ordinal).into_diagnostic()?,
                    device => {
                        let device = device.to_string();
                        return Err(EngineError::TuneOnCpu { device }.into());
                    }
                };
                let target = device.target().into_diagnostic()?;
                let asked = self.arch.as_deref().unwrap_or_default();
                if let Some(other) = asked.iter().find(|&&t| t != target) {
                    return Err(miette!(
                        "kernels are tuned on {}, whose code is for {target}, not for {other}; give --arch {target} alone",
                        device.info().name
                    ));
                }
                let show = |stage, done, total| bars.show(stage_name(stage), done, total);
                let picks = Tuner::new(&device, jit, *tune)
                    .given(file.as_deref())
                    .progress(&show)
                    .picks(problems)?;
                Ok(Some(picks))
            }
        }
    }
}
