//! Models of a server, by name.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
        mpsc::channel,
    },
    time::{Duration, SystemTime},
};

use super::{
    Cache, Devices, GenerationService, Metrics, Recorder, ServeError, Service, ServiceChoice,
    known_or_measured,
    service::{LOST, ROWS, SPARSE, STATES},
    tokenize::prompt,
};
use crate::{
    DType, DeviceChoice, Engine, EngineError,
    engine::KvCacheChoice,
    heads::{MASK_LOGITS, TOKEN_LOGITS},
    model::{Description, EMBEDDING, TOKEN_VECTORS, computed},
    names::excerpt,
    schedule::{CostTable, Scheduler},
    tensor::Format,
    text::{Folder, Prompt, TextEncoder, TextToken},
};

/// Options of a served model.
pub struct ModelChoice {
    pub folder: PathBuf,
    /// Name of the model in requests.
    pub name: String,
    /// Devices to run on; chosen automatically if empty. A model that embeds or scores may have several devices, each of which holds all of
    /// its weights.
    pub devices: Vec<DeviceChoice>,
    pub dtype: Option<DType>,
    /// Format of the KV cache of a model that generates text.
    pub kv_dtype: KvCacheChoice,
    /// Maximum number of tokens of a sequence; see [`Builder::max_context`](crate::engine::Builder::max_context).
    pub max_context: Option<u32>,
    pub invariant: bool,
    pub scheduler: Box<dyn Scheduler>,
    /// Costs of batches. If `None`, they are measured when the model is loaded.
    pub costs: Option<CostTable>,
    /// Memory for the intermediate tensors of a batch, in bytes.
    pub batch_bytes: u64,
    /// Size of the KV cache in bytes, for a model that generates text.
    pub cache_bytes: Option<u64>,
    pub queue: Duration,
    pub tokenizers: usize,
    /// Whether an embedding model can also return the vectors of all tokens. If so, the vectors are copied from the device for every batch.
    pub all_tokens: bool,
    /// Whether an embedding model also computes sparse weights of tokens, like BGE-M3.
    pub sparse: bool,
    /// Whether an embedding model also computes token vectors for late interaction, like BGE-M3.
    pub token_vectors: bool,
    /// Whether a masked language model fills masks instead of embedding texts.
    pub fill_mask: bool,
    /// Prompt that is put before texts if a request specifies none.
    pub default_prompt: DefaultPrompt,
    /// Task for which the model is loaded. It selects an adapter of the checkpoint, or a route of a sentence-transformers Router.
    pub task: Option<String>,
    /// Name of the model with the default route of a sentence-transformers Router, if this model is another route of that Router. A request
    /// to that name is answered by this model if its task selects this route.
    pub route_of: Option<String>,
    /// The fair locks of the devices, and the model's share of the devices' time relative to other models. `None` if no other model uses
    /// its devices.
    pub share: Option<(Arc<Devices>, f64)>,
    /// Model that this model replaces in a reload. Its cost table is reused if both models have the same config.json, devices and dtype.
    pub previous: Option<Arc<Model>>,
    /// Recorder of a service's scheduling events. It is not used for a model that generates text.
    pub trace: Option<Recorder>,
    /// Response cache, shared by all models. Generated text is not cached.
    pub cache: Option<Arc<Cache>>,
}

/// Prompt that is put before a text if the request specifies none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DefaultPrompt {
    /// The default prompt of the model's folder, if it has one.
    #[default]
    OfFolder,
    /// The folder's prompt with this name.
    Named(String),
    /// The given text.
    Text(String),
}

/// Service of a model, which depends on the model's task.
pub enum Kind {
    Service(Service),
    Generation(Box<GenerationService>),
}

/// A loaded model.
pub struct Model {
    pub name: String,
    pub kind: Kind,
    /// Names of the model's devices, for display.
    pub device: String,
    pub dtype: DType,
    /// Format of the KV cache of a model that generates text, if it differs from the model's storage type.
    pub kv_format: Option<Format>,
    /// Cost table of the model's scheduler; `None` for a model that generates text.
    pub costs: Option<CostTable>,
    /// Time when the model was loaded.
    pub since: SystemTime,
    /// See [`ModelChoice::route_of`].
    pub(super) route_of: Option<String>,
    config: serde_json::Value,
}

/// All models of a server, and whether it accepts requests.
pub struct Models {
    /// The current models. A request holds a reference to its model, so a replaced model lives until its last request has finished.
    models: RwLock<Arc<Vec<Arc<Model>>>>,
    is_loaded: AtomicBool,
    is_retired: AtomicBool,
    open: Option<Open>,
    reloading: Mutex<()>,
}

