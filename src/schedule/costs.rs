//! What a batch costs: time and memory, from a table that was measured.

use serde::{Deserialize, Serialize};

use super::{Layout, Micros};
use crate::tensor::Extents;

/// What batches cost on the devices at hand.
pub trait Costs: Send + Sync {
    /// How long a batch runs. `extents` are of what is computed, padding included: see [`Layout::computed`].
    fn time(&self, layout: Layout, extents: &Extents) -> Micros;

    /// Bytes of intermediate tensors that a batch needs. They rise with its tokens and its pairs.
    fn bytes(&self, layout: Layout, extents: &Extents) -> u64;

    /// Tokens that a packed batch of so many is rounded up to on the device: what is between the two is computed anyway.
    fn rounded(&self, tokens: u64) -> u64 {
        tokens
    }
}

impl Layout {
    /// What is computed for sequences of these lengths: with padding, all of it. For rows, the lengths are those of the slots'
    /// contents, which are computed as full slots.
    pub fn computed(self, lens: impl IntoIterator<Item = u32>) -> Extents {
        let (mut tokens, mut pairs, mut batch, mut longest) = (0, 0, 0, 0);
        for len in lens {
            let len = u64::from(len);
            tokens += len;
            pairs += len * len;
            batch += 1;
            longest = len.max(longest);
        }
        match self {
            Self::Packed => of(tokens, batch, longest, pairs),
            Self::Padded => equal(batch, longest),
            Self::Rows { slot, .. } => equal(batch, u64::from(slot)),
        }
    }
}

fn of(tokens: u64, batch: u64, longest: u64, pairs: u64) -> Extents {
    Extents {
        tokens,
        batch,
        longest,
        pairs,
        slots: tokens,
        rows: tokens,
        ..Extents::default()
    }
}

/// So many sequences of one length.
pub(super) fn equal(batch: u64, length: u64) -> Extents {
    let tokens = batch.saturating_mul(length);
    of(tokens, batch, length, tokens.saturating_mul(length))
}

/// A packed batch of so many tokens, in sequences of this length, which need not divide them.
pub(super) fn packed(tokens: u64, mean: f64) -> Extents {
    let pairs = (tokens as f64 * mean) as u64;
    of(
        tokens,
        (tokens as f64 / mean).ceil() as u64,
        mean as u64,
        pairs,
    )
}

/// Values at the crossings of two ascending axes. Between them they are linear in both, as the time of a batch nearly is in its
/// tokens; before the first point as there, and beyond the last `x` in proportion to it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grid {
    pub x: Vec<f64>,
    pub y: Vec<f64>,
    /// One row for each `x`, with one value for each `y`.
    pub values: Vec<Vec<f64>>,
}

/// A table of what batches cost on one device, as TurboTransformers' `cached_cost` (section 5): measured once, and kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostTable {
    /// What was measured, and where.
    pub about: String,
    /// Microseconds of a packed batch by its tokens (`x`) and by pairs over tokens (`y`), which is the length of its sequences
    /// where they are equally long.
    pub packed: Grid,
    /// Microseconds of a padded batch by length (`x`) and number of sequences (`y`), where they were measured. Without it, a
    /// padded batch costs what a packed one of as many tokens does.
    #[serde(default)]
    pub padded: Option<Grid>,
    /// Microseconds for each batch beside what the device takes: to start it, and to read its results.
    #[serde(default)]
    pub overhead: f64,
    #[serde(default)]
    pub bytes: Bytes,
    /// Tokens that batches are rounded up to multiples of; 1 where they are not.
    #[serde(default = "one")]
    pub multiple: u64,
}

/// Memory of a batch: a sum of what grows with its tokens and with pairs of a token and a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bytes {
    pub fixed: u64,
    pub per_token: f64,
    pub per_pair: f64,
}

fn one() -> u64 {
    1
}

/// What is wrong with a table.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CostTableError {
    #[error("it is no table of costs: {problem}; `gemmule serve --write-costs FILE` writes one")]
    Syntax { problem: String },
    #[error(
        "`{grid}.{axis}` is {found}; expected from 1 to {MOST_POINTS} ascending numbers from 1 to {MOST:e}"
    )]
    Axis {
        grid: &'static str,
        axis: char,
        found: String,
    },
    #[error(
        "`{grid}.values` has no value at x {at_x}, y {at_y} (counted from 0); expected one for each x and y, finite and above 0"
    )]
    Value {
        grid: &'static str,
        at_x: usize,
        at_y: usize,
    },
    #[error("`{grid}.values` has {found}; expected {expected}, as its axes say")]
    Shape {
        grid: &'static str,
        found: usize,
        expected: usize,
    },
    #[error("`{name}` is {found}; expected a number from {least} to {MOST:e}")]
    Number {
        name: &'static str,
        found: f64,
        least: u8,
    },
}

const MOST_POINTS: usize = 512;
const MOST: f64 = 1e12;

