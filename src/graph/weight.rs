//! Sources of weights: tensors of a checkpoint, and computed tables.

use serde::{Deserialize, Serialize, de::Error};

use crate::ops::PositionBias;

#[cfg(test)]
mod tests;

/// Source of a weight: a tensor of the checkpoint, or a value computed at load time.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WeightExpr {
    /// A tensor with its published name, without the checkpoint's prefix.
    Stored { name: String, dims: Vec<u64> },
    /// The transpose of a matrix of the checkpoint; `dims` are its stored dimensions.
    Transposed { name: String, dims: Vec<u64> },
    /// A computed table of positions, `[rows, width]`.
    Sinusoid {
        style: Sinusoid,
        rows: u64,
        width: u64,
    },
    /// Biases by distance, `[heads, 2·reach + 1]`, from a table of the checkpoint with dimensions
    /// `dims` and one row per bucket.
    RelativeBias {
        name: String,
        dims: [u64; 2],
        buckets: Buckets,
    },
    /// The row of each distance, `[2·farthest + 1, width]`, from a table of relative positions in the checkpoint with dimensions `dims`.
    Positions {
        name: String,
        dims: [u64; 2],
        positions: Positions,
    },
    /// The computed ALiBi slope of each head, `[heads]`.
    Slopes { heads: u64 },
    /// Rows of a checkpoint tensor with stored dimensions `dims`. The rows of the tensor form `groups` equal parts, and `rows` rows of each
    /// part are read, starting at row `from`. The first `interleaved` of these (an even number) are reordered: rows at even positions
    /// precede rows at odd positions.
    Rows {
        name: String,
        dims: Vec<u64>,
        groups: u64,
        from: u64,
        rows: u64,
        interleaved: u64,
    },
    /// A tensor of the checkpoint plus 1.
    PlusOne { name: String, dims: Vec<u64> },
    /// A matrix `[heads·to, heads·from]` of ones and zeros that resizes heads of `from` elements to `to` elements. New elements are 0, and
    /// elements beyond `to` are dropped.
    ResizedHeads { heads: u64, from: u64, to: u64 },
    /// A vector of zeros, for example the bias of a norm without one.
    Zeros { n: u64 },
    /// Tensors stacked along their first dimension.
    ConcatRows(#[serde(deserialize_with = "parts")] Vec<WeightExpr>),
    /// Scales of the outputs of a product in E4M3, `[n]`. Each is the scale of the weight's row times the scale of the input.
    ProductScales {
        #[serde(deserialize_with = "parts")]
        weight: Vec<WeightExpr>,
        /// The bound of the input.
        input: Bound,
    },
    /// The scale of a value that is stored in E4M3, `[1]`.
    Scale(Bound),
    /// The scale that the checkpoint publishes for a cache in E4M3, `[1]`.
    CacheScale {
        /// Name in the checkpoint of the linear layer that computes the rows.
        linear: String,
        rows: CacheRows,
    },
    /// A quantized matrix of the checkpoint, with its columns sorted by quantization group.
    OrderedColumns { name: String, dims: [u64; 2] },
    /// A tensor of the checkpoint whose rows (or elements) are reordered like the columns of the matrix `by`, which is read as
    /// [`OrderedColumns`](Self::OrderedColumns). The tensor consists of equal parts, each with one row for each of these columns.
    OrderedRows {
        name: String,
        dims: Vec<u64>,
        /// Name and dimensions of the matrix.
        by: String,
        by_dims: [u64; 2],
    },
}

/// The rows of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CacheRows {
    Keys,
    Values,
}

/// Upper bound on the magnitude of a value that is computed from a norm. The bound holds for any input of the norm.
///
/// A normalized row of `n` elements has a Euclidean norm of at most `√n`. By the Cauchy–Schwarz inequality, the magnitude of an output of a
/// linear layer, for row `w` of the weight, is at most `√n · ‖w ∘ gamma‖ + |w · beta + bias|`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Bound {
    /// Weight of the norm.
    #[serde(deserialize_with = "parts")]
    pub gamma: Vec<WeightExpr>,
    /// Bias of the norm. Empty if there is none.
    #[serde(deserialize_with = "parts")]
    pub beta: Vec<WeightExpr>,
    /// The linear layer after the norm, if the value is its result.
    pub linear: Option<BoundLinear>,
}

