//! Requests with several inputs that fail as a whole. As soon as one input fails, or the request can no longer meet its deadline, its
//! remaining inputs leave the queue.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::Load;
use crate::{
    schedule::{CostTable, Micros},
    serve::{ServeError, backlog::Backlog},
};

/// A request with several inputs that fails as a whole ([`Submit::is_joint`](super::Submit::is_joint)).
pub(super) struct Joint {
    /// Time by which the batches of the request must have finished; `None` without a deadline.
    deadline: Option<Micros>,
    /// Mean number of tokens per input, as estimated at admission.
    mean: u64,
    /// Bytes of the inputs that are not yet tokenized. `expected` is the estimated number of their tokens. `bytes`, `expected` and `tokens`
    /// change only under the lock of the service's state. With a cache, `bytes` and `expected` remain 0, because some of the inputs may not
    /// need to be computed.
    bytes: AtomicU64,
    expected: AtomicU64,
    has_cache: bool,
    /// Tokens of the queued inputs.
    tokens: AtomicU64,
    /// Error of the first input that failed.
    failed: OnceLock<ServeError>,
}

impl Joint {
    /// Creates a request to which no input has been added yet. `mean` is the estimated mean number of tokens per input.
    pub(super) fn new(deadline: Option<Micros>, mean: u64, has_cache: bool) -> Self {
        Self {
            deadline,
            mean,
            bytes: AtomicU64::new(0),
            expected: AtomicU64::new(0),
            has_cache,
            tokens: AtomicU64::new(0),
            failed: OnceLock::new(),
        }
    }

    /// Records that an input has failed with `error`. Returns whether it is the first input that failed.
    pub(super) fn fail(&self, error: &ServeError) -> bool {
        self.failed.set(error.clone()).is_ok()
    }

    /// Returns the error of the request if an input has failed.
    pub(super) fn failed(&self) -> Option<&ServeError> {
        self.failed.get()
    }

    pub(super) fn add_untokenized(&self, load: Load) {
        if self.has_cache {
            return;
        }
        self.bytes.fetch_add(load.bytes, Ordering::Relaxed);
        self.expected.fetch_add(load.tokens, Ordering::Relaxed);
    }

    pub(super) fn take_untokenized(&self, load: Load) {
        if self.has_cache {
            return;
        }
        self.bytes.fetch_sub(load.bytes, Ordering::Relaxed);
        self.expected.fetch_sub(load.tokens, Ordering::Relaxed);
    }

    pub(super) fn add_tokens(&self, tokens: u64) {
        self.tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    pub(super) fn take_tokens(&self, tokens: u64) {
        self.tokens.fetch_sub(tokens, Ordering::Relaxed);
    }

    /// Returns by how much the request will miss its deadline, even if nothing else runs from now on; `None` if it may meet its deadline.
    pub(super) fn over(
        &self,
        now: Micros,
        backlog: &Backlog,
        costs: &CostTable,
    ) -> Option<Duration> {
        let left = Duration::from_micros(self.deadline?.since(now).0);
        let load = Load {
            bytes: self.bytes.load(Ordering::Relaxed),
            tokens: self.tokens.load(Ordering::Relaxed) + self.expected.load(Ordering::Relaxed),
        };
        if load == Load::default() {
            return None;
        }
        let over = backlog.least(load, self.mean, costs).checked_sub(left)?;
        (!over.is_zero()).then_some(over)
    }
}
