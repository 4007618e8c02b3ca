//! Thread of a model that generates text. It runs the steps of the generator. Texts start and end between steps.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{Receiver, RecvTimeoutError, TryRecvError},
    },
    time::{Duration, Instant},
};

use super::{
    EarlyEnd, Job, Shared,
    detokenizer::{DetokenizerMsg, DetokenizerPool},
    queue::TextQueue,
};
use crate::{
    EngineError,
    generate::{AdmitError, Event, Generator, Ticket},
    schedule::{Micros, Scheduler},
    serve::{Metrics, ModelHandle, ServeError, backlog::Pace, service::LOST},
};

/// Weight of a token in [`GenerationLoop::written`], the ratio of generated to requested tokens. With this weight, the ratio covers about
/// the last twenty thousand generated tokens.
const TOKEN: f64 = 1e-5;

/// A running text.
struct Sequence {
    until: Option<Instant>,
    /// Number of requested tokens, and number of generated tokens.
    tokens: [u64; 2],
    /// Index of the text's detokenizer thread.
    thread: usize,
    ending: Arc<EarlyEnd>,
}

/// State of the thread that runs the generator.
pub(super) struct GenerationLoop {
    generator: Generator,
    texts: DetokenizerPool,
    shared: Arc<Shared>,
    rows: HashMap<Ticket, Sequence>,
    queue: TextQueue,
    /// If there was too little room for the next text: the bytes of the KV cache that were in use at that time. The text is not tried again
    /// until that number changes.
    full_at: Option<u64>,
    seat: Option<ModelHandle>,
    /// Duration of the last step.
    step: Micros,
    /// Seconds per token, in steps during which texts were waiting.
    tokens: Pace,
    /// Ratio of generated to requested tokens. Many texts end before their max number of tokens.
    written: Pace,
}

impl GenerationLoop {
    pub(super) fn new(
        generator: Generator,
        texts: DetokenizerPool,
        shared: Arc<Shared>,
        scheduler: Box<dyn Scheduler>,
        seat: Option<ModelHandle>,
    ) -> Self {
        Self {
            generator,
            texts,
            shared,
            rows: HashMap::new(),
            queue: TextQueue::new(scheduler),
            full_at: None,
            seat,
            step: Micros(1_000),
            tokens: Pace::of(1e-3),
            written: Pace::of(1.0),
        }
    }

    /// Runs steps of the generator until the service has been dropped and all texts are finished.
    pub(super) fn run(mut self, come: &Receiver<Job>) {
        loop {
            if !self.take_in(come) {
                return;
            }
            self.give_up();
            self.texts.send();
            if !self.generator.is_busy() {
                continue;
            }
            let turn = self.seat.as_ref().map(|seat| seat.take(self.step));
            let began = Instant::now();
            let polled = self.generator.poll();
            let took = began.elapsed();
            self.step = Micros(took.as_micros() as u64);
            drop(turn);
            match polled {
                Ok(events) => self.note(events, took),
                Err(error) => self.fail(error.into()),
            }
            self.texts.send();
        }
    }

    /// Receives new requests, and starts waiting texts while the KV cache has room. Returns `false` when the service has been dropped and
    /// all texts are finished.
    fn take_in(&mut self, come: &Receiver<Job>) -> bool {
        loop {
            let is_idle =
                self.rows.is_empty() && !self.generator.is_busy() && self.queue.is_empty();
            let job = match is_idle {
                true => match come.recv_timeout(Duration::from_secs(3600)) {
                    Ok(job) => job,
                    Err(RecvTimeoutError::Timeout) => continue,
                    Err(RecvTimeoutError::Disconnected) => return false,
                },
                false => match come.try_recv() {
                    Ok(job) => job,
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
                },
            };
            self.queue.add(job);
            self.full_at = None;
        }
        let now = Instant::now();
        let gone = self.queue.remove_if(|job| job.ending.is_abandoned());
        let late = self.queue.remove_if(|job| job.is_late(now));
        if !(gone.is_empty() && late.is_empty()) {
            // The text for which there was too little room may have been removed.
            self.full_at = None;
        }
        for job in gone {
            Metrics::count(&self.shared.metrics.cancelled, 1);
            self.shared.remove_waiting(&job);
        }
        for job in late {
            Metrics::count(&self.shared.metrics.expired, 1);
            self.refuse(job, ServeError::Deadline);
        }
        while self.full_at != Some(self.generator.cache_bytes().0)
            && let Some(next) = self.queue.next(self.rows.len())
            && let Some(job) = self.queue.get(next)
        {
            match self.generator.has_room(&job.request) {
                Err(AdmitError::Full { .. }) => {
                    self.full_at = Some(self.generator.cache_bytes().0);
                }
                Err(error) => {
                    if let Some(job) = self.queue.remove(next) {
                        self.refuse(job, error.into());
                    }
                }
                Ok(()) => {
                    if let Some(job) = self.queue.start(next) {
                        self.admit(job);
                    }
                }
            }
        }
        true
    }

