//! What every driver of a scheduler keeps: who waits, and what the lanes do. The simulator and the server both decide through
//! it, so that a scheduler sees the same in both.

use std::collections::VecDeque;

use super::{Costs, Decision, Lane, Micros, Planned, Scheduler, View, Waiting};

/// Requests that wait and lanes that run. Nothing here measures time: the driver says it.
#[derive(Debug)]
pub struct Desk {
    /// Those from `head` on wait, in order of arrival.
    waiting: Vec<Waiting>,
    head: usize,
    next_id: u64,
    tokens: u64,
    lanes: Vec<Lane>,
    /// Estimates of the batches of each lane, the running one first.
    estimates: Vec<VecDeque<Micros>>,
    /// Of requests that are being taken out, a bit each; kept for its memory.
    marks: Vec<u64>,
}

/// A decision that a scheduler must not take. It shows a mistake in the scheduler, and nothing of it is done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misdecision {
    #[error("the scheduler decided on request {id}, which does not wait, or twice on it")]
    NotWaiting { id: u64 },
    #[error("the scheduler gave a batch to lane {lane} of {n_lanes}")]
    NoLane { lane: usize, n_lanes: usize },
    #[error("the scheduler gave lane {lane} a batch without requests")]
    Empty { lane: usize },
    #[error("the scheduler had requests join the batch of lane {lane}, on which none runs")]
    Joins { lane: usize },
}

impl Desk {
    /// A desk of lanes that take `depth` batches and have `bytes` bytes for each, as many as there are of these.
    pub fn new(bytes: &[u64], depth: u8) -> Self {
        let lane = |&bytes: &u64| Lane {
            in_flight: 0,
            depth,
            free_at: Micros(0),
            bytes,
        };
        Self {
            waiting: Vec::new(),
            head: 0,
            next_id: 0,
            tokens: 0,
            lanes: bytes.iter().map(lane).collect(),
            estimates: bytes.iter().map(|_| VecDeque::new()).collect(),
            marks: Vec::new(),
        }
    }

    /// A request comes; its id is given here.
    pub fn arrive(&mut self, waiting: Waiting) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.tokens += u64::from(waiting.tokens);
        self.waiting.push(Waiting { id, ..waiting });
        id
    }

    /// A request's sender has gone. Tells whether it waited.
    pub fn cancel(&mut self, id: u64) -> bool {
        self.remove(std::iter::once(id)).is_ok()
    }

    pub fn waiting(&self) -> &[Waiting] {
        self.waiting.get(self.head..).unwrap_or_default()
    }

    /// Tokens of all that wait.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// Whether a lane takes another batch.
    pub fn has_place(&self) -> bool {
        self.lanes.iter().any(|lane| lane.in_flight < lane.depth)
    }

    /// Changes the memory that batches of a lane may take.
    pub fn set_bytes(&mut self, lane: usize, bytes: u64) {
        if let Some(lane) = self.lanes.get_mut(lane) {
            lane.bytes = bytes;
        }
    }

    /// Asks the scheduler, and does what it decided: who is run or refused waits no more.
    ///
    /// # Errors
    /// A decision that cannot be.
    pub fn decide(
        &mut self,
        now: Micros,
        scheduler: &mut dyn Scheduler,
        costs: &dyn Costs,
    ) -> Result<Decision, Misdecision> {
        let decision = scheduler.decide(&View {
            now,
            waiting: self.waiting(),
            lanes: &self.lanes,
            costs,
        });
        let n_lanes = self.lanes.len();
        for planned in &decision.run {
            let lane = planned.lane;
            let Some(state) = self.lanes.get(lane) else {
                return Err(Misdecision::NoLane { lane, n_lanes });
            };
            if planned.joins && state.in_flight == 0 {
                return Err(Misdecision::Joins { lane });
            }
            if planned.ids().next().is_none() {
                return Err(Misdecision::Empty { lane });
            }
        }
        let refused = decision.refuse.iter().map(|&(id, _)| id);
        let run = decision.run.iter().flat_map(Planned::ids);
        self.remove(run.chain(refused))?;
        for planned in decision.run.iter().filter(|planned| !planned.joins) {
            let lane = &mut self.lanes[planned.lane];
            lane.in_flight = lane.in_flight.saturating_add(1);
            lane.free_at = lane.free_at.max(now).plus(planned.estimate);
            self.estimates[planned.lane].push_back(planned.estimate);
        }
        Ok(decision)
    }

    /// Requests of the batch that runs on a lane have finished; `is_over` when the batch has.
    pub fn finished(
        &mut self,
        now: Micros,
        lane: usize,
        ids: &[u64],
        is_over: bool,
        scheduler: &mut dyn Scheduler,
    ) {
        scheduler.finished(ids, lane);
        if let Some(estimates) = self.estimates.get_mut(lane).filter(|_| is_over) {
            estimates.pop_front();
            let rest = estimates.iter().fold(now, |at, &time| at.plus(time));
            let lane = &mut self.lanes[lane];
            lane.in_flight = lane.in_flight.saturating_sub(1);
            lane.free_at = rest;
        }
    }

    /// Takes requests out. What waits is mostly decided on from its front, so that the few before the last of them are moved
    /// up, and not the many behind.
    fn remove(&mut self, ids: impl Iterator<Item = u64>) -> Result<(), Misdecision> {
        let waiting = self.waiting.get_mut(self.head..).unwrap_or_default();
        let first = waiting.first().map_or(0, |w| w.id);
        let marks = &mut self.marks;
        marks.clear();
        let (mut end, mut tokens) = (0, 0);
        for id in ids {
            // Ids rise by at least one, and mostly by one.
            let most = id.checked_sub(first).and_then(|n| usize::try_from(n).ok());
            let at = match most {
                Some(at) if waiting.get(at).is_some_and(|w| w.id == id) => Some(at),
                Some(most) => {
                    let before = &waiting[..most.min(waiting.len())];
                    before.binary_search_by_key(&id, |w| w.id).ok()
                }
                None => None,
            };
            let at = at.ok_or(Misdecision::NotWaiting { id })?;
            let (word, bit) = (at / 64, 1 << (at % 64));
            if word >= marks.len() {
                marks.resize(word + 1, 0_u64);
            }
            if marks[word] & bit != 0 {
                return Err(Misdecision::NotWaiting { id });
            }
            marks[word] |= bit;
            end = end.max(at + 1);
            tokens += u64::from(waiting[at].tokens);
        }
        self.tokens -= tokens;
        // From behind, run by run of what stays.
        let (mut write, mut read) = (end, end);
        while read > 0 {
            let is_gone = |at: usize| marks[at / 64] & (1 << (at % 64)) != 0;
            if is_gone(read - 1) {
                read -= 1;
                continue;
            }
            let mut from = read - 1;
            while from > 0 && !is_gone(from - 1) {
                from -= 1;
            }
            write -= read - from;
            waiting.copy_within(from..read, write);
            read = from;
        }
        self.head += write;
        if self.head > 4096 && self.head > self.waiting.len() / 2 {
            self.waiting.drain(..self.head);
            self.head = 0;
        }
        Ok(())
    }
}
