//! Schedulers decide which requests run next, on which device and in which layout. A [`Scheduler`] takes a [`View`] of the
//! waiting requests and the devices, and returns a [`Decision`]. It uses no clock, thread, file or random number. The simulator
//! and the server therefore run the same code, and equal views give equal decisions.
//!
//! Each row of the table is a scheduler: when it decides, which waiting requests it selects, how it lays out their batches, and its source.
//!
//! | name | when | which | how | source |
//! |---|---|---|---|---|
//! | `no-batch` | hungry | in order of arrival | one request per batch | TurboTransformers 6.2 |
//! | `naive` | hungry | in order of arrival | padded, at most 20 | TurboTransformers 6.2 |
//! | `dp` | hungry | all | padded, by dynamic programming | TurboTransformers algorithm 3 |
//! | `lazy-naive`, `lazy-dp` | lazy | like `naive`, `dp` | like `naive`, `dp` | TurboTransformers 5 |
//! | `tnb` | hungry | DAS | padded, at most 64 | TCB 6.1 |
//! | `ttb` | hungry | DAS | padded, by dynamic programming | TCB 6.1 |
//! | `concat-fcfs`, `concat-sjf`, `concat-edf` | hungry | in order of arrival, length, deadline | rows shared by several requests | TCB 4.1, 6.2.4 |
//! | `concat-das` | hungry | DAS | rows shared by several requests | TCB algorithm 1 |
//! | `slotted-das` | hungry | slotted DAS | shared rows, cut into slots | TCB algorithm 2, 4.2 |
//! | `packed` | a device has fewer than two batches | deadlines, classes, tenants | packed, up to a token budget | gemmule |
//!
//! Hungry schedulers decide whenever a device is idle. Lazy schedulers wait for more requests. DAS is TCB's algorithm 1, which selects
//! requests by utility and deadline. `docs/papers.md` cites the papers TurboTransformers and TCB.
//!
//! To add a scheduler, implement the trait and add a line to [`NAMES`] and to [`scheduler`]. The properties in `schedule/tests` check every
//! scheduler.

mod costs;
mod fair;
mod packed;
mod papers;
mod queue;
mod state;
#[cfg(test)]
mod tests;

use std::{
    collections::HashSet,
    hash::{BuildHasherDefault, Hasher},
};

use serde::{Deserialize, Serialize};

pub use costs::{Bytes, CostTable, CostTableError, Costs, Grid};
pub use packed::Packed;
pub use papers::{BatchLayout, Composed, Order, Trigger, partition};
pub use queue::{Queue, Rows};
pub use state::{InvalidDecision, SchedulerState};

use crate::names::nearest;

/// A point in time or a duration, in microseconds. Points in time are relative to the start of the driver, which is the server or the
/// simulator.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Micros(pub u64);

impl Micros {
    pub const MAX: Self = Self(u64::MAX);

    /// Adds a duration and saturates at [`MAX`](Self::MAX).
    #[must_use]
    pub fn plus(self, span: Self) -> Self {
        Self(self.0.saturating_add(span.0))
    }

    /// Returns the duration since `earlier`, or zero if `earlier` is later than `self`.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }

    /// Converts a duration in seconds to microseconds. Negative values and NaN give zero.
    pub fn of_seconds(seconds: f64) -> Self {
        Self((seconds * 1e6).round() as u64)
    }

    pub fn seconds(self) -> f64 {
        self.0 as f64 / 1e6
    }

    pub fn millis(self) -> f64 {
        self.0 as f64 / 1e3
    }
}

/// A waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// Unique id. It is larger than the ids of all earlier requests.
    pub id: u64,
    /// Number of tokens, at least 1.
    pub tokens: u32,
    pub arrived: Micros,
    /// Time after which the client no longer needs the response; `None` without a deadline.
    pub deadline: Option<Micros>,
    /// Priority class. Higher classes run first.
    pub class: u8,
    /// Tenant that sent the request. Tenants share the devices evenly within a class.
    pub tenant: u32,
    /// Number of forward passes: 1 for an encoder, the number of new tokens for generated text.
    pub steps: u32,
}

impl Waiting {
    /// Creates a request to an encoder, without a deadline, in the lowest class.
    pub fn new(tokens: u32, arrived: Micros) -> Self {
        Self {
            id: 0,
            tokens,
            arrived,
            deadline: None,
            class: 0,
            tenant: 0,
            steps: 1,
        }
    }
}

/// State of one device, which runs batches one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Number of batches that were submitted and have not finished.
    pub in_flight: u8,
    /// Maximum of `in_flight`, which counts the running batch and the batches queued after it.
    pub depth: u8,
    /// Estimated time at which all submitted batches will have finished.
    pub free_at: Micros,
    /// Memory for the intermediate tensors of a batch, in bytes.
    pub bytes: u64,
}

