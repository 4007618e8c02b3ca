//! Arguments that select a model, shared by the subcommands.

#[cfg(feature = "corpora")]
pub(super) mod identity;
mod suited;

use std::{
    cell::OnceCell,
    collections::BTreeSet,
    num::{NonZeroU32, NonZeroUsize},
    path::{Path, PathBuf},
};

use miette::{Report, miette};
use serde_json::Value;

use crate::{
    DType, EngineError,
    engine::{
        Builder, CompileOptions, Compiled, DeviceChoice, Engine, KvCacheChoice, ModelFile, Stage,
        TimedOn, TuneMode, compile, hub::Files,
    },
    jit::Target,
    machine::Machine,
    model::Description,
    program::{AttentionChoice, NEXT_LOGITS, Program},
    runtime::{GraphChoice, batch::BatchError, weights::RandomWeights},
    tensor::{Extents, Format},
    text::{Folder, TextRole, config, limit_context},
};

use super::{human, location::Location, memory::Memory, progress::Bars};

/// Arguments of commands that compile a model but do not run it: a description, and the sizes in config.json.
#[derive(clap::Args)]
pub(super) struct Model {
    #[command(flatten)]
    location: Location,
    /// Read sizes from this config.json
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    choices: Choices,
    /// Contents of MODEL. They are read only once, because MODEL may be a pipe.
    #[arg(skip)]
    opened: OnceCell<ModelFile>,
    /// Contents of config.json, which may also be a pipe.
    #[arg(skip)]
    read: OnceCell<Value>,
    #[arg(skip)]
    folder: OnceCell<Folder>,
}

/// Outputs to compute, and passes to apply.
#[derive(clap::Args, Clone)]
pub(super) struct Choices {
    /// An output to compute (repeat for several); by default the outputs of the description
    #[arg(long = "output", value_name = "NAME")]
    outputs: Vec<String>,
    /// Disable a compiler pass (repeat for several)
    #[arg(long, value_name = "PASS")]
    without: Vec<String>,
    /// Kernels for attention: auto (by card, head size and batch), short (one kernel; fails beyond its maximum length), grouped (two
    /// grouped GEMMs), online (online softmax, any length) or wgmma (any length, on Hopper)
    #[arg(long, value_name = "KIND")]
    attention: Option<AttentionChoice>,
    /// Make the results of a sequence bitwise independent of the rest of the batch: each operator always uses the same kernel
    #[arg(long)]
    invariant: bool,
    /// Launch every operator of the fused graph separately, even if a fused launch, such as a linear layer with the following LayerNorm, is
    /// faster (for comparisons)
    #[arg(long, alias = "no-joint-launches")]
    no_fused_launches: bool,
    /// Maximum number of tokens of a sequence. For models with LongRoPE (Phi-3 with 128k tokens), the default is the original number of
    /// positions; a larger N selects other rotary frequencies, for all sequences
    #[arg(long, value_name = "N")]
    max_context: Option<NonZeroU32>,
}

/// Card for which kernels are chosen.
#[derive(clap::Args, Clone, Default)]
pub(super) struct Card {
    /// Choose kernels for this card, which need not be in this machine: a100, h200, …; `gemmule doctor` lists them
    #[arg(long, value_name = "NAME")]
    pub(super) card: Option<String>,
}

impl Card {
    /// Returns the card that the timings were measured on (`timed_on`). Returns [`machine`](Self::machine) instead if --card is given, if
    /// there are no timings, if gemmule has no description of the timed card, or if `targets` contains a target of another card.
    pub(super) fn machine_of(
        &self,
        targets: &[Target],
        timed_on: Option<&TimedOn>,
    ) -> Result<Machine, EngineError> {
        if let (None, Some(on)) = (&self.card, timed_on)
            && let Some(machine) = on.machine()?
            && let (major, minor) = machine.capability
            && let Ok(own) = Target::for_capability(major, minor)
            && targets.iter().all(|&target| target == own)
        {
            return Ok(machine);
        }
        self.machine(targets)
    }

