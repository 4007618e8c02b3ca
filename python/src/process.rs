//! Forked processes, which do not have the threads of their parent.

use std::{process, sync::OnceLock};

use crate::error::{Error, Result};

/// The process that loaded the first model. The pools of threads that models share belong to it.
static LOADED_BY: OnceLock<u32> = OnceLock::new();

/// Checks that this process has the threads that compute.
///
/// # Errors
/// A process that was forked after a model was loaded. It would wait for threads that do not exist.
pub fn check() -> Result<()> {
    let this = process::id();
    match *LOADED_BY.get_or_init(|| this) == this {
        true => Ok(()),
        false => Err(Error::Process),
    }
}
