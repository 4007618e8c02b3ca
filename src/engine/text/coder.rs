//! Tokenizers of `tokenizer.json` and of SentencePiece models behind one interface.

use std::sync::Arc;

use tokenizers::{
    EncodeInput, Encoding, InputSequence, Tokenizer, TruncationDirection, TruncationParams,
};

use crate::engine::{EngineError, Folder, published::Published, words::Words};

/// Side on which a text that is too long loses tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutSide {
    Left,
    Right,
}

/// Tokenizer of either kind.
#[derive(Clone)]
pub(super) enum Coder {
    Json(Box<Tokenizer>, Option<Arc<Words>>),
    Pieces(Box<Published>),
}

impl Coder {
    pub(super) fn encode(
        &self,
        input: EncodeInput<'_>,
        adds_special: bool,
    ) -> tokenizers::Result<Encoding> {
        match self {
            Self::Json(tokenizer, _) => tokenizer.encode(input, adds_special),
            Self::Pieces(pieces) => one_text(input).map(|text| pieces.encode(&text, adds_special)),
        }
    }

    /// As `encode`, which tokens there are and what was cut off; their names and places are left out where that is faster.
    pub(super) fn encode_fast(
        &self,
        input: EncodeInput<'_>,
        adds_special: bool,
    ) -> tokenizers::Result<Encoding> {
        let Self::Json(tokenizer, words) = self else {
            return self.encode(input, adds_special);
        };
        let known = words
            .as_ref()
            .map(|w| w.encode(tokenizer, &input, adds_special));
        match known.transpose()?.flatten() {
            Some(encoding) => Ok(encoding),
            None => tokenizer.encode_fast(input, adds_special),
        }
    }

    pub(super) fn decode(&self, ids: &[u32], skips_special: bool) -> tokenizers::Result<String> {
        match self {
            Self::Json(tokenizer, _) => tokenizer.decode(ids, skips_special),
            Self::Pieces(pieces) => Ok(pieces.decode(ids, skips_special)?),
        }
    }

    /// A copy that cuts texts on the given side.
    pub(super) fn cutting(&self, side: CutSide) -> Self {
        let mut coder = self.clone();
        match &mut coder {
            Self::Json(tokenizer, _) => {
                let limit = tokenizer.get_truncation().cloned();
                let limit = limit.map(|limit| TruncationParams {
                    direction: side.direction(),
                    ..limit
                });
                // The tokenizer has accepted the same limit before.
                drop(tokenizer.with_truncation(limit));
            }
            Self::Pieces(pieces) => pieces.cut_front(side == CutSide::Left),
        }
        coder
    }
}

impl CutSide {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Left => Self::Right,
            Self::Right => Self::Left,
        }
    }

    pub(super) fn direction(self) -> TruncationDirection {
        match self {
            Self::Left => TruncationDirection::Left,
            Self::Right => TruncationDirection::Right,
        }
    }
}

/// Side on which the tokenizer of a folder cuts texts.
pub(super) fn cut_side(folder: &Folder) -> Result<CutSide, EngineError> {
    Ok(match folder.cuts_the_front()? {
        true => CutSide::Left,
        false => CutSide::Right,
    })
}

/// The text of an input that is one.
fn one_text(input: EncodeInput<'_>) -> tokenizers::Result<String> {
    match input {
        EncodeInput::Single(InputSequence::Raw(text)) => Ok(text.into_owned()),
        _ => Err("its tokenizer, a SentencePiece model for translation, takes no pairs of texts; give one text".into()),
    }
}
