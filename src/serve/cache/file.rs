//! File tier of the response cache. The file has a bounded size. When it is full, its oldest segment is overwritten.

mod layout;

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{Key, Lookup, from_bytes, to_bytes};
use crate::{
    EngineError,
    files::{own::open_private, read_at, write_at},
    serve::Answer,
};
use layout::{HEADER, Layout, RECORD, Record, UNIT};

/// Max number of responses that wait to be written. Further responses are dropped.
const MAX_WAITING: usize = 4096;
/// Max bytes of the responses that wait to be written.
const MAX_WAITING_BYTES: usize = 64 << 20;
/// Time between a failed write and the next attempt.
const RETRY: Duration = Duration::from_secs(1);

/// File tier of the response cache. Callers read the file themselves. A separate thread writes it.
pub struct FileTier {
    shared: Arc<Shared>,
    answers: Option<SyncSender<(Key, Vec<u8>)>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    file: File,
    path: PathBuf,
    layout: Layout,
    index: Mutex<Index>,
    /// Bytes of the responses that are waiting to be written.
    waiting: AtomicUsize,
    /// Whether a warning about damage has been logged.
    is_damage_told: AtomicBool,
}

/// Positions of records, by the first 8 bytes of their keys. A lookup also compares the whole key, which the record contains.
#[derive(Default)]
struct Index {
    places: HashMap<u64, Place>,
    bytes: u64,
}

/// Position and size of a record, as multiples of [`UNIT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    at: u32,
    size: u32,
}

/// Writes records to the file, one after another.
struct Writer {
    shared: Arc<Shared>,
    has_header: bool,
    /// Segment that records are appended to; `None` before the first segment has begun.
    segment: Option<u64>,
    generation: u64,
    at: u64,
    /// Time of the next attempt to write after a failure.
    retry: Option<Instant>,
}

impl FileTier {
    /// Opens or creates a file of at most `max_bytes` bytes, which only its owner may read. A file in another format is renamed. A file
    /// whose segments are too large or too small for `max_bytes` is emptied.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened, if another process has locked it, if `max_bytes` is too small for a response, or if
    /// the system cannot start a thread.
    pub fn open(path: &Path, max_bytes: u64) -> Result<Self, EngineError> {
        let writer = Writer::open(path, max_bytes).map_err(|source| EngineError::Write {
            file: path.to_owned(),
            source,
        })?;
        let shared = Arc::clone(&writer.shared);
        let (answers, queue) = sync_channel(MAX_WAITING);
        let thread = std::thread::Builder::new().name("cache file".to_owned());
        let thread = thread.spawn(move || writer.write_all(&queue));
        let thread = thread.map_err(|e| EngineError::Threads {
            problem: e.to_string(),
        })?;
        Ok(Self {
            shared,
            answers: Some(answers),
            thread: Some(thread),
        })
    }

    /// Returns the total size of the records in the index, in bytes.
    pub fn bytes(&self) -> u64 {
        self.shared.index().bytes
    }

    /// Looks up a response.
    pub fn get(&self, key: &Key) -> (Option<Answer>, Lookup) {
        let shared = &self.shared;
        let Some(place) = shared.index().get(key) else {
            return (None, Lookup::Miss);
        };
        let problem = match shared.read(place) {
            Ok((record, _)) if record.key != *key => return (None, Lookup::Miss),
            Ok((_, payload)) => match from_bytes(key, &payload) {
                Some(answer) => return (Some(answer), Lookup::Hit),
                None => "a record fails its check".to_owned(),
            },
            Err(error) => error.to_string(),
        };
        // If the index no longer has this place, the file is not damaged: the writer has overwritten the segment in the meantime, or
        // another lookup has removed the record.
        if !shared.index().forget(key, place) {
            return (None, Lookup::Miss);
        }
        if !shared.is_damage_told.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "the cache file `{}` is damaged: {problem}; damaged responses are computed again",
                shared.path.display()
            );
        }
        (None, Lookup::Error)
    }

    /// Queues a response for writing, unless too many are already waiting.
    pub fn put(&self, key: Key, answer: &Answer) {
        let waiting = &self.shared.waiting;
        let bytes = to_bytes(&key, answer);
        let n = bytes.len();
        if waiting.fetch_add(n, Ordering::Relaxed) + n <= MAX_WAITING_BYTES
            && let Some(answers) = &self.answers
            && answers.try_send((key, bytes)).is_ok()
        {
            return;
        }
        waiting.fetch_sub(n, Ordering::Relaxed);
    }
}

