//! Inputs that are being computed, and the clients that wait for them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Instant,
};

use tokio::sync::oneshot;

use super::{Load, joint::Joint};
use crate::serve::{
    Answer, ServeError, Share, Submit,
    cache::{Coalescer, Key},
};

/// Identifies a request in the queue, so that it can be canceled, and holds its urgency.
pub(super) struct Ticket {
    /// The id in the scheduler state plus one; 0 before the request is queued.
    pub(super) id: AtomicU64,
    pub(super) is_cancelled: AtomicBool,
    class: u8,
    /// Deadline. Requests without one are ordered last.
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

    /// Returns whether this request has the class of `other` or a higher one, and no later deadline, so that it is answered no later.
    pub(super) fn goes_before(&self, other: &Self) -> bool {
        self.class >= other.class && self.until <= other.until
    }
}

/// A client that is waiting for an answer.
pub(super) struct Waiter {
    pub(super) answer: oneshot::Sender<Result<Answer, ServeError>>,
    /// Index of the input in its request.
    pub(super) index: usize,
    pub(super) submit: Submit,
    pub(super) sent: Instant,
    /// Memory share that is charged for the request.
    pub(super) share: Arc<Share>,
    /// Estimated work of the input.
    pub(super) load: Load,
    /// The joint request of the input, if it has one.
    pub(super) joint: Option<Arc<Joint>>,
}

impl Waiter {
    /// Sends a copy of an answer.
    pub(super) fn give(self, answer: &Answer) {
        let answer = self.charged(answer).map(|()| answer.clone());
        let _ = self.answer.send(answer);
    }

    /// Sends an answer. The client may already have left.
    pub(super) fn give_own(self, answer: Answer) {
        let answer = self.charged(&answer).map(|()| answer);
        let _ = self.answer.send(answer);
    }

    /// Charges the request for an answer.
    fn charged(&self, answer: &Answer) -> Result<(), ServeError> {
        let charged = self.share.add(answer.memory(self.submit.wanted));
        if let (Err(error), Some(joint)) = (&charged, &self.joint) {
            joint.fail(error);
        }
        charged
    }

    /// Returns the deadline. Requests without one are ordered last.
    pub(super) fn until(&self) -> (bool, Option<Instant>) {
        self.submit.until(self.sent)
    }
}

/// Inputs that are being computed, each with the ticket of its leader and the clients that have joined it.
pub(super) type Joined = Coalescer<Ticket, Waiter>;

/// An input that is being computed, with the client that waits for it and the key under which
/// others may join.
pub(super) struct Leader {
    /// `None` after the client has been answered.
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

    /// Returns the joint request of the input, if it has one.
    pub(super) fn joint(&self) -> Option<&Arc<Joint>> {
        self.waiter.as_ref()?.joint.as_ref()
    }

    /// Returns the error of the joint request of the input, if it has failed.
    pub(super) fn failed(&self) -> Option<ServeError> {
        self.joint()?.failed().cloned()
    }

    /// Returns a leader for the follower with the latest deadline; `None` if there are no followers. The computation then ends.
    pub(super) fn next(&self) -> Option<Self> {
        let (key, joined) = self.coalesced.as_ref()?;
        let next = joined.promote(key, &self.ticket, Waiter::until)?;
        Some(Self {
            waiter: Some(next),
            ticket: Arc::clone(&self.ticket),
            coalesced: Some((*key, Arc::clone(joined))),
        })
    }

    /// Takes the followers. Later calls return an empty list.
    pub(super) fn complete(&self) -> Vec<Waiter> {
        match &self.coalesced {
            Some((key, joined)) => joined.complete(key, &self.ticket),
            None => Vec::new(),
        }
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        // After a panic, the followers fail, too, and the next equal input is computed again.
        if self.waiter.is_some() {
            self.complete();
        }
    }
}
