//! Sources of weights: tensors of a checkpoint, and computed tables.

use std::iter;

use serde::{Deserialize, Serialize, de::Error};

mod tables;
#[cfg(test)]
mod tests;

pub use tables::{Buckets, Positions, Sinusoid, slope};

/// Source of a weight: a tensor of the checkpoint, or a value computed at load time.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WeightExpr {
    /// A tensor of the checkpoint. `name` is its published name without the checkpoint's prefix, such as `bert.`.
    Stored { name: String, dims: Vec<u64> },
    /// The transpose of a matrix of the checkpoint; `dims` are its stored dimensions.
    Transposed { name: String, dims: Vec<u64> },
    /// A computed table of sinusoidal position embeddings, `[rows, width]`.
    Sinusoid {
        style: Sinusoid,
        rows: u64,
        width: u64,
    },
    /// Biases of attention scores for each distance between query and key, `[heads, 2·reach + 1]`. They are read from a table of the
    /// checkpoint with dimensions `dims` and one row per bucket of distances.
    RelativeBias {
        name: String,
        dims: [u64; 2],
        buckets: Buckets,
    },
    /// The vectors for each distance between query and key, `[2·farthest + 1, width]`. They are rows of the checkpoint's table of relative
    /// positions, which has dimensions `dims`.
    Positions {
        name: String,
        dims: [u64; 2],
        positions: Positions,
    },
    /// The computed ALiBi slope of each head times `scale`, `[heads]`.
    Slopes { heads: u64, scale: Factor },
    /// Rows of a checkpoint tensor with stored dimensions `dims`:
    ///
    /// 1. The rows of the tensor form `groups` equal parts.
    /// 2. `rows` rows of each part are read, starting at row `from` of the part.
    /// 3. The first `interleaved` of these rows (an even number) are reordered: rows at even positions precede rows at odd positions.
    Rows {
        name: String,
        dims: Vec<u64>,
        groups: u64,
        from: u64,
        rows: u64,
        interleaved: u64,
    },
    /// A tensor of the checkpoint plus 1, elementwise.
    PlusOne { name: String, dims: Vec<u64> },
    /// A matrix `[heads·to, heads·from]` of ones and zeros that resizes heads of `from` elements to `to` elements. New elements are 0, and
    /// elements beyond `to` are dropped.
    ResizedHeads { heads: u64, from: u64, to: u64 },
    /// A vector of zeros, for example the bias of a norm that has none.
    Zeros { n: u64 },
    /// A vector of ones: the weight of a norm that has none.
    Ones { n: u64 },
    /// Tensors stacked along their first dimension.
    ConcatRows(#[serde(deserialize_with = "parts")] Vec<WeightExpr>),
    /// Scales for the result of a matrix product in E4M3, one for each row of the weight. Each is the scale of the weight's row times the
    /// scale of the input.
    ProductScales {
        #[serde(deserialize_with = "parts")]
        weight: Vec<WeightExpr>,
        /// Bound on the magnitude of the input, from which its scale is computed.
        input: Bound,
    },
    /// The scale of a value that is stored in E4M3, `[1]`, computed from a bound on the magnitude of the value.
    Scale(Bound),
    /// The scale, `[1]`, that the checkpoint publishes for a KV cache that is stored in E4M3.
    CacheScale {
        /// Name in the checkpoint of the linear layer that computes the cached rows.
        linear: String,
        rows: CacheRows,
    },
    /// A quantized matrix of the checkpoint, with its columns sorted by quantization group.
    OrderedColumns { name: String, dims: [u64; 2] },
    /// A tensor of the checkpoint whose rows (or elements) are reordered like the columns of the matrix `by`, which is read as
    /// [`OrderedColumns`](Self::OrderedColumns). The tensor consists of equal parts. Each part has one row for each column of `by`.
    OrderedRows {
        name: String,
        dims: Vec<u64>,
        /// Name of the matrix whose column order is used. `by_dims` are its dimensions.
        by: String,
        by_dims: [u64; 2],
    },
    /// A matrix of the checkpoint. Its first `interleaved` columns (an even number) are reordered: columns at even positions precede
    /// columns at odd positions.
    InterleavedColumns {
        name: String,
        dims: [u64; 2],
        interleaved: u64,
    },
}

