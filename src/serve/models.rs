//! The models of a server, by name.

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
    Cache, Devices, Metrics, Recorder, ServeError, Service, ServiceChoice, Writer,
    known_or_measured,
    service::{LOST, ROWS, SPARSE, STATES},
    tokenize::prompt,
};
use crate::{
    DType, DeviceChoice, Engine, EngineError,
    engine::{Folder, TextEncoder, TextToken},
    model::{Description, EMBEDDING, computed},
    program::NEXT_LOGITS,
    schedule::{CostTable, Scheduler},
};

/// How a model is served.
pub struct ModelChoice {
    pub folder: PathBuf,
    /// By which it is asked for.
    pub name: String,
    /// Where it runs; one that embeds or scores may do so on several devices, each with all of its weights; by
    /// default on what is at hand.
    pub devices: Vec<DeviceChoice>,
    pub dtype: Option<DType>,
    pub invariant: bool,
    pub scheduler: Box<dyn Scheduler>,
    /// What batches cost; measured at the start where it is not given.
    pub costs: Option<CostTable>,
    /// Memory for the intermediate tensors of a batch, in bytes.
    pub batch_bytes: u64,
    /// Memory for keys and values of a model that writes, in bytes.
    pub cache_bytes: Option<u64>,
    pub queue: Duration,
    pub tokenizers: usize,
    /// Whether an embedding model also gives the vectors of all tokens, which are copied from the device for each batch.
    pub all_tokens: bool,
    /// Whether an embedding model also weighs the tokens of its texts, as BGE-M3 does.
    pub sparse: bool,
    /// Its share of the devices' time, beside other models; `None` where it has them to itself.
    pub share: Option<(Arc<Devices>, f64)>,
    /// The model that it replaces. What batches cost is then not measured again beside that one's work, if they are alike.
    pub previous: Option<Arc<Model>>,
    /// Where a service records all that happens; a model that writes has no schedule.
    pub trace: Option<Recorder>,
    /// Where answers of all models are kept; texts that are written are not.
    pub cache: Option<Arc<Cache>>,
}

/// What a model does.
pub enum Kind {
    Service(Service),
    Writer(Box<Writer>),
}

/// A model that is ready.
pub struct Model {
    pub name: String,
    pub kind: Kind,
    /// Where it runs, in words.
    pub device: String,
    pub dtype: DType,
    /// What its schedule goes by; `None` of a model that writes.
    pub costs: Option<CostTable>,
    /// When it was loaded.
    pub since: SystemTime,
    config: serde_json::Value,
}

/// All models of a server, and whether it takes requests.
pub struct Models {
    /// Who answers a request holds its model, so that one that is replaced goes on until its last answer.
    models: RwLock<Arc<Vec<Arc<Model>>>>,
    is_loaded: AtomicBool,
    is_retired: AtomicBool,
    open: Option<Open>,
    reloading: Mutex<()>,
}

/// Loads all models anew, beside those that serve.
type Open = Box<dyn Fn(&[Arc<Model>]) -> Result<Vec<Model>, String> + Send + Sync>;

/// Why models are as they were.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReloadError {
    #[error("this server was started with models that it cannot load again")]
    Fixed,
    #[error("the models are being loaded already; ask again when that is done")]
    Busy,
    #[error("the keys and the models stay as they are: {problem}")]
    Keys { problem: String },
    #[error("the models stay as they are: {problem}")]
    Failed { problem: String },
}

/// Why there is no model yet.
pub const LOADING: &str = "its models are being loaded";

/// How long a reload waits for the last requests of the models that went, which may have a day.
const LEAVE: Duration = Duration::from_secs(60);

/// How long costs are measured.
const MEASURING: Duration = Duration::from_secs(3);

