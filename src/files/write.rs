//! Writing files that the user named.

use std::fs::{self, Metadata, Permissions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Maximum number of symbolic links to follow, as on Linux.
const MAX_LINKS: usize = 40;

/// Writes `bytes` to `path`.
///
/// For a regular file, the bytes are written to a temporary file in the same folder, which then replaces `path`. Readers therefore see
/// either the old file or the new one. The mode and owner of an existing file are kept; a new file gets the mode of the user's umask. For a
/// symbolic link, the target is written. A device or a pipe is written directly.
///
/// # Errors
/// Returns an error if an operation of the system fails, or if `path` is a folder or a socket. After an error, the previous contents are
/// unchanged, except for devices and pipes.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match path.metadata() {
        Ok(found) if found.is_file() => {
            // Do not replace a file that the user may not write to.
            fs::File::options().write(true).open(path)?;
            replace(&path.canonicalize()?, bytes, Some(&found))
        }
        Ok(found) if found.is_dir() => Err(io::Error::new(
            io::ErrorKind::IsADirectory,
            "it is a folder; give the name of a file",
        )),
        Ok(found) if is_stream(&found) => {
            fs::File::options().write(true).open(path)?.write_all(bytes)
        }
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is a socket; give the name of a file",
        )),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            replace(&end_of_links(path)?, bytes, None)
        }
        Err(error) => Err(error),
    }
}

/// Returns whether the file is a device or a pipe, which is written directly.
fn is_stream(metadata: &Metadata) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kind = metadata.file_type();
        kind.is_char_device() || kind.is_block_device() || kind.is_fifo()
    }
    #[cfg(not(unix))]
    {
        let _ = metadata;
        false
    }
}

/// Returns the target of the chain of symbolic links at `path`. The target need not exist.
fn end_of_links(path: &Path) -> io::Result<PathBuf> {
    let mut at = path.to_owned();
    for _ in 0..MAX_LINKS {
        match at.read_link() {
            // If the target is absolute, `join` replaces the whole path.
            Ok(target) => at = folder_of(&at).join(target),
            Err(_) => return Ok(at),
        }
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        "it is a symbolic link that leads to itself",
    ))
}

fn folder_of(file: &Path) -> &Path {
    let named = file.parent().filter(|p| !p.as_os_str().is_empty());
    named.unwrap_or(Path::new("."))
}

/// Writes a new file and renames it to `path`. `found` is the metadata of the existing file, if there is one; the new file gets its owner
/// and mode.
fn replace(path: &Path, bytes: &[u8], found: Option<&Metadata>) -> io::Result<()> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    if found.is_none() {
        // The system removes the bits of the umask from this mode.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(Permissions::from_mode(0o666));
    }
    let mut file = builder.tempfile_in(folder_of(path))?;
    file.write_all(bytes)?;
    if let Some(found) = found {
        keep(file.as_file(), found)?;
    }
    file.persist(path).map_err(|refused| refused.error)?;
    Ok(())
}

/// Gives `file` the owner and mode of the file that it replaces.
#[cfg(unix)]
fn keep(file: &fs::File, found: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
    let made = file.metadata()?;
    if (made.uid(), made.gid()) != (found.uid(), found.gid()) {
        // Only root may change the owner. Otherwise the file belongs to the user, as after `mv`.
        let _ = fchown(file, Some(found.uid()), Some(found.gid()));
    }
    // The set-user-ID and set-group-ID bits are dropped. The system also drops them when a file is written in place.
    file.set_permissions(Permissions::from_mode(found.mode() & 0o777))
}

#[cfg(not(unix))]
fn keep(file: &fs::File, found: &Metadata) -> io::Result<()> {
    let permissions: Permissions = found.permissions();
    file.set_permissions(permissions)
}
