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
mod breakdown;
mod builder;
mod catalogue;
mod chat;
mod compile;
mod contain;
mod conversation;
mod device;
mod error;
mod estimate;
mod finite;
mod folder;
mod generator;
mod growing;
mod model_file;
mod padding;
mod pipeline;
mod published;
mod session;
mod text;
mod timings;
mod tune;
mod verify;
mod weights;
mod words;

use std::{path::PathBuf, sync::Arc};

pub use artifact::{Artifact, Sealed};
pub use breakdown::{Breakdown, Share};
pub use builder::{Builder, LoadTimes, Stage, config};
pub use catalogue::{Emitted, catalogue, shipped_configs};
pub use chat::{ChatTemplate, Message, Tool};
pub use compile::{CompileOptions, Compiled, compile, emit};
pub use contain::panics_are_contained;
pub use device::{ChosenBy, DeviceChoice, DeviceName, default_dtype};
pub use error::EngineError;
pub use estimate::estimated_costs;
pub use folder::{ClassScore, Folder, Prompt, Score};
pub use generator::{
    Admission, AdmitError, DecodeStep, Event, Failure, Generate, Generator, GeneratorBytes,
    MAX_TOKENS, Reason, Request, Stop, Ticket, UnsupportedDraw, Written, generation_config,
};
pub use growing::GrowingText;
pub use model_file::{ModelFile, description};
pub use pipeline::{Pending, Pipeline};
pub use session::{Outputs, Session};
pub use text::{CutSide, Encoded, Input, TextEncoder, TextToken};
pub use timings::{
    TimedOn, TimingsError, parse_timings, read_timings, timings_for, timings_to_ron, write_timings,
};
pub use tune::{TuneMode, Tuner};
pub use verify::{Bound, Comparison, Precision, Reference, ReferenceCase};
pub use weights::{check_layers, open_checkpoint};

pub use crate::{
    program::Padding,
    runtime::cpu::{Threads, ops::Products},
};

use self::session::SessionBackend;
use crate::{
    program::{Program, Step},
    runtime::{
        AllocatorChoice, Footprint, GraphChoice, Output, Planner, PlannerError,
        batch::{Batch, Limits},
        cpu::{CpuModel, CpuSession},
        cuda::{CudaModel, CudaSession},
    },
};

/// The output that a cross-encoder's scores are computed of.
pub const LOGITS: &str = "sequence_logits";

/// The output with the log-probability of each token of a text.
pub const LOG_PROBABILITY: &str = "log_probability";

/// A model that is ready to run: weights and code, shared by its sessions.
pub struct Engine {
    backend: Backend,
    /// Where its weights came from, if that is a folder.
    folder: Option<Folder>,
    device: DeviceName,
    limits: Limits,
    allocator: AllocatorChoice,
    padding: Padding,
    plain_launches: bool,
    graphs: GraphChoice,
    times: LoadTimes,
    chosen_by: ChosenBy,
}

enum Backend {
    Cpu(Arc<CpuModel>),
    Cuda(Arc<CudaModel>),
}

impl Engine {
    /// Starts from a shipped model (`bert`, `roberta`, …) or the path of a description.
    pub fn builder(model: impl Into<String>) -> Builder {
        Builder::new(builder::Start::Named(model.into()))
    }

    /// Starts from a checkpoint's folder as it was published: the description is the one that comes with gemmule for the
    /// `model_type` of its config.json, and what a sentence-transformers folder computes behind the transformer is
    /// computed. [`Folder`] says what is read of it.
    pub fn from_checkpoint(folder: impl Into<PathBuf>) -> Builder {
        Builder::new(builder::Start::Checkpoint).checkpoint(folder)
    }

    /// Starts from a description in memory; `name` stands in errors.
    pub fn from_source(name: impl Into<String>, ron: impl Into<String>) -> Builder {
        Builder::new(builder::Start::Source {
            name: name.into(),
            ron: ron.into(),
        })
    }

    /// Starts from a file that [`Artifact::write`] made. It brings its own code.
    pub fn from_artifact(file: impl Into<PathBuf>) -> Builder {
        Builder::new(builder::Start::Artifact(file.into()))
    }

    /// Starts from a model that was opened already.
    pub fn from_model(model: ModelFile) -> Builder {
        Builder::new(builder::Start::Opened(model))
    }

    /// A session of its own stream and memory. Sessions of one engine run side by side.
    pub fn session(&self) -> Result<Session, EngineError> {
        self.session_with(&self.allocator)
    }

    /// A session whose memory another allocator plans than the one that the engine was built with.
    ///
    /// # Errors
    /// A chunk policy that cannot be, or a stream that the device does not give.
    pub fn session_with(&self, allocator: &AllocatorChoice) -> Result<Session, EngineError> {
        self.session_of(allocator, self.graphs)
    }

