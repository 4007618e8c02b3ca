mod artifact;
mod expansion;
mod inputs;
mod pooling;
mod precision;
mod start;
mod tuning;

use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroUsize,
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::Value;

use self::pooling::check_pooling;
pub(super) use self::start::Start;
use super::{
    Artifact, ChosenBy, DeviceChoice, DeviceName, Engine, EngineError, Stage, TuneMode,
    compile::{CompileOptions, compile, emit},
    weights,
};
use crate::{
    jit::{Cubin, Jit},
    model::Module,
    plan::ChunkPolicy,
    program::{AttentionChoice, NEXT_LOGITS, Padding, Program},
    runtime::{
        AllocatorChoice, GraphChoice, LoadedModel, Planner,
        batch::Limits,
        cpu::{CpuModel, Threads},
        cuda::{CudaModel, Device},
        weights::RandomWeights,
    },
    tensor::{DType, Format},
    text::Folder,
};

/// The compiled program and its kernels, before the weights are loaded.
struct Loaded {
    artifact: Artifact,
    /// Kernels from an artifact file; `None` if NVRTC compiles them.
    cubins: Option<Vec<Cubin>>,
    chosen_by: ChosenBy,
}

/// Properties of a checkpoint that the program depends on.
#[derive(Default)]
struct Facts {
    /// Names of output heads with their own tensor in the checkpoint, although config.json ties them to another tensor. The two tensors
    /// differ in their values.
    own: BTreeSet<String>,
    /// Formats of tensors that keep their published quantized values, by tensor name.
    published: BTreeMap<String, Format>,
    /// Formats of tensors with GPTQ's `desc_act` (columns sorted by quantization group), by tensor name. These tensors keep their published
    /// values if their inputs can be computed in the order of the quantization groups.
    ordered: BTreeMap<String, Format>,
    /// Whether the checkpoint quantizes only weights, not the inputs of linear layers.
    keeps_inputs: bool,
    /// Whether the program has a KV cache in E4M3 and the checkpoint contains scales for it.
    cache_scales: bool,
}

/// Duration of each loading step; zero for steps that were not needed.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadTimes {
    /// Compiling the description to a program.
    pub compile: Duration,
    /// Timing kernels or reading recorded timings.
    pub tune: Duration,
    /// Generating CUDA source from the program.
    pub emit: Duration,
    /// Compiling with NVRTC or reading its cache.
    pub jit: Duration,
    /// Number of kernels read from the disk cache of NVRTC's results.
    pub cached: usize,
    /// Number of kernels compiled by NVRTC.
    pub compiled: usize,
    /// Reading and uploading the weights.
    pub weights: Duration,
}

/// Progress callback. Its arguments are the stage, the number of finished items, and the total number of items (kernels or weights).
type Progress = Box<dyn Fn(Stage, usize, usize) + Sync>;

