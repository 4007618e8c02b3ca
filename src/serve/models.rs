//! The models of a server, by name.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use super::{Cache, Metrics, Recorder, ServeError, Service, ServiceChoice, Writer, measure};
use crate::{
    DType, DeviceChoice, Engine, EngineError,
    engine::{Folder, TextEncoder},
    model::Description,
    program::NEXT_LOGITS,
    schedule::{CostTable, Scheduler},
};

/// How a model is served.
pub struct ModelChoice {
    pub folder: PathBuf,
    /// By which it is asked for.
    pub name: String,
    pub device: DeviceChoice,
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
}

/// All models of a server, and whether it takes requests.
pub struct Models {
    models: Vec<Model>,
    is_ready: AtomicBool,
}

/// How long costs are measured.
const MEASURING: Duration = Duration::from_secs(3);

impl Model {
    /// Loads a checkpoint's folder. One with sentence-transformers' modules embeds; else one whose description has the
    /// logits of a next token writes; else its outputs say whether it embeds or scores.
    ///
    /// # Errors
    /// What loading fails with.
    pub fn open(choice: ModelChoice) -> Result<Self, EngineError> {
        let builder = || {
            let mut builder = Engine::from_checkpoint(&choice.folder).device(choice.device);
            if let Some(dtype) = choice.dtype {
                builder = builder.dtype(dtype);
            }
            builder.invariant(choice.invariant)
        };
        let folder = Folder::open(&choice.folder)?;
        let description = Description::for_config(folder.config()?)?;
        let writes = description.output_names().contains(&NEXT_LOGITS);
        let writing = match folder.modules() {
            None if writes => Some(builder().generating().build()?),
            _ => None,
        };
        let since = SystemTime::now();
        if let Some(engine) = writing {
            let encoder = TextEncoder::for_prompts(folder)?;
            let writer = Writer::start(&engine, encoder, choice.cache_bytes)?;
            return Ok(Self {
                name: choice.name,
                device: engine.device().to_string(),
                dtype: engine.program().dtype,
                kind: Kind::Writer(Box::new(writer)),
                costs: None,
                since,
            });
        }
        let engine = builder().build()?;
        let costs = match choice.costs {
            Some(costs) => costs,
            None => measure(&engine, &mut engine.session()?, MEASURING)?,
        };
        let service = ServiceChoice {
            scheduler: choice.scheduler,
            costs: costs.clone(),
            batch_bytes: choice.batch_bytes,
            queue: choice.queue,
            tokenizers: choice.tokenizers,
            trace: choice.trace,
            cache: choice.cache,
        };
        let service = Service::start(&engine, TextEncoder::of(folder)?, service)?;
        Ok(Self {
            name: choice.name,
            device: engine.device().to_string(),
            dtype: engine.program().dtype,
            kind: Kind::Service(service),
            costs: Some(costs),
            since,
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

    fn does(&self) -> &'static str {
        match &self.kind {
            Kind::Service(service) if service.is_scoring() => "scores pairs of texts",
            Kind::Service(_) => "embeds texts",
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
        Self {
            models,
            is_ready: AtomicBool::new(true),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Model> {
        self.models.iter()
    }

    /// Whether new requests are welcome.
    pub fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::Acquire)
    }

    /// Says that the server will end. It goes on answering.
    pub fn retire(&self) {
        self.is_ready.store(false, Ordering::Release);
    }

    /// The model of this name; without one, the only model that does what is asked, or the first.
    fn named(
        &self,
        name: Option<&str>,
        does: impl Fn(&Model) -> bool,
    ) -> Result<&Model, ServeError> {
        let found = match name {
            Some(name) => self.models.iter().find(|model| model.name == name),
            None => self
                .models
                .iter()
                .find(|model| does(model))
                .or(self.models.first()),
        };
        found.ok_or_else(|| ServeError::NoModel {
            name: name.unwrap_or_default().to_owned(),
            known: self.models.iter().map(|model| model.name.clone()).collect(),
        })
    }

    /// A model that embeds.
    ///
    /// # Errors
    /// A name that no model has, and a model that does something else.
    pub fn embedding(&self, name: Option<&str>) -> Result<(&Model, &Service), ServeError> {
        let is =
            |model: &Model| matches!(&model.kind, Kind::Service(service) if !service.is_scoring());
        let model = self.named(name, is)?;
        match &model.kind {
            Kind::Service(service) if !service.is_scoring() => Ok((model, service)),
            _ => Err(model.unsupported("embeddings")),
        }
    }

    /// A model that scores.
    ///
    /// # Errors
    /// As [`embedding`](Self::embedding).
    pub fn scoring(&self, name: Option<&str>) -> Result<(&Model, &Service), ServeError> {
        let is =
            |model: &Model| matches!(&model.kind, Kind::Service(service) if service.is_scoring());
        let model = self.named(name, is)?;
        match &model.kind {
            Kind::Service(service) if service.is_scoring() => Ok((model, service)),
            _ => Err(model.unsupported("scores")),
        }
    }

    /// A model that writes.
    ///
    /// # Errors
    /// As [`embedding`](Self::embedding).
    pub fn writing(&self, name: Option<&str>) -> Result<(&Model, &Writer), ServeError> {
        let is = |model: &Model| matches!(&model.kind, Kind::Writer(_));
        let model = self.named(name, is)?;
        match &model.kind {
            Kind::Writer(writer) => Ok((model, writer)),
            Kind::Service(_) => Err(model.unsupported("texts")),
        }
    }
}
