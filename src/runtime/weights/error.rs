//! Errors of reading weights.

use std::path::PathBuf;

use gemmule_weights::{gguf::GgufError, quantized::QuantizedError, torch::TorchError};

use super::found::{Found, INDEX, SINGLE, TORCH_INDEX, TORCH_SINGLE};
use crate::{files::ReadError, names::nearest};

#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("`{}`: the adapters of `{tensor}` cannot be read: {problem}", .file.display())]
    Adapters {
        file: PathBuf,
        tensor: String,
        problem: String,
    },
    #[error(
        "`{folder}` contains none of `{SINGLE}`, `{INDEX}`, `{TORCH_SINGLE}` and `{TORCH_INDEX}`; expected a checkpoint folder as published on the Hugging Face hub. It has {found}"
    )]
    NoCheckpoint { folder: PathBuf, found: Found },
    #[error("`{file}` cannot be read")]
    Io {
        file: PathBuf,
        source: std::io::Error,
    },
    #[error("`{file}` is not a complete safetensors file: {problem}; download it again")]
    NotSafetensors { file: PathBuf, problem: String },
    #[error(
        "`{file}` is not an index of shards: {problem}; expected an object with a `weight_map`"
    )]
    Index { file: PathBuf, problem: String },
    #[error(transparent)]
    File(ReadError),
    #[error(
        "`{index}` says that the tensor `{tensor}` is in `{shard}`, which lacks it; download both again"
    )]
    NotInShard {
        index: PathBuf,
        shard: String,
        tensor: String,
    },
    #[error(
        "`{file}`: the tensor `{tensor}` ended early; was it changed while being read? Load it again"
    )]
    EndedEarly { file: PathBuf, tensor: String },
    #[error(
        "out of memory for the tensor `{tensor}`, which takes {bytes} bytes; are its sizes right? Free memory, or use a smaller model"
    )]
    OutOfMemory { tensor: String, bytes: u64 },
    #[error(
        "values computed from the norm with `{tensor}` have no finite bound, so they have no scale in fp8; check the weights, or disable the pass `quantize_inputs`"
    )]
    NoBound { tensor: String },
    #[error(
        "`{index}` names the shard `{shard}`, which is not in the same folder; download the shard too"
    )]
    MissingShard { index: PathBuf, shard: String },
    #[error(
        "`{file}` lacks {n_missing} of the {n_needed} tensors that the model needs: {list}; is it a checkpoint of this model, with its own config.json?"
    )]
    Missing {
        file: PathBuf,
        n_missing: usize,
        n_needed: usize,
        list: String,
    },
    #[error(
        "`{file}` has the tensors `{read}` and `{other}`, which are two names of one tensor of the model, with different values; remove one of them"
    )]
    TwoTensors {
        file: PathBuf,
        read: String,
        other: String,
    },
    #[error("`{file}` cannot be read as weights of PyTorch: {problem}")]
    Torch { file: PathBuf, problem: TorchError },
    #[error("`{file}`: {problem}")]
    Quantized {
        file: PathBuf,
        problem: QuantizedError,
    },
    #[error(
        "`{file}`: the tensor `{tensor}` is quantized as the weight of a linear layer, but this model stores it transposed (`Conv1D` in transformers), which is not read; use a checkpoint in which it is not quantized"
    )]
    QuantizedTranspose { file: PathBuf, tensor: String },
    #[error(
        "`{file}`: the tensor `{tensor}` has the scale {scale}, which f16 cannot hold, but 4-bit kernels have scales in f16; dequantize the checkpoint (`--dequantize`)"
    )]
    ScaleRange {
        file: PathBuf,
        tensor: String,
        scale: f32,
    },
    #[error(
        "the checkpoint has scales for a KV cache in fp8, but none for the rows that `{linear}` computes; expected one of {}. Use the cache in the type of the activations (`--kv-dtype auto`), or a checkpoint with the scales of all layers",
        quoted(expected)
    )]
    NoCacheScale {
        linear: String,
        expected: Vec<String>,
    },
    #[error(
        "the columns of `{tensor}` cannot be sorted by group, but the program was compiled for sorted columns; compile it for this checkpoint"
    )]
    NoOrder { tensor: String },
    #[error("`{file}`: {problem}, as in a static embedding of model2vec; download it again")]
    StaticTable { file: PathBuf, problem: String },
    #[error("`{file}` is not JSON: {problem}; use the published file")]
    Config { file: PathBuf, problem: String },
    #[error(
        "`{file}`: the tensor `{tensor}` is {found:?}, but the model needs {expected:?}; does the config.json belong to this checkpoint?"
    )]
    Shape {
        file: PathBuf,
        tensor: String,
        expected: Vec<u64>,
        found: Vec<u64>,
    },
    #[error(
        "`{file}`: the tensor `{tensor}` is stored as {found}, expected F32, F16 or BF16; convert the checkpoint"
    )]
    DType {
        file: PathBuf,
        tensor: String,
        found: String,
    },
}

impl From<ReadError> for CheckpointError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Io { file, source } => Self::Io { file, source },
            ReadError::TooLarge { .. } | ReadError::Gguf(_) | ReadError::SeveralGguf { .. } => {
                Self::File(error)
            }
        }
    }
}

impl From<GgufError> for CheckpointError {
    fn from(error: GgufError) -> Self {
        Self::File(error.into())
    }
}

/// Lists names in backticks.
fn quoted(names: &[String]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

impl CheckpointError {
    /// Returns the error for a `file` that lacks the tensors `names`, out of `n_needed` tensors that the model needs. `known` are the names
    /// of the tensors in the file. For a missing name, the error suggests the nearest name in `known`.
    pub(super) fn missing<'n>(
        file: PathBuf,
        names: &[&str],
        n_needed: usize,
        known: impl Iterator<Item = &'n str> + Clone,
    ) -> Self {
        const SHOWN: usize = 5;
        let shown = names.iter().take(SHOWN);
        let mut list: Vec<String> = shown
            .map(|name| match nearest(name, known.clone()) {
                Some(near) => format!("`{name}` (the nearest name there is `{near}`)"),
                None => format!("`{name}`"),
            })
            .collect();
        if names.len() > SHOWN {
            list.push(format!("and {} more", names.len() - SHOWN));
        }
        Self::Missing {
            file,
            n_missing: names.len(),
            n_needed,
            list: list.join(", "),
        }
    }
}
