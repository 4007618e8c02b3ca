//! Cost model: the time and memory of a batch, from a measured table.

use serde::{Deserialize, Serialize};

use super::{Layout, Micros};
use crate::tensor::Extents;

/// Costs of batches on the available devices.
pub trait Costs: Send + Sync {
    /// Returns the running time of a batch. `extents` has the numbers of tokens, sequences and query-key pairs that are computed, including
    /// padding (see [`Layout::computed`]).
    fn time(&self, layout: Layout, extents: &Extents) -> Micros;

    /// Returns the bytes of intermediate tensors that a batch needs. The number grows with the batch's tokens and with its query-key pairs.
    fn bytes(&self, layout: Layout, extents: &Extents) -> u64;

    /// Returns the number of tokens that the device computes for a packed batch of `tokens` tokens. A device may round the number up.
    fn rounded(&self, tokens: u64) -> u64 {
        tokens
    }
}

impl Layout {
    /// Returns the extents that are computed for sequences of lengths `lens`, including padding. For [`Layout::Rows`], `lens` are
    /// the token counts of the slots, each of which is computed as a full slot.
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

/// Extents of `batch` sequences of one length.
pub(super) fn equal(batch: u64, length: u64) -> Extents {
    let tokens = batch.saturating_mul(length);
    of(tokens, batch, length, tokens.saturating_mul(length))
}

/// Extents of a packed batch of `tokens` tokens in sequences of `mean` tokens. `mean` need not divide `tokens`.
pub(super) fn packed(tokens: u64, mean: f64) -> Extents {
    let pairs = (tokens as f64 * mean) as u64;
    of(
        tokens,
        (tokens as f64 / mean).ceil() as u64,
        mean as u64,
        pairs,
    )
}

/// Values at the grid points of two ascending axes. Between grid points, values are interpolated linearly along both axes, because the time
/// of a batch is nearly linear in its tokens. A coordinate outside an axis is replaced by the nearest point of the axis. Beyond the last
/// `x`, the value then grows in proportion to `x`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grid {
    pub x: Vec<f64>,
    pub y: Vec<f64>,
    /// One row per `x`, with one value per `y`.
    pub values: Vec<Vec<f64>>,
}

/// Measured costs of batches on one device, like TurboTransformers' `cached_cost` (section 5).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostTable {
    /// Free-form description of the measurement and the device.
    pub about: String,
    /// Microseconds of a packed batch by its number of tokens (`x`) and its query-key pairs per token (`y`). If all sequences have equal
    /// length, `y` is that length.
    pub packed: Grid,
    /// Measured microseconds of a padded batch by length (`x`) and number of sequences (`y`). If absent, a padded batch costs as much as a
    /// packed batch with the same number of tokens.
    #[serde(default)]
    pub padded: Option<Grid>,
    /// Microseconds of a batch in addition to its device time, for starting it and reading its results.
    #[serde(default)]
    pub overhead: f64,
    #[serde(default)]
    pub bytes: Bytes,
    /// Multiple to which the number of tokens of a batch is rounded up; 1 if it is not rounded.
    #[serde(default = "one")]
    pub multiple: u64,
}

/// Memory of a batch: the sum of a constant, a term proportional to its tokens and a term proportional to its query-key pairs.
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

/// Error in a cost table.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CostTableError {
    #[error("it is not a cost table: {problem}; `gemmule serve --write-costs FILE` writes one")]
    Syntax { problem: String },
    #[error(
        "`{grid}.{axis}` is {found}; expected from 1 to {MAX_POINTS} ascending numbers from 1 to {MAX_VALUE:e}"
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
    #[error(
        "`{grid}.values` has a dimension of {found}; expected {expected}, the length of its axis"
    )]
    Shape {
        grid: &'static str,
        found: usize,
        expected: usize,
    },
    #[error("`{name}` is {found}; expected a number from {least} to {MAX_VALUE:e}")]
    Number {
        name: &'static str,
        found: f64,
        least: u8,
    },
}

const MAX_POINTS: usize = 512;
const MAX_VALUE: f64 = 1e12;

impl Grid {
    fn check(&self, grid: &'static str) -> Result<(), CostTableError> {
        for (axis, points) in [('x', &self.x), ('y', &self.y)] {
            let ascends = points.windows(2).all(|w| w[0] < w[1]);
            let is_sound = points.iter().all(|v| (1.0..=MAX_VALUE).contains(v));
            if points.is_empty() || points.len() > MAX_POINTS || !ascends || !is_sound {
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
            let bad = |v: &f64| !(*v > 0.0 && *v <= MAX_VALUE);
            if let Some(at_y) = row.iter().position(bad) {
                return Err(CostTableError::Value { grid, at_x, at_y });
            }
        }
        Ok(())
    }

    /// Makes the values monotonic along both axes, so that measurement noise cannot make a larger batch cheaper.
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

/// Returns the index of the last point at or before `v`, and the position of `v` in the interval up to the next point, as a fraction.
/// Outside the axis, returns the nearest end.
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
    /// Parses a cost table in RON.
    ///
    /// # Errors
    /// Returns an error if `text` is not a cost table, and the errors of [`checked`](Self::checked).
    pub fn parse(text: &str) -> Result<Self, CostTableError> {
        let table: Self = ron::from_str(text).map_err(|error| CostTableError::Syntax {
            problem: error.to_string(),
        })?;
        table.checked()
    }

    /// Validates the table and makes its times monotonic in the size of the batch.
    ///
    /// # Errors
    /// Returns an error that names the field that is out of range or has the wrong shape.
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
            if !(f64::from(least)..=MAX_VALUE).contains(&found) {
                return Err(CostTableError::Number { name, found, least });
            }
        }
        self.packed = self.packed.made_monotone();
        self.padded = self.padded.map(Grid::made_monotone);
        Ok(self)
    }

    /// Serializes the table in the format that [`parse`](Self::parse) reads.
    ///
    /// # Errors
    /// Returns an error if RON serialization fails.
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
                // Batches are measured up to `most` sequences. A larger batch costs as much as several batches of `most` sequences, run one
                // after another.
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
