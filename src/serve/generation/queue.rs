//! Queue of texts that wait for the generator.

use std::{collections::HashMap, time::Instant};

use super::Job;
use crate::schedule::{Micros, Scheduler, Waiting};

/// Queue of texts. The model's scheduler decides their order.
pub(super) struct TextQueue {
    scheduler: Box<dyn Scheduler>,
    /// In order of arrival.
    waiting: Vec<Waiting>,
    jobs: HashMap<u64, Job>,
    next_id: u64,
    began: Instant,
}

impl TextQueue {
    pub fn new(scheduler: Box<dyn Scheduler>) -> Self {
        Self {
            scheduler,
            waiting: Vec::new(),
            jobs: HashMap::new(),
            next_id: 0,
            began: Instant::now(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub fn add(&mut self, job: Job) {
        let since = |at: Instant| Micros(at.duration_since(self.began).as_micros() as u64);
        let waiting = Waiting {
            id: self.next_id,
            deadline: job.until.map(since),
            class: job.class,
            tenant: job.tenant,
            steps: u32::try_from(job.tokens()).unwrap_or(u32::MAX),
            ..Waiting::new(job.request.prompt.len() as u32, since(job.arrived))
        };
        self.next_id += 1;
        self.jobs.insert(waiting.id, job);
        self.waiting.push(waiting);
    }

    /// Returns the text to start next while `n_running` other texts run; `None` if no text may
    /// start yet.
    pub fn next(&self, n_running: usize) -> Option<Waiting> {
        let next = self.scheduler.next_text(&self.waiting, n_running)?;
        self.waiting.get(next).copied()
    }

    pub fn get(&self, waiting: Waiting) -> Option<&Job> {
        self.jobs.get(&waiting.id)
    }

    /// Removes a text that is starting, and reports it to the scheduler.
    pub fn start(&mut self, waiting: Waiting) -> Option<Job> {
        self.scheduler.text_started(&waiting);
        self.remove(waiting)
    }

    pub fn remove(&mut self, waiting: Waiting) -> Option<Job> {
        self.waiting.retain(|other| other.id != waiting.id);
        self.jobs.remove(&waiting.id)
    }

    /// Removes the texts for which `which` returns true, and returns them.
    pub fn remove_if(&mut self, which: impl Fn(&Job) -> bool) -> Vec<Job> {
        let (mut kept, mut removed) = (Vec::with_capacity(self.waiting.len()), Vec::new());
        for waiting in self.waiting.drain(..) {
            match self.jobs.get(&waiting.id) {
                Some(job) if which(job) => removed.extend(self.jobs.remove(&waiting.id)),
                _ => kept.push(waiting),
            }
        }
        self.waiting = kept;
        removed
    }
}