/// Function that loads all models again while the current models serve.
type Open = Box<dyn Fn(&[Arc<Model>]) -> Result<Vec<Model>, String> + Send + Sync>;

/// Error of a reload. The models have not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReloadError {
    #[error("this server was started with models that it cannot load again")]
    Fixed,
    #[error("the models are already being loaded; retry when that is done")]
    Busy,
    #[error("the reload failed and changed nothing: {problem}")]
    Failed { problem: String },
}

/// Reason for refusing requests while the first models are being loaded.
pub const LOADING: &str = "its models are being loaded";

/// Max time for which a reload waits for the last requests of replaced models. The wait is limited, because requests may run for up to a
/// day.
const MAX_LEAVING: Duration = Duration::from_secs(60);

/// Time limit for measuring the costs of batches.
const MEASURING: Duration = Duration::from_secs(3);

impl Model {
    /// Loads the model of a checkpoint folder. If the folder has modules of sentence-transformers, they determine whether the model embeds
    /// or scores. Without modules, a model with next-token logits generates text. The outputs of any other model determine its task.
    ///
    /// # Errors
    /// Returns an error if the model cannot be loaded.
    pub fn open(choice: ModelChoice) -> Result<Self, EngineError> {
        let task = choice.task.as_deref();
        let builder = |device: DeviceChoice| {
            let mut builder = Engine::from_checkpoint(&choice.folder).device(device);
            if let Some(task) = task {
                builder = builder.task(task);
            }
            if let Some(dtype) = choice.dtype {
                builder = builder.dtype(dtype);
            }
            if let Some(tokens) = choice.max_context {
                builder = builder.max_context(tokens);
            }
            builder.invariant(choice.invariant)
        };
        let devices = match choice.devices.is_empty() {
            true => vec![DeviceChoice::Auto],
            false => choice.devices.clone(),
        };
        let folder = Folder::open_for(&choice.folder, task)?.with_max_context(choice.max_context);
        let description = Description::for_config(folder.config()?)?;
        let writes = description.writes(folder.config()?);
        let writing = match folder.modules() {
            None if writes => match devices.as_slice() {
                &[device] => {
                    let mut builder = builder(device).generating();
                    if let Some(format) = choice.kv_dtype.format() {
                        builder = builder.kv_cache(format);
                    }
                    Some(builder.build()?)
                }
                _ => {
                    return Err(EngineError::OneDevice {
                        folder: choice.folder.clone(),
                    });
                }
            },
            _ => None,
        };
        let since = SystemTime::now();
        let config = folder.config()?.clone();
        let seat = |engine: &Engine| {
            let (devices, share) = choice.share.as_ref()?;
            Some(devices.turns(&engine.device().to_string()).join(*share))
        };
        if let Some(engine) = writing {
            if choice.default_prompt != DefaultPrompt::OfFolder {
                let folder = choice.folder.clone();
                return Err(EngineError::DefaultPrompt { folder });
            }
            let encoder = TextEncoder::for_prompts(folder)?;
            let (bytes, seat) = (choice.cache_bytes, seat(&engine));
            let (queue, scheduler) = (choice.queue, choice.scheduler);
            let service =
                GenerationService::start(&engine, encoder, bytes, queue, scheduler, seat)?;
            return Ok(Self {
                name: choice.name,
                device: engine.device().to_string(),
                dtype: engine.program().dtype,
                kv_format: choice.kv_dtype.format(),
                kind: Kind::Generation(Box::new(service)),
                costs: None,
                since,
                route_of: None,
                config,
            });
        }
        let outputs = match choice.fill_mask {
            true => vec![MASK_LOGITS],
            false => {
                let also = [
                    (choice.all_tokens, STATES),
                    (choice.sparse, SPARSE),
                    (choice.token_vectors, TOKEN_VECTORS),
                ];
                let also = also.into_iter().filter(|(is, _)| *is);
                Self::outputs(&folder, also.map(|(_, name)| name))?
            }
        };
        let engines = devices.iter().map(|&device| match outputs.as_slice() {
            [] => builder(device).build(),
            outputs => builder(device).outputs(outputs.iter().copied()).build(),
        });
        let engines = engines.collect::<Result<Vec<Engine>, EngineError>>()?;
        let (engine, others) = engines.split_first().expect("there is a device");
        let names = engines.iter().map(|engine| engine.device().to_string());
        let device = names.collect::<Vec<String>>().join(", ");
        let like = |previous: &Arc<Self>| {
            let is_alike = previous.config == config
                && previous.device == device
                && previous.dtype == engine.program().dtype;
            previous.costs.clone().filter(|_| is_alike)
        };
        let known = choice
            .costs
            .or_else(|| choice.previous.as_ref().and_then(like));
        let costs = match known {
            Some(costs) => costs,
            None => known_or_measured(engine, MEASURING)?,
        };
        let service = ServiceChoice {
            scheduler: choice.scheduler,
            costs: costs.clone(),
            batch_bytes: choice.batch_bytes,
            queue: choice.queue,
            tokenizers: choice.tokenizers,
            seats: engines.iter().filter_map(seat).collect(),
            trace: choice.trace,
            cache: choice.cache,
        };
        let folder = match &choice.default_prompt {
            DefaultPrompt::OfFolder => folder,
            DefaultPrompt::Named(name) => folder.with_default_prompt(Prompt::Named(name))?,
            DefaultPrompt::Text(text) => folder.with_default_prompt(Prompt::Text(text))?,
        };
        let service = Service::start(engine, others, TextEncoder::of(folder)?, service)?;
        Ok(Self {
            name: choice.name,
            device,
            dtype: engine.program().dtype,
            kv_format: None,
            kind: Kind::Service(service),
            costs: Some(costs),
            since,
            route_of: choice.route_of,
            config,
        })
    }

