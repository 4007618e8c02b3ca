//! State that the threads of a service share: the queued inputs, and functions to answer them.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use super::{
    Load,
    joint::Joint,
    waiter::{Joined, Leader, Waiter},
};
use crate::{
    runtime::batch::Limits,
    schedule::{CostTable, Micros, Scheduler, SchedulerState, Waiting},
    serve::{
        Answer, Cache, Metrics, Recorder, ServeError, Submit, Text, backlog::Backlog, cache::Key,
        tokenize::encode,
    },
    simulate::{Event, Happened},
    text::{Encoded, TextEncoder},
};

/// The response cache of a service, with the digest of the model and the model's computations in progress.
pub(super) struct Kept {
    pub(super) cache: Arc<Cache>,
    pub(super) model: Key,
    pub(super) joined: Arc<Joined>,
}

/// A queued input.
pub(super) struct Entry {
    pub(super) encoded: Encoded,
    pub(super) lead: Leader,
    pub(super) sent: Instant,
    /// Tenant and class of the queued work that includes the input's tokens.
    pub(super) tenant: u32,
    pub(super) class: u8,
}

impl Entry {
    /// Returns the [`Joint`] request that the input belongs to, if any.
    pub(super) fn joint(&self) -> Option<&Arc<Joint>> {
        self.lead.joint()
    }
}

pub(super) struct State {
    pub(super) scheduling: SchedulerState,
    pub(super) scheduler: Box<dyn Scheduler>,
    pub(super) entries: HashMap<u64, Entry>,
    /// [`Joint`] requests that may have inputs in the queue.
    pub(super) joints: Vec<Arc<Joint>>,
    pub(super) backlog: Backlog,
    /// Reason why new requests are refused; `None` while the service accepts requests.
    pub(super) is_over: Option<&'static str>,
    pub(super) trace: Option<Recorder>,
}

impl State {
    /// Adds an input, and counts its tokens as queued work.
    pub(super) fn insert(&mut self, id: u64, entry: Entry) {
        let (class, tokens) = (entry.class, entry.encoded.ids.len() as u64);
        let tenants = &mut self.backlog.tenants;
        tenants.change(entry.tenant, |work| work.tokens.add(class, tokens));
        if let Some(joint) = entry.joint() {
            joint.add_tokens(tokens);
        }
        self.entries.insert(id, entry);
    }

    /// Removes an input, and its tokens from the queued work.
    pub(super) fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        let (class, tokens) = (entry.class, entry.encoded.ids.len() as u64);
        let tenants = &mut self.backlog.tenants;
        tenants.change(entry.tenant, |work| work.tokens.take(class, tokens));
        if let Some(joint) = entry.joint() {
            joint.take_tokens(tokens);
        }
        Some(entry)
    }

    /// Records an event. Events must be recorded in the order in which the scheduler state processed them.
    pub(super) fn record(&mut self, at: Micros, happened: impl FnOnce() -> Happened) {
        if let Some(trace) = &mut self.trace {
            trace.record(Event::Happened(at, happened()));
        }
    }
}

pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
    pub(super) costs: CostTable,
    pub(super) queue: Duration,
    pub(super) began: Instant,
    pub(super) limits: Limits,
    pub(super) metrics: Metrics,
    pub(super) encoder: TextEncoder,
    pub(super) kept: Option<Kept>,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A poisoned lock is usable: every change is a single call, so a panic cannot leave the state inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn now(&self) -> Micros {
        Micros(self.began.elapsed().as_micros() as u64)
    }

    /// Enqueues a tokenized input. `tokenized` has the number of bytes that were tokenized and the time that tokenizing took, to update the
    /// tokenizers' pace. It is `None` if the input was tokenized earlier. If the request of the input has failed, enqueues the input for
    /// one of the followers of `lead` (requests with an equal input).
    pub(super) fn enqueue(
        &self,
        encoded: Encoded,
        lead: Leader,
        tokenized: Option<(usize, Duration)>,
    ) {
        let Some(lead) = self.not_failed(lead) else {
            return;
        };
        let Some(waiter) = &lead.waiter else {
            return;
        };
        let (submit, sent) = (waiter.submit, waiter.sent);
        let mut state = self.lock();
        if let Some((n_bytes, took)) = tokenized {
            state.backlog.tokenized(n_bytes, encoded.ids.len(), took);
        }
        if lead.ticket.is_cancelled.load(Ordering::Acquire) {
            Metrics::count(&self.metrics.cancelled, 1);
            return;
        }
        if let Some(why) = state.is_over {
            drop(state);
            return self.answer(lead, Err(ServeError::NotReady { why }), None);
        }
        let since = sent.duration_since(self.began);
        let at = Micros(since.as_micros() as u64);
        let within = submit.within.map(|w| state.backlog.for_batches(w));
        let waiting = Waiting {
            deadline: within.map(|w| at.plus(Micros(w.as_micros() as u64))),
            class: submit.class,
            tenant: submit.tenant,
            // The queue is ordered by this time, so it must be the time of enqueueing. Requests may finish tokenizing in a different order
            // than they were sent.
            ..Waiting::new(encoded.ids.len() as u32, self.now())
        };
        if let Some(trace) = &mut state.trace {
            trace.record(Event::Arrived(waiting));
        }
        let id = state.scheduling.arrive(waiting);
        lead.ticket.id.store(id + 1, Ordering::Release);
        state.insert(
            id,
            Entry {
                encoded,
                lead,
                sent,
                tenant: submit.tenant,
                class: submit.class,
            },
        );
        self.count_waiting(&state);
        // Wake the launch thread only if a lane is free. Otherwise the scheduler cannot start a batch, and the next batch that finishes
        // wakes the thread.
        let is_asked = state.scheduling.has_place();
        drop(state);
        if is_asked {
            self.changed.notify_one();
        }
    }

    /// Answers an input and its followers, and caches the answer. If the input was refused because of its deadline, its followers do not
    /// get the error, and the follower with the latest deadline is queued instead of the input. The caller must not hold the lock of the
    /// state.
    pub(super) fn answer(
        &self,
        mut lead: Leader,
        result: Result<Answer, ServeError>,
        encoded: Option<Encoded>,
    ) {
        let Some(waiter) = lead.waiter.take() else {
            return;
        };
        if let (Some(kept), Some((key, _))) = (&self.kept, &lead.coalesced) {
            match &result {
                Ok(answer) => {
                    // Cache the answer before the computation ends, so that an equal request always finds the answer or the computation.
                    kept.cache.keep(*key, answer);
                    for waiter in lead.complete() {
                        waiter.give(answer);
                    }
                }
                Err(ServeError::Deadline | ServeError::Hopeless { .. }) if encoded.is_some() => {
                    if let (Some(next), Some(encoded)) = (lead.next(), encoded) {
                        self.enqueue(encoded, next, None);
                    }
                }
                Err(error) => {
                    for waiter in lead.complete() {
                        let error = error.clone().at(waiter.index);
                        self.fail(waiter, error);
                    }
                }
            }
        }
        match result {
            Ok(answer) => waiter.give_own(answer),
            Err(error) => self.fail(waiter, error),
        }
    }

    /// Answers an input with an error. If the input belongs to a [`Joint`] request, the other inputs of the request leave the queue.
    fn fail(&self, waiter: Waiter, error: ServeError) {
        let is_first = waiter
            .joint
            .as_ref()
            .is_some_and(|joint| joint.fail(&error));
        // The client may have left.
        let _ = waiter.answer.send(Err(error));
        if is_first {
            self.changed.notify_one();
        }
    }

    /// Answers an input of a failed [`Joint`] request with an error. The input's followers (requests with an equal input) do not fail.
    /// Returns the follower that takes the input's place, if any.
    pub(super) fn give_up(&self, mut lead: Leader, error: ServeError) -> Option<Leader> {
        let waiter = lead.waiter.take()?;
        let counter = match &error {
            ServeError::Hopeless { .. } => &self.metrics.hopeless,
            _ => &self.metrics.cancelled,
        };
        Metrics::count(counter, 1);
        let next = lead.next();
        self.fail(waiter, error);
        next
    }

    /// Returns `lead` if its request has not failed. Otherwise, answers it with the error, and returns the first follower whose request has
    /// not failed, if any.
    fn not_failed(&self, mut lead: Leader) -> Option<Leader> {
        while let Some(error) = lead.failed() {
            lead = self.give_up(lead, error)?;
        }
        Some(lead)
    }

    /// Answers an input and its followers with a cached answer.
    pub(super) fn answer_kept(&self, mut lead: Leader, answer: &Answer) {
        for waiter in lead.complete().into_iter().chain(lead.waiter.take()) {
            waiter.give(answer);
        }
    }

    /// Tokenizes and enqueues an input.
    pub(super) fn tokenize(&self, text: &Text, lead: Leader) {
        let Some(lead) = self.not_failed(lead) else {
            return;
        };
        if lead.ticket.is_cancelled.load(Ordering::Acquire) {
            Metrics::count(&self.metrics.cancelled, 1);
            return;
        }
        let began = Instant::now();
        let submit = lead.submit();
        let encoded = |index| encode(&self.encoder, text, index, submit, self.limits.longest);
        let found = encoded(lead.index());
        let took = began.elapsed();
        self.metrics.tokenize.add(took.as_secs_f64());
        match found {
            Ok(found) => self.enqueue(found, lead, Some((text.bytes(), took))),
            Err(error) => {
                // The error of each follower contains the index of its own input.
                for waiter in lead.complete() {
                    let own = encoded(waiter.index).err();
                    self.fail(waiter, own.unwrap_or_else(|| error.clone()));
                }
                self.answer(lead, Err(error), None);
            }
        }
    }

    /// Records that an input with the estimated work `load` no longer waits for a tokenizer.
    pub(super) fn is_tokenized(&self, submit: Submit, load: Load, joint: Option<&Joint>) {
        let mut state = self.lock();
        let tenants = &mut state.backlog.tenants;
        tenants.change(submit.tenant, |work| {
            work.take_untokenized(submit.class, load);
        });
        if let Some(joint) = joint {
            joint.take_untokenized(load);
        }
    }

    pub(super) fn count_waiting(&self, state: &State) {
        Metrics::set(&self.metrics.queue_tokens, state.scheduling.tokens());
        let n = state.scheduling.waiting().len() as u64;
        Metrics::set(&self.metrics.queue_requests, n);
        for (of, lane) in self.metrics.lanes.iter().zip(state.scheduling.lanes()) {
            Metrics::set(&of.batch_bytes, lane.bytes);
        }
    }
}
