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
mod text;
mod timings;
mod tune;
mod verify;
mod weights;
mod words;

use std::{fmt, path::PathBuf, str::FromStr, sync::Arc};

pub use artifact::{Artifact, Sealed};
pub use breakdown::{Breakdown, Share};
pub use builder::{Builder, LoadTimes, Stage, config};
pub use catalogue::{Emitted, catalogue, shipped_configs};
pub use chat::{ChatTemplate, Message, Tool};
pub use compile::{CompileOptions, Compiled, compile, emit};
pub use contain::panics_are_contained;
pub use error::EngineError;
pub use estimate::estimated_costs;
pub use folder::{Folder, Prompt, Score};
pub use generator::{
    AdmitError, DecodeStep, Event, Failure, Generate, Generator, GeneratorBytes, Reason, Request,
    Stop, Ticket, Written, generation_config,
};
pub use growing::GrowingText;
pub use model_file::{ModelFile, description};
pub use pipeline::{Pending, Pipeline};
pub use text::{Encoded, Input, TextEncoder, TextToken};
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

use crate::{
    machine::{Fit, Machine, Served},
    program::{Program, Step},
    runtime::{
        AllocatorChoice, Footprint, GraphChoice, GraphUse, MemoryUse, MemoryWork, Output, Planner,
        PlannerError,
        batch::{Batch, Limits},
        cpu::{CpuModel, CpuSession},
        cuda::{self, CudaModel, CudaSession, DeviceInfo, Timing},
    },
    tensor::{DType, Extents},
};

/// The output that a cross-encoder's scores are computed of.
pub const LOGITS: &str = "sequence_logits";

/// The output with the log-probability of each token of a text.
pub const LOG_PROBABILITY: &str = "log_probability";

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

/// What one caller needs to run an [`Engine`]. A run that fails leaves it usable.
pub struct Session {
    limits: Limits,
    padding: Padding,
    backend: SessionBackend,
}

enum SessionBackend {
    Cpu(Box<CpuSession>),
    Cuda(Box<CudaSession>),
}

impl Session {
    /// Runs a batch and returns the outputs that the engine was built for.
    ///
    /// # Errors
    /// Those of [`submit`](Self::submit) and of [`Pending::wait`].
    pub fn run(&mut self, batch: &Batch) -> Result<Outputs, EngineError> {
        self.submit(batch)?.wait()
    }

    /// Gives a batch to the device and returns before it has run, so that the next one can be made ready, and submitted, while it
    /// runs: the device goes on with that at once. A CPU has run the batch when this returns, and so has an engine that keeps
    /// padding.
    ///
    /// # Errors
    /// A batch beyond the model's limits, memory that could not be had, and [`CudaError::InFlight`](crate::runtime::cuda::CudaError::InFlight) where two batches have been
    /// submitted and neither was waited for nor dropped.
    ///
    /// ```no_run
    /// # use gemmule::{Batch, Engine};
    /// # fn main() -> Result<(), gemmule::EngineError> {
    /// # let engine = Engine::builder("bert").checkpoint("all-MiniLM-L6-v2").build()?;
    /// # let batches: Vec<Batch> = Vec::new();
    /// let mut session = engine.session()?;
    /// let mut running = None;
    /// for batch in &batches {
    ///     let behind = session.submit(batch)?;
    ///     if let Some(done) = running.replace(behind) {
    ///         println!("{:?}", done.wait()?.get("sentence_embedding")?.shape);
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn submit(&mut self, batch: &Batch) -> Result<Pending, EngineError> {
        batch.check(&self.limits)?;
        let laid_out = padding::laid_out(batch, self.padding)?;
        let lens = batch.own_lens().to_vec();
        let mut outputs = match &mut self.backend {
            SessionBackend::Cpu(session) => session.run(&laid_out)?,
            SessionBackend::Cuda(session) => match self.padding {
                Padding::Removed => return Ok(Pending::running(session.submit(&laid_out)?, lens)),
                Padding::Kept => session.run(&laid_out)?,
            },
        };
        if self.padding == Padding::Kept {
            padding::remove(&mut outputs, self.program(), &laid_out);
        }
        Ok(Pending::done(Outputs { outputs, lens }))
    }

    /// Waits for the batch that was submitted first, where the session takes no other; its results are kept for whoever has it.
    fn make_place(&mut self) {
        if let SessionBackend::Cuda(session) = &mut self.backend {
            session.make_place();
        }
    }