    /// Returns the names of the outputs that the service of a folder's model reads. Batches compute and copy only these outputs. Empty if
    /// the service reads the default outputs. If the model embeds, the outputs `also` are included.
    ///
    /// # Errors
    /// Returns an error if config.json cannot be read, if no shipped description fits it, or if the model has none of the outputs that a
    /// service reads.
    pub fn outputs(
        folder: &Folder,
        also: impl IntoIterator<Item = &'static str>,
    ) -> Result<Vec<&'static str>, EngineError> {
        let config = folder.config()?;
        let description = Description::for_config(config)?;
        let usual = match folder.modules() {
            Some(modules) => computed(modules).into_iter().collect(),
            None => description.outputs_for(config)?,
        };
        let embeds = usual.contains(&EMBEDDING);
        let mut also = also.into_iter().filter(|_| embeds).peekable();
        Ok(match (also.peek(), folder.modules()) {
            (Some(_), _) => [EMBEDDING].into_iter().chain(also).collect(),
            (None, Some(_)) => Vec::new(),
            (None, None) => {
                let known = ROWS.into_iter().chain([TOKEN_LOGITS]);
                let first = known.into_iter().find(|name| usual.contains(name));
                let does = "is a model for other tasks than embeddings, scores, text generation, entities and answers";
                let first = first.ok_or_else(|| EngineError::NotServed {
                    folder: folder.root().to_owned(),
                    does,
                    outputs: usual.iter().map(|&name| name.to_owned()).collect(),
                });
                vec![first?]
            }
        })
    }

    /// Returns the default name of a model: the name of its folder, or of its GGUF file without the extension. A symbolic link has its own
    /// name, not that of its target.
    pub fn name_of(folder: &Path) -> String {
        // Paths such as `.` and `..` do not have a name of their own.
        let folder = match folder.file_name() {
            Some(_) => folder.to_owned(),
            None => folder.canonicalize().unwrap_or_else(|_| folder.to_owned()),
        };
        let name = match folder.is_file() {
            true => folder.file_stem(),
            false => folder.file_name(),
        };
        let name = name.map(|name| name.to_string_lossy());
        name.map_or_else(|| "model".to_owned(), |name| name.into_owned())
    }

    pub fn metrics(&self) -> &Metrics {
        match &self.kind {
            Kind::Service(service) => service.metrics(),
            Kind::Generation(service) => service.metrics(),
        }
    }

    /// Returns the service of a model that embeds or scores.
    ///
    /// # Errors
    /// Returns an error if the model generates text.
    pub fn service(&self) -> Result<&Service, ServeError> {
        match &self.kind {
            Kind::Service(service) => Ok(service),
            Kind::Generation(_) => Err(self.unsupported("embeddings or scores")),
        }
    }

    /// Returns the service of a model that generates text.
    ///
    /// # Errors
    /// Returns an error if the model embeds or scores.
    pub fn generation(&self) -> Result<&GenerationService, ServeError> {
        match &self.kind {
            Kind::Generation(service) => Ok(service),
            Kind::Service(_) => Err(self.unsupported("text generation")),
        }
    }

    /// Returns the tokenizer of the model.
    pub fn encoder(&self) -> &TextEncoder {
        match &self.kind {
            Kind::Service(service) => service.encoder(),
            Kind::Generation(service) => service.encoder(),
        }
    }

    /// Tokenizes a text, with or without special tokens.
    ///
    /// # Errors
    /// Returns an error if the text cannot be tokenized.
    pub fn tokens(&self, text: &str, adds_special: bool) -> Result<Vec<TextToken>, String> {
        let tokens = self.encoder().tokens(text, adds_special);
        tokens.map_err(|e| e.to_string())
    }

    /// Returns the text of the folder's prompt `name`, for callers that put it before an input themselves.
    ///
    /// # Errors
    /// Returns an error if there is no such prompt, or if the model reads prompts as separate messages. `param` is the field that names the
    /// prompt.
    pub fn prompt_text(&self, param: &'static str, name: &str) -> Result<&str, ServeError> {
        let folder = self.encoder().folder();
        if folder.has_messages() {
            let problem = format!(
                "`{param}` is `{}`, and the model reads texts and prompts through a chat template; leave `{param}` out to see the tokens of the text alone",
                excerpt(name)
            );
            return Err(ServeError::Invalid { param, problem });
        }
        Ok(prompt(folder, param, &[name])?.1)
    }

    /// Returns the text that is put before an input if a request has no prompt; empty if there is none, or if the model reads prompts as
    /// separate messages.
    ///
    /// # Errors
    /// Returns an error if the folder does not define its default prompt.
    pub fn default_prompt(&self) -> Result<&str, ServeError> {
        let folder = self.encoder().folder();
        if folder.has_messages() {
            return Ok("");
        }
        let prompt = folder.prompt(Prompt::Default);
        prompt.map_err(|error| ServeError::invalid("model", error.to_string()))
    }

    /// Decodes token ids to text. Special tokens are left out if `skips_special`.
    ///
    /// # Errors
    /// Returns an error if a token id is out of range, or if the tokens cannot be decoded.
    pub fn decode(&self, ids: &[u32], skips_special: bool) -> Result<String, String> {
        let encoder = self.encoder();
        if let Some(at) = ids.iter().position(|&id| !encoder.knows(id)) {
            return Err(format!(
                "token {at} is {}, which the model does not have",
                ids[at]
            ));
        }
        let text = encoder.decode_with(ids, skips_special);
        text.map_err(|e| e.to_string())
    }

    /// Describes the task of the model, for display.
    pub fn does(&self) -> &'static str {
        match &self.kind {
            Kind::Service(service) if service.is_scoring() => "scores pairs of texts",
            Kind::Service(service) if service.is_embedding() => "embeds texts",
            Kind::Service(service) if service.is_tagging() => "labels tokens",
            Kind::Service(service) if service.is_answering() => "answers questions about texts",
            Kind::Service(service) if service.is_filling() => "fills masks",
            Kind::Service(service) if service.has_token_vectors() => "computes vectors of tokens",
            Kind::Service(_) => "computes sparse embeddings",
            Kind::Generation(service) if service.has_source() => "generates text from a source",
            Kind::Generation(_) => "generates text",
        }
    }

    pub(crate) fn unsupported(&self, asked: &'static str) -> ServeError {
        ServeError::UnsupportedTask {
            model: self.name.clone(),
            does: self.does(),
            asked,
        }
    }
}

