use std::path::PathBuf;

use super::timings::TimingsError;
use crate::{
    codegen::CodegenError,
    files::ReadError,
    generate::{Failure, GenerateError},
    heads::HeadError,
    jit::JitError,
    machine::MachineError,
    model::ModelError,
    names::nearest,
    passes::PassError,
    program::{AttentionChoice, LowerError, SizeOverflow},
    runtime::{
        DeviceOutputError, PlannerError,
        batch::BatchError,
        cpu::{CpuError, ThreadsError},
        cuda::CudaError,
        weights::CheckpointError,
    },
    tensor::{DType, Format},
    text::TextError,
};

/// Any error of loading or running a model.
#[derive(Debug, thiserror::Error)]
#[cfg_attr(feature = "miette", derive(miette::Diagnostic))]
pub enum EngineError {
    #[error(transparent)]
    #[cfg_attr(feature = "miette", diagnostic(transparent))]
    Model(Box<ModelError>),
    #[error(
        "there is no description `{name}`: it is neither a file nor shipped with gemmule{}; expected a file or one of {}",
        nearest(name, known.iter().map(String::as_str))
            .map(|near| format!(" (did you mean `{near}`?)"))
            .unwrap_or_default(),
        known.join(", ")
    )]
    NoModel { name: String, known: Vec<String> },
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(#[from] gemmule_hub::HubError),
    #[cfg(feature = "hub")]
    #[error(
        "`{model}` has no weights that gemmule reads; expected model.safetensors, model.safetensors.index.json or pytorch_model.bin, found {}",
        match found.is_empty() {
            true => "none".to_owned(),
            false => found.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", "),
        }
    )]
    HubWeights { model: String, found: Vec<String> },
    #[cfg(feature = "hub")]
    #[error(
        "`{model}` {}",
        match (known.is_empty(), is_named) {
            (true, _) => "has no GGUF files; leave the name after the `:` out".to_owned(),
            (false, true) => format!("matches no GGUF file, or several; after the `:`, expected one of {}, or its quantization", shown_names(known)),
            (false, false) => format!("has several GGUF files; choose one by `{model}:NAME`, where NAME is one of {}, or its quantization, such as Q8_0", shown_names(known)),
        }
    )]
    HubGguf {
        model: String,
        is_named: bool,
        known: Vec<String>,
    },
    #[error(
        "`{model}` is a model that includes its weights; omit the folder of weights, or give the description of the model instead"
    )]
    TwoModels { model: String },
    #[cfg(feature = "hub")]
    #[error(
        "there is no folder `{model}`; expected the path of a checkpoint folder, not the name of a model on the Hugging Face hub"
    )]
    FolderOnHub { model: String },
    #[error("`{file}` cannot be read")]
    Read {
        file: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "`{file}` is neither a description (a text file) nor a compiled model of `gemmule compile`; is it damaged?"
    )]
    NotText { file: PathBuf },
    #[error(
        "`{file}` is a compiled model; expected a description: give the RON file that it was compiled from"
    )]
    NotDescription { file: PathBuf },
    #[error(transparent)]
    File(ReadError),
    #[error("`{file}` cannot be written")]
    Write {
        file: PathBuf,
        source: std::io::Error,
    },
    #[error("the sizes of the model are unknown; give a checkpoint folder or a config.json")]
    NoConfig,
    #[error(
        "there are no weights to run with; give a checkpoint folder, or a seed for random weights"
    )]
    NoWeights,
    #[error("`{text}` is not a device; expected auto, cpu, cuda or cuda:N")]
    UnknownDevice { text: String },
    #[error("the run has no output `{name}`; it has {}; select outputs when the engine is built", known.join(", "))]
    NoOutput { name: String, known: Vec<String> },
    #[error("there is no sequence {sequence}; the batch has {n_sequences}, counted from 0")]
    NoSequence { sequence: usize, n_sequences: usize },
    #[error(
        "`{file}` is not an artifact of this version of gemmule: {problem}; compile the model again"
    )]
    Artifact { file: PathBuf, problem: String },
    #[error(
        "the artifact `{file}` stores {stored}, not {asked}; omit the storage type, or compile the model for it"
    )]
    ArtifactDType {
        file: PathBuf,
        stored: String,
        asked: String,
    },
    #[error(
        "the artifact `{}` stores the weights of linear layers in {stored}, not {asked}; omit the format, or compile the model with it",
        .file.display()
    )]
    ArtifactFormat {
        file: PathBuf,
        stored: String,
        asked: String,
    },
    #[error(
        "the artifact `{}` has a KV cache in {stored}, not {asked}; omit the format, or compile the model with it",
        .file.display()
    )]
    ArtifactCache {
        file: PathBuf,
        stored: Format,
        asked: Format,
    },
    #[error(
        "the artifact `{}` was compiled for sequences of {}, not {asked}; omit the max context, or compile the model with it",
        .file.display(),
        stored.map_or("any length".to_owned(), |n| format!("up to {n} tokens"))
    )]
    ArtifactContext {
        file: PathBuf,
        stored: Option<u32>,
        asked: u32,
    },
    #[error(
        "the timings in `{file}` are not valid: {problem}; measure again with `gemmule tune`, or omit the file"
    )]
    Timings {
        file: PathBuf,
        problem: Box<TimingsError>,
    },
    #[error("`{text}` is not a tuning mode; expected off, quick or full")]
    UnknownTuneMode { text: String },
    #[error(
        "kernels can only be timed on a CUDA device, and this is the {device}; omit the tuning"
    )]
    TuneOnCpu { device: String },
    #[error(
        "the artifact `{file}` already contains its kernels; tune the model when it is compiled"
    )]
    TuneArtifact { file: PathBuf },
    #[error(transparent)]
    Machine(#[from] MachineError),
    #[error(
        "the card {card} has compute capability {}.{}, and its code does not run on {target}; omit one of the two",
        capability.0,
        capability.1
    )]
    CardOfOtherTarget {
        card: String,
        capability: (u32, u32),
        target: String,
    },
    #[error(
        "the artifact `{file}` was compiled to run without padding; build the engine from the description to keep padding"
    )]
    ArtifactPadding { file: PathBuf },
    #[error(
        "the artifact `{file}` already contains its kernels, so {asked} attention cannot be selected; compile the model with it"
    )]
    ArtifactAttention {
        file: PathBuf,
        asked: AttentionChoice,
    },
    #[error(
        "the artifact `{file}` selects kernels by batch size, so results depend on it; compile the model to be invariant"
    )]
    ArtifactInvariant { file: PathBuf },
    #[error(
        "the artifact `{file}` computes {stored}, and `{asked}` is requested; compile the model with the output `{asked}`"
    )]
    ArtifactOutput {
        file: PathBuf,
        stored: String,
        asked: String,
    },
    #[error(
        "the artifact `{}` was compiled for another model than that of `{}`: {differences}; compile the model of this folder (`gemmule compile`), or give the folder that the artifact was compiled for",
        .file.display(),
        .folder.display()
    )]
    ArtifactFolder {
        file: PathBuf,
        folder: PathBuf,
        /// Description of the differences in sizes and modules.
        differences: String,
    },
    #[error(
        "the artifact `{file}` is already compiled, so the setting `{setting}` has no effect on it; omit the setting, or compile the model with it"
    )]
    ArtifactSetting {
        file: PathBuf,
        setting: &'static str,
    },
    #[error(
        "`{folder}` specifies the output `{computed}`, not `{asked}`; request the output `{computed}`"
    )]
    OtherOutput {
        folder: String,
        computed: &'static str,
        asked: &'static str,
    },
    #[error(
        "timings select kernels by size, and an invariant model uses one kernel for all sizes; omit one of the two"
    )]
    TuneInvariant,
    #[error(
        "`{file}` is a compiled model that computes outputs and does not generate text; give the description or only the checkpoint folder instead"
    )]
    ArtifactWrites { file: PathBuf },
    #[error(
        "the model `{model}` does not generate text, since its description has no output `next_token_logits`; `gemmule run` computes its outputs"
    )]
    WritesNothing { model: String },
    #[error(
        "no description `{name}` comes with gemmule{}; there are {known}",
        near.as_ref().map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default()
    )]
    NotShipped {
        name: String,
        near: Option<String>,
        known: String,
    },
    #[error(
        "the model does not use `{first}`{} of the checkpoint, although it uses the same tensor of other layers; check the number of layers in config.json and the layer index in the description, or allow unused layers",
        match n { 1 => String::new(), n => format!(" and {} more tensors", n - 1) }
    )]
    LeftOut { first: String, n: usize },
    #[error(
        "`{}` {does}, and the server has no route for that; `gemmule run` and the library's `Session::run` compute its {}",
        .folder.display(),
        outputs.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" and ")
    )]
    NotServed {
        folder: PathBuf,
        does: &'static str,
        outputs: Vec<String>,
    },
    #[error(
        "the compiled file `{file}` uses the embedding table as the output head, but the checkpoint's `{head}` has other values; give only the checkpoint folder",
        file = .file.display()
    )]
    OwnHead { file: PathBuf, head: String },
    #[error(
        "config.json: `architectures` names `{architecture}`, which does not generate text; `gemmule run` computes its outputs"
    )]
    OtherTask { architecture: String },
    #[error(
        "there are no scores: the run has no output `{}`, the default output of a cross-encoder",
        super::LOGITS
    )]
    NoScores,
    #[error(
        "the query's vectors have {query} values, and a document's {document}; expected vectors of one model"
    )]
    OtherWidth { query: usize, document: usize },
    #[error(
        "the model has {labels} scores for each pair; expected a reranker, with one; `Engine::scores` returns all of them"
    )]
    SeveralScores { labels: u64 },
    #[error(
        "the engine has no tokenizer, since it was not built from a checkpoint folder; give the folder to the builder, or run batches of token ids"
    )]
    NoFolderOfTexts,
    #[error(transparent)]
    Generation(Failure),
    #[error(
        "the description `{model}` has no KV cache, which generation needs; put `cache(…)` around the keys and values of its causal attention"
    )]
    NoCache { model: String },
    #[error(
        "`{value}` of `{model}` depends on the cached source, which a plain run does not have; select outputs of the encoder, or generate (`gemmule translate`, `Builder::generating`)"
    )]
    NeedsSource { value: String, model: String },
    #[error(
        "the engine was built to generate, and a session computes whole sequences; create a generator, or build the engine without `Builder::generating`"
    )]
    Generating,
    #[error(
        "`{}` generates text, which uses one device; name only one device for it",
        folder.display()
    )]
    OneDevice { folder: PathBuf },
    #[error(
        "`{}` generates text, but default prompts are only for models that embed or score; omit the default prompt for this model",
        folder.display()
    )]
    DefaultPrompt { folder: PathBuf },
    #[error(
        "the threads of the pool cannot be started: {problem}; use fewer (RAYON_NUM_THREADS), or raise the limit on processes (`ulimit -u`) or on memory"
    )]
    Threads { problem: String },
    #[error(
        "the weights of linear layers cannot be stored in {format} with another storage type; give only one of the two, or a format of 8 or 4 bits with f16 or bf16 on CUDA"
    )]
    TwoFormats { format: Format },
    #[error("weights in {format} need scales; quantize to fp8, which is E4M3 with scales")]
    WithoutScales { format: Format },
    #[error(
        "a KV cache in {format} is not supported with activations in {dtype}; the cache is in {dtype} or in e4m3"
    )]
    CacheFormat { format: Format, dtype: DType },
    #[error(
        "a KV cache in {format} is for engines that generate text, and this one computes whole sequences without a cache; omit the format, or use `Builder::generating` (`gemmule generate`, `translate` or `serve`)"
    )]
    CacheWithoutTexts { format: Format },
    #[error(
        "kernels read weights in {format} with activations in f16 or bf16, not f32; select one of these storage types"
    )]
    FormatOfF32 { format: Format },
    #[error(
        "{option} applies only to a CPU, and the engine is for {device}; omit it, or select the device `cpu`"
    )]
    CpuOnly {
        /// Description of the option.
        option: &'static str,
        device: String,
    },
    #[error(
        "`{url}` is not an address of a shared cache: {problem}; expected, for example, redis://127.0.0.1:6379/0"
    )]
    CacheAddress { url: String, problem: String },
    #[error(
        "the output `{output}` contains NaN or infinite values: {n_bad} of {n_values}, the first in {first}; check that the checkpoint is undamaged and that the storage type can hold its values: bf16 and f32 have a wider range than f16"
    )]
    NotFinite {
        output: String,
        n_bad: usize,
        n_values: usize,
        /// Description of the position of the first bad value.
        first: String,
    },
    #[error("the thread that runs batches ended with a panic, printed above; create a new session")]
    PipelineEnded,
    #[error(
        "the model has {labels} labels for each token; expected two, for the start and the end of an answer, as in a model that answers questions (…ForQuestionAnswering)"
    )]
    AnswersNothing { labels: usize },
    #[error("`{file}` is not a reference: {problem}")]
    Reference { file: PathBuf, problem: String },
    #[error(
        "`{value}` of the reference{} has the shape {found:?}, which does not fit the model's output of shape {expected:?}",
        match case.is_empty() {
            true => String::new(),
            false => format!(" (case `{case}`)"),
        }
    )]
    ReferenceShape {
        case: String,
        value: String,
        found: Vec<u64>,
        expected: Vec<u64>,
    },
    #[error(
        "the compiled model has no value `{name}`, which is misspelled or was fused away{near}; `gemmule graph --after all` lists all names"
    )]
    NoIntermediate { name: String, near: String },
    #[error(transparent)]
    Text(TextError),
    #[error(transparent)]
    #[cfg_attr(feature = "miette", diagnostic(transparent))]
    Head(HeadError),
    #[error(transparent)]
    Generate(GenerateError),
    #[error(transparent)]
    Pass(#[from] PassError),
    #[error(transparent)]
    Lower(#[from] LowerError),
    #[error(transparent)]
    Codegen(#[from] CodegenError),
    #[error(transparent)]
    Jit(#[from] JitError),
    #[error(transparent)]
    Batch(#[from] BatchError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Plan(#[from] PlannerError),
    #[error(transparent)]
    Size(#[from] SizeOverflow),
    #[error(transparent)]
    Cpu(#[from] CpuError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    DeviceOutput(#[from] DeviceOutputError),
    #[error(
        "the engine keeps padding, which is removed from outputs on the host, so they cannot stay on the device that computes them; call `Session::run`, or build the engine without `Padding::Kept`"
    )]
    PaddedOutputs,
}

/// Lists up to 20 names, and the number of omitted names.
#[cfg(feature = "hub")]
fn shown_names(names: &[String]) -> String {
    const SHOWN: usize = 20;
    let mut shown: Vec<String> = names.iter().take(SHOWN).map(|n| format!("`{n}`")).collect();
    if names.len() > SHOWN {
        shown.push(format!("{} more", names.len() - SHOWN));
    }
    shown.join(", ")
}

impl EngineError {
    /// Returns whether a batch failed because memory ran out. A smaller batch may succeed.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(
            self,
            Self::Cpu(CpuError::OutOfMemory { .. }) | Self::Cuda(CudaError::OutOfMemory { .. })
        )
    }

    /// If this error names a sequence of a batch, replaces the sequence's index `i` by `index(i)`. Other errors are returned unchanged.
    pub(crate) fn of_sequence(self, index: impl FnOnce(usize) -> usize) -> Self {
        match self {
            Self::Batch(error) => Self::Batch(error.of_sequence(index)),
            error => error,
        }
    }

    /// Returns whether the process can no longer run anything on the device: CUDA returns the same error for every later call, or the
    /// thread that runs batches has ended.
    pub fn is_device_lost(&self) -> bool {
        match self {
            Self::Cuda(error) => error.is_sticky(),
            Self::PipelineEnded => true,
            _ => false,
        }
    }
}

impl From<ReadError> for EngineError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Io { file, source } => Self::Read { file, source },
            ReadError::TooLarge { .. } | ReadError::Gguf(_) | ReadError::SeveralGguf { .. } => {
                Self::File(error)
            }
        }
    }
}

