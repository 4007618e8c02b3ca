//! The lock file of an unfinished output, which keeps other runs from writing the same output.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{ErrorKind, Read as _, Write as _},
    path::{Path, PathBuf},
};

use crate::CorpusError;

/// Maximum number of bytes that are read from a lock file to find its holder.
const MAX_HOLDER: u64 = 64;

/// Number of attempts to take the lock. An attempt fails if another run removes the file after it is opened and before it is locked.
const ATTEMPTS: usize = 8;

/// A lock that is held until it is dropped. The file contains the process ID of the holder.
pub(crate) struct Lock {
    pub path: PathBuf,
    file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Unlock explicitly. Otherwise, a child process that another thread is just starting would inherit the open file and keep the lock.
        let _ = self.file.unlock();
    }
}

impl Lock {
    /// Creates the folder and takes its lock.
    ///
    /// # Errors
    /// Returns an error if another run holds the lock.
    pub fn take(folder: &Path, output: &Path) -> Result<Self, CorpusError> {
        let path = folder.join("lock");
        let failed = CorpusError::io(&path, "locked");
        for _ in 0..ATTEMPTS {
            match fs::create_dir(folder) {
                Err(e) if e.kind() != ErrorKind::AlreadyExists => {
                    return Err(CorpusError::io(folder, "created")(e));
                }
                _ => {}
            }
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            let mut file = match options.open(&path) {
                Ok(file) => file,
                // Another run has just removed the folder.
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                Err(e) => return Err(failed(e)),
            };
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(CorpusError::Locked {
                        output: output.to_owned(),
                        holder: holder(&file),
                    });
                }
                Err(TryLockError::Error(e)) => return Err(failed(e)),
            }
            if !is_at(&file, &path) {
                continue;
            }
            file.set_len(0).map_err(&failed)?;
            write!(file, "{}", std::process::id()).map_err(&failed)?;
            return Ok(Self { path, file });
        }
        Err(CorpusError::Locked {
            output: output.to_owned(),
            holder: "runs that begin and end".to_owned(),
        })
    }
}

/// Describes the lock's holder for an error, by its process ID if the file contains one.
fn holder(file: &File) -> String {
    let mut text = String::new();
    let read = file.take(MAX_HOLDER).read_to_string(&mut text);
    match text.parse::<u32>() {
        Ok(id) if read.is_ok() => format!("process {id}"),
        _ => "another process".to_owned(),
    }
}

/// Checks whether a path still refers to an open file.
fn is_at(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        let (Ok(open), Ok(found)) = (file.metadata(), fs::metadata(path)) else {
            return false;
        };
        (open.dev(), open.ino()) == (found.dev(), found.ino())
    }
    #[cfg(not(unix))]
    {
        // On systems other than Unix, an open file cannot be removed.
        file.metadata().is_ok() && path.exists()
    }
}
