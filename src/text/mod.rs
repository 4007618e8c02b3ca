//! Texts and tokens: checkpoint folders, tokenizers, chat templates, and decoding of generated tokens.

mod chat;
mod contain;
mod conversation;
mod encoder;
mod error;
mod folder;
mod input;
mod languages;
mod sentencepiece;
mod stream_decoder;
mod word_cache;

pub use chat::{ChatOptions, ChatTemplate, Json, Message, Tool};
pub use contain::panics_are_contained;
pub use encoder::{
    Chunks, CutSide, Encoded, Placed, PlacedToken, TargetPrefix, TextEncoder, TextToken,
};
pub use error::{LanguageSide, TextError};
pub use folder::{
    ChunkPooling, ClassScore, Folder, LateInteraction, LateScore, Prompt, Score, TextRole, config,
    limit_context,
};
pub use input::Input;
pub use languages::LanguagePair;
pub use stream_decoder::StreamDecoder;
