//! Which requests run next, on which device and in which layout. A [`Scheduler`] sees what waits and what each device does, and
//! answers with a [`Decision`]. It has no clock, thread, file or random number, so that the simulator and the server drive the
//! same code, and the same [views](View) give the same decisions.
//!
//! | name | when | which | how | source |
//! |---|---|---|---|---|
//! | `no-batch` | hungry | in order of arrival | one request a batch | TurboTransformers 6.2 |
//! | `naive` | hungry | in order of arrival | padded, at most 20 | TurboTransformers 6.2 |
//! | `dp` | hungry | all | padded, by dynamic programming | TurboTransformers algorithm 3 |
//! | `lazy-naive`, `lazy-dp` | lazy | as above | as above | TurboTransformers 5 |
//! | `tnb` | hungry | DAS | padded, at most 64 | TCB 6.1 |
//! | `ttb` | hungry | DAS | padded, by dynamic programming | TCB 6.1 |
//! | `concat-fcfs`, `concat-sjf`, `concat-edf` | hungry | in order of arrival, length, deadline | rows that several requests share | TCB 4.1, 6.2.4 |
//! | `concat-das` | hungry | DAS | the same rows | TCB algorithm 1 |
//! | `slotted-das` | hungry | slotted DAS | rows cut into slots | TCB algorithm 2, 4.2 |
//! | `packed` | two places a device | deadlines, classes, tenants | packed, to a budget of tokens | gemmule |
//!
//! A new scheduler is an implementation of the trait and a line in [`NAMES`] and [`scheduler`]; the properties in
//! `schedule/tests` hold it to what every scheduler promises.

mod composed;
mod costs;
mod das;
mod desk;
mod dp;
mod index;
mod packed;
mod queue;
#[cfg(test)]
mod tests;

use std::{
    collections::HashSet,
    hash::{BuildHasherDefault, Hasher},
};

use serde::{Deserialize, Serialize};

pub use composed::{Composed, How, When, Which};
pub use costs::{Bytes, CostTable, CostTableError, Costs, Grid};
pub use desk::{Desk, Misdecision};
pub use dp::partition;
pub use packed::Packed;
pub use queue::{Queue, Rows};

use crate::names::nearest;

/// A time, or a span of time, in microseconds. Times count from when the driver of the schedulers began.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Micros(pub u64);

impl Micros {
    pub const MAX: Self = Self(u64::MAX);

    /// The sum, or the last time that there is.
    #[must_use]
    pub fn plus(self, span: Self) -> Self {
        Self(self.0.saturating_add(span.0))
    }

    /// The span since an earlier time; zero since a later one.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }

    /// A span given in seconds; zero for what is negative or no number.
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

/// A request that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// Unique, and larger than those of all requests that came before.
    pub id: u64,
    /// From 1 on.
    pub tokens: u32,
    pub arrived: Micros,
    /// When its answer is of no use any more.
    pub deadline: Option<Micros>,
    /// What it matters beside others: higher classes go first.
    pub class: u8,
    /// Who sent it. Tenants of one class share the devices evenly.
    pub tenant: u32,
    /// Passes over the model that it takes: 1 in an encoder, the number of new tokens in a decoder.
    pub steps: u32,
}

/// What a device does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Batches that it was given and has not finished.
    pub in_flight: u8,
    /// Batches that it takes at most: one that runs, and those behind it.
    pub depth: u8,
    /// When all that it was given is done, as far as is known.
    pub free_at: Micros,
    /// Memory for the intermediate tensors of one batch.
    pub bytes: u64,
}

/// How the tokens of a batch lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Layout {
    /// One sequence behind another, nothing between them.
    Packed,
    /// Each sequence in a row as long as the longest.
    Padded,
    /// Rows of `length` tokens, cut into slots of `slot` tokens that several sequences share; attention is computed over a
    /// slot. With `slot == length` it is TCB's pure ConcatBatching (4.1), else its slotted one (4.2).
    Rows { length: u32, slot: u32 },
}

/// A batch that is to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// An index into [`View::lanes`].
    pub lane: usize,
    pub layout: Layout,
    pub rows: Rows,
    /// How long it will run.
    pub estimate: Micros,
    /// Whether it joins the batch that runs on the lane, in slots whose requests have finished (TCB 4.2.2).
    pub joins: bool,
}

