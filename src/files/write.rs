//! Writing what a user named.

use std::fs::{self, Metadata, Permissions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// As many links as Linux follows.
const MOST_LINKS: usize = 40;

/// Writes `bytes` to what `path` names.
///
/// A regular file, and one that is not there yet, is written beside its place and renamed, so that
/// readers see the old one or the new one; it keeps its mode and owner, and a new one is as readable
/// as the user's umask makes other files. Of a symbolic link, the file that it leads to is written.
/// A device or a pipe is written to as it is.
///
/// # Errors
/// Those of the system, and for folders and sockets that they cannot be written. What was there
/// before is then still there, but for devices and pipes.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match path.metadata() {
        Ok(found) if found.is_file() => {
            // One that may not be written is not replaced either.
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

/// Whether it takes bytes one after the other and keeps none: a device or a pipe.
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

/// Where the links that begin at `path` lead to, though nothing is there.
fn end_of_links(path: &Path) -> io::Result<PathBuf> {
    let mut at = path.to_owned();
    for _ in 0..MOST_LINKS {
        match at.read_link() {
            // An absolute target takes the place of the whole.
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

/// Puts a new file in the place of `found`, or where none is.
fn replace(path: &Path, bytes: &[u8], found: Option<&Metadata>) -> io::Result<()> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    if found.is_none() {
        // The system takes the umask off.
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

/// Gives a new file the owner and mode of the one whose place it takes.
#[cfg(unix)]
fn keep(file: &fs::File, found: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
    let made = file.metadata()?;
    if (made.uid(), made.gid()) != (found.uid(), found.gid()) {
        // Only root may give files away. For others the file is then theirs, as after `mv`.
        let _ = fchown(file, Some(found.uid()), Some(found.gid()));
    }
    // As writing in place does, this leaves no set-user-ID bits.
    file.set_permissions(Permissions::from_mode(found.mode() & 0o777))
}

#[cfg(not(unix))]
fn keep(file: &fs::File, found: &Metadata) -> io::Result<()> {
    let permissions: Permissions = found.permissions();
    file.set_permissions(permissions)
}
