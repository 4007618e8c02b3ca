//! What the benchmarks of several programs of one description are asked for: the model, the sets of lengths,
//! how often, and where to write.

use std::path::PathBuf;

use gemmule::{
    DType, DeviceChoice, Engine, EngineError,
    cli::{
        bench::sets::{self, Set},
        print,
    },
    engine::{Builder, shipped_configs},
    runtime::{batch::Limits, weights::RandomWeights},
};
use miette::{Report, miette};
use serde_json::Value;

/// The arguments of `bench ladder` and `bench breakdown`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) subject: Subject,
    #[command(flatten)]
    pub(crate) sets: Sets,
    /// Write what was measured
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Draw it as SVG: of the ladder each rung's time as a share of the first one's, of the breakdown the
    /// shares of a run
    #[arg(long, value_name = "FILE")]
    pub(crate) figure: Option<PathBuf>,
    #[arg(long, default_value_t = 4)]
    pub(crate) warm_up: usize,
    #[arg(long, default_value_t = 20)]
    pub(crate) runs: usize,
}

/// Which sets of lengths a benchmark runs.
#[derive(clap::Args)]
pub(crate) struct Sets {
    /// Sets of lengths as JSON: {"encoder": [{"name": …, "lens": […]}, …]}; the project's own
    /// otherwise
    #[arg(long, value_name = "FILE")]
    workloads: Option<PathBuf>,
    /// Names of the sets to time; those of the paper's figure, or all of FILE, otherwise
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    sets: Vec<String>,
}

impl Sets {
    /// The chosen sets that a model's position table serves; without a choice and without a file, those named
    /// in `usual`.
    pub(crate) fn read(&self, usual: &[&str], limits: &Limits) -> Result<Vec<Set>, Report> {
        let all = sets::load(self.workloads.as_deref())?;
        let usual = || usual.iter().map(|&name| name.to_owned()).collect();
        let names = match (self.sets.is_empty(), &self.workloads) {
            (true, None) => usual(),
            _ => self.sets.clone(),
        };
        served(sets::named(all, &names)?, limits)
    }
}

/// The sets that a model's position table serves; a line is printed for each that it does not.
fn served(mut sets: Vec<Set>, limits: &Limits) -> Result<Vec<Set>, Report> {
    let Some(limit) = limits.longest else {
        return Ok(sets);
    };
    for set in sets.iter().filter(|s| s.longest() > limit) {
        print(&format!(
            "{}: left out, as it has a sequence of {} tokens and the position table serves {limit}\n",
            set.name,
            set.longest()
        ))?;
    }
    sets.retain(|s| s.longest() <= limit);
    if sets.is_empty() {
        return Err(miette!(
            "no set is short enough for a position table of {limit}; choose others with --sets or --workloads, or sizes with a larger table"
        ));
    }
    Ok(sets)
}

/// A model, of which a benchmark itself says what is computed and by which passes.
#[derive(clap::Args)]
pub(crate) struct Subject {
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
    pub(crate) fn builder(&self) -> Result<Builder, EngineError> {
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
    pub(crate) fn name(&self) -> Result<String, EngineError> {
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
