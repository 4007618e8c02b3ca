//! A discrete-event simulation of serving. Requests arrive, a [`Scheduler`] makes decisions, and
//! batches take the time that [`Costs`] estimates. The simulation drives the schedulers through the
//! same [`SchedulerState`] as the server.
//!
//! Requests with several steps represent text generation. Each pass after the first computes one token for each request of the batch. In
//! packed batches, and in shared rows that are cut into slots ([`Layout::Rows`] with `slot < length`), a request is done after its own
//! steps. In padded batches and in shared rows without slots, all requests of a batch complete together, after the last request has
//! completed its steps. Their memory is freed only then, as described in the TCB paper (4.2.2; see docs/papers.md).

mod arrivals;
#[cfg(feature = "cli")]
mod chart;
mod statistics;
#[cfg(test)]
mod tests;
mod trace;

use std::collections::VecDeque;

pub use arrivals::{Lengths, Load, LoadError, Rates};
#[cfg(feature = "cli")]
pub use chart::{Line, Panel, chart};
pub use statistics::Summary;
pub use trace::{
    Event, Happened, ReplayError, Replayed, TraceError, parse_events, parse_trace, replay,
    trace_line,
};

use crate::{
    schedule::{
        Costs, InvalidDecision, Layout, Micros, Planned, Refusal, Scheduler, SchedulerState,
        Waiting,
    },
    tensor::Extents,
};

/// The simulated devices.
#[derive(Clone)]
pub struct Devices<'a> {
    pub costs: &'a dyn Costs,
    /// Memory for the intermediate tensors of a batch, in bytes, for each device.
    pub bytes: Vec<u64>,
    /// Maximum number of batches on a device, including the running batch; at least 1.
    pub depth: u8,
}

/// State of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Waits,
    Runs,
    /// Completed at this time.
    Done(Micros),
    Refused(Micros, Refusal),
}

/// Result of a simulation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Final state of each request, in order of arrival.
    pub fates: Vec<Fate>,
    pub batches: u64,
    /// Number of calls of the scheduler.
    pub decisions: u64,
    /// Sum of the lengths of the requests that ran, in tokens.
    pub tokens: u64,
    /// Tokens that the first passes of the requests computed, including padding.
    pub computed: u64,
    /// Total busy time of the devices.
    pub busy: Micros,
    /// Time of the last event.
    pub end: Micros,
}

/// A batch that runs on a device or waits for it.
struct Run {
    layout: Layout,
    /// Index in the arrivals and number of remaining steps of each request in the batch.
    members: Vec<(usize, u32)>,
    /// Index in the arrivals and number of steps of each request that joins at the next pass.
    joining: Vec<(usize, u32)>,
    /// Extents of the first pass of the requests in `joining`.
    first: Extents,
    first_pass: Micros,
}

#[derive(Default)]
struct Device {
    /// Queued batches; the first one runs.
    runs: VecDeque<Run>,
    /// Time at which the current pass ends; `None` if no batch runs.
    ends: Option<Micros>,
}

/// Simulates all arrivals until every request is completed or refused. The arrivals must be in
/// order of time.
///
/// # Errors
/// Returns an error if the scheduler makes an invalid decision, which is a bug in the scheduler.
pub fn simulate(
    arrivals: &[Waiting],
    scheduler: &mut dyn Scheduler,
    on: &Devices<'_>,
) -> Result<Outcome, InvalidDecision> {
    let mut outcome = Outcome {
        fates: vec![Fate::Waits; arrivals.len()],
        ..Outcome::default()
    };
    let mut scheduling = SchedulerState::new(&on.bytes, on.depth);
    let mut devices: Vec<Device> = on.bytes.iter().map(|_| Device::default()).collect();
    let mut next = 0;
    let mut wake: Option<Micros> = None;
    loop {
        let arrival = arrivals.get(next).map(|w| w.arrived);
        let ends = devices.iter().filter_map(|device| device.ends);
        let Some(now) = ends.chain(arrival).chain(wake).min() else {
            break;
        };
        outcome.end = now;
        let mut ask = wake.is_some_and(|at| at <= now);
        for (lane, device) in devices.iter_mut().enumerate() {
            if device.ends.is_some_and(|at| at <= now) {
                device.pass(
                    now,
                    lane,
                    &mut scheduling,
                    scheduler,
                    on.costs,
                    &mut outcome,
                );
                ask = true;
            }
        }
        while let Some(waiting) = arrivals.get(next).filter(|w| w.arrived <= now) {
            scheduling.arrive(*waiting);
            next += 1;
            ask |= scheduling.has_place() || devices.iter().any(Device::is_joined);
        }
        if !ask {
            continue;
        }
        wake = None;
        if scheduling.waiting().is_empty() {
            continue;
        }
        let decision = scheduling.decide(now, scheduler, on.costs)?;
        outcome.decisions += 1;
        // A wake time in the past would make the loop endless.
        wake = decision.wake.map(|at| at.max(now.plus(Micros(1))));
        for (id, refusal) in decision.refuse {
            outcome.fates[id as usize] = Fate::Refused(now, refusal);
        }
        for planned in decision.run {
            let device = &mut devices[planned.lane];
            device.take(&planned, now, arrivals, on.costs, &mut outcome);
        }
    }
    Ok(outcome)
}

