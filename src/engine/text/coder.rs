//! What makes tokens of texts, and how a tokenizer.json is loaded.

use std::{path::Path, sync::Arc};

use tokenizers::{
    EncodeInput, Encoding, InputSequence, ModelWrapper, NormalizerWrapper, Tokenizer,
    TruncationDirection, TruncationParams,
    normalizers::{Lowercase, Sequence},
};

use crate::{
    engine::{
        EngineError, Folder, contain::contain, folder::TokenizerSettings, published::Published,
        words::Words,
    },
    files::{self, Kind},
};

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

/// Loads the tokenizer.json `file` of a folder, whose settings win over what the file says. `positions` are those that the model
/// has; texts are never cut unless `cuts`.
///
/// # Errors
/// A file that is too large or no tokenizer, one on which the tokenizers crate panics included, and settings that do not fit it.
pub(super) fn loaded(
    folder: &Folder,
    file: &Path,
    settings: &TokenizerSettings,
    positions: Option<u32>,
    cuts: bool,
) -> Result<Tokenizer, EngineError> {
    let broken = |problem: String| EngineError::Tokenizer {
        file: file.to_owned(),
        problem,
    };
    // The tokenizers crate takes some settings as they are and panics on them, here or later.
    let panicked = |panic: String| broken(format!("the tokenizers crate panics on it: {panic}"));
    let bytes = files::bytes(file, Kind::Tokenizer)?;
    let limit = match cuts {
        true => folder.limit(positions)?,
        false => None,
    };
    let direction = cut_side(folder)?.direction();
    let parsed = contain(|| Tokenizer::from_bytes(&bytes)).map_err(panicked)?;
    let mut tokenizer = parsed.map_err(|e| broken(e.to_string()))?;
    if let ModelWrapper::BPE(model) = tokenizer.get_model()
        && let Some(dropout) = model.dropout.filter(|&dropout| dropout > 0.0)
    {
        return Err(broken(format!(
            "`dropout` of its model is {dropout}, by which a text has other tokens each time; expected null"
        )));
    }
    let own = tokenizer.get_truncation().cloned();
    let truncation = match (limit, own) {
        (Some(max_length), _) => Some(TruncationParams {
            max_length,
            direction,
            ..TruncationParams::default()
        }),
        (None, own) => own.filter(|_| cuts),
    };
    let applied = contain(|| {
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|e| broken(e.to_string()))?;
        settings.apply(&mut tokenizer)
    });
    applied.map_err(panicked)??;
    let limited = contain(|| {
        tokenizer.with_truncation(truncation)?;
        if folder.lower_case {
            let own = tokenizer.get_normalizer().cloned();
            let lower = NormalizerWrapper::Lowercase(Lowercase);
            let both = [lower].into_iter().chain(own).collect();
            tokenizer.with_normalizer(Some(Sequence::new(both)))?;
        }
        tokenizers::Result::Ok(())
    });
    limited
        .map_err(panicked)?
        .map_err(|e| broken(e.to_string()))?;
    Ok(tokenizer)
}
