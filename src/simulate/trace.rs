//! Traces of recorded load: one request per line, as JSON. A trace of a server also records the server's actions, in lines with an `event`
//! field. From such a trace, [`replay`] repeats the decisions of the scheduler and compares them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::schedule::{
    Costs, Decision, InvalidDecision, Micros, Scheduler, SchedulerState, Waiting,
};

/// An event of a [`SchedulerState`], with its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Arrived(Waiting),
    Happened(Micros, Happened),
}

/// An event of a trace other than an arrival. Requests are identified by the ids that a [`SchedulerState`] assigns: the index of their
/// arrival among all arrivals of the trace, from 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Happened {
    /// The server started with one lane (device) for each entry of `bytes`, which is the memory of the lane. Each lane queues up to `depth`
    /// batches.
    Began { bytes: Vec<u64>, depth: u8 },
    /// The scheduler made this decision.
    Decided(Decision),
    /// The requests `ids` of the batch on a lane have finished. If `joined`, the batch continues with its other requests; otherwise the
    /// whole batch has finished.
    Finished {
        lane: usize,
        ids: Vec<u64>,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        joined: bool,
    },
    /// The client of a waiting request disconnected.
    Left(u64),
    /// The memory limit for the batches of a lane changed.
    Bytes { lane: usize, bytes: u64 },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    t: u64,
    event: Happened,
}

/// A request in a trace.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Recorded {
    /// Arrival time, in microseconds since the trace began.
    t: u64,
    tokens: u32,
    /// Deadline, in microseconds since the trace began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    deadline: Option<u64>,
    #[serde(default)]
    class: u8,
    #[serde(default)]
    tenant: u32,
    #[serde(default = "one")]
    steps: u32,
}

fn one() -> u32 {
    1
}

/// An error in a trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    #[error(
        "line {line} is not a request: {problem}; expected JSON such as {{\"t\": 1500, \"tokens\": 12}}, with optional deadline, class, tenant and steps"
    )]
    Syntax { line: usize, problem: String },
    #[error("line {line} has {field} 0; expected at least 1")]
    Zero { line: usize, field: &'static str },
    #[error("line {line} arrives at {t} µs, before the line above it; expected arrivals in order")]
    Order { line: usize, t: u64 },
    #[error("the trace has no requests")]
    Empty,
}

/// Reads the requests of a trace. Skips empty lines and the server's events.
///
/// # Errors
/// Returns an error if a line is neither a request nor an event, if a request has 0 tokens or steps, if a request arrives before the
/// request above it, or if the trace has no requests. Line numbers in errors start at 1.
pub fn parse_trace(text: &str) -> Result<Vec<Waiting>, TraceError> {
    let arrivals = parse_events(text)?.into_iter();
    let arrivals: Vec<Waiting> = arrivals
        .filter_map(|event| match event {
            Event::Arrived(waiting) => Some(waiting),
            Event::Happened(..) => None,
        })
        .collect();
    match arrivals.is_empty() {
        true => Err(TraceError::Empty),
        false => Ok(arrivals),
    }
}

/// Reads all events of a trace, for [`replay`].
///
/// # Errors
/// Returns the errors of [`parse_trace`], except that a trace without requests is allowed.
pub fn parse_events(text: &str) -> Result<Vec<Event>, TraceError> {
    let mut events = Vec::new();
    let mut before = 0;
    let lines = text.lines().enumerate();
    for (at, text) in lines.filter(|(_, text)| !text.trim().is_empty()) {
        let line = at + 1;
        let syntax = |e: serde_json::Error| TraceError::Syntax {
            line,
            problem: e.to_string(),
        };
        let recorded = match serde_json::from_str::<Recorded>(text) {
            Ok(recorded) => recorded,
            // The line contains an event. Parse it as an event, so that an error is about the event's fields.
            Err(_) if text.contains("\"event\"") => {
                let Line { t, event } = serde_json::from_str(text).map_err(syntax)?;
                events.push(Event::Happened(Micros(t), event));
                continue;
            }
            Err(error) => return Err(syntax(error)),
        };
        for (field, value) in [("tokens", recorded.tokens), ("steps", recorded.steps)] {
            if value == 0 {
                return Err(TraceError::Zero { line, field });
            }
        }
        let t = recorded.t;
        if t < before {
            return Err(TraceError::Order { line, t });
        }
        before = t;
        events.push(Event::Arrived(Waiting {
            deadline: recorded.deadline.map(Micros),
            class: recorded.class,
            tenant: recorded.tenant,
            steps: recorded.steps,
            ..Waiting::new(recorded.tokens, Micros(t))
        }));
    }
    Ok(events)
}