/// An f32 factor of a computed weight, stored as bits. Factors are equal if their bits are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Factor(u32);

impl Factor {
    pub const fn new(factor: f32) -> Self {
        Self(factor.to_bits())
    }

    pub const fn get(self) -> f32 {
        f32::from_bits(self.0)
    }
}

/// Kind of the rows of a KV cache: keys or values.
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
    /// The linear layer after the norm, if the value is a result of this layer; `None` if the value is the result of the norm.
    pub linear: Option<BoundLinear>,
}

/// The linear layer of a [`Bound`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BoundLinear {
    #[serde(deserialize_with = "parts")]
    pub weight: Vec<WeightExpr>,
    /// Bias of the linear layer; empty if there is none.
    #[serde(deserialize_with = "parts")]
    pub bias: Vec<WeightExpr>,
    /// First output that the value depends on.
    pub from: u64,
    /// Number of outputs that the value depends on.
    pub outputs: u64,
    /// Whether the value is a gate: the activation of the first half of the outputs times the second half.
    pub gated: bool,
}

impl Bound {
    /// Returns the weights from which the bound is computed.
    fn parts(&self) -> impl Iterator<Item = &WeightExpr> {
        let linear = self.linear.iter();
        let linear = linear.flat_map(|linear| linear.weight.iter().chain(&linear.bias));
        self.gamma.iter().chain(&self.beta).chain(linear)
    }

    /// Returns the bound. Each argument has the elements of the weights in the field of [`Bound`] or [`BoundLinear`] with the same name.
    ///
    /// Rounding to E4M3 increases a magnitude by at most a sixteenth. The bound of a linear layer therefore includes the factor `17 / 16`
    /// twice, for the input and for the weight.
    pub fn of(&self, gamma: &[f32], beta: &[f32], weight: &[f32], bias: &[f32]) -> f64 {
        let rows = weight.chunks_exact(gamma.len().max(1)).enumerate();
        let outputs = rows.map(|(row, weight)| {
            let bias = bias.get(row).copied().unwrap_or_default();
            Self::of_output(gamma, beta, weight, bias)
        });
        self.of_outputs(gamma, beta, &outputs.collect::<Vec<_>>())
    }

    /// Returns the bound of one output of a linear layer after the norm. `row` is the row of the weight for this output, and `bias` is its
    /// bias.
    pub fn of_output(gamma: &[f32], beta: &[f32], row: &[f32], bias: f32) -> f64 {
        const ROUNDING: f64 = 17.0 / 16.0;
        let square = sum(row, gamma, |w, g| (w * g).powi(2));
        let constant = sum(row, beta, |w, b| w * b) + f64::from(bias);
        ROUNDING * ROUNDING * ((gamma.len() as f64 * square).sqrt() + constant.abs())
    }

    /// Returns the bound of the value. `outputs` are the bounds of all outputs of the linear layer.
    pub fn of_outputs(&self, gamma: &[f32], beta: &[f32], outputs: &[f64]) -> f64 {
        let largest = |bounds: &mut dyn Iterator<Item = f64>| bounds.fold(0.0, f64::max);
        let Some(linear) = &self.linear else {
            let root = (gamma.len() as f64).sqrt();
            let beta = beta.iter().chain(iter::repeat(&0.0));
            let bounds = gamma.iter().zip(beta);
            return largest(
                &mut bounds.map(|(g, b)| root * f64::from(g.abs()) + f64::from(b.abs())),
            );
        };
        let bounds = &outputs[linear.from as usize..][..linear.outputs as usize];
        match linear.gated {
            true => {
                let (gates, ups) = bounds.split_at(bounds.len() / 2);
                largest(&mut gates.iter().zip(ups).map(|(a, b)| a * b))
            }
            false => largest(&mut bounds.iter().copied()),
        }
    }
}

