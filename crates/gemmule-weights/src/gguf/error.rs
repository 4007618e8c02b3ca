//! Reasons for refusing a file.

use std::{io, path::PathBuf};

use thiserror::Error;

use super::format::names_read;
use crate::pickle::shown;

/// Reason for refusing a GGUF file.
#[derive(Debug, Error)]
#[error("{}: {problem}", path.display())]
pub struct GgufError {
    /// File that is refused.
    pub path: PathBuf,
    pub problem: GgufProblem,
}

/// The problem with a GGUF file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GgufProblem {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(
        "it is no GGUF file: it does not begin with `GGUF`; if it was cut short, download it again"
    )]
    NotGguf,
    #[error(
        "it is in a format of llama.cpp before GGUF, which is not read; convert the original model again with llama.cpp's convert_hf_to_gguf.py"
    )]
    BeforeGguf,
    #[error("it is a pointer of Git LFS to the file; download the file itself: git lfs pull")]
    LfsPointer,
    #[error(
        "its values are big-endian; write it for little-endian machines: gguf-convert-endian FILE little"
    )]
    BigEndian,
    #[error(
        "it has version {found} of GGUF; expected version 2 or 3; convert the original model again with a current llama.cpp"
    )]
    Version { found: u32 },
    #[error(
        "it ends within {part}: that needs {needed} bytes and {left} are left; download it again"
    )]
    Truncated {
        part: String,
        needed: u64,
        left: u64,
    },
    #[error("{what}: {found} is above the limit of {limit}")]
    TooLarge {
        what: String,
        found: u64,
        limit: u64,
    },
    #[error(
        "{what} is not UTF-8; the file is damaged or was written by a faulty program; download or convert it again"
    )]
    NotUtf8 { what: String },
    #[error("its key `{key}`: {problem}")]
    Key { key: String, problem: String },
    #[error(
        "it has no key `{key}`; expected {expected}; convert the model again with a current llama.cpp"
    )]
    NoKey { key: String, expected: String },
    #[error("its tensor `{tensor}`: {problem}")]
    Tensor { tensor: String, problem: String },
    #[error(
        "its tensor `{tensor}` has the type {found}, which is not read; use a file whose tensors have one of the types {}",
        names_read()
    )]
    Format { tensor: String, found: String },
    #[error("{problem}")]
    Split { problem: String },
    #[error("its architecture `{found}` is not read; expected one of {known}")]
    Architecture { found: String, known: String },
    #[error("{problem}")]
    Unsupported { problem: String },
    #[error("its tokenizer: {problem}")]
    Tokenizer { problem: String },
    #[error("no memory for {bytes} bytes of the tensor `{tensor}`")]
    Memory { tensor: String, bytes: u64 },
}

pub(super) type Result<T, E = GgufProblem> = std::result::Result<T, E>;

pub(super) fn wrong_key(key: &str, problem: impl Into<String>) -> GgufProblem {
    GgufProblem::Key {
        key: shown(key),
        problem: problem.into(),
    }
}

pub(super) fn wrong_tensor(tensor: &str, problem: impl Into<String>) -> GgufProblem {
    GgufProblem::Tensor {
        tensor: shown(tensor),
        problem: problem.into(),
    }
}