/// The linear layer of a [`Bound`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BoundLinear {
    #[serde(deserialize_with = "parts")]
    pub weight: Vec<WeightExpr>,
    /// Empty if there is none.
    #[serde(deserialize_with = "parts")]
    pub bias: Vec<WeightExpr>,
    /// First output that the value depends on.
    pub from: u64,
    /// Number of outputs that the value depends on.
    pub outputs: u64,
    /// Whether the value is a gate: the product of the first half of the outputs and the second half.
    pub gated: bool,
}

impl Bound {
    /// Returns the weights from which the bound is computed.
    fn parts(&self) -> impl Iterator<Item = &WeightExpr> {
        let linear = self.linear.iter();
        let linear = linear.flat_map(|linear| linear.weight.iter().chain(&linear.bias));
        self.gamma.iter().chain(&self.beta).chain(linear)
    }

    /// Returns the largest magnitude that the value can have, from the values of the weights.
    ///
    /// Rounding to E4M3 increases a magnitude by at most a sixteenth. The bound of a linear layer therefore includes the factor `17 / 16`
    /// twice, for the input and for the weight.
    pub fn of(&self, gamma: &[f32], beta: &[f32], weight: &[f32], bias: &[f32]) -> f64 {
        let n = gamma.len();
        let root = (n as f64).sqrt();
        let beta = |c: usize| beta.get(c).map_or(0.0, |&b| f64::from(b));
        let Some(linear) = &self.linear else {
            let columns = gamma.iter().enumerate();
            let bounds = columns.map(|(c, &g)| root * f64::from(g.abs()) + beta(c).abs());
            return bounds.fold(0.0, f64::max);
        };
        const ROUNDING: f64 = 17.0 / 16.0;
        let output = |row: usize| {
            let weight = weight[row * n..][..n].iter().zip(gamma).enumerate();
            let (mut square, mut constant) = (0.0, 0.0);
            for (c, (&w, &g)) in weight {
                square += (f64::from(w) * f64::from(g)).powi(2);
                constant += f64::from(w) * beta(c);
            }
            let bias = bias.get(row).map_or(0.0, |&b| f64::from(b));
            ROUNDING * ROUNDING * (root * square.sqrt() + (constant + bias).abs())
        };
        let (from, outputs) = (linear.from as usize, linear.outputs as usize);
        let bounds: Vec<f64> = (from..from + outputs).map(output).collect();
        match linear.gated {
            true => {
                let (gates, ups) = bounds.split_at(outputs / 2);
                let products = gates.iter().zip(ups).map(|(a, b)| a * b);
                products.fold(0.0, f64::max)
            }
            false => bounds.into_iter().fold(0.0, f64::max),
        }
    }
}

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

/// Assignment of distances to the rows of a bias table (Raffel et al. 2020, section 2.1). Small distances have one row each; larger
/// distances share rows, in proportion to their logarithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Buckets {
    /// Number of rows in the table.
    pub n: u32,
    /// All distances of at least `reach` use the last row on their side.
    pub reach: u32,
    /// Whether keys after the query use half of the rows; otherwise they use the first row.
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

    /// Returns the problem with these numbers, if any, as (found, expected).
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

    /// Returns the row of a distance, which is the key's position minus the query's. Divisions are
    /// in f32, as in transformers.
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
    /// Returns the problem with these numbers, if any, as (found, expected).
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
                "a span from 4 on, and a reach from half of it and 2 on whose last row is within a distance of {}",
                PositionBias::FARTHEST
            );
            return Some((found, expected));
        }
        None
    }

    /// Returns the row of a distance, which is the key's position minus the query's. Logarithms are
    /// divided in f32, as in transformers.
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

    /// Returns the smallest distance that uses the outermost row of the table on either side. All larger distances use these two rows as
    /// well. Returns `None` if the distance exceeds [`PositionBias::FARTHEST`].
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
/// slopes are a geometric sequence with first term and ratio 2^(−8 / n). Otherwise, the slopes for the next smaller power of two are
/// followed by every other slope for the next larger power of two.
pub fn slope(head: u64, heads: u64) -> f64 {
    let power = 1u64 << heads.max(1).ilog2();
    let (nth, of) = match head < power {
        true => (head + 1, power),
        false => (2 * (head - power) + 1, 2 * power),
    };
    2f64.powf(-8.0 * nth as f64 / of as f64)
}

