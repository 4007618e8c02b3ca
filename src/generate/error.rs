use std::path::PathBuf;

use thiserror::Error;

use super::AdmitError;
use crate::{
    files::ReadError,
    kernels::cache::BLOCK,
    program::SizeOverflow,
    runtime::{PlannerError, batch::BatchError, cpu::CpuError, cuda::CudaError},
};

/// An error of a generator that does not concern a single request.
#[derive(Debug, Error)]
#[cfg_attr(feature = "miette", derive(miette::Diagnostic))]
#[non_exhaustive]
pub enum GenerateError {
    #[error(
        "{bytes} bytes are not enough for the KV cache: a block of {BLOCK} tokens takes {block}"
    )]
    NoBlock { bytes: u64, block: u64 },
    #[error(
        "the engine was built to compute outputs, not to generate; build it with `Builder::generating`"
    )]
    NotGenerating,
    #[error(transparent)]
    Admit(#[from] AdmitError),
    #[error("`{file}`: {problem}")]
    GenerationConfig { file: PathBuf, problem: String },
    #[error("`{file}` cannot be read")]
    Read {
        file: PathBuf,
        source: std::io::Error,
    },
    #[error(transparent)]
    File(ReadError),
    #[error(transparent)]
    Batch(#[from] BatchError),
    #[error(transparent)]
    Plan(#[from] PlannerError),
    #[error(transparent)]
    Size(#[from] SizeOverflow),
    #[error(transparent)]
    Cpu(#[from] CpuError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl From<ReadError> for GenerateError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Io { file, source } => Self::Read { file, source },
            ReadError::TooLarge { .. } | ReadError::Gguf(_) | ReadError::SeveralGguf { .. } => {
                Self::File(error)
            }
        }
    }
}
