//! Folders and files that are the user's alone, as those of a cache: what another user could have
//! put there is neither read nor written over.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use super::trust::Distrust;

/// How the name of a file begins that is being written, or that a killed process left behind.
pub(crate) const UNFINISHED: &str = ".unfinished-";

/// Why a file of the user's own cannot be had.
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

/// Whether `folder` is the user's own and nobody else may write to it, and none can put another in
/// its place. One that is not there yet will be.
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

/// All bytes of a file of the user's own, at most `most` of them and one more, which tells that
/// there are too many.
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
        // A link leads elsewhere, and opening a pipe would wait for someone to write to it.
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

/// Opens a file as `options` say, and takes the permissions of the group and of others away if it is a regular file.
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

/// A new file in a folder of the user's own, which is made if it is not there; it takes itself away
/// unless it is given a name. Both are the user's alone.
pub(crate) fn unfinished_in(folder: &Path) -> Result<tempfile::NamedTempFile, Trouble> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)?;
    check_folder(folder)?;
    // A temporary file is the user's alone, and stays so under its name.
    Ok(tempfile::Builder::new()
        .prefix(UNFINISHED)
        .tempfile_in(folder)?)
}

/// Writes a file of the user's own: readers see a whole file or none, whoever else writes it at the
/// same time. What was there before is still there after a failure.
pub(crate) fn write(file: &Path, bytes: &[u8]) -> Result<(), Trouble> {
    let named = file.parent().filter(|p| !p.as_os_str().is_empty());
    let mut unfinished = unfinished_in(named.unwrap_or(Path::new(".")))?;
    unfinished.write_all(bytes)?;
    unfinished
        .persist(file)
        .map(drop)
        .map_err(|refused| refused.error.into())
}
