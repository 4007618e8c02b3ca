//! State that the driver of a scheduler keeps: the waiting requests, and the state of each device ([`Lane`]). The simulator and the server
//! use the same code, so a scheduler sees the same state in both.

use std::collections::VecDeque;

use super::{
    Costs, Decision, Lane, Micros, Planned, Queue, Scheduler, View, Waiting, queue::Arrivals,
};

/// Waiting requests, and the state of each device (lane). The driver (the server or the simulator) passes in the current time, so this type
/// reads no clock.
#[derive(Debug)]
pub struct SchedulerState {
    waiting: Arrivals,
    next_id: u64,
    lanes: Vec<Lane>,
    /// Estimated running times of the batches of each lane, starting with the running batch.
    estimates: Vec<VecDeque<Micros>>,
}

/// An invalid decision, which indicates a bug in the scheduler. No part of the decision is carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDecision {
    #[error(
        "the scheduler decided on request {id}, which is not waiting or was already decided on"
    )]
    NotWaiting { id: u64 },
    #[error("the scheduler gave a batch to lane {lane} of {n_lanes}")]
    NoLane { lane: usize, n_lanes: usize },
    #[error("the scheduler gave lane {lane} a batch without requests")]
    Empty { lane: usize },
    #[error("the scheduler had requests join the batch of lane {lane}, which has no running batch")]
    Joins { lane: usize },
}

impl SchedulerState {
    /// Creates a state with one lane per entry of `bytes`. An entry is the number of bytes of memory that a batch may use on the lane. Each
    /// lane accepts up to `depth` batches in flight.
    pub fn new(bytes: &[u64], depth: u8) -> Self {
        let lane = |&bytes: &u64| Lane {
            in_flight: 0,
            depth,
            free_at: Micros(0),
            bytes,
        };
        Self {
            waiting: Arrivals::default(),
            next_id: 0,
            lanes: bytes.iter().map(lane).collect(),
            estimates: bytes.iter().map(|_| VecDeque::new()).collect(),
        }
    }

    /// Adds a request and returns its new id.
    pub fn arrive(&mut self, waiting: Waiting) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.waiting.push(Waiting { id, ..waiting });
        id
    }

    /// Removes the request of a client that has disconnected. Returns whether the request was still waiting.
    pub fn cancel(&mut self, id: u64) -> bool {
        self.waiting.remove(std::iter::once(id)).is_ok()
    }

    pub fn waiting(&self) -> Queue<'_> {
        self.waiting.queue()
    }

    /// Sum of the tokens of all waiting requests.
    pub fn tokens(&self) -> u64 {
        self.waiting().tokens()
    }

    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// Returns whether at least one lane accepts another batch.
    pub fn has_place(&self) -> bool {
        self.lanes.iter().any(|lane| lane.in_flight < lane.depth)
    }

    /// Sets the number of bytes of memory that a batch may use on a lane.
    pub fn set_bytes(&mut self, lane: usize, bytes: u64) {
        if let Some(lane) = self.lanes.get_mut(lane) {
            lane.bytes = bytes;
        }
    }

    /// Calls the scheduler and applies its decision: requests that are run or refused leave the queue.
    ///
    /// # Errors
    /// Returns an error if the decision is invalid.
    pub fn decide(
        &mut self,
        now: Micros,
        scheduler: &mut dyn Scheduler,
        costs: &dyn Costs,
    ) -> Result<Decision, InvalidDecision> {
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
                return Err(InvalidDecision::NoLane { lane, n_lanes });
            };
            if planned.joins && state.in_flight == 0 {
                return Err(InvalidDecision::Joins { lane });
            }
            if planned.ids().next().is_none() {
                return Err(InvalidDecision::Empty { lane });
            }
        }
        let refused = decision.refuse.iter().map(|&(id, _)| id);
        let run = decision.run.iter().flat_map(Planned::ids);
        self.waiting
            .remove(run.chain(refused))
            .map_err(|id| InvalidDecision::NotWaiting { id })?;
        for planned in decision.run.iter().filter(|planned| !planned.joins) {
            let lane = &mut self.lanes[planned.lane];
            lane.in_flight = lane.in_flight.saturating_add(1);
            lane.free_at = lane.free_at.max(now).plus(planned.estimate);
            self.estimates[planned.lane].push_back(planned.estimate);
        }
        Ok(decision)
    }

    /// Reports that the requests `ids` of a lane's running batch have finished. `is_over` says whether the whole batch has finished.
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
}
