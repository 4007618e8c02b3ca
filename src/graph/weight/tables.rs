//! Computed tables of positions and distances.

use serde::{Deserialize, Serialize};

use crate::ops::PositionBias;

/// Frequencies of a table of sines and cosines. Row `p` has `sin(p · f[j])` in the first half of
/// its columns and `cos(p · f[j])` in the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Sinusoid {
    /// `f[j] = 10000^(−2j / width)` (Vaswani et al. 2017, 3.5).
    OverWidth,
    /// `f[j] = 10000^(−j / (width / 2 − 1))`, as in tensor2tensor and fairseq.
    OverHalf,
}

impl Sinusoid {
    /// Returns one element of a table of the given width.
    pub fn at(self, row: u64, column: u64, width: u64) -> f64 {
        let half = width / 2;
        let nth = (column % half.max(1)) as f64;
        let exponent = match self {
            Sinusoid::OverWidth => 2.0 * nth / width as f64,
            Sinusoid::OverHalf => nth / (half as f64 - 1.0),
        };
        let angle = row as f64 * 10_000f64.powf(-exponent);
        match column < half {
            true => angle.sin(),
            false => angle.cos(),
        }
    }
}

/// Assignment of distances to the rows of a bias table (Raffel et al. 2020, section 2.1). Each small distance has its own row. Larger
/// distances share rows: the row index grows with the logarithm of the distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Buckets {
    /// Number of rows in the table.
    pub n: u32,
    /// All distances of at least `reach` use the last row on their side.
    pub reach: u32,
    /// Whether keys after the query have half of the rows to themselves. If false, all of them use the first row.
    pub bidirectional: bool,
}

impl Buckets {
    /// Returns the number of rows for each side of the query.
    fn side_size(self) -> u32 {
        match self.bidirectional {
            true => self.n / 2,
            false => self.n,
        }
    }

    /// Checks the fields. Returns `None` if they are valid, and otherwise a text with the found values and a text with the expected ones.
    pub fn problem(self) -> Option<(String, String)> {
        let exact = self.side_size() / 2;
        if exact == 0 || (self.bidirectional && !self.n.is_multiple_of(2)) {
            let expected = match self.bidirectional {
                true => "an even number of at least 4",
                false => "2 or more",
            };
            return Some((format!("{} buckets", self.n), expected.to_owned()));
        }
        if self.reach <= exact || self.reach > PositionBias::FARTHEST {
            let found = format!("{} buckets up to a distance of {}", self.n, self.reach);
            let farthest = PositionBias::FARTHEST;
            return Some((
                found,
                format!("a distance from {} to {farthest}", exact + 1),
            ));
        }
        None
    }

    /// Returns the row of a distance, which is the key's position minus the query's. Divisions are in f32, as in the library transformers.
    pub fn row(self, distance: i64) -> u64 {
        let side = self.side_size();
        let first = match self.bidirectional && distance > 0 {
            true => u64::from(side),
            false => 0,
        };
        let far = match self.bidirectional {
            true => distance.unsigned_abs(),
            false => distance.min(0).unsigned_abs(),
        };
        let exact = u64::from(side / 2);
        if far < exact {
            return first + far;
        }
        let logarithm = |ratio: f64| ratio.ln() as f32;
        let ratio = logarithm(f64::from(far as f32 / exact as f32))
            / logarithm(f64::from(self.reach) / exact as f64);
        let steps = (ratio * (u64::from(side) - exact) as f32) as u64;
        first + (exact + steps).min(u64::from(side) - 1)
    }
}

/// Assignment of distances to the rows of a table of relative positions, `[2·span, width]`
/// (DeBERTa: He et al. 2021, arXiv:2006.03654, section 3.1, and the code of arXiv:2111.09543). The
/// row is `span + r`, where `r` is the query's position minus the key's, clamped to `−span ..= span
/// − 1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Positions {
    pub span: u32,
    /// If set, distances above half of the span are scaled logarithmically, so that the distance
    /// `reach − 1` has the last row. If `None`, no distance is scaled.
    pub reach: Option<u32>,
}

impl Positions {
    /// Checks the fields. Returns `None` if they are valid, and otherwise a text with the found values and a text with the expected ones.
    pub fn problem(self) -> Option<(String, String)> {
        let Some(reach) = self.reach else {
            return match (1..=PositionBias::FARTHEST).contains(&self.span) {
                true => None,
                false => {
                    let expected = format!("1 to {}", PositionBias::FARTHEST);
                    Some((format!("a span of {}", self.span), expected))
                }
            };
        };
        let found = format!("a span of {} and a reach of {reach}", self.span);
        let middle = self.span / 2;
        if middle < 2 || reach <= middle + 1 || self.farthest().is_none() {
            let expected = format!(
                "a span of at least 4, a reach of at least half of the span plus 2, and the outermost rows within a distance of {}",
                PositionBias::FARTHEST
            );
            return Some((found, expected));
        }
        None
    }

    /// Returns the row of a distance, which is the key's position minus the query's. Logarithms are divided in f32, as in the library
    /// transformers.
    pub fn row(self, distance: i64) -> u64 {
        let span = i64::from(self.span);
        let relative = -distance;
        let bucket = match self.reach {
            None => relative,
            Some(reach) => {
                let middle = span / 2;
                let far = relative.unsigned_abs();
                if far <= middle.unsigned_abs() {
                    relative
                } else {
                    let logarithm = |ratio: f32| f64::from(ratio).ln() as f32;
                    let whole = logarithm(((f64::from(reach) - 1.0) / middle as f64) as f32);
                    let steps = logarithm(far as f32 / middle as f32) / whole;
                    let steps = (steps * (middle - 1) as f32).ceil();
                    relative.signum() * (steps as i64 + middle)
                }
            }
        };
        bucket
            .saturating_add(span)
            .clamp(0, 2 * span - 1)
            .unsigned_abs()
    }

    /// Returns the smallest distance at which the key before the query and the key after it use the two outermost rows of the table. Larger
    /// distances use the same two rows. Returns `None` if the distance exceeds [`PositionBias::FARTHEST`].
    pub fn farthest(self) -> Option<u32> {
        let last = 2 * u64::from(self.span) - 1;
        let is_far = |far: u32| {
            let far = i64::from(far);
            self.row(far) == 0 && self.row(-far) == last
        };
        // Rows are monotonic in the distance.
        let (mut near, mut far) = (0, 1);
        while !is_far(far) {
            if far >= PositionBias::FARTHEST {
                return None;
            }
            (near, far) = (far, 2 * far);
        }
        while far - near > 1 {
            let middle = near + (far - near) / 2;
            match is_far(middle) {
                true => far = middle,
                false => near = middle,
            }
        }
        Some(far)
    }
}

/// Returns the ALiBi slope of a head (Press et al. 2022, section 3, and their code). If the number of heads `n` is a power of two, the
/// slopes are a geometric sequence whose first term and ratio are both 2^(−8 / n). Otherwise, the first heads have the slopes for the next
/// smaller power of two. The other heads have every other slope for the next larger power of two.
pub fn slope(head: u64, heads: u64) -> f64 {
    let power = 1u64 << heads.max(1).ilog2();
    let (nth, of) = match head < power {
        true => (head + 1, power),
        false => (2 * (head - power) + 1, 2 * power),
    };
    2f64.powf(-8.0 * nth as f64 / of as f64)
}
