//! Requests of a service: waiting clients, shared computations and replies.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Instant,
};

use tokio::sync::oneshot;

use super::{
    Answer, Submit,
    queue::{Shared, State},
};
use crate::{
    serve::{
        Metrics, ServeError, Share,
        cache::{Coalescer, Key},
    },
    simulate::Happened,
};

/// Reply to an input. Dropping it cancels the input; if it is still queued, it never runs.
pub struct Reply {
    pub(super) answer: oneshot::Receiver<Result<Answer, ServeError>>,
    pub(super) ticket: Arc<Ticket>,
    /// Key under which the computation is shared with equal inputs.
    pub(super) key: Option<Key>,
    pub(super) shared: Arc<Shared>,
    /// Whether the reply was received.
    pub(super) is_answered: bool,
    /// Keeps the request counted until its last answer; `None` before admission.
    pub(super) open: Option<Arc<Open>>,
}

/// An admitted request. It counts towards its tenant until this is dropped.
pub(super) struct Open {
    shared: Arc<Shared>,
    tenant: u32,
}

impl Open {
    pub(super) fn new(shared: &Arc<Shared>, state: &mut State, tenant: u32) -> Arc<Self> {
        let tenants = &mut state.backlog.tenants;
        tenants.change(tenant, |work| work.requests += 1);
        Arc::new(Self {
            shared: Arc::clone(shared),
            tenant,
        })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let tenants = &mut self.shared.lock().backlog.tenants;
        tenants.change(self.tenant, |work| work.requests -= 1);
    }
}

/// Position of a request in the queue, for cancelling it, and its urgency.
pub(super) struct Ticket {
    /// The desk's id plus one; 0 before it is queued.
    pub(super) id: AtomicU64,
    pub(super) is_cancelled: AtomicBool,
    class: u8,
    /// Deadline; requests without one compare as the latest.
    until: (bool, Option<Instant>),
}

impl Ticket {
    pub(super) fn of(submit: &Submit, sent: Instant) -> Self {
        Self {
            id: AtomicU64::new(0),
            is_cancelled: AtomicBool::new(false),
            class: submit.class,
            until: submit.until(sent),
        }
    }

    /// Returns whether it is answered no later than `other` would be.
    pub(super) fn goes_before(&self, other: &Self) -> bool {
        self.class >= other.class && self.until <= other.until
    }
}

/// A client that waits for an answer.
pub(super) struct Waiter {
    pub(super) answer: oneshot::Sender<Result<Answer, ServeError>>,
    /// Index of the input in its request.
    pub(super) index: usize,
    pub(super) submit: Submit,
    pub(super) sent: Instant,
    /// Memory that the request is charged for.
    pub(super) share: Arc<Share>,
}

impl Waiter {
    /// Sends a copy of an answer.
    pub(super) fn give(self, answer: &Answer) {
        let charged = self.share.add(answer.memory(self.submit.wanted));
        let _ = self.answer.send(charged.map(|()| answer.clone()));
    }

    /// Sends an answer. The client may have left.
    pub(super) fn give_own(self, answer: Answer) {
        let charged = self.share.add(answer.memory(self.submit.wanted));
        let _ = self.answer.send(charged.map(|()| answer));
    }

    /// Deadline; requests without one compare as the latest.
    pub(super) fn until(&self) -> (bool, Option<Instant>) {
        self.submit.until(self.sent)
    }
}

/// Inputs in computation by ticket, with the clients that have joined them.
pub(super) type Joined = Coalescer<Ticket, Waiter>;

/// An input in computation: the client that waits for it, and the key under which others may join.
pub(super) struct Leader {
    /// `None` after it is answered.
    pub(super) waiter: Option<Waiter>,
    pub(super) ticket: Arc<Ticket>,
    pub(super) coalesced: Option<(Key, Arc<Joined>)>,
}

impl Leader {
    pub(super) fn submit(&self) -> Submit {
        self.waiter.as_ref().map(|a| a.submit).unwrap_or_default()
    }

    pub(super) fn index(&self) -> usize {
        self.waiter.as_ref().map_or(0, |waiter| waiter.index)
    }

    /// Takes the followers. Later calls return none.
    pub(super) fn complete(&self) -> Vec<Waiter> {
        match &self.coalesced {
            Some((key, joined)) => joined.complete(key, &self.ticket),
            None => Vec::new(),
        }
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        // After a panic the followers fail, too, and the next equal input is computed again.
        if self.waiter.is_some() {
            self.complete();
        }
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
    /// Blocks the thread until the reply arrives, for callers without a runtime.
    ///
    /// # Errors
    /// Same as the future.
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
        // Other clients may still wait for the same computation.
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
        let was_waiting = state.desk.cancel(id);
        if was_waiting {
            drop(state.remove(id));
            let now = self.shared.now();
            state.record(now, || Happened::Left(id));
            self.shared.count_waiting(&state);
        }
        // A running input is computed to the end; nobody reads the result.
        if was_waiting || self.answer.try_recv().is_err() {
            Metrics::count(&self.shared.metrics.cancelled, 1);
        }
    }
}
