//! Finished cubins on disk.
//!
//! An entry is one file, named after the SHA-256 of all that determines its bytes: source text,
//! options, NVRTC version, target. It is written beside its place and then renamed, so that readers
//! see a whole entry or none, also when many processes start at once or one is killed; of writers
//! that meet, the last wins, with the same content. Its own bytes are hashed too, so that damage is
//! found out instead of being sent to a card. A hash is no signature: whoever may write an entry
//! may forge one. So folder and entries are the user's alone (0700 and 0600), and those of anyone
//! else, or that others may write to, are neither read nor written.
//!
//! The layout of an entry, integers little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | magic, which ends in the layout's number |
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

/// The folder of entries under the cache's root.
const FOLDER: &str = "cubins";
const ENTRY: &str = "cubin";
/// No write takes as long as this: what is older was left behind.
const ABANDONED: Duration = Duration::from_secs(3600);

/// What determines the bytes of a cubin, as one hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CacheKey([u8; 32]);

impl CacheKey {
    /// The key of `text` compiled with `options` by NVRTC `version` for `target`.
    pub fn new(text: &str, options: &[String], version: (i32, i32), target: Target) -> CacheKey {
        let mut hash = Sha256::new();
        // Each part goes in with its length, so that no two lists of parts read alike.
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

    /// The hash.
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

/// What a cache holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUsage {
    /// Finished entries.
    pub n_entries: usize,
    /// Their size in bytes.
    pub bytes: u64,
    /// Files being written, or left behind by a process that was killed.
    pub n_unfinished: usize,
}

/// A folder of cubins, shared by every process that names it.
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
    /// The user's cache: in `$GEMMULE_CACHE`, else in `$XDG_CACHE_HOME/gemmule`, else in
    /// `$HOME/.cache/gemmule`. Nothing is created before the first entry is written.
    ///
    /// # Errors
    /// [`JitError::NoCacheFolder`] when the environment names no folder.
    pub fn open_default() -> Result<DiskCache, JitError> {
        default_root(|name| env::var_os(name).map(PathBuf::from))
            .map(|root| DiskCache::at(&root))
            .ok_or(JitError::NoCacheFolder)
    }

    /// The cache in the folder `root`, which need not be there yet.
    pub fn at(root: &Path) -> DiskCache {
        let write = |file: &mut File, bytes: &[u8]| file.write_all(bytes);
        DiskCache {
            folder: root.join(FOLDER),
            sweep: Once::new(),
            write,
        }
    }

    /// The folder that holds the entries.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// The file of an entry.
    pub fn entry_path(&self, key: &CacheKey) -> PathBuf {
        self.folder.join(format!("{key}.{ENTRY}"))
    }

    /// The entry under `key`; `None` when there is none.
    ///
    /// # Errors
    /// [`JitError::CacheDamaged`] when the file is not what was written; [`JitError::Cache`] when
    /// it cannot be read; [`JitError::CacheForeign`] when others may have written it.
    pub fn get(&self, key: &CacheKey) -> Result<Option<Cubin>, JitError> {
        let path = self.entry_path(key);
        match own::read(&path, u64::MAX) {
            Ok(bytes) => match decode(key, &bytes) {
                Ok(cubin) => Ok(Some(cubin)),
                Err(why) => Err(JitError::CacheDamaged { path, why }),
            },
            Err(Trouble::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            // The folder is the user's, so the entry can be replaced.
            Err(Trouble::Foreign(why)) if why.at() == path => Err(JitError::CacheForeignEntry {
                path,
                why: why.what(),
            }),
            Err(error) => Err(self.trouble("read", path, error)),
        }
    }

    /// Stores `cubin` under `key`, in the place of what is there.
    ///
    /// # Errors
    /// [`JitError::Cache`] and [`JitError::CacheForeign`]; what was there before is then still there.
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
                    tracing::debug!(n_files, "removed what killed processes left behind")
                }
                Err(error) => tracing::warn!(%error, "unfinished entries stay where they are"),
            });
        Ok(())
    }

    /// Whether an entry could be stored now; writes one of a few bytes and takes it back.
    ///
    /// # Errors
    /// [`JitError::Cache`] and [`JitError::CacheForeign`].
    pub fn check_writable(&self) -> Result<(), JitError> {
        self.write_then(&[0; 4096], tempfile::NamedTempFile::close)
            .map_err(|error| self.trouble("write", self.folder.clone(), error))
    }

    /// Whether nobody but the user may write to the folder, or put another in its place. One that
    /// is not there yet will be so.
    ///
    /// # Errors
    /// [`JitError::CacheForeign`].
    pub fn check_owner(&self) -> Result<(), JitError> {
        match own::check_folder(&self.folder) {
            Err(why @ Trouble::Foreign(_)) => Err(self.trouble("read", self.folder.clone(), why)),
            // What the system has against it is told when it is used.
            Err(Trouble::Io(_)) | Ok(()) => Ok(()),
        }
    }

    /// Counts what is there. A cache that nothing was written to yet is empty.
    ///
    /// # Errors
    /// [`JitError::Cache`].
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

    /// Removes the unfinished files that were last written to longer than `age` ago, and says how
    /// many there were. [`DiskCache::put`] does so for those of an hour, once per cache.
    ///
    /// # Errors
    /// [`JitError::Cache`].
    pub fn remove_abandoned(&self, age: Duration) -> Result<usize, JitError> {
        let mut n_removed = 0;
        self.each_file(|path, metadata| {
            // A clock that was set back makes a file look new; it is removed later then.
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

    /// Calls `visit` with each file; one that another process takes away meanwhile is passed over.
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

    /// Writes `bytes` to a new file in the folder, hands it to `finish`, and leaves nothing behind
    /// when either fails.
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

/// The root of the user's cache, given the environment. As the XDG base directory specification
/// asks, a relative `XDG_CACHE_HOME` counts as none.
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

/// The cubin in an entry, or what is wrong with the entry.
fn decode(key: &CacheKey, bytes: &[u8]) -> Result<Cubin, String> {
    let short = || format!("it has {} bytes, fewer than any entry", bytes.len());
    let (magic, rest) = bytes.split_first_chunk::<8>().ok_or_else(short)?;
    let (header_len, rest) = rest.split_first_chunk::<4>().ok_or_else(short)?;
    let (cubin_len, rest) = rest.split_first_chunk::<8>().ok_or_else(short)?;
    let (hash, payload) = rest.split_first_chunk::<32>().ok_or_else(short)?;
    if magic != MAGIC {
        return Err("it does not begin as an entry does".to_owned());
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
    // `header_len` is at most the length of the payload, so it is a usize.
    let (header, cubin) = payload.split_at(header_len as usize);
    if digest(header, cubin) != *hash {
        return Err("its bytes do not have the hash that was written with them".to_owned());
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
    /// A cache whose writes go through `write`.
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
