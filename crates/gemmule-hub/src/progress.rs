//! Events of a fetch.

use std::{fmt, time::Duration};

/// A callback for events, called from several threads.
pub type Progress<'a> = &'a (dyn Fn(&Event<'_>) + Sync);

/// An event of a fetch. `Display` formats it as a line of text.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// Files are about to be fetched.
    Fetching {
        model: &'a str,
        files: usize,
        bytes: u64,
    },
    /// Number of bytes received so far, and in total. `done` decreases if a file is started again.
    Received { done: u64, total: u64 },
    /// The files are in the cache.
    Fetched,
    /// The model was renamed. It is used under its old name.
    Renamed { from: &'a str, to: &'a str },
    /// Another process fetches the file.
    Waiting { file: &'a str },
    /// A request will be repeated after a pause.
    Retrying {
        what: &'a str,
        problem: &'a str,
        pause: Duration,
    },
    /// The hub could not be reached, limited requests or failed, so a snapshot in the cache is used.
    Cached {
        model: &'a str,
        commit: &'a str,
        problem: &'a str,
    },
}

impl fmt::Display for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fetching {
                model,
                files,
                bytes,
            } => {
                let plural = if *files == 1 { "" } else { "s" };
                let megabytes = *bytes as f64 / 1e6;
                write!(
                    f,
                    "fetching {files} file{plural} of `{model}`, {megabytes:.1} MB"
                )
            }
            Self::Received { done, total } => {
                let percent = done.saturating_mul(100).checked_div(*total);
                write!(f, "{} % fetched", percent.unwrap_or(100))
            }
            Self::Fetched => f.write_str("all files are fetched"),
            Self::Renamed { from, to } => {
                write!(f, "`{from}` is called `{to}` now; use the new name")
            }
            Self::Waiting { file } => write!(f, "waiting for another process to fetch `{file}`"),
            Self::Retrying {
                what,
                problem,
                pause,
            } => {
                let seconds = pause.as_secs_f64();
                write!(f, "`{what}`: {problem}; trying again in {seconds:.0} s")
            }
            Self::Cached {
                model,
                commit,
                problem,
            } => write!(
                f,
                "`{model}` is used as it is in the cache, at commit {commit}, because {problem}"
            ),
        }
    }
}
