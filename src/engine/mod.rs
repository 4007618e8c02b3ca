//! The Rust API: load a model, run batches, read named outputs.
//!
//! ```no_run
//! use gemmule::{Batch, Engine};
//!
//! # fn main() -> Result<(), gemmule::EngineError> {
//! let engine = Engine::builder("bert").checkpoint("all-MiniLM-L6-v2").build()?;
//! let batch = Batch::from_sequences(&[vec![101, 7592, 102], vec![101, 2088, 999, 102]])?;
//! println!("needs {} bytes", engine.bytes_needed(&batch)?);
//!
//! let outputs = engine.session()?.run(&batch)?;
//! let embedding = outputs.get("sentence_embedding")?;
//! assert_eq!(embedding.shape, [2, 384]);
//! # Ok(())
//! # }
//! ```

mod artifact;
mod batches;
mod builder;
mod compile;
mod device;
mod error;
mod finite;
mod generating;
mod heads;
#[cfg(feature = "hub")]
pub mod hub;
mod kv_cache_choice;
mod late;
mod model_file;
mod origin;
mod outputs;
mod padding;
mod pending;
mod pipeline;
mod precision;
mod session;
mod stage;
mod texts;
mod timings;
mod tune;
mod weights;

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
};

pub use artifact::{Artifact, Sealed};
pub use builder::{Builder, LoadTimes};
pub use compile::{CompileOptions, Compiled, compile, emit};
pub use device::{ChosenBy, DeviceChoice, DeviceName, default_dtype};
pub use error::EngineError;
pub use kv_cache_choice::{KvCacheChoice, UnknownKvCacheChoice};
pub use late::LateScorer;
pub use model_file::{ModelFile, description};
pub use origin::Origin;
pub use outputs::Outputs;
pub(crate) use padding::laid_out;
pub use pending::Pending;
pub use pipeline::Pipeline;
pub use precision::Precision;
pub use session::Session;
pub(crate) use session::SessionBackend;
pub use stage::Stage;
pub use timings::{
    TimedOn, TimingsError, parse_timings, read_timings, timings_for, timings_to_ron, write_timings,
};
pub use tune::{TuneMode, Tuner};
pub use weights::{open_checkpoint, unread};

pub use crate::{program::Padding, runtime::cpu::Threads};

use crate::{
    program::{Program, Step},
    runtime::{
        AllocatorChoice, Footprint, GraphChoice, LoadedModel, Output, Planner, PlannerError,
        batch::{Batch, BatchError, Limits},
        cpu::CpuSession,
        cuda::{CudaSession, HostScorer},
    },
    text::{Encoded, Folder, Score},
};

/// Name of the output from which a cross-encoder's scores are computed.
pub const LOGITS: &str = "sequence_logits";

/// Name of the output with the log-probability of each token of a text.
pub const LOG_PROBABILITY: &str = "log_probability";

/// A loaded model: weights and kernels, shared by its sessions.
pub struct Engine {
    model: LoadedModel,
    /// The checkpoint folder of the weights, if there is one.
    folder: Option<Folder>,
    encoders: texts::Encoders,
    /// Scores token vectors from host memory on the GPU; `None` on a CPU, or if no kernel supports the width of the model's token vectors.
    host_scorer: OnceLock<Option<Arc<HostScorer>>>,
    device: DeviceName,
    limits: Limits,
    allocator: AllocatorChoice,
    padding: Padding,
    plain_launches: bool,
    graphs: GraphChoice,
    times: LoadTimes,
    chosen_by: ChosenBy,
}

impl Engine {
    /// Starts from a shipped description (`bert`, `roberta`, …) or the path of a description file.
    pub fn builder(model: impl Into<String>) -> Builder {
        Builder::new(builder::Start::Named(model.into()))
    }

    /// Starts from a published checkpoint folder, or from a GGUF file of llama.cpp. The `model_type` in config.json selects a shipped
    /// description. For a sentence-transformers folder, the engine also computes the modules after the transformer. [`Folder`] lists the
    /// files that are read.
    pub fn from_checkpoint(folder: impl Into<PathBuf>) -> Builder {
        Builder::new(builder::Start::Checkpoint).checkpoint(folder)
    }

