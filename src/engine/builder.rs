mod pooling;
mod start;

use std::{
    collections::BTreeSet,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde_json::Value;

use self::pooling::warn_of_pooling;
pub(super) use self::start::Start;
use super::{
    Artifact, Backend, ChosenBy, DeviceChoice, DeviceName, Engine, EngineError, ModelFile,
    TuneMode, Tuner,
    compile::{CompileOptions, Compiled, compile, emit},
    default_dtype,
    folder::Folder,
    model_file::description,
    weights,
};
use crate::{
    files::{self, Kind},
    jit::{Cubin, Jit},
    machine::Served,
    model::{Description, Module},
    plan::ChunkPolicy,
    program::{AttentionChoice, NEXT_LOGITS, Padding, Program},
    runtime::{
        AllocatorChoice, GraphChoice, Planner,
        batch::Limits,
        cpu::{CpuModel, Threads, ops::Products},
        cuda::{CudaModel, Device},
        weights::{Checkpoint, RandomWeights, WeightSource},
    },
    select::Timings,
    tensor::DType,
};

/// What an engine is made of, before its weights.
struct Loaded {
    artifact: Artifact,
    /// From a file.
    cubins: Option<Vec<Cubin>>,
    chosen_by: ChosenBy,
}

/// How long each step of loading took; zero where a step was not needed.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadTimes {
    /// Description to program.
    pub compile: Duration,
    /// Timing kernels, or reading the timings that were given.
    pub tune: Duration,
    /// Program to CUDA source.
    pub emit: Duration,
    /// NVRTC, or its cache.
    pub jit: Duration,
    /// Kernels that came from the cache, and those that NVRTC compiled.
    pub cached: usize,
    pub compiled: usize,
    /// Reading and uploading the weights.
    pub weights: Duration,
}

/// A step of loading, for those who show progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Kernels,
    Tuning,
    Weights,
}

/// Called with the stage, what is done, and the total.
type Progress = Box<dyn Fn(Stage, usize, usize) + Sync>;

/// Options of an [`Engine`].
pub struct Builder {
    start: Start,
    config: Option<PathBuf>,
    config_value: Option<Value>,
    checkpoint: Option<PathBuf>,
    random: Option<RandomWeights>,
    outputs: Option<Vec<String>>,
    intermediates: Vec<String>,
    without: BTreeSet<String>,
    device: DeviceChoice,
    dtype: Option<DType>,
    products: Option<Products>,
    tune: TuneMode,
    timings: Option<PathBuf>,
    allocator: AllocatorChoice,
    padding: Padding,
    plain_launches: bool,
    graphs: GraphChoice,
    attention: Option<AttentionChoice>,
    invariant: bool,
    cached: bool,
    no_joint_launches: bool,
    unused_layers: bool,
    threads: Option<NonZeroUsize>,
    progress: Progress,
}

impl Builder {
    pub(super) fn new(start: Start) -> Self {
        Self {
            start,
            config: None,
            config_value: None,
            checkpoint: None,
            random: None,
            outputs: None,
            intermediates: Vec::new(),
            without: BTreeSet::new(),
            device: DeviceChoice::Auto,
            dtype: None,
            products: None,
            tune: TuneMode::Off,
            timings: None,
            allocator: AllocatorChoice::default(),
            padding: Padding::Removed,
            plain_launches: false,
            graphs: GraphChoice::default(),
            attention: None,
            invariant: false,
            cached: false,
            no_joint_launches: false,
            unused_layers: false,
            threads: None,
            progress: Box::new(|_, _, _| ()),
        }
    }

    /// A folder as published: `config.json` and `model.safetensors`, or an index and its shards.
    pub fn checkpoint(mut self, folder: impl Into<PathBuf>) -> Self {
        self.checkpoint = Some(folder.into());
        self
    }

    /// Sizes from this `config.json` instead of the checkpoint's.
    pub fn config(mut self, file: impl Into<PathBuf>) -> Self {
        self.config = Some(file.into());
        self
    }

    /// Sizes from a value in memory.
    pub fn config_value(mut self, config: Value) -> Self {
        self.config_value = Some(config);
        self
    }

