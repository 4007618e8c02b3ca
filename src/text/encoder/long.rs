//! Tokenization of long texts in pieces.
//!
//! The tokenizers crate uses about 300 bytes of memory for each byte of a text, so long texts are tokenized piece by piece. A text is split
//! only at a token boundary: the context around the split, tokenized as a whole, has the same tokens as its two halves.

use std::{convert::Infallible, ops::ControlFlow};

use tokenizers::{EncodeInput, Encoding};

use super::{Coder, CutSide, Encoded, TextEncoder, TextToken};
use crate::text::TextError;

/// Length in bytes above which a text is tokenized in pieces.
pub(super) const LONG: usize = 64 << 10;
/// Preferred length of a piece in bytes.
const PIECE: usize = 32 << 10;
/// Maximum length of a piece in bytes.
const MAX_PIECE: usize = 256 << 10;
/// Maximum length in bytes of a pair that is tokenized at once.
const MAX_PAIR: usize = 512 << 10;
/// Length in bytes of the context that is tokenized on each side of a split to check it.
const CONTEXT: usize = 128;
/// Max number of candidate splits to check on each side of the preferred length.
const MAX_TRIES: usize = 32;

/// Tokens that the tokenizer adds around every text.
#[derive(Default)]
struct Around {
    before: Vec<(u32, u32)>,
    after: Vec<(u32, u32)>,
    /// Segment id of the text's own tokens.
    type_id: u32,
}

impl Around {
    /// Finds the added tokens of an encoding; `None` if the encoding has no tokens of the text itself.
    fn of(encoding: &Encoding) -> Option<Self> {
        let content = content(encoding);
        let type_id = *encoding.get_type_ids().get(content.start)?;
        let all = encoding.get_ids().iter().zip(encoding.get_type_ids());
        let all: Vec<(u32, u32)> = all.map(|(&id, &type_id)| (id, type_id)).collect();
        (!content.is_empty()).then(|| Self {
            before: all[..content.start].to_vec(),
            after: all[content.end..].to_vec(),
            type_id,
        })
    }

    fn len(&self) -> usize {
        self.before.len() + self.after.len()
    }
}

/// Returns the range of the text's own tokens, between the added tokens.
fn content(encoding: &Encoding) -> std::ops::Range<usize> {
    let mask = encoding.get_special_tokens_mask();
    let start = mask.iter().take_while(|&&mark| mark != 0).count();
    let after = mask[start..].iter().rev().take_while(|&&mark| mark != 0);
    start..mask.len() - after.count()
}