/// Formats a request as a line of a trace, without the line break.
pub fn trace_line(waiting: &Waiting) -> String {
    let recorded = Recorded {
        t: waiting.arrived.0,
        tokens: waiting.tokens,
        deadline: waiting.deadline.map(|at| at.0),
        class: waiting.class,
        tenant: waiting.tenant,
        steps: waiting.steps,
    };
    // Serializing numbers cannot fail.
    serde_json::to_string(&recorded).unwrap_or_default()
}

impl fmt::Display for Event {
    /// Formats the event as a line of a trace, without the line break.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Arrived(waiting) => f.write_str(&trace_line(waiting)),
            Self::Happened(Micros(t), event) => {
                let (t, event) = (*t, event.clone());
                let line = serde_json::to_string(&Line { t, event });
                f.write_str(&line.map_err(|_| fmt::Error)?)
            }
        }
    }
}

/// Number of replayed events, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    pub requests: usize,
    pub decisions: usize,
    pub batches: usize,
}

/// An error in replaying a trace.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ReplayError {
    #[error(
        "the trace does not contain the server's start; expected a line with a `began` event before all decisions, which `gemmule serve --trace` writes"
    )]
    NoBeginning,
    #[error(
        "decision {at} (counted from 0) is {found:?}, but the trace has {expected:?}; replay with the scheduler, the settings and the cost table of the server"
    )]
    Differs {
        at: usize,
        found: Box<Decision>,
        expected: Box<Decision>,
    },
    #[error(transparent)]
    InvalidDecision(#[from] InvalidDecision),
}

/// Calls a scheduler at the recorded times of a server's trace, and compares each decision with the recorded decision.
///
/// # Errors
/// Returns an error if a request or another event precedes the `began` event, or if a decision of the scheduler is invalid or differs from
/// the recorded decision.
pub fn replay(
    events: &[Event],
    scheduler: &mut dyn Scheduler,
    costs: &dyn Costs,
) -> Result<Replayed, ReplayError> {
    let mut replayed = Replayed::default();
    let mut scheduling: Option<SchedulerState> = None;
    for event in events {
        let (now, event) = match event {
            Event::Happened(_, Happened::Began { bytes, depth }) => {
                scheduling = Some(SchedulerState::new(bytes, *depth));
                continue;
            }
            Event::Arrived(waiting) => {
                let scheduling = scheduling.as_mut().ok_or(ReplayError::NoBeginning)?;
                scheduling.arrive(*waiting);
                replayed.requests += 1;
                continue;
            }
            Event::Happened(now, event) => (*now, event),
        };
        let scheduling = scheduling.as_mut().ok_or(ReplayError::NoBeginning)?;
        match event {
            Happened::Began { .. } => {}
            Happened::Decided(expected) => {
                let found = scheduling.decide(now, scheduler, costs)?;
                if found != *expected {
                    return Err(ReplayError::Differs {
                        at: replayed.decisions,
                        found: Box::new(found),
                        expected: Box::new(expected.clone()),
                    });
                }
                replayed.decisions += 1;
                replayed.batches += found.run.len();
            }
            Happened::Finished { lane, ids, joined } => {
                scheduling.finished(now, *lane, ids, !joined, scheduler);
            }
            Happened::Left(id) => {
                scheduling.cancel(*id);
            }
            Happened::Bytes { lane, bytes } => scheduling.set_bytes(*lane, *bytes),
        }
    }
    Ok(replayed)
}
