//! Loads the model of an `Embedder`, a `Generator` or another class.

use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
    sync::mpsc::{RecvTimeoutError, sync_channel},
    thread,
};

use gemmule::{
    DType, DeviceChoice, Engine, EngineError, Format, TextError,
    engine::{Builder, KvCacheChoice, hub::ModelId},
};
use pyo3::{exceptions::PyTypeError, prelude::*, types::PyString};

use crate::{
    arguments::{kind_of, text},
    error::{Error, Result},
    process,
    signals::INTERVAL,
};

/// A model, its device and its options.
#[derive(Clone)]
pub struct Loading {
    source: Source,
    /// Task that chooses the route of a Router.
    task: Option<String>,
    device: DeviceChoice,
    dtype: Option<DType>,
    quantize: Option<Format>,
    dequantize: bool,
    kv_cache: Option<Format>,
    max_context: Option<u32>,
    threads: Option<NonZeroUsize>,
}

/// Arguments of constructors, with their Python names. A class uses the defaults for arguments that it does not have.
#[derive(Default)]
pub struct Choices<'a> {
    pub device: Option<&'a str>,
    pub dtype: Option<&'a str>,
    pub quantize: Option<&'a str>,
    pub dequantize: bool,
    pub kv_dtype: Option<&'a str>,
    pub max_context: Option<u32>,
    pub threads: Option<usize>,
}

/// Location of a model.
#[derive(Clone)]
enum Source {
    Folder(PathBuf),
    /// A name on the hub.
    Hub(String),
}

impl Loading {
    /// Parses the arguments of a constructor.
    ///
    /// # Errors
    /// Returns an error if a device, type or format is unknown, if arguments contradict each other, or if `model` is neither a text nor a
    /// path.
    pub fn new(model: &Bound<'_, PyAny>, choices: &Choices<'_>) -> Result<Self> {
        let threads = match choices.threads.map(NonZeroUsize::new) {
            None => None,
            Some(Some(n)) => Some(n),
            Some(None) => {
                let text =
                    "threads is 0; expected at least 1, or None for all that the process may use";
                return Err(Error::Input(text.to_owned()));
            }
        };
        if choices.quantize.is_some() && choices.dequantize {
            let text = "quantize and dequantize are both given; expected one of them";
            return Err(Error::Input(text.to_owned()));
        }
        Ok(Self {
            source: source(model)?,
            task: None,
            device: choices.device.map_or(Ok(DeviceChoice::Auto), str::parse)?,
            dtype: choices.dtype.map_or(Ok(None), parsed_dtype)?,
            quantize: choices.quantize.map(parsed_format).transpose()?,
            dequantize: choices.dequantize,
            kv_cache: choices.kv_dtype.map_or(Ok(None), parsed_kv_dtype)?,
            max_context: choices.max_context,
            threads,
        })
    }

    /// Selects the route of the Router for `task`, instead of the default route.
    pub fn for_task(mut self, task: &str) -> Self {
        self.task = Some(task.to_owned());
        self
    }

    /// Fetches and loads the model on a separate thread, so that Ctrl-C ends the wait. After Ctrl-C, the thread continues in the background,
    /// and its model is dropped.
    ///
    /// # Errors
    /// Returns an error if the hub, the folder or the device returns one, or if a signal handler raises an exception.
    pub fn load<T: Send + 'static>(
        self,
        py: Python<'_>,
        set: impl FnOnce(Builder) -> Result<Builder> + Send + 'static,
        finish: impl FnOnce(Engine) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        process::check()?;
        let (sender, mut receiver) = sync_channel(1);
        let load = move || {
            let loaded = self
                .builder()
                .and_then(|builder| Ok(set(builder)?.build()?));
            // Sending fails if the caller was interrupted, which is not an error.
            let _ = sender.send(loaded.and_then(finish));
        };
        let thread = thread::Builder::new().name("load".to_owned()).spawn(load);
        thread.map_err(|e| threads_error(&e.to_string()))?;
        loop {
            let received;
            (received, receiver) = py.detach(move || (receiver.recv_timeout(INTERVAL), receiver));
            match received {
                Ok(loaded) => return loaded,
                Err(RecvTimeoutError::Timeout) => py.check_signals()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(threads_error("loading ended with a panic, printed above"));
                }
            }
        }
    }

    fn builder(&self) -> Result<Builder> {
        let mut builder = match &self.source {
            Source::Folder(folder) if folder.exists() => Engine::from_checkpoint(folder),
            Source::Folder(folder) => {
                let folder = folder.clone();
                return Err(TextError::NoFolder { folder }.into());
            }
            Source::Hub(name) => Engine::from_hub(name)?,
        };
        builder = builder.device(self.device).dequantize(self.dequantize);
        if let Some(task) = &self.task {
            builder = builder.task(task);
        }
        if let Some(dtype) = self.dtype {
            builder = builder.dtype(dtype);
        }
        if let Some(format) = self.quantize {
            builder = builder.quantize(format);
        }
        if let Some(format) = self.kv_cache {
            builder = builder.kv_cache(format);
        }
        if let Some(tokens) = self.max_context {
            builder = builder.max_context(tokens);
        }
        if let Some(threads) = self.threads {
            builder = builder.threads(threads);
        }
        Ok(builder)
    }
}

fn threads_error(problem: &str) -> Error {
    EngineError::Threads {
        problem: problem.to_owned(),
    }
    .into()
}

/// Returns the source of the model: a folder, or a model of the hub. A text is a folder if its path exists, else a name on the hub.
fn source(model: &Bound<'_, PyAny>) -> Result<Source> {
    if model.is_instance_of::<PyString>() {
        let name = text(model, || "model".to_owned())?;
        let is_name = !Path::new(&name).exists() && ModelId::parse(&name).is_ok();
        return Ok(match is_name {
            true => Source::Hub(name),
            false => Source::Folder(name.into()),
        });
    }
    match model.extract::<PathBuf>() {
        Ok(folder) => Ok(Source::Folder(folder)),
        Err(_) => Err(Error::Python(PyTypeError::new_err(format!(
            "model is {}; expected the path of a folder, or a name on the Hugging Face hub (ORG/NAME)",
            kind_of(model)
        )))),
    }
}

/// Parses a type name of gemmule, torch or numpy.
fn parsed_dtype(name: &str) -> Result<Option<DType>> {
    match name.strip_prefix("torch.").unwrap_or(name) {
        "auto" => Ok(None),
        "f32" | "float32" | "float" => Ok(Some(DType::F32)),
        "f16" | "float16" | "half" => Ok(Some(DType::F16)),
        "bf16" | "bfloat16" => Ok(Some(DType::BF16)),
        _ => Err(Error::Input(format!(
            "`{name}` is not a storage type; expected \"float32\", \"float16\" or \"bfloat16\", or \"auto\" for that of the device"
        ))),
    }
}

fn parsed_format(name: &str) -> Result<Format> {
    match name {
        "fp8" => Ok(Format::FP8),
        "int8" => Ok(Format::INT8),
        "int4" => Ok(Format::INT4),
        _ => Err(Error::Input(format!(
            "`{name}` is not a format that weights are quantized to; expected \"fp8\", \"int8\" or \"int4\""
        ))),
    }
}

fn parsed_kv_dtype(name: &str) -> Result<Option<Format>> {
    match name.parse::<KvCacheChoice>() {
        Ok(choice) => Ok(choice.format()),
        Err(error) => Err(Error::Input(error.to_string())),
    }
}
