//! Batches of token ids: the input of a run.

mod data;
mod error;
mod marks;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

pub use error::{BatchError, or_extend};

use crate::tensor::{Extents, LengthsError, SequenceEnd};

/// Limits of a model on token ids and lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Exclusive upper bound of token ids.
    pub vocabulary: u32,
    /// Exclusive upper bound of segment ids; `None` if the model has no segments.
    pub segments: Option<u32>,
    /// Padding token id, to which the model assigns no position. No sequence may contain it.
    pub skipped: Option<u32>,
    /// Maximum number of tokens of a sequence, from the position table or `max_position_embeddings`; `None` if unlimited.
    pub longest: Option<u32>,
    /// Maximum to which `longest` can be raised when the model is built (`max_context`); `None` if it cannot be raised.
    pub extended: Option<u32>,
    /// Rule for the token at which a sequence ends; `None` if the model has no such rule. Later tokens are padding.
    pub end: Option<SequenceEnd>,
}

impl Limits {
    /// Maps the random number `drawn` to a token id that a sequence may contain.
    pub fn token_id(&self, drawn: u64) -> u32 {
        let vocabulary = self.vocabulary.max(1);
        let id = (drawn % u64::from(vocabulary)) as u32;
        match Some(id) == self.skipped {
            true => (id + 1) % vocabulary,
            false => id,
        }
    }
}

/// Sequences of token ids, packed one after another without padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    token_ids: Vec<u32>,
    type_ids: Option<Vec<u32>>,
    lens: Vec<u32>,
    extents: Extents,
    padded: Option<Padded>,
    /// Number of tokens of each sequence, not counting padding; `None` unless [`Batch::with_padding`] has added padding.
    valid_lens: Option<Vec<u32>>,
    /// Number of leading tokens of each sequence that tokens may attend to; `None` if tokens may attend to all tokens.
    attended: Option<Vec<u32>>,
    /// Number of leading tokens of each sequence that pooling leaves out; `None` if pooling includes all tokens.
    left_out: Option<Vec<u32>>,
    past: Option<Past>,
    /// Noise seed of each sequence; `None` means zeros.
    seeds: Option<Vec<u64>>,
}

/// Locations of cached tokens in a KV cache, for sequences that continue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Past {
    /// Number of cached tokens of each sequence, excluding the tokens of the batch.
    pub cached: Vec<u32>,
    /// Cache slots (`block · block size + position in the block`) of the tokens of all sequences, one sequence after another, including the
    /// tokens of the batch.
    pub slots: Vec<u32>,
    /// Number of blocks in the cache.
    pub blocks: u64,
    /// Cached source texts of the sequences, if the model is an encoder-decoder.
    pub sources: Option<Sources>,
}

/// Locations of the keys of source texts in a KV cache. Each sequence has one source text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// Number of tokens of the source text of each sequence.
    pub lens: Vec<u32>,
    /// Cache slots of the tokens of all source texts, one source text after another. Sequences may share slots.
    pub slots: Vec<u32>,
}

/// Padded form of a batch that was passed with padding. It is kept because a CUDA device packs such a batch itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Padded {
    /// `[batch, longest]`: columns beyond the longest sequence are removed.
    pub token_ids: Vec<u32>,
    pub type_ids: Vec<u32>,
    pub mask: Vec<u32>,
}

impl Batch {
    /// Creates a batch from sequences of token ids.
    pub fn from_sequences<S: AsRef<[u32]>>(sequences: &[S]) -> Result<Self, BatchError> {
        let lens: Vec<u32> = sequences
            .iter()
            .map(|s| u32::try_from(s.as_ref().len()).unwrap_or(u32::MAX))
            .collect();
        let ids = sequences
            .iter()
            .flat_map(|s| s.as_ref().iter().copied())
            .collect();
        Self::from_packed(ids, &lens)
    }

    /// Creates a batch from the concatenated ids of all sequences and the length of each sequence.
    pub fn from_packed(token_ids: Vec<u32>, lens: &[u32]) -> Result<Self, BatchError> {
        let extents = Extents::of(lens)?;
        if extents.tokens != token_ids.len() as u64 {
            return Err(BatchError::Sum {
                sum: extents.tokens,
                ids: token_ids.len(),
            });
        }
        Ok(Self {
            token_ids,
            type_ids: None,
            lens: lens.to_vec(),
            extents,
            padded: None,
            valid_lens: None,
            attended: None,
            left_out: None,
            past: None,
            seeds: None,
        })
    }

