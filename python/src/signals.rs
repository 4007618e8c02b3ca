//! Handling of signals, such as Ctrl-C, while a call computes without the GIL.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::error::Result;

/// Interval between checks. Acquiring the GIL for each token would slow down generation if other threads use Python.
pub const INTERVAL: Duration = Duration::from_millis(50);

/// Runs Python's signal handlers at intervals.
pub struct Signals {
    checked: Instant,
}

impl Signals {
    pub fn new() -> Self {
        Self {
            checked: Instant::now(),
        }
    }

    /// Runs the handlers of pending signals if at least [`INTERVAL`] has passed since the last check. The caller must not hold the GIL.
    ///
    /// # Errors
    /// Returns the exception of a handler, usually `KeyboardInterrupt`.
    pub fn check(&mut self) -> Result<()> {
        if self.checked.elapsed() < INTERVAL {
            return Ok(());
        }
        // `None` while the interpreter shuts down, which also ends other threads.
        let checked = Python::try_attach(|py| py.check_signals());
        self.checked = Instant::now();
        Ok(checked.unwrap_or(Ok(()))?)
    }
}
