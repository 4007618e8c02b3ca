use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

use super::{EngineError, contain::contain};
use crate::{
    files::{self, Kind},
    runtime::batch::Batch,
};

/// The tokenizer of a checkpoint.
pub struct TextEncoder {
    tokenizer: Tokenizer,
    /// For messages.
    file: PathBuf,
}

impl TextEncoder {
    /// Loads `tokenizer.json` from a checkpoint folder. Its truncation is kept, its padding is not:
    /// batches are packed.
    ///
    /// # Errors
    /// A file that is missing, too large, or no tokenizer, one on which the tokenizers crate panics included.
    pub fn open(folder: &Path) -> Result<Self, EngineError> {
        let file = folder.join("tokenizer.json");
        let broken = |problem: String| EngineError::Tokenizer {
            file: file.clone(),
            problem,
        };
        if !file.is_file() {
            return Err(broken("there is no such file".to_owned()));
        }
        let bytes = files::bytes(&file, Kind::Tokenizer)?;
        // The tokenizers crate takes some settings as they are and panics on them, here or later.
        let loaded = contain(|| {
            Tokenizer::from_bytes(&bytes).map(|mut tokenizer| {
                tokenizer.with_padding(None);
                tokenizer
            })
        });
        let tokenizer = loaded
            .map_err(|panic| broken(format!("the tokenizers crate panics on it: {panic}")))?
            .map_err(|e| broken(e.to_string()))?;
        Ok(Self { tokenizer, file })
    }

    /// Token ids and segment ids of texts. A text that the tokenizer cuts is warned about.
    pub fn encode<S: AsRef<str>>(&self, texts: &[S]) -> Result<Batch, EngineError> {
        let (mut ids, mut types, mut lens) = (Vec::new(), Vec::new(), Vec::new());
        for (index, text) in texts.iter().enumerate() {
            let encoding = contain(|| self.tokenizer.encode(text.as_ref(), true))
                .map_err(|problem| EngineError::TokenizerPanic {
                    file: self.file.clone(),
                    index,
                    problem,
                })?
                .map_err(|e| EngineError::Text {
                    index,
                    problem: e.to_string(),
                })?;
            if !encoding.get_overflowing().is_empty() {
                tracing::warn!(
                    "text {index} is cut to {} tokens, as tokenizer.json says",
                    encoding.len()
                );
            }
            ids.extend_from_slice(encoding.get_ids());
            types.extend_from_slice(encoding.get_type_ids());
            lens.push(encoding.len() as u32);
        }
        let batch = Batch::from_packed(ids, &lens)?;
        Ok(if types.iter().any(|&t| t != 0) {
            batch.with_type_ids(types)?
        } else {
            batch
        })
    }
}
