use std::{path::PathBuf, process::ExitCode};

use miette::{IntoDiagnostic, Report, miette};

use super::{
    Outcome, human,
    model::{Card, Model, Quantize, Tuning, stage_name},
    print,
    progress::Bars,
};
use crate::{
    DType, DeviceChoice, EngineError,
    engine::{
        Artifact, Compiled, DeviceName, Sealed, TimedOn, TuneMode, Tuner, emit, read_timings,
        timings_for,
    },
    jit::{Jit, Target},
    machine::Machine,
    runtime::cuda::{CudaModel, Device},
    select::Timings,
    tensor::Format,
};

/// Default targets: those of data-center cards before Blackwell.
const DEFAULT_TARGETS: [Target; 4] = [Target::Sm80, Target::Sm86, Target::Sm89, Target::Sm90a];

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Model,
    /// f32, f16 or bf16; by default f16. With --quantize, the default is f32, which compiles for a CPU
    #[arg(long)]
    dtype: Option<DType>,
    /// Store the weights of linear layers in this format. The artifact is for GPUs with --dtype f16 or bf16, and for a CPU otherwise
    #[arg(long, value_enum, value_name = "KIND")]
    quantize: Option<Quantize>,
    /// Targets to include code for (sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120). By default the first four, or the target of --card. All
    /// targets share one program, which uses Hopper's instructions only if sm_90a is the only target
    #[arg(long, value_delimiter = ',')]
    arch: Option<Vec<Target>>,
    #[command(flatten)]
    card: Card,
    #[command(flatten)]
    tuning: Tuning,
    /// CUDA device to tune on
    #[arg(long, default_value = "cuda:0")]
    device: DeviceChoice,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
}

pub(super) fn run(args: Args) -> Outcome {
    let format = args.quantize.map(Quantize::format);
    if let (Some(format), None | Some(DType::F32)) = (format, args.dtype) {
        return args.for_cpu(format);
    }
    let jit = Jit::open().into_diagnostic()?;
    let bars = Bars::new();
    let device = args.device()?;
    // Read the file of timings only once, because it may be a pipe. If kernels are timed on a device, the tuner reads the file.
    let read = match (&device, &args.tuning.timings) {
        (None, Some(file)) => Some(read_timings(file)?),
        _ => None,
    };
    let timed_on = read.as_ref().map(|(_, on)| on);
    let targets = args.targets(device.as_ref(), timed_on)?;
    // All targets share one program, which uses only instructions that every target has.
    let machine = match &device {
        Some(device) => device.info().machine().into_diagnostic()?.0,
        None => args.card.machine_of(&targets, timed_on)?,
    };
    let mut compiled = args
        .model
        .compile_in(args.dtype.unwrap_or(DType::F16), format, machine)?;
    let is_tuned = device.is_some() || args.tuning.timings.is_some();
    if compiled.options.invariant && is_tuned {
        return Err(EngineError::TuneInvariant.into());
    }
    if let Some(timings) = args.timings(device.as_ref(), read, &compiled, &jit, &bars)? {
        compiled = compiled.with_timings(Some(timings))?;
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
    let corrected = match artifact.timings {
        0 => String::new(),
        n => format!(", corrected by {n} timings"),
    };
    print(&format!(
        "{}: {} launches of {} kernels in {}{}, for {}, kernels by the cost model of {}{corrected}, {}\n",
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
        artifact.card,
        human(bytes)
    ))?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// Writes an artifact for a CPU, which has no GPU code.
    fn for_cpu(&self, format: Format) -> Outcome {
        let dtype = DType::F32;
        if self.arch.is_some() || self.tuning.timings.is_some() {
            return Err(miette!(
                "--arch and --timings are for GPUs, and --quantize without a storage type is for a CPU; add --dtype f16 or --dtype bf16"
            ));
        }
        let machine = self.card.machine_of(&DEFAULT_TARGETS, None)?;
        let compiled = self.model.compile_in(dtype, Some(format), machine)?;
        let artifact = Artifact::of(compiled, Vec::new());
        let bytes = artifact.write(&self.out)?;
        print(&format!(
            "{}: {} steps of {} kernels in {dtype}, weights of linear layers in {format}, for a CPU, {}\n",
            self.out.display(),
            artifact.program.steps.len(),
            artifact.program.kernels.len(),
            human(bytes)
        ))?;
        Ok(ExitCode::SUCCESS)
    }

    /// Returns the device to time kernels on, if any.
    fn device(&self) -> Result<Option<Device>, Report> {
        if self.tuning.tune == TuneMode::Off {
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

    /// Returns the targets to include code for. If kernels are timed on a device, this is the device's target. Otherwise, the first of the
    /// following that is given determines them:
    ///
    /// - the requested targets,
    /// - the card that is named,
    /// - the card that the timings are from,
    /// - [`DEFAULT_TARGETS`].
    fn targets(
        &self,
        device: Option<&Device>,
        timed_on: Option<&TimedOn>,
    ) -> Result<Vec<Target>, Report> {
        match (&self.arch, device) {
            (asked, Some(device)) => {
                let target = device.target().into_diagnostic()?;
                let asked = asked.as_deref().unwrap_or_default();
                match asked.iter().find(|&&t| t != target) {
                    Some(other) => Err(miette!(
                        "kernels are timed on {}, whose target is {target}, not {other}; give --arch {target} alone",
                        device.info().name
                    )),
                    None => Ok(vec![target]),
                }
            }
            (Some(asked), None) => Ok(asked.clone()),
            (None, None) => {
                let capability = match (&self.card.card, timed_on) {
                    (Some(name), _) => Machine::named(name).into_diagnostic()?.capability,
                    (None, Some(on)) => on.capability,
                    (None, None) => return Ok(DEFAULT_TARGETS.to_vec()),
                };
                let (major, minor) = capability;
                Ok(vec![
                    Target::for_capability(major, minor).into_diagnostic()?,
                ])
            }
        }
    }

    /// Returns the timings to compile with. They are measured on the device, or read from a file if there is no device.
    fn timings(
        &self,
        device: Option<&Device>,
        read: Option<(Timings, TimedOn)>,
        compiled: &Compiled,
        jit: &Jit,
        bars: &Bars,
    ) -> Result<Option<Timings>, Report> {
        let Tuning {
            tune,
            timings: file,
        } = &self.tuning;
        match (device, file.as_deref().zip(read)) {
            (None, None) => Ok(None),
            (None, Some((file, read))) => {
                let (machine, nvrtc) = (&compiled.options.machine, jit.nvrtc().version());
                Ok(Some(timings_for(file, read, machine, Some(nvrtc))?))
            }
            (Some(device), _) => {
                let show = |stage, done, total| bars.show(stage_name(stage), done, total);
                let timings = Tuner::new(device, jit, *tune)
                    .given(file.as_deref())
                    .progress(&show)
                    .time(compiled)?;
                Ok(Some(timings))
            }
        }
    }
}