    /// Returns the card that --card names. Without --card and with exactly one target, returns the card that represents the target's
    /// compute capability, if gemmule has a description of such a card. In all other cases, returns the default card.
    pub(super) fn machine(&self, targets: &[Target]) -> Result<Machine, EngineError> {
        let runs_on = |machine: &Machine, target: Target| {
            let (major, minor) = machine.capability;
            Target::for_capability(major, minor).is_ok_and(|own| own == target)
        };
        if let Some(name) = &self.card {
            let machine = Machine::named(name)?;
            return match targets {
                [] => Ok(machine),
                // All targets share one program, which uses only instructions that every target has.
                _ if targets.iter().all(|t| t.has(machine.instructions))
                    && targets.iter().any(|&target| runs_on(&machine, target)) =>
                {
                    Ok(machine)
                }
                [target, ..] => Err(EngineError::CardOfOtherTarget {
                    card: name.clone(),
                    capability: machine.capability,
                    target: target.to_string(),
                }),
            };
        }
        match targets {
            [only] => {
                let found = Machine::of_capability(only.capability())?;
                found.map_or_else(|| Ok(Machine::usual()?), Ok)
            }
            _ => Ok(Machine::usual()?),
        }
    }
}

/// Timings of kernels.
#[derive(clap::Args, Clone)]
pub(super) struct Tuning {
    /// Time kernels in whole runs on the CUDA device, to correct the cost model: quick (seconds) or full (up to two minutes). Timings are
    /// kept on disk
    #[arg(long, value_name = "MODE", default_value = "off")]
    pub(super) tune: TuneMode,
    /// Read timings of kernels from this file, which `gemmule tune --export` wrote
    #[arg(long, value_name = "FILE")]
    pub(super) timings: Option<PathBuf>,
}

impl Model {
    /// Fetches all files of a model on the hub, including weights. By default, only the files that determine the program are fetched.
    pub(super) fn fetch_weights(&self) -> Result<(), EngineError> {
        self.location.folder(Files::All).map(drop)
    }

    /// Returns the checkpoint's folder, if one is given.
    pub(super) fn folder(&self) -> Result<Option<&Folder>, EngineError> {
        let Some(path) = self.location.folder(Files::Config)? else {
            return Ok(None);
        };
        if let Some(folder) = self.folder.get() {
            return Ok(Some(folder));
        }
        let folder = Folder::open(path)?;
        Ok(Some(self.folder.get_or_init(|| folder)))
    }

    /// Returns the contents of `--config`, or else the config.json of the checkpoint.
    pub(super) fn config(&self) -> Result<Value, EngineError> {
        if let Some(read) = self.read.get() {
            return Ok(read.clone());
        }
        let mut read = match (&self.config, self.folder()?) {
            (Some(file), _) => config(file)?,
            (None, Some(folder)) => folder.config()?.clone(),
            (None, None) => return Err(EngineError::NoConfig),
        };
        limit_context(&mut read, self.choices.max_context());
        Ok(self.read.get_or_init(|| read).clone())
    }

    /// Reads MODEL.
    pub(super) fn opened(&self) -> Result<&ModelFile, EngineError> {
        if let Some(opened) = self.opened.get() {
            return Ok(opened);
        }
        let opened = match self.location.model() {
            Some(model) => ModelFile::open(model)?,
            None => {
                let description = crate::model::Description::for_config(&self.config()?)?;
                ModelFile::Description(Box::new(description))
            }
        };
        Ok(self.opened.get_or_init(|| opened))
    }

    pub(super) fn options(
        &self,
        dtype: DType,
        machine: Machine,
    ) -> Result<CompileOptions, EngineError> {
        let modules = self.folder()?.and_then(Folder::modules);
        Ok(CompileOptions {
            outputs: self.choices.outputs(),
            modules: modules.unwrap_or_default().to_vec(),
            without: self
                .choices
                .without
                .iter()
                .cloned()
                .collect::<BTreeSet<_>>(),
            attention: self.choices.attention.unwrap_or_default(),
            invariant: self.choices.invariant,
            no_fused_launches: self.choices.no_fused_launches,
            ..CompileOptions::new(dtype, machine)
        })
    }

    /// Returns whether the description is built in, and not from a file.
    pub(super) fn is_shipped(&self) -> bool {
        let model = self.location.model();
        model.is_none_or(|name| Description::shipped(name).is_some())
    }

    /// Returns the description.
    pub(super) fn description(&self) -> Result<Description, EngineError> {
        self.opened()?.clone().description()
    }

