use std::{
    hash::{Hash, Hasher},
    ops::Range,
};

use serde::{Deserialize, Serialize};

/// Changes to attention scores after scaling and before the softmax, apart from the causal mask: a soft cap, a window that excludes
/// keys, and a bias. The window and the bias depend on the distance: the key position minus the query position. The cap is applied
/// first: `softmax(cap · tanh(scale · q·kᵀ / cap) + bias)`, or `softmax(scale · q·kᵀ + bias)` without a cap. The softmax may also have a
/// sink (gpt-oss: OpenAI 2025, arXiv:2508.10925).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PositionBias {
    /// Max distance, on either side, of keys that are attended to; `None` for all keys.
    pub window: Option<u32>,
    /// Bias added to the scaled scores, if any.
    pub bias: Option<Bias>,
    /// Bound of the scaled scores, if any.
    pub cap: Option<SoftCap>,
    /// Whether each head has a sink: a learned logit that counts as the score of one more key, whose value is 0. The logit is neither
    /// scaled nor capped nor biased, and every query attends to it.
    pub sinks: bool,
}

/// Bound of a soft cap, `cap · tanh(x / cap)`: a finite number above 0 (Gemma Team 2024, arXiv:2408.00118, section 2). Bounds are
/// compared bitwise.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(try_from = "f32", into = "f32")]
pub struct SoftCap(f32);

/// Error of a soft cap whose bound is not supported.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("a soft cap of {0}; expected a number from 1e-30 to 1e30")]
pub struct InvalidSoftCap(f32);

impl SoftCap {
    /// Creates a soft cap.
    ///
    /// # Errors
    /// Returns an error if `cap` is not from 1e-30 to 1e30. Within this range, neither `cap` nor `1 / cap` is subnormal.
    pub fn new(cap: f32) -> Result<Self, InvalidSoftCap> {
        match (1e-30..=1e30).contains(&cap) {
            true => Ok(Self(cap)),
            false => Err(InvalidSoftCap(cap)),
        }
    }

    /// Bound of the results.
    pub const fn get(self) -> f32 {
        self.0
    }

    /// Returns `cap · tanh(x / cap)`.
    pub fn of(self, x: f64) -> f64 {
        let cap = f64::from(self.0);
        cap * (x / cap).tanh()
    }
}

impl TryFrom<f32> for SoftCap {
    type Error = InvalidSoftCap;

    fn try_from(cap: f32) -> Result<Self, InvalidSoftCap> {
        Self::new(cap)
    }
}

impl From<SoftCap> for f32 {
    fn from(cap: SoftCap) -> f32 {
        cap.0
    }
}

impl PartialEq for SoftCap {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for SoftCap {}

impl Hash for SoftCap {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

/// Bias added to scaled scores, stored in an operand of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Bias {
    /// `[heads, 2·reach + 1]`: the biases at distances −reach to reach. Keys farther away use the outermost value on their side.
    Table { reach: u32 },
    /// `[heads]`: a slope that is multiplied by the absolute distance and subtracted (ALiBi: Press et al. 2022, section 3).
    Slopes,
}

/// Error of a window or a table of biases that reaches too far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a window or a table of biases reaches to a distance of {distance}; expected at most {}",
    PositionBias::FARTHEST
)]
pub struct DistanceTooLarge {
    pub distance: u32,
}

impl Bias {
    /// Dimensions of the operand that stores the biases or the slopes.
    pub fn dims(self, heads: u32) -> Vec<u64> {
        match self {
            Bias::Table { reach } => vec![heads.into(), 2 * u64::from(reach) + 1],
            Bias::Slopes => vec![heads.into()],
        }
    }

    /// Returns the bias of a head at a distance. `elements` are the elements of the operand that stores the biases or the slopes.
    pub fn at(self, elements: &[f32], head: usize, distance: i64) -> f64 {
        match self {
            Bias::Table { reach } => {
                let reach = i64::from(reach);
                let column = (distance.clamp(-reach, reach) + reach) as usize;
                f64::from(elements[head * (2 * reach as usize + 1) + column])
            }
            Bias::Slopes => -f64::from(elements[head]) * distance.unsigned_abs() as f64,
        }
    }
}

impl PositionBias {
    /// Max distance of a bias table or a window. It exceeds any number of positions and fits in 32 bits.
    pub const FARTHEST: u32 = 1 << 24;

    /// Returns whether there is no window, no bias, no cap and no sink.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Returns whether there is no window, no bias and no cap. There may be sinks, which change neither the keys nor their scores.
    pub fn keeps_scores(&self) -> bool {
        let without_sinks = Self {
            sinks: false,
            ..*self
        };
        without_sinks.is_none()
    }

    /// Returns whether there is a bias or a cap, which changes the scores of keys that are attended to.
    pub fn adjusts(&self) -> bool {
        self.bias.is_some() || self.cap.is_some()
    }

    /// Range of keys, out of `n_keys`, that the query at position `query` attends to.
    pub fn seen(&self, causal: bool, query: usize, n_keys: usize) -> Range<usize> {
        let after = self
            .window
            .map_or(n_keys, |window| query.saturating_add(window as usize + 1));
        let end = if causal { query + 1 } else { after };
        let first = self
            .window
            .map_or(0, |window| query.saturating_sub(window as usize));
        let end = end.min(n_keys);
        first.min(end)..end
    }

    /// Returns the score of a head at a distance, from the scaled product of query and key.
    pub fn score(&self, scaled: f64, elements: &[f32], head: usize, distance: i64) -> f64 {
        let capped = self.cap.map_or(scaled, |cap| cap.of(scaled));
        let bias = self
            .bias
            .map_or(0.0, |bias| bias.at(elements, head, distance));
        capped + bias
    }

    /// Checks that kernels support the distances that the window and the table of biases cover.
    ///
    /// # Errors
    /// Returns an error if the window or the reach exceeds [`Self::FARTHEST`].
    pub fn check(&self) -> Result<(), DistanceTooLarge> {
        let reach = match self.bias {
            Some(Bias::Table { reach }) => reach,
            Some(Bias::Slopes) | None => 0,
        };
        match reach.max(self.window.unwrap_or(0)) {
            distance if distance > Self::FARTHEST => Err(DistanceTooLarge { distance }),
            _ => Ok(()),
        }
    }
}
