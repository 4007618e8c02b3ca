//! Requests of a service: who asks, who joins them, and the answer to come.

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
        cache::{Flights, Key},
    },
    simulate::Happened,
};

/// An answer to come. Dropping it cancels the request: if it waits, it never runs.
pub struct Reply {
    pub(super) answer: oneshot::Receiver<Result<Answer, ServeError>>,
    pub(super) ticket: Arc<Ticket>,
    /// By which it is shared with equal requests.
    pub(super) key: Option<Key>,
    pub(super) shared: Arc<Shared>,
    /// Whether there is nothing left to cancel.
    pub(super) is_answered: bool,
    /// The request that it is of, until its last answer; `None` before it was let in.
    pub(super) open: Option<Arc<Open>>,
}

/// A request that was let in, which counts as its tenant's until this is dropped.
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

/// Where a request is, for those who may cancel it, and how urgent.
pub(super) struct Ticket {
    /// The desk's id plus one; 0 before it waits there.
    pub(super) id: AtomicU64,
    pub(super) is_cancelled: AtomicBool,
    class: u8,
    /// Later than all where there is no end to it.
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

    /// Whether it is answered no later than another one would be.
    pub(super) fn goes_before(&self, other: &Self) -> bool {
        self.class >= other.class && self.until <= other.until
    }
}

/// One who waits for an answer.
pub(super) struct Asked {
    pub(super) answer: oneshot::Sender<Result<Answer, ServeError>>,
    /// The input's place in its request.
    pub(super) index: usize,
    pub(super) submit: Submit,
    pub(super) sent: Instant,
    /// The memory that its request is charged for.
    pub(super) share: Arc<Share>,
}

impl Asked {
    /// Answers with a copy.
    pub(super) fn give(self, answer: &Answer) {
        let charged = self.share.add(answer.memory(self.submit.wanted));
        let _ = self.answer.send(charged.map(|()| answer.clone()));
    }

    /// Answers. A client that has gone needs no answer.
    pub(super) fn give_own(self, answer: Answer) {
        let charged = self.share.add(answer.memory(self.submit.wanted));
        let _ = self.answer.send(charged.map(|()| answer));
    }

    /// Later than all where there is no end to it.
    pub(super) fn until(&self) -> (bool, Option<Instant>) {
        self.submit.until(self.sent)
    }
}

/// Requests that are being computed, by their tickets, with those that joined them.
pub(super) type Joined = Flights<Ticket, Asked>;

/// A request on its way: who asked it, and under which key others may join it.
pub(super) struct Lead {
    /// `None` once it is answered.
    pub(super) asked: Option<Asked>,
    pub(super) ticket: Arc<Ticket>,
    pub(super) boarded: Option<(Key, Arc<Joined>)>,
}

impl Lead {
    pub(super) fn submit(&self) -> Submit {
        self.asked.as_ref().map(|a| a.submit).unwrap_or_default()
    }

    pub(super) fn index(&self) -> usize {
        self.asked.as_ref().map_or(0, |asked| asked.index)
    }

    /// Takes those that joined it; nobody else does after that.
    pub(super) fn land(&self) -> Vec<Asked> {
        match &self.boarded {
            Some((key, joined)) => joined.land(key, &self.ticket),
            None => Vec::new(),
        }
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        // What a panic loses is lost for all, and the next one is computed.
        if self.asked.is_some() {
            self.land();
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
    /// Waits on a thread, where there is no runtime.
    ///
    /// # Errors
    /// As the future's.
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
        // The others who wait for the same go on.
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
        // One that runs is computed to its end, without a reader.
        if was_waiting || self.answer.try_recv().is_err() {
            Metrics::count(&self.shared.metrics.cancelled, 1);
        }
    }
}
