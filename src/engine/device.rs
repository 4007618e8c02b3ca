//! Where a model runs, and what its kernels are chosen by there.

use std::{fmt, str::FromStr};

use super::{EngineError, Threads};
use crate::{
    machine::{Fit, Machine, Served},
    runtime::cuda::{self, DeviceInfo},
    tensor::DType,
};

/// Where a model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first CUDA device if the driver shows one that is new enough, else the CPU.
    #[default]
    Auto,
    Cpu,
    /// A CUDA device by number, from 0.
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
    /// The card that programs for this device are lowered for, and how well its description fits. The CPU runs the kernels of
    /// the usual card.
    ///
    /// # Errors
    /// A card that no kernel runs on.
    pub fn machine(&self) -> Result<(Machine, Served), EngineError> {
        Ok(match self {
            Self::Cpu { .. } => (Machine::usual()?, Served::Own),
            Self::Cuda(info) => info.machine()?,
        })
    }
}

/// What an engine's kernels were chosen by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenBy {
    /// The description of a card, by its name.
    pub card: String,
    /// `None` of an artifact, which was compiled elsewhere.
    pub fit: Option<Fit>,
    pub served: Served,
    /// Timings that corrected the cost model.
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
    /// The device that this choice means on this machine.
    pub fn resolve(self) -> Result<DeviceName, EngineError> {
        // Loading for a device shares work out too.
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

/// The storage type that a device uses when none is asked for: f16 on CUDA, f32 on the CPU.
pub fn default_dtype(device: &DeviceName) -> DType {
    match device {
        DeviceName::Cpu { .. } => DType::F32,
        DeviceName::Cuda(_) => DType::F16,
    }
}