/// Memory layout of a batch's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Layout {
    /// Sequences are concatenated without padding.
    Packed,
    /// Every sequence is padded to the length of the longest one.
    Padded,
    /// Rows of `length` tokens, each cut into slots of `slot` tokens. Several sequences share a slot, and attention is computed over the
    /// whole slot. `slot == length` is TCB's pure ConcatBatching (4.1); smaller slots are its slotted form (4.2).
    Rows { length: u32, slot: u32 },
}

/// A batch to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// Index into [`View::lanes`].
    pub lane: usize,
    pub layout: Layout,
    pub rows: Rows,
    /// Estimated running time.
    pub estimate: Micros,
    /// Whether the requests join the lane's running batch, in slots whose previous requests have finished (TCB 4.2.2).
    pub joins: bool,
}

/// Reason why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Refusal {
    /// The deadline has passed.
    Expired,
    /// The deadline will pass before a device can finish the request.
    Hopeless,
    /// The request needs more memory than any device has, is longer than a row, or has more tokens than a batch may have.
    TooLarge,
}

/// Result of [`Scheduler::decide`]. Requests that are run or refused leave the queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// Batches to run. Batches of the same lane run in the order of this list. A lane accepts all of them, even if it then has more than
    /// [`Lane::depth`] batches in flight.
    pub run: Vec<Planned>,
    pub refuse: Vec<(u64, Refusal)>,
    /// Time at which to decide again if no request arrives and no batch finishes before that time.
    pub wake: Option<Micros>,
}

/// Input of a scheduling decision.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub now: Micros,
    pub waiting: Queue<'a>,
    pub lanes: &'a [Lane],
    pub costs: &'a dyn Costs,
}

impl View<'_> {
    /// Returns the memory of the lane with the most memory, in bytes.
    fn max_bytes(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.bytes).max().unwrap_or(0)
    }
}

/// Set of request ids. The hash is a single multiplication. The driver assigns the ids, so clients cannot force collisions.
type Ids = HashSet<u64, BuildHasherDefault<IdHasher>>;

#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&b| self.write_u64(u64::from(b)));
    }

    fn write_u64(&mut self, id: u64) {
        // Fibonacci hashing (Knuth): multiplication by the golden ratio spreads consecutive ids.
        self.0 = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// Scheduling policy. A scheduler may keep state between decisions, because [`View::waiting`] changes in only two ways: new requests are
/// appended, and requests that were decided on or canceled are removed.
pub trait Scheduler: Send {
    fn decide(&mut self, view: &View<'_>) -> Decision;

    /// Reports finished requests, including those of a batch that is still running (early memory cleaning, TCB 4.2.2).
    fn finished(&mut self, ids: &[u64], lane: usize) {
        let _ = (ids, lane);
    }

    /// Returns the index of the waiting text (a request to generate text) to start next, once the KV cache has room. `None` means to wait
    /// until one of the `n_running` texts ends. `waiting` is in order of arrival. [`Waiting::tokens`] is the length of the prompt, and
    /// [`Waiting::steps`] the number of new tokens. By default, texts start in order of arrival.
    fn next_text(&self, waiting: &[Waiting], n_running: usize) -> Option<usize> {
        let _ = n_running;
        (!waiting.is_empty()).then_some(0)
    }

    /// Reports that a text selected by [`next_text`](Self::next_text) has started.
    fn text_started(&mut self, text: &Waiting) {
        let _ = text;
    }
}

/// Parameters of the schedulers.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Target latency. A lazy scheduler starts a batch early enough to finish within half of this latency. `packed` raises a class of
    /// requests by one class for each full period that the oldest request of the class has waited. The period is four times this latency.
    pub slo: Micros,
    /// Maximum time for which a lazy scheduler waits for more requests.
    pub timeout: Micros,
    /// Maximum number of requests in a padded batch (TurboTransformers: 20).
    pub most: usize,
    /// Number of rows of a batch (TCB: 64).
    ///
    /// - `concat-…` and `slotted-das`: the number of rows, each of which several requests share.
    /// - `tnb` and `ttb`, which pad: the max number of requests in a batch, and the number of rows that DAS fills when it selects requests.
    pub rows: u32,
    /// Number of tokens in a row (TCB: 100 to 400).
    pub length: u32,
    /// Fraction of a row's requests that DAS selects by utility alone (η in TCB), between 0 and 1 (both excluded). TCB's q is `1 − η`.
    pub dominance: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            slo: Micros(50_000),
            timeout: Micros(10_000),
            most: 20,
            rows: 64,
            length: 512,
            dominance: 0.5,
        }
    }
}

