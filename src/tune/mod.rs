//! Which of several kernels a step launches, and for which batches: what there is to choose from,
//! the measurements that decide, and the file that keeps the picks.
//!
//! All of it is pure. The engine compiles the candidates, times them on a card and stores files; the
//! lowering asks [`Picks::ranges`], or takes [`Problem::guess`] where nothing was measured.
//!
//! - [`Problem`]: what a step asks for, whichever kernel serves it;
//! - [`Choice`]: one of the kernels that can;
//! - [`Range`]: a choice with the largest size that it is for;
//! - [`Schedule`]: what is raced against what at which sizes;
//! - [`between`]: times at sizes that were not measured;
//! - [`settle`]: from timings to ranges;
//! - [`chain`]: choices exchanged one at a time in a whole program;
//! - [`mend`]: from what they took there to ranges, by the cost model's ratios;
//! - [`ranges_of`]: both together;
//! - [`Picks`]: ranges by problem, for one card and one NVRTC, as a file that people can read.

pub mod chain;
mod choice;
mod error;
mod interpolate;
mod invariant;
mod mend;
mod picks;
mod problem;
mod raced;
mod schedule;
mod settle;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use choice::Choice;
pub use error::PicksError;
pub use interpolate::between;
pub use invariant::NotInvariant;
pub use mend::mend;
pub use picks::{Card, MOST_BYTES, Made, Picked, Picks, Timing};
pub use problem::{Counted, LinearLayerNorm, Problem};
pub use raced::{Coupled, Pick, Raced, ranges_of};
pub use schedule::{Heat, Schedule};
pub use settle::{Sample, settle};

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Effort {
    /// A few sizes, and of the candidates those that the cost model puts first.
    Quick,
    /// Many sizes and all candidates.
    Full,
    /// In whole programs, where kernels follow one another.
    Chain,
}

impl Effort {
    /// Most kernels that one problem is compiled with: each costs a few tenths of a second of NVRTC.
    pub const fn most_ranges(self) -> usize {
        match self {
            Effort::Quick => 4,
            Effort::Full | Effort::Chain => 6,
        }
    }
}

impl fmt::Display for Effort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Effort::Quick => "quick",
            Effort::Full => "full",
            Effort::Chain => "chain",
        })
    }
}

/// Where the kernels of a problem come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A file, or the artifact.
    Given,
    /// Measured on this card by an earlier run.
    Kept,
    Measured,
    /// Picks that come with gemmule for this card.
    Shipped,
    /// The cost model.
    Guess,
}

impl Origin {
    /// Whose choice it is.
    pub const fn by(self) -> &'static str {
        match self {
            Origin::Given => "the picks that were given",
            Origin::Kept => "earlier measurement",
            Origin::Measured => "measurement",
            Origin::Shipped => "the shipped picks",
            Origin::Guess => "the cost model",
        }
    }

    /// In a sentence.
    pub const fn words(self) -> &'static str {
        match self {
            Origin::Given => "as given",
            Origin::Kept => "measured before",
            Origin::Measured => "measured now",
            Origin::Shipped => "picks that come with gemmule for this card",
            Origin::Guess => "the cost model's guess",
        }
    }
}

/// A choice for all sizes up to one, inclusive, that no range before it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Range {
    /// `None` for all sizes that are left.
    pub up_to: Option<u64>,
    pub choice: Choice,
}

/// The choice that serves a size.
pub fn choice_at(ranges: &[Range], size: u64) -> Option<Choice> {
    ranges
        .iter()
        .find(|range| range.up_to.is_none_or(|most| size <= most))
        .map(|range| range.choice)
}
