//! The model that a benchmark of several programs of one description runs.

use std::path::PathBuf;

use serde_json::Value;

use crate::{
    DType, DeviceChoice, Engine, EngineError,
    engine::{Builder, shipped_configs},
    runtime::weights::RandomWeights,
};

/// A model, of which a benchmark itself says what is computed and by which passes.
#[derive(clap::Args)]
pub(super) struct Subject {
    /// A shipped description or the path of a RON file
    #[arg(default_value = "bert")]
    model: String,
    /// Sizes from this config.json; those of the checkpoint, or of the description's base model,
    /// otherwise
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The checkpoint folder
    #[arg(long, value_name = "DIR")]
    weights: Option<PathBuf>,
    /// Random weights from this seed, where no checkpoint is given
    #[arg(
        long,
        value_name = "SEED",
        default_value_t = 1,
        conflicts_with = "weights"
    )]
    random_weights: u64,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// f32, f16 or bf16; by default f16 on CUDA and f32 on the CPU
    #[arg(long)]
    dtype: Option<DType>,
}

/// Deviation of random weights: twice what models are initialised with, so that attention tells keys
/// apart and a program that attends to other keys gives other results.
const DEVIATION: f32 = 0.04;

impl Subject {
    /// A builder of the model's hidden states, one row a token.
    pub(super) fn builder(&self) -> Result<Builder, EngineError> {
        let mut builder = Engine::builder(&self.model)
            .device(self.device)
            .outputs(["last_hidden_state"]);
        match &self.weights {
            Some(folder) => builder = builder.checkpoint(folder),
            None => {
                builder = builder.random_weights(RandomWeights {
                    seed: self.random_weights,
                    deviation: DEVIATION,
                });
            }
        }
        if let Some(file) = &self.config {
            builder = builder.config(file);
        } else if self.weights.is_none()
            && let Some((_, config)) = self.shipped()?
        {
            builder = builder.config_value(config);
        }
        if let Some(dtype) = self.dtype {
            builder = builder.dtype(dtype);
        }
        Ok(builder)
    }

    /// What is measured, in words.
    pub(super) fn name(&self) -> Result<String, EngineError> {
        Ok(match (&self.config, &self.weights) {
            (Some(file), _) => format!("{} with {}", self.model, file.display()),
            (None, Some(folder)) => format!("{} with {}", self.model, folder.display()),
            (None, None) => self
                .shipped()?
                .map_or_else(|| self.model.clone(), |(name, _)| name.to_owned()),
        })
    }

    /// Name and sizes that come with the description.
    fn shipped(&self) -> Result<Option<(&'static str, Value)>, EngineError> {
        let mut all = shipped_configs()?.into_iter();
        Ok(all
            .find(|(_, description, _)| *description == self.model)
            .map(|(name, _, config)| (name, config)))
    }
}
