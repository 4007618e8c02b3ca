//! NVRTC: CUDA source in, cubins out, compiled in parallel and cached on disk.
//!
//! This room knows sources, targets and bytes; what the kernels compute, and in which order they
//! run, is decided above it. Nothing here needs a GPU or a driver: NVRTC makes the code of every
//! [`Target`] on any machine.
//!
//! - [`Target`]: the kinds of card that code is made for;
//! - [`Nvrtc`]: the library, where it was found, and one compilation;
//! - [`DiskCache`]: finished cubins, keyed by what determines their bytes and nothing else;
//! - [`Jit`]: both together, for all the kernels of a program at once.

mod cache;
mod compile_all;
mod diagnose;
mod error;
mod ffi;
mod locate;
mod nvrtc;
mod report;
mod target;

pub use cache::{CacheKey, CacheUsage, DiskCache};
pub use compile_all::{CacheNote, Jit, JitStats};
pub use error::{CacheFault, JitError};
pub use locate::{Looked, Origin, Outcome, Surroundings};
pub use nvrtc::{Nvrtc, options};
pub use report::{CompileReport, parse_report};
pub use target::Target;

use serde::{Deserialize, Serialize};

/// The NVRTC for tests: as any, and where no other was chosen that of the project, which
/// `make setup` installs.
#[cfg(test)]
pub(crate) fn nvrtc_for_tests() -> Nvrtc {
    let mut surroundings = Surroundings::of_this_process();
    let own = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(".gemmule/venv");
    surroundings.choice = surroundings.choice.or(own.is_dir().then_some(own));
    Nvrtc::find_in(&surroundings).unwrap_or_else(|error| panic!("{error}"))
}

pub use crate::codegen::Source;

/// One kernel compiled for one target: what the driver loads as a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cubin {
    /// Name of the entry function, as in [`Source::symbol`].
    pub symbol: String,
    /// What the code runs on.
    pub target: Target,
    /// The ELF image. NVRTC gives the same bytes for the same source, options and version.
    pub bytes: Vec<u8>,
    /// What the assembler said about registers and memory; `None` when its log had no such lines.
    pub report: Option<CompileReport>,
}
