//! NVRTC: compiles CUDA source to cubins, in parallel, with a cache on disk.
//!
//! This module handles sources, targets and bytes. Other modules decide which kernels to compile,
//! and in which order. No GPU or driver is needed: NVRTC generates code for every [`Target`] on any
//! machine.
//!
//! - [`Target`]: the architectures that code is generated for;
//! - [`Nvrtc`]: the library, the search for it, and single compilations;
//! - [`DiskCache`]: compiled cubins, keyed by everything that determines their bytes;
//! - [`Jit`]: NVRTC and the cache together, for all the kernels of a program at once.

mod cache;
mod compile_all;
mod diagnose;
mod error;
mod ffi;
mod locate;
mod looked;
mod nvrtc;
mod report;
mod target;

pub use cache::{CacheKey, CacheUsage, DiskCache};
pub use compile_all::{CacheNote, Jit, JitStats};
pub use error::{CacheFault, JitError};
pub use locate::Surroundings;
pub use looked::{Looked, Origin, Outcome};
pub use nvrtc::{Nvrtc, options};
pub use report::{CompileReport, parse_report};
pub use target::{Target, TargetError};

use serde::{Deserialize, Serialize};

/// Returns the NVRTC for tests: the library that `GEMMULE_NVRTC` names, else the one that `make setup`
/// installs, else the one that [`Nvrtc::find`] finds.
#[cfg(test)]
pub(crate) fn nvrtc_for_tests() -> Nvrtc {
    let mut surroundings = Surroundings::of_this_process();
    let own = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(".gemmule/venv");
    surroundings.choice = surroundings.choice.or(own.is_dir().then_some(own));
    Nvrtc::find_in(&surroundings).unwrap_or_else(|error| panic!("{error}"))
}

pub use crate::codegen::Source;

/// A kernel compiled for one target. The driver loads it as a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cubin {
    /// Name of the entry function, as in [`Source::symbol`].
    pub symbol: String,
    /// The target that the code runs on.
    pub target: Target,
    /// The ELF image. NVRTC gives the same bytes for the same source, options and version.
    pub bytes: Vec<u8>,
    /// Registers and memory as reported by the assembler; `None` if its log has no such lines.
    pub report: Option<CompileReport>,
}