/// Why a request will not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Refusal {
    /// Its deadline is past.
    Expired,
    /// Its deadline will be past when the device is done with it.
    Hopeless,
    /// No device has the memory, or no row the length, for it alone.
    TooLarge,
}

/// What is to be done now. A request that is run or refused waits no more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// Batches, in the order in which each lane runs its own. A lane takes all of them, also where they are more than its
    /// `depth`.
    pub run: Vec<Planned>,
    pub refuse: Vec<(u64, Refusal)>,
    /// When to ask again, if nothing arrives or finishes before.
    pub wake: Option<Micros>,
}

/// What a scheduler decides on.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub now: Micros,
    pub waiting: Queue<'a>,
    pub lanes: &'a [Lane],
    pub costs: &'a dyn Costs,
}

impl View<'_> {
    /// The memory of the lane that has most.
    fn most_bytes(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.bytes).max().unwrap_or(0)
    }
}

/// Ids, hashed by one multiplication: they are given by the driver, and nobody chooses them to collide.
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
        // The golden ratio, as Knuth has it: neighbours lie far apart.
        self.0 = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// Decides what runs next. It may keep what it has seen between decisions: requests come into [`View::waiting`] at its end, and
/// leave it when they were decided on or when their sender has gone.
pub trait Scheduler: Send {
    fn decide(&mut self, view: &View<'_>) -> Decision;

    /// Tells that requests have finished, also those of a batch that still runs (early memory cleaning, TCB 4.2.2).
    fn finished(&mut self, ids: &[u64], lane: usize) {
        let _ = (ids, lane);
    }
}

/// What the schedulers are made with.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The latency that is aimed at: half of it ends the waiting of the lazy schedulers, and four times it raise a request by a
    /// class in `packed`.
    pub slo: Micros,
    /// How long the lazy schedulers wait for more requests at most.
    pub timeout: Micros,
    /// Requests in a padded batch at most (TurboTransformers: 20).
    pub most: usize,
    /// Rows of TCB's batches, and requests in a batch of `tnb` and `ttb` at most (TCB: 64).
    pub rows: u32,
    /// Tokens of a row (TCB: 100 to 400).
    pub length: u32,
    /// The share η of a row that DAS fills by utility alone; q is `1 − η`. Between 0 and 1.
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

/// The schedulers by name, gemmule's own first.
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

/// Why a scheduler cannot be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SchedulerError {
    #[error(
        "there is no scheduler `{name}`{}; there are {}",
        near.as_ref().map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default(),
        NAMES.join(", ")
    )]
    Unknown { name: String, near: Option<String> },
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
                what: "the share that is chosen by utility",
                found: self.dominance.to_string(),
                expected: "a number between 0 and 1, both excluded",
            });
        }
        Ok(())
    }
}

/// The scheduler with this name.
///
/// # Errors
/// An unknown name, and settings that no batch follows from.
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
    let lazy = When::Lazy { timeout, most, slo };
    let das = Which::Das {
        rows,
        length,
        dominance,
    };
    let slotted = Which::SlottedDas { dominance };
    let shared = How::Rows { rows, length };
    let composed = |when, which, how| Box::new(Composed::new(when, which, how));
    Ok(match name {
        "packed" => Box::new(Packed::new(slo)),
        "no-batch" => composed(When::Hungry, Which::Fcfs, How::Single),
        "naive" => composed(When::Hungry, Which::Fcfs, How::Padded { most }),
        "dp" => composed(When::Hungry, Which::Fcfs, How::Dp { most }),
        "lazy-naive" => composed(lazy, Which::Fcfs, How::Padded { most }),
        "lazy-dp" => composed(lazy, Which::Fcfs, How::Dp { most }),
        "tnb" => composed(When::Hungry, das, How::Padded { most: wide }),
        "ttb" => composed(When::Hungry, das, How::Dp { most: wide }),
        "concat-fcfs" => composed(When::Hungry, Which::Fcfs, shared),
        "concat-sjf" => composed(When::Hungry, Which::Sjf, shared),
        "concat-edf" => composed(When::Hungry, Which::Edf, shared),
        "concat-das" => composed(When::Hungry, das, shared),
        "slotted-das" => composed(When::Hungry, slotted, shared),
        _ => {
            return Err(SchedulerError::Unknown {
                name: name.to_owned(),
                near: nearest(name, NAMES.into_iter()).map(str::to_owned),
            });
        }
    })
}
