//! Texts and tokens: checkpoint folders, tokenizers, chat templates, and decoding of generated tokens.

mod chat;
mod contain;
mod conversation;
mod encoder;
mod error;
mod folder;
mod sentencepiece;
mod stream_decoder;
mod word_cache;

pub use chat::{ChatOptions, ChatTemplate, Json, Message, Tool};
pub use contain::panics_are_contained;
pub use encoder::{CutSide, Encoded, Input, TextEncoder, TextToken};
pub use error::TextError;
pub use folder::{ClassScore, Folder, Prompt, Score, config};
pub use stream_decoder::StreamDecoder;
