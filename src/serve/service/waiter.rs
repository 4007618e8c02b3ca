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

/// Handle of an input in the queue, with which the input can be canceled. Also has the input's class and deadline.
pub(super) struct Ticket {
    /// The id in the scheduler state plus one; 0 before the input is queued.
    pub(super) id: AtomicU64,
    pub(super) is_cancelled: AtomicBool,
    class: u8,
    /// Deadline, in the form that [`Submit::until`] returns.
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

    /// Returns whether this input has at least the class of `other` and no later deadline. If so, this input is answered no later than
    /// `other`.
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
    /// Memory that is charged to the request. It includes the answer.
    pub(super) share: Arc<Share>,
    /// Estimated work of the input.
    pub(super) load: Load,
    /// The [`Joint`] request that the input belongs to, if any.
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

    /// Returns the deadline, as described for [`Submit::until`].
    pub(super) fn until(&self) -> (bool, Option<Instant>) {
        self.submit.until(self.sent)
    }
}

/// Inputs that are being computed, each with the ticket of its leader (the first request for the input) and the waiters of its followers.
pub(super) type Joined = Coalescer<Ticket, Waiter>;

/// An input that is being computed, with the client that waits for it. `coalesced` has the key under which equal inputs may join as
/// followers.
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

    /// Returns the [`Joint`] request that the input belongs to, if any.
    pub(super) fn joint(&self) -> Option<&Arc<Joint>> {
        self.waiter.as_ref()?.joint.as_ref()
    }

    /// Returns the error of the input's [`Joint`] request, if that request has failed.
    pub(super) fn failed(&self) -> Option<ServeError> {
        self.joint()?.failed().cloned()
    }

    /// Makes the follower with the latest deadline the new leader, and returns it. If there are no followers, ends the computation and
    /// returns `None`.
    pub(super) fn next(&self) -> Option<Self> {
        let (key, joined) = self.coalesced.as_ref()?;
        let next = joined.promote(key, &self.ticket, Waiter::until)?;
        Some(Self {
            waiter: Some(next),
            ticket: Arc::clone(&self.ticket),
            coalesced: Some((*key, Arc::clone(joined))),
        })
    }

    /// Ends the computation and returns its followers (the waiters of equal inputs). Later calls return an empty list.
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
