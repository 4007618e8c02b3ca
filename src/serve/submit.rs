//! An input for a service and its answer.

use std::time::{Duration, Instant};

use crate::text::{CutSide, TextRole};

/// Kind of result that a request selects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputKind {
    /// The embedding, the scores, or else the sparse embedding: the first of these that the model has.
    #[default]
    Usual,
    /// The vectors of all tokens, concatenated.
    AllTokens,
    /// The sparse embedding: vocabulary entries with nonzero weights.
    Sparse,
    /// The output of a head with a row for each token, concatenated: labels of all tokens, or vocabulary entries of masks.
    Tokens,
    /// Scores before the activation function that the model's folder names.
    Logits,
    /// The vectors of a query's tokens for late interaction, concatenated.
    QueryVectors,
    /// The vectors of a document's tokens for late interaction, concatenated.
    DocumentVectors,
    /// The embedding, followed by further outputs of the same run.
    Several(Further),
}

/// Outputs in addition to an embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Further {
    /// Whether the weights of the sparse embedding follow.
    pub sparse: bool,
    /// Whether the vectors of a document's tokens for late interaction follow.
    pub token_vectors: bool,
}

impl OutputKind {
    /// Returns the vectors of the tokens of a query or a document.
    pub fn vectors(role: TextRole) -> Self {
        match role {
            TextRole::Query => Self::QueryVectors,
            TextRole::Document => Self::DocumentVectors,
        }
    }

    /// Returns the side of late interaction that inputs are on, if it is asked for.
    pub fn role(self) -> Option<TextRole> {
        match self {
            Self::QueryVectors => Some(TextRole::Query),
            Self::DocumentVectors => Some(TextRole::Document),
            Self::Usual
            | Self::AllTokens
            | Self::Sparse
            | Self::Tokens
            | Self::Logits
            | Self::Several(_) => None,
        }
    }

    /// Returns a number that differs for each kind, for the keys of the response cache.
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Usual => 0,
            Self::AllTokens => 1,
            Self::Sparse => 2,
            Self::Tokens => 3,
            Self::Logits => 4,
            Self::QueryVectors => 5,
            Self::DocumentVectors => 6,
            Self::Several(further) => {
                8 | u8::from(further.sparse) | u8::from(further.token_vectors) << 1
            }
        }
    }
}

/// Options of a request, which apply to all of its inputs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Submit {
    /// Whether inputs that are too long are truncated; otherwise they are an error.
    pub truncate: bool,
    /// Side that is truncated; by default the one that the checkpoint's files name.
    pub cut_side: Option<CutSide>,
    /// Prompt before each text, from [`Service::prompt`](super::Service::prompt); by default the folder's default prompt.
    pub prompt: Option<usize>,
    /// Time limit for the answer.
    pub within: Option<Duration>,
    pub class: u8,
    pub tenant: u32,
    pub wanted: OutputKind,
}

impl Submit {
    /// Returns the deadline of a request sent at `sent`. The first field makes requests without a deadline compare as the latest.
    pub(super) fn until(&self, sent: Instant) -> (bool, Option<Instant>) {
        let until = self.within.and_then(|w| sent.checked_add(w));
        (until.is_none(), until)
    }
}

/// The result for one input.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The embedding, the scores by label, or another kind of result from [`OutputKind`]. For [`OutputKind::Several`], the embedding, the
    /// weights of `entries` and the vectors of tokens.
    pub values: Vec<f32>,
    /// Vocabulary entries of the sparse embedding in ascending order; empty without it.
    pub entries: Vec<u32>,
    /// Number of tokens of the input.
    pub tokens: usize,
}

/// Bytes that an input takes from admission to its answer, besides its text.
pub(super) const INPUT: u64 = 1024;
/// Bytes that a value takes as f32 and in the JSON response, and the same for a score with its label.
pub(super) const VALUE: u64 = 20;
pub(super) const SCORE: u64 = 1000;
/// Bytes that an entry of a sparse embedding takes as numbers and in the JSON response.
pub(super) const ENTRY: u64 = 64;

impl Answer {
    /// Bytes of the answer and its JSON, if they were not known at admission.
    pub(super) fn memory(&self, wanted: OutputKind) -> u64 {
        match wanted {
            OutputKind::Usual | OutputKind::Logits => 0,
            OutputKind::AllTokens => VALUE * self.values.len() as u64,
            OutputKind::Tokens | OutputKind::QueryVectors | OutputKind::DocumentVectors => {
                2 * size_of::<f32>() as u64 * self.values.len() as u64
            }
            OutputKind::Sparse => ENTRY * self.values.len() as u64,
            OutputKind::Several(_) => {
                ENTRY * self.entries.len() as u64 + VALUE * self.values.len() as u64
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_results_have_different_codes() {
        let flags = [(false, true), (true, false), (true, true)];
        let several = flags.map(|(sparse, token_vectors)| {
            OutputKind::Several(Further {
                sparse,
                token_vectors,
            })
        });
        let plain = [
            OutputKind::Usual,
            OutputKind::AllTokens,
            OutputKind::Sparse,
            OutputKind::Tokens,
            OutputKind::Logits,
            OutputKind::QueryVectors,
            OutputKind::DocumentVectors,
        ];
        let mut codes: Vec<u8> = plain
            .iter()
            .chain(&several)
            .map(|kind| kind.code())
            .collect();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), plain.len() + several.len());
    }
}