impl Grid {
    fn check(&self, grid: &'static str) -> Result<(), CostTableError> {
        for (axis, points) in [('x', &self.x), ('y', &self.y)] {
            let ascends = points.windows(2).all(|w| w[0] < w[1]);
            let is_sound = points.iter().all(|v| (1.0..=MOST).contains(v));
            if points.is_empty() || points.len() > MOST_POINTS || !ascends || !is_sound {
                let shown: Vec<String> = points.iter().take(8).map(f64::to_string).collect();
                return Err(CostTableError::Axis {
                    grid,
                    axis,
                    found: format!("[{}]", shown.join(", ")),
                });
            }
        }
        let shape = |found, expected| match found == expected {
            true => Ok(()),
            false => Err(CostTableError::Shape {
                grid,
                found,
                expected,
            }),
        };
        shape(self.values.len(), self.x.len())?;
        for (at_x, row) in self.values.iter().enumerate() {
            shape(row.len(), self.y.len())?;
            let bad = |v: &f64| !(*v > 0.0 && *v <= MOST);
            if let Some(at_y) = row.iter().position(bad) {
                return Err(CostTableError::Value { grid, at_x, at_y });
            }
        }
        Ok(())
    }

    /// Makes values rise along both axes: a batch with more in it never costs less, whatever noise was measured.
    fn made_monotone(mut self) -> Self {
        let mut before: Vec<f64> = vec![0.0; self.y.len()];
        for row in &mut self.values {
            let mut left = 0.0_f64;
            for (value, above) in row.iter_mut().zip(&mut before) {
                left = value.max(*above).max(left);
                (*value, *above) = (left, left);
            }
        }
        self
    }

    fn at(&self, x: f64, y: f64) -> f64 {
        let (last, beyond) = match self.x.last() {
            Some(&last) if x > last => (last, x / last),
            _ => (x, 1.0),
        };
        let (i, t) = place(&self.x, last);
        let (j, u) = place(&self.y, y);
        let value = |i: usize, j: usize| {
            let row = self.values.get(i).or(self.values.last());
            row.and_then(|row| row.get(j).or(row.last()))
                .copied()
                .unwrap_or(0.0)
        };
        let between = |i| value(i, j) + (value(i, j + 1) - value(i, j)) * u;
        let low = between(i);
        (low + (between(i + 1) - low) * t) * beyond
    }
}

/// The point of an axis that is at or before `v`, and the share of the way to the next one; outside, the end.
fn place(axis: &[f64], v: f64) -> (usize, f64) {
    let after = axis.partition_point(|&p| p <= v);
    let Some(i) = after.checked_sub(1) else {
        return (0, 0.0);
    };
    match axis.get(after) {
        None => (i, 0.0),
        Some(&next) => (i, (v - axis[i]) / (next - axis[i])),
    }
}

impl CostTable {
    /// Reads a table in RON.
    ///
    /// # Errors
    /// Text that is no table, and a table that no cost follows from; the message names the field.
    pub fn parse(text: &str) -> Result<Self, CostTableError> {
        let table: Self = ron::from_str(text).map_err(|error| CostTableError::Syntax {
            problem: error.to_string(),
        })?;
        table.checked()
    }

    /// The table with times that rise with the size of the batch.
    ///
    /// # Errors
    /// A table that no cost follows from.
    pub fn checked(mut self) -> Result<Self, CostTableError> {
        self.packed.check("packed")?;
        if let Some(padded) = &self.padded {
            padded.check("padded")?;
        }
        let numbers = [
            ("overhead", self.overhead, 0),
            ("bytes.fixed", self.bytes.fixed as f64, 0),
            ("bytes.per_token", self.bytes.per_token, 0),
            ("bytes.per_pair", self.bytes.per_pair, 0),
            ("multiple", self.multiple as f64, 1),
        ];
        for (name, found, least) in numbers {
            if !(f64::from(least)..=MOST).contains(&found) {
                return Err(CostTableError::Number { name, found, least });
            }
        }
        self.packed = self.packed.made_monotone();
        self.padded = self.padded.map(Grid::made_monotone);
        Ok(self)
    }

    /// The table as [`parse`](Self::parse) reads it.
    ///
    /// # Errors
    /// What the writer of RON refuses.
    pub fn to_ron(&self) -> Result<String, CostTableError> {
        let pretty = ron::ser::PrettyConfig::new().compact_arrays(true);
        ron::ser::to_string_pretty(self, pretty).map_err(|error| CostTableError::Syntax {
            problem: error.to_string(),
        })
    }
}

impl Costs for CostTable {
    fn time(&self, layout: Layout, extents: &Extents) -> Micros {
        let run = match (layout, &self.padded) {
            (Layout::Padded, Some(padded)) => {
                // Beyond the largest number that was measured, batches of that number run one after another.
                let most = padded.y.last().copied().unwrap_or(1.0);
                let batch = (extents.batch as f64).max(1.0);
                let rounds = (batch / most).max(1.0);
                padded.at(extents.longest as f64, batch.min(most)) * rounds
            }
            _ => {
                let tokens = (extents.tokens as f64).max(1.0);
                self.packed.at(tokens, extents.pairs as f64 / tokens)
            }
        };
        Micros((run + self.overhead).ceil() as u64)
    }

    fn bytes(&self, _: Layout, extents: &Extents) -> u64 {
        let Bytes {
            fixed,
            per_token,
            per_pair,
        } = self.bytes;
        let grown = extents.tokens as f64 * per_token + extents.pairs as f64 * per_pair;
        fixed.saturating_add(grown as u64)
    }

    fn rounded(&self, tokens: u64) -> u64 {
        tokens.next_multiple_of(self.multiple.max(1))
    }
}