    /// Random weights instead of a checkpoint's.
    pub fn random_weights(mut self, weights: RandomWeights) -> Self {
        self.random = Some(weights);
        self
    }

    /// Outputs to compute; what is not asked for is not computed.
    pub fn outputs<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.outputs = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Further values to return: outputs, or values by the names that `gemmule graph` shows.
    pub fn intermediates<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.intermediates = names.into_iter().map(Into::into).collect();
        self
    }

    /// Switches passes off.
    pub fn without<S: Into<String>>(mut self, passes: impl IntoIterator<Item = S>) -> Self {
        self.without = passes.into_iter().map(Into::into).collect();
        self
    }

    pub fn device(mut self, device: DeviceChoice) -> Self {
        self.device = device;
        self
    }

    /// Storage type of weights and activations; by default f16 on CUDA and f32 on the CPU. On the CPU bf16 stands for
    /// [`Products::Bf16`].
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// How the linear layers compute products, on a CPU; by default as the storage type says.
    pub fn products(mut self, products: Products) -> Self {
        self.products = Some(products);
        self
    }

    /// Whether kernels are timed, on a CUDA device. What was timed is kept on disk.
    pub fn tune(mut self, mode: TuneMode) -> Self {
        self.tune = mode;
        self
    }

    /// Timings in this file, which [`write_timings`](super::write_timings) wrote, correct the cost model. Where they are of another
    /// card or other kernels, or damaged, building fails, or times anew if [`Builder::tune`] asks for it.
    pub fn timings(mut self, file: impl Into<PathBuf>) -> Self {
        self.timings = Some(file.into());
        self
    }

    /// What plans the memory of intermediate tensors; by default the chunk allocator.
    pub fn allocator(mut self, allocator: AllocatorChoice) -> Self {
        self.allocator = allocator;
        self
    }

    /// The chunk allocator, with this policy for taking memory and giving it back.
    pub fn chunk_policy(self, policy: ChunkPolicy) -> Self {
        self.allocator(AllocatorChoice::Chunk(policy))
    }

    /// Whether sequences are packed, or padded to the longest of their batch. Results are the same;
    /// padding is kept only to measure what packing saves. It needs the pass `fuse_attention`
    /// switched off and no output that is a mean over tokens.
    pub fn padding(mut self, padding: Padding) -> Self {
        self.padding = padding;
        self
    }

    /// Whether each kernel begins when the one before is done. By default, on cards of compute
    /// capability 9.0 and later, a kernel begins while the one before still runs, and waits for it
    /// only where it reads that one's results (programmatic dependent launch). Results are the same
    /// bit for bit; plain launches are to compare with.
    pub fn plain_launches(mut self, plain: bool) -> Self {
        self.plain_launches = plain;
        self
    }

    /// What is replayed as a CUDA graph on a device. Results are the same bit for bit.
    pub fn graphs(mut self, graphs: GraphChoice) -> Self {
        self.graphs = graphs;
        self
    }

    /// Which kernels compute fused attention; by default, that depends on the lengths.
    pub fn attention(mut self, attention: AttentionChoice) -> Self {
        self.attention = Some(attention);
        self
    }

    /// Makes an engine that writes: of the logits of the next token, with a KV cache, for [`Engine::generate`] and
    /// [`Engine::generator`].
    pub fn generating(mut self) -> Self {
        self.cached = true;
        self.outputs([NEXT_LOGITS])
    }

    /// Whether a sequence's results shall not depend on its batch-mates, not by a bit. There is then
    /// one kernel for each operator, chosen to serve every size, where otherwise there are several for
    /// batches of different sizes; so it costs time, most for small batches. It needs fused attention.
    pub fn invariant(mut self, invariant: bool) -> Self {
        self.invariant = invariant;
        self
    }

    /// Whether every operator of the fused graph has launches of its own. By default an implementation may cover several of
    /// them, as a linear layer and the LayerNorm behind it, where that is estimated to be faster; the other is to compare with.
    pub fn no_joint_launches(mut self, none: bool) -> Self {
        self.no_joint_launches = none;
        self
    }

    /// Whether a checkpoint may have layers that the model does not read, as one has whose config.json was edited to run
    /// its first layers alone. Otherwise that is an error, as it is most often a mistake.
    pub fn unused_layers(mut self, may_be: bool) -> Self {
        self.unused_layers = may_be;
        self
    }

    /// Threads that a CPU computes on, in a pool that engines of the same number share; by default those of the pool that the
    /// caller is in, else as many as the process may run at once ([`Threads::usual`]).
    pub fn threads(mut self, threads: NonZeroUsize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Called as kernels are compiled and weights are loaded.
    pub fn progress(mut self, progress: impl Fn(Stage, usize, usize) + Sync + 'static) -> Self {
        self.progress = Box::new(progress);
        self
    }

    /// Compiles the model and loads its weights.
    pub fn build(self) -> Result<Engine, EngineError> {
        let mut device = self.device.resolve()?;
        let threads = match self.threads {
            Some(n) => Threads::of(n)?,
            None => Threads::usual()?,
        };
        let (_, products) = self.computes_in(&device)?;
        match &mut device {
            DeviceName::Cpu { n_threads } => *n_threads = threads.count(),
            DeviceName::Cuda(_) => self.check_for_cuda(&device)?,
        }
        let mut times = LoadTimes::default();
        let began = Instant::now();
        let folder = self.checkpoint.as_deref().map(Folder::open).transpose()?;
        let loaded = self.artifact(&device, folder.as_ref(), &BTreeSet::new(), &mut times)?;
        let source = self.weights(&loaded.artifact, folder.as_ref())?;
        let own: BTreeSet<String> = source.own()?.into_iter().collect();
        let (loaded, source) = match own.first() {
            None => (loaded, source),
            Some(head) => {
                if let Some((file, _)) = self.start.artifact() {
                    let (file, head) = (file.clone(), head.clone());
                    return Err(EngineError::OwnHead { file, head });
                }
                tracing::info!("the checkpoint's `{head}` has values of its own, and is not tied");
                let loaded = self.artifact(&device, folder.as_ref(), &own, &mut times)?;
                let source = self.weights(&loaded.artifact, folder.as_ref())?;
                (loaded, source)
            }
        };
        let Loaded {
            artifact,
            cubins,
            chosen_by,
        } = loaded;
        // Whether the allocator can be had for this program is known before any weight is read.
        Planner::new(&artifact.program, &self.allocator)?;
        times.compile = began.elapsed().saturating_sub(times.tune);
        let program = &artifact.program;
        let stored = weights::stored(program);
        source.check(&stored)?;
        if !self.unused_layers && self.start.artifact().is_none() {
            let folder = folder.as_ref();
            let (description, config) = (self.description(folder)?, self.config_json(folder)?);
            let description = description.with_own(own);
            let names = &artifact.weight_names;
            let unread = weights::unread(&*source, names, program, &description, &config)?;
            weights::warn_of_unread(&description, &unread);
        }
        for name in source.surplus(&stored) {
            tracing::info!("the checkpoint's tensor `{name}` is not used");
        }
        let (program, limits) = (artifact.program, artifact.limits);
        let weights_done = |done, total| (self.progress)(Stage::Weights, done, total);
        let backend = match &device {
            DeviceName::Cpu { .. } => {
                let began = Instant::now();
                let model = CpuModel::load(program, threads, products, &*source, &weights_done)?;
                times.weights = began.elapsed();
                Backend::Cpu(model.into())
            }
            DeviceName::Cuda(info) => {
                let device = Device::open(info.ordinal)?;
                let cubins = match cubins {
                    Some(cubins) => cubins,
                    None => self.jit(&program, &device, &mut times)?,
                };
                let began = Instant::now();
                let model = CudaModel::load(device, program, &cubins, &*source, &weights_done)?;
                times.weights = began.elapsed();
                Backend::Cuda(model.into())
            }
        };
        Ok(Engine {
            backend,
            folder,
            encoders: Default::default(),
            device,
            limits,
            allocator: self.allocator,
            padding: self.padding,
            plain_launches: self.plain_launches,
            graphs: self.graphs,
            times,
            chosen_by,
        })
    }

    /// The storage type of the program, and how a CPU computes products.
    fn computes_in(&self, device: &DeviceName) -> Result<(DType, Products), EngineError> {
        let dtype = self.dtype.unwrap_or_else(|| default_dtype(device));
        match (device, dtype, self.products) {
            (DeviceName::Cuda(_), ..) => Ok((dtype, Products::F32)),
            (DeviceName::Cpu { .. }, DType::BF16, None | Some(Products::Bf16)) => {
                Ok((DType::F32, Products::Bf16))
            }
            (DeviceName::Cpu { .. }, DType::BF16, Some(products)) => {
                Err(EngineError::TwoPrecisions { products })
            }
            (DeviceName::Cpu { .. }, ..) => Ok((dtype, self.products.unwrap_or_default())),
        }
    }

    /// Whether nothing is asked for that only a CPU computes.
    fn check_for_cuda(&self, device: &DeviceName) -> Result<(), EngineError> {
        let asked = [
            ("--threads", self.threads.is_some()),
            ("--quantize", self.products.is_some()),
        ];
        match asked.into_iter().find(|(_, asked)| *asked) {
            None => Ok(()),
            Some((option, _)) => Err(EngineError::CpuOnly {
                option,
                device: device.to_string(),
            }),
        }
    }

    /// The program with what a run must know of it; from a file also its code. `own` are the tensors of tied heads that the
    /// checkpoint has with values of their own.
    fn artifact(
        &self,
        device: &DeviceName,
        folder: Option<&Folder>,
        own: &BTreeSet<String>,
        times: &mut LoadTimes,
    ) -> Result<Loaded, EngineError> {
        let tuned = self.tune != TuneMode::Off || self.timings.is_some();
        if let Some((file, read)) = self.start.artifact() {
            if tuned {
                return Err(EngineError::TuneArtifact { file: file.clone() });
            }
            if self.padding == Padding::Kept {
                return Err(EngineError::ArtifactPadding { file: file.clone() });
            }
            if let Some(asked) = self.attention {
                return Err(EngineError::ArtifactAttention {
                    file: file.clone(),
                    asked,
                });
            }
            let mut artifact = read.map_or_else(|| Artifact::read(file), |a| Ok(a.clone()))?;
            let (asked, _) = self.computes_in(device)?;
            let asked = self.dtype.map(|_| asked);
            if let Some(asked) = asked.filter(|&d| d != artifact.program.dtype) {
                return Err(EngineError::ArtifactDType {
                    file: file.clone(),
                    stored: artifact.program.dtype.to_string(),
                    asked: asked.to_string(),
                });
            }
            if self.invariant && !artifact.program.invariant {
                return Err(EngineError::ArtifactInvariant { file: file.clone() });
            }
            if self.cached && artifact.program.caches.is_empty() {
                return Err(EngineError::ArtifactWrites { file: file.clone() });
            }
            let chosen_by = ChosenBy {
                card: artifact.card.clone(),
                fit: None,
                served: Served::Own,
                timings: artifact.timings,
            };
            return Ok(Loaded {
                chosen_by,
                cubins: Some(
                    std::mem::take(&mut artifact.cubins)
                        .into_iter()
                        .map(|sealed| sealed.cubin)
                        .collect(),
                ),
                artifact,
            });
        }
        let (machine, served) = device.machine()?;
        let mut chosen_by = ChosenBy {
            card: machine.name.clone(),
            fit: Some(machine.fit),
            served,
            timings: 0,
        };
        let options = CompileOptions {
            outputs: self.outputs.clone(),
            intermediates: self.intermediates.clone(),
            modules: modules_of(folder),
            without: self.without.clone(),
            dtype: self.computes_in(device)?.0,
            timings: None,
            padding: self.padding,
            attention: self.attention.unwrap_or_default(),
            machine,
            invariant: self.invariant,
            no_joint_launches: self.no_joint_launches,
            cached: self.cached,
        };
        if self.invariant && tuned {
            return Err(EngineError::TuneInvariant);
        }
        if options.attention != AttentionChoice::Auto {
            tracing::info!("attention: {} (as asked for)", options.attention);
        }
        let description = self.description(folder)?.with_own(own.clone());
        let mut compiled = compile(&description, &self.config_json(folder)?, &options)?;
        if let Some(folder) = folder {
            warn_of_pooling(folder, &compiled.model.graph);
        }
        let began = Instant::now();
        if tuned {
            let timings = self.timed(device, &compiled)?;
            chosen_by.timings = timings.len();
            compiled = compiled.with_timings(Some(timings))?;
            times.tune = began.elapsed();
        }
        Ok(Loaded {
            artifact: Artifact::of(compiled, Vec::new()),
            cubins: None,
            chosen_by,
        })
    }

    /// What corrects the cost model: what was given or timed.
    fn timed(&self, device: &DeviceName, compiled: &Compiled) -> Result<Timings, EngineError> {
        let DeviceName::Cuda(info) = device else {
            let device = device.to_string();
            return Err(EngineError::TuneOnCpu { device });
        };
        let (device, jit) = (Device::open(info.ordinal)?, Jit::open()?);
        Tuner::new(&device, &jit, self.tune)
            .given(self.timings.as_deref())
            .progress(&self.progress)
            .time(compiled)
    }

    fn description(&self, folder: Option<&Folder>) -> Result<Description, EngineError> {
        match &self.start {
            Start::Named(name) => description(name),
            Start::Source { name, ron } => Ok(Description::parse(name, ron)?),
            Start::Opened(ModelFile::Description(description)) => Ok((**description).clone()),
            Start::Checkpoint => Ok(Description::for_config(&self.config_json(folder)?)?),
            Start::Artifact(_) | Start::Opened(_) => Err(EngineError::NoConfig),
        }
    }

    fn config_json(&self, folder: Option<&Folder>) -> Result<Value, EngineError> {
        if let Some(value) = &self.config_value {
            return Ok(value.clone());
        }
        match (&self.config, folder) {
            (Some(file), _) => config(file),
            (None, Some(folder)) => folder.config().cloned(),
            (None, None) => Err(EngineError::NoConfig),
        }
    }

    fn weights(
        &self,
        artifact: &Artifact,
        folder: Option<&Folder>,
    ) -> Result<Box<dyn WeightSource>, EngineError> {
        match (folder, self.random) {
            (_, Some(random)) => Ok(Box::new(random)),
            (Some(folder), None) => {
                let names = artifact.weight_names.clone();
                let opened = Checkpoint::open(folder.trunk(), folder.root(), names)?;
                Ok(Box::new(opened))
            }
            (None, None) => Err(EngineError::NoWeights),
        }
    }

    fn jit(
        &self,
        program: &Program,
        device: &Device,
        times: &mut LoadTimes,
    ) -> Result<Vec<Cubin>, EngineError> {
        let began = Instant::now();
        let sources = emit(&CudaModel::kernels(program))?;
        times.emit = began.elapsed();
        let began = Instant::now();
        let jit = Jit::open()?;
        let done = |done, total| (self.progress)(Stage::Kernels, done, total);
        let cubins = jit.compile_all(&sources, device.target()?, &done)?;
        times.jit = began.elapsed();
        (times.cached, times.compiled) = (jit.stats().hits, jit.stats().misses);
        Ok(cubins)
    }
}

/// What is computed behind the transformer of a folder.
pub(super) fn modules_of(folder: Option<&Folder>) -> Vec<Module> {
    let modules = folder.and_then(Folder::modules);
    modules.unwrap_or_default().to_vec()
}

/// A `config.json`.
pub fn config(file: &Path) -> Result<Value, EngineError> {
    let text = files::text(file, Kind::Config)?;
    serde_json::from_str(&text).map_err(|e| EngineError::Config {
        file: file.to_owned(),
        problem: e.to_string(),
    })
}

impl Limits {
    pub(super) fn of(model: &crate::model::Model) -> Self {
        Self {
            vocabulary: model.vocab,
            segments: model.type_rows,
            skipped: model.skipped,
            end: model.end,
            longest: model.max_positions,
        }
    }
}