impl Drop for FileTier {
    fn drop(&mut self) {
        self.answers = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Index {
    fn short(key: &Key) -> u64 {
        let mut first = [0; 8];
        first.copy_from_slice(&key[..8]);
        u64::from_le_bytes(first)
    }

    fn get(&self, key: &Key) -> Option<Place> {
        self.places.get(&Self::short(key)).copied()
    }

    fn insert(&mut self, key: &Key, place: Place) {
        let before = self.places.insert(Self::short(key), place);
        self.bytes += place.bytes();
        self.bytes -= before.map_or(0, Place::bytes);
    }

    /// Removes the record of `key` if it is still at `place`. Returns whether it was removed.
    fn forget(&mut self, key: &Key, place: Place) -> bool {
        let is_there = self.get(key) == Some(place);
        if is_there {
            self.places.remove(&Self::short(key));
            self.bytes -= place.bytes();
        }
        is_there
    }

    /// Removes all records that begin in `start..end`.
    fn forget_between(&mut self, start: u64, end: u64) {
        let mut gone = 0;
        self.places.retain(|_, place| {
            let is_kept = !(start..end).contains(&place.position());
            gone += if is_kept { 0 } else { place.bytes() };
            is_kept
        });
        self.bytes -= gone;
    }
}

impl Place {
    /// Creates a place. The layout limits the file so that positions and sizes fit into 32 bits.
    fn new(at: u64, size: u64) -> Self {
        Self {
            at: (at / UNIT) as u32,
            size: (size / UNIT) as u32,
        }
    }

    fn position(self) -> u64 {
        u64::from(self.at) * UNIT
    }

    fn bytes(self) -> u64 {
        u64::from(self.size) * UNIT
    }
}

impl Shared {
    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, place: Place) -> io::Result<(Record, Vec<u8>)> {
        let mut bytes = vec![0; place.bytes() as usize];
        read_at(&self.file, &mut bytes, place.position())?;
        let record = Record::read(&bytes).filter(|record| record.size() == place.bytes());
        let record = record.ok_or_else(|| io::Error::other("the header of a record is damaged"))?;
        bytes.drain(..RECORD);
        bytes.truncate(record.length as usize);
        Ok((record, bytes))
    }
}

impl Writer {
    fn open(path: &Path, max_bytes: u64) -> io::Result<Self> {
        if max_bytes < Layout::MIN_BYTES {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "a cache file needs {} bytes or more, but its max size is {max_bytes}; raise --cache-file-bytes",
                    Layout::MIN_BYTES
                ),
            ));
        }
        let file = match open_file(path)? {
            file if is_other_format(&file)? => {
                rename_away(path)?;
                open_file(path)?
            }
            file => file,
        };
        let mut header = [0; HEADER as usize];
        let length = file.metadata()?.len();
        let found = match length {
            0 => None,
            _ => {
                read_at(&file, &mut header, 0)?;
                layout::read_file_header(&header)
            }
        };
        let existing = found.and_then(|segment_bytes| Layout::existing(segment_bytes, max_bytes));
        if found.is_some() && existing.is_none() {
            tracing::warn!(
                "the cache file `{}` was made for a size very different from {max_bytes} bytes, so it is emptied",
                path.display()
            );
            file.set_len(0)?;
        }
        let layout = existing.unwrap_or_else(|| Layout::new(max_bytes));
        if length > layout.file_bytes() {
            file.set_len(layout.file_bytes())?;
        }
        let mut writer = Self {
            shared: Arc::new(Shared {
                file,
                path: path.to_owned(),
                layout,
                index: Mutex::default(),
                waiting: AtomicUsize::new(0),
                is_damage_told: AtomicBool::new(false),
            }),
            has_header: existing.is_some(),
            segment: None,
            generation: 0,
            at: 0,
            retry: None,
        };
        writer.scan()?;
        Ok(writer)
    }

    /// Builds the index from the records in the file. Segments are read from the oldest to the newest, so a newer record replaces an older
    /// one with the same key.
    fn scan(&mut self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let mut generations = Vec::new();
        for segment in 0..shared.layout.segments {
            let mut header = [0; HEADER as usize];
            match read_at(&shared.file, &mut header, shared.layout.start(segment)) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                read => read?,
            }
            if let Some(generation) = layout::read_segment_header(&header) {
                generations.push((generation, segment));
            }
        }
        generations.sort_unstable();
        let mut index = shared.index();
        for (generation, segment) in generations {
            (self.segment, self.generation) = (Some(segment), generation);
            self.at = shared.layout.start(segment) + HEADER;
            let end = shared.layout.end(segment);
            let mut header = [0; RECORD];
            while self.at + RECORD as u64 <= end {
                match read_at(&shared.file, &mut header, self.at) {
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                    read => read?,
                }
                let record = Record::read(&header);
                let Some(record) = record.filter(|r| r.generation == generation) else {
                    break;
                };
                let size = record.size();
                if self.at + size > end {
                    break;
                }
                index.insert(&record.key, Place::new(self.at, size));
                self.at += size;
            }
        }
        Ok(())
    }

    fn write_all(mut self, queue: &Receiver<(Key, Vec<u8>)>) {
        while let Ok((key, payload)) = queue.recv() {
            let n = payload.len();
            self.keep(&key, &payload);
            self.shared.waiting.fetch_sub(n, Ordering::Relaxed);
        }
    }

    /// Writes a response, unless it is already in the file. After a failure, such as a full disk, responses are dropped until a write
    /// succeeds. Earlier responses can still be read.
    fn keep(&mut self, key: &Key, payload: &[u8]) {
        let is_resting = self.retry.is_some_and(|retry| Instant::now() < retry);
        if is_resting || self.shared.index().get(key).is_some() {
            return;
        }
        let written = self.write(key, payload);
        let path = self.shared.path.display();
        match (written, self.retry) {
            (Ok(()), None) => {}
            (Ok(()), Some(_)) => {
                tracing::warn!("the cache file `{path}` is written again");
                self.retry = None;
            }
            (Err(error), before) => {
                if before.is_none() {
                    tracing::warn!(
                        "the cache file `{path}` cannot be written: {error}; new responses are not kept in it until it can"
                    );
                }
                self.retry = Some(Instant::now() + RETRY);
            }
        }
    }

    fn write(&mut self, key: &Key, payload: &[u8]) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let layout = shared.layout;
        let Ok(length) = u32::try_from(payload.len()) else {
            return Ok(());
        };
        let record = |generation| Record {
            generation,
            length,
            key: *key,
        };
        let size = record(0).size();
        // A response that is too large for a segment is not stored.
        if size > layout.segment_bytes - HEADER {
            return Ok(());
        }
        if !self.has_header {
            write_at(&shared.file, &layout::file_header(&layout), 0)?;
            self.has_header = true;
        }
        let has_room = |segment: &u64| self.at + size <= layout.end(*segment);
        if self.segment.filter(has_room).is_none() {
            self.begin_segment()?;
        }
        let bytes = record(self.generation).to_bytes(payload);
        write_at(&shared.file, &bytes, self.at)?;
        shared.index().insert(key, Place::new(self.at, size));
        self.at += size;
        Ok(())
    }

    /// Begins the next segment. Records that it contains are discarded.
    fn begin_segment(&mut self) -> io::Result<()> {
        let (shared, layout) = (&self.shared, self.shared.layout);
        let next = self
            .segment
            .map_or(0, |segment| (segment + 1) % layout.segments);
        let (start, generation) = (layout.start(next), self.generation + 1);
        write_at(&shared.file, &layout::segment_header(generation), start)?;
        shared.index().forget_between(start, layout.end(next));
        (self.segment, self.generation, self.at) = (Some(next), generation, start + HEADER);
        Ok(())
    }
}

