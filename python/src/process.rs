//! Forked processes, which lack the threads of their parent.

use std::{process, sync::OnceLock};

use crate::error::{Error, Result};

/// ID of the process that loaded the first model. Only this process has the threads of the shared thread pools.
static LOADED_BY: OnceLock<u32> = OnceLock::new();

/// Checks that this process has the compute threads.
///
/// # Errors
/// Returns an error in a process that was forked after a model was loaded. Such a process would wait forever for threads that do not exist.
pub fn check() -> Result<()> {
    let this = process::id();
    match *LOADED_BY.get_or_init(|| this) == this {
        true => Ok(()),
        false => Err(Error::Process),
    }
}
