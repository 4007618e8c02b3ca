//! Tokenizers, and loading of tokenizer.json.

use std::{path::Path, sync::Arc};

use tokenizers::{
    EncodeInput, Encoding, InputSequence, ModelWrapper, NormalizerWrapper, PostProcessorWrapper,
    Tokenizer, TruncationDirection, TruncationParams,
    normalizers::{Lowercase, Sequence},
};

use crate::text::{
    Folder, TextError, contain::contain, folder::TokenizerSettings, sentencepiece::SentencePiece,
    word_cache::WordCache,
};

/// Side on which a text that is too long is truncated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutSide {
    Left,
    Right,
}

/// Tokenizer loaded from tokenizer.json or from a SentencePiece model. A tokenizer from tokenizer.json has a cache of words if
/// [`WordCache::of`] creates one.
#[derive(Clone)]
pub(super) enum Coder {
    Json(Box<Tokenizer>, Option<Arc<WordCache>>),
    SentencePiece(Box<SentencePiece>),
}

impl Coder {
    pub(super) fn encode(
        &self,
        input: EncodeInput<'_>,
        adds_special: bool,
    ) -> tokenizers::Result<Encoding> {
        match self {
            Self::Json(tokenizer, _) => tokenizer.encode(input, adds_special),
            Self::SentencePiece(pieces) => {
                one_text(input).map(|text| pieces.encode(&text, adds_special))
            }
        }
    }

    /// Returns the token ids and the overflow (the tokens that were cut off), like `encode`. Token names and offsets may be missing.
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
            Self::SentencePiece(pieces) => Ok(pieces.decode(ids, skips_special)?),
        }
    }

    /// Returns a copy that truncates texts on the given side.
    pub(super) fn cutting(&self, side: CutSide) -> Self {
        let mut coder = self.clone();
        match &mut coder {
            Self::Json(tokenizer, _) => {
                let limit = tokenizer.get_truncation().cloned();
                let limit = limit.map(|limit| TruncationParams {
                    direction: side.direction(),
                    ..limit
                });
                // Cannot fail, since the tokenizer accepted the same limit before.
                drop(tokenizer.with_truncation(limit));
            }
            Self::SentencePiece(pieces) => pieces.cut_front(side == CutSide::Left),
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

/// Returns the side on which a folder's tokenizer truncates texts.
pub(super) fn cut_side(folder: &Folder) -> Result<CutSide, TextError> {
    Ok(match folder.cuts_the_front()? {
        true => CutSide::Left,
        false => CutSide::Right,
    })
}

/// Returns the text of an input, or an error if the input is a pair of texts.
fn one_text(input: EncodeInput<'_>) -> tokenizers::Result<String> {
    match input {
        EncodeInput::Single(InputSequence::Raw(text)) => Ok(text.into_owned()),
        _ => Err("the tokenizer is a SentencePiece model for translation, which does not take pairs of texts; give one text".into()),
    }
}

/// Creates a tokenizer from a tokenizer.json, given by its path and its contents. The folder's settings take precedence over the file.
/// `positions` is the model's maximum number of tokens. If `cuts` is false, the tokenizer never truncates.
///
/// # Errors
/// Returns an error if the file is not a tokenizer (including a file on which the tokenizers crate panics), or if settings do not apply to
/// it.
pub(super) fn loaded(
    folder: &Folder,
    (file, json): (&Path, &str),
    settings: &TokenizerSettings,
    positions: Option<u32>,
    cuts: bool,
) -> Result<Tokenizer, TextError> {
    let broken = |problem: String| TextError::Tokenizer {
        file: file.to_owned(),
        problem,
    };
    // The tokenizers crate panics on some invalid settings when they are parsed or applied.
    let panicked = |panic: String| broken(format!("the tokenizers crate panics on it: {panic}"));
    let limit = match cuts {
        true => folder.limit(positions)?,
        false => None,
    };
    let direction = cut_side(folder)?.direction();
    let parsed = contain(|| Tokenizer::from_bytes(json)).map_err(panicked)?;
    let mut tokenizer = parsed.map_err(|e| broken(e.to_string()))?;
    if let ModelWrapper::BPE(model) = tokenizer.get_model()
        && let Some(dropout) = model.dropout.filter(|&dropout| dropout > 0.0)
    {
        return Err(broken(format!(
            "`dropout` of the model is {dropout}, which makes the tokens of a text random; expected null"
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
        settings.apply(&mut tokenizer)?;
        if !folder.adds_special() {
            tokenizer.with_post_processor(None::<PostProcessorWrapper>);
        }
        Ok::<(), TextError>(())
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
