//! Windows of rows. The rows of a window are read, computed and written together.

use arrow_array::ArrayRef;
use serde::{Deserialize, Serialize};

use crate::Texts;

/// The texts of a row, or the reason why the row has none.
pub(crate) type Row = Result<Texts, String>;

/// Returns the number of bytes of a row's texts.
pub(crate) fn bytes(row: &Row) -> usize {
    row.iter().flatten().map(String::len).sum()
}

/// The position in the input after a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Position {
    /// Number of rows before this position.
    pub row: u64,
    /// Number of decompressed bytes before this position; 0 for Parquet.
    pub byte: u64,
}

/// Consecutive rows of the input.
#[derive(Debug)]
pub(crate) struct Window {
    /// Number of the first row.
    pub first: u64,
    /// The rows; at least one.
    pub rows: Vec<Row>,
    pub kept: Kept,
    pub end: Position,
}

/// The kept columns of a window. They have values for all rows, including refused ones.
#[derive(Debug)]
pub(crate) enum Kept {
    Columns(Vec<ArrayRef>),
    /// For each row, the kept members of its JSON object as text: `"id":1,"title":"a"`. From JSONL to JSONL, members are copied unchanged.
    Members(Vec<String>),
}
