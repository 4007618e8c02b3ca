use std::path::PathBuf;

use thiserror::Error;

use crate::{
    files::ReadError,
    model::ModelError,
    runtime::{batch::BatchError, weights::CheckpointError},
};

/// An error in a checkpoint folder, a tokenizer, a chat template or a text.
#[derive(Debug, Error)]
#[cfg_attr(feature = "miette", derive(miette::Diagnostic))]
#[non_exhaustive]
pub enum TextError {
    #[error("`{file}` is not JSON: {problem}; expected the config.json of a checkpoint")]
    Config { file: PathBuf, problem: String },
    #[error("`{file}` has no usable chat template: {problem}")]
    ChatTemplate { file: PathBuf, problem: String },
    /// The chat template cannot render a conversation, or one of its options is invalid. `param` names the parameter.
    #[error("{problem}")]
    Conversation {
        param: &'static str,
        problem: String,
    },
    #[error("`{file}` is not a tokenizer: {problem}; expected the tokenizer.json of a checkpoint")]
    Tokenizer { file: PathBuf, problem: String },
    #[error(
        "there is no folder `{folder}`; expected a checkpoint folder with config.json, tokenizer.json and weights"
    )]
    NoFolder { folder: PathBuf },
    #[error(
        "`{folder}` has no tokenizer.json{}",
        match found {
            None => "; expected one, or a SentencePiece model with the vocab.json of its ids: source.spm, or sentencepiece.bpe.model".to_owned(),
            Some(found) => format!(", and `{found}` is not supported on its own; create a tokenizer.json in Python: transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"),
        }
    )]
    NoTokenizer {
        folder: PathBuf,
        /// Name of a tokenizer file in an unsupported format, if the folder has one.
        found: Option<&'static str>,
    },
    /// A tokenizer file other than tokenizer.json.
    #[error("no tokenizer can be loaded from `{file}`: {problem}")]
    PublishedTokenizer { file: PathBuf, problem: String },
    /// Weights that determine the model's structure could not be read: the table of a static embedding, whose sizes are in no config.json,
    /// or the layer weights of a WeightedLayerPooling.
    #[error(transparent)]
    Weights(Box<CheckpointError>),
    #[error("`{}`: {problem}", .file.display())]
    Folder { file: PathBuf, problem: String },
    #[error(
        "there is no prompt `{name}`{}; the folder has {known}",
        near.as_ref().map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default()
    )]
    NoPrompt {
        name: String,
        near: Option<String>,
        known: String,
    },
    #[error(
        "texts for `{name}` have the route `{route}` in the Router of `{}`, and the route `{loaded}` is loaded; load the model for the task `{name}` (in Rust `Builder::task`, on the command line --role or --task)",
        .folder.display()
    )]
    OtherRoute {
        folder: PathBuf,
        name: String,
        route: String,
        loaded: String,
    },
    #[error(
        "the Router of `{}` has no route for the task `{task}`{}; its routes are {routes}",
        .folder.display(),
        near.as_ref().map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default()
    )]
    NoRoute {
        folder: PathBuf,
        task: String,
        near: Option<String>,
        routes: String,
    },
    #[error(
        "the checkpoint `{}` has no adapter for the task `{task}`{}; its adapters are {adapters}",
        .folder.display(),
        near.as_ref().map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default()
    )]
    NoAdapter {
        folder: PathBuf,
        task: String,
        near: Option<String>,
        adapters: String,
    },
    #[error(
        "the task `{task}` was given, and `{}` computes all tasks in the same way; leave the task out",
        .folder.display()
    )]
    NoTasks { folder: PathBuf, task: String },
    #[error(
        "late chunking pools the tokens of each chunk by their mean, and the model of `{}` {problem}; embed the texts separately",
        .folder.display()
    )]
    LateChunking { folder: PathBuf, problem: String },
    #[error(
        "late chunking processes all chunks as one text, but together they have more than {limit} tokens, the model's maximum; give fewer or shorter chunks"
    )]
    LongChunks { limit: usize },
    #[error(
        "text {index}: pooling leaves out the {left_out} tokens of the prompt, but the prompt and the text together have only {tokens} tokens, so none remains; shorten the prompt"
    )]
    OnlyPrompt {
        index: usize,
        left_out: usize,
        tokens: usize,
    },
    #[error(
        "the {side} language `{name}` is unknown to the model's tokenizer{}",
        match near.as_slice() {
            [] => ", which has no languages; leave it out".to_owned(),
            near => format!("; the nearest of its languages: {}", near.join(", ")),
        }
    )]
    NoLanguage {
        side: LanguageSide,
        name: String,
        /// The languages with the most similar names; empty if the tokenizer has no languages.
        near: Vec<String>,
    },
    #[error(
        "the prefix of a translation has the token `{token}`, which the tokenizer lacks; expected a token as written in the checkpoint's files"
    )]
    NoPrefixToken { token: String },
    #[error(
        "the prefix of a translation, `{text}`, has characters or words that the tokenizer does not know; leave them out"
    )]
    UnknownPrefix { text: String },
    #[error(
        "the prefix of a translation begins with the token of the language {found}, and the target language is {expected}; leave one of them out"
    )]
    PrefixLanguage { found: String, expected: String },
    #[error("text {index} cannot be tokenized: {problem}")]
    Text { index: usize, problem: String },
    #[error(
        "text {index} cannot be tokenized: `{file}` makes the tokenizers crate panic: {problem}; expected the tokenizer.json of a checkpoint"
    )]
    TokenizerPanic {
        file: PathBuf,
        index: usize,
        problem: String,
    },
    #[error("`{file}` cannot be read")]
    Read {
        file: PathBuf,
        source: std::io::Error,
    },
    #[error(transparent)]
    File(ReadError),
    #[error(transparent)]
    #[cfg_attr(feature = "miette", diagnostic(transparent))]
    Model(Box<ModelError>),
    #[error(transparent)]
    Batch(#[from] BatchError),
}

/// The language of a translation that an error is about: the source language or the target language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LanguageSide {
    Source,
    Target,
}

impl std::fmt::Display for LanguageSide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Target => "target",
        })
    }
}

impl TextError {
    /// Sets the index of the text in an error. Used for texts that are tokenized one by one.
    #[doc(hidden)]
    pub fn of_text(self, index: usize) -> Self {
        match self {
            Self::Text { problem, .. } => Self::Text { index, problem },
            Self::TokenizerPanic { file, problem, .. } => Self::TokenizerPanic {
                file,
                index,
                problem,
            },
            other => other,
        }
    }
}

impl From<ReadError> for TextError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Io { file, source } => Self::Read { file, source },
            ReadError::TooLarge { .. } | ReadError::Gguf(_) | ReadError::SeveralGguf { .. } => {
                Self::File(error)
            }
        }
    }
}

impl From<ModelError> for TextError {
    fn from(error: ModelError) -> Self {
        Self::Model(Box::new(error))
    }
}