    /// Compiles for `machine` with the storage type and the weight format of `types`. If `types` has a format of the KV cache, compiles the
    /// program that generates text.
    pub(super) fn compile_with(&self, types: &Types, machine: Machine) -> Result<Compiled, Report> {
        let mut options = CompileOptions {
            quantize: types.quantize.map(Quantize::format),
            ..self.options(types.dtype, machine)?
        };
        if let Some(cache) = types.kv_dtype {
            options.outputs = Some(vec![NEXT_LOGITS.to_owned()]);
            options.kv_cache = cache.format();
            options.cached = true;
        }
        Ok(compile(&self.description()?, &self.config()?, &options)?)
    }

    /// Compiles for `machine`. `quantize` is the format of the weights of linear layers; `None` stores them in `dtype`.
    pub(super) fn compile_in(
        &self,
        dtype: DType,
        quantize: Option<Format>,
        machine: Machine,
    ) -> Result<Compiled, Report> {
        let options = CompileOptions {
            quantize,
            ..self.options(dtype, machine)?
        };
        Ok(compile(&self.description()?, &self.config()?, &options)?)
    }
}

/// Storage types, for commands that print a program and do not run it.
#[derive(clap::Args)]
pub(super) struct Types {
    #[arg(long, default_value = "f16")]
    pub(super) dtype: DType,
    /// Format in which the weights of linear layers are stored
    #[arg(long, value_enum, value_name = "KIND")]
    quantize: Option<Quantize>,
    /// Compile the program that generates text, with a KV cache in this format: auto (the type of the activations) or fp8 (E4M3)
    #[arg(long, value_name = "KIND")]
    pub(super) kv_dtype: Option<KvCacheChoice>,
}

impl Choices {
    fn outputs(&self) -> Option<Vec<String>> {
        (!self.outputs.is_empty()).then(|| self.outputs.clone())
    }

    fn max_context(&self) -> Option<u32> {
        self.max_context.map(NonZeroU32::get)
    }
}

/// A model to run: its description or artifact, weights and device.
#[derive(clap::Args)]
pub struct Runnable {
    #[command(flatten)]
    location: Location,
    /// Read sizes from this config.json instead of the checkpoint's
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Task of the texts, for models that treat tasks differently. Selects the route of a sentence-transformers Router (query, document) or
    /// an adapter (such as retrieval.query of jina-embeddings-v3)
    #[arg(long, value_name = "TASK")]
    task: Option<String>,
    /// Use random weights with this seed, for measurements
    #[arg(long, value_name = "SEED", conflicts_with = "weights")]
    random_weights: Option<u64>,
    /// Standard deviation of the random weights
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.02,
        requires = "random_weights"
    )]
    weights_deviation: f32,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// f32, f16 or bf16; by default f16 on CUDA and f32 on the CPU. The CPU supports bf16 for linear layers if it has the instructions, and
    /// never f16
    #[arg(long)]
    dtype: Option<DType>,
    /// Store the weights of linear layers in 8 or 4 bits, with scales that are determined at load time. Activations keep their type, except
    /// that products in fp8 (on a GPU) and int8 may round them to 8 bits
    #[arg(long, value_enum, value_name = "KIND")]
    quantize: Option<Quantize>,
    /// Dequantize all weights of a quantized checkpoint to the storage type. By default, a GPU keeps weights in the published format if its
    /// kernels can read it
    #[arg(long, conflicts_with = "quantize")]
    dequantize: bool,
    /// Format of the KV cache of a model that generates text: auto (the type of the activations) or fp8 (E4M3, which takes half the memory
    /// of f16)
    #[arg(long, value_name = "KIND", default_value_t)]
    kv_dtype: KvCacheChoice,
    /// Number of CPU threads; by default the number that the process may run at once under its CPU affinity and its cgroup quota
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    #[command(flatten)]
    choices: Choices,
    #[command(flatten)]
    tuning: Tuning,
    #[command(flatten)]
    memory: Memory,
    /// Run even if the checkpoint has layers that the model does not read, for example after config.json was edited to use fewer layers
    #[arg(long, alias = "unused-layers")]
    allow_unused_layers: bool,
    /// Start each kernel only after the previous kernel has finished, even on cards that can start it early (compute capability 9.0 and
    /// later). Does not change results; for comparisons
    #[arg(long)]
    plain_launches: bool,
    /// CUDA graphs to replay instead of launching each kernel. Does not change results
    #[arg(long, value_enum, value_name = "KIND", default_value_t = Graphs::Buckets)]
    graphs: Graphs,
}

