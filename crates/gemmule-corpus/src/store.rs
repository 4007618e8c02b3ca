//! The folder of an unfinished output.
//!
//! ```text
//! OUTPUT.partial/lock       held while a run writes
//! OUTPUT.partial/journal    the run's identity, and a line for each finished window
//! OUTPUT.partial/data       becomes OUTPUT
//! OUTPUT.partial/errors     becomes OUTPUT.errors.jsonl
//! ```

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{Read as _, Seek as _, SeekFrom, Write as _},
    ops::Range,
    path::{Path, PathBuf},
};

use crate::{
    CorpusError, Job, Report,
    journal::{Entry, Journal, Record, State},
    lock::Lock,
    output::Tail,
};

/// Maximum number of differences that an error lists.
const LISTED: usize = 8;

/// Maximum number of bytes that are read at once.
const READ: u64 = 1 << 20;

/// An unfinished output.
pub(crate) struct Store {
    job: Job,
    folder: PathBuf,
    lock: Lock,
    journal: Journal,
    data: Output,
    errors: Output,
    state: State,
    /// Number of rows that earlier runs finished.
    resumed: u64,
}

/// The result of opening a folder.
pub(crate) enum Opened {
    Unfinished(Box<Store>),
    /// An earlier run published the output, but was interrupted before it removed the folder. The folder is now removed.
    Published(Report),
}

/// A file of the folder.
struct Output {
    path: PathBuf,
    file: File,
}

impl Output {
    fn open(path: PathBuf) -> Result<Self, CorpusError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options
            .open(&path)
            .map_err(CorpusError::io(&path, "opened"))?;
        Ok(Self { path, file })
    }

    fn len(&self) -> Result<u64, CorpusError> {
        let metadata = self
            .file
            .metadata()
            .map_err(CorpusError::io(&self.path, "read"))?;
        Ok(metadata.len())
    }

    fn cut(&mut self, len: u64) -> Result<(), CorpusError> {
        self.file
            .set_len(len)
            .map_err(CorpusError::io(&self.path, "cut"))
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), CorpusError> {
        let failed = CorpusError::io(&self.path, "written");
        self.file.seek(SeekFrom::Start(at)).map_err(&failed)?;
        self.file.write_all(bytes).map_err(&failed)
    }

    /// Returns the CRC-32 of a range of bytes.
    fn sum(&mut self, range: &Range<u64>) -> Result<u32, CorpusError> {
        let failed = CorpusError::io(&self.path, "read");
        self.file
            .seek(SeekFrom::Start(range.start))
            .map_err(&failed)?;
        let (mut sum, mut left) = (
            crc32fast::Hasher::new(),
            range.end.saturating_sub(range.start),
        );
        let mut bytes = vec![0; left.min(READ) as usize];
        while left > 0 {
            let piece = &mut bytes[..left.min(READ) as usize];
            self.file.read_exact(piece).map_err(&failed)?;
            sum.update(piece);
            left -= piece.len() as u64;
        }
        Ok(sum.finalize())
    }

    fn sync(&self) -> Result<(), CorpusError> {
        self.file
            .sync_all()
            .map_err(CorpusError::io(&self.path, "written"))
    }
}