    fn admit(&mut self, job: Job) {
        match self.generator.admit(job.request.clone()) {
            Ok(ticket) => {
                self.shared.remove_waiting(&job);
                let waited = job.arrived.elapsed();
                self.shared.metrics.queue.add(waited.as_secs_f64());
                let row = Sequence {
                    until: job.until,
                    tokens: [job.tokens(), 0],
                    ending: Arc::clone(&job.ending),
                    thread: self.texts.begin(ticket, job),
                };
                self.rows.insert(ticket, row);
            }
            Err(error) => self.refuse(job, error.into()),
        }
    }

    fn refuse(&self, job: Job, error: ServeError) {
        self.shared.remove_waiting(&job);
        let _ = job.pieces.send(Err(error));
    }

    /// Ends the texts that the detokenizer has completed, and cancels texts whose clients have left or whose deadlines have passed.
    fn give_up(&mut self) {
        let now = Instant::now();
        let metrics = Arc::clone(&self.shared.metrics);
        let gone = self.rows.iter().filter_map(|(&ticket, row)| {
            // Read `is_abandoned` before `is_complete`. If the detokenizer ends a text, it sets `is_complete` before it sends the last
            // piece. A text whose reader leaves after the last piece is therefore not counted as canceled.
            let is_abandoned = row.ending.is_abandoned();
            if row.ending.is_complete() {
                return Some((ticket, DetokenizerMsg::Gone(ticket)));
            }
            if is_abandoned {
                Metrics::count(&metrics.cancelled, 1);
                return Some((ticket, DetokenizerMsg::Gone(ticket)));
            }
            let is_late = row.until.is_some_and(|until| until <= now);
            is_late.then(|| {
                Metrics::count(&metrics.expired, 1);
                (ticket, DetokenizerMsg::Failed(ticket, ServeError::Deadline))
            })
        });
        for (ticket, news) in gone.collect::<Vec<_>>() {
            self.generator.cancel(ticket);
            if let Some(row) = self.rows.remove(&ticket) {
                self.texts.tell(row.thread, news);
            }
        }
    }

    /// Passes the events of a step to the detokenizers, and updates the measured paces.
    fn note(&mut self, events: Vec<Event>, took: Duration) {
        let n = events.iter();
        let n = n
            .filter(|event| matches!(event, Event::Token { .. }))
            .count();
        // Measure the time per token only while texts are waiting, because as many texts as fit are then running. A step of a single text
        // takes nearly as long as a step of a hundred texts, so its time per token would be far too long.
        let waits = !self.queue.is_empty();
        if n > 0 && waits {
            self.tokens.add(n as f64, took);
        }
        events.into_iter().for_each(|event| self.tell(event));
        if let Some(lane) = self.shared.metrics.lanes.first() {
            Metrics::set(&lane.cache_bytes, self.generator.cache_bytes().0);
        }
        let seconds = match waits {
            true => self.tokens.seconds(self.written.seconds(1.0)),
            false => 0.0,
        };
        let nanos = (seconds * 1e9) as u64;
        self.shared.token_nanos.store(nanos, Ordering::Relaxed);
    }

    /// Fails all running texts after a failed step. If the device is lost, also refuses all waiting texts.
    fn fail(&mut self, error: EngineError) {
        let is_lost = error.is_device_lost();
        let told = match is_lost {
            true => ServeError::NotReady { why: LOST },
            false => ServeError::Engine(Arc::new(error)),
        };
        for (ticket, row) in std::mem::take(&mut self.rows) {
            self.generator.cancel(ticket);
            self.texts
                .tell(row.thread, DetokenizerMsg::Failed(ticket, told.clone()));
        }
        if is_lost {
            self.shared.is_lost.store(true, Ordering::Release);
            for job in self.queue.remove_if(|_| true) {
                self.refuse(job, told.clone());
            }
        }
    }

    /// Passes an event of the generator to the detokenizer thread of its text.
    fn tell(&mut self, event: Event) {
        let ticket = event.ticket();
        let ends = matches!(event, Event::Done { .. } | Event::Failed { .. });
        let thread = match ends {
            true => self.rows.remove(&ticket).map(|row| {
                let [asked, written] = row.tokens.map(|n| n as f64 * TOKEN);
                self.written.add(asked, Duration::from_secs_f64(written));
                row.thread
            }),
            false => self.rows.get_mut(&ticket).map(|row| {
                row.tokens[1] += u64::from(matches!(event, Event::Token { .. }));
                row.thread
            }),
        };
        if let Some(thread) = thread {
            self.texts.tell(thread, DetokenizerMsg::Event(event));
        }
    }
}
