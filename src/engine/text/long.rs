//! Long texts, which are tokenized piece by piece.
//!
//! The tokenizers crate takes about 300 bytes of memory for each byte of a text. A piece ends where two tokens meet: the text
//! around the cut has the same tokens whole as in its two halves.

use std::{convert::Infallible, ops::ControlFlow};

use tokenizers::{EncodeInput, Encoding};

use super::{Coder, CutSide, Encoded, TextEncoder, TextToken};
use crate::engine::EngineError;

/// Length in bytes above which a text is tokenized in pieces.
pub(super) const LONG: usize = 64 << 10;
/// Length of a piece in bytes, where the text can be cut there.
const PIECE: usize = 32 << 10;
/// Maximum length of a piece in bytes.
const MAX_PIECE: usize = 256 << 10;
/// Maximum length in bytes of two texts that are tokenized together.
const MAX_PAIR: usize = 512 << 10;
/// Length of the text on each side of a cut that is tokenized to check it.
const CONTEXT: usize = 128;
/// Number of cuts that are checked on each side of the preferred length of a piece.
const MAX_TRIES: usize = 32;

/// Tokens that the tokenizer adds around every text.
#[derive(Default)]
struct Around {
    before: Vec<(u32, u32)>,
    after: Vec<(u32, u32)>,
    /// The type id of the tokens between them.
    type_id: u32,
}

impl Around {
    /// `None` where the encoding has no token of the text itself.
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

/// The range of tokens that are of the text, between those that the tokenizer adds.
fn content(encoding: &Encoding) -> std::ops::Range<usize> {
    let mask = encoding.get_special_tokens_mask();
    let start = mask.iter().take_while(|&&mark| mark != 0).count();
    let after = mask[start..].iter().rev().take_while(|&&mark| mark != 0);
    start..mask.len() - after.count()
}

/// The nearest character boundary at or before a position.
fn boundary(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

/// Whether a tokenizer may well have a boundary between these characters: a word ends, or follows punctuation.
fn may_part(before: char, after: char) -> bool {
    let is_mark = |c: char| !c.is_alphanumeric() && !c.is_whitespace();
    (after.is_whitespace() && !before.is_whitespace())
        || (is_mark(before) && after.is_alphanumeric())
}

/// Length of the next piece of a text; `None` where none is found that is short enough.
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
    /// Calls `each` with the pieces of a text in their order, until it breaks.
    fn for_each_piece<'t>(
        &self,
        index: usize,
        text: &'t str,
        mut each: impl FnMut(&'t str) -> Result<ControlFlow<()>, EngineError>,
    ) -> Result<(), EngineError> {
        let ids = |text: &str| {
            let encode = || self.unlimited().encode_fast(EncodeInput::from(text), false);
            Ok::<_, EngineError>(self.contained(index, encode)?.get_ids().to_vec())
        };
        let mut rest = text;
        loop {
            // SentencePiece models see a text whole.
            let length = match &self.tokenizer {
                Coder::Json(..) => next_piece(rest, &ids)?,
                Coder::Pieces(_) => (rest.len() <= MAX_PIECE).then_some(rest.len()),
            };
            let length = length.ok_or_else(|| EngineError::Text {
                index,
                problem: format!(
                    "it has {} bytes, of which no {MAX_PIECE} in a row have a place where the tokenizer would part them; shorten it or add spaces",
                    text.len()
                ),
            })?;
            let (piece, behind) = rest.split_at(length);
            if each(piece)?.is_break() || behind.is_empty() {
                return Ok(());
            }
            rest = behind;
        }
    }

    /// The encoding of a piece by a tokenizer without a limit.
    fn piece(
        &self,
        index: usize,
        piece: &str,
        adds_special: bool,
    ) -> Result<Encoding, EngineError> {
        self.contained(index, || {
            self.unlimited()
                .encode_fast(EncodeInput::from(piece), adds_special)
        })
    }

    /// Token ids of a long text, cut on the given side to the tokenizer's limit.
    pub(super) fn long(
        &self,
        index: usize,
        text: &str,
        adds_special: bool,
        side: CutSide,
    ) -> Result<Encoded, EngineError> {
        let (limit, cuts_front) = (self.limit(), side == CutSide::Left);
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
            // There is nothing but what the tokenizer adds.
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
        })
    }

    /// Token ids of two texts.
    pub(super) fn pair(
        &self,
        index: usize,
        first: String,
        second: &str,
        side: CutSide,
    ) -> Result<Encoded, EngineError> {
        // Which of two long texts is cut by a token more depends on all of their tokens.
        let (first, second) = match first.len() > LONG && second.len() > LONG {
            true => (first.as_str(), second),
            false => (
                self.needed(index, &first, side)?,
                self.needed(index, second, side)?,
            ),
        };
        let bytes = first.len() + second.len();
        if bytes > MAX_PAIR {
            return Err(EngineError::Text {
                index,
                problem: format!(
                    "its two texts have {bytes} bytes that the tokenizer has to see together; expected at most {MAX_PAIR}, so shorten them"
                ),
            });
        }
        let input = EncodeInput::from((first.to_owned(), second.to_owned()));
        let (encoding, is_cut) = self.encoding(index, input, true, side)?;
        Ok(self.with_types(&encoding, is_cut))
    }

    /// The part of a long text whose tokens are kept where it is cut together with another one: more tokens than the tokenizer's
    /// limit, from the end that is kept.
    fn needed<'t>(
        &self,
        index: usize,
        text: &'t str,
        side: CutSide,
    ) -> Result<&'t str, EngineError> {
        let Some(limit) = self.limit().filter(|_| text.len() > LONG) else {
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

    /// Token ids of a text to go on from; `None` where it has more than `max_tokens`, which may be known before all of it is
    /// tokenized.
    ///
    /// # Errors
    /// A text that the tokenizer refuses or panics on, and a long one that cannot be tokenized in pieces.
    pub fn prompt_within(
        &self,
        text: &str,
        adds_special: bool,
        max_tokens: usize,
    ) -> Result<Option<Vec<u32>>, EngineError> {
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

    /// Calls `each` with the tokens of a text in their order, until it breaks, however long the text is: with the special tokens
    /// that the tokenizer adds or without. No prompt stands before it.
    ///
    /// # Errors
    /// A text that the tokenizer refuses or panics on, and a long one that cannot be tokenized in pieces.
    pub fn for_each_token<B>(
        &self,
        text: &str,
        adds_special: bool,
        mut each: impl FnMut(TextToken) -> ControlFlow<B>,
    ) -> Result<Option<B>, EngineError> {
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
                // The tokens before a text come with the first one of its own.
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

    /// All tokens of a text, as [`for_each_token`](Self::for_each_token) gives them.
    ///
    /// # Errors
    /// As `for_each_token`.
    pub fn tokens(&self, text: &str, adds_special: bool) -> Result<Vec<TextToken>, EngineError> {
        let mut tokens = Vec::new();
        self.for_each_token(text, adds_special, |token| {
            tokens.push(token);
            ControlFlow::<Infallible>::Continue(())
        })?;
        Ok(tokens)
    }
}

/// A token of a piece that begins at a byte of the text.
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
