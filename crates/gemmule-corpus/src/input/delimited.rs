//! Comma- or tab-separated values with a header.

use std::{io, path::PathBuf, sync::Arc};

use arrow_array::{ArrayRef, builder::StringBuilder};
use arrow_schema::{DataType, Field, Fields};
use csv_core::{ReadRecordResult, Reader, ReaderBuilder};

use super::{Source, bytes::Stream, described, lines::utf8, list, place, read_error};
use crate::{
    CorpusError, Keep, Limits,
    job::Checked,
    window::{Kept, Position, Row, Window, bytes},
};

/// Maximum number of fields of a record.
const MAX_FIELDS: usize = 65_536;

/// Reads records of up to `limit` bytes from a stream.
struct Records {
    stream: Stream,
    reader: Reader,
    limit: usize,
    /// Bytes of all fields, concatenated.
    bytes: Vec<u8>,
    /// End of each field in `bytes`.
    ends: Vec<usize>,
    n_fields: usize,
    is_done: bool,
}

/// The result of reading the next record of a file.
#[derive(Debug, PartialEq, Eq)]
enum Record {
    End,
    Complete,
    TooLong,
    /// The file ends inside a quoted field.
    Open,
}

impl Records {
    fn new(stream: Stream, delimiter: u8, limit: usize) -> Self {
        Self {
            stream,
            reader: ReaderBuilder::new().delimiter(delimiter).build(),
            limit,
            bytes: vec![0; limit.clamp(1, 4096)],
            ends: vec![0; 64],
            n_fields: 0,
            is_done: false,
        }
    }

    /// Reads a record, and skips empty lines.
    fn next(&mut self) -> io::Result<Record> {
        let (mut used, mut n) = (0, 0);
        let mut is_too_long = false;
        if self.is_done {
            return Ok(Record::End);
        }
        loop {
            // At the end of the file, pass a line feed to the parser. It completes the last record, unless the file ends inside a quoted
            // field.
            let input = self.stream.fill()?;
            let is_end = input.is_empty();
            let input = if is_end { b"\n" } else { input };
            let (output, ends) = (&mut self.bytes[used..], &mut self.ends[n..]);
            let (result, read, written, found) = self.reader.read_record(input, output, ends);
            if !is_end {
                self.stream.consume(read);
            }
            used += written;
            n += found;
            match result {
                ReadRecordResult::Record if is_too_long => return Ok(Record::TooLong),
                ReadRecordResult::Record => {
                    self.n_fields = n;
                    return Ok(Record::Complete);
                }
                ReadRecordResult::InputEmpty | ReadRecordResult::End if is_end => {
                    self.is_done = true;
                    return Ok(match (is_too_long, written) {
                        (true, _) => Record::TooLong,
                        (false, 0) => Record::End,
                        (false, _) => Record::Open,
                    });
                }
                ReadRecordResult::InputEmpty | ReadRecordResult::End => {}
                ReadRecordResult::OutputFull if used < self.limit => {
                    let len = (2 * self.bytes.len()).min(self.limit);
                    self.bytes.resize(len.max(used + 1), 0);
                }
                ReadRecordResult::OutputEndsFull if n < MAX_FIELDS => {
                    self.ends.resize(2 * self.ends.len(), 0);
                }
                // The rest of a record that exceeds the limit is read and discarded.
                ReadRecordResult::OutputFull | ReadRecordResult::OutputEndsFull => {
                    is_too_long = true;
                    (used, n) = (0, 0);
                }
            }
        }
    }

    fn field(&self, index: usize) -> &[u8] {
        let start = match index {
            0 => 0,
            _ => self.ends[index - 1],
        };
        &self.bytes[start..self.ends[index]]
    }
}

/// A file of separated values.
pub(super) struct Delimited {
    path: PathBuf,
    format: &'static str,
    records: Records,
    limits: Limits,
    n_columns: usize,
    /// Names and indices of the columns of texts.
    columns: Vec<(String, usize)>,
    /// Names and indices of kept columns.
    kept: Vec<(String, usize)>,
    row: u64,
}

impl Delimited {
    pub fn open(checked: &Checked<'_>, delimiter: u8, from: Position) -> Result<Self, CorpusError> {
        let job = checked.job;
        let path = job.input.clone();
        let format = if delimiter == b'\t' { "TSV" } else { "CSV" };
        let failed = read_error(&path, format);
        let start = |at| -> Result<Records, CorpusError> {
            let stream = Stream::open(&path, at).map_err(&failed)?;
            Ok(Records::new(stream, delimiter, job.limits.row_bytes))
        };
        let bad = |problem: &str| Err(CorpusError::input(&path, format, problem));
        let mut records = start(0)?;
        match records.next().map_err(&failed)? {
            Record::Complete => {}
            Record::End => return bad("it is empty; expected a header with the columns' names"),
            Record::TooLong => {
                return bad(
                    "its header is longer than the limit of a row; a quote may have no end",
                );
            }
            Record::Open => return bad("a quote of its header has no end"),
        }
        let mut names = Vec::with_capacity(records.n_fields);
        for index in 0..records.n_fields {
            match std::str::from_utf8(records.field(index)) {
                Ok(name) => names.push(name.to_owned()),
                Err(_) => return bad("its header is not UTF-8"),
            }
        }
        let place = |column: &str| match place(&path, column, names.iter().map(String::as_str))? {
            Some(place) => Ok(place),
            None => Err(CorpusError::NoColumn {
                path: path.clone(),
                column: column.to_owned(),
                columns: list(names.iter().map(|name| format!("`{name}`"))),
            }),
        };
        let placed = |names: &[String]| {
            let placed = names.iter().map(|name| Ok((name.clone(), place(name)?)));
            placed.collect::<Result<Vec<_>, CorpusError>>()
        };
        let columns = placed(&job.columns)?;
        let kept = match &job.keep {
            Keep::None => Vec::new(),
            Keep::All => {
                let is_text = |name: &&String| job.columns.contains(name);
                let kept = names.iter().filter(|name| !is_text(name)).cloned();
                placed(&kept.collect::<Vec<_>>())?
            }
            Keep::Named(names) => placed(names)?,
        };
        if from.byte > 0 {
            records = start(from.byte)?;
        }
        Ok(Self {
            format,
            limits: job.limits,
            n_columns: names.len(),
            columns,
            kept,
            row: from.row,
            path,
            records,
        })
    }