impl Device {
    /// Returns whether requests may join the running batch.
    fn is_joined(&self) -> bool {
        let run = self.runs.front();
        run.is_some_and(|run| is_slotted(run.layout) && run.members.iter().any(|m| m.1 > 1))
    }

    fn take(
        &mut self,
        planned: &Planned,
        now: Micros,
        arrivals: &[Waiting],
        costs: &dyn Costs,
        outcome: &mut Outcome,
    ) {
        let len = |&id: &u64| arrivals[id as usize].tokens;
        let lens = planned.rows.iter().map(|row| row.iter().map(len).sum());
        let computed = planned.layout.computed(lens);
        outcome.computed += computed.tokens;
        let mut members = Vec::with_capacity(planned.rows.len());
        for id in planned.ids() {
            let waiting = &arrivals[id as usize];
            outcome.tokens += u64::from(waiting.tokens);
            outcome.fates[id as usize] = Fate::Runs;
            members.push((id as usize, waiting.steps.max(1)));
        }
        if let Some(run) = self.runs.front_mut().filter(|_| planned.joins) {
            run.joining.append(&mut members);
            run.first = Extents {
                tokens: run.first.tokens + computed.tokens,
                batch: run.first.batch + computed.batch,
                longest: run.first.longest.max(computed.longest),
                pairs: run.first.pairs + computed.pairs,
                slots: run.first.slots + computed.slots,
                rows: run.first.rows + computed.rows,
                ..run.first
            };
            run.first_pass = costs.time(planned.layout, &run.first);
            return;
        }
        outcome.batches += 1;
        self.runs.push_back(Run {
            layout: planned.layout,
            members,
            joining: Vec::new(),
            first: Extents::default(),
            first_pass: costs.time(planned.layout, &computed),
        });
        if self.runs.len() == 1 {
            self.start(now, costs, outcome);
        }
    }

    /// Starts the next pass of the running batch.
    fn start(&mut self, now: Micros, costs: &dyn Costs, outcome: &mut Outcome) {
        let Some(run) = self.runs.front_mut() else {
            self.ends = None;
            return;
        };
        let mut time = std::mem::take(&mut run.first_pass);
        run.first = Extents::default();
        let is_first = time > Micros(0) && run.joining.is_empty();
        if !is_first {
            let tokens = run.members.len() as u64;
            let extents = Extents {
                tokens,
                batch: tokens,
                longest: 1,
                pairs: tokens,
                slots: tokens,
                rows: tokens,
                ..Extents::default()
            };
            time = time.plus(costs.time(Layout::Packed, &extents));
        }
        run.members.append(&mut run.joining);
        outcome.busy = outcome.busy.plus(time);
        self.ends = Some(now.plus(time));
    }

    /// Ends the current pass and starts the next one.
    fn pass(
        &mut self,
        now: Micros,
        lane: usize,
        scheduling: &mut SchedulerState,
        scheduler: &mut dyn Scheduler,
        costs: &dyn Costs,
        outcome: &mut Outcome,
    ) {
        let Some(run) = self.runs.front_mut() else {
            return;
        };
        for member in &mut run.members {
            member.1 = member.1.saturating_sub(1);
        }
        let all = run.members.iter().all(|m| m.1 == 0) && run.joining.is_empty();
        let mut ids = Vec::new();
        if all || is_slotted(run.layout) || run.layout == Layout::Packed {
            run.members.retain(|&(id, left)| {
                if left == 0 {
                    ids.push(id as u64);
                }
                left > 0
            });
        }
        for &id in &ids {
            outcome.fates[id as usize] = Fate::Done(now);
        }
        scheduling.finished(now, lane, &ids, all, scheduler);
        if all {
            self.runs.pop_front();
        }
        self.start(now, costs, outcome);
    }
}

fn is_slotted(layout: Layout) -> bool {
    matches!(layout, Layout::Rows { length, slot } if slot < length)
}
