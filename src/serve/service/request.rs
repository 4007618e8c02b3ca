//! Requests of a service and their replies.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll},
};

use tokio::sync::oneshot;

use super::{
    queue::{Shared, State},
    waiter::Ticket,
};
use crate::{
    serve::{Answer, Metrics, ServeError, cache::Key},
    simulate::Happened,
};

/// Reply to an input. Dropping the reply cancels the input, unless other clients wait for the same computation. A canceled input that is
/// still queued never runs.
pub struct Reply {
    pub(super) answer: oneshot::Receiver<Result<Answer, ServeError>>,
    pub(super) ticket: Arc<Ticket>,
    /// Cache key, under which equal inputs share one computation.
    pub(super) key: Option<Key>,
    pub(super) shared: Arc<Shared>,
    /// Whether the reply was received.
    pub(super) is_answered: bool,
    /// Guard that counts the input as a text of its tenant until the reply is dropped. `None` before admission, and for an answer from the
    /// cache's memory tier.
    pub(super) open: Option<Open>,
}

/// Guard of an admitted input. The input counts as a text of its tenant until the guard is dropped.
pub(super) struct Open {
    shared: Arc<Shared>,
    tenant: u32,
}

impl Open {
    pub(super) fn new(shared: &Arc<Shared>, state: &mut State, tenant: u32) -> Self {
        let tenants = &mut state.backlog.tenants;
        tenants.change(tenant, |work| work.texts += 1);
        Self {
            shared: Arc::clone(shared),
            tenant,
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let tenants = &mut self.shared.lock().backlog.tenants;
        tenants.change(self.tenant, |work| work.texts -= 1);
    }
}

impl Future for Reply {
    type Output = Result<Answer, ServeError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.answer).poll(context).map(|answer| {
            self.is_answered = true;
            answer.unwrap_or_else(|_| {
                Err(ServeError::Internal(
                    "the request was lost by a panic".to_owned(),
                ))
            })
        })
    }
}

impl Reply {
    /// Blocks the thread until the reply arrives, for callers without an async runtime.
    ///
    /// # Errors
    /// Returns the same errors as awaiting the reply.
    pub fn wait(mut self) -> Result<Answer, ServeError> {
        let (_, never) = oneshot::channel();
        let answer = std::mem::replace(&mut self.answer, never);
        let answer = answer.blocking_recv();
        self.is_answered = true;
        answer.unwrap_or_else(|_| {
            Err(ServeError::Internal(
                "the request was lost by a panic".to_owned(),
            ))
        })
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        // Other clients may still be waiting for the same computation.
        let is_last = match (&self.shared.kept, &self.key) {
            (Some(kept), Some(key)) => kept.joined.leave(key, &self.ticket),
            _ => true,
        };
        if self.is_answered || !is_last {
            return;
        }
        self.ticket.is_cancelled.store(true, Ordering::Release);
        let Some(id) = self.ticket.id.load(Ordering::Acquire).checked_sub(1) else {
            return;
        };
        let mut state = self.shared.lock();
        let was_waiting = state.scheduling.cancel(id);
        if was_waiting {
            drop(state.remove(id));
            let now = self.shared.now();
            state.record(now, || Happened::Left(id));
            self.shared.count_waiting(&state);
        }
        // A running input is computed to the end, but nobody reads the result.
        if was_waiting || self.answer.try_recv().is_err() {
            Metrics::count(&self.shared.metrics.cancelled, 1);
        }
    }
}
