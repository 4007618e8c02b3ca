//! The interface between the threads of a run and the values that a command computes.

use gemmule_corpus::{Column, Value};
use miette::Report;

use crate::text::Encoded;

/// The values of a row: from its texts to sequences of tokens, and from the model's values to those of the output.
/// Errors of a row are reasons for refusing it.
pub(in crate::cli) trait Task: Send + Sync + 'static {
    /// State of a row between its sequences and its values.
    type Row: Send;

    /// Describes the options that change a value.
    fn identity(&self) -> String;

    /// Returns the output of the model that is read.
    fn output(&self) -> &'static str;

    /// Returns the columns, if the model has `width` values for a sequence or for each of its tokens.
    ///
    /// # Errors
    /// Returns an error if the task cannot be computed from such values.
    fn columns(&self, width: usize) -> Result<Vec<Column>, Report>;

    /// Tokenizes the texts of a row.
    fn encode(&self, texts: &[String]) -> Result<Units<Self::Row>, String>;

    /// Returns the values of a row from those of its sequences.
    fn finish(&self, row: Self::Row, outputs: &[&[f32]]) -> Result<Vec<Value>, String>;
}

/// The sequences of a row, at least one, which are computed in any batches.
pub(in crate::cli) struct Units<R> {
    pub(in crate::cli) row: R,
    pub(in crate::cli) sequences: Vec<Encoded>,
}