/// Max time for which [`open_file`] waits for the lock of the file. A server that is being replaced may still hold the lock. A child
/// process of this process also holds it for a moment, between `fork` and `exec`.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// Opens or creates a cache file, and locks it. Fails if another process has locked it for [`LOCK_WAIT`], or if it is not a regular file.
fn open_file(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    let file = open_private(path, &mut options)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is not a regular file",
        ));
    }
    let end = Instant::now() + LOCK_WAIT;
    let locked = loop {
        match file.try_lock() {
            Err(fs::TryLockError::WouldBlock) if Instant::now() < end => {
                thread::sleep(Duration::from_millis(10));
            }
            locked => break locked,
        }
    };
    match locked {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(io::Error::other(
            "another process has it open; give each server its own file, or share the cache with --cache-redis",
        )),
        // Some network file systems do not support locks.
        Err(fs::TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
            Ok(file)
        }
        Err(fs::TryLockError::Error(error)) => Err(error),
    }
}

/// Returns whether a file is not empty and does not begin with the header of a cache file.
fn is_other_format(file: &File) -> io::Result<bool> {
    let mut header = [0; HEADER as usize];
    match read_at(file, &mut header, 0) {
        Ok(()) => Ok(layout::read_file_header(&header).is_none()),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Ok(file.metadata()?.len() > 0)
        }
        Err(error) => Err(error),
    }
}

/// Renames a file that is not a valid cache file, so that its data are not lost.
fn rename_away(path: &Path) -> io::Result<()> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".damaged-{}", now.map_or(0, |t| t.as_secs())));
    fs::rename(path, &name)?;
    tracing::warn!(
        "`{}` is damaged, or is not a cache file of this version; it was renamed to `{}`",
        path.display(),
        Path::new(&name).display()
    );
    Ok(())
}