impl From<TextError> for EngineError {
    fn from(error: TextError) -> Self {
        match error {
            TextError::Read { file, source } => Self::Read { file, source },
            TextError::File(error) => Self::File(error),
            TextError::Model(error) => Self::Model(error),
            TextError::Batch(error) => Self::Batch(error),
            error => Self::Text(error),
        }
    }
}

impl From<HeadError> for EngineError {
    fn from(error: HeadError) -> Self {
        match error {
            HeadError::Text(error) => error.into(),
            error => Self::Head(error),
        }
    }
}

impl From<GenerateError> for EngineError {
    fn from(error: GenerateError) -> Self {
        match error {
            GenerateError::Read { file, source } => Self::Read { file, source },
            GenerateError::File(error) => Self::File(error),
            GenerateError::Batch(error) => Self::Batch(error),
            GenerateError::Plan(error) => Self::Plan(error),
            GenerateError::Size(error) => Self::Size(error),
            GenerateError::Cpu(error) => Self::Cpu(error),
            GenerateError::Cuda(error) => Self::Cuda(error),
            error => Self::Generate(error),
        }
    }
}

impl From<ModelError> for EngineError {
    fn from(error: ModelError) -> Self {
        Self::Model(Box::new(error))
    }
}

impl From<ThreadsError> for EngineError {
    fn from(ThreadsError { problem }: ThreadsError) -> Self {
        Self::Threads { problem }
    }
}
