//! Errors, and their conversion to Python exceptions.

use std::error::Error as _;

use gemmule::{
    EngineError, TextError,
    engine::hub::HubError,
    generate::{Failure, GenerateError},
    runtime::{DeviceOutputError, batch::BatchError, weights::CheckpointError},
};
use pyo3::prelude::*;

/// The exceptions of gemmule/_errors.py.
mod exceptions {
    pyo3::import_exception!(gemmule._errors, ComputeError);
    pyo3::import_exception!(gemmule._errors, FileError);
    pyo3::import_exception!(gemmule._errors, InputError);
}

/// An error of a call from Python.
#[derive(Debug)]
pub enum Error {
    Engine(Box<EngineError>),
    /// An error about one of several inputs, with the name of the input.
    Of(String, Box<EngineError>),
    /// An argument that cannot be used.
    Input(String),
    /// A call in a forked process, which lacks the compute threads.
    Process,
    /// A Python exception, such as `KeyboardInterrupt`.
    Python(PyErr),
}

/// Result of a call.
pub type Result<T> = std::result::Result<T, Error>;

impl From<EngineError> for Error {
    fn from(error: EngineError) -> Self {
        Self::Engine(Box::new(error))
    }
}

impl From<BatchError> for Error {
    fn from(error: BatchError) -> Self {
        EngineError::from(error).into()
    }
}

impl From<GenerateError> for Error {
    fn from(error: GenerateError) -> Self {
        EngineError::from(error).into()
    }
}

impl From<TextError> for Error {
    fn from(error: TextError) -> Self {
        EngineError::from(error).into()
    }
}

impl From<DeviceOutputError> for Error {
    fn from(error: DeviceOutputError) -> Self {
        EngineError::from(error).into()
    }
}

impl From<PyErr> for Error {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        match error {
            Error::Python(error) => error,
            Error::Input(text) => exceptions::InputError::new_err(text),
            Error::Process => exceptions::ComputeError::new_err(
                "this process was forked from one that had loaded a model, and does not have its threads; start processes with the method \"spawn\" (multiprocessing.set_start_method), or load models only after the fork",
            ),
            Error::Engine(error) => raised(&error, described(&error)),
            Error::Of(name, error) => raised(&error, format!("{name}: {}", described(&error))),
        }
    }
}

fn raised(error: &EngineError, text: String) -> PyErr {
    match kind(error) {
        Kind::Input => exceptions::InputError::new_err(text),
        Kind::File => exceptions::FileError::new_err(text),
        Kind::Compute => exceptions::ComputeError::new_err(text),
    }
}

/// Returns the text of an error, followed by the texts of its causes.
fn described(error: &EngineError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// Kinds of exceptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Arguments, or contents of a checkpoint, that cannot be used.
    Input,
    /// Files and models that are missing or cannot be read, and errors of the hub.
    File,
    /// Errors of a device, of memory or of a computation.
    Compute,
}

fn kind(error: &EngineError) -> Kind {
    use EngineError as E;
    match error {
        E::Hub(HubError::BadId { .. }) => Kind::Input,
        E::Hub(_) | E::HubWeights { .. } | E::HubGguf { .. } | E::FolderOnHub { .. } => Kind::File,
        E::Read { .. } | E::Write { .. } | E::File(_) => Kind::File,
        E::Text(TextError::NoFolder { .. } | TextError::NoTokenizer { .. }) => Kind::File,
        E::Checkpoint(error) => of_checkpoint(error),
        E::Generation(Failure::Refused(_)) => Kind::Input,
        E::Generation(_) => Kind::Compute,
        E::Generate(GenerateError::Admit(_) | GenerateError::GenerationConfig { .. }) => {
            Kind::Input
        }
        E::Generate(_) => Kind::Compute,
        E::Cpu(_) | E::Cuda(_) | E::Jit(_) | E::Machine(_) | E::Codegen(_) => Kind::Compute,
        E::Lower(_) | E::Pass(_) | E::Plan(_) | E::Size(_) => Kind::Compute,
        E::NotFinite { .. } | E::PipelineEnded | E::Threads { .. } => Kind::Compute,
        E::DeviceOutput(_) => Kind::Compute,
        _ => Kind::Input,
    }
}

fn of_checkpoint(error: &CheckpointError) -> Kind {
    use CheckpointError as C;
    match error {
        C::NoCheckpoint { .. } | C::Io { .. } | C::File(_) | C::MissingShard { .. } => Kind::File,
        C::OutOfMemory { .. } => Kind::Compute,
        _ => Kind::Input,
    }
}
