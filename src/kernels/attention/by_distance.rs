use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::AttentionError;
use crate::{
    kernels::{Constant, Fill, Param, Role, f32_literal},
    tensor::{DType, Shape, Size},
};

/// What the distance of a key from its query, the key's position less the query's, does to its score: whether the key is
/// attended to, and what is added. Besides the mask of causal attention this is all that stands between scores and softmax:
/// `softmax(scale · q·kᵀ + bias)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ByDistance {
    /// The farthest key that is attended to, on either side; every key, where `None`.
    pub window: Option<u32>,
    /// What is added to scaled scores; nothing, where `None`.
    pub bias: Option<Bias>,
}

/// A bias of scaled scores, an operand of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Bias {
    /// `[heads, 2·reach + 1]`: the bias at distances −reach to reach. Farther keys have that of the last on their side.
    Table { reach: u32 },
    /// `[heads]`: minus so much for each position of distance (ALiBi: Press et al. 2022, section 3).
    Slopes,
}

impl Bias {
    /// The dimensions of the operand.
    pub fn dims(self, heads: u32) -> Vec<u64> {
        match self {
            Bias::Table { reach } => vec![heads.into(), 2 * u64::from(reach) + 1],
            Bias::Slopes => vec![heads.into()],
        }
    }

    /// The bias of a head at a distance, of the operand's elements.
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

impl ByDistance {
    /// Farthest distance that a table of biases or a window may have: beyond any number of positions, and within 32 bits.
    pub const FARTHEST: u32 = 1 << 24;

    /// Whether distances change nothing.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// The keys that the query at `query` of a sequence attends to, of `n_keys` keys.
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

    /// The bias of a head at a distance; 0 where there is none.
    pub fn bias_at(&self, elements: &[f32], head: usize, distance: i64) -> f64 {
        self.bias
            .map_or(0.0, |bias| bias.at(elements, head, distance))
    }

    /// Whether kernels take these distances.
    ///
    /// # Errors
    /// Distances that 32 bits do not hold.
    pub fn check(&self) -> Result<(), AttentionError> {
        let reach = match self.bias {
            Some(Bias::Table { reach }) => reach,
            Some(Bias::Slopes) | None => 0,
        };
        match reach.max(self.window.unwrap_or(0)) {
            distance if distance > Self::FARTHEST => Err(AttentionError::Distance { distance }),
            _ => Ok(()),
        }
    }

    /// The operand of the bias, if there is one.
    pub(in crate::kernels) fn params(&self, heads: u32, dtype: DType) -> Option<Param> {
        let bias = self.bias?;
        let fill = match bias {
            Bias::Table { .. } => Fill::ACTIVATION,
            Bias::Slopes => Fill::Normal {
                mean: 0.05,
                deviation: 0.02,
            },
        };
        let dims = bias.dims(heads).into_iter().map(Size::constant);
        Some(Param {
            name: "bias",
            role: Role::Read {
                element: dtype.into(),
                shape: Shape(dims.collect()),
                fill,
            },
        })
    }

    /// The part of a symbol that tells what distances do; nothing, where they do nothing.
    pub(in crate::kernels) fn suffix(&self) -> String {
        let window = self.window.map(|window| format!("_window{window}"));
        let bias = self.bias.map(|bias| match bias {
            Bias::Table { reach } => format!("_bias{reach}"),
            Bias::Slopes => "_slopes".to_owned(),
        });
        [window, bias].into_iter().flatten().collect()
    }

    /// Constants of `partials/attention_by_distance.cu`, and the factor of scores in the softmax, whose powers are of two: a
    /// bias is added to scores that have it already.
    /// `head` is the CUDA expression of a head's number.
    pub(in crate::kernels) fn constants(
        &self,
        head: &str,
        scale: f32,
    ) -> Vec<(&'static str, Constant)> {
        let log2 = f32_literal(super::view::scale_log2(scale));
        let reach = match self.bias {
            Some(Bias::Table { reach }) => reach,
            Some(Bias::Slopes) | None => 0,
        };
        let scale_log2 = match self.bias {
            Some(_) => f32_literal(1.0),
            None => log2.clone(),
        };
        vec![
            ("by_distance", (!self.is_none()).into()),
            (
                "by_distance_of",
                match self.bias {
                    Some(_) => format!("(bias, {head})"),
                    None => "{}".to_owned(),
                }
                .into(),
            ),
            (
                "first_key",
                if self.window.is_some() { "from" } else { "0" }.into(),
            ),
            ("windowed", self.window.is_some().into()),
            ("window", self.window.unwrap_or(0).into()),
            (
                "bias",
                match self.bias {
                    Some(Bias::Table { .. }) => "table",
                    Some(Bias::Slopes) => "slopes",
                    None => "none",
                }
                .into(),
            ),
            ("reach", reach.into()),
            ("score_log2", log2.into()),
            ("scale_log2", scale_log2.into()),
        ]
    }
}

/// Windows and biases alone and together, causal and not, for tests that compile or run kernels.
pub(in crate::kernels) fn examples() -> [(bool, ByDistance); 5] {
    let by = |window, bias| ByDistance { window, bias };
    [
        (false, by(None, Some(Bias::Table { reach: 128 }))),
        (true, by(None, Some(Bias::Table { reach: 20 }))),
        (false, by(Some(64), None)),
        (true, by(Some(37), None)),
        (false, by(Some(100), Some(Bias::Slopes))),
    ]
}
