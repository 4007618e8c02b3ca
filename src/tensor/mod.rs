//! Element types, symbolic sizes and shapes: the vocabulary that every other room speaks.
//!
//! The packed layout is the only one inside gemmule: activations are `[tokens, width]`, where
//! `tokens` is the number of valid tokens of the whole batch, and cumulative lengths stand beside
//! them (ByteTransformer III.D). A size is a small polynomial of [`Symbol`]s, evaluated per batch.

mod dtype;
mod extents;
mod size;

pub use dtype::{DType, Element, UnknownDType};
pub use extents::{Extents, LengthsError};
pub use size::{Shape, Size, Symbol};
