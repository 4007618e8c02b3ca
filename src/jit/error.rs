//! Errors of the compiler and its cache.

use std::fmt;
use std::io;
use std::path::PathBuf;

use super::{Looked, Target, TargetError};

/// An error in compiling a source to a cubin.
#[derive(Debug, thiserror::Error)]
pub enum JitError {
    /// There is no target for the card, or no target with this name.
    #[error(transparent)]
    Target(#[from] TargetError),

    /// NVRTC was not found.
    #[error(
        "NVRTC, which compiles the generated CUDA source, was not found. Searched:\n{}\
         Install it with `pip install nvidia-cuda-nvrtc`, or set GEMMULE_NVRTC to the file \
         libnvrtc.so.13 or to the folder that holds it",
        lines(.looked)
    )]
    NvrtcMissing {
        /// Every place that was searched, in order, with its result.
        looked: Vec<Looked>,
    },

    /// `GEMMULE_NVRTC` is set, but its value cannot be used. Nothing else is tried, so that an
    /// explicit choice is never replaced silently.
    #[error(
        "GEMMULE_NVRTC is set to {}, which cannot be used:\n{}\
         Set it to the file libnvrtc.so.13, to the folder or the Python environment that holds it, \
         or unset it to let NVRTC be searched for",
        .value.display(), lines(.looked)
    )]
    NvrtcChoice {
        /// The value of the variable.
        value: PathBuf,
        /// The places that were searched, with their results.
        looked: Vec<Looked>,
    },

    /// The given file is not a usable NVRTC.
    #[error("{} cannot be used as NVRTC: {why}", .path.display())]
    NvrtcUnusable {
        /// The file.
        path: PathBuf,
        /// The loader's message, or the name of a missing function.
        why: String,
    },

    /// This NVRTC is too old for the target.
    #[error(
        "NVRTC {}.{} ({}) is older than the target {target}, which needs {}.{} or newer. Install \
         a newer one with `pip install nvidia-cuda-nvrtc`, or set GEMMULE_NVRTC to one",
        .version.0, .version.1, .path.display(), .needed.0, .needed.1
    )]
    NvrtcTooOld {
        /// The library.
        path: PathBuf,
        /// Version of the library, (major, minor).
        version: (i32, i32),
        /// The requested target.
        target: Target,
        /// The first version that supports the target.
        needed: (i32, i32),
    },

    /// This NVRTC no longer supports the target.
    #[error(
        "NVRTC {}.{} ({}) does not compile for {target}; it compiles for {}. Set GEMMULE_NVRTC to \
         one that does, such as 13.0",
        .version.0, .version.1, .path.display(),
        .known.iter().map(|arch| format!("sm_{arch}")).collect::<Vec<_>>().join(", ")
    )]
    TargetDropped {
        /// The library.
        path: PathBuf,
        /// Version of the library, (major, minor).
        version: (i32, i32),
        /// The requested target.
        target: Target,
        /// The architectures that the library lists.
        known: Vec<i32>,
    },

    /// The source contains a NUL byte, so it cannot be passed to NVRTC as a C string.
    #[error("the source of the kernel `{}` contains a NUL byte at offset {at}", .symbol.escape_default())]
    NulInSource {
        /// The kernel.
        symbol: String,
        /// Offset in bytes in the text, or in the symbol if the text has no NUL.
        at: usize,
    },

    /// The source is invalid for the target.
    #[error(
        "NVRTC {}.{} cannot compile the kernel `{symbol}` for {target}.\n\n{quote}{}The compiler's \
         log:\n{log}\n\nThe source is generated; `gemmule emit --arch {target}` writes it out.",
        .version.0, .version.1, if .quote.is_empty() { "" } else { "\n" }
    )]
    Compile {
        /// The kernel.
        symbol: String,
        /// The target.
        target: Target,
        /// NVRTC's version, (major, minor).
        version: (i32, i32),
        /// The first failing line with its neighbors and the error; empty if the log names no
        /// line.
        quote: String,
        /// The whole log.
        log: String,
    },

    /// The source contains no kernel, more than one, or one whose name is not the expected one.
    #[error(
        "the source of the kernel `{symbol}` should define `extern \"C\" __global__ void \
         {symbol}(…)` and no other kernel; it defines {}",
        if .found.is_empty() { "none".to_owned() } else { .found.join(", ") }
    )]
    NotOneKernel {
        /// The kernel that was expected.
        symbol: String,
        /// The kernels that were found, as the assembler names them.
        found: Vec<String>,
    },

    /// NVRTC itself failed.
    #[error(
        "{call} of NVRTC ({}) failed: {message}{}{log}",
        .path.display(), if .log.is_empty() { "" } else { "\n" }
    )]
    Nvrtc {
        /// The library.
        path: PathBuf,
        /// The function that failed.
        call: &'static str,
        /// NVRTC's name of the error.
        message: String,
        /// The log of the compilation, if there is one.
        log: String,
    },

    /// No compiling thread could be started.
    #[error("cannot start a thread to compile kernels on: {error}")]
    Thread {
        /// The system's reason.
        error: io::Error,
    },

    /// There is no folder for the cache.
    #[error(
        "there is no folder for the kernel cache: GEMMULE_CACHE is not set, and neither \
         XDG_CACHE_HOME nor HOME holds an absolute path. Set GEMMULE_CACHE to a folder"
    )]
    NoCacheFolder,

    /// The cache cannot be read or written.
    #[error(
        "cannot {action} the kernel cache at {}: {error}. To fix it, {}, or set GEMMULE_CACHE to \
         another folder; until then, kernels are compiled again at each start",
        .path.display(), .fault.remedy()
    )]
    Cache {
        /// The kind of error.
        fault: CacheFault,
        /// `read` or `write`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        error: io::Error,
    },

    /// Another user may have changed the cache.
    #[error(
        "the kernel cache {} is neither read nor written: {why}. Code that another user put there would \
         run on the GPU as yours. Fix the permissions, or set GEMMULE_CACHE to a folder of your own; until \
         then, kernels are compiled again at each start",
        .folder.display()
    )]
    CacheForeign {
        /// The folder of entries.
        folder: PathBuf,
        /// The file or folder that is writable by others, and the remedy.
        why: String,
    },

    /// Another user may have written this entry of the cache.
    #[error(
        "the kernel cache entry {} is not used: {why}, so its code may be another user's. It is \
         compiled again and replaced",
        .path.display()
    )]
    CacheForeignEntry {
        /// The entry.
        path: PathBuf,
        /// The reason why the entry is not trusted.
        why: String,
    },

    /// A cache entry is damaged.
    #[error(
        "the kernel cache entry {} is damaged: {why}. It is compiled again and replaced",
        .path.display()
    )]
    CacheDamaged {
        /// The entry.
        path: PathBuf,
        /// Description of the damage.
        why: String,
    },
}

