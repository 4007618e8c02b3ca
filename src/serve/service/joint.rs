//! Requests for several inputs that fail as a whole. As soon as such a request is known to fail, its remaining inputs leave the queue.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::{
    Load, Miss, Service, Submit,
    queue::{Entry, State},
};
use crate::{
    schedule::{CostTable, Micros},
    serve::{Metrics, ServeError, Text, backlog::Backlog},
    simulate::Happened,
};

/// A request for several inputs ([`Submit::is_joint`]).
pub(super) struct Joint {
    /// Deadline of the batches, if there is one.
    deadline: Option<Micros>,
    /// Mean number of tokens per input, as estimated at admission.
    mean: u64,
    /// Work of the inputs that are not yet tokenized. It changes only under the lock of the state, like `tokens`.
    /// With a cache, this work is not counted, because some of the inputs need not be computed.
    bytes: AtomicU64,
    expected: AtomicU64,
    has_cache: bool,
    /// Tokens of the queued inputs.
    tokens: AtomicU64,
    /// Error of the first input that failed.
    failed: OnceLock<ServeError>,
}

impl Joint {
    /// Creates a request without queued inputs. `mean` is the estimated mean number of tokens per input.
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

    /// Records that an input has failed. Returns whether it is the first one.
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
    fn over(&self, now: Micros, backlog: &Backlog, costs: &CostTable) -> Option<Duration> {
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

impl State {
    /// Removes the queued inputs of requests that have failed or can no longer meet their deadlines. Returns each input with its error.
    pub(super) fn drop_lost(&mut self, now: Micros, costs: &CostTable) -> Vec<(Entry, ServeError)> {
        // A request whose inputs have all been answered is referenced only from here.
        self.joints.retain(|joint| Arc::strong_count(joint) > 1);
        let mut lost = Vec::new();
        let backlog = &self.backlog;
        self.joints.retain(|joint| {
            if let Some(retry_after) = joint.over(now, backlog, costs) {
                joint.fail(&ServeError::Hopeless { retry_after });
            }
            match joint.failed() {
                Some(error) => lost.push((Arc::clone(joint), error.clone())),
                None => return true,
            }
            false
        });
        let mut removed = Vec::new();
        for (joint, error) in lost {
            let is_own = |entry: &Entry| entry.joint().is_some_and(|own| Arc::ptr_eq(own, &joint));
            let own = self.entries.iter().filter(|(_, entry)| is_own(entry));
            let mut ids: Vec<u64> = own.map(|(&id, _)| id).collect();
            ids.sort_unstable();
            for id in ids {
                if !self.scheduling.cancel(id) {
                    continue;
                }
                self.record(now, || Happened::Left(id));
                let entry = self.remove(id);
                removed.extend(entry.map(|entry| (entry, error.clone())));
            }
        }
        removed
    }
}

impl Service {
    /// Estimates the work of each input.
    pub(super) fn loads<'t>(
        &self,
        backlog: &Backlog,
        texts: impl Iterator<Item = &'t Text>,
    ) -> Vec<Load> {
        let max = self.max_text_tokens().unwrap_or(usize::MAX) as u64;
        let load = |text: &Text| {
            let bytes = text.bytes();
            let tokens = match text {
                Text::Ids(ids) => ids.len() as u64,
                Text::Encoded(encoded) => encoded.ids.len() as u64,
                Text::One(_) | Text::Prompted(..) | Text::Pair(..) => backlog.expected(bytes),
            };
            Load {
                bytes: bytes as u64,
                tokens: tokens.min(max),
            }
        };
        texts.map(load).collect()
    }

    /// Decides whether to admit inputs with the estimated work `loads`. Returns the request of a joint list.
    ///
    /// # Errors
    /// Returns an error if the queued work takes too long, or if a joint list would miss its deadline.
    pub(super) fn admit(
        &self,
        state: &mut State,
        loads: &[Load],
        submit: Submit,
    ) -> Result<Option<Arc<Joint>>, ServeError> {
        let shared = &self.shared;
        let Submit { tenant, class, .. } = submit;
        let (backlog, costs) = (&state.backlog, &shared.costs);
        if let Err(ahead) = backlog.admit(tenant, class, shared.queue, costs) {
            Metrics::count(&shared.metrics.overloaded, loads.len() as u64);
            let retry_after = ahead.saturating_sub(shared.queue / 2);
            return Err(ServeError::Overloaded { retry_after });
        }
        if !submit.is_joint || loads.len() < 2 {
            return Ok(None);
        }
        let load = Load {
            bytes: loads.iter().map(|load| load.bytes).sum(),
            tokens: loads.iter().map(|load| load.tokens).sum(),
        };
        let mean = load.tokens / loads.len() as u64;
        // Cached answers, and answers that other requests also wait for, are not computed. Their number is not known yet, so with a cache, the
        // deadline is checked when the inputs are queued.
        let check = submit.within.filter(|_| shared.kept.is_none());
        let miss = check.map(|within| backlog.meets((tenant, class), load, mean, within, costs));
        if let Some(Err(miss)) = miss {
            Metrics::count(&shared.metrics.hopeless, loads.len() as u64);
            return Err(match miss {
                Miss::Alone { takes } => ServeError::ShortDeadline {
                    takes,
                    within: submit.within.unwrap_or_default(),
                },
                Miss::Queued { over } => ServeError::Hopeless { retry_after: over },
            });
        }
        let within = submit.within.map(|within| backlog.for_batches(within));
        let deadline = within.map(|within| shared.now().plus(Micros(within.as_micros() as u64)));
        let joint = Arc::new(Joint::new(deadline, mean, shared.kept.is_some()));
        state.joints.push(Arc::clone(&joint));
        Ok(Some(joint))
    }
}
