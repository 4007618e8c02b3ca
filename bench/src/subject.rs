//! Arguments of benchmarks that compare several programs of one description: the model, the sets of lengths, the number of repetitions and
//! the output files.

use std::path::PathBuf;

use gemmule::{
    DType, DeviceChoice, Engine, EngineError,
    cli::{
        bench::sets::{self, Set},
        print,
    },
    engine::Builder,
    measure::shipped_configs,
    runtime::{batch::Limits, weights::RandomWeights},
};
use miette::{Report, miette};
use serde_json::Value;

/// Arguments of `ladder` and `breakdown`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) subject: Subject,
    #[command(flatten)]
    pub(crate) sets: Sets,
    /// Write the results to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Draw the results as SVG: for `ladder`, the time of each step relative to the first step; for `breakdown`, the parts of a run
    #[arg(long, value_name = "FILE")]
    pub(crate) figure: Option<PathBuf>,
    #[arg(long, default_value_t = 4)]
    pub(crate) warm_up: usize,
    #[arg(long, default_value_t = 20)]
    pub(crate) runs: usize,
}

/// Selection of the sets of lengths.
#[derive(clap::Args)]
pub(crate) struct Sets {
    /// Sets of lengths as JSON: {"encoder": [{"name": …, "lens": […]}, …]}; default: the built-in
    /// sets
    #[arg(long, value_name = "FILE")]
    workloads: Option<PathBuf>,
    /// Names of the sets to time; default: those of the paper's figure, or all sets of FILE
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    sets: Vec<String>,
}

impl Sets {
    /// Returns the selected sets that fit the model's position table. If the user gives no names, selects all sets of the file, or the sets
    /// named in `usual` if there is no file.
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

/// Returns the sets that fit the model's position table, and prints a line for each other set.
fn served(mut sets: Vec<Set>, limits: &Limits) -> Result<Vec<Set>, Report> {
    let Some(limit) = limits.longest else {
        return Ok(sets);
    };
    for set in sets.iter().filter(|s| s.longest() > limit) {
        print(&format!(
            "{}: skipped, because it has a sequence of {} tokens and the maximum of the position table is {limit}\n",
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

/// The model of a benchmark: its description, sizes, weights and device. The benchmark itself selects the outputs and the passes.
#[derive(clap::Args)]
pub(crate) struct Subject {
    /// A shipped description or the path of a RON file
    #[arg(default_value = "bert")]
    model: String,
    /// Read the sizes from this config.json; default: those of the checkpoint, or of the
    /// description's base model
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The checkpoint folder
    #[arg(long, value_name = "DIR")]
    weights: Option<PathBuf>,
    /// Seed of random weights, used without a checkpoint
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

/// Standard deviation of random weights. It is twice the usual value for initialization, so that attention distinguishes keys. A program
/// that attends to wrong keys then produces wrong results.
const DEVIATION: f32 = 0.04;

impl Subject {
    /// Creates an engine builder whose output is the hidden states of the model, one row per token.
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

    /// Describes the model.
    pub(crate) fn name(&self) -> Result<String, EngineError> {
        Ok(match (&self.config, &self.weights) {
            (Some(file), _) => format!("{} with {}", self.model, file.display()),
            (None, Some(folder)) => format!("{} with {}", self.model, folder.display()),
            (None, None) => self
                .shipped()?
                .map_or_else(|| self.model.clone(), |(name, _)| name.to_owned()),
        })
    }

    /// Returns the name and the sizes that are shipped with the description.
    fn shipped(&self) -> Result<Option<(&'static str, Value)>, EngineError> {
        let mut all = shipped_configs()?.into_iter();
        Ok(all
            .find(|(_, description, _)| *description == self.model)
            .map(|(name, _, config)| (name, config)))
    }
}