impl Store {
    /// Opens the folder of a job's output, and resumes from its contents or starts over.
    ///
    /// # Errors
    /// Returns an error if the output exists, if another run is writing it, or if an interrupted run has another identity. With
    /// [`Job::overwrite`], an existing output and another identity are not errors.
    pub fn open(job: &Job, identity: BTreeMap<String, String>) -> Result<Opened, CorpusError> {
        let folder = job.partial();
        let exists = || CorpusError::Exists {
            output: job.output.clone(),
        };
        if !job.overwrite && is_there(&job.output) && !is_there(&folder) {
            return Err(exists());
        }
        let lock = Lock::take(&folder, &job.output)?;
        let (mut journal, mut state) = match Journal::open(&folder) {
            Err(CorpusError::Damaged { .. }) if job.overwrite => Self::start_over(&folder)?,
            opened => opened?,
        };
        let data = folder.join("data");
        let difference = differences(&state, &identity);
        if state.complete.is_some() && !is_there(&data) {
            // A run published the output, and was interrupted before it removed the folder.
            if difference.is_none() && is_there(&job.output) {
                let report = report(job, &state.last, state.last.end.row);
                remove(&folder, &lock);
                return Ok(Opened::Published(report));
            }
            (journal, state) = Self::start_over(&folder)?;
        } else if let Some(differences) = difference {
            if !job.overwrite {
                return Err(CorpusError::Differs {
                    partial: folder,
                    differences,
                });
            }
            (journal, state) = Self::start_over(&folder)?;
        }
        let is_new = state.identity.is_none();
        if !job.overwrite && is_there(&job.output) {
            if is_new {
                remove(&folder, &lock);
            }
            return Err(exists());
        }
        if is_new {
            (journal, state) = Self::start_over(&folder)?;
            journal.append(&Record::Run(identity.clone()))?;
            state.identity = Some(identity);
        }
        let mut store = Self {
            job: job.clone(),
            lock,
            journal,
            data: Output::open(data)?,
            errors: Output::open(folder.join("errors"))?,
            resumed: state.last.end.row,
            state,
            folder,
        };
        sync_folder(&store.folder)?;
        store.cut()?;
        store.verify()?;
        Ok(Opened::Unfinished(Box::new(store)))
    }

    /// Removes all files of the folder except the lock, and creates a new journal.
    fn start_over(folder: &Path) -> Result<(Journal, State), CorpusError> {
        remove_file(&folder.join("journal"))?;
        remove_file(&folder.join("data"))?;
        remove_file(&folder.join("errors"))?;
        Journal::open(folder)
    }

    /// Truncates the files to the end of the last finished window.
    fn cut(&mut self) -> Result<(), CorpusError> {
        let last = &self.state.last;
        let data = self.state.complete.unwrap_or(last.data);
        let mut sizes = vec![(&mut self.data, data)];
        // For a complete output, the list of refused rows may already be published.
        if self.state.complete.is_none() {
            sizes.push((&mut self.errors, last.errors));
        }
        for (file, expected) in sizes {
            let found = file.len()?;
            if found < expected {
                return Err(CorpusError::Damaged {
                    partial: self.folder.clone(),
                    problem: format!(
                        "`{}` has {found} bytes, and the journal says {expected}",
                        file.path.display()
                    ),
                });
            }
            file.cut(expected)?;
        }
        Ok(())
    }

    /// Checks that the finished windows have not changed since they were written. A complete output is not checked.
    fn verify(&mut self) -> Result<(), CorpusError> {
        if self.state.complete.is_some() {
            return Ok(());
        }
        for sums in &self.state.sums {
            let both = [
                (&mut self.data, &sums.data, sums.data_sum),
                (&mut self.errors, &sums.errors, sums.errors_sum),
            ];
            for (file, range, expected) in both {
                if file.sum(range)? != expected {
                    return Err(CorpusError::Damaged {
                        partial: self.folder.clone(),
                        problem: format!(
                            "bytes {} to {} of `{}` have changed since they were written",
                            range.start,
                            range.end,
                            file.path.display()
                        ),
                    });
                }
            }
        }
        Ok(())
    }

    pub fn state(&self) -> &State {
        &self.state
    }

    /// Returns the number of finished rows.
    pub fn rows(&self) -> u64 {
        self.state.last.end.row
    }

    /// Appends a window and syncs it to disk. Sets the position, the sizes and the checksums in `entry`.
    pub fn append(
        &mut self,
        head: &[u8],
        bytes: &[u8],
        errors: &[u8],
        mut entry: Entry,
    ) -> Result<(), CorpusError> {
        let last = &self.state.last;
        let (mut at, errors_at) = (last.data, last.errors);
        if at == 0 {
            self.data.write(0, head)?;
            at = head.len() as u64;
        }
        self.data.write(at, bytes)?;
        self.data.sync()?;
        if !errors.is_empty() {
            self.errors.write(errors_at, errors)?;
            self.errors.sync()?;
        }
        entry.at = at;
        entry.data = at + bytes.len() as u64;
        entry.errors = errors_at + errors.len() as u64;
        (entry.data_sum, entry.errors_sum) = (crc32fast::hash(bytes), crc32fast::hash(errors));
        let record = Record::Window(entry);
        self.journal.append(&record)?;
        if let Record::Window(entry) = record {
            self.state.push(entry);
        }
        Ok(())
    }

