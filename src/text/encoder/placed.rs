//! Tokens with their positions in a text, for heads that label tokens or find spans.

use tokenizers::{Decoder as _, EncodeInput, Encoding, ModelWrapper};

use super::{Coder, Encoded, TextEncoder};
use crate::text::TextError;

/// Max size in bytes of a text that is tokenized with positions. The tokenizers crate uses about 300 bytes of memory for each byte of text.
const MAX_PLACED: usize = 64 << 10;

/// Default overlap of consecutive parts of a text, in tokens.
const STRIDE: usize = 128;

/// A token with its position in the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedToken {
    pub id: u32,
    /// Name of the token in the vocabulary.
    pub name: String,
    /// Range of the token's text in characters; empty for an added token.
    pub start: usize,
    pub end: usize,
    /// Index of the token's text in the input: 0, or 1 for the second text of a pair; `None` for an added token.
    pub part: Option<usize>,
    /// Index of the word in the text.
    pub word: Option<u32>,
}

/// A sequence of tokens with their positions in the texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    pub encoded: Encoded,
    pub tokens: Vec<PlacedToken>,
}

impl Placed {
    /// Max number of parts into which [`TextEncoder::place_parts`] divides a text.
    pub const MAX_PARTS: usize = 256;
}

/// The tokens of an encoding, with their segment ids.
struct Tokens(Vec<(PlacedToken, u32)>);

impl Tokens {
    fn of(encoding: &Encoding) -> Self {
        let parts = encoding.get_sequence_ids();
        let special = encoding.get_special_tokens_mask();
        let tokens = encoding.get_ids().iter().enumerate().map(|(at, &id)| {
            let (start, end) = encoding.get_offsets()[at];
            let token = PlacedToken {
                id,
                name: encoding.get_tokens()[at].clone(),
                start,
                end,
                part: parts[at].filter(|_| special[at] == 0),
                word: encoding.get_word_ids()[at],
            };
            (token, encoding.get_type_ids()[at])
        });
        Self(tokens.collect())
    }

    /// Splits the tokens of a pair into those before, in and after the text `part`. If the text has no tokens, the split is before the last
    /// added token.
    fn split(self, part: usize) -> [Vec<(PlacedToken, u32)>; 3] {
        let is_own = |token: &(PlacedToken, u32)| token.0.part == Some(part);
        let all = self.0;
        let first = all.iter().position(is_own);
        let first = first.unwrap_or_else(|| {
            let before = all.iter().rposition(|token| token.0.part.is_some());
            // Before the last added token.
            before
                .map_or(0, |at| at + 1)
                .max(all.len().saturating_sub(1))
        });
        let end = all.iter().rposition(is_own).map_or(first, |at| at + 1);
        let mut before = all;
        let mut own = before.split_off(first);
        let after = own.split_off(end - first);
        [before, own, after]
    }
}

impl TextEncoder {
    /// Tokenizes a text like [`encode_one`](Self::encode_one) without a prompt, and keeps the positions of tokens.
    ///
    /// # Errors
    /// Returns an error if the text is empty or exceeds 64 KiB, if the tokenizer refuses it or panics on it, or if the tokenizer is a
    /// SentencePiece model without tokenizer.json, which does not report the positions of tokens.
    pub fn place(&self, index: usize, text: &str) -> Result<Placed, TextError> {
        check_length(index, text)?;
        let encoding = self.placed_encoding(index, EncodeInput::from(text), &self.tokenizer)?;
        let is_cut = !encoding.get_overflowing().is_empty();
        Ok(self.placed(Tokens::of(&encoding).0, is_cut))
    }

    /// Tokenizes a question with each part of a text. A question and a part together have at most `max_tokens` tokens. Consecutive parts
    /// share `stride` tokens, by default 128 or half of `max_tokens`, whichever is less.
    ///
    /// # Errors
    /// Returns the errors of [`place`](Self::place), and an error if the model does not read pairs, if the question leaves no room for a
    /// text, if `stride` is not less than the number of tokens of a part, or if there are too many parts.
    pub fn place_parts(
        &self,
        question: &str,
        text: &str,
        max_tokens: usize,
        stride: Option<usize>,
    ) -> Result<Vec<Placed>, TextError> {
        let [before, own, after] = self.placed_pair(question, text)?.split(1);
        let room = max_tokens.saturating_sub(before.len() + after.len());
        let added = before.len() + after.len();
        let wrong = |problem: String| Err(TextError::Text { index: 0, problem });
        if room == 0 {
            return wrong(format!(
                "the question and the special tokens have {added} tokens, which leaves no room for a part of the text within {max_tokens} tokens; shorten the question"
            ));
        }
        if let Some(stride) = stride.filter(|&stride| stride >= room && room < own.len()) {
            return wrong(format!(
                "parts of its text have {room} tokens beside the question, and share {stride}; lower the stride, or shorten the question"
            ));
        }
        let stride = stride.unwrap_or(STRIDE.min(max_tokens / 2)).min(room - 1);
        let step = room - stride;
        let n_parts = 1 + own.len().saturating_sub(room).div_ceil(step);
        if n_parts > Placed::MAX_PARTS {
            return wrong(format!(
                "its text has {n_parts} parts of {room} tokens, which share {stride}; expected at most {}, so shorten the text, or lower the stride",
                Placed::MAX_PARTS
            ));
        }
        let mut parts = Vec::new();
        let mut from = 0;
        loop {
            let until = (from + room).min(own.len());
            let tokens = [&before, &own[from..until], &after].concat();
            parts.push(self.placed(tokens, false));
            if until == own.len() {
                return Ok(parts);
            }
            from += step;
        }
    }

