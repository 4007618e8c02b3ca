//! The cache of compiled cubins on disk.
//!
//! An entry is one file, named after the SHA-256 of everything that determines its bytes: source text, options, NVRTC version, target. It
//! is written to a temporary file and then renamed, so that readers see a whole entry or none. Concurrent writers of an entry write the
//! same content. A second hash detects damage before the code is loaded.
//!
//! A hash is not a signature: anyone who can write an entry can forge it. The folder and the entries are therefore private to the user
//! (modes 0700 and 0600). If the folder belongs to another user, or others may write to it, it is neither read nor written. If a single
//! entry belongs to another user or is writable by others, it is not read, and the next write replaces it.
//!
//! Layout of an entry, with little-endian integers:
//!
//! | bytes | contents |
//! |---|---|
//! | 8 | magic, which ends in the number of the layout |
//! | 4 | length of the header |
//! | 8 | length of the cubin |
//! | 32 | SHA-256 of header and cubin |
//! | … | the header in postcard: key, symbol, target, report |
//! | … | the cubin |

use std::env;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{CacheFault, CompileReport, Cubin, JitError, Target};
use crate::files::own::{self, Trouble, UNFINISHED};

const MAGIC: &[u8; 8] = b"GMCUBIN1";
const FIXED: usize = MAGIC.len() + 4 + 8 + 32;

/// Folder of the entries, relative to the cache's root.
const FOLDER: &str = "cubins";
const ENTRY: &str = "cubin";
/// Age after which an unfinished file is removed. No write takes this long, so the process that wrote it must have been killed.
const ABANDONED: Duration = Duration::from_secs(3600);

/// Hash of everything that determines the bytes of a cubin.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CacheKey([u8; 32]);

impl CacheKey {
    /// Creates the key of `text` compiled with `options` by NVRTC `version` for `target`.
    pub fn new(text: &str, options: &[String], version: (i32, i32), target: Target) -> CacheKey {
        let mut hash = Sha256::new();
        // Each part is prefixed with its length, so that different lists of parts have different
        // hashes.
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(text.as_bytes());
        part(&(options.len() as u64).to_le_bytes());
        for option in options {
            part(option.as_bytes());
        }
        part(&version.0.to_le_bytes());
        part(&version.1.to_le_bytes());
        part(target.name().as_bytes());
        CacheKey(hash.finalize().into())
    }

    /// Returns the hash.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CacheKey({self})")
    }
}

/// Disk usage of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUsage {
    /// Number of complete entries.
    pub n_entries: usize,
    /// Size of the complete entries in bytes.
    pub bytes: u64,
    /// Number of files that are being written or that killed processes left behind.
    pub n_unfinished: usize,
}

/// A folder of cubins, shared by all processes that use it.
pub struct DiskCache {
    folder: PathBuf,
    sweep: Once,
    write: fn(&mut File, &[u8]) -> io::Result<()>,
}

#[derive(Serialize, Deserialize)]
struct Header {
    key: CacheKey,
    symbol: String,
    target: Target,
    report: Option<CompileReport>,
}

impl DiskCache {
    /// Opens the user's cache: in `$GEMMULE_CACHE`, else in `$XDG_CACHE_HOME/gemmule`, else in
    /// `$HOME/.cache/gemmule`. Nothing is created until the first entry is written.
    ///
    /// # Errors
    /// Returns [`JitError::NoCacheFolder`] if the environment names no folder.
    pub fn open_default() -> Result<DiskCache, JitError> {
        default_root(|name| env::var_os(name).map(PathBuf::from))
            .map(|root| DiskCache::at(&root))
            .ok_or(JitError::NoCacheFolder)
    }

    /// Opens the cache in the folder `root`, which need not exist yet.
    pub fn at(root: &Path) -> DiskCache {
        let write = |file: &mut File, bytes: &[u8]| file.write_all(bytes);
        DiskCache {
            folder: root.join(FOLDER),
            sweep: Once::new(),
            write,
        }
    }

    /// Returns the folder of the entries.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Returns the path of an entry.
    pub fn entry_path(&self, key: &CacheKey) -> PathBuf {
        self.folder.join(format!("{key}.{ENTRY}"))
    }

