//! Choice of the device, and a record of the cost model and the timings that selected an engine's kernels.

use std::{fmt, str::FromStr};

use super::{EngineError, Threads};
use crate::{
    machine::{Fit, Machine, Served},
    runtime::cuda::{self, DeviceInfo},
    tensor::DType,
};

/// Choice of the device for a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first CUDA device if the driver reports a supported device, else the CPU.
    #[default]
    Auto,
    Cpu,
    /// A CUDA device by its index.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|n| n.parse().ok())
                .map(Self::Cuda)
                .ok_or_else(|| EngineError::UnknownDevice {
                    text: text.to_owned(),
                }),
        }
    }
}

/// The device that an engine runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceName {
    Cpu { n_threads: usize },
    Cuda(DeviceInfo),
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu { n_threads } => write!(f, "CPU, {n_threads} threads"),
            Self::Cuda(info) => write!(f, "cuda:{}, {}", info.ordinal, info.name),
        }
    }
}

impl DeviceName {
    /// Returns the card that programs for this device are lowered for. [`Served`] says whether this is the device's own card or, if that
    /// has no description, the nearest card. Programs for a CPU are lowered for the default card.
    ///
    /// # Errors
    /// Returns an error if no kernel supports the card.
    pub fn machine(&self) -> Result<(Machine, Served), EngineError> {
        Ok(match self {
            Self::Cpu { .. } => (Machine::usual()?, Served::Own),
            Self::Cuda(info) => info.machine()?,
        })
    }
}

/// The cost model and timings by which an engine's kernels were chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenBy {
    /// Name of the card's description.
    pub card: String,
    /// Source of the cost model's constants; `None` for an artifact, which does not store it.
    pub fit: Option<Fit>,
    pub served: Served,
    /// Number of timings that corrected the cost model.
    pub timings: usize,
}

impl fmt::Display for ChosenBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            card,
            fit,
            served,
            timings,
        } = self;
        write!(f, "by the cost model of {card}")?;
        match fit {
            Some(Fit::Relative) => f.write_str(", which was fitted on another card of its kind")?,
            Some(Fit::DataSheet) => f.write_str(", which is from its data sheet")?,
            Some(Fit::Timings) | None => {}
        }
        if *served == Served::Nearest {
            f.write_str(", the nearest card that gemmule describes")?;
        }
        match timings {
            0 => Ok(()),
            n => write!(f, ", corrected by {n} timings"),
        }
    }
}

impl DeviceChoice {
    /// Returns the device that this choice selects on this machine.
    pub fn resolve(self) -> Result<DeviceName, EngineError> {
        // Threads are also started for a CUDA device, because loading weights uses them.
        let n_threads = Threads::usual()?.count();
        let cpu = || DeviceName::Cpu { n_threads };
        match self {
            Self::Cpu => Ok(cpu()),
            Self::Cuda(ordinal) => Ok(DeviceName::Cuda(
                cuda::Device::open(ordinal)?.info().clone(),
            )),
            Self::Auto => {
                let usable = |d: &DeviceInfo| d.capability >= (8, 0);
                let presence = cuda::probe();
                if let Some(refused) = &presence.refused {
                    tracing::warn!("{refused}");
                }
                Ok(presence
                    .devices
                    .into_iter()
                    .find(usable)
                    .map_or_else(cpu, DeviceName::Cuda))
            }
        }
    }
}

/// Returns the default storage type of a device: f16 on CUDA, f32 on the CPU.
pub fn default_dtype(device: &DeviceName) -> DType {
    match device {
        DeviceName::Cpu { .. } => DType::F32,
        DeviceName::Cuda(_) => DType::F16,
    }
}
