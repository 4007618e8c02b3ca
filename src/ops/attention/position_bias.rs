use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Effects of the distance between a key and its query (key position minus query position): a window that excludes keys, and a
/// bias added to scores. Apart from the causal mask, nothing else affects the scores before the softmax:
/// `softmax(scale · q·kᵀ + bias)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PositionBias {
    /// Max distance, on either side, of keys that are attended to; `None` for all keys.
    pub window: Option<u32>,
    /// Bias added to the scaled scores, if any.
    pub bias: Option<Bias>,
}

/// Bias added to scaled scores, stored in an operand of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Bias {
    /// `[heads, 2·reach + 1]`: the biases at distances −reach to reach. Keys farther away use the outermost value on their side.
    Table { reach: u32 },
    /// `[heads]`: a slope that is multiplied by the distance and subtracted (ALiBi: Press et al. 2022, section 3).
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
    /// Dimensions of the operand.
    pub fn dims(self, heads: u32) -> Vec<u64> {
        match self {
            Bias::Table { reach } => vec![heads.into(), 2 * u64::from(reach) + 1],
            Bias::Slopes => vec![heads.into()],
        }
    }

    /// Returns the bias of a head at a distance, given the operand's elements.
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
    /// Max distance of a bias table or a window: above any number of positions, and within 32 bits.
    pub const FARTHEST: u32 = 1 << 24;

    /// Whether distances have no effect.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
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

    /// Returns the bias of a head at a distance, or 0 without a bias.
    pub fn bias_at(&self, elements: &[f32], head: usize, distance: i64) -> f64 {
        self.bias
            .map_or(0.0, |bias| bias.at(elements, head, distance))
    }

    /// Checks that kernels support these distances.
    ///
    /// # Errors
    /// Returns an error for a window or a reach above [`Self::FARTHEST`].
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