    /// Creates a batch from padded input. `token_ids` and `mask` are `[batch, width]`. The mask is 1 for tokens and 0 for padding. The
    /// tokens come first in every row (ByteTransformer III.D).
    ///
    /// # Errors
    /// Returns an error if the ids are not a whole number of rows, if the ids and the mask differ in length, or if the mask contains a
    /// value other than 0 and 1, or a 1 after a 0.
    pub fn from_padded(token_ids: &[u32], mask: &[u32], width: usize) -> Result<Self, BatchError> {
        if width == 0 || token_ids.is_empty() {
            return Err(LengthsError::Empty.into());
        }
        let found = mask.len();
        if !token_ids.len().is_multiple_of(width) {
            return Err(BatchError::Width {
                ids: token_ids.len(),
                width,
            });
        }
        if found != token_ids.len() {
            return Err(BatchError::Count {
                what: "mask",
                expected: token_ids.len(),
                found,
            });
        }
        let mut lens = Vec::new();
        for (row, bits) in mask.chunks_exact(width).enumerate() {
            if let Some((column, &value)) = bits.iter().enumerate().find(|&(_, &v)| v > 1) {
                return Err(BatchError::MaskValue { row, column, value });
            }
            let len = bits.iter().take_while(|&&v| v == 1).count();
            if let Some(gap) = bits[len..].iter().position(|&v| v == 1) {
                return Err(BatchError::Hole {
                    row,
                    column: len + gap,
                });
            }
            lens.push(len as u32);
        }
        let rows = || token_ids.chunks_exact(width).zip(&lens);
        let packed = rows()
            .flat_map(|(ids, &n)| ids[..n as usize].to_vec())
            .collect();
        let mut batch = Self::from_packed(packed, &lens)?;
        let longest = batch.extents.longest as usize;
        let cut = |values: &[u32]| -> Vec<u32> {
            values
                .chunks_exact(width)
                .flat_map(|row| row[..longest].to_vec())
                .collect()
        };
        let token_ids = cut(token_ids);
        let type_ids = vec![0; token_ids.len()];
        batch.padded = Some(Padded {
            token_ids,
            type_ids,
            mask: cut(mask),
        });
        Ok(batch)
    }

    /// Adds segment ids, one per token in packed order. The default is segment 0 for all tokens.
    pub fn with_type_ids(mut self, type_ids: Vec<u32>) -> Result<Self, BatchError> {
        let (expected, found) = (self.token_ids.len(), type_ids.len());
        if expected != found {
            return Err(BatchError::Count {
                what: "segment ids",
                expected,
                found,
            });
        }
        if let Some(padded) = &mut self.padded {
            let longest = self.extents.longest as usize;
            let mut next = 0;
            for (row, &n) in self.lens.iter().enumerate() {
                let n = n as usize;
                padded.type_ids[row * longest..][..n].copy_from_slice(&type_ids[next..next + n]);
                next += n;
            }
        }
        self.type_ids = Some(type_ids);
        Ok(self)
    }

    /// Marks the batch as a continuation of sequences in a KV cache.
    ///
    /// # Errors
    /// Returns an error if the number of sequences or slots does not match the batch.
    pub fn with_past(mut self, past: Past) -> Result<Self, BatchError> {
        let (expected, found) = (self.lens.len(), past.cached.len());
        if expected != found {
            return Err(BatchError::Past {
                what: "lengths of the past",
                expected,
                found,
            });
        }
        self.extents = Extents::continuing(&self.lens, &past.cached, past.blocks)?;
        let (expected, found) = (self.extents.slots as usize, past.slots.len());
        if expected != found {
            return Err(BatchError::Past {
                what: "slots",
                expected,
                found,
            });
        }
        if let Some(sources) = &past.sources {
            let (expected, found) = (self.lens.len(), sources.lens.len());
            if expected != found {
                return Err(BatchError::Past {
                    what: "lengths of the sources",
                    expected,
                    found,
                });
            }
            self.extents = self.extents.with_sources(&self.lens, &sources.lens);
            let (expected, found) = (self.extents.source_slots as usize, sources.slots.len());
            if expected != found {
                return Err(BatchError::Past {
                    what: "slots of the sources",
                    expected,
                    found,
                });
            }
        }
        self.past = Some(past);
        Ok(self)
    }

    /// Sets the noise seed of each sequence, for models that draw noise (`draw` in a description). The default is 0.
    ///
    /// # Errors
    /// Returns an error if the number of seeds differs from the number of sequences.
    pub fn with_seeds(mut self, seeds: Vec<u64>) -> Result<Self, BatchError> {
        let (expected, found) = (self.lens.len(), seeds.len());
        if expected != found {
            let what = "seeds";
            return Err(BatchError::Past {
                what,
                expected,
                found,
            });
        }
        self.seeds = Some(seeds);
        Ok(self)
    }

