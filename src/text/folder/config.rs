//! config.json, and the keys of config_sentence_transformers.json.

use std::path::Path;

use serde_json::{Value, json};

use super::{Folder, json::Json, late};
use crate::{
    files::{self, Kind},
    model::MAX_CONTEXT,
    runtime::weights::{CheckpointError, Found, ModelFiles, static_dims},
    text::TextError,
};

/// `model_type` of the descriptions of static and sparse static embeddings.
pub(super) const STATIC_TYPE: &str = "static_embedding";
pub(super) const SPARSE_STATIC_TYPE: &str = "sparse_static_embedding";

/// Reads a `config.json`.
pub fn config(file: &Path) -> Result<Value, TextError> {
    parsed(file, &files::text(file, Kind::Config)?)
}

/// Writes `tokens`, the maximum number of tokens of a sequence, into the contents of a config.json. `None` leaves the contents unchanged.
pub fn limit_context(config: &mut Value, tokens: Option<u32>) {
    if let (Some(keys), Some(tokens)) = (config.as_object_mut(), tokens) {
        keys.insert(MAX_CONTEXT.to_owned(), tokens.into());
    }
}

impl Folder {
    /// Limits sequences to a number of tokens, if one is given; see [`MAX_CONTEXT`].
    pub fn with_max_context(mut self, tokens: Option<u32>) -> Self {
        if let Some(config) = &mut self.config {
            limit_context(config, tokens);
        }
        self
    }
}

/// Parses the text of a `config.json`.
pub(super) fn parsed(file: &Path, text: &str) -> Result<Value, TextError> {
    serde_json::from_str(text).map_err(|e| TextError::Config {
        file: file.to_owned(),
        problem: e.to_string(),
    })
}

/// Builds the config.json of a static embedding, whose folder has none, from the sizes of its weights. `model_type` selects the
/// description. Returns `None` for a folder without weights, such as the folder of a compiled model.
pub(super) fn static_config(
    trunk: &ModelFiles,
    model_type: &str,
) -> Result<Option<Value>, TextError> {
    let [tokens, width] = match static_dims(trunk) {
        Ok(dims) => dims,
        Err(CheckpointError::NoCheckpoint { .. }) => return Ok(None),
        Err(error) => return Err(TextError::Weights(Box::new(error))),
    };
    Ok(Some(json!({
        "model_type": model_type, "vocab_size": tokens, "hidden_size": width,
    })))
}

/// Returns the error for a folder without config.json. The error names the weights found instead.
pub(in crate::text) fn no_config(folder: &Path) -> TextError {
    let file = folder.join("config.json");
    match Found::in_folder(folder) {
        Found::Nothing => match config(&file) {
            Err(error) => error,
            // The file was written after the folder was listed.
            Ok(_) => TextError::Folder {
                file,
                problem: "the file was just written; try again".to_owned(),
            },
        },
        found => TextError::Folder {
            file: folder.to_owned(),
            problem: format!(
                "there is no config.json; expected a checkpoint folder as published on the Hugging Face hub. It has {found}"
            ),
        },
    }
}

/// Checks the keys of `config_sentence_transformers.json`.
pub(super) fn check_own(own: &Json) -> Result<(), TextError> {
    const KEYS: [&str; 10] = [
        "__version__",
        "activation_fn",
        "default_prompt_name",
        "keep_in_fp32_modules",
        "max_active_dims",
        "model_type",
        "prompts",
        "requirements",
        "similarity_fn_name",
        "truncate_dim",
    ];
    own.check_keys(&[&KEYS[..], &late::KEYS].concat())?;
    match own.get("max_active_dims") {
        Some(_) => Err(own.wrong("max_active_dims", "null, as gemmule keeps all weights")),
        None => Ok(()),
    }
}
