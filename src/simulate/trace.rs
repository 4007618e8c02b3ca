//! Recorded load: one request a line, as JSON.

use serde::{Deserialize, Serialize};

use crate::schedule::{Micros, Waiting};

/// A line of a trace.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Recorded {
    /// Of its arrival, in microseconds since the trace began.
    t: u64,
    tokens: u32,
    /// In microseconds since the trace began.
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

/// What is wrong with a trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    #[error(
        "line {line} is no request: {problem}; expected JSON as {{\"t\": 1500, \"tokens\": 12}}, with deadline, class, tenant and steps where there are any"
    )]
    Syntax { line: usize, problem: String },
    #[error("line {line} has {field} 0; expected at least 1")]
    Zero { line: usize, field: &'static str },
    #[error("line {line} arrives at {t} µs, before the line above it; expected arrivals in order")]
    Order { line: usize, t: u64 },
    #[error("there is no request in it")]
    Empty,
}

/// Reads a trace. Empty lines are left out.
///
/// # Errors
/// A line that is no request, or not in order; lines count from 1.
pub fn parse_trace(text: &str) -> Result<Vec<Waiting>, TraceError> {
    let mut arrivals: Vec<Waiting> = Vec::new();
    let lines = text.lines().enumerate();
    for (at, text) in lines.filter(|(_, text)| !text.trim().is_empty()) {
        let line = at + 1;
        let recorded: Recorded = serde_json::from_str(text).map_err(|e| TraceError::Syntax {
            line,
            problem: e.to_string(),
        })?;
        for (field, value) in [("tokens", recorded.tokens), ("steps", recorded.steps)] {
            if value == 0 {
                return Err(TraceError::Zero { line, field });
            }
        }
        let t = recorded.t;
        if arrivals.last().is_some_and(|last| last.arrived.0 > t) {
            return Err(TraceError::Order { line, t });
        }
        arrivals.push(Waiting {
            deadline: recorded.deadline.map(Micros),
            class: recorded.class,
            tenant: recorded.tenant,
            steps: recorded.steps,
            ..Waiting::new(recorded.tokens, Micros(t))
        });
    }
    match arrivals.is_empty() {
        true => Err(TraceError::Empty),
        false => Ok(arrivals),
    }
}

/// A request as a line of a trace, without the line's end.
pub fn trace_line(waiting: &Waiting) -> String {
    let recorded = Recorded {
        t: waiting.arrived.0,
        tokens: waiting.tokens,
        deadline: waiting.deadline.map(|at| at.0),
        class: waiting.class,
        tenant: waiting.tenant,
        steps: waiting.steps,
    };
    // Numbers alone always are JSON.
    serde_json::to_string(&recorded).unwrap_or_default()
}
