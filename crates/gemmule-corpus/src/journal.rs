//! The journal of a run, which records the finished windows. Each line is a record with a checksum.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{Seek as _, SeekFrom, Write as _},
    ops::Range,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{CorpusError, input::Inferred, output::Placed, window::Position};

/// Maximum size in bytes of a journal that is read.
const MAX_BYTES: u64 = 1 << 30;

/// Number of hexadecimal digits of the checksum at the start of a line. A space follows the
/// checksum.
const DIGITS: usize = 8;

/// A line of a journal.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Record {
    /// The identity of the run: all options and properties that affect the bytes of the output.
    Run(BTreeMap<String, String>),
    Window(Entry),
    /// The output is complete.
    End {
        /// Size of the output in bytes.
        size: u64,
    },
}

/// A finished window. Counts and sizes are cumulative, up to the end of this window.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub end: Position,
    /// Size of the output in bytes.
    pub data: u64,
    /// Size of the list of refused rows in bytes.
    pub errors: u64,
    pub refused: u64,
    pub tokens: Option<u64>,
    /// Position of the window's first byte in the output.
    pub at: u64,
    /// CRC-32 of the window's bytes in the output.
    pub data_sum: u32,
    /// CRC-32 of the window's bytes in the list of refused rows.
    pub errors_sum: u32,
    pub note: String,
    /// Types of the kept columns; only the first window has them.
    pub inferred: Option<Inferred>,
}

/// Ranges of a finished window in the output and in the list of refused rows, and their CRC-32.
#[derive(Debug)]
pub(crate) struct Sums {
    pub data: Range<u64>,
    pub data_sum: u32,
    pub errors: Range<u64>,
    pub errors_sum: u32,
}

/// The content of a journal.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub identity: Option<BTreeMap<String, String>>,
    /// The last finished window.
    pub last: Entry,
    pub parts: Vec<Placed>,
    pub sums: Vec<Sums>,
    pub inferred: Option<Inferred>,
    /// Size of the output in bytes; `None` until it is complete.
    pub complete: Option<u64>,
}

/// A journal that is open for appending.
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens a journal, or creates one. A last line that was truncated by a crash is removed.
    ///
    /// # Errors
    /// Returns an error if the journal is damaged before its last line.
    pub fn open(folder: &Path) -> Result<(Self, State), CorpusError> {
        let path = folder.join("journal");
        let failed = CorpusError::io(&path, "read");
        let damaged = |problem: String| CorpusError::Damaged {
            partial: folder.to_owned(),
            problem,
        };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(&path).map_err(&failed)?;
        let size = file.metadata().map_err(&failed)?.len();
        if size > MAX_BYTES {
            return Err(damaged(format!(
                "its journal has {size} bytes, and the limit is {MAX_BYTES}"
            )));
        }
        let content = fs::read(&path).map_err(&failed)?;
        let mut state = State::default();
        let mut valid = 0;
        for line in content.split_inclusive(|&b| b == b'\n') {
            let Some(record) = parse(line) else {
                break;
            };
            state.add(record);
            valid += line.len();
        }
        let rest = &content[valid..];
        let feed = rest.iter().position(|&b| b == b'\n');
        // A crash can damage only the last line.
        if feed.is_some_and(|feed| feed + 1 < rest.len()) {
            let problem = format!("its journal is damaged after {valid} bytes");
            return Err(damaged(problem));
        }
        file.set_len(valid as u64).map_err(&failed)?;
        file.seek(SeekFrom::End(0)).map_err(&failed)?;
        Ok((Self { path, file }, state))
    }

    /// Appends a line and syncs it to disk.
    pub fn append(&mut self, record: &Record) -> Result<(), CorpusError> {
        let failed = CorpusError::io(&self.path, "written");
        let text = serde_json::to_string(record).map_err(|e| failed(e.into()))?;
        let line = format!("{:08x} {text}\n", crc32fast::hash(text.as_bytes()));
        self.file.write_all(line.as_bytes()).map_err(&failed)?;
        self.file.sync_data().map_err(&failed)
    }
}

/// Returns the record of a line; `None` if the line is truncated or damaged.
fn parse(line: &[u8]) -> Option<Record> {
    let line = std::str::from_utf8(line.strip_suffix(b"\n")?).ok()?;
    let (checksum, text) = (line.get(..DIGITS)?, line.get(DIGITS + 1..)?);
    let checksum = u32::from_str_radix(checksum, 16).ok()?;
    match checksum == crc32fast::hash(text.as_bytes()) {
        true => serde_json::from_str(text).ok(),
        false => None,
    }
}

impl State {
    fn add(&mut self, record: Record) {
        match record {
            Record::Run(identity) => self.identity = Some(identity),
            Record::Window(entry) => self.push(entry),
            Record::End { size } => self.complete = Some(size),
        }
    }

    /// Adds a finished window.
    pub fn push(&mut self, mut entry: Entry) {
        self.parts.push(Placed {
            at: entry.at,
            note: std::mem::take(&mut entry.note),
        });
        self.sums.push(Sums {
            data: entry.at..entry.data,
            data_sum: entry.data_sum,
            errors: self.last.errors..entry.errors,
            errors_sum: entry.errors_sum,
        });
        if let Some(inferred) = entry.inferred.take() {
            self.inferred = Some(inferred);
        }
        self.last = entry;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(row: u64) -> Record {
        Record::Window(Entry {
            end: Position { row, byte: 0 },
            note: "n".to_owned(),
            ..Entry::default()
        })
    }

    #[test]
    fn a_cut_line_is_removed_and_a_damaged_one_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("journal");
        let (mut journal, state) = Journal::open(folder.path()).expect("created");
        assert!(state.identity.is_none());
        journal
            .append(&Record::Run(BTreeMap::new()))
            .expect("written");
        journal.append(&entry(5)).expect("written");
        let whole = fs::read(&path).expect("read");
        for cut in 0..whole.len() {
            fs::write(&path, &whole[..cut]).expect("written");
            let (_, state) = Journal::open(folder.path()).expect("opened");
            assert_eq!(state.last.end.row, 0);
        }
        fs::write(&path, &whole).expect("written");
        let (mut journal, state) = Journal::open(folder.path()).expect("opened");
        assert_eq!((state.last.end.row, state.parts.len()), (5, 1));
        journal.append(&entry(9)).expect("written");
        let mut whole = fs::read(&path).expect("read");
        whole[20] ^= 1;
        fs::write(&path, &whole).expect("written");
        assert!(matches!(
            Journal::open(folder.path()),
            Err(CorpusError::Damaged { .. })
        ));
    }
}