    /// Selects the part of the model that runs the batch, such as the encoder or the decoder, if the model has several parts.
    pub fn for_part(mut self, part: u32) -> Self {
        self.extents.part = part;
        self
    }

    /// Number of cached tokens of a sequence.
    fn cached(&self, sequence: usize) -> u32 {
        self.past.as_ref().map_or(0, |past| past.cached[sequence])
    }

    /// Returns the batch with every sequence padded at its end to the length of the longest sequence. The padding has token id 0.
    /// [`valid_lens`](Self::valid_lens) then returns the lengths without padding. Only a session of an engine that is built with
    /// `Padding::Kept` accepts the padded batch.
    ///
    /// # Errors
    /// Returns an error if the padded batch exceeds the maximum number of tokens of a run.
    pub fn with_padding(&self) -> Result<Self, BatchError> {
        let longest = self.extents.longest as usize;
        let pad = |ids: &[u32]| -> Vec<u32> {
            let mut rest = ids;
            let mut padded = Vec::with_capacity(self.lens.len() * longest);
            for (row, &n) in self.lens.iter().enumerate() {
                let (own, after) = rest.split_at(n as usize);
                padded.extend_from_slice(own);
                padded.resize((row + 1) * longest, 0);
                rest = after;
            }
            padded
        };
        let lens = vec![self.extents.longest as u32; self.lens.len()];
        Ok(Self {
            extents: Extents::of(&lens)?,
            token_ids: pad(&self.token_ids),
            type_ids: self.type_ids.as_deref().map(pad),
            lens,
            padded: None,
            valid_lens: Some(self.own_lens().to_vec()),
            attended: self.attended.clone(),
            left_out: self.left_out.clone(),
            past: None,
            seeds: self.seeds.clone(),
        })
    }

    /// Returns an error if [`with_padding`](Self::with_padding) added padding to any sequence.
    pub(crate) fn check_unpadded(&self) -> Result<(), BatchError> {
        let mut lens = self.lens.iter().zip(self.own_lens()).enumerate();
        match lens.find(|(_, (len, valid))| len != valid) {
            Some((sequence, (&len, &valid))) => Err(BatchError::Padding {
                sequence,
                valid,
                padding: len.saturating_sub(valid),
            }),
            None => Ok(()),
        }
    }

    /// Length of each sequence, including padding added by [`with_padding`](Self::with_padding).
    pub fn lens(&self) -> &[u32] {
        &self.lens
    }

    pub fn extents(&self) -> Extents {
        self.extents
    }

    pub fn padded(&self) -> Option<&Padded> {
        self.padded.as_ref()
    }

    /// Checks all ids and lengths against the limits of the model.
    pub fn check(&self, limits: &Limits) -> Result<(), BatchError> {
        if let Some(limit) = limits.longest
            && let Some((sequence, len)) = self
                .key_lens()
                .enumerate()
                .find(|&(_, n)| n > u64::from(limit))
        {
            return Err(BatchError::TooLong {
                sequence,
                len,
                limit,
                extended: limits.extended,
            });
        }
        self.check_ids("token", &self.token_ids, limits.vocabulary)?;
        if let Some(id) = limits.skipped
            && let Some(at) = self.token_ids.iter().position(|&i| i == id)
        {
            let (sequence, token) = self.place(at);
            return Err(BatchError::Skipped {
                sequence,
                token,
                id,
            });
        }
        if let Some(end) = limits.end {
            let mut rest = self.token_ids.as_slice();
            for (sequence, (&n, &own)) in self.lens.iter().zip(self.own_lens()).enumerate() {
                let (ids, after) = rest.split_at(n as usize);
                check_end(end, sequence, &ids[..own as usize])?;
                rest = after;
            }
        }
        match (&self.type_ids, limits.segments) {
            (Some(ids), Some(rows)) => self.check_ids("segment", ids, rows),
            (Some(ids), None) if ids.iter().any(|&id| id != 0) => Err(BatchError::NoSegments),
            _ => Ok(()),
        }
    }

