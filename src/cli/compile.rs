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
        Artifact, Compiled, DeviceName, Sealed, TuneMode, Tuner, emit, picks_for_targets,
        read_picks, target_of,
    },
    jit::{Jit, Target},
    kernels::Instructions,
    runtime::cuda::{CudaModel, Device},
    tune::Picks,
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
    /// or with picks that of their card. All run one program: sm_90a alone has Hopper's instructions
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
    let jit = Jit::open().into_diagnostic()?;
    let bars = Bars::new();
    let device = args.device()?;
    let targets = args.targets(device.as_ref())?;
    // One program serves all targets, with what they have in common.
    let hopper = targets.iter().all(|t| t.has(Instructions::Hopper));
    let instructions = match hopper && !targets.is_empty() {
        true => Instructions::Hopper,
        false => Instructions::Ampere,
    };
    let mut compiled = args.model.compile_with(args.dtype, instructions)?;
    if compiled.options.invariant && device.is_some() {
        return Err(EngineError::TuneInvariant.into());
    }
    let picks = args.picks(device.as_ref(), &targets, &compiled, &jit, &bars)?;
    if picks.is_some() {
        compiled = compiled.with_picks(picks)?;
    }
    let sources = emit(&CudaModel::kernels(&compiled.program))?;
    let mut cubins = Vec::new();
    for &target in &targets {
        let show = |done, total| bars.show(target.name(), done, total);
        let made = jit.compile_all(&sources, target, &show).into_diagnostic()?;
        cubins.extend(Sealed::all(made, &sources, jit.nvrtc().version()));
    }
    let artifact = Artifact::of(compiled, cubins);
    let bytes = artifact.write(&args.out)?;
    let targets: Vec<&str> = targets.iter().map(|t| t.name()).collect();
    let picked = artifact.picks.as_ref().map(|picks| {
        let n = picks.problems.len();
        format!(", {n} problems as picked on {}", picks.made.card)
    });
    print(&format!(
        "{}: {} launches of {} kernels in {}{}, for {}{}, {}\n",
        args.out.display(),
        artifact.program.steps.len(),
        artifact.program.kernels.len(),
        artifact.program.dtype,
        if artifact.program.invariant {
            ", invariant"
        } else {
            ""
        },
        targets.join(", "),
        picked.unwrap_or_else(|| ", kernels by the cost model's guess".to_owned()),
        human(bytes)
    ))?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// What kernels are to be tuned on, if they are.
    fn device(&self) -> Result<Option<Device>, Report> {
        if matches!(self.tuning.tune, TuneMode::Off | TuneMode::Guess) {
            return Ok(None);
        }
        match self.device.resolve()? {
            DeviceName::Cuda(info) => Ok(Some(Device::open(info.ordinal).into_diagnostic()?)),
            device => {
                let device = device.to_string();
                Err(EngineError::TuneOnCpu { device }.into())
            }
        }
    }

    /// What there will be code for: as asked, else for the card of the picks.
    fn targets(&self, device: Option<&Device>) -> Result<Vec<Target>, Report> {
        match (&self.arch, device, &self.tuning.picks) {
            (asked, Some(device), _) => {
                let target = device.target().into_diagnostic()?;
                let asked = asked.as_deref().unwrap_or_default();
                match asked.iter().find(|&&t| t != target) {
                    Some(other) => Err(miette!(
                        "kernels are tuned on {}, whose code is for {target}, not for {other}; give --arch {target} alone",
                        device.info().name
                    )),
                    None => Ok(vec![target]),
                }
            }
            (Some(asked), None, _) => Ok(asked.clone()),
            (None, None, Some(file)) => {
                let card = read_picks(file)?.made.card;
                Ok(target_of(&card).into_iter().collect())
            }
            (None, None, None) => Ok(DEFAULT_TARGETS.to_vec()),
        }
    }

    /// The picks to compile with: measured on a device if asked for, else as a file says, which needs
    /// no device.
    fn picks(
        &self,
        device: Option<&Device>,
        targets: &[Target],
        compiled: &Compiled,
        jit: &Jit,
        bars: &Bars,
    ) -> Result<Option<Picks>, Report> {
        let Tuning { tune, picks: file } = &self.tuning;
        match (device, file) {
            (None, Some(file)) if *tune == TuneMode::Guess => {
                Err(EngineError::GuessWithPicks { file: file.clone() }.into())
            }
            (None, None) => Ok(None),
            (None, Some(file)) => {
                let nvrtc = jit.nvrtc().version();
                Ok(Some(picks_for_targets(
                    file,
                    &compiled.problems()?,
                    targets,
                    nvrtc,
                )?))
            }
            (Some(device), file) => {
                let show = |stage, done, total| bars.show(stage_name(stage), done, total);
                let picks = Tuner::new(device, jit, *tune)
                    .given(file.as_deref())
                    .progress(&show)
                    .choose_in(std::slice::from_ref(compiled))?
                    .picks;
                Ok(Some(picks))
            }
        }
    }
}