impl JitError {
    /// Returns the kind of cache error; `None` for other errors.
    pub fn cache_fault(&self) -> Option<CacheFault> {
        match self {
            JitError::Cache { fault, .. } => Some(*fault),
            JitError::CacheForeign { .. } | JitError::CacheForeignEntry { .. } => {
                Some(CacheFault::Foreign)
            }
            JitError::CacheDamaged { .. } => Some(CacheFault::Damaged),
            JitError::NoCacheFolder => Some(CacheFault::NoFolder),
            _ => None,
        }
    }
}

/// Kinds of cache errors. None of them makes a compilation fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheFault {
    /// The disk is full, or the user's quota is exhausted.
    Full,
    /// The file system is mounted read-only.
    ReadOnly,
    /// The user has no permission to read or write.
    Denied,
    /// Part of the path is a file instead of a folder.
    NotAFolder,
    /// The environment names no folder.
    NoFolder,
    /// Other users may write to the cache or to an entry.
    Foreign,
    /// The contents of an entry are damaged.
    Damaged,
    /// Another error of the system, such as a failing disk.
    Io,
}

impl CacheFault {
    pub(super) fn of(error: &io::Error) -> CacheFault {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => CacheFault::Full,
            io::ErrorKind::ReadOnlyFilesystem => CacheFault::ReadOnly,
            io::ErrorKind::PermissionDenied => CacheFault::Denied,
            // If a file is in place of the folder, creating the folder returns `AlreadyExists`.
            io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => CacheFault::NotAFolder,
            _ => CacheFault::Io,
        }
    }

    fn remedy(self) -> &'static str {
        match self {
            CacheFault::Full => "free some space",
            CacheFault::ReadOnly => "remount the file system read-write",
            CacheFault::Denied => "change its permissions",
            CacheFault::NotAFolder => "remove the file that is in place of a folder",
            CacheFault::NoFolder => "set HOME",
            CacheFault::Foreign => "make it accessible to you only",
            CacheFault::Damaged => "delete it",
            CacheFault::Io => "check the disk",
        }
    }
}

/// Formats one line for each place that was searched.
fn lines(looked: &[Looked]) -> impl fmt::Display {
    looked
        .iter()
        .map(|place| format!("  {place}\n"))
        .collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_of_the_library_name_its_file_and_repeat_its_log() {
        let failure = |log: &str| JitError::Nvrtc {
            path: "/opt/lib/libnvrtc.so.13".into(),
            call: "nvrtcCompileProgram",
            message: "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE".to_owned(),
            log: log.to_owned(),
        };
        insta::assert_snapshot!(
            failure("nvrtc: error: failed to open libnvrtc-builtins.so.13.0."),
            @r"
        nvrtcCompileProgram of NVRTC (/opt/lib/libnvrtc.so.13) failed: NVRTC_ERROR_BUILTIN_OPERATION_FAILURE
        nvrtc: error: failed to open libnvrtc-builtins.so.13.0.
        "
        );
        insta::assert_snapshot!(
            failure(""),
            @"nvrtcCompileProgram of NVRTC (/opt/lib/libnvrtc.so.13) failed: NVRTC_ERROR_BUILTIN_OPERATION_FAILURE"
        );
        let unusable = JitError::NvrtcUnusable {
            path: "/opt/lib/libnvrtc.so.13".into(),
            why: "file too short".to_owned(),
        };
        insta::assert_snapshot!(
            unusable,
            @"/opt/lib/libnvrtc.so.13 cannot be used as NVRTC: file too short"
        );
    }

    #[test]
    fn only_cache_errors_have_a_cache_fault() {
        let damaged = JitError::CacheDamaged {
            path: "x".into(),
            why: "short".to_owned(),
        };
        assert_eq!(damaged.cache_fault(), Some(CacheFault::Damaged));
        assert_eq!(
            JitError::NoCacheFolder.cache_fault(),
            Some(CacheFault::NoFolder)
        );
        assert_eq!(
            JitError::from(TargetError::UnknownTarget {
                name: "x".to_owned()
            })
            .cache_fault(),
            None
        );
    }
}