    /// Replaces the last token of each sequence with an end token that the model accepts, if it requires one. This makes batches of random
    /// ids valid.
    #[must_use]
    pub fn with_required_ends(mut self, limits: &Limits) -> Self {
        let id = match limits.end {
            Some(SequenceEnd::Required(id) | SequenceEnd::Token(id)) => id,
            // Any id except that of the padding token.
            Some(SequenceEnd::NotPadding(padding)) => u32::from(padding == 0),
            Some(SequenceEnd::Highest | SequenceEnd::BeforePadding(_)) | None => return self,
        };
        let mut end = 0;
        for &n in &self.lens {
            end += n as usize;
            self.token_ids[end - 1] = id;
        }
        self.padded = None;
        self
    }

    /// Returns the batch without the tokens that follow the end token of a sequence. A sequence without an end token is unchanged. A batch
    /// is returned unchanged if it continues sequences, has padding, or has tokens that are excluded from attention or from pooling.
    ///
    /// # Errors
    /// Returns an error only for a batch that does not pass [`check`](Self::check).
    pub fn ended(&self, end: Option<SequenceEnd>) -> Result<Cow<'_, Self>, BatchError> {
        let is_whole = self.past.is_none()
            && self.valid_lens.is_none()
            && self.attended.is_none()
            && self.left_out.is_none();
        let Some(end) = end.filter(|_| is_whole) else {
            return Ok(Cow::Borrowed(self));
        };
        let (mut rest, mut from) = (self.token_ids.as_slice(), 0);
        let (mut kept, mut lens) = (Vec::new(), Vec::with_capacity(self.lens.len()));
        for &n in &self.lens {
            let (ids, after) = rest.split_at(n as usize);
            let len = end.place(ids).map_or(ids.len(), |at| at + 1);
            kept.extend(from..from + len);
            lens.push(len as u32);
            (rest, from) = (after, from + ids.len());
        }
        if lens == self.lens {
            return Ok(Cow::Borrowed(self));
        }
        let of = |ids: &[u32]| kept.iter().map(|&at| ids[at]).collect();
        let mut batch = Self::from_packed(of(&self.token_ids), &lens)?;
        batch.type_ids = self.type_ids.as_deref().map(of);
        batch.seeds = self.seeds.clone();
        batch.extents.part = self.extents.part;
        Ok(Cow::Owned(batch))
    }

    fn check_ids(&self, what: &'static str, ids: &[u32], rows: u32) -> Result<(), BatchError> {
        let Some(at) = ids.iter().position(|&id| id >= rows) else {
            return Ok(());
        };
        let (sequence, token) = self.place(at);
        Err(BatchError::Id {
            what,
            sequence,
            token,
            id: ids[at],
            rows,
        })
    }

    /// Returns the index of the sequence that contains the token `at` of the packed batch, and the token's index in the sequence.
    fn place(&self, at: usize) -> (usize, usize) {
        let (mut sequence, mut token) = (0, at);
        for (i, &n) in self.lens.iter().enumerate() {
            sequence = i;
            if token < n as usize {
                break;
            }
            token -= n as usize;
        }
        (sequence, token)
    }
}