    /// Returns the texts of the current record.
    fn texts(&self) -> Row {
        let n = self.records.n_fields;
        if n != self.n_columns {
            return Err(format!(
                "the record has {n} fields, and the header has {}; a quote may be missing",
                self.n_columns
            ));
        }
        for (name, place) in &self.kept {
            utf8(
                self.records.field(*place),
                &format!("the kept field `{name}`"),
            )?;
        }
        let text = |(name, place): &(String, usize)| {
            let what = described(&self.columns, name);
            utf8(self.records.field(*place), &what).map(str::to_owned)
        };
        self.columns.iter().map(text).collect()
    }
}

impl Source for Delimited {
    fn window(&mut self) -> Result<Option<Window>, CorpusError> {
        let first = self.row;
        let mut rows = Vec::new();
        let mut builders: Vec<_> = self.kept.iter().map(|_| StringBuilder::new()).collect();
        let mut n_bytes = 0;
        while rows.len() < self.limits.window_rows && n_bytes < self.limits.window_bytes {
            let record = self.records.next();
            let row = match record.map_err(read_error(&self.path, self.format))? {
                Record::End => break,
                Record::Complete => self.texts(),
                Record::TooLong => Err(format!(
                    "the record has more than {} bytes or {MAX_FIELDS} fields, the limits; a quote may have no end",
                    self.limits.row_bytes
                )),
                Record::Open => Err("the file ends before the record's quote does".to_owned()),
            };
            n_bytes += bytes(&row);
            for ((_, place), builder) in self.kept.iter().zip(&mut builders) {
                match &row {
                    Ok(_) => {
                        let value = self.records.field(*place);
                        n_bytes += value.len();
                        builder.append_option(std::str::from_utf8(value).ok());
                    }
                    Err(_) => builder.append_null(),
                }
            }
            rows.push(row);
        }
        self.row += rows.len() as u64;
        let arrays = builders
            .into_iter()
            .map(|mut b| Arc::new(b.finish()) as ArrayRef);
        let kept = Kept::Columns(arrays.collect());
        Ok((!rows.is_empty()).then(|| Window {
            first,
            rows,
            kept,
            end: Position {
                row: self.row,
                byte: self.records.stream.at(),
            },
        }))
    }

    fn fields(&self) -> Fields {
        let field = |(name, _): &(String, usize)| Field::new(name, DataType::Utf8, true);
        self.kept.iter().map(field).map(Arc::new).collect()
    }

    fn total_bytes(&self) -> Option<u64> {
        self.records.stream.size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the kinds of records and their fields.
    fn records(content: &[u8], limit: usize) -> Vec<(Record, Vec<String>)> {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), content).expect("written");
        let stream = Stream::open(file.path(), 0).expect("opened");
        let mut records = Records::new(stream, b',', limit);
        let mut read = Vec::new();
        loop {
            let record = records.next().expect("a record");
            let n = if record == Record::Complete {
                records.n_fields
            } else {
                0
            };
            let fields = (0..n).map(|i| String::from_utf8_lossy(records.field(i)).into_owned());
            let fields = fields.collect();
            if record == Record::End {
                return read;
            }
            read.push((record, fields));
        }
    }

    #[test]
    fn quotes_and_ends() {
        let row = |fields: &[&str]| {
            (
                Record::Complete,
                fields.iter().map(|&f| f.to_owned()).collect(),
            )
        };
        let expected = [row(&["a", "b"]), row(&["c\n\"d\"", ""])];
        assert_eq!(records(b"a,b\r\n\n\"c\n\"\"d\"\"\",\n\n", 100), expected);
        assert_eq!(records(b"a,5\" disc", 100), [row(&["a", "5\" disc"])]);
        assert_eq!(records(b"a,\"b\"", 100), [row(&["a", "b"])]);
        assert_eq!(
            records(b"a\n\"b\nc\n", 100),
            [row(&["a"]), (Record::Open, vec![])]
        );
        assert_eq!(
            records(b"a\n\"b", 100),
            [row(&["a"]), (Record::Open, vec![])]
        );
    }

    #[test]
    fn a_record_over_the_limit_is_skipped() {
        let content = format!("a\n\"{}\"\nb\n\"{}", "x\n".repeat(9000), "y".repeat(9000));
        let row = |field: &str| (Record::Complete, vec![field.to_owned()]);
        let long = || (Record::TooLong, vec![]);
        assert_eq!(
            records(content.as_bytes(), 5000),
            [row("a"), long(), row("b"), long()]
        );
    }

    #[test]
    fn many_fields() {
        let content = format!("{}\nb\n", ",".repeat(MAX_FIELDS + 10));
        let read = records(content.as_bytes(), 1 << 20);
        assert_eq!(read[0].0, Record::TooLong);
        assert_eq!(read[1].1, ["b"]);
    }
}
