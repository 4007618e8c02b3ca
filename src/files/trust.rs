//! Whether anyone but the user and root may change what a path leads to.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Why what lies at a path may be another user's doing.
#[derive(Debug)]
pub(crate) enum Distrust {
    /// This file or folder on the way may be written by others than its owner.
    Writable { at: PathBuf, mode: u32 },
    /// This file or folder on the way is neither the user's nor, where that would do, root's.
    Owner {
        at: PathBuf,
        owner: u32,
        root_would_do: bool,
    },
    /// A symbolic link is there instead of the file itself.
    Link { at: PathBuf },
    /// It cannot be found out.
    Unknown { at: PathBuf, error: io::Error },
}

impl Distrust {
    /// The file or folder that is not trusted.
    pub(crate) fn at(&self) -> &Path {
        match self {
            Distrust::Writable { at, .. }
            | Distrust::Owner { at, .. }
            | Distrust::Link { at }
            | Distrust::Unknown { at, .. } => at,
        }
    }

    /// What is wrong with it, without how to mend that.
    pub(crate) fn what(&self) -> String {
        match self {
            Distrust::Writable { mode, .. } => format!("others may write to it (mode {mode:04o})"),
            Distrust::Owner { owner, .. } => format!("it belongs to the user {owner}"),
            Distrust::Link { .. } => "it is a symbolic link".to_owned(),
            Distrust::Unknown { error, .. } => format!("whose it is cannot be found out: {error}"),
        }
    }
}

impl fmt::Display for Distrust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Distrust::Writable { at, mode } => write!(
                f,
                "others may write to {at} (mode {mode:04o}); `chmod go-w {at}` mends it",
                at = at.display(),
            ),
            Distrust::Owner {
                at,
                owner,
                root_would_do,
            } => write!(
                f,
                "{} belongs to the user {owner}, {}; give it to yourself with `chown`, or take one \
                 of your own",
                at.display(),
                if *root_would_do {
                    "neither to you nor to root"
                } else {
                    "not to you"
                },
            ),
            Distrust::Link { at } => write!(
                f,
                "{} is a symbolic link; put the file itself there",
                at.display()
            ),
            Distrust::Unknown { at, error } => {
                write!(f, "whose {} is cannot be found out: {error}", at.display())
            }
        }
    }
}

/// Who besides the owner may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writers {
    /// Nobody.
    Nobody,
    /// The file's group: for what the user chose by name, as many systems give each user a group of
    /// their own.
    Group,
}

/// The file or folder that `path` leads to, without symbolic links, if only the user, root, and
/// those `besides` can change it: it and every folder above it belong to one of the two, and nobody
/// else may write there. A folder above that others may write to is no harm where it is sticky, as
/// /tmp is: none can then replace what is not theirs, and what is below is the user's or root's.
///
/// Elsewhere than on Unix nothing is known of owners, and every path is answered.
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

/// As [`resolve`], of one file or folder and not of those above it. A sticky folder will do.
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

/// An entry of the variable by which the loader finds libraries that means the current folder, or one that depends on
/// it, where such a folder holds a library that this program loads by name: whoever filled it chose what would run. A
/// surplus colon alone does no harm, and is common.
pub(crate) fn planted_library() -> Option<String> {
    let here = std::env::current_dir().ok()?;
    planted(&std::env::var("LD_LIBRARY_PATH").ok()?, &here)
}

/// How the names of the libraries begin that are loaded by name, and of those that these load.
const LOADED: [&str; 6] = [
    "libcuda",
    "libnvrtc",
    "libcublas",
    "libnvidia",
    "libnvcuda",
    "libnvJitLink",
];

/// The reason for [`planted_library`], given the variable's value and the current folder.
fn planted(paths: &str, here: &Path) -> Option<String> {
    // The loader takes an empty variable for none, and splits at both signs.
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
                "LD_LIBRARY_PATH has an empty entry, which means the current folder, where `{library}` lies; take the surplus colon out"
            ),
            entry => format!(
                "LD_LIBRARY_PATH has the entry `{entry}`, which depends on the current folder and holds `{library}`; make it absolute"
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

    /// The user whose rights this process has.
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

    /// As [`check`], and it is the user's own, not root's.
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