/// Returns an error if the sequence `ids` does not end as the model requires. `sequence` is its index in the batch, for the error.
fn check_end(end: SequenceEnd, sequence: usize, ids: &[u32]) -> Result<(), BatchError> {
    let found = ids.last().copied().filter(|_| !end.accepts(ids));
    match (end, found) {
        (SequenceEnd::Required(expected), Some(found)) => Err(BatchError::LastToken {
            sequence,
            found,
            expected,
        }),
        (SequenceEnd::Token(expected), Some(_)) => Err(BatchError::NoEnd { sequence, expected }),
        (SequenceEnd::NotPadding(id), Some(_)) => Err(BatchError::EndsWithPadding { sequence, id }),
        (SequenceEnd::Highest | SequenceEnd::BeforePadding(_), Some(_)) | (_, None) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        vocabulary: 100,
        segments: Some(2),
        skipped: Some(99),
        longest: Some(4),
        extended: None,
        end: None,
    };

    #[test]
    fn a_padded_batch_equals_its_packed_form() {
        let padded = Batch::from_padded(&[5, 6, 0, 7, 0, 0], &[1, 1, 0, 1, 0, 0], 3).unwrap();
        let packed = Batch::from_sequences(&[vec![5, 6], vec![7]]).unwrap();
        assert_eq!(padded.token_ids(), packed.token_ids());
        assert_eq!(padded.lens(), packed.lens());
        assert_eq!(padded.positions(), [0, 1, 0]);
        assert_eq!(packed.cu_lens(), [0, 2, 3]);
        assert_eq!(packed.pair_offsets(), [0, 4, 5]);
        // The third column is padding in every row, so it is removed.
        assert_eq!(padded.padded().unwrap().mask, [1, 1, 1, 0]);
    }

    #[test]
    fn a_padded_batch_records_the_lengths_without_padding() {
        let packed = Batch::from_sequences(&[vec![5, 6, 7], vec![8]]).unwrap();
        let packed = packed.with_type_ids(vec![0, 1, 1, 1]).unwrap();
        let padded = packed.with_padding().unwrap();
        assert_eq!(padded.token_ids(), [5, 6, 7, 8, 0, 0]);
        assert_eq!(padded.type_ids(), [0, 1, 1, 1, 0, 0]);
        assert_eq!(padded.positions(), [0, 1, 2, 0, 1, 2]);
        assert_eq!(padded.lens(), [3, 3]);
        assert_eq!(padded.valid_lens(), [3, 1]);
        assert_eq!(padded.extents().pairs, 18);
        assert_eq!(packed.valid_lens(), [3, 1]);
        // Padding again has no effect.
        assert_eq!(padded.with_padding().unwrap(), padded);
        // The 2²³ + 1 tokens of these sequences fit one run. With padding, three sequences of 2²³ − 1 tokens exceed the maximum.
        let long = (1 << 23) - 1;
        let ragged = Batch::from_packed(vec![0; long as usize + 2], &[long, 1, 1]).unwrap();
        insta::assert_snapshot!(ragged.with_padding().unwrap_err(), @"the batch has 25165821 tokens; the maximum of one run is 16777216; split the batch");
    }

    #[test]
    fn invalid_batches_are_errors() {
        let text = |r: Result<Batch, BatchError>| {
            r.and_then(|b| b.check(&LIMITS)).unwrap_err().to_string()
        };
        let none: [Vec<u32>; 0] = [];
        insta::assert_snapshot!(text(Batch::from_sequences(&none)), @"the batch is empty; expected at least one sequence");
        insta::assert_snapshot!(text(Batch::from_sequences(&[vec![1], vec![]])), @"sequence 1 has no tokens; expected at least one token in every sequence");
        insta::assert_snapshot!(text(Batch::from_sequences(&[vec![1, 2], vec![3, 100]])), @"sequence 1, token 1: the token id 100 is outside the table of 100 rows; expected an id below 100");
        insta::assert_snapshot!(text(Batch::from_sequences(&[vec![1, 2], vec![3, 99]])), @"sequence 1, token 1: the id 99 is the model's padding token, which has no position; remove it from the sequence");
        insta::assert_snapshot!(text(Batch::from_sequences(&[vec![1; 5]])), @"sequence 0 has 5 tokens, but the model has 4 positions; shorten or split it");
        let extended = Limits {
            extended: Some(9),
            ..LIMITS
        };
        let long = Batch::from_sequences(&[vec![1; 5]]).and_then(|b| b.check(&extended));
        insta::assert_snapshot!(long.unwrap_err(), @"sequence 0 has 5 tokens, but the model has 4 positions; shorten or split it, or build the model with a `max_context` (`--max-context`) of up to 9 tokens");
        insta::assert_snapshot!(text(Batch::from_packed(vec![1, 2, 3], &[1, 1])), @"the lengths add up to 2, but 3 token ids were given");
        insta::assert_snapshot!(text(Batch::from_padded(&[1, 2, 3], &[1, 0, 1], 3)), @"row 0 of the mask has a hole at column 2: a 1 follows a 0; expected ones, then zeros");
        insta::assert_snapshot!(text(Batch::from_padded(&[1, 2], &[1, 2], 2)), @"row 0, column 1 of the mask is 2; expected 0 or 1");
        insta::assert_snapshot!(text(Batch::from_padded(&[1, 2, 3, 4, 5], &[1; 5], 2)), @"5 token ids do not fill rows of width 2; expected a multiple of 2, with 0 where a row has padding");
        insta::assert_snapshot!(text(Batch::from_padded(&[1, 2, 3, 4], &[1; 6], 2)), @"mask: expected 4 values, one per token id, found 6");
        insta::assert_snapshot!(text(Batch::from_padded(&[1, 2], &[0, 0], 2)), @"sequence 0 has no tokens; expected at least one token in every sequence");
        insta::assert_snapshot!(text(Batch::from_sequences(&[[1]]).unwrap().with_type_ids(vec![2])), @"sequence 0, token 0: the segment id 2 is outside the table of 2 rows; expected an id below 2");
        insta::assert_snapshot!(text(Batch::from_sequences(&[[1]]).unwrap().with_type_ids(vec![0, 1])), @"segment ids: expected 1 values, one per token id, found 2");
    }
}