impl Model {
    /// Loads a checkpoint's folder. One with sentence-transformers' modules embeds; else one whose description has the
    /// logits of a next token writes; else its outputs say whether it embeds or scores.
    ///
    /// # Errors
    /// What loading fails with.
    pub fn open(choice: ModelChoice) -> Result<Self, EngineError> {
        let builder = |device: DeviceChoice| {
            let mut builder = Engine::from_checkpoint(&choice.folder).device(device);
            if let Some(dtype) = choice.dtype {
                builder = builder.dtype(dtype);
            }
            builder.invariant(choice.invariant)
        };
        let devices = match choice.devices.is_empty() {
            true => vec![DeviceChoice::Auto],
            false => choice.devices.clone(),
        };
        let folder = Folder::open(&choice.folder)?;
        let description = Description::for_config(folder.config()?)?;
        let writes = description.output_names().contains(&NEXT_LOGITS);
        let writing = match folder.modules() {
            None if writes => match devices.as_slice() {
                &[device] => Some(builder(device).generating().build()?),
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
            let encoder = TextEncoder::for_prompts(folder)?;
            let (bytes, seat) = (choice.cache_bytes, seat(&engine));
            let writer = Writer::start(&engine, encoder, bytes, choice.queue, seat)?;
            return Ok(Self {
                name: choice.name,
                device: engine.device().to_string(),
                dtype: engine.program().dtype,
                kind: Kind::Writer(Box::new(writer)),
                costs: None,
                since,
                config,
            });
        }
        let outputs = Self::outputs(&folder, choice.all_tokens, choice.sparse)?;
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
        let service = Service::start(engine, others, TextEncoder::of(folder)?, service)?;
        Ok(Self {
            name: choice.name,
            device,
            dtype: engine.program().dtype,
            kind: Kind::Service(service),
            costs: Some(costs),
            since,
            config,
        })
    }

    /// The outputs of a folder that its service reads, so that no batch computes others, and copies them from the device;
    /// empty where those that are built by default are right.
    ///
    /// # Errors
    /// A config.json that cannot be read, or that no shipped description is for.
    pub fn outputs(
        folder: &Folder,
        all_tokens: bool,
        sparse: bool,
    ) -> Result<Vec<&'static str>, EngineError> {
        let config = folder.config()?;
        let description = Description::for_config(config)?;
        let usual = description.outputs_for(config);
        let embeds = match folder.modules() {
            Some(modules) => computed(modules) == Some(EMBEDDING),
            None => usual.contains(&EMBEDDING),
        };
        let also = [(all_tokens, STATES), (sparse, SPARSE)];
        let mut also = also.into_iter().filter(|&(is, _)| is && embeds).peekable();
        Ok(match (also.peek(), folder.modules()) {
            (Some(_), _) => {
                let also = also.map(|(_, name)| name);
                [EMBEDDING].into_iter().chain(also).collect()
            }
            (None, Some(_)) => Vec::new(),
            (None, None) => {
                let first = ROWS.into_iter().find(|name| usual.contains(name));
                first.into_iter().collect()
            }
        })
    }

    /// The name of a folder, for a model that was given none.
    pub fn name_of(folder: &Path) -> String {
        let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        let name = folder.file_name().map(|name| name.to_string_lossy());
        name.map_or_else(|| "model".to_owned(), |name| name.into_owned())
    }

    pub fn metrics(&self) -> &Metrics {
        match &self.kind {
            Kind::Service(service) => service.metrics(),
            Kind::Writer(writer) => writer.metrics(),
        }
    }

    /// What embeds or scores.
    ///
    /// # Errors
    /// A model that writes.
    pub fn service(&self) -> Result<&Service, ServeError> {
        match &self.kind {
            Kind::Service(service) => Ok(service),
            Kind::Writer(_) => Err(self.unsupported("embeddings or scores")),
        }
    }

    /// What writes.
    ///
    /// # Errors
    /// A model that embeds or scores.
    pub fn writer(&self) -> Result<&Writer, ServeError> {
        match &self.kind {
            Kind::Writer(writer) => Ok(writer),
            Kind::Service(_) => Err(self.unsupported("texts")),
        }
    }

    /// What cuts texts into tokens.
    pub fn encoder(&self) -> &TextEncoder {
        match &self.kind {
            Kind::Service(service) => service.encoder(),
            Kind::Writer(writer) => writer.encoder(),
        }
    }

