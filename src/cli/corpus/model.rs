//! The interface between the threads of a run and the task of a command.

use gemmule_corpus::{Column, Value};
use miette::Report;

use crate::text::Encoded;

/// A task of a command. It tokenizes the texts of a row into sequences, and turns the model's outputs for these sequences into the values
/// of the output row. An error of [`encode`](Self::encode) or [`finish`](Self::finish) is the reason why the row is refused.
pub(in crate::cli) trait Task: Send + Sync + 'static {
    /// State of a row between [`encode`](Self::encode) and [`finish`](Self::finish).
    type Row: Send;

    /// Describes the options on which the output values depend.
    fn identity(&self) -> String;

    /// Returns the name of the model's output that the task reads.
    fn output(&self) -> &'static str;

    /// Returns the columns of the output. `width` is the number of values that the model returns for a sequence, or for each of its tokens.
    ///
    /// # Errors
    /// Returns an error if the task cannot be computed from such values.
    fn columns(&self, width: usize) -> Result<Vec<Column>, Report>;

    /// Tokenizes the texts of a row.
    fn encode(&self, texts: &[String]) -> Result<Units<Self::Row>, String>;

    /// Returns the values of a row. `outputs` are the model's values for each of its sequences.
    fn finish(&self, row: Self::Row, outputs: &[&[f32]]) -> Result<Vec<Value>, String>;
}

/// The sequences of a row, and its state `row`. There is at least one sequence. The sequences may be computed in different batches.
pub(in crate::cli) struct Units<R> {
    pub(in crate::cli) row: R,
    pub(in crate::cli) sequences: Vec<Encoded>,
}
