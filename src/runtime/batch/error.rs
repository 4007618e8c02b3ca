//! Errors of batches.

use crate::tensor::LengthsError;

/// Returns the end of an error message, which suggests building the model for sequences of up to `extended` tokens. Returns an empty text
/// if `extended` is `None`.
pub fn or_extend(extended: Option<u32>) -> String {
    let extend = |n| {
        format!(", or build the model with a `max_context` (`--max-context`) of up to {n} tokens")
    };
    extended.map(extend).unwrap_or_default()
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    #[error(transparent)]
    Lengths(#[from] LengthsError),
    #[error("the lengths add up to {sum}, but {ids} token ids were given")]
    Sum { sum: u64, ids: usize },
    #[error("{what}: expected {expected} values, one per token id, found {found}")]
    Count {
        what: &'static str,
        expected: usize,
        found: usize,
    },
    #[error(
        "sequence {sequence}, token {token}: the {what} id {id} is outside the table of {rows} rows; expected an id below {rows}"
    )]
    Id {
        what: &'static str,
        sequence: usize,
        token: usize,
        id: u32,
        rows: u32,
    },
    #[error(
        "sequence {sequence}, token {token}: the id {id} is the model's padding token, which has no position; remove it from the sequence"
    )]
    Skipped {
        sequence: usize,
        token: usize,
        id: u32,
    },
    #[error(
        "the last token of sequence {sequence} has the id {found}, but the model computes its outputs at the end-of-sequence token {expected}; end the sequence with {expected}"
    )]
    LastToken {
        sequence: usize,
        found: u32,
        expected: u32,
    },
    #[error(
        "sequence {sequence} lacks the end-of-sequence token {expected}, at which the model computes its outputs; end the sequence with {expected}"
    )]
    NoEnd { sequence: usize, expected: u32 },
    #[error(
        "sequence {sequence} ends with the padding token {id}, but the model computes its outputs at the last token, which must not be padding; remove the padding tokens from the end of the sequence"
    )]
    EndsWithPadding { sequence: usize, id: u32 },
    #[error(
        "sequence {sequence} has {len} tokens, but the model has {limit} positions; shorten or split it{}", or_extend(*extended)
    )]
    TooLong {
        sequence: usize,
        len: u64,
        limit: u32,
        /// The largest number of positions that the model can be built with, if it is larger than `limit`.
        extended: Option<u32>,
    },
    #[error(
        "sequence {sequence} ends with its token {token}, and {n} more tokens follow, for which the requested outputs would have rows; remove them, or request only outputs with one row per sequence"
    )]
    BehindEnd { sequence: usize, token: u32, n: u32 },
    #[error("{what}: expected {expected}, found {found}")]
    Past {
        what: &'static str,
        expected: usize,
        found: usize,
    },
    #[error(
        "row {row} of the mask has a hole at column {column}: a 1 follows a 0; expected ones, then zeros"
    )]
    Hole { row: usize, column: usize },
    #[error("row {row}, column {column} of the mask is {value}; expected 0 or 1")]
    MaskValue {
        row: usize,
        column: usize,
        value: u32,
    },
    #[error(
        "{ids} token ids do not fill rows of width {width}; expected a multiple of {width}, with 0 where a row has padding"
    )]
    Width { ids: usize, width: usize },
    #[error(
        "the number of attended tokens of sequence {sequence} is {attended}; expected 1 to {len}, the length of the sequence"
    )]
    Attended {
        sequence: usize,
        attended: u32,
        len: u32,
    },
    #[error(
        "tokens of sequence {sequence} attend to {attended} of its {len} tokens, but the engine's attention reads all of them; expected a late-interaction model that excludes query expansion from attention, or a batch without `with_attended`"
    )]
    NotAttended {
        sequence: usize,
        attended: u32,
        len: u32,
    },
    #[error(
        "sequence {sequence} has {valid} tokens and {padding} of padding, which this session would treat as tokens; run the batch without `with_padding`, or build the engine with `Padding::Kept`"
    )]
    Padding {
        sequence: usize,
        valid: u32,
        padding: u32,
    },
    #[error(
        "pooling leaves out {left_out} of the {len} tokens of sequence {sequence}; expected fewer, so that a token remains"
    )]
    LeftOut {
        sequence: usize,
        left_out: u32,
        len: u32,
    },
    #[error(
        "tokens of a prompt are to be left out of pooling, but the model pools all tokens; expected a checkpoint folder with `include_prompt: false`, or a batch without `with_left_out`"
    )]
    PoolsAll,
    #[error("segment ids were given, but the model has no segment table")]
    NoSegments,
}

impl BatchError {
    /// Replaces the error's sequence index `i` by `index(i)`, for a caller whose inputs are not in the order of the batch. Errors about a
    /// whole batch are returned unchanged.
    #[must_use]
    pub fn of_sequence(mut self, index: impl FnOnce(usize) -> usize) -> Self {
        let named = match &mut self {
            Self::Lengths(LengthsError::ZeroLength { index }) => index,
            Self::Id { sequence, .. }
            | Self::Skipped { sequence, .. }
            | Self::LastToken { sequence, .. }
            | Self::NoEnd { sequence, .. }
            | Self::EndsWithPadding { sequence, .. }
            | Self::TooLong { sequence, .. }
            | Self::BehindEnd { sequence, .. }
            | Self::Attended { sequence, .. }
            | Self::NotAttended { sequence, .. }
            | Self::Padding { sequence, .. }
            | Self::LeftOut { sequence, .. } => sequence,
            Self::Lengths(LengthsError::Empty | LengthsError::TooManyTokens { .. })
            | Self::Sum { .. }
            | Self::Count { .. }
            | Self::Past { .. }
            | Self::Hole { .. }
            | Self::MaskValue { .. }
            | Self::Width { .. }
            | Self::PoolsAll
            | Self::NoSegments => return self,
        };
        *named = index(*named);
        self
    }
}