/// Names of the schedulers, with gemmule's own first.
pub const NAMES: [&str; 13] = [
    "packed",
    "no-batch",
    "naive",
    "dp",
    "lazy-naive",
    "lazy-dp",
    "tnb",
    "ttb",
    "concat-fcfs",
    "concat-sjf",
    "concat-edf",
    "concat-das",
    "slotted-das",
];

/// Names of the schedulers that a server offers. The other schedulers plan padding or rows that several requests share. Only the simulator
/// executes such layouts.
pub const SERVED: [&str; 2] = ["packed", "no-batch"];

/// Creates the scheduler called `name` for a server.
///
/// # Errors
/// Returns an error if `name` is not in [`SERVED`] or a setting is out of range.
pub fn served(name: &str, settings: &Settings) -> Result<Box<dyn Scheduler>, SchedulerError> {
    let scheduler = scheduler(name, settings)?;
    match SERVED.contains(&name) {
        true => Ok(scheduler),
        false => Err(SchedulerError::Simulated {
            name: name.to_owned(),
        }),
    }
}

/// Error of [`scheduler`] and [`served`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SchedulerError {
    #[error(
        "there is no scheduler `{name}`{}; there are {}",
        near.as_ref().map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default(),
        NAMES.join(", ")
    )]
    Unknown { name: String, near: Option<String> },
    #[error(
        "the scheduler `{name}` plans layouts that a server does not execute; expected {}, or compare it with `gemmule simulate --scheduler {name}`",
        SERVED.join(" or ")
    )]
    Simulated { name: String },
    #[error("{what} is {found}; expected {expected}")]
    Setting {
        what: &'static str,
        found: String,
        expected: &'static str,
    },
}

impl Settings {
    fn check(&self) -> Result<(), SchedulerError> {
        let positive = [
            (
                "the largest number of requests in a batch",
                self.most as u64,
            ),
            ("the number of rows", u64::from(self.rows)),
            ("the length of a row", u64::from(self.length)),
        ];
        for (what, value) in positive {
            if value == 0 {
                return Err(SchedulerError::Setting {
                    what,
                    found: value.to_string(),
                    expected: "at least 1",
                });
            }
        }
        if !(self.dominance > 0.0 && self.dominance < 1.0) {
            return Err(SchedulerError::Setting {
                what: "the share of requests selected by utility",
                found: self.dominance.to_string(),
                expected: "a number between 0 and 1, both excluded",
            });
        }
        Ok(())
    }
}

/// Creates the scheduler called `name`.
///
/// # Errors
/// Returns an error if `name` is unknown or a setting is out of range.
pub fn scheduler(name: &str, settings: &Settings) -> Result<Box<dyn Scheduler>, SchedulerError> {
    settings.check()?;
    let Settings {
        slo,
        timeout,
        most,
        rows,
        length,
        dominance,
    } = *settings;
    let wide = rows as usize;
    let lazy = Trigger::Lazy { timeout, most, slo };
    let das = Order::Das {
        rows,
        length,
        dominance,
    };
    let slotted = Order::SlottedDas { dominance };
    let shared = BatchLayout::Rows { rows, length };
    let composed = |when, which, how| Box::new(Composed::new(when, which, how));
    Ok(match name {
        "packed" => Box::new(Packed::new(slo)),
        "no-batch" => composed(Trigger::Hungry, Order::Fcfs, BatchLayout::Single),
        "naive" => composed(Trigger::Hungry, Order::Fcfs, BatchLayout::Padded { most }),
        "dp" => composed(Trigger::Hungry, Order::Fcfs, BatchLayout::Dp { most }),
        "lazy-naive" => composed(lazy, Order::Fcfs, BatchLayout::Padded { most }),
        "lazy-dp" => composed(lazy, Order::Fcfs, BatchLayout::Dp { most }),
        "tnb" => composed(Trigger::Hungry, das, BatchLayout::Padded { most: wide }),
        "ttb" => composed(Trigger::Hungry, das, BatchLayout::Dp { most: wide }),
        "concat-fcfs" => composed(Trigger::Hungry, Order::Fcfs, shared),
        "concat-sjf" => composed(Trigger::Hungry, Order::Sjf, shared),
        "concat-edf" => composed(Trigger::Hungry, Order::Edf, shared),
        "concat-das" => composed(Trigger::Hungry, das, shared),
        "slotted-das" => composed(Trigger::Hungry, slotted, shared),
        _ => {
            return Err(SchedulerError::Unknown {
                name: name.to_owned(),
                near: nearest(name, NAMES.into_iter()).map(str::to_owned),
            });
        }
    })
}