/// Deserialises the parts of a concatenation. Nested concatenations are rejected, because unlimited
/// nesting would overflow the stack.
fn parts<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<WeightExpr>, D::Error> {
    // Artifacts store the index of a variant, so these variants have the order of `WeightExpr`, up to the last variant that can be a part.
    #[derive(Deserialize)]
    enum Part {
        Stored {
            name: String,
            dims: Vec<u64>,
        },
        Transposed {
            name: String,
            dims: Vec<u64>,
        },
        Sinusoid,
        RelativeBias,
        Positions,
        Slopes,
        Rows {
            name: String,
            dims: Vec<u64>,
            groups: u64,
            from: u64,
            rows: u64,
            interleaved: u64,
        },
        PlusOne {
            name: String,
            dims: Vec<u64>,
        },
        ResizedHeads,
        Zeros {
            n: u64,
        },
        ConcatRows,
        ProductScales,
        Scale,
        CacheScale,
        OrderedColumns,
        OrderedRows {
            name: String,
            dims: Vec<u64>,
            by: String,
            by_dims: [u64; 2],
        },
    }
    let parts = Vec::<Part>::deserialize(from)?;
    let parts = parts.into_iter().map(|part| {
        Ok(match part {
            Part::Stored { name, dims } => WeightExpr::Stored { name, dims },
            Part::Transposed { name, dims } => WeightExpr::Transposed { name, dims },
            Part::Sinusoid
            | Part::RelativeBias
            | Part::Positions
            | Part::Slopes
            | Part::ResizedHeads
            | Part::ConcatRows
            | Part::ProductScales
            | Part::Scale
            | Part::CacheScale
            | Part::OrderedColumns => {
                return Err(D::Error::custom(
                    "a concatenation has a part that is not stored",
                ));
            }
            Part::Rows {
                name,
                dims,
                groups,
                from,
                rows,
                interleaved,
            } => WeightExpr::Rows {
                name,
                dims,
                groups,
                from,
                rows,
                interleaved,
            },
            Part::PlusOne { name, dims } => WeightExpr::PlusOne { name, dims },
            Part::Zeros { n } => WeightExpr::Zeros { n },
            Part::OrderedRows {
                name,
                dims,
                by,
                by_dims,
            } => WeightExpr::OrderedRows {
                name,
                dims,
                by,
                by_dims,
            },
        })
    });
    parts.collect()
}

/// Maps a row of [`WeightExpr::Rows`], whose first `interleaved` rows are reordered, to its index among the stored rows of a part.
pub fn interleaved_row(row: u64, interleaved: u64) -> u64 {
    let half = interleaved / 2;
    match row {
        _ if row >= interleaved => row,
        _ if row < half => 2 * row,
        _ => 2 * (row - half) + 1,
    }
}

/// Returns the element of [`WeightExpr::ResizedHeads`] at a row and a column.
pub fn resized_heads_at(row: u64, column: u64, from: u64, to: u64) -> f32 {
    let is_one = row / to == column / from && row % to == column % from;
    f32::from(u8::from(is_one))
}

/// Returns the total number of rows of stacked tensors.
fn stacked_rows(parts: &[WeightExpr]) -> u64 {
    parts.iter().filter_map(|p| p.dims().first().copied()).sum()
}