    /// Makes room on a CUDA device for batches of up to these extents, so that a batch in flight is never waited for because a
    /// larger one comes. On a CPU memory is taken as it is needed.
    ///
    /// # Errors
    /// Memory that could not be had, and extents beyond the declared maximum.
    pub fn reserve(&mut self, extents: &Extents) -> Result<(), EngineError> {
        match &mut self.backend {
            SessionBackend::Cpu(_) => Ok(()),
            SessionBackend::Cuda(session) => Ok(session.reserve(extents)?),
        }
    }

    /// Microseconds for which a CUDA device has nothing to do between a batch and the same batch behind it, for each of `runs`
    /// pairs; none on the CPU.
    ///
    /// # Errors
    /// Those of [`submit`](Self::submit) and of [`Pending::wait`].
    pub fn gaps(
        &mut self,
        batch: &Batch,
        warm_up: usize,
        runs: usize,
    ) -> Result<Vec<f32>, EngineError> {
        batch.check(&self.limits)?;
        let batch = &*padding::laid_out(batch, self.padding)?;
        match &mut self.backend {
            SessionBackend::Cpu(_) => Ok(Vec::new()),
            SessionBackend::Cuda(session) => Ok(session.gaps(batch, warm_up, runs)?),
        }
    }

    /// Times runs of a batch, in milliseconds: by CUDA events on a device, by the clock on the CPU.
    pub fn time(
        &mut self,
        batch: &Batch,
        warm_up: usize,
        runs: usize,
    ) -> Result<Timing, EngineError> {
        batch.check(&self.limits)?;
        let batch = &*padding::laid_out(batch, self.padding)?;
        match &mut self.backend {
            SessionBackend::Cuda(session) => Ok(session.time(batch, warm_up, runs)?),
            SessionBackend::Cpu(session) => {
                let mut timing = Timing::default();
                for i in 0..warm_up + runs {
                    let start = std::time::Instant::now();
                    session.run(batch)?;
                    if i >= warm_up {
                        timing.ms.push(start.elapsed().as_secs_f32() * 1e3);
                    }
                }
                Ok(timing)
            }
        }
    }

    fn program(&self) -> &Program {
        match &self.backend {
            SessionBackend::Cpu(session) => session.program(),
            SessionBackend::Cuda(session) => session.program(),
        }
    }

    /// Bytes that the session and its model hold.
    pub fn memory(&self) -> MemoryUse {
        match &self.backend {
            SessionBackend::Cpu(session) => session.memory(),
            SessionBackend::Cuda(session) => session.memory(),
        }
    }

    /// How often runs were replayed as CUDA graphs; zeros on the CPU.
    pub fn graph_use(&self) -> GraphUse {
        match &self.backend {
            SessionBackend::Cpu(_) => GraphUse::default(),
            SessionBackend::Cuda(session) => session.graph_use(),
        }
    }

    /// What managing the memory of the last run took; zeros before the first.
    pub fn memory_work(&self) -> MemoryWork {
        match &self.backend {
            SessionBackend::Cpu(session) => session.memory_work(),
            SessionBackend::Cuda(session) => session.memory_work(),
        }
    }
}

/// The results of a run, by name.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    outputs: Vec<Output>,
    lens: Vec<u32>,
}

impl Outputs {
    /// The output `name`: `[tokens, width]` for outputs per token, in packed order, or
    /// `[batch, width]`.
    pub fn get(&self, name: &str) -> Result<&Output, EngineError> {
        self.outputs
            .iter()
            .find(|o| o.name == name)
            .ok_or_else(|| EngineError::NoOutput {
                name: name.to_owned(),
                known: self.outputs.iter().map(|o| o.name.clone()).collect(),
            })
    }

    pub fn iter(&self) -> impl Iterator<Item = &Output> {
        self.outputs.iter()
    }

    /// The rows of sequence `sequence` in an output per token, row-major.
    pub fn sequence(&self, name: &str, sequence: usize) -> Result<&[f32], EngineError> {
        let output = self.get(name)?;
        let rows = output.shape.first().copied().unwrap_or(0) as usize;
        let width = output.values.len() / rows.max(1);
        let (first, n) = if rows == self.lens.len() && self.lens.iter().any(|&n| n != 1) {
            (sequence, 1)
        } else {
            let before = self.lens.iter().take(sequence).map(|&n| n as usize).sum();
            (before, self.lens.get(sequence).map_or(0, |&n| n as usize))
        };
        output
            .values
            .get(first * width..(first + n) * width)
            .filter(|_| n > 0)
            .ok_or(EngineError::NoSequence {
                sequence,
                n_sequences: self.lens.len(),
            })
    }
}