/// Describes the size of a KV cache, and its format if that is not the format of the activations.
pub(super) fn cache_of(bytes: u64, program: &Program) -> String {
    match program.cache_format() {
        Format::Plain(_) => human(bytes),
        format @ (Format::Scaled(_) | Format::E4m3) => format!("{} in {format}", human(bytes)),
    }
}

/// Formats of `--quantize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Quantize {
    /// 8-bit floating point (E4M3) with a scale per row of a weight
    Fp8,
    /// 8-bit floating point (E4M3) with a scale per 128 elements of a row
    #[value(name = "fp8_g128")]
    Fp8Groups,
    /// 8-bit integers with a scale per row of a weight
    Int8,
    /// 4-bit integers with a scale and a zero point per 128 elements of a row
    Int4,
}

impl Quantize {
    /// Returns the format of the weights of linear layers.
    pub(super) fn format(self) -> Format {
        match self {
            Self::Fp8 => Format::FP8,
            Self::Fp8Groups => Format::FP8_128,
            Self::Int8 => Format::INT8,
            Self::Int4 => Format::INT4,
        }
    }
}

/// Argument for [`GraphChoice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Graphs {
    /// One graph for all batches of similar sizes
    Buckets,
    /// One graph for batches of exactly the same size
    Exact,
    /// No graphs
    Off,
}

impl From<Graphs> for GraphChoice {
    fn from(graphs: Graphs) -> Self {
        match graphs {
            Graphs::Buckets => Self::Buckets,
            Graphs::Exact => Self::Exact,
            Graphs::Off => Self::Off,
        }
    }
}

impl Runnable {
    /// Returns the requested outputs.
    pub fn outputs(&self) -> Option<Vec<String>> {
        self.choices.outputs()
    }

    /// Returns MODEL, or else the path of `--weights`.
    pub fn name(&self) -> &str {
        self.location.name()
    }

    /// Returns the folder of the checkpoint, if there is one. If it is a model on the hub, fetches it.
    pub(super) fn folder(&self) -> Result<Option<&Path>, EngineError> {
        self.location.folder(match self.random_weights {
            Some(_) => Files::Config,
            None => Files::All,
        })
    }

    /// Does the same as [`folder`](Self::folder), but returns an error if there is no folder. `what` is the kind of the command's inputs,
    /// such as `texts`. The error says that they need a tokenizer, which a folder contains.
    pub(super) fn tokenizer_folder(&self, what: &str) -> Result<&Path, Report> {
        if let Some(folder) = self.folder()? {
            return Ok(folder);
        }
        if let Some(name) = self.location.model()
            && !Path::new(name).exists()
        {
            // Return the error for a MODEL that is neither a file nor the name of a built-in description.
            ModelFile::open(name)?;
        }
        Err(miette!(
            "{what} need the tokenizer.json of a checkpoint; give --weights, or a model on the hub with --model ORG/NAME"
        ))
    }

    /// Opens the folder of the checkpoint with the settings for `--task`. `what` is the kind of the command's inputs, for the error about a
    /// missing folder.
    pub(super) fn opened_folder(&self, what: &str) -> Result<Folder, Report> {
        let folder = self.tokenizer_folder(what)?;
        let opened = Folder::open_for(folder, self.task.as_deref());
        let opened = opened.map_err(EngineError::from)?;
        Ok(opened.with_max_context(self.choices.max_context()))
    }

    /// Opens the folder of the checkpoint with the settings for `--task`, if there is a folder.
    pub(super) fn opened(&self) -> Result<Option<Folder>, Report> {
        match self.folder()? {
            Some(_) => self.opened_folder("texts").map(Some),
            None => Ok(None),
        }
    }

    /// If the model is a sentence-transformers Router and no task is given, sets the task to the name of `role`, which selects the route,
    /// and returns `None`. Otherwise, returns `role`.
    pub(super) fn route(&mut self, role: Option<TextRole>) -> Result<Option<TextRole>, Report> {
        let (Some(role), None) = (role, &self.task) else {
            return Ok(role);
        };
        let folder = self.opened_folder("texts")?;
        if folder.route().is_none() {
            return Ok(Some(role));
        }
        self.task = Some(role.name().to_owned());
        Ok(None)
    }

