//! A discrete-event simulation of serving: requests arrive, a [`Scheduler`] decides, batches take the time that a table of
//! [`Costs`] gives. It drives the schedulers through the same [`Desk`] as the server.
//!
//! Requests of several steps stand for generation. A pass after the first computes one token for each member of the batch. In a
//! packed batch and in slots a member is done after its own steps; in padded and in shared rows all are done, and their memory
//! is free, when the last is, as TCB describes it (4.2.2).

mod arrivals;
mod chart;
mod statistics;
#[cfg(test)]
mod tests;
mod trace;

use std::collections::VecDeque;

pub use arrivals::{Lengths, Load, LoadError, Rates};
pub use chart::{Line, Panel, chart};
pub use statistics::Summary;
pub use trace::{
    Event, Happened, ReplayError, Replayed, TraceError, parse_events, parse_trace, replay,
    trace_line,
};

use crate::{
    schedule::{Costs, Desk, Layout, Micros, Misdecision, Planned, Refusal, Scheduler, Waiting},
    tensor::Extents,
};

/// The devices that a simulation runs on.
#[derive(Clone)]
pub struct Devices<'a> {
    pub costs: &'a dyn Costs,
    /// Memory for the intermediate tensors of a batch, in bytes, one for each device.
    pub bytes: Vec<u64>,
    /// Batches that a device takes at once, from 1 on.
    pub depth: u8,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Waits,
    Runs,
    /// Answered at this time.
    Done(Micros),
    Refused(Micros, Refusal),
}

/// What a simulation gave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Of each arrival, in order.
    pub fates: Vec<Fate>,
    pub batches: u64,
    /// Times that the scheduler was asked.
    pub decisions: u64,
    /// Tokens of requests that ran, and tokens that their first passes computed, padding included.
    pub tokens: u64,
    pub computed: u64,
    /// Time that the devices ran, added up.
    pub busy: Micros,
    /// When the last thing happened.
    pub end: Micros,
}

/// A batch on a device, or behind it.
struct Run {
    layout: Layout,
    /// With the steps that each still has.
    members: Vec<(usize, u32)>,
    /// Members that take part from the next pass on, with the time of their first pass.
    joining: Vec<(usize, u32)>,
    /// What that pass computes, of all that joined since the last one.
    first: Extents,
    first_pass: Micros,
}

#[derive(Default)]
struct Device {
    /// The first one runs.
    runs: VecDeque<Run>,
    /// When the present pass ends.
    ends: Option<Micros>,
}

/// Runs all arrivals, which are in order of time, to their end.
///
/// # Errors
/// A decision that cannot be, which is a mistake in the scheduler.
pub fn simulate(
    arrivals: &[Waiting],
    scheduler: &mut dyn Scheduler,
    on: &Devices<'_>,
) -> Result<Outcome, Misdecision> {
    let mut outcome = Outcome {
        fates: vec![Fate::Waits; arrivals.len()],
        ..Outcome::default()
    };
    let mut desk = Desk::new(&on.bytes, on.depth);
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
                device.pass(now, lane, &mut desk, scheduler, on.costs, &mut outcome);
                ask = true;
            }
        }
        while let Some(waiting) = arrivals.get(next).filter(|w| w.arrived <= now) {
            desk.arrive(*waiting);
            next += 1;
            ask |= desk.has_place() || devices.iter().any(Device::is_joined);
        }
        if !ask {
            continue;
        }
        wake = None;
        if desk.waiting().is_empty() {
            continue;
        }
        let decision = desk.decide(now, scheduler, on.costs)?;
        outcome.decisions += 1;
        // A time that is past would be asked for again and again.
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
    /// Whether requests may join what runs.
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

    /// Starts the next pass of what runs.
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

    /// A pass has ended.
    fn pass(
        &mut self,
        now: Micros,
        lane: usize,
        desk: &mut Desk,
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
        desk.finished(now, lane, &ids, all, scheduler);
        if all {
            self.runs.pop_front();
        }
        self.start(now, costs, outcome);
    }
}

fn is_slotted(layout: Layout) -> bool {
    matches!(layout, Layout::Rows { length, slot } if slot < length)
}