    /// Fetches a model of the Hugging Face hub, `org/name` or `org/name@revision`, and starts from its folder in the cache. A GGUF file can
    /// be selected by its name or quantization, as in `org/name:Q8_0`. The environment variables of `huggingface_hub`, such as `HF_HOME`
    /// and `HF_TOKEN`, are respected. [`hub::fetch`] shows progress.
    ///
    /// # Errors
    /// Returns the errors of [`hub::fetch`].
    #[cfg(feature = "hub")]
    pub fn from_hub(name: &str) -> Result<Builder, EngineError> {
        let id = hub::ModelId::parse(name)?;
        let folder = hub::fetch_described(
            &hub::Hub::from_env()?,
            &id,
            hub::Files::All,
            &|event| match event {
                hub::Event::Received { .. } => {}
                event => tracing::info!("{event}"),
            },
        )?;
        Ok(Self::from_checkpoint(folder))
    }

    /// Starts from a description in memory. `name` identifies it in errors.
    pub fn from_source(name: impl Into<String>, ron: impl Into<String>) -> Builder {
        Builder::new(builder::Start::Source {
            name: name.into(),
            ron: ron.into(),
        })
    }

    /// Starts from a file written by [`Artifact::write`]. The file contains the compiled kernels.
    pub fn from_artifact(file: impl Into<PathBuf>) -> Builder {
        Builder::new(builder::Start::Artifact(file.into()))
    }

    /// Starts from a description or artifact that was opened with [`ModelFile::open`].
    pub fn from_model(model: ModelFile) -> Builder {
        Builder::new(builder::Start::Opened(model))
    }

    /// Creates a session with its own stream and memory. Several sessions of one engine can run concurrently.
    pub fn session(&self) -> Result<Session, EngineError> {
        self.session_with(&self.allocator)
    }

    /// Creates a session that uses `allocator` instead of the engine's memory planner.
    ///
    /// # Errors
    /// Returns an error if the engine generates tokens, if the chunk policy is invalid, or if the device cannot create a stream.
    pub fn session_with(&self, allocator: &AllocatorChoice) -> Result<Session, EngineError> {
        self.session_of(allocator, self.graphs)
    }

    /// Creates a session that uses `graphs` instead of the engine's setting to select the launches that are replayed as CUDA graphs.
    ///
    /// # Errors
    /// Returns an error if the engine generates tokens, or if the device cannot create a stream.
    pub fn session_replaying(&self, graphs: GraphChoice) -> Result<Session, EngineError> {
        self.session_of(&self.allocator, graphs)
    }

    fn session_of(
        &self,
        allocator: &AllocatorChoice,
        graphs: GraphChoice,
    ) -> Result<Session, EngineError> {
        if !self.program().caches.is_empty() {
            return Err(EngineError::Generating);
        }
        Ok(Session {
            limits: self.limits,
            padding: self.padding,
            backend: match &self.model {
                LoadedModel::Cpu(model) => {
                    let session = CpuSession::new(Arc::clone(model), allocator)?;
                    SessionBackend::Cpu(Box::new(session))
                }
                LoadedModel::Cuda(model) => {
                    let plain = self.plain_launches;
                    let model = Arc::clone(model);
                    let session = CudaSession::new(model, allocator, plain, graphs)?;
                    SessionBackend::Cuda(Box::new(session))
                }
            },
        })
    }

    /// Returns the bytes of the weights, which all sessions share. On a CPU, this includes the weights packed for linear layers, and the
    /// unpacked weights that other steps read.
    pub fn weight_bytes(&self) -> u64 {
        self.model.weight_bytes()
    }

    /// Returns the bytes of intermediate tensors that a new session needs for a batch, computed without running it. Weights
    /// ([`Engine::weight_bytes`]) are not included, because all sessions share them. The scratch memory of a running CPU step is not
    /// included, either: per thread up to 960 queries and 128 keys of one head (0.6 MiB for heads of 64), and in bf16 or int8 the rounded
    /// activations of up to 4,096 rows of one layer.
    ///
    /// # Errors
    /// Returns an error if the batch exceeds the declared maximum of [`AllocatorChoice`], if it has one.
    pub fn bytes_needed(&self, batch: &Batch) -> Result<u64, EngineError> {
        Ok(self.footprint(batch)?.chunks)
    }