impl Models {
    pub fn new(models: Vec<Model>) -> Self {
        let models = models.into_iter().map(Arc::new).collect();
        Self {
            models: RwLock::new(Arc::new(models)),
            is_loaded: AtomicBool::new(true),
            is_retired: AtomicBool::new(false),
            open: None,
            reloading: Mutex::new(()),
        }
    }

    /// Creates a set of models that can be reloaded with `open`. `open` is called with the current models.
    pub fn reloadable(
        models: Vec<Model>,
        open: impl Fn(&[Arc<Model>]) -> Result<Vec<Model>, String> + Send + Sync + 'static,
    ) -> Self {
        Self {
            open: Some(Box::new(open)),
            ..Self::new(models)
        }
    }

    /// Creates a [`reloadable`](Self::reloadable) set without models. Requests are refused until [`begin`](Self::begin) is called.
    pub fn loading(
        open: impl Fn(&[Arc<Model>]) -> Result<Vec<Model>, String> + Send + Sync + 'static,
    ) -> Self {
        Self {
            is_loaded: AtomicBool::new(false),
            ..Self::reloadable(Vec::new(), open)
        }
    }

    /// Adds the first models and starts to serve.
    pub fn begin(&self, models: Vec<Model>) {
        self.replace(models);
    }

    /// Replaces the models, and returns the previous ones.
    fn replace(&self, models: Vec<Model>) -> Arc<Vec<Arc<Model>>> {
        let models = Arc::new(models.into_iter().map(Arc::new).collect());
        let mut current = self.models.write().unwrap_or_else(PoisonError::into_inner);
        // Set this while the models are locked: a request that finds the new models then never gets the error that models are being loaded.
        self.is_loaded.store(true, Ordering::Release);
        std::mem::replace(&mut *current, models)
    }

