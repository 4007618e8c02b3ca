//! Fair queue of waiting texts.

use std::{cmp::Reverse, collections::HashMap};

use super::Job;

/// Fair queue of texts. The next text has the highest class. Within it, the tenant with the fewest tokens so far is next, and within
/// that the text that arrived first. This is start-time fair queueing, as in [`FairDeviceLock`](crate::serve::FairDeviceLock): a tenant without waiting
/// texts accumulates no credit.
#[derive(Default)]
pub(super) struct FairQueue {
    /// In order of arrival.
    waiting: Vec<Job>,
    /// Tokens of tenants, for those that are ahead of `now`.
    given: HashMap<u32, u64>,
    /// Tokens of the tenant of the last text that was taken, before that text.
    now: u64,
}

impl FairQueue {
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub fn add(&mut self, job: Job) {
        self.waiting.push(job);
    }

    fn given(&self, tenant: u32) -> u64 {
        self.given
            .get(&tenant)
            .map_or(self.now, |&n| n.max(self.now))
    }

    /// Returns the index of the next text.
    pub fn next(&self) -> Option<usize> {
        let each = self.waiting.iter().enumerate();
        let next = each.min_by_key(|(at, job)| (Reverse(job.class), self.given(job.tenant), *at));
        next.map(|(at, _)| at)
    }

    pub fn get(&self, at: usize) -> &Job {
        &self.waiting[at]
    }

    /// Removes the text at an index, and counts it for its tenant.
    pub fn take(&mut self, at: usize) -> Job {
        let job = self.waiting.remove(at);
        let given = self.given(job.tenant);
        self.now = given;
        let tokens = job.tokens() + job.request.prompt.len() as u64;
        self.given.insert(job.tenant, given + tokens);
        self.given.retain(|_, given| *given > self.now);
        job
    }

    /// Removes the texts for which `which` holds.
    pub fn take_out(&mut self, which: impl Fn(&Job) -> bool) -> Vec<Job> {
        self.waiting.extract_if(.., |job| which(job)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::mpsc::unbounded_channel;

    use super::*;
    use crate::generate::{Request, SamplingParams};

    fn job(name: u32, class: u8, tenant: u32, tokens: usize) -> Job {
        let mut options = SamplingParams::default();
        options.rules.max_new_tokens = tokens;
        Job {
            request: Request {
                prompt: vec![name],
                options,
            },
            class,
            tenant,
            until: None,
            came: std::time::Instant::now(),
            stop: Vec::new(),
            goes_on: false,
            pieces: unbounded_channel().0,
            ending: Arc::default(),
            share: crate::serve::Share::unlimited(),
        }
    }

    fn all(line: &mut FairQueue) -> Vec<u32> {
        let next = || line.next().map(|at| line.take(at).request.prompt[0]);
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn the_highest_class_goes_first_and_tenants_take_turns_by_tokens() {
        let mut line = FairQueue::default();
        // One tenant with many texts, one with two, and one urgent text.
        for name in 0..5 {
            line.add(job(name, 0, 1, 9));
        }
        line.add(job(10, 0, 2, 9));
        line.add(job(11, 0, 2, 9));
        line.add(job(20, 3, 1, 9));
        // The urgent text counts for its tenant.
        assert_eq!(all(&mut line), [20, 10, 0, 11, 1, 2, 3, 4]);
        // A late tenant has no credit: it takes turns with the first one.
        line.add(job(5, 0, 1, 9));
        line.add(job(6, 0, 1, 9));
        line.add(job(12, 0, 2, 9));
        line.add(job(13, 0, 2, 9));
        let order = all(&mut line);
        let of_first = order[..2].iter().filter(|&&name| name < 10).count();
        assert_eq!(of_first, 1, "{order:?}");
        // A text that is twice as long counts as two turns.
        let mut line = FairQueue::default();
        line.add(job(0, 0, 1, 39));
        line.add(job(1, 0, 1, 39));
        for name in 10..14 {
            line.add(job(name, 0, 2, 19));
        }
        assert_eq!(all(&mut line), [0, 10, 11, 1, 12, 13]);
        line.add(job(7, 0, 1, 9));
        assert_eq!(line.take_out(|job| job.request.prompt[0] == 7).len(), 1);
        assert!(line.is_empty());
    }
}