    /// Writes the bytes that complete the output, and records in the journal that the output is complete.
    pub fn complete(&mut self, head: &[u8], tail: &Tail) -> Result<(), CorpusError> {
        let mut at = self.state.last.data;
        if at == 0 {
            self.data.write(0, head)?;
            at = head.len() as u64;
        }
        self.data.write(at, &tail.end)?;
        self.data.write(0, &tail.head)?;
        self.data.sync()?;
        let size = self.data.len()?;
        self.journal.append(&Record::End { size })?;
        self.state.complete = Some(size);
        Ok(())
    }

    /// Moves the complete files to their final paths, and removes the folder.
    pub fn publish(self) -> Result<Report, CorpusError> {
        let job = &self.job;
        if !job.overwrite && is_there(&job.output) {
            return Err(CorpusError::Exists {
                output: job.output.clone(),
            });
        }
        // Move the list of refused rows first, so that an output never exists without its list.
        if self.state.last.refused == 0 {
            remove_file(&job.errors())?;
        } else if self.errors.len()? > 0 {
            rename(&self.errors.path, &job.errors())?;
        }
        rename(&self.data.path, &job.output)?;
        let parent = job.output.parent().filter(|p| !p.as_os_str().is_empty());
        sync_folder(parent.unwrap_or(Path::new(".")))?;
        remove(&self.folder, &self.lock);
        Ok(report(job, &self.state.last, self.resumed))
    }

    /// Removes the folder if no row is finished.
    pub fn abandon_empty(&self) {
        if self.rows() == 0 && self.state.complete.is_none() {
            remove(&self.folder, &self.lock);
        }
    }
}

fn report(job: &Job, last: &Entry, resumed: u64) -> Report {
    Report {
        rows: last.end.row,
        written: last.end.row.saturating_sub(last.refused),
        refused: last.refused,
        resumed,
        tokens: last.tokens,
        output: job.output.clone(),
        errors: (last.refused > 0).then(|| job.errors()),
    }
}

/// Lists the properties in which `identity` differs from the interrupted run in `state`. Returns `None` if there is no such run or no
/// difference.
fn differences(state: &State, identity: &BTreeMap<String, String>) -> Option<String> {
    let before = state.identity.as_ref()?;
    let names: std::collections::BTreeSet<&String> = before.keys().chain(identity.keys()).collect();
    let value = |of: &BTreeMap<String, String>, name| match of.get(name) {
        Some(value) => format!("`{value}`"),
        None => "nothing".to_owned(),
    };
    let mut found = Vec::new();
    for name in names {
        if before.get(name) != identity.get(name) {
            let (old, new) = (value(before, name), value(identity, name));
            found.push(format!("{name} was {old} and is {new}"));
        }
    }
    let more = found.len().saturating_sub(LISTED);
    found.truncate(LISTED);
    if more > 0 {
        found.push(format!("and {more} more"));
    }
    (!found.is_empty()).then(|| found.join("; "))
}

/// Checks whether a path exists, even as a broken link.
fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

fn remove_file(path: &Path) -> Result<(), CorpusError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(CorpusError::io(path, "removed")(e))
        }
        _ => Ok(()),
    }
}

fn rename(from: &Path, to: &Path) -> Result<(), CorpusError> {
    fs::rename(from, to).map_err(CorpusError::io(to, "replaced"))
}

/// Removes only the store's files and the folder. Failures are ignored, because the files are no longer needed.
fn remove(folder: &Path, lock: &Lock) {
    for name in ["data", "errors", "journal"] {
        let _ = fs::remove_file(folder.join(name));
    }
    let _ = fs::remove_file(&lock.path);
    let _ = fs::remove_dir(folder);
}

/// Syncs a folder, so that created and renamed files in it are on disk under their names.
fn sync_folder(folder: &Path) -> Result<(), CorpusError> {
    #[cfg(unix)]
    {
        let failed = CorpusError::io(folder, "written");
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(failed)?;
    }
    #[cfg(not(unix))]
    let _ = folder;
    Ok(())
}
