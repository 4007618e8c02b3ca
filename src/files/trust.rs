//! Checks that only the user and root can change the file at a path.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Reason why another user might control a path.
#[derive(Debug)]
pub(crate) enum Distrust {
    /// A file or folder on the path is writable by users other than its owner.
    Writable { at: PathBuf, mode: u32 },
    /// A file or folder on the path belongs to another user. `root_would_do` is whether root would be an accepted owner.
    Owner {
        at: PathBuf,
        owner: u32,
        root_would_do: bool,
    },
    /// The path is a symbolic link instead of the file itself.
    Link { at: PathBuf },
    /// The owner cannot be determined.
    Unknown { at: PathBuf, error: io::Error },
}

impl Distrust {
    /// Returns the file or folder that is not trusted.
    pub(crate) fn at(&self) -> &Path {
        match self {
            Distrust::Writable { at, .. }
            | Distrust::Owner { at, .. }
            | Distrust::Link { at }
            | Distrust::Unknown { at, .. } => at,
        }
    }

    /// Describes the reason, without a remedy.
    pub(crate) fn what(&self) -> String {
        match self {
            Distrust::Writable { mode, .. } => {
                format!("it is writable by other users (mode {mode:04o})")
            }
            Distrust::Owner { owner, .. } => format!("it belongs to user {owner}"),
            Distrust::Link { .. } => "it is a symbolic link".to_owned(),
            Distrust::Unknown { error, .. } => format!("its owner cannot be determined: {error}"),
        }
    }
}

impl fmt::Display for Distrust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Distrust::Writable { at, mode } => write!(
                f,
                "{at} is writable by other users (mode {mode:04o}); run `chmod go-w {at}`",
                at = at.display(),
            ),
            Distrust::Owner {
                at,
                owner,
                root_would_do,
            } => write!(
                f,
                "{} belongs to user {owner}, {}; change its owner with `chown`, or use one of \
                 your own",
                at.display(),
                if *root_would_do {
                    "neither to you nor to root"
                } else {
                    "not to you"
                },
            ),
            Distrust::Link { at } => write!(
                f,
                "{} is a symbolic link; replace it with the file itself",
                at.display()
            ),
            Distrust::Unknown { at, error } => {
                write!(
                    f,
                    "the owner of {} cannot be determined: {error}",
                    at.display()
                )
            }
        }
    }
}

/// Users other than the owner who may write to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writers {
    /// No other user.
    Nobody,
    /// The file's group. Accepted for files that the user named, because many systems give each
    /// user a group of their own.
    Group,
}

/// Resolves the symbolic links of `path`, and checks that only the user, root, and the writers that `besides` allows can change the
/// resulting file. The file and every folder above it must belong to the user or to root, and no other user may write to them. Sticky
/// folders above the file, such as /tmp, may be writable, because nobody can replace other users' files there.
///
/// Accepts every path on systems other than Unix.
pub(crate) fn resolve(path: &Path, besides: Writers) -> Result<PathBuf, Distrust> {
    let real = path.canonicalize().map_err(|error| Distrust::Unknown {
        at: path.to_owned(),
        error,
    })?;
    #[cfg(unix)]
    for (depth, at) in real.ancestors().enumerate() {
        let metadata = at.symlink_metadata().map_err(|error| Distrust::Unknown {
            at: at.to_owned(),
            error,
        })?;
        unix::check(at, &metadata, besides, depth > 0)?;
    }
    #[cfg(not(unix))]
    let _ = besides;
    Ok(real)
}

/// Like [`resolve`], but checks only the file or folder itself, not those above it. Accepts a sticky folder.
pub(crate) fn check_one(path: &Path) -> Result<(), Distrust> {
    #[cfg(unix)]
    {
        let metadata = path.metadata().map_err(|error| Distrust::Unknown {
            at: path.to_owned(),
            error,
        })?;
        unix::check(path, &metadata, Writers::Nobody, true)?;
    }
    let _ = path;
    Ok(())
}