/// Builds an [`Engine`].
pub struct Builder {
    start: Start,
    config: Option<PathBuf>,
    config_value: Option<Value>,
    checkpoint: Option<PathBuf>,
    task: Option<String>,
    max_context: Option<u32>,
    random: Option<RandomWeights>,
    outputs: Option<Vec<String>>,
    intermediates: Vec<String>,
    without: BTreeSet<String>,
    device: DeviceChoice,
    dtype: Option<DType>,
    quantize: Option<Format>,
    dequantize: bool,
    kv_cache: Option<Format>,
    tune: TuneMode,
    timings: Option<PathBuf>,
    allocator: AllocatorChoice,
    padding: Padding,
    plain_launches: bool,
    graphs: GraphChoice,
    attention: Option<AttentionChoice>,
    invariant: bool,
    cached: bool,
    no_fused_launches: bool,
    allow_unused_layers: bool,
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
            task: None,
            max_context: None,
            random: None,
            outputs: None,
            intermediates: Vec::new(),
            without: BTreeSet::new(),
            device: DeviceChoice::Auto,
            dtype: None,
            quantize: None,
            dequantize: false,
            kv_cache: None,
            tune: TuneMode::Off,
            timings: None,
            allocator: AllocatorChoice::default(),
            padding: Padding::Removed,
            plain_launches: false,
            graphs: GraphChoice::default(),
            attention: None,
            invariant: false,
            cached: false,
            no_fused_launches: false,
            allow_unused_layers: false,
            threads: None,
            progress: Box::new(|_, _, _| ()),
        }
    }

    /// Sets the checkpoint: either a GGUF file, or a folder with `config.json` and the weights (`model.safetensors`, or an index and its
    /// shards).
    pub fn checkpoint(mut self, folder: impl Into<PathBuf>) -> Self {
        self.checkpoint = Some(folder.into());
        self
    }

    /// Sets the task of the texts, such as `query` or `document`. The task selects the route of a Router of sentence-transformers, or an
    /// adapter of the weights (jina-embeddings-v3). Without a task, the Router's default route is loaded, or the weights without an
    /// adapter.
    pub fn task(mut self, task: impl Into<String>) -> Self {
        self.task = Some(task.into());
        self
    }

    /// Sets the maximum number of tokens of a sequence, up to the number of positions of the model. For a model with separate rotary
    /// frequencies for long contexts (`longrope`), the default is the number of positions before its extension. A larger maximum selects
    /// the long-context frequencies for all sequences, including short ones.
    pub fn max_context(mut self, tokens: u32) -> Self {
        self.max_context = Some(tokens);
        self
    }

    /// Reads the model's sizes from `file` instead of the checkpoint's `config.json`.
    pub fn config(mut self, file: impl Into<PathBuf>) -> Self {
        self.config = Some(file.into());
        self
    }

    /// Takes the model's sizes from a parsed `config.json`.
    pub fn config_value(mut self, config: Value) -> Self {
        self.config_value = Some(config);
        self
    }

    /// Uses random weights instead of the weights of a checkpoint.
    pub fn random_weights(mut self, weights: RandomWeights) -> Self {
        self.random = Some(weights);
        self
    }

    /// Sets the outputs to compute. Values that no requested output depends on are not computed.
    pub fn outputs<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.outputs = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Sets additional values to return: outputs, or intermediate values by their names in `gemmule graph`.
    pub fn intermediates<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.intermediates = names.into_iter().map(Into::into).collect();
        self
    }

    /// Disables optimization passes by name.
    pub fn without<S: Into<String>>(mut self, passes: impl IntoIterator<Item = S>) -> Self {
        self.without = passes.into_iter().map(Into::into).collect();
        self
    }

    /// Selects the device. The default is [`DeviceChoice::Auto`].
    pub fn device(mut self, device: DeviceChoice) -> Self {
        self.device = device;
        self
    }

    /// Sets the storage type of weights and activations. The default is f16 on CUDA and f32 on the CPU. On the CPU, bf16 rounds the
    /// operands of linear layers to bf16; everything else is computed in f32.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Sets the format that the weights of linear layers are stored in. The default is the storage type ([`Builder::dtype`]), except for a
    /// quantized checkpoint on CUDA: its weights keep their published values if kernels support their format. CUDA kernels read
    /// [`Format::FP8`], [`Format::FP8_128`], [`Format::INT8`] and [`Format::INT4`], with activations in f16 or bf16. Except with
    /// [`Format::INT4`], kernels may round activations to 8 bits, too. On a CPU, [`Format::INT8`] means int8 products. With any other
    /// format, a CPU rounds the weights to the format and computes in f32.
    pub fn quantize(mut self, format: Format) -> Self {
        self.quantize = Some(format);
        self
    }

    /// Sets whether all weights of a quantized checkpoint are dequantized to the storage type when they are loaded.
    pub fn dequantize(mut self, dequantize: bool) -> Self {
        self.dequantize = dequantize;
        self
    }

    /// Sets the format of the KV cache of an engine that generates text: [`Format::E4m3`], or the storage type, which is the default. In
    /// E4M3, keys and values take half the memory of f16 or a quarter of f32. If a quantized checkpoint publishes scales for keys and
    /// values, keys and values are divided by these scales before rounding.
    pub fn kv_cache(mut self, format: Format) -> Self {
        self.kv_cache = Some(format);
        self
    }

    /// Sets whether kernels are timed on a CUDA device. Timings are cached on disk.
    pub fn tune(mut self, mode: TuneMode) -> Self {
        self.tune = mode;
        self
    }

    /// Corrects the cost model with the timings in a file that [`write_timings`](super::write_timings) wrote. A file is invalid if it is
    /// damaged, was measured on another card, or is for another version of the kernels. If kernels are timed ([`Builder::tune`]), an
    /// invalid file is ignored with a warning. Otherwise, it is an error of [`Builder::build`].
    pub fn timings(mut self, file: impl Into<PathBuf>) -> Self {
        self.timings = Some(file.into());
        self
    }

    /// Sets the memory planner for intermediate tensors. The default is the chunk allocator.
    pub fn allocator(mut self, allocator: AllocatorChoice) -> Self {
        self.allocator = allocator;
        self
    }

    /// Selects the chunk allocator with this policy for reserving and releasing memory.
    pub fn chunk_policy(self, policy: ChunkPolicy) -> Self {
        self.allocator(AllocatorChoice::Chunk(policy))
    }

    /// Sets whether sequences are packed or padded to the longest sequence of their batch. Padding only serves to measure the gain of
    /// packing. Results do not depend on this setting. Padding requires that the `fuse_attention` pass is disabled and that no output is a
    /// mean over tokens.
    pub fn padding(mut self, padding: Padding) -> Self {
        self.padding = padding;
        self
    }

    /// Sets whether to disable programmatic dependent launch, for comparison. By default, from compute capability 9.0 on, a kernel may
    /// start before the previous kernel ends, and waits just before it reads the previous kernel's results. The setting does not change any
    /// bit of the results.
    pub fn plain_launches(mut self, plain: bool) -> Self {
        self.plain_launches = plain;
        self
    }

    /// Sets which launches are replayed as CUDA graphs. The setting does not change any bit of the results.
    pub fn graphs(mut self, graphs: GraphChoice) -> Self {
        self.graphs = graphs;
        self
    }

    /// Sets the kernels for fused attention. By default they are chosen by sequence length.
    pub fn attention(mut self, attention: AttentionChoice) -> Self {
        self.attention = Some(attention);
        self
    }

    /// Builds an engine that generates tokens from next-token logits with a KV cache, for [`Engine::generate`] and
    /// [`Engine::generator`].
    pub fn generating(mut self) -> Self {
        self.cached = true;
        self.outputs([NEXT_LOGITS])
    }

    /// Sets whether a sequence's results are bitwise independent of the rest of the batch. Each operator then has one kernel
    /// for all batch sizes, which costs time, mostly for small batches. Requires fused attention.
    pub fn invariant(mut self, invariant: bool) -> Self {
        self.invariant = invariant;
        self
    }

    /// Sets whether every operator of the fused graph has its own launch, for comparison. By default a kernel may compute
    /// several operators, such as a linear layer and the LayerNorm after it, if that is estimated to be faster.
    pub fn no_fused_launches(mut self, none: bool) -> Self {
        self.no_fused_launches = none;
        self
    }

    #[doc(hidden)]
    #[deprecated = "use `no_fused_launches`"]
    pub fn no_joint_launches(self, none: bool) -> Self {
        self.no_fused_launches(none)
    }

    #[doc(hidden)]
    #[deprecated = "use `allow_unused_layers`"]
    pub fn unused_layers(self, may_be: bool) -> Self {
        self.allow_unused_layers(may_be)
    }

    /// Sets whether to accept a checkpoint with layers that the model does not read, for example because config.json was edited to run only
    /// the first layers. By default, unread layers are an error.
    pub fn allow_unused_layers(mut self, may_be: bool) -> Self {
        self.allow_unused_layers = may_be;
        self
    }

    /// Sets the number of CPU threads. Engines with the same number share a pool. The default is [`Threads::usual`]: the rayon pool that
    /// the calling thread belongs to, or else the global pool.
    pub fn threads(mut self, threads: NonZeroUsize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Sets a callback for the progress of compiling kernels and loading weights.
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
        match &mut device {
            DeviceName::Cpu { n_threads } => *n_threads = threads.count(),
            DeviceName::Cuda(_) => self.check_for_cuda(&device)?,
        }
        let mut times = LoadTimes::default();
        let began = Instant::now();
        let folder = self.folder()?;
        let mut facts = Facts::default();
        let mut loaded = self.artifact(&device, folder.as_ref(), &facts, false, &mut times)?;
        let mut source = self.weights(&loaded.artifact, folder.as_ref())?;
        facts.own = source.own()?.into_iter().collect();
        if let Some(head) = facts.own.first() {
            if let Some((file, _)) = self.start.artifact() {
                let (file, head) = (file.clone(), head.clone());
                return Err(EngineError::OwnHead { file, head });
            }
            tracing::info!(
                "the checkpoint's `{head}` differs from the embedding table, so the two are not tied"
            );
            loaded = self.artifact(&device, folder.as_ref(), &facts, false, &mut times)?;
            source = self.weights(&loaded.artifact, folder.as_ref())?;
        }
        [facts.published, facts.ordered] =
            self.published(&device, &loaded.artifact.program, &*source)?;
        facts.keeps_inputs = source.keeps_inputs();
        facts.cache_scales = self.has_cache_scales(&loaded.artifact.program, &*source);
        let keeps = !(facts.published.is_empty() && facts.ordered.is_empty());
        let is_changed = keeps || facts.cache_scales;
        // This is the last compilation: its program is the one that runs, so only this call times kernels.
        if is_changed || self.is_tuned() {
            loaded = self.artifact(&device, folder.as_ref(), &facts, true, &mut times)?;
        }
        if is_changed {
            source = self.weights(&loaded.artifact, folder.as_ref())?;
        }
        if keeps {
            precision::log_kept(&loaded.artifact.program, facts.ordered.len());
        }
        let Loaded {
            artifact,
            cubins,
            chosen_by,
        } = loaded;
        // If the allocator cannot plan this program, fail before any weight is read.
        Planner::new(&artifact.program, &self.allocator)?;
        times.compile = began.elapsed().saturating_sub(times.tune);
        let program = &artifact.program;
        let stored = weights::stored(program);
        source.check(&stored)?;
        if !self.allow_unused_layers && self.start.artifact().is_none() {
            let folder = folder.as_ref();
            let (description, config) = (self.description(folder)?, self.config_json(folder)?);
            let description = description.with_own(facts.own);
            let names = &artifact.weight_names;
            let unread = weights::unread(&*source, names, program, &description, &config)?;
            weights::warn_of_unread(&description, &unread);
        }
        for name in source.surplus(&stored) {
            tracing::info!("the checkpoint's tensor `{name}` is not used");
        }
        let (program, limits) = (artifact.program, artifact.limits);
        let padding = self.padding_of(&program);
        let weights_done = |done, total| (self.progress)(Stage::Weights, done, total);
        let model = match &device {
            DeviceName::Cpu { .. } => {
                let began = Instant::now();
                let model = CpuModel::load(program, threads, &*source, &weights_done)?;
                times.weights = began.elapsed();
                LoadedModel::Cpu(model.into())
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
                LoadedModel::Cuda(model.into())
            }
        };
        Ok(Engine {
            model,
            folder,
            encoders: Default::default(),
            host_scorer: Default::default(),
            device,
            limits,
            allocator: self.allocator,
            padding,
            plain_launches: self.plain_launches,
            graphs: self.graphs,
            times,
            chosen_by,
        })
    }

    /// Compiles the program, or reads it and its kernels from an artifact file. `is_last` says that `facts` are complete. The program is
    /// tuned only if `is_last` is true and tuning was requested.
    fn artifact(
        &self,
        device: &DeviceName,
        folder: Option<&Folder>,
        facts: &Facts,
        is_last: bool,
        times: &mut LoadTimes,
    ) -> Result<Loaded, EngineError> {
        let tuned = self.is_tuned();
        if let Some((file, read)) = self.start.artifact() {
            return self.of_file(file, read, device, folder);
        }
        let (machine, served) = device.machine()?;
        let mut chosen_by = ChosenBy {
            card: machine.name.clone(),
            fit: Some(machine.fit),
            served,
            timings: 0,
        };
        let (dtype, quantize) = self.computes_in(device)?;
        let kv_cache = self.caches_in(dtype)?;
        let options = CompileOptions {
            outputs: self.outputs.clone(),
            intermediates: self.intermediates.clone(),
            modules: modules_of(folder),
            without: self.without.clone(),
            dtype,
            quantize,
            published: facts.published.clone(),
            ordered: facts.ordered.clone(),
            keeps_inputs: facts.keeps_inputs,
            kv_cache,
            cache_scales: facts.cache_scales,
            timings: None,
            padding: self.padding,
            attention: self.attention.unwrap_or_default(),
            machine,
            invariant: self.invariant,
            no_fused_launches: self.no_fused_launches,
            cached: self.cached,
        };
        if self.invariant && tuned {
            return Err(EngineError::TuneInvariant);
        }
        if options.attention != AttentionChoice::Auto {
            tracing::info!("attention: {} (as requested)", options.attention);
        }
        let description = self.description(folder)?.with_own(facts.own.clone());
        let mut compiled = compile(&description, &self.config_json(folder)?, &options)?;
        if let Some(folder) = folder.filter(|_| !is_last) {
            check_pooling(folder, &options.modules, &compiled.model.graph)?;
        }
        let began = Instant::now();
        if tuned && is_last {
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

/// Returns the sentence-transformers modules that follow the transformer in a folder.
pub(super) fn modules_of(folder: Option<&Folder>) -> Vec<Module> {
    let modules = folder.and_then(Folder::modules);
    modules.unwrap_or_default().to_vec()
}

impl Limits {
    pub(super) fn of(model: &crate::model::Model) -> Self {
        Self {
            vocabulary: model.vocab,
            segments: model.type_rows,
            skipped: model.skipped,
            end: model.end,
            longest: model.max_positions,
            extended: model.extended_positions,
        }
    }
}