    /// All tokens of a text, with those that the tokenizer adds or without.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn tokens(&self, text: &str, adds_special: bool) -> Result<Vec<TextToken>, String> {
        let tokens = self.encoder().tokens(text, adds_special);
        tokens.map_err(|e| e.to_string())
    }

    /// Text of a prompt of the folder, which stands before an input as it is.
    ///
    /// # Errors
    /// No such prompt, and a model that reads a prompt as a message of its own; `param` is the field that names it.
    pub fn prompt_text(&self, param: &'static str, name: &str) -> Result<&str, ServeError> {
        let folder = self.encoder().folder();
        if folder.has_messages() {
            let problem = format!(
                "`{param}` is `{name}`, and the model reads texts and prompts through a chat template; leave `{param}` out to see the tokens of the text alone"
            );
            return Err(ServeError::Invalid { param, problem });
        }
        Ok(prompt(folder, param, &[name])?.1)
    }

    /// The text of tokens, with special ones if they are not skipped.
    ///
    /// # Errors
    /// The first token that the model does not have, and what else is wrong with them.
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

    /// What it does, in words.
    pub fn does(&self) -> &'static str {
        match &self.kind {
            Kind::Service(service) if service.is_scoring() => "scores pairs of texts",
            Kind::Service(service) if service.is_embedding() => "embeds texts",
            Kind::Service(_) => "weighs words of texts",
            Kind::Writer(_) => "writes texts",
        }
    }

    fn unsupported(&self, asked: &'static str) -> ServeError {
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

    /// Models that can be loaded again, by `open`, which is given those that serve.
    pub fn reloadable(
        models: Vec<Model>,
        open: impl Fn(&[Arc<Model>]) -> Result<Vec<Model>, String> + Send + Sync + 'static,
    ) -> Self {
        Self {
            open: Some(Box::new(open)),
            ..Self::new(models)
        }
    }

    /// The same before there is any: requests are told so, until [`begin`](Self::begin) brings them.
    pub fn loading(
        open: impl Fn(&[Arc<Model>]) -> Result<Vec<Model>, String> + Send + Sync + 'static,
    ) -> Self {
        Self {
            is_loaded: AtomicBool::new(false),
            ..Self::reloadable(Vec::new(), open)
        }
    }

    /// Serves the first models.
    pub fn begin(&self, models: Vec<Model>) {
        self.replace(models);
        self.is_loaded.store(true, Ordering::Release);
    }

    /// Serves these models, and returns those that were there before.
    fn replace(&self, models: Vec<Model>) -> Arc<Vec<Arc<Model>>> {
        let models = Arc::new(models.into_iter().map(Arc::new).collect());
        let mut current = self.models.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *current, models)
    }

    /// Loads all models anew beside those that serve, and lets them take their place. Requests that run end where they began.
    /// Returns the names.
    ///
    /// # Errors
    /// Models that cannot be loaded; those that serve go on then.
    pub fn reload(&self) -> Result<Vec<String>, ReloadError> {
        let open = self.open.as_ref().ok_or(ReloadError::Fixed)?;
        let _only = self.reloading.try_lock().map_err(|_| ReloadError::Busy)?;
        if !self.is_loaded() {
            return Err(ReloadError::Busy);
        }
        let models = open(&self.all()).map_err(|problem| ReloadError::Failed { problem })?;
        let names = models.iter().map(|model| model.name.clone()).collect();
        let old = self.replace(models);
        // A model waits for its threads when it goes: on a thread of its own, and not where the last of its requests is answered.
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
        if leaving.is_ok() && all_gone.recv_timeout(LEAVE).is_err() {
            tracing::warn!("requests of the models that were replaced still run after {LEAVE:?}");
        }
        Ok(names)
    }

    /// All models as they are now.
    pub fn all(&self) -> Arc<Vec<Arc<Model>>> {
        Arc::clone(&self.models.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether there are models, or were.
    pub fn is_loaded(&self) -> bool {
        self.is_loaded.load(Ordering::Acquire)
    }

    /// Why new requests are not welcome; `None` where they are.
    pub fn not_ready(&self) -> Option<&'static str> {
        let is_retired = self.is_retired.load(Ordering::Acquire);
        let all = [
            (self.is_lost(), LOST),
            (is_retired, "it is shutting down"),
            (!self.is_loaded(), LOADING),
        ];
        all.into_iter().find(|(is, _)| *is).map(|(_, why)| why)
    }

    /// Whether the device of a model computes nothing any more, which this process cannot mend.
    pub fn is_lost(&self) -> bool {
        self.all().iter().any(|model| match &model.kind {
            Kind::Service(service) => service.is_lost(),
            Kind::Writer(writer) => writer.is_lost(),
        })
    }

    /// Says that the server will end. It goes on answering.
    pub fn retire(&self) {
        self.is_retired.store(true, Ordering::Release);
    }

    /// The model of this name; without one, the first that does what is asked, or the first.
    ///
    /// # Errors
    /// A name that no model has.
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
            name: name.unwrap_or_default().to_owned(),
            known: models.iter().map(|model| model.name.clone()).collect(),
        })
    }

    /// A model that embeds.
    ///
    /// # Errors
    /// A name that no model has, and a model that does something else.
    pub fn embedding(&self, name: Option<&str>) -> Result<Arc<Model>, ServeError> {
        let is =
            |model: &Model| matches!(&model.kind, Kind::Service(service) if service.is_embedding());
        let model = self.named(name, is)?;
        match is(&model) {
            true => Ok(model),
            false => Err(model.unsupported("embeddings")),
        }
    }

    /// A model that weighs the entries of its vocabulary.
    ///
    /// # Errors
    /// As [`embedding`](Self::embedding).
    pub fn sparse(&self, name: Option<&str>) -> Result<Arc<Model>, ServeError> {
        let is =
            |model: &Model| matches!(&model.kind, Kind::Service(service) if service.has_sparse());
        let model = self.named(name, is)?;
        match is(&model) {
            true => Ok(model),
            false => Err(model.unsupported("weights of words")),
        }
    }

    /// A model that scores.
    ///
    /// # Errors
    /// As [`embedding`](Self::embedding).
    pub fn scoring(&self, name: Option<&str>) -> Result<Arc<Model>, ServeError> {
        let is =
            |model: &Model| matches!(&model.kind, Kind::Service(service) if service.is_scoring());
        let model = self.named(name, is)?;
        match is(&model) {
            true => Ok(model),
            false => Err(model.unsupported("scores")),
        }
    }

    /// A model that writes.
    ///
    /// # Errors
    /// As [`embedding`](Self::embedding).
    pub fn writing(&self, name: Option<&str>) -> Result<Arc<Model>, ServeError> {
        let is = |model: &Model| matches!(&model.kind, Kind::Writer(_));
        let model = self.named(name, is)?;
        match is(&model) {
            true => Ok(model),
            false => Err(model.unsupported("texts")),
        }
    }
}
