//! Late chunking: whether the vectors of parts of a text can be pooled from one run over the whole text.

use super::Folder;
use crate::{
    model::{Module, Pooling},
    text::TextError,
};

/// Operations that late chunking applies to the mean of a chunk's token vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkPooling {
    /// Whether vectors are scaled to norm 1.
    pub normalizes: bool,
    /// Number of leading values to keep; `None` for all. Vectors are truncated before they are scaled.
    pub width: Option<u32>,
}

impl Folder {
    /// Returns how the states of the tokens of a chunk become its vector.
    ///
    /// # Errors
    /// Returns an error if the folder specifies any pooling other than the mean of all tokens, or if a module after the pooling does more
    /// than scale or truncate vectors.
    pub fn chunk_pooling(&self) -> Result<ChunkPooling, TextError> {
        let refused = |problem: String| TextError::LateChunking {
            folder: self.root.path().to_owned(),
            problem,
        };
        if self.late.is_some() {
            return Err(refused("has a vector for each token already".to_owned()));
        }
        if self.messages.is_some() {
            return Err(refused("reads conversations".to_owned()));
        }
        let modules = self.modules().unwrap_or_default();
        let Some((first, modules)) = modules.split_first() else {
            let problem = "has no modules.json, which would specify the mean of tokens";
            return Err(refused(problem.to_owned()));
        };
        match first {
            Module::Pooling {
                modes,
                after_prompt: false,
                ..
            } if modes.as_slice() == [Pooling::Mean] => {}
            Module::Pooling {
                after_prompt: true, ..
            } => return Err(refused("leaves prompts out of pooling".to_owned())),
            Module::Pooling { folder, .. } => {
                let problem = format!("pools tokens in another way, in `{folder}`");
                return Err(refused(problem));
            }
            Module::WeightedLayers { .. }
            | Module::Dense { .. }
            | Module::LayerNorm { .. }
            | Module::Normalize { .. }
            | Module::NormalizeTokens { .. }
            | Module::Truncate { .. }
            | Module::Splade { .. }
            | Module::LogitScore { .. } => {
                return Err(refused(
                    "has another module than a Pooling after the transformer".to_owned(),
                ));
            }
        }
        let mut pooling = ChunkPooling {
            normalizes: false,
            width: None,
        };
        for module in modules {
            match module {
                Module::Normalize { .. } => pooling.normalizes = true,
                // Truncating a scaled vector changes its norm, so the vector must not be scaled yet.
                Module::Truncate { width } if !pooling.normalizes => pooling.width = Some(*width),
                Module::Truncate { .. } => {
                    return Err(refused(
                        "cuts vectors after scaling them (`truncate_dim`)".to_owned(),
                    ));
                }
                Module::Dense { folder, .. } | Module::LayerNorm { folder, .. } => {
                    return Err(refused(format!(
                        "has the module `{folder}` after the pooling"
                    )));
                }
                Module::Pooling { .. }
                | Module::WeightedLayers { .. }
                | Module::NormalizeTokens { .. }
                | Module::Splade { .. }
                | Module::LogitScore { .. } => {
                    return Err(refused("has more modules after the pooling".to_owned()));
                }
            }
        }
        Ok(pooling)
    }
}
