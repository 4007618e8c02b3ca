//! Signals, such as that of Ctrl-C, while a call computes without the GIL.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::error::Result;

/// Interval of the checks. Taking the GIL for each token would slow down generation beside other threads.
pub const INTERVAL: Duration = Duration::from_millis(50);

/// Runs Python's signal handlers from time to time.
pub struct Signals {
    checked: Instant,
}

impl Signals {
    pub fn new() -> Self {
        Self {
            checked: Instant::now(),
        }
    }

    /// Runs the handlers of signals that arrived, if the last check is at least [`INTERVAL`] ago. The caller does not hold the
    /// GIL.
    ///
    /// # Errors
    /// The exception of a handler, usually `KeyboardInterrupt`.
    pub fn check(&mut self) -> Result<()> {
        if self.checked.elapsed() < INTERVAL {
            return Ok(());
        }
        // `None` while the interpreter shuts down, and other threads end.
        let checked = Python::try_attach(|py| py.check_signals());
        self.checked = Instant::now();
        Ok(checked.unwrap_or(Ok(()))?)
    }
}
