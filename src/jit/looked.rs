//! Results of the search for NVRTC, place by place.

use std::{fmt, path::PathBuf};

/// A place that was searched for NVRTC, with the result. Error messages and `gemmule doctor` print it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Looked {
    /// The step of the search.
    pub origin: Origin,
    /// The file or folder, or a bare file name that the loader searches for. Empty if there is no
    /// path, for example if a variable is not set.
    pub place: PathBuf,
    /// Result of the search at this place.
    pub outcome: Outcome,
}

/// The steps of the search for NVRTC, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The value of `GEMMULE_NVRTC`.
    Choice,
    /// The dynamic loader's own search, by file name.
    Loader,
    /// A folder of a CUDA toolkit.
    Cuda,
    /// The Python environment named by this variable.
    Environment(&'static str),
    /// A folder on the import path of this interpreter.
    Python(PathBuf),
}

/// Result of the search at one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The variable is not set.
    NotSet,
    /// The file, folder or program does not exist.
    Absent,
    /// The folder and its usual subfolders exist, but do not contain NVRTC.
    Nothing,
    /// The file cannot be used, for this reason.
    Unusable(String),
    /// The place was not searched or the file was not opened, because its path depends on the current folder or because another user could
    /// have changed it. Contains the reason and the remedy.
    Refused(String),
    /// This version, (major, minor), was loaded.
    Taken(i32, i32),
}

impl fmt::Display for Looked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.origin)?;
        if !self.place.as_os_str().is_empty() {
            write!(f, ", {}", self.place.display())?;
        }
        write!(f, ": {}", self.outcome)
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Choice => f.write_str("GEMMULE_NVRTC"),
            Origin::Loader => f.write_str("the loader's path"),
            Origin::Cuda => f.write_str("CUDA"),
            Origin::Environment(name) => f.write_str(name),
            Origin::Python(interpreter) => f.write_str(&interpreter.to_string_lossy()),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::NotSet => f.write_str("not set"),
            Outcome::Absent => f.write_str("not there"),
            Outcome::Nothing => f.write_str("no NVRTC in it"),
            Outcome::Unusable(why) | Outcome::Refused(why) => f.write_str(why),
            Outcome::Taken(major, minor) => write!(f, "NVRTC {major}.{minor}"),
        }
    }
}