/// Returns a message if the dynamic loader could load a library from the current folder: `LD_LIBRARY_PATH` has an empty or relative entry,
/// and the folder of this entry contains a library that this program loads by name. Anyone who can write to the current folder can put a
/// library there. An empty entry, from an extra colon, is common and harmless if no such library exists.
pub(crate) fn planted_library() -> Option<String> {
    let here = std::env::current_dir().ok()?;
    planted(&std::env::var("LD_LIBRARY_PATH").ok()?, &here)
}

/// Prefixes of the names of the libraries that are loaded by name, directly or indirectly.
const LOADED: [&str; 6] = [
    "libcuda",
    "libnvrtc",
    "libcublas",
    "libnvidia",
    "libnvcuda",
    "libnvJitLink",
];

/// Implements [`planted_library`] for `paths`, the value of `LD_LIBRARY_PATH`, and `here`, the current folder.
fn planted(paths: &str, here: &Path) -> Option<String> {
    // The loader ignores an empty variable. It splits at colons and semicolons.
    if paths.is_empty() {
        return None;
    }
    let is_relative = |entry: &&str| {
        let origin = entry.starts_with("$ORIGIN") || entry.starts_with("${ORIGIN}");
        !(entry.starts_with('/') || origin)
    };
    paths.split([':', ';']).filter(is_relative).find_map(|entry| {
        let files = here.join(entry).read_dir().ok()?;
        let names = files.filter_map(|file| file.ok()?.file_name().into_string().ok());
        let is_loaded = |name: &String| LOADED.iter().any(|start| name.starts_with(start));
        let library = names.filter(is_loaded).min()?;
        Some(match entry {
            "" => format!(
                "LD_LIBRARY_PATH has an empty entry, which means the current folder, and that contains `{library}`; remove the extra colon"
            ),
            entry => format!(
                "LD_LIBRARY_PATH has the entry `{entry}`, which is relative to the current folder and contains `{library}`; make it absolute"
            ),
        })
    })
}

#[cfg(unix)]
mod unix {
    use super::{Distrust, Writers};
    use std::fs::Metadata;
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    const GROUP: u32 = 0o020;
    const OTHERS: u32 = 0o002;
    const STICKY: u32 = 0o1000;
    const ROOT: u32 = 0;

    /// Returns the effective user of this process.
    pub(in crate::files) fn user() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    pub(super) fn check(
        at: &Path,
        metadata: &Metadata,
        besides: Writers,
        sticky_will_do: bool,
    ) -> Result<(), Distrust> {
        let owner = metadata.uid();
        if owner != ROOT && owner != user() {
            return Err(Distrust::Owner {
                at: at.to_owned(),
                owner,
                root_would_do: true,
            });
        }
        let refused = match besides {
            Writers::Nobody => GROUP | OTHERS,
            Writers::Group => OTHERS,
        };
        let mode = metadata.mode() & 0o7777;
        let sticky = sticky_will_do && metadata.is_dir() && mode & STICKY != 0;
        if mode & refused != 0 && !sticky {
            let at = at.to_owned();
            return Err(Distrust::Writable { at, mode });
        }
        Ok(())
    }

    /// Like [`check`], but the file must belong to the user, not to root.
    pub(in crate::files) fn check_own(at: &Path, metadata: &Metadata) -> Result<(), Distrust> {
        if metadata.uid() != user() {
            return Err(Distrust::Owner {
                at: at.to_owned(),
                owner: metadata.uid(),
                root_would_do: false,
            });
        }
        check(at, metadata, Writers::Nobody, false)
    }
}

#[cfg(unix)]
pub(in crate::files) use unix::check_own;

#[cfg(test)]
pub(super) fn planted_in(paths: &str, here: &Path) -> Option<String> {
    planted(paths, here)
}