    /// Loads all models again while the current models serve, and then replaces the current models. `on_success` is called just before the
    /// replacement. In-flight requests finish on the old models. Returns the names of the new models.
    ///
    /// # Errors
    /// Returns an error if the server was started with models that it cannot load again, if models are already being loaded, or if loading
    /// fails. The current models are then kept.
    pub fn reload(&self, on_success: impl FnOnce()) -> Result<Vec<String>, ReloadError> {
        let open = self.open.as_ref().ok_or(ReloadError::Fixed)?;
        let _only = self.reloading.try_lock().map_err(|_| ReloadError::Busy)?;
        if !self.is_loaded() {
            return Err(ReloadError::Busy);
        }
        let models = open(&self.all()).map_err(|problem| ReloadError::Failed { problem })?;
        let names = models.iter().map(|model| model.name.clone()).collect();
        on_success();
        let old = self.replace(models);
        // Dropping a model joins its threads, which must not happen on the thread of the last request that uses the model. Therefore, drop
        // the old models on a separate thread.
        let (gone, all_gone) = channel();
        let leaving = std::thread::Builder::new().name("leaving".to_owned());
        let leaving = leaving.spawn(move || {
            while Arc::strong_count(&old) > 1
                || old.iter().any(|model| Arc::strong_count(model) > 1)
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            drop(old);
            let _ = gone.send(());
        });
        if leaving.is_ok() && all_gone.recv_timeout(MAX_LEAVING).is_err() {
            tracing::warn!(
                "requests of the models that were replaced still run after {MAX_LEAVING:?}"
            );
        }
        Ok(names)
    }

    /// Returns the current models.
    pub fn all(&self) -> Arc<Vec<Arc<Model>>> {
        Arc::clone(&self.models.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns whether the first models have been loaded.
    pub fn is_loaded(&self) -> bool {
        self.is_loaded.load(Ordering::Acquire)
    }

    /// Returns the reason why the server is not ready: a device is lost, the server is shutting down, or its models are being loaded.
    /// Returns `None` if the server is ready.
    pub fn not_ready(&self) -> Option<&'static str> {
        // Read this first: if the models are loaded, `is_lost` then checks them, and not the empty list before.
        let is_loaded = self.is_loaded();
        let all = [
            (self.is_lost(), LOST),
            (self.is_retired(), "it is shutting down"),
            (!is_loaded, LOADING),
        ];
        all.into_iter().find(|(is, _)| *is).map(|(_, why)| why)
    }

    /// Returns whether a device of any model is lost. The process cannot recover from a lost device.
    pub fn is_lost(&self) -> bool {
        self.all().iter().any(|model| match &model.kind {
            Kind::Service(service) => service.is_lost(),
            Kind::Generation(service) => service.is_lost(),
        })
    }

    /// Returns whether the server is shutting down.
    pub fn is_retired(&self) -> bool {
        self.is_retired.load(Ordering::Acquire)
    }

    /// Marks the server as shutting down. This only changes the reported state: the server still accepts and answers requests.
    pub fn retire(&self) {
        self.is_retired.store(true, Ordering::Release);
    }

    /// Returns the model called `name`. If `name` is `None`, returns the first model for which `does` returns true, or else the first
    /// model.
    ///
    /// # Errors
    /// Returns an error if there is no model with this name.
    pub fn named(
        &self,
        name: Option<&str>,
        does: impl Fn(&Model) -> bool,
    ) -> Result<Arc<Model>, ServeError> {
        let models = self.all();
        let found = match name {
            Some(name) => models.iter().find(|model| model.name == name),
            None => models.iter().find(|model| does(model)).or(models.first()),
        };
        found.cloned().ok_or_else(|| ServeError::NoModel {
            name: excerpt(name.unwrap_or_default()).into_owned(),
            known: models.iter().map(|model| model.name.clone()).collect(),
        })
    }
}