    /// A session that replays other graphs than the engine was built for.
    ///
    /// # Errors
    /// A stream that the device does not give.
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
            backend: match &self.backend {
                Backend::Cpu(model) => {
                    let session = CpuSession::new(Arc::clone(model), allocator)?;
                    SessionBackend::Cpu(Box::new(session))
                }
                Backend::Cuda(model) => {
                    let plain = self.plain_launches;
                    let model = Arc::clone(model);
                    let session = CudaSession::new(model, allocator, plain, graphs)?;
                    SessionBackend::Cuda(Box::new(session))
                }
            },
        })
    }

    /// Bytes that the weights take, once for all sessions: on a CPU as they were packed for it, and also as they were stored
    /// where other steps than linear layers read them.
    pub fn weight_bytes(&self) -> u64 {
        match &self.backend {
            Backend::Cpu(model) => model.weight_bytes(),
            Backend::Cuda(model) => model.weight_bytes(),
        }
    }

    /// Bytes of intermediate tensors that a batch needs of a new session, without running it. [`Engine::weight_bytes`], which
    /// no batch changes, come on top, once: on a CPU they are those of packed weights. Counted in neither is what a CPU's step
    /// holds while it runs: each thread up to 960 queries and 128 keys of one head, 0.6 MiB for heads of 64, and in bf16 or
    /// int8 the rounded activations of up to 4,096 rows of one layer.
    ///
    /// # Errors
    /// A batch beyond the declared maximum, where there is one.
    pub fn bytes_needed(&self, batch: &Batch) -> Result<u64, EngineError> {
        Ok(self.footprint(batch)?.chunks)
    }

    /// As [`Engine::bytes_needed`], beside the bytes that no plan could do without. On a CUDA device
    /// a batch is planned for its bucket ([`GraphChoice`]), which has up to a few tokens more; where only the
    /// batch alone fits, a session takes less.
    pub fn footprint(&self, batch: &Batch) -> Result<Footprint, EngineError> {
        let batch = &*padding::laid_out(batch, self.padding)?;
        let (program, allocator) = (self.program(), &self.allocator);
        let bucket = match &self.backend {
            Backend::Cpu(_) => batch.extents(),
            Backend::Cuda(_) => self.graphs.planned_for(program, allocator, batch),
        };
        Ok(Planner::footprint(
            program,
            allocator,
            &batch.extents(),
            &bucket,
        )?)
    }

    /// Tokens that the launches of a batch run over: with padding kept, more than it has. Those of no sequence,
    /// which a [bucket](GraphChoice) adds, are not counted.
    pub fn tokens_computed(&self, batch: &Batch) -> Result<u64, EngineError> {
        Ok(padding::laid_out(batch, self.padding)?.extents().tokens)
    }

    /// The steps that a batch launches.
    pub fn launched(&self, batch: &Batch) -> Result<Vec<&Step>, EngineError> {
        let extents = padding::laid_out(batch, self.padding)?.extents();
        let launched = self.program().launched(&extents);
        let launched = launched.map_err(PlannerError::from)?.into_iter();
        Ok(launched.map(|(step, _)| step).collect())
    }

    pub fn program(&self) -> &Program {
        match &self.backend {
            Backend::Cpu(model) => model.program(),
            Backend::Cuda(model) => model.program(),
        }
    }

    pub fn device(&self) -> &DeviceName {
        &self.device
    }

    /// What the factors of its products are rounded to.
    pub fn precision(&self) -> Precision {
        match &self.backend {
            Backend::Cpu(model) => model.products().into(),
            Backend::Cuda(model) => model.program().dtype.into(),
        }
    }

    /// The checkpoint's folder that the weights came from, if they did.
    pub fn folder(&self) -> Option<&Folder> {
        self.folder.as_ref()
    }

    /// The scores of a cross-encoder, `[batch]` of one label or `[batch, labels]` of several: its logits through the
    /// activation that its folder asks for, a sigmoid of one label by default and none of several, as
    /// sentence-transformers' `CrossEncoder.predict` gives them.
    ///
    /// # Errors
    /// Outputs without `sequence_logits`.
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

    /// What plans the memory of its sessions.
    pub fn allocator(&self) -> &AllocatorChoice {
        &self.allocator
    }

    /// What the model accepts of token ids.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// What its kernels were chosen by; `None` on the CPU, which computes each step in one way.
    pub fn chosen_by(&self) -> Option<&ChosenBy> {
        match self.device() {
            DeviceName::Cpu { .. } => None,
            DeviceName::Cuda(_) => Some(&self.chosen_by),
        }
    }

    /// How long each step of loading took.
    pub fn load_times(&self) -> &LoadTimes {
        &self.times
    }
}
