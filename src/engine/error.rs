use std::path::PathBuf;

use super::{
    generator::{AdmitError, Failure},
    timings::TimingsError,
};
use crate::{
    codegen::CodegenError,
    files::ReadError,
    jit::JitError,
    kernels::cache::BLOCK,
    machine::MachineError,
    model::ModelError,
    names::nearest,
    passes::PassError,
    program::{AttentionChoice, LowerError, SizeOverflow},
    runtime::{
        PlannerError,
        batch::BatchError,
        cpu::{CpuError, ThreadsError, ops::Products},
        cuda::CudaError,
        weights::CheckpointError,
    },
};

/// Anything that loading or running a model can fail with.
#[derive(Debug, thiserror::Error, miette::Diagnostic)]
pub enum EngineError {
    #[error(transparent)]
    #[diagnostic(transparent)]
    Model(Box<ModelError>),
    #[error(
        "there is no description `{name}`: it is neither a file nor shipped{}; shipped are {}",
        nearest(name, known.iter().map(String::as_str))
            .map(|near| format!(" (did you mean `{near}`?)"))
            .unwrap_or_default(),
        known.join(", ")
    )]
    NoModel { name: String, known: Vec<String> },
    #[error("`{file}` cannot be read")]
    Read {
        file: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "`{file}` is neither text, as a description is, nor a file that `gemmule compile` wrote; was it damaged?"
    )]
    NotText { file: PathBuf },
    #[error(
        "`{file}` is a compiled model, and a description is needed here; give the RON file that it was compiled from"
    )]
    NotDescription { file: PathBuf },
    #[error(transparent)]
    File(ReadError),
    #[error("`{file}` cannot be written")]
    Write {
        file: PathBuf,
        source: std::io::Error,
    },
    #[error("`{file}` is no JSON: {problem}; expected the config.json of a checkpoint")]
    Config { file: PathBuf, problem: String },
    #[error("the sizes of the model are unknown; give a checkpoint folder or a config.json")]
    NoConfig,
    #[error(
        "there are no weights to run with; give a checkpoint folder, or a seed for random weights"
    )]
    NoWeights,
    #[error("`{text}` is no device; expected auto, cpu, cuda or cuda:N")]
    UnknownDevice { text: String },
    #[error("the run has no output `{name}`; it has {}; ask for others when the engine is built", known.join(", "))]
    NoOutput { name: String, known: Vec<String> },
    #[error("there is no sequence {sequence}; the batch has {n_sequences}, counted from 0")]
    NoSequence { sequence: usize, n_sequences: usize },
    #[error(
        "`{file}` is no artifact of this version of gemmule: {problem}; compile the model again"
    )]
    Artifact { file: PathBuf, problem: String },
    #[error(
        "the artifact `{file}` stores {stored}, not {asked}; leave the storage type out, or compile the model for it"
    )]
    ArtifactDType {
        file: PathBuf,
        stored: String,
        asked: String,
    },
    #[error(
        "the timings in `{file}` are refused: {problem}; measure anew with `gemmule tune`, or leave the file out"
    )]
    Timings {
        file: PathBuf,
        problem: Box<TimingsError>,
    },
    #[error("`{text}` is no way to tune; expected off, quick or full")]
    UnknownTuneMode { text: String },
    #[error(
        "kernels are timed on a CUDA device only, and this is the {device}; leave `--tune` and `--timings` out"
    )]
    TuneOnCpu { device: String },
    #[error(
        "the artifact `{file}` has its kernels already; give `--tune` or `--timings` to `gemmule compile`"
    )]
    TuneArtifact { file: PathBuf },
    #[error(transparent)]
    Machine(#[from] MachineError),
    #[error(
        "--card {card} has compute capability {}.{}, and code for it is not code for {target}; leave one of the two out",
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
        "the artifact `{file}` has its kernels already, so {asked} attention cannot be asked of it; compile the model with --attention {asked}"
    )]
    ArtifactAttention {
        file: PathBuf,
        asked: AttentionChoice,
    },
    #[error(
        "the artifact `{file}` has kernels by the size of the batch, so its results depend on it; compile the model with --invariant"
    )]
    ArtifactInvariant { file: PathBuf },
    #[error(
        "timings choose kernels by size, and --invariant asks for one kernel for all sizes; leave one of the two out"
    )]
    TuneInvariant,
    #[error("`{file}` has no chat template that can be used: {problem}")]
    ChatTemplate { file: PathBuf, problem: String },
    /// A conversation, or an option of it, that the chat template does not write down; `param` names which.
    #[error("{problem}")]
    Conversation {
        param: &'static str,
        problem: String,
    },
    #[error("`{file}` is no tokenizer: {problem}; expected the tokenizer.json of a checkpoint")]
    Tokenizer { file: PathBuf, problem: String },
    #[error(
        "`{file}` is a compiled file, which computes outputs and writes no texts; give the description, or the checkpoint's folder alone, in place of it"
    )]
    ArtifactWrites { file: PathBuf },
    #[error(
        "the model `{model}` writes no texts, as its description has no output `next_token_logits`; `gemmule run` computes what it has"
    )]
    WritesNothing { model: String },
    #[error(
        "there is no folder `{folder}`; expected that of a checkpoint, with config.json, tokenizer.json and weights, which is not downloaded for you"
    )]
    NoFolder { folder: PathBuf },
    #[error(
        "{bytes} bytes are too few for the cache of keys and values: a block of {BLOCK} tokens takes {block}"
    )]
    NoBlock { bytes: u64, block: u64 },
    #[error(
        "`{folder}` has no tokenizer.json{}",
        match found {
            None => "; expected one, or a SentencePiece model with the vocab.json of its ids: source.spm, or sentencepiece.bpe.model".to_owned(),
            Some(found) => format!(", and `{found}` alone is not read; Python writes one of it: transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"),
        }
    )]
    NoTokenizer {
        folder: PathBuf,
        /// A file of a tokenizer that is not read.
        found: Option<&'static str>,
    },
    /// A file of a tokenizer that is no tokenizer.json.
    #[error("no tokenizer can be made of `{file}`: {problem}")]
    PublishedTokenizer { file: PathBuf, problem: String },
    #[error(
        "no description `{name}` comes with gemmule{}; there are {known}",
        near.as_ref().map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default()
    )]
    NotShipped {
        name: String,
        near: Option<String>,
        known: String,
    },
    #[error("`{}`: {problem}", .file.display())]
    Folder { file: PathBuf, problem: String },
    #[error(
        "there is no prompt `{name}`{}; the folder has {known}",
        near.as_ref().map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default()
    )]
    NoPrompt {
        name: String,
        near: Option<String>,
        known: String,
    },
    #[error(
        "the prompt `{prompt}` is to be left out of pooling, as `include_prompt` in `{}` says, which gemmule does not compute; give an empty prompt",
        .folder.display()
    )]
    PromptLeftOut { folder: PathBuf, prompt: String },
    #[error(
        "the model leaves out `{first}`{} of the checkpoint, although it reads such a tensor of other layers; does config.json have all layers, and the description their index? If they are to be left out, allow unused layers (`--unused-layers`)",
        match n { 1 => String::new(), n => format!(" and {} more tensors", n - 1) }
    )]
    LeftOut { first: String, n: usize },
    #[error(
        "`{}` {does}, which the server has no route for; `gemmule run` and the library's `Session::run` compute its {}",
        .folder.display(),
        outputs.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" and ")
    )]
    NotServed {
        folder: PathBuf,
        does: &'static str,
        outputs: Vec<String>,
    },
    #[error(
        "the compiled file `{file}` reads a table in place of the checkpoint's `{head}`, which has other values than the table; give the checkpoint's folder alone",
        file = .file.display()
    )]
    OwnHead { file: PathBuf, head: String },
    #[error(
        "config.json: `architectures` says that this is a `{architecture}`, which writes no texts; `gemmule run` computes what it was trained for"
    )]
    OtherTask { architecture: String },
    #[error(
        "there are no scores: the run has no output `{}`, which a cross-encoder's checkpoint has by default",
        super::LOGITS
    )]
    NoScores,
    #[error(
        "the model gives {labels} scores for a pair, and a reranker gives one; `Engine::scores` returns all of them"
    )]
    SeveralScores { labels: u64 },
    #[error(
        "the engine has no tokenizer, since it was not built from a checkpoint's folder; give the folder to the builder, or run batches of token ids"
    )]
    NoFolderOfTexts,
    #[error(transparent)]
    Generation(Failure),
    #[error(
        "the description `{model}` keeps nothing of earlier tokens, so it cannot go on from them; `cache(…)` around the keys and values of a causal attention does"
    )]
    NoCache { model: String },
    #[error(
        "`{value}` of `{model}` is what the model keeps of a source, and a plain run has none; ask for outputs of the source alone, or let the model write (`gemmule translate`, `Builder::generating`)"
    )]
    NeedsSource { value: String, model: String },
    #[error(
        "the engine was built to compute outputs, not to write; build it with `Builder::generating`"
    )]
    NotGenerating,
    #[error(
        "the engine was built to write, and a session computes whole sequences; make a generator of it, or build it without `Builder::generating`"
    )]
    Generating,
    #[error(transparent)]
    Admit(#[from] AdmitError),
    #[error("`{file}`: {problem}")]
    GenerationConfig { file: PathBuf, problem: String },
    #[error("text {index} cannot be tokenized: {problem}")]
    Text { index: usize, problem: String },
    #[error(
        "text {index} cannot be tokenized: `{file}` makes the tokenizers crate panic: {problem}; expected the tokenizer.json of a checkpoint"
    )]
    TokenizerPanic {
        file: PathBuf,
        index: usize,
        problem: String,
    },
    #[error(
        "`{}` writes texts, which one device does; name one device for it",
        folder.display()
    )]
    OneDevice { folder: PathBuf },
    #[error(
        "the threads that work is shared out to cannot be started: {problem}; ask for fewer (--threads, RAYON_NUM_THREADS), or raise the limit on processes (`ulimit -u`) or on memory"
    )]
    Threads { problem: String },
    #[error(
        "bf16 was asked for as storage type and {products} for products; on a CPU the storage type says how products are computed: ask for one of the two"
    )]
    TwoPrecisions { products: Products },
    #[error(
        "{option} says how a CPU computes, and the engine is for {device}; leave it out, or ask for the device `cpu`"
    )]
    CpuOnly {
        /// As the command line calls it.
        option: &'static str,
        device: String,
    },
    #[error(
        "`{url}` is no address of a shared cache: {problem}; expected one as redis://127.0.0.1:6379/0"
    )]
    CacheAddress { url: String, problem: String },
    #[error(
        "the output `{output}` holds {n_bad} values of {n_values} that are NaN or infinite, the first in {first}; is the checkpoint sound, and does the storage type hold its values? bf16 and f32 have a wider range than f16"
    )]
    NotFinite {
        output: String,
        n_bad: usize,
        n_values: usize,
        /// In words.
        first: String,
    },
    #[error(
        "the thread that runs batches has ended, by a panic that was shown above; build the session anew"
    )]
    PipelineEnded,
    #[error("`{file}` is no reference: {problem}")]
    Reference { file: PathBuf, problem: String },
    #[error(
        "the compiled model computes no value `{name}`: fused away, or misspelled{near}? `gemmule graph --after all` shows all names"
    )]
    NoIntermediate { name: String, near: String },
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
}

impl EngineError {
    /// The same of a text that was tokenized by itself and has this place among others.
    pub(crate) fn of_text(self, index: usize) -> Self {
        match self {
            Self::Text { problem, .. } => Self::Text { index, problem },
            Self::TokenizerPanic { file, problem, .. } => Self::TokenizerPanic {
                file,
                index,
                problem,
            },
            other => other,
        }
    }

    /// Whether a batch failed as there was no memory for it. A smaller one may run.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(
            self,
            Self::Cpu(CpuError::OutOfMemory { .. }) | Self::Cuda(CudaError::OutOfMemory { .. })
        )
    }

    /// Whether nothing can run in this process any more, on the device of the batch: CUDA gives the same error to whatever comes
    /// after it, and a thread that has ended takes no batch.
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
            ReadError::TooLarge { .. } => Self::File(error),
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
