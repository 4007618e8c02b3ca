//! Chunks of a text that the model processes as one sequence, for late chunking.

use std::ops::Range;

use super::{Encoded, TextEncoder};
use crate::text::{Prompt, TextError};

/// One sequence of several chunks, with the token range of each chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunks {
    pub encoded: Encoded,
    /// Token range of each chunk. The first range also has the special tokens before the text and the tokens of the prompt. The last range
    /// also has the special tokens after the text.
    pub ranges: Vec<Range<usize>>,
}

impl TextEncoder {
    /// Tokenizes chunks as one sequence, after a prompt. Each chunk is tokenized separately, so no token spans two chunks.
    ///
    /// # Errors
    /// Returns an error if the chunks together have more tokens than the model's maximum, if a chunk has no tokens, or if the tokenizer
    /// refuses a text or panics on it. Also returns the errors of [`Folder::prompt`](super::Folder::prompt) and
    /// [`Folder::chunk_pooling`](super::Folder::chunk_pooling).
    pub fn encode_chunks<S: AsRef<str>>(
        &self,
        chunks: &[S],
        prompt: Prompt<'_>,
    ) -> Result<Chunks, TextError> {
        self.folder.chunk_pooling()?;
        let prompt = self.folder.prompt(prompt)?;
        let limit = self.max_tokens().unwrap_or(usize::MAX);
        let encode = |index: usize, text: &str, adds_special: bool| {
            let encoded = self.encoded(index, text, adds_special, self.cut_side)?;
            match encoded.is_cut {
                true => Err(TextError::LongChunks { limit }),
                false => Ok(encoded.ids),
            }
        };
        let mut ids: Vec<u32> = Vec::new();
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for (index, chunk) in chunks.iter().enumerate() {
            let from = ids.len();
            match index {
                0 => ids.extend(encode(
                    index,
                    &format!("{prompt}{}", chunk.as_ref()),
                    false,
                )?),
                _ => ids.extend(encode(index, chunk.as_ref(), false)?),
            }
            if ids.len() > limit {
                return Err(TextError::LongChunks { limit });
            }
            if ids.len() == from {
                let problem = "it has no tokens".to_owned();
                return Err(TextError::Text { index, problem });
            }
            ranges.push(from..ids.len());
        }
        let (Some(first), Some(last)) = (ranges.first().cloned(), ranges.last().cloned()) else {
            return Ok(Chunks {
                encoded: Encoded::default(),
                ranges,
            });
        };
        // The special tokens around a text are the same for every text, so those of the first chunk are used.
        let text = format!("{prompt}{}", chunks[0].as_ref());
        let whole = encode(0, &text, true)?;
        let own = &ids[first];
        let before = whole.windows(own.len()).position(|window| window == own);
        let before = before.ok_or_else(|| TextError::Text {
            index: 0,
            problem: "its tokens differ with special tokens around them".to_owned(),
        })?;
        let end = &whole[before + own.len()..];
        ids.splice(..0, whole[..before].iter().copied());
        ids.extend_from_slice(end);
        for range in &mut ranges {
            *range = range.start + before..range.end + before;
        }
        if let Some(range) = ranges.first_mut() {
            range.start = 0;
        }
        if let Some(range) = ranges.last_mut() {
            range.end = last.end + before + end.len();
        }
        if ids.len() > limit {
            return Err(TextError::LongChunks { limit });
        }
        let encoded = Encoded {
            ids,
            ..Encoded::default()
        };
        Ok(Chunks { encoded, ranges })
    }
}