    /// Tokenizes a pair of texts. If it is too long, the end of the first text is truncated.
    ///
    /// # Errors
    /// Returns the errors of [`place`](Self::place), and an error if the model does not read pairs, or if the second text alone is too
    /// long.
    pub fn pair_cutting_first(&self, first: &str, second: &str) -> Result<Encoded, TextError> {
        let [before, mut own, after] = self.placed_pair(first, second)?.split(0);
        let mut is_cut = false;
        if let Some(limit) = self.max_tokens() {
            let added = before.len() + after.len();
            let room = limit.saturating_sub(added);
            is_cut = own.len() > room;
            if is_cut && room == 0 {
                return Err(TextError::Text {
                    index: 0,
                    problem: format!(
                        "the second text of the pair and the special tokens have {added} tokens, which leaves no room for the first text within {limit} tokens; shorten the second text"
                    ),
                });
            }
            own.truncate(room);
        }
        let tokens = [before, own, after].concat();
        Ok(self.placed(tokens, is_cut).encoded)
    }

    /// Returns the text of tokens, given by their names. Unlike [`decode`](Self::decode), it does not remove spaces before punctuation.
    ///
    /// # Errors
    /// Returns an error if the tokenizer refuses the tokens or panics on them.
    pub fn join(&self, names: Vec<String>) -> Result<String, TextError> {
        let Coder::Json(tokenizer, _) = &self.tokenizer else {
            return Ok(names.concat().replace('▁', " ").trim().to_owned());
        };
        let Some(decoder) = tokenizer.get_decoder() else {
            return Ok(names.join(" "));
        };
        let joined = crate::text::contain::contain(|| decoder.decode(names));
        let broken = |problem: String| TextError::Tokenizer {
            file: self.file.clone(),
            problem,
        };
        joined
            .map_err(|panic| broken(format!("the tokenizers crate panics on tokens: {panic}")))?
            .map_err(|e| broken(e.to_string()))
    }

    /// Returns whether the vocabulary marks tokens that continue a word, as WordPiece does.
    pub fn marks_continuations(&self) -> bool {
        match &self.tokenizer {
            Coder::Json(tokenizer, _) => match tokenizer.get_model() {
                ModelWrapper::WordPiece(model) => !model.continuing_subword_prefix.is_empty(),
                ModelWrapper::BPE(model) => {
                    let prefix = model.continuing_subword_prefix.as_deref();
                    prefix.is_some_and(|prefix| !prefix.is_empty())
                }
                ModelWrapper::WordLevel(_) | ModelWrapper::Unigram(_) => false,
            },
            Coder::SentencePiece(_) => false,
        }
    }

    /// Returns the id of the token that `tokenizer_config.json` assigns to `name`, such as `mask_token`.
    ///
    /// # Errors
    /// Returns an error if `tokenizer_config.json` is not JSON.
    pub fn named_token(&self, name: &str) -> Result<Option<u32>, TextError> {
        let tokens = self.folder.special_tokens(&[name])?;
        Ok(tokens.first().and_then(|token| self.token_id(token)))
    }

    fn placed_pair(&self, first: &str, second: &str) -> Result<Tokens, TextError> {
        for (index, text) in [first, second].into_iter().enumerate() {
            check_length(index, text)?;
        }
        if self.writes || self.conversation.is_some() {
            return Err(TextError::Folder {
                file: self.folder.trunk().join("config.json"),
                problem: "the model does not read pairs of texts".to_owned(),
            });
        }
        let input = EncodeInput::from((first, second));
        let encoding = self.placed_encoding(0, input, self.unlimited())?;
        Ok(Tokens::of(&encoding))
    }

    fn placed_encoding(
        &self,
        index: usize,
        input: EncodeInput<'_>,
        coder: &Coder,
    ) -> Result<Encoding, TextError> {
        let Coder::Json(tokenizer, _) = coder else {
            return Err(TextError::PublishedTokenizer {
                file: self.file.clone(),
                problem: "heads that label tokens need a tokenizer.json, which reports the positions of tokens"
                    .to_owned(),
            });
        };
        self.contained(index, || tokenizer.encode_char_offsets(input, true))
    }

    fn placed(&self, tokens: Vec<(PlacedToken, u32)>, is_cut: bool) -> Placed {
        let has_types = self.has_segments && tokens.iter().any(|(_, of)| *of != 0);
        Placed {
            encoded: Encoded {
                ids: tokens.iter().map(|(token, _)| token.id).collect(),
                types: has_types.then(|| tokens.iter().map(|(_, of)| *of).collect()),
                is_cut,
                attended: None,
                left_out: 0,
            },
            tokens: tokens.into_iter().map(|(token, _)| token).collect(),
        }
    }
}

fn check_length(index: usize, text: &str) -> Result<(), TextError> {
    let bytes = text.len();
    match bytes {
        0 => Err(TextError::Text {
            index,
            problem: "it is empty; expected at least one character".to_owned(),
        }),
        _ if bytes > MAX_PLACED => Err(TextError::Text {
            index,
            problem: format!("it has {bytes} bytes; expected at most {MAX_PLACED}, so split it"),
        }),
        _ => Ok(()),
    }
}