/// Returns the nearest character boundary at or before a position.
fn boundary(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

/// Returns whether a token boundary is likely between these characters: at the end of a word or after punctuation.
fn may_part(before: char, after: char) -> bool {
    let is_mark = |c: char| !c.is_alphanumeric() && !c.is_whitespace();
    (after.is_whitespace() && !before.is_whitespace())
        || (is_mark(before) && after.is_alphanumeric())
}

/// Returns the length of the next piece of a text, in bytes. Returns `None` if the text is longer than [`MAX_PIECE`] and none of the
/// candidate splits in its first `MAX_PIECE` bytes is a token boundary.
fn next_piece<E>(
    text: &str,
    ids: &impl Fn(&str) -> Result<Vec<u32>, E>,
) -> Result<Option<usize>, E> {
    if text.len() <= PIECE + PIECE / 2 {
        return Ok(Some(text.len()));
    }
    let (least, preferred) = (boundary(text, PIECE / 2), boundary(text, PIECE));
    let longest = boundary(text, MAX_PIECE.min(text.len()));
    let candidate = |(at, after): (usize, char)| {
        let before = text[..at].chars().next_back()?;
        may_part(before, after).then_some(at)
    };
    let shorter = text[least..preferred].char_indices().rev();
    let shorter = shorter.map(|(at, c)| (least + at, c)).filter_map(candidate);
    let longer = text[preferred..longest].char_indices();
    let longer = longer
        .map(|(at, c)| (preferred + at, c))
        .filter_map(candidate);
    for at in shorter.take(MAX_TRIES).chain(longer.take(MAX_TRIES)) {
        let from = boundary(text, at.saturating_sub(CONTEXT));
        let to = boundary(text, (at + CONTEXT).min(text.len()));
        let halves = [ids(&text[from..at])?, ids(&text[at..to])?];
        if ids(&text[from..to])? == halves.concat() {
            return Ok(Some(at));
        }
    }
    Ok((text.len() <= MAX_PIECE).then_some(text.len()))
}

impl TextEncoder {
    /// Calls `each` with the pieces of a text, in order, until it returns `Break`.
    fn for_each_piece<'t>(
        &self,
        index: usize,
        text: &'t str,
        mut each: impl FnMut(&'t str) -> Result<ControlFlow<()>, TextError>,
    ) -> Result<(), TextError> {
        let ids = |text: &str| {
            let encode = || self.unlimited().encode_fast(EncodeInput::from(text), false);
            Ok::<_, TextError>(self.contained(index, encode)?.get_ids().to_vec())
        };
        let mut rest = text;
        loop {
            // SentencePiece models need the whole text.
            let length = match &self.tokenizer {
                Coder::Json(..) => next_piece(rest, &ids)?,
                Coder::SentencePiece(_) => (rest.len() <= MAX_PIECE).then_some(rest.len()),
            };
            let length = length.ok_or_else(|| TextError::Text {
                index,
                problem: format!(
                    "it has {} bytes, with no token boundary within {MAX_PIECE} consecutive bytes; shorten it or add spaces",
                    text.len()
                ),
            })?;
            let (piece, after) = rest.split_at(length);
            if each(piece)?.is_break() || after.is_empty() {
                return Ok(());
            }
            rest = after;
        }
    }

    /// Encodes a piece without truncating it.
    fn piece(&self, index: usize, piece: &str, adds_special: bool) -> Result<Encoding, TextError> {
        self.contained(index, || {
            self.unlimited()
                .encode_fast(EncodeInput::from(piece), adds_special)
        })
    }

    /// Tokenizes a long text, and truncates it on the given side to the tokenizer's limit.
    pub(super) fn long(
        &self,
        index: usize,
        text: &str,
        adds_special: bool,
        side: CutSide,
    ) -> Result<Encoded, TextError> {
        let (limit, cuts_front) = (self.max_tokens(), side == CutSide::Left);
        let mut around: Option<Around> = None;
        let mut kept: Vec<Vec<u32>> = Vec::new();
        let (mut n, mut first) = (0, None);
        let mut add = |piece: &str| {
            let encoding = self.piece(index, piece, adds_special)?;
            let ids = encoding.get_ids()[content(&encoding)].to_vec();
            if around.is_none() {
                around = Around::of(&encoding);
                first.get_or_insert(encoding);
            }
            n += ids.len();
            kept.push(ids);
            let around = around.as_ref().map_or(0, Around::len);
            let is_enough = limit.is_some_and(|limit| n + around > limit);
            Ok(if is_enough {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            })
        };
        match cuts_front {
            false => self.for_each_piece(index, text, add)?,
            true => {
                let mut pieces = Vec::new();
                self.for_each_piece(index, text, |piece| {
                    pieces.push(piece);
                    Ok(ControlFlow::Continue(()))
                })?;
                for piece in pieces.into_iter().rev() {
                    if add(piece)?.is_break() {
                        break;
                    }
                }
                kept.reverse();
            }
        }
        let Some(around) = around else {
            // The text itself has no tokens.
            let ids = first.map_or_else(Vec::new, |encoding| encoding.get_ids().to_vec());
            return Ok(Encoded {
                ids,
                ..Encoded::default()
            });
        };
        let mut content = kept.concat();
        let room = limit.map_or(usize::MAX, |limit| limit.saturating_sub(around.len()));
        let is_cut = content.len() > room;
        match (is_cut, cuts_front) {
            (false, _) => {}
            (true, false) => content.truncate(room),
            (true, true) => drop(content.drain(..content.len() - room)),
        }
        let content = content.into_iter().map(|id| (id, around.type_id));
        let all = around.before.into_iter().chain(content).chain(around.after);
        let (ids, types): (Vec<u32>, Vec<u32>) = all.unzip();
        let has_types = self.has_segments && types.iter().any(|&t| t != 0);
        Ok(Encoded {
            ids,
            types: has_types.then_some(types),
            is_cut,
            attended: None,
            left_out: 0,
        })
    }

    /// Tokenizes a pair of texts.
    pub(super) fn pair(
        &self,
        index: usize,
        first: String,
        second: &str,
        side: CutSide,
    ) -> Result<Encoded, TextError> {
        // If both texts are long, the truncation of each depends on the number of tokens of both, so they are tokenized whole.
        let (first, second) = match first.len() > LONG && second.len() > LONG {
            true => (first.as_str(), second),
            false => (
                self.needed(index, &first, side)?,
                self.needed(index, second, side)?,
            ),
        };
        let bytes = first.len() + second.len();
        if bytes > MAX_PAIR {
            return Err(TextError::Text {
                index,
                problem: format!(
                    "the pair has {bytes} bytes that must be tokenized at once; expected at most {MAX_PAIR}, so shorten the texts"
                ),
            });
        }
        let input = EncodeInput::from((first.to_owned(), second.to_owned()));
        let (encoding, is_cut) = self.encoding(index, input, true, side)?;
        Ok(self.with_types(&encoding, is_cut))
    }

    /// Returns the part of a text that can contribute tokens to a truncated pair. A long text is taken piece by piece, from its end if it
    /// is truncated on the left, until the pieces have more tokens than the limit.
    fn needed<'t>(&self, index: usize, text: &'t str, side: CutSide) -> Result<&'t str, TextError> {
        let Some(limit) = self.max_tokens().filter(|_| text.len() > LONG) else {
            return Ok(text);
        };
        let mut pieces = Vec::new();
        self.for_each_piece(index, text, |piece| {
            pieces.push(piece);
            Ok(ControlFlow::Continue(()))
        })?;
        let is_left = side == CutSide::Left;
        if is_left {
            pieces.reverse();
        }
        let (mut n, mut bytes) = (0, 0);
        for piece in pieces {
            n += self.piece(index, piece, false)?.len();
            bytes += piece.len();
            if n > limit {
                break;
            }
        }
        Ok(match is_left {
            false => &text[..bytes],
            true => &text[text.len() - bytes..],
        })
    }

    /// Tokenizes a prompt for a generator. Returns `None` for a prompt of more than `max_tokens` tokens, which is not tokenized to its end.
    ///
    /// # Errors
    /// Returns an error if the tokenizer refuses a text or panics on it, or if a long text cannot be split.
    pub fn prompt_within(
        &self,
        text: &str,
        adds_special: bool,
        max_tokens: usize,
    ) -> Result<Option<Vec<u32>>, TextError> {
        let mut ids = Vec::new();
        let mut around = None;
        let mut only = None;
        self.for_each_piece(0, text, |piece| {
            let encoding = self.piece(0, piece, adds_special)?;
            ids.extend_from_slice(&encoding.get_ids()[content(&encoding)]);
            if around.is_none() {
                around = Around::of(&encoding);
                only.get_or_insert(encoding);
            }
            Ok(match ids.len() > max_tokens {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            })
        })?;
        let all = match around {
            Some(around) => {
                let id = |(id, _)| id;
                let before = around.before.into_iter().map(id);
                let after = around.after.into_iter().map(id);
                before.chain(ids).chain(after).collect()
            }
            None => only.map_or_else(Vec::new, |encoding: Encoding| encoding.get_ids().to_vec()),
        };
        Ok((all.len() <= max_tokens).then_some(all))
    }

    /// Calls `each` with the tokens of a text of any length, in order, until it returns `Break`. Returns the value of the `Break`, if any.
    /// `adds_special` adds the tokenizer's special tokens. No prompt is added.
    ///
    /// # Errors
    /// Returns an error if the tokenizer refuses a text or panics on it, or if a long text cannot be split.
    pub fn for_each_token<B>(
        &self,
        text: &str,
        adds_special: bool,
        mut each: impl FnMut(TextToken) -> ControlFlow<B>,
    ) -> Result<Option<B>, TextError> {
        let (mut start, mut broke) = (0, None);
        let (mut is_first, mut n_after) = (true, 0);
        self.for_each_piece(0, text, |piece| {
            let encoding = self.contained(0, || {
                self.unlimited()
                    .encode(EncodeInput::from(piece), adds_special)
            })?;
            let is_last = start + piece.len() == text.len();
            let content = content(&encoding);
            let is_empty = content.is_empty();
            if !is_empty {
                n_after = encoding.len() - content.end;
            }
            let range = match (is_first, is_last) {
                (true, true) => 0..encoding.len(),
                // The tokens that are added before the text are returned with the first piece that has tokens.
                (_, false) if is_empty => 0..0,
                (true, false) => 0..content.end,
                (false, false) => content,
                (false, true) if is_empty => encoding.len() - n_after..encoding.len(),
                (false, true) => content.start..encoding.len(),
            };
            for at in range {
                if let ControlFlow::Break(value) = each(token(&encoding, at, piece, start)) {
                    broke = Some(value);
                    return Ok(ControlFlow::Break(()));
                }
            }
            is_first &= is_empty;
            start += piece.len();
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(broke)
    }

    /// Returns all tokens of a text; see [`for_each_token`](Self::for_each_token).
    ///
    /// # Errors
    /// Returns the errors of `for_each_token`.
    pub fn tokens(&self, text: &str, adds_special: bool) -> Result<Vec<TextToken>, TextError> {
        let mut tokens = Vec::new();
        self.for_each_token(text, adds_special, |token| {
            tokens.push(token);
            ControlFlow::<Infallible>::Continue(())
        })?;
        Ok(tokens)
    }
}

/// Returns the token at index `at` of the encoded `piece`. The piece begins at byte `start` of the text.
fn token(encoding: &Encoding, at: usize, piece: &str, start: usize) -> TextToken {
    let is_special = encoding.get_special_tokens_mask()[at] != 0;
    let span = encoding.get_offsets()[at];
    let written = (!is_special).then(|| piece.get(span.0..span.1)).flatten();
    TextToken {
        id: encoding.get_ids()[at],
        text: written.unwrap_or(&encoding.get_tokens()[at]).to_owned(),
        is_special,
        span: (!is_special).then_some((start + span.0, start + span.1)),
    }
}

#[cfg(test)]
mod tests;
