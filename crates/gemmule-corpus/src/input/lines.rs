//! Text files with one text on each line.

use std::path::PathBuf;

use arrow_schema::Fields;

use super::{
    Source,
    bytes::{Line, Stream},
    read_error,
};
use crate::{
    CorpusError, Limits,
    job::Checked,
    window::{Kept, Position, Window, bytes},
};

const FORMAT: &str = "lines";

/// A reader of text files with one text on each line.
pub(super) struct Lines {
    path: PathBuf,
    stream: Stream,
    limits: Limits,
    row: u64,
}

impl Lines {
    pub fn open(checked: &Checked<'_>, from: Position) -> Result<Self, CorpusError> {
        let path = checked.job.input.clone();
        let stream = Stream::open(&path, from.byte).map_err(read_error(&path, FORMAT))?;
        Ok(Self {
            path,
            stream,
            limits: checked.job.limits,
            row: from.row,
        })
    }
}

impl Source for Lines {
    fn window(&mut self) -> Result<Option<Window>, CorpusError> {
        let first = self.row;
        let mut rows = Vec::new();
        let mut n_bytes = 0;
        let mut line = Vec::new();
        while rows.len() < self.limits.window_rows && n_bytes < self.limits.window_bytes {
            let kind = self.stream.line(self.limits.row_bytes, &mut line);
            let row = match kind.map_err(read_error(&self.path, FORMAT))? {
                Line::End => break,
                Line::TooLong(n) => Err(too_long(n, self.limits.row_bytes)),
                Line::Complete => utf8(&line, "the line").map(|text| vec![text.to_owned()]),
            };
            n_bytes += bytes(&row);
            rows.push(row);
        }
        self.row += rows.len() as u64;
        Ok((!rows.is_empty()).then(|| Window {
            first,
            rows,
            kept: Kept::Columns(Vec::new()),
            end: Position {
                row: self.row,
                byte: self.stream.at(),
            },
        }))
    }

    fn fields(&self) -> Fields {
        Fields::empty()
    }

    fn total_bytes(&self) -> Option<u64> {
        self.stream.size()
    }
}

/// Returns the reason for refusing a line that exceeds the limit.
pub(super) fn too_long(bytes: u64, limit: usize) -> String {
    format!("the line has {bytes} bytes, and the limit is {limit}")
}

/// Returns bytes as text, or the reason why they are not text.
pub(super) fn utf8<'b>(bytes: &'b [u8], what: &str) -> Result<&'b str, String> {
    std::str::from_utf8(bytes).map_err(|e| {
        format!(
            "{what} is not UTF-8 after its first {} bytes",
            e.valid_up_to()
        )
    })
}
