//! Element types, symbolic sizes and shapes, which all other modules use.
//!
//! Activations have the packed layout `[tokens, width]`, where `tokens` is the number of valid
//! tokens of the whole batch, with the cumulative lengths in a separate tensor (ByteTransformer
//! III.D). A size is a small polynomial of [`Symbol`]s, evaluated per batch.

mod dtype;
mod extents;
mod size;

pub use dtype::{DType, UnknownDType};
pub use extents::{Extents, LengthsError};
pub use size::{Shape, Size, Symbol};
