//! Element types, symbolic sizes and shapes, which all other modules use.
//!
//! Activations have the packed layout `[tokens, width]`, where `tokens` is the number of valid
//! tokens of the whole batch, with the cumulative lengths in a separate tensor (ByteTransformer
//! III.D). A size is a small polynomial of [`Symbol`]s, evaluated per batch.

mod dtype;
pub(crate) mod e4m3;
mod element;
mod extents;
mod format;
pub(crate) mod quantized;
mod size;
mod symbol;

use serde::{Deserialize, Serialize};

pub use dtype::{DType, UnknownDType};
pub use element::Element;
pub use extents::{Extents, LengthsError};
pub use format::{Format, Group, Scaled, Values, int8_row_scale, row_scale};
pub use quantized::Quantized;
pub use size::{Shape, Size};
pub use symbol::Symbol;

/// Rule that finds the end token of a sequence, for models that pool at this token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SequenceEnd {
    /// The first token with this id.
    Token(u32),
    /// The first token with the highest id in the sequence.
    Highest,
    /// The last token, which must have this id.
    Required(u32),
    /// The last token that does not have this id (that of the padding token). In a sequence of padding tokens, the first token.
    BeforePadding(u32),
    /// The last token, which must not have this id (that of the padding token).
    NotPadding(u32),
}

impl SequenceEnd {
    /// Returns the index of the token that ends a sequence.
    pub fn place(self, ids: &[u32]) -> Option<usize> {
        let id = match self {
            Self::Token(id) => id,
            Self::Highest => *ids.iter().max()?,
            Self::Required(_) | Self::NotPadding(_) => return ids.len().checked_sub(1),
            Self::BeforePadding(padding) => {
                let last = ids.iter().rposition(|&id| id != padding);
                return last.or((!ids.is_empty()).then_some(0));
            }
        };
        ids.iter().position(|&other| other == id)
    }

    /// Returns whether a sequence ends as the model requires. A single padding token is accepted as a whole sequence, as in the library
    /// transformers.
    pub fn accepts(self, ids: &[u32]) -> bool {
        let Some(&last) = ids.last() else {
            return true;
        };
        match self {
            Self::Required(id) => id == last,
            Self::Token(id) => ids.contains(&id),
            Self::NotPadding(id) => id != last || ids.len() == 1,
            Self::Highest | Self::BeforePadding(_) => true,
        }
    }
}
