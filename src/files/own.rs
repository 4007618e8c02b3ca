//! Folders and files that belong to the user alone, such as those of a cache. Files that another user could have written are not read, and
//! no file is written to a folder that another user can write to.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use super::trust::Distrust;

/// Prefix of the names of files being written, including those left over by killed processes.
pub(crate) const UNFINISHED: &str = ".unfinished-";

/// An error in accessing a private file.
#[derive(Debug)]
pub(crate) enum Trouble {
    Foreign(Distrust),
    Io(io::Error),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Trouble::Io(error)
    }
}

impl From<Trouble> for io::Error {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Foreign(why) => {
                io::Error::new(io::ErrorKind::PermissionDenied, why.to_string())
            }
            Trouble::Io(error) => error,
        }
    }
}

/// Checks that `folder` belongs to the user, and that nobody else can write to it or replace it.
/// Accepts a folder that does not exist yet.
pub(crate) fn check_folder(folder: &Path) -> Result<(), Trouble> {
    #[cfg(unix)]
    {
        let metadata = match folder.metadata() {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if metadata.is_dir() {
            super::trust::check_own(folder, &metadata).map_err(Trouble::Foreign)?;
        }
        if let Some(above) = folder.parent().filter(|above| above.is_dir()) {
            super::trust::check_one(above).map_err(Trouble::Foreign)?;
        }
    }
    let _ = folder;
    Ok(())
}

/// Reads up to `most + 1` bytes of a file that must belong to the user. A result of `most + 1` bytes means that the file is larger than
/// `most`.
pub(crate) fn read(file: &Path, most: u64) -> Result<Vec<u8>, Trouble> {
    if let Some(folder) = file.parent() {
        check_folder(folder)?;
    }
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        use std::os::unix::fs::OpenOptionsExt;
        // `NOFOLLOW` rejects a symbolic link. With `NONBLOCK`, opening a pipe does not wait for a writer.
        options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32);
    }
    let opened = match options.open(file) {
        #[cfg(unix)]
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            let at = file.to_owned();
            return Err(Trouble::Foreign(Distrust::Link { at }));
        }
        opened => opened?,
    };
    #[cfg(unix)]
    super::trust::check_own(file, &opened.metadata()?).map_err(Trouble::Foreign)?;
    let mut bytes = Vec::new();
    opened
        .take(most.saturating_add(1))
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a file with `options`. If it is a regular file, the group and other users lose their permissions.
#[cfg(feature = "serve")]
pub(crate) fn open_private(path: &Path, options: &mut fs::OpenOptions) -> io::Result<File> {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    let file = options.open(path)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let metadata = file.metadata()?;
        if metadata.is_file() && metadata.permissions().mode() & 0o077 != 0 {
            file.set_permissions(fs::Permissions::from_mode(0o600))?;
        }
    }
    Ok(file)
}

/// Creates a temporary file that only the user can access, in a `folder` that passes [`check_folder`]. The folder is created if it does not
/// exist. The file is deleted on drop unless it is persisted.
pub(crate) fn unfinished_in(folder: &Path) -> Result<tempfile::NamedTempFile, Trouble> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)?;
    check_folder(folder)?;
    // A temporary file is accessible only to the user, and stays so when it is renamed.
    Ok(tempfile::Builder::new()
        .prefix(UNFINISHED)
        .tempfile_in(folder)?)
}

/// Writes a private file atomically: readers see either a complete file or none, even with concurrent writers. If writing fails, an
/// existing file is unchanged.
pub(crate) fn write(file: &Path, bytes: &[u8]) -> Result<(), Trouble> {
    let named = file.parent().filter(|p| !p.as_os_str().is_empty());
    let mut unfinished = unfinished_in(named.unwrap_or(Path::new(".")))?;
    unfinished.write_all(bytes)?;
    unfinished
        .persist(file)
        .map(drop)
        .map_err(|refused| refused.error.into())
}
