//! Readers of inputs.

mod bytes;
mod delimited;
mod infer;
mod json;
mod jsonl;
mod lines;
mod parquet;

use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::Path,
    time::UNIX_EPOCH,
};

use arrow_schema::Fields;
use sha2::{Digest as _, Sha256};

pub(crate) use infer::Kind;

use crate::{
    CorpusError, InputFormat,
    job::Checked,
    window::{Position, Window},
};

/// Number of bytes at the start of an input that are hashed for its identity.
const HASHED: u64 = 1 << 20;

/// Maximum number of columns that errors list.
const LISTED: usize = 50;

/// Kept columns of JSONL input with their types, which are inferred from the first window.
pub(crate) type Inferred = Vec<(String, Kind)>;

/// A reader of an input, which returns windows one after another.
pub(crate) trait Source: Send {
    /// Returns the next window, or `None` at the end.
    ///
    /// # Errors
    /// Returns an error if the input cannot be read further, or if no row of the first window has texts.
    fn window(&mut self) -> Result<Option<Window>, CorpusError>;

    /// Returns the names and types of the kept columns. Call this after the first window, which determines the columns of JSONL input.
    fn fields(&self) -> Fields;

    /// Returns the kept columns with the types that were inferred from the first window; `None` if no types are inferred.
    fn inferred(&self) -> Option<Inferred> {
        None
    }

    /// Returns the number of rows of the input, if its format states it.
    fn total(&self) -> Option<u64> {
        None
    }

    /// Returns the size of the input in bytes; `None` if the input is compressed, or if its windows have no byte position.
    fn total_bytes(&self) -> Option<u64> {
        None
    }
}

/// Opens the input and skips the rows of finished windows.
pub(crate) fn open(
    checked: &Checked<'_>,
    from: Position,
    inferred: Option<Inferred>,
) -> Result<Box<dyn Source>, CorpusError> {
    Ok(match checked.input {
        InputFormat::Jsonl => Box::new(jsonl::Jsonl::open(checked, from, inferred)?),
        InputFormat::Csv => Box::new(delimited::Delimited::open(checked, b',', from)?),
        InputFormat::Tsv => Box::new(delimited::Delimited::open(checked, b'\t', from)?),
        InputFormat::Parquet => Box::new(parquet::Parquet::open(checked, from)?),
        InputFormat::Lines => Box::new(lines::Lines::open(checked, from)?),
    })
}

/// Returns the identity of an input as pairs of a property and its value.
pub(crate) fn identity(path: &Path) -> Result<[(String, String); 3], CorpusError> {
    let failed = CorpusError::io(path, "read");
    let metadata = fs::metadata(path).map_err(&failed)?;
    if !metadata.is_file() {
        return Err(CorpusError::NotAFile {
            path: path.to_owned(),
        });
    }
    let time = metadata.modified().map_err(&failed)?;
    let time = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => format!("{}.{:09}", after.as_secs(), after.subsec_nanos()),
        Err(before) => format!("-{:?}", before.duration()),
    };
    let mut start = Vec::new();
    let file = File::open(path).map_err(&failed)?;
    file.take(HASHED).read_to_end(&mut start).map_err(&failed)?;
    let hash: String = Sha256::digest(&start)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    Ok([
        ("size of the input".to_owned(), metadata.len().to_string()),
        ("modification time of the input".to_owned(), time),
        ("SHA-256 of the input's first MiB".to_owned(), hash),
    ])
}

/// Returns a function that converts read errors. A truncated or invalid compressed stream is an error of the input.
fn read_error(path: &Path, format: &'static str) -> impl Fn(io::Error) -> CorpusError + use<> {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::UnexpectedEof => {
            CorpusError::input(&path, format, "it ends in the middle; fetch it again")
        }
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
            CorpusError::input(&path, format, source)
        }
        _ => CorpusError::Io {
            path: path.clone(),
            action: "read",
            source,
        },
    }
}

/// Returns the index of a column; `None` if there is no such column.
///
/// # Errors
/// Returns an error if several columns have the name.
fn place<'n>(
    path: &Path,
    column: &str,
    names: impl Iterator<Item = &'n str>,
) -> Result<Option<usize>, CorpusError> {
    let mut places = names.enumerate().filter(|(_, name)| *name == column);
    match (places.next(), places.next()) {
        (Some(_), Some(_)) => Err(CorpusError::SeveralColumns {
            path: path.to_owned(),
            column: column.to_owned(),
        }),
        (found, _) => Ok(found.map(|(place, _)| place)),
    }
}

/// Returns a phrase for the text of a column. It includes the name if there are several columns.
fn described<T>(columns: &[T], name: &str) -> String {
    match columns.len() {
        1 => "the text".to_owned(),
        _ => format!("the text of `{name}`"),
    }
}

/// Lists columns for errors.
fn list(columns: impl ExactSizeIterator<Item = String>) -> String {
    let n = columns.len();
    let mut shown: Vec<String> = columns.take(LISTED).collect();
    if n == 0 {
        return "no columns".to_owned();
    }
    if n > LISTED {
        shown.push(format!("and {} more", n - LISTED));
    }
    shown.join(", ")
}
