//! Tensors that describe a batch.

use serde::{Deserialize, Serialize};

use crate::tensor::Element;

/// Tensors that describe a batch. The runtime computes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum BatchInput {
    /// i32 `[tokens]`: vocabulary ids.
    TokenIds,
    /// i32 `[tokens]`: segment ids.
    TypeIds,
    /// i32 `[tokens]`: index of the token in its sequence, from 0.
    Positions,
    /// i32 `[batch + 1]`: first token of each sequence. The last entry is the number of tokens.
    CuLens,
    /// i64 `[batch + 1]`: index of each sequence's first score among the `pairs` scores of a head. This is the sum of the squared lengths
    /// of all earlier sequences.
    PairOffsets,
    /// i32 `[batch, longest]`: 1 where the padded input holds a token.
    Mask,
    /// i32 `[batch]`: number of tokens of each sequence that are not masked as keys, from 1 to the length of the sequence. It equals the
    /// length if nothing is padded.
    ValidLens,
    /// i32 `[tokens]`: the slot of the KV cache that a token's keys and values are written to.
    TokenSlots,
    /// i32 `[slots]`: the slots of each sequence's keys by position, one sequence after another.
    Slots,
    /// i32 `[batch]`: index in [`BatchInput::Slots`] of each sequence's first slot.
    SlotStarts,
    /// i32 `[batch]`: keys of each sequence: its cached tokens plus its tokens in the batch.
    KeyLens,
    /// i32 `[source_slots]`: the slots of each sequence's source keys by position, one sequence after another. The slots of a source that
    /// several sequences share are repeated.
    SourceSlots,
    /// i32 `[batch]`: index in [`BatchInput::SourceSlots`] of each sequence's first slot.
    SourceStarts,
    /// i32 `[batch]`: number of keys of each sequence's source.
    SourceLens,
    /// i32 `[2·batch]`: the low and high halves of each sequence's noise seed.
    Seeds,
    /// i32 `[tokens]`: the vocabulary id of the token before each token, and `first` for the first token of a sequence.
    PreviousIds { first: u32 },
    /// i32 `[tokens + 1]`: indices of the tokens after each sequence's prompt, one sequence after another. The remaining entries are 0.
    PooledTokens,
    /// i32 `[batch + 1]`: index in [`BatchInput::PooledTokens`] of each sequence's first entry. The last entry is the total number of
    /// tokens after prompts.
    PooledCuLens,
}

impl BatchInput {
    pub fn element(self) -> Element {
        match self {
            BatchInput::PairOffsets => Element::I64,
            _ => Element::I32,
        }
    }
}
