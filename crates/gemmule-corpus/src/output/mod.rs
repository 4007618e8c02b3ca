//! Writers of outputs.
//!
//! An output is written window by window, so an interrupted run resumes after the last finished window.

mod arrow;
mod columns;
mod jsonl;
mod npy;
mod parquet;

use arrow_schema::{DataType, Fields};

use crate::{Column, CorpusError, Keep, OutputFormat, Value, Vectors, job::Checked, window::Kept};

/// The columns of an output.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub row: String,
    /// The kept columns.
    pub fields: Fields,
    /// The computed columns.
    pub columns: Vec<Column>,
    pub vectors: Vectors,
    /// Identity of the model.
    pub model: String,
}

/// The rows of a window with their values.
#[derive(Debug)]
pub(crate) struct Batch {
    pub first: u64,
    pub kept: Kept,
    /// For each row, a value for each computed column, or the reason why the row is refused.
    pub rows: Vec<Result<Vec<Value>, String>>,
}

/// The bytes of a window.
#[derive(Debug, Default)]
pub(crate) struct Part {
    pub bytes: Vec<u8>,
    /// Information about these bytes that [`Encoder::tail`] needs, as text.
    pub note: String,
}

/// The position and the [note](Part::note) of a window in the file.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    /// Position of the window's first byte in the file.
    pub at: u64,
    pub note: String,
}

/// The bytes that complete a file.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    /// Bytes that replace the start of the file.
    pub head: Vec<u8>,
    /// Bytes after the last window.
    pub end: Vec<u8>,
}

/// Encodes windows in one format. Errors are descriptions of the problem.
pub(crate) trait Encoder: Send + Sync {
    /// Returns the bytes before the first window.
    fn head(&self) -> Result<Vec<u8>, String>;

    fn window(&self, batch: &Batch) -> Result<Part, String>;

    /// Returns the bytes that complete a file. `parts` are its windows, `rows` is the number of input rows, and `at` is the current size of
    /// the file.
    fn tail(&self, parts: &[Placed], rows: u64, at: u64) -> Result<Tail, String>;
}

/// Returns the encoder of a job.
///
/// # Errors
/// Returns an error if a kept column has the name of an output column, or a type that the format does not support.
pub(crate) fn encoder(
    checked: &Checked<'_>,
    layout: Layout,
) -> Result<Box<dyn Encoder>, CorpusError> {
    for field in &layout.fields {
        if checked.own.contains(field.name()) {
            return Err(CorpusError::NameTaken {
                column: field.name().clone(),
            });
        }
        let is_held = match checked.output {
            OutputFormat::Jsonl => jsonl::holds(field.data_type()),
            OutputFormat::Parquet | OutputFormat::Arrow => {
                !matches!(field.data_type(), DataType::Dictionary(..))
            }
            OutputFormat::Npy => checked.job.keep == Keep::None,
        };
        if !is_held {
            return Err(CorpusError::KeptType {
                column: field.name().clone(),
                found: field.data_type().to_string(),
                format: checked.output.name(),
            });
        }
    }
    Ok(match checked.output {
        OutputFormat::Parquet => Box::new(parquet::Encoder::new(layout)),
        OutputFormat::Arrow => Box::new(arrow::Encoder::new(layout)),
        OutputFormat::Npy => Box::new(npy::Encoder::new(&layout)),
        OutputFormat::Jsonl => Box::new(jsonl::Encoder::new(layout)),
    })
}
