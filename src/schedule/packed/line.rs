//! Queue of a tenant's requests of one class.

use std::collections::VecDeque;

use super::LOOK_AHEAD;
use crate::schedule::Waiting;

#[derive(Default)]
pub(super) struct Line {
    /// Id and number of tokens of each request.
    pub(super) requests: VecDeque<(u64, u32)>,
    /// Tokens that the tenant may still take in its turn (the deficit of deficit round robin).
    pub(super) deficit: u64,
    /// Number of times that later requests have overtaken the first request.
    pub(super) passed: u8,
    /// Minimum number of tokens among the first [`LOOK_AHEAD`] requests; 0 if it must be recomputed.
    pub(super) least: u32,
}

impl Line {
    pub(super) fn add(&mut self, waiting: &Waiting) {
        if self.requests.len() < LOOK_AHEAD {
            self.least = 0;
        }
        self.requests.push_back((waiting.id, waiting.tokens));
    }

    pub(super) fn forget_first(&mut self) {
        self.requests.pop_front();
        (self.passed, self.least) = (0, 0);
    }

    /// Removes the request at position `at`.
    pub(super) fn take(&mut self, at: usize) {
        match at {
            0 => self.forget_first(),
            _ => {
                self.requests.remove(at);
                (self.passed, self.least) = (self.passed.saturating_add(1), 0);
            }
        }
    }
}
