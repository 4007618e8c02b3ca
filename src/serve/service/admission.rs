//! Admission of requests, and removal of queued requests that have failed or can no longer meet their deadlines.

use std::sync::Arc;

use super::{
    Load, Miss, Service, Submit,
    joint::Joint,
    queue::{Entry, State},
};
use crate::{
    schedule::{CostTable, Micros},
    serve::{Metrics, ServeError, Text, backlog::Backlog},
    simulate::Happened,
};

impl State {
    /// Removes the queued inputs of requests that have failed or can no longer meet their deadlines. Returns each input with its error.
    pub(super) fn drop_lost(&mut self, now: Micros, costs: &CostTable) -> Vec<(Entry, ServeError)> {
        // If all inputs of a request have been answered, `joints` has the only reference to the request.
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
    /// Estimates the bytes to tokenize and the tokens to compute of each input.
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

    /// Decides whether to admit the inputs of a request. `loads` has the estimated work of each input. Returns a [`Joint`] if the inputs
    /// fail together ([`Submit::is_joint`]).
    ///
    /// # Errors
    /// Returns an error if the queued work takes too long, or if inputs that fail together would miss their deadline.
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
        // With a cache, check the deadline later, when the inputs are queued. Inputs with cached answers, and inputs that are already being
        // computed for other requests, take no time, and their number is not known yet.
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