    /// Returns a builder with the options from these arguments.
    pub fn builder(&self) -> Result<Builder, Report> {
        let folder = self.folder()?;
        let mut builder = match (self.location.model(), folder) {
            (Some(model), _) => Engine::from_model(ModelFile::open(model)?),
            (None, Some(folder)) => Engine::from_checkpoint(folder),
            (None, None) => return Err(EngineError::NoWeights.into()),
        };
        if let Some(folder) = folder {
            builder = builder.checkpoint(folder);
        }
        if let Some(task) = &self.task {
            builder = builder.task(task);
        }
        if let Some(file) = &self.config {
            builder = builder.config(file);
        }
        if let Some(seed) = self.random_weights {
            builder = builder.random_weights(RandomWeights {
                seed,
                deviation: self.weights_deviation,
            });
        }
        if let Some(dtype) = self.dtype {
            builder = builder.dtype(dtype);
        }
        if let Some(quantize) = self.quantize {
            builder = builder.quantize(quantize.format());
        }
        builder = builder.dequantize(self.dequantize);
        if let Some(format) = self.kv_dtype.format() {
            builder = builder.kv_cache(format);
        }
        if let Some(n) = self.threads {
            builder = builder.threads(n);
        }
        if let Some(outputs) = self.choices.outputs() {
            builder = builder.outputs(outputs);
        }
        if let Some(attention) = self.choices.attention {
            builder = builder.attention(attention);
        }
        if let Some(tokens) = self.choices.max_context() {
            builder = builder.max_context(tokens);
        }
        if let Some(file) = &self.tuning.timings {
            builder = builder.timings(file);
        }
        Ok(builder
            .tune(self.tuning.tune)
            .device(self.device)
            .invariant(self.choices.invariant)
            .no_fused_launches(self.choices.no_fused_launches)
            .allow_unused_layers(self.allow_unused_layers)
            .allocator(self.memory.choice()?)
            .plain_launches(self.plain_launches)
            .graphs(self.graphs.into())
            .without(self.choices.without.clone()))
    }

    /// Returns the config.json that contains the model's sizes, from `--config` or else from the checkpoint.
    pub fn config(&self) -> Result<Value, EngineError> {
        let mut read = match (&self.config, self.folder()?) {
            (Some(file), _) => config(file)?,
            (None, Some(folder)) => {
                let folder = Folder::open_for(folder, self.task.as_deref())?;
                folder.config()?.clone()
            }
            (None, None) => return Err(EngineError::NoConfig),
        };
        limit_context(&mut read, self.choices.max_context());
        Ok(read)
    }

    /// Does the same as [`builder`](Self::builder), for commands that select the outputs of the model themselves. Returns an error if the
    /// user selects outputs.
    pub(super) fn builder_of_own_outputs(&self) -> Result<Builder, Report> {
        match self.choices.outputs() {
            None => self.builder(),
            Some(asked) => Err(miette!(
                "this command chooses its outputs itself; leave `{}` out",
                asked.join(", ")
            )),
        }
    }

    /// Builds an engine, with progress bars on standard error.
    pub fn build(builder: Builder) -> Result<Engine, EngineError> {
        let bars = Bars::new();
        builder
            .progress(move |stage, done, total| {
                bars.show(stage_name(stage), done, total);
            })
            .build()
    }
}

/// Returns the extents of a batch of sequences with these lengths.
///
/// # Errors
/// Returns an error if there is no sequence, or if one is empty or longer than the model supports.
pub(super) fn extents_for(lens: &[u32], model: &crate::model::Model) -> Result<Extents, Report> {
    let extents = Extents::of(lens).map_err(BatchError::from);
    let extents = extents.map_err(EngineError::from)?;
    let longest = model.max_positions.unwrap_or(u32::MAX);
    match lens.iter().position(|&len| len > longest) {
        None => Ok(extents),
        Some(sequence) => Err(EngineError::from(BatchError::TooLong {
            sequence,
            len: lens[sequence].into(),
            limit: longest,
            extended: model.extended_positions,
        })
        .into()),
    }
}

/// Returns the label of a stage's progress bar.
pub(super) fn stage_name(stage: Stage) -> &'static str {
    match stage {
        Stage::Kernels => "kernels",
        Stage::Tuning => "tuning",
        Stage::Weights => "weights",
    }
}