    /// Returns the bytes of [`Engine::bytes_needed`], and a lower bound on the bytes of any memory plan for the batch. On a CUDA device, a
    /// batch is planned for its bucket ([`GraphChoice`]), which has a few more tokens than the batch. If the bucket does not fit in memory
    /// but the batch does, a session plans for the batch itself and takes less memory than the returned bytes.
    pub fn footprint(&self, batch: &Batch) -> Result<Footprint, EngineError> {
        let batch = &*padding::laid_out(batch, self.padding)?;
        let (program, allocator) = (self.program(), &self.allocator);
        let bucket = match &self.model {
            LoadedModel::Cpu(_) => batch.extents(),
            LoadedModel::Cuda(_) => self.graphs.planned_for(program, allocator, batch),
        };
        Ok(Planner::footprint(
            program,
            allocator,
            &batch.extents(),
            &bucket,
        )?)
    }

    /// Returns the number of tokens for which a batch is computed. This includes padding that is kept, but not the tokens that a
    /// [bucket](GraphChoice) adds after the last sequence.
    pub fn tokens_computed(&self, batch: &Batch) -> Result<u64, EngineError> {
        Ok(padding::laid_out(batch, self.padding)?.extents().tokens)
    }

    /// Returns the steps that a batch launches.
    pub fn launched(&self, batch: &Batch) -> Result<Vec<&Step>, EngineError> {
        let extents = padding::laid_out(batch, self.padding)?.extents();
        let launched = self.program().launched(&extents);
        let launched = launched.map_err(PlannerError::from)?.into_iter();
        Ok(launched.map(|(step, _)| step).collect())
    }

    /// Returns the compiled program.
    pub fn program(&self) -> &Program {
        self.model.program()
    }

    /// Returns the device that the engine runs on.
    pub fn device(&self) -> &DeviceName {
        &self.device
    }

    /// Returns the precision to which the operands of matrix products are rounded.
    pub fn precision(&self) -> Precision {
        let program = self.program();
        program
            .weight_format()
            .unwrap_or(program.dtype.into())
            .into()
    }

    /// Returns the checkpoint folder of the weights, if there is one.
    pub fn folder(&self) -> Option<&Folder> {
        self.folder.as_ref()
    }

    /// Computes the scores of a cross-encoder, as sentence-transformers' `CrossEncoder.predict` does: its logits after the
    /// activation that the folder specifies. The default is a sigmoid for one label and none for several. The shape is
    /// `[batch]` for one label and `[batch, labels]` for several.
    ///
    /// # Errors
    /// Returns [`EngineError::NoScores`] if the outputs have no `sequence_logits`.
    pub fn scores(&self, outputs: &Outputs) -> Result<Output, EngineError> {
        let logits = outputs.get(LOGITS).map_err(|_| EngineError::NoScores)?;
        let n_labels = logits.shape.last().copied().unwrap_or(1);
        let score = match &self.folder {
            Some(folder) => folder.score(n_labels),
            None => Score::usual(n_labels),
        };
        let mut shape = logits.shape.clone();
        if n_labels == 1 {
            shape.pop();
        }
        Ok(Output {
            name: "scores".to_owned(),
            shape,
            values: logits.values.iter().map(|&x| score.of(x)).collect(),
        })
    }

    /// Returns the memory planner of the engine's sessions.
    pub fn allocator(&self) -> &AllocatorChoice {
        &self.allocator
    }

    /// Checks that sessions of this engine accept a sequence, without running it.
    ///
    /// # Errors
    /// Returns the error of running a batch that contains only `sequence`.
    pub fn check(&self, sequence: &Encoded) -> Result<(), BatchError> {
        let batch = Encoded::batch(std::iter::once(sequence))?;
        session::checked(&batch, &self.limits, self.program()).map(drop)
    }

    /// Returns the model's limits on token ids and sequence lengths.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Returns the cost model and timings by which kernels were chosen; `None` on the CPU, which has only one implementation of each step.
    pub fn chosen_by(&self) -> Option<&ChosenBy> {
        match self.device() {
            DeviceName::Cpu { .. } => None,
            DeviceName::Cuda(_) => Some(&self.chosen_by),
        }
    }

    /// Returns the duration of each loading step.
    pub fn load_times(&self) -> &LoadTimes {
        &self.times
    }
}
