//! Answers in a file, through redb.

use std::{
    fs, io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use redb::{Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition};

use super::{BESIDE, Key, Lookup, from_bytes, to_bytes};
use crate::{EngineError, serve::Answer};

const VALUES: TableDefinition<'_, &Key, &[u8]> = TableDefinition::new("answers");
/// Keys in the order in which they came, by which answers are given up.
const ORDER: TableDefinition<'_, u64, &Key> = TableDefinition::new("order");
const BYTES: TableDefinition<'_, (), u64> = TableDefinition::new("bytes");

/// How long answers are collected before they are written together.
const COLLECT: Duration = Duration::from_millis(100);
/// Answers that wait to be written; more are not kept.
const BEHIND: usize = 4096;
/// Memory for what was read and is to be written.
const PAGES: usize = 16 << 20;

/// Answers in a file. Reading is done by who asks; one thread writes.
pub struct FileTier {
    shared: Arc<Shared>,
    answers: Option<SyncSender<(Key, Vec<u8>)>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    database: Database,
    path: PathBuf,
    most: u64,
    bytes: AtomicU64,
    is_damaged: AtomicBool,
}

impl FileTier {
    /// Opens a file, or makes it.
    ///
    /// # Errors
    /// A file that cannot be opened, or that another process has open, and a thread that the system does not give.
    pub fn open(path: &Path, most: u64) -> Result<Self, EngineError> {
        let opened = match try_open(path) {
            Ok(opened) => opened,
            Err(Trouble::Other(source)) => {
                let file = path.to_owned();
                return Err(EngineError::Write { file, source });
            }
            Err(Trouble::Damaged(problem)) => {
                rename_away(path, &problem);
                try_open(path).map_err(|trouble| EngineError::Write {
                    file: path.to_owned(),
                    source: match trouble {
                        Trouble::Other(source) => source,
                        Trouble::Damaged(problem) => io::Error::other(problem),
                    },
                })?
            }
        };
        let (database, bytes) = opened;
        let shared = Arc::new(Shared {
            database,
            path: path.to_owned(),
            most,
            bytes: AtomicU64::new(bytes),
            is_damaged: AtomicBool::new(false),
        });
        let (answers, queue) = sync_channel(BEHIND);
        let writing = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("cache file".to_owned());
        let thread = thread.spawn(move || writing.write_all(&queue));
        let thread = thread.map_err(|e| EngineError::Threads {
            problem: e.to_string(),
        })?;
        Ok(Self {
            shared,
            answers: Some(answers),
            thread: Some(thread),
        })
    }

    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// The answer that is kept, and what came of looking.
    pub fn get(&self, key: &Key) -> (Option<Answer>, Lookup) {
        let shared = &self.shared;
        if shared.is_damaged.load(Ordering::Relaxed) {
            return (None, Lookup::Error);
        }
        let read = || -> Result<Option<Answer>, redb::Error> {
            let transaction = shared.database.begin_read()?;
            let table = transaction.open_table(VALUES)?;
            let found = table.get(key)?;
            Ok(found.and_then(|bytes| from_bytes(key, bytes.value())))
        };
        match shared.contained(read) {
            Some(Some(answer)) => (Some(answer), Lookup::Hit),
            Some(None) => (None, Lookup::Miss),
            None => (None, Lookup::Error),
        }
    }

    /// Keeps an answer, unless the disk is too far behind.
    pub fn put(&self, key: Key, answer: &Answer) {
        if let Some(answers) = &self.answers {
            let _ = answers.try_send((key, to_bytes(&key, answer)));
        }
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

impl Shared {
    /// What is read or written; `None` where that failed. A file that turns out to be damaged is renamed away, and is not used
    /// again before the next start.
    fn contained<T>(&self, work: impl FnOnce() -> Result<T, redb::Error>) -> Option<T> {
        // Within a page that is not what it was, the crate may find what it did not expect.
        let problem = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(done)) => return Some(done),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "a page of it makes no sense".to_owned(),
        };
        if !self.is_damaged.swap(true, Ordering::Relaxed) {
            rename_away(&self.path, &problem);
        }
        None
    }

    fn write_all(&self, queue: &Receiver<(Key, Vec<u8>)>) {
        while let Ok(first) = queue.recv() {
            let mut answers = vec![first];
            let until = Instant::now() + COLLECT;
            loop {
                let left = until.saturating_duration_since(Instant::now());
                match queue.recv_timeout(left) {
                    Ok(answer) if answers.len() < BEHIND => answers.push(answer),
                    Ok(answer) => {
                        answers.push(answer);
                        break;
                    }
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
                }
            }
            if self.is_damaged.load(Ordering::Relaxed) {
                continue;
            }
            let bytes = self.contained(|| self.write(&answers));
            if let Some(bytes) = bytes {
                self.bytes.store(bytes, Ordering::Relaxed);
            }
        }
    }

    /// Writes answers, gives up the oldest beyond what the file may hold, and returns the bytes that it holds.
    fn write(&self, answers: &[(Key, Vec<u8>)]) -> Result<u64, redb::Error> {
        let transaction = self.database.begin_write()?;
        let mut bytes;
        {
            let mut values = transaction.open_table(VALUES)?;
            let mut order = transaction.open_table(ORDER)?;
            let mut counted = transaction.open_table(BYTES)?;
            bytes = counted.get(())?.map_or(0, |n| n.value());
            let mut next = order.last()?.map_or(0, |(at, _)| at.value() + 1);
            for (key, answer) in answers {
                if values.insert(key, answer.as_slice())?.is_none() {
                    order.insert(next, key)?;
                    next += 1;
                    bytes += answer.len() as u64 + BESIDE;
                }
            }
            while bytes > self.most
                && let Some((_, key)) = order.pop_first()?
            {
                if let Some(gone) = values.remove(key.value())? {
                    bytes = bytes.saturating_sub(gone.value().len() as u64 + BESIDE);
                }
            }
            counted.insert((), bytes)?;
        }
        transaction.commit()?;
        Ok(bytes)
    }
}

enum Trouble {
    Damaged(String),
    Other(io::Error),
}

/// The file, and the bytes of the answers in it.
fn try_open(path: &Path) -> Result<(Database, u64), Trouble> {
    let open = || -> Result<(Database, u64), redb::Error> {
        let mut builder = Database::builder();
        let database = builder.set_cache_size(PAGES).create(path)?;
        let transaction = database.begin_write()?;
        let bytes = {
            let values = transaction.open_table(VALUES)?;
            let _ = transaction.open_table(ORDER)?;
            let counted = transaction.open_table(BYTES)?;
            match values.is_empty()? {
                true => 0,
                false => counted.get(())?.map_or(0, |n| n.value()),
            }
        };
        transaction.commit()?;
        Ok((database, bytes))
    };
    match catch_unwind(open) {
        Ok(Ok(opened)) => Ok(opened),
        Ok(Err(error)) => Err(match error {
            redb::Error::DatabaseAlreadyOpen => Trouble::Other(io::Error::other(
                "another process has it open; give each server a file of its own, or share answers by --cache-redis",
            )),
            // The crate says so of a file that is none of its own.
            redb::Error::Io(error) if error.kind() != io::ErrorKind::InvalidData => {
                Trouble::Other(error)
            }
            other => Trouble::Damaged(other.to_string()),
        }),
        Err(_) => Err(Trouble::Damaged("a page of it makes no sense".to_owned())),
    }
}

/// Gives a damaged file another name, under which somebody can look at it.
fn rename_away(path: &Path, problem: &str) {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".damaged-{}", now.map_or(0, |t| t.as_secs())));
    let renamed = fs::rename(path, &name);
    let shown = Path::new(&name).display();
    match renamed {
        Ok(()) => tracing::warn!(
            "the file of the cache `{}` is damaged: {problem}; it is now `{shown}`",
            path.display()
        ),
        Err(error) => tracing::warn!(
            "the file of the cache `{}` is damaged: {problem}; it cannot be renamed: {error}",
            path.display()
        ),
    }
}
