//! Inputs of a service and their answers.

use std::time::{Duration, Instant};

use crate::text::{CutSide, TextRole};

/// Kind of result that a request asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputKind {
    /// The embedding, or else the scores, or else the sparse embedding, depending on what the model computes.
    #[default]
    Usual,
    /// The vectors of all tokens, concatenated.
    AllTokens,
    /// The sparse embedding: the vocabulary entries with nonzero weights.
    Sparse,
    /// The concatenated output rows of a task head that computes a row for each token: the label logits of all tokens, or the vocabulary
    /// logits of the mask tokens.
    Tokens,
    /// Scores before the activation function that the model's folder specifies.
    Logits,
    /// The token vectors of a query for late interaction, concatenated.
    QueryVectors,
    /// The token vectors of a document for late interaction, concatenated.
    DocumentVectors,
    /// The embedding, followed by further outputs of the same run.
    Several(Further),
}

/// Outputs in addition to an embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Further {
    /// Whether the weights of the sparse embedding are appended to the embedding.
    pub sparse: bool,
    /// Whether the token vectors of a document for late interaction are appended.
    pub token_vectors: bool,
}

impl OutputKind {
    /// Returns the kind for the token vectors of a query or a document.
    pub fn vectors(role: TextRole) -> Self {
        match role {
            TextRole::Query => Self::QueryVectors,
            TextRole::Document => Self::DocumentVectors,
        }
    }

    /// Returns whether the inputs are queries or documents; `None` if no token vectors for late interaction are requested.
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

    /// Returns a number that is different for each kind, for the keys of the response cache.
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
    /// Whether inputs that are too long are truncated. Otherwise they are an error.
    pub truncate: bool,
    /// Side on which inputs are truncated. The default is the side that the checkpoint's files specify.
    pub cut_side: Option<CutSide>,
    /// Index of the prompt to put before each text, from [`Service::prompt`](super::Service::prompt). The default is the folder's default
    /// prompt.
    pub prompt: Option<usize>,
    /// Time limit for the answer.
    pub within: Option<Duration>,
    pub class: u8,
    pub tenant: u32,
    pub wanted: OutputKind,
    /// Whether the inputs are only useful together. If one of them fails, or if the inputs together cannot meet the deadline, the remaining
    /// inputs leave the queue, and their replies have the same error. Otherwise, each input succeeds or fails by itself.
    pub is_joint: bool,
}

impl Submit {
    /// Returns the deadline of a request that was sent at `sent`, after a `bool` that is true if there is no deadline. The pair orders
    /// requests by deadline, with requests without a deadline last.
    pub(super) fn until(&self, sent: Instant) -> (bool, Option<Instant>) {
        let until = self.within.and_then(|w| sent.checked_add(w));
        (until.is_none(), until)
    }
}

/// The result for one input.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The embedding, the scores by label, or another result that [`OutputKind`] describes. For [`OutputKind::Several`], the embedding is
    /// followed by the weights of `entries` and the token vectors.
    pub values: Vec<f32>,
    /// Vocabulary entries of the sparse embedding in ascending order; empty if there is none.
    pub entries: Vec<u32>,
    /// Number of tokens of the input.
    pub tokens: usize,
}

/// Bytes that an input takes from admission to its answer, in addition to its text.
pub(super) const INPUT: u64 = 1024;
/// Bytes that a value takes in total: as f32 and as text in the JSON response. A score with its label takes [`SCORE`] bytes.
pub(super) const VALUE: u64 = 20;
pub(super) const SCORE: u64 = 1000;
/// Bytes that an entry of a sparse embedding takes in total: as two numbers and as text in the JSON response.
pub(super) const ENTRY: u64 = 64;

impl Answer {
    /// Returns the bytes of memory that the answer and its JSON take; 0 if they were already counted at admission.
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