/// Returns the sum of `term(a[i], b[i])` over all `i`.
fn sum(a: &[f32], b: &[f32], term: impl Fn(f64, f64) -> f64) -> f64 {
    // Independent sums, so that the compiler can vectorize the loop.
    let mut sums = [0.0f64; 8];
    let ((whole, rest), (of_b, rest_of_b)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in whole.iter().zip(of_b) {
        for (sum, (&a, &b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += term(a.into(), b.into());
        }
    }
    let rest = rest.iter().zip(rest_of_b);
    let rest = rest.map(|(&a, &b)| term(a.into(), b.into()));
    sums.into_iter().chain(rest).sum()
}

/// Deserializes the parts of a concatenation. Nested concatenations are rejected, because unlimited
/// nesting would overflow the stack.
fn parts<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<WeightExpr>, D::Error> {
    // Artifacts store a variant by its index. The variants therefore have the same order as in `WeightExpr`, up to the last one that can be
    // a part.
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
        Ones {
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
            Part::Ones { n } => WeightExpr::Ones { n },
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

/// Returns the index of the stored row that becomes row `row` of a part of [`WeightExpr::Rows`]. Both indices are counted from the first
/// row that is read of the part. The first `interleaved` rows of a part are reordered.
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

/// Returns the total number of rows of tensors that are stacked along their first dimension.
fn stacked_rows(parts: &[WeightExpr]) -> u64 {
    parts.iter().filter_map(|p| p.dims().first().copied()).sum()
}

impl WeightExpr {
    pub fn dims(&self) -> Vec<u64> {
        match self {
            WeightExpr::Stored { dims, .. }
            | WeightExpr::PlusOne { dims, .. }
            | WeightExpr::OrderedRows { dims, .. } => dims.clone(),
            WeightExpr::OrderedColumns { dims, .. }
            | WeightExpr::InterleavedColumns { dims, .. } => dims.to_vec(),
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
            WeightExpr::Slopes { heads, .. } => vec![*heads],
            WeightExpr::ResizedHeads { heads, from, to } => {
                vec![heads.saturating_mul(*to), heads.saturating_mul(*from)]
            }
            WeightExpr::Zeros { n } | WeightExpr::Ones { n } => vec![*n],
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
            | WeightExpr::OrderedRows { name, .. }
            | WeightExpr::InterleavedColumns { name, .. } => Some(name),
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
            | WeightExpr::Ones { .. }
            | WeightExpr::ProductScales { .. }
            | WeightExpr::Scale(_)
            | WeightExpr::CacheScale { .. } => None,
        }
    }

    /// Returns the bound from which the scales are computed if the weight is a [`Scale`](Self::Scale) or
    /// [`ProductScales`](Self::ProductScales); `None` for other weights.
    pub fn bound(&self) -> Option<&Bound> {
        match self {
            WeightExpr::ProductScales { input: bound, .. } | WeightExpr::Scale(bound) => {
                Some(bound)
            }
            _ => None,
        }
    }

    /// Returns the name and the stored dimensions of each checkpoint tensor from which the weight is computed, in order.
    pub fn stored(&self) -> Vec<(&str, &[u64])> {
        match self {
            WeightExpr::Stored { name, dims }
            | WeightExpr::Transposed { name, dims }
            | WeightExpr::Rows { name, dims, .. }
            | WeightExpr::PlusOne { name, dims }
            | WeightExpr::OrderedRows { name, dims, .. } => {
                vec![(name, dims)]
            }
            WeightExpr::OrderedColumns { name, dims }
            | WeightExpr::InterleavedColumns { name, dims, .. } => vec![(name, dims)],
            WeightExpr::RelativeBias { name, dims, .. }
            | WeightExpr::Positions { name, dims, .. } => vec![(name, dims)],
            WeightExpr::Sinusoid { .. }
            | WeightExpr::Slopes { .. }
            | WeightExpr::ResizedHeads { .. }
            | WeightExpr::CacheScale { .. }
            | WeightExpr::Zeros { .. }
            | WeightExpr::Ones { .. } => Vec::new(),
            WeightExpr::ConcatRows(parts) => parts.iter().flat_map(WeightExpr::stored).collect(),
            WeightExpr::ProductScales { weight, input } => {
                let parts = weight.iter().chain(input.parts());
                parts.flat_map(WeightExpr::stored).collect()
            }
            WeightExpr::Scale(bound) => bound.parts().flat_map(WeightExpr::stored).collect(),
        }
    }
}