    /// Returns the cubin that is stored under `key`, or `None` if there is no entry.
    ///
    /// # Errors
    /// Returns [`JitError::CacheDamaged`] if the entry is damaged, and [`JitError::Cache`] if it cannot be read. Returns
    /// [`JitError::CacheForeign`] or [`JitError::CacheForeignEntry`] if another user may have written to the folder or to the entry.
    pub fn get(&self, key: &CacheKey) -> Result<Option<Cubin>, JitError> {
        let path = self.entry_path(key);
        match own::read(&path, u64::MAX) {
            Ok(bytes) => match decode(key, &bytes) {
                Ok(cubin) => Ok(Some(cubin)),
                Err(why) => Err(JitError::CacheDamaged { path, why }),
            },
            Err(Trouble::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            // The folder passed the check and only the entry failed it, so the entry can be replaced.
            Err(Trouble::Foreign(why)) if why.at() == path => Err(JitError::CacheForeignEntry {
                path,
                why: why.what(),
            }),
            Err(error) => Err(self.trouble("read", path, error)),
        }
    }

    /// Stores `cubin` under `key`, replacing the existing entry.
    ///
    /// # Errors
    /// Returns [`JitError::Cache`] if the entry cannot be written, and [`JitError::CacheForeign`] if another user may write to the folder.
    /// After an error, an existing entry is unchanged.
    pub fn put(&self, key: &CacheKey, cubin: &Cubin) -> Result<(), JitError> {
        let path = self.entry_path(key);
        let bytes = encode(key, cubin);
        self.write_then(&bytes, |file| {
            file.persist(&path)
                .map(drop)
                .map_err(|refused| refused.error)
        })
        .map_err(|error| self.trouble("write", path.clone(), error))?;
        self.sweep
            .call_once(|| match self.remove_abandoned(ABANDONED) {
                Ok(0) => {}
                Ok(n_files) => {
                    tracing::debug!(n_files, "removed files left over by killed processes")
                }
                Err(error) => tracing::warn!(%error, "unfinished entries were not removed"),
            });
        Ok(())
    }

    /// Checks that an entry could be stored now, by writing and deleting a small file.
    ///
    /// # Errors
    /// Returns [`JitError::Cache`] if the file cannot be written, and [`JitError::CacheForeign`] if another user may write to the folder.
    pub fn check_writable(&self) -> Result<(), JitError> {
        self.write_then(&[0; 4096], tempfile::NamedTempFile::close)
            .map_err(|error| self.trouble("write", self.folder.clone(), error))
    }

    /// Checks that only the user can write to the folder or replace it. Accepts a folder that does
    /// not exist yet.
    ///
    /// # Errors
    /// Returns [`JitError::CacheForeign`] if another user can do so.
    pub fn check_owner(&self) -> Result<(), JitError> {
        match own::check_folder(&self.folder) {
            Err(why @ Trouble::Foreign(_)) => Err(self.trouble("read", self.folder.clone(), why)),
            // I/O errors are reported when the folder is used.
            Err(Trouble::Io(_)) | Ok(()) => Ok(()),
        }
    }

    /// Counts the entries and the unfinished files in the folder. If the folder does not exist yet, all numbers are 0.
    ///
    /// # Errors
    /// Returns [`JitError::Cache`] if the folder cannot be read.
    pub fn usage(&self) -> Result<CacheUsage, JitError> {
        let mut usage = CacheUsage::default();
        self.each_file(|path, metadata| {
            if is_unfinished(path) {
                usage.n_unfinished += 1;
            } else if path.extension().is_some_and(|extension| extension == ENTRY) {
                usage.n_entries += 1;
                usage.bytes += metadata.len();
            }
            Ok(())
        })?;
        Ok(usage)
    }

    /// Removes unfinished files whose last write is older than `age`, and returns their number.
    /// [`DiskCache::put`] calls this once per cache, with an age of one hour.
    ///
    /// # Errors
    /// Returns [`JitError::Cache`] if the folder cannot be read or a file cannot be removed.
    pub fn remove_abandoned(&self, age: Duration) -> Result<usize, JitError> {
        let mut n_removed = 0;
        self.each_file(|path, metadata| {
            // If the clock was set back, a file may appear newer than it is. A later call removes it.
            let old = metadata
                .modified()?
                .elapsed()
                .is_ok_and(|elapsed| elapsed > age);
            if is_unfinished(path) && old {
                fs::remove_file(path)?;
                n_removed += 1;
            }
            Ok(())
        })?;
        Ok(n_removed)
    }

    /// Calls `visit` for each file in the folder. Skips files that another process removes during the iteration.
    fn each_file(
        &self,
        mut visit: impl FnMut(&Path, &fs::Metadata) -> io::Result<()>,
    ) -> Result<(), JitError> {
        let here = |error| unusable("read", self.folder.clone(), error);
        let entries = match self.folder.read_dir() {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(here(error)),
        };
        for entry in entries {
            let entry = entry.map_err(here)?;
            let path = entry.path();
            match entry
                .metadata()
                .and_then(|metadata| visit(&path, &metadata))
            {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(unusable("read", path, error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Writes `bytes` to a new file in the folder and passes the file to `finish`. Removes the file
    /// if writing or `finish` fails.
    fn write_then(
        &self,
        bytes: &[u8],
        finish: impl FnOnce(tempfile::NamedTempFile) -> io::Result<()>,
    ) -> Result<(), Trouble> {
        let mut file = own::unfinished_in(&self.folder)?;
        (self.write)(file.as_file_mut(), bytes)?;
        Ok(finish(file)?)
    }

    fn trouble(&self, action: &'static str, path: PathBuf, trouble: Trouble) -> JitError {
        match trouble {
            Trouble::Foreign(why) => JitError::CacheForeign {
                folder: self.folder.clone(),
                why: why.to_string(),
            },
            Trouble::Io(error) => unusable(action, path, error),
        }
    }
}

impl fmt::Debug for DiskCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskCache")
            .field("folder", &self.folder)
            .finish_non_exhaustive()
    }
}

/// Returns the root of the user's cache. Environment variables are read through `variable`. Ignores a relative `XDG_CACHE_HOME`, as the
/// XDG base directory specification requires.
fn default_root(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let absolute = |name| variable(name).filter(|path| path.is_absolute());
    variable("GEMMULE_CACHE")
        .filter(|path| !path.as_os_str().is_empty())
        .or_else(|| Some(absolute("XDG_CACHE_HOME")?.join("gemmule")))
        .or_else(|| Some(absolute("HOME")?.join(".cache/gemmule")))
}

fn is_unfinished(path: &Path) -> bool {
    path.file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.starts_with(UNFINISHED))
}

fn unusable(action: &'static str, path: PathBuf, error: io::Error) -> JitError {
    JitError::Cache {
        fault: CacheFault::of(&error),
        action,
        path,
        error,
    }
}

fn encode(key: &CacheKey, cubin: &Cubin) -> Vec<u8> {
    let header = Header {
        key: *key,
        symbol: cubin.symbol.clone(),
        target: cubin.target,
        report: cubin.report,
    };
    let header =
        postcard::to_allocvec(&header).expect("a header is strings and integers in memory");
    let header_len = u32::try_from(header.len()).expect("a symbol is shorter than 4 GiB");
    let mut bytes = Vec::with_capacity(FIXED + header.len() + cubin.bytes.len());
    bytes.extend(MAGIC);
    bytes.extend(header_len.to_le_bytes());
    bytes.extend((cubin.bytes.len() as u64).to_le_bytes());
    bytes.extend(digest(&header, &cubin.bytes));
    bytes.extend(header);
    bytes.extend(&cubin.bytes);
    bytes
}

/// Decodes an entry, or returns a description of the damage.
fn decode(key: &CacheKey, bytes: &[u8]) -> Result<Cubin, String> {
    let short = || {
        format!(
            "it has {} bytes, which is shorter than any entry",
            bytes.len()
        )
    };
    let (magic, rest) = bytes.split_first_chunk::<8>().ok_or_else(short)?;
    let (header_len, rest) = rest.split_first_chunk::<4>().ok_or_else(short)?;
    let (cubin_len, rest) = rest.split_first_chunk::<8>().ok_or_else(short)?;
    let (hash, payload) = rest.split_first_chunk::<32>().ok_or_else(short)?;
    if magic != MAGIC {
        return Err("it does not start with an entry's magic number".to_owned());
    }
    let header_len = u64::from(u32::from_le_bytes(*header_len));
    let expected = header_len.checked_add(u64::from_le_bytes(*cubin_len));
    if expected != Some(payload.len() as u64) {
        let expected = expected.map_or("more than any".to_owned(), |length| length.to_string());
        return Err(format!(
            "it should hold {expected} bytes and holds {}",
            payload.len()
        ));
    }
    // `header_len` is at most the length of the payload, so it fits in a usize.
    let (header, cubin) = payload.split_at(header_len as usize);
    if digest(header, cubin) != *hash {
        return Err("its contents do not match its hash".to_owned());
    }
    let header: Header =
        postcard::from_bytes(header).map_err(|error| format!("its header: {error}"))?;
    if header.key != *key {
        return Err(format!("it was written under the key {}", header.key));
    }
    let Header {
        symbol,
        target,
        report,
        ..
    } = header;
    Ok(Cubin {
        symbol,
        target,
        report,
        bytes: cubin.to_vec(),
    })
}

fn digest(header: &[u8], cubin: &[u8]) -> [u8; 32] {
    Sha256::new()
        .chain_update(header)
        .chain_update(cubin)
        .finalize()
        .into()
}

#[cfg(test)]
impl DiskCache {
    /// Creates a cache whose writes go through `write`.
    pub(super) fn writing_with(
        root: &Path,
        write: fn(&mut File, &[u8]) -> io::Result<()>,
    ) -> DiskCache {
        DiskCache {
            write,
            ..DiskCache::at(root)
        }
    }
}

#[cfg(test)]
mod tests;