impl WeightExpr {
    pub fn dims(&self) -> Vec<u64> {
        match self {
            WeightExpr::Stored { dims, .. }
            | WeightExpr::PlusOne { dims, .. }
            | WeightExpr::OrderedRows { dims, .. } => dims.clone(),
            WeightExpr::OrderedColumns { dims, .. } => dims.to_vec(),
            WeightExpr::Transposed { dims, .. } => dims.iter().rev().copied().collect(),
            WeightExpr::Rows {
                dims, groups, rows, ..
            } => {
                let mut dims = dims.clone();
                if let Some(all) = dims.first_mut() {
                    *all = groups.saturating_mul(*rows);
                }
                dims
            }
            WeightExpr::Sinusoid { rows, width, .. } => vec![*rows, *width],
            WeightExpr::RelativeBias { dims, buckets, .. } => {
                vec![dims[1], 2 * u64::from(buckets.reach) + 1]
            }
            WeightExpr::Positions {
                dims, positions, ..
            } => {
                let farthest = u64::from(positions.farthest().unwrap_or(0));
                vec![2 * farthest + 1, dims[1]]
            }
            WeightExpr::Slopes { heads } => vec![*heads],
            WeightExpr::ResizedHeads { heads, from, to } => {
                vec![heads.saturating_mul(*to), heads.saturating_mul(*from)]
            }
            WeightExpr::Zeros { n } => vec![*n],
            WeightExpr::ConcatRows(parts) => {
                let mut dims = parts.first().map(WeightExpr::dims).unwrap_or_default();
                if let Some(rows) = dims.first_mut() {
                    *rows = stacked_rows(parts);
                }
                dims
            }
            WeightExpr::ProductScales { weight, .. } => vec![stacked_rows(weight)],
            WeightExpr::Scale(_) | WeightExpr::CacheScale { .. } => vec![1],
        }
    }

    /// Returns the name of the checkpoint tensor that contains row `row` of the matrix; `None` if the row is computed.
    pub fn name_of_row(&self, row: u64) -> Option<&str> {
        match self {
            WeightExpr::Stored { name, .. }
            | WeightExpr::Transposed { name, .. }
            | WeightExpr::Rows { name, .. }
            | WeightExpr::OrderedColumns { name, .. }
            | WeightExpr::OrderedRows { name, .. } => Some(name),
            WeightExpr::ConcatRows(parts) => {
                let mut first = 0;
                let part = parts.iter().find(|part| {
                    first += part.dims().first().copied().unwrap_or(0);
                    row < first
                });
                part?.name_of_row(row)
            }
            WeightExpr::Sinusoid { .. }
            | WeightExpr::RelativeBias { .. }
            | WeightExpr::Positions { .. }
            | WeightExpr::Slopes { .. }
            | WeightExpr::PlusOne { .. }
            | WeightExpr::ResizedHeads { .. }
            | WeightExpr::Zeros { .. }
            | WeightExpr::ProductScales { .. }
            | WeightExpr::Scale(_)
            | WeightExpr::CacheScale { .. } => None,
        }
    }

    /// Returns the tensors of the checkpoint that are used, in order.
    pub fn stored(&self) -> Vec<(&str, &[u64])> {
        match self {
            WeightExpr::Stored { name, dims }
            | WeightExpr::Transposed { name, dims }
            | WeightExpr::Rows { name, dims, .. }
            | WeightExpr::PlusOne { name, dims }
            | WeightExpr::OrderedRows { name, dims, .. } => {
                vec![(name, dims)]
            }
            WeightExpr::OrderedColumns { name, dims } => vec![(name, dims)],
            WeightExpr::RelativeBias { name, dims, .. }
            | WeightExpr::Positions { name, dims, .. } => vec![(name, dims)],
            WeightExpr::Sinusoid { .. }
            | WeightExpr::Slopes { .. }
            | WeightExpr::ResizedHeads { .. }
            | WeightExpr::CacheScale { .. }
            | WeightExpr::Zeros { .. } => Vec::new(),
            WeightExpr::ConcatRows(parts) => parts.iter().flat_map(WeightExpr::stored).collect(),
            WeightExpr::ProductScales { weight, input } => {
                let parts = weight.iter().chain(input.parts());
                parts.flat_map(WeightExpr::stored).collect()
            }
            WeightExpr::Scale(bound) => bound.parts().flat_map(WeightExpr::stored).collect(),
        }
    }
}
