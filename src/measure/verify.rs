//! Comparison of a model with stored results of another implementation.
//!
//! A reference is a safetensors file. For each case it contains `ids` (packed) and `lens`, both I64, and values by name, F32. If `rows`
//! (I64) is present, values with a row for each token contain only these rows, and their last dimension may be truncated. All other values
//! have the shape of the model's output. Several cases are distinguished by a prefix and a dot, such as `tiny.ids`.

use std::{collections::BTreeMap, path::Path};

use safetensors::{Dtype, SafeTensors};

use crate::{
    engine::{EngineError, Precision, Session},
    files::{self, Kind},
    runtime::{Output, batch::Batch, cpu::ops::PackedWeight, weights::decode},
    tensor::DType,
};

/// Results of another implementation.
#[derive(Clone, Debug)]
pub struct Reference {
    pub cases: Vec<ReferenceCase>,
}

/// A batch with its results.
#[derive(Clone, Debug)]
pub struct ReferenceCase {
    /// Prefix of the case's tensors; empty if the file has only one case.
    pub name: String,
    pub batch: Batch,
    /// Indices of the tokens whose rows are in the reference, for values with a row for each token; `None` if all rows are.
    pub rows: Option<Vec<usize>>,
    /// Shape and values by name.
    pub values: BTreeMap<String, (Vec<u64>, Vec<f32>)>,
}

/// Difference of an output from its reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    pub case: String,
    pub name: String,
    pub max: f32,
    pub mean: f32,
    /// Minimum cosine similarity of a row and its reference.
    pub cosine: f32,
    /// Maximum absolute value of the reference.
    pub largest: f32,
    /// Number of values per row.
    pub width: usize,
    /// Whether every row of the reference has a Euclidean norm of 1.
    pub unit_rows: bool,
}

/// Maximum deviations from a reference that are accepted for a precision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Max difference of a value if every row of the reference has a Euclidean norm of 1, as normalized embeddings have.
    pub unit: f32,
    /// Max difference of a value of any other output. If the largest magnitude in the reference exceeds 1, the difference is divided by it.
    pub max: f32,
    /// Minimum cosine similarity of a row of at least [`Bound::WIDE`] values and its reference.
    pub cosine: f32,
}

impl Comparison {
    /// Compares an output with the same output of another run, row by row.
    pub fn between(got: &Output, want: &Output) -> Self {
        let width = want.shape.last().copied().unwrap_or(1) as usize;
        Self {
            name: want.name.clone(),
            ..compare(&got.values, &want.values, width)
        }
    }
}

impl Bound {
    /// Min row width for which the cosine is checked. In narrow rows, small differences change the direction too much, for example in three
    /// logits near 0.
    pub const WIDE: usize = 32;

    /// Returns the bounds for a precision. They allow for these rounding errors:
    ///
    /// - f32: one rounding per value.
    /// - f16 and bf16: a rounding at every launch, to 11 and 8 bits. The dense layer of a pooler amplifies the errors.
    /// - int8: a rounding of inputs and weights to 8 bits, relative to the maximum of their row. On a CPU that adds two products in 16
    ///   bits, weights are rounded to 7 bits. The bounds also hold for 8-bit weights with a scale per group: their errors are smaller than
    ///   with a scale per row, and their inputs are not rounded to 8 bits.
    /// - fp8: a rounding of the mantissa of each weight to 4 bits.
    /// - int4: a rounding of weights to 16 values over the range of a group of 128 weights.
    pub fn of(precision: impl Into<Precision>) -> Self {
        match precision.into() {
            Precision::F16 => Self {
                unit: 5e-3,
                max: 1.5e-2,
                cosine: 0.9999,
            },
            Precision::Bf16 => Self {
                unit: 5e-2,
                max: 1.2e-1,
                cosine: 0.999,
            },
            Precision::Int8 if PackedWeight::largest_integer() < i8::MAX => Self {
                unit: 1.5e-1,
                max: 3.75e-1,
                cosine: 0.95,
            },
            Precision::Int8 => Self {
                unit: 1e-1,
                max: 2.5e-1,
                cosine: 0.97,
            },
            Precision::Fp8 => Self {
                unit: 1e-1,
                max: 2.5e-1,
                cosine: 0.98,
            },
            Precision::Int4 => Self {
                unit: 3e-1,
                max: 7.5e-1,
                cosine: 0.9,
            },
            Precision::F32 => Self {
                unit: 1e-4,
                max: 1e-4,
                cosine: 0.999_99,
            },
        }
    }

    /// Returns whether a comparison is within the bounds.
    pub fn holds(&self, c: &Comparison) -> bool {
        let max = if c.unit_rows {
            self.unit
        } else {
            self.max * c.largest.max(1.0)
        };
        // A comparison that contains NaN always fails.
        c.max <= max && (c.width < Self::WIDE || c.cosine >= self.cosine)
    }
}

impl Reference {
    /// Reads a reference file.
    ///
    /// # Errors
    /// Returns an error if the file is not a reference, or if a case has no values, since comparing nothing would pass.
    pub fn read(file: &Path) -> Result<Self, EngineError> {
        let broken = |problem: String| EngineError::Reference {
            file: file.to_owned(),
            problem,
        };
        let bytes = files::bytes(file, Kind::Reference)?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|e| broken(e.to_string()))?;
        let names = tensors.names();
        let mut cases = Vec::new();
        for prefix in names.iter().filter_map(|n| n.strip_suffix("ids")) {
            if !prefix.is_empty() && !prefix.ends_with('.') {
                continue;
            }
            let whole = |key: &str| -> Result<Vec<i64>, EngineError> {
                let view = tensors
                    .tensor(&format!("{prefix}{key}"))
                    .map_err(|_| broken(format!("it has `{prefix}ids`, but no `{prefix}{key}`")))?;
                if view.dtype() != Dtype::I64 {
                    return Err(broken(format!(
                        "`{prefix}{key}` is {:?}, expected I64",
                        view.dtype()
                    )));
                }
                Ok(view
                    .data()
                    .as_chunks::<8>()
                    .0
                    .iter()
                    .map(|&b| i64::from_le_bytes(b))
                    .collect())
            };
            let counts = |key: &str| -> Result<Vec<u32>, EngineError> {
                let negative = |_| {
                    broken(format!(
                        "`{prefix}{key}` holds a value below 0 or above 2³²"
                    ))
                };
                whole(key)?
                    .into_iter()
                    .map(u32::try_from)
                    .collect::<Result<_, _>>()
                    .map_err(negative)
            };
            let rows = match names.contains(&format!("{prefix}rows").as_str()) {
                true => Some(counts("rows")?.into_iter().map(|r| r as usize).collect()),
                false => None,
            };
            let mut values = BTreeMap::new();
            let mut others = Vec::new();
            for (name, view) in tensors.iter() {
                let Some(bare) = name.strip_prefix(prefix) else {
                    continue;
                };
                if view.dtype() != Dtype::F32 {
                    let described =
                        ["ids", "lens", "rows"].contains(&bare.rsplit('.').next().unwrap_or(bare));
                    others.extend((!described).then(|| format!("`{name}` is {:?}", view.dtype())));
                } else if view.data().is_empty() {
                    return Err(broken(format!(
                        "the value `{name}` of shape {:?} has no elements, so there is nothing to compare",
                        view.shape()
                    )));
                } else {
                    let shape = view.shape().iter().map(|&d| d as u64).collect();
                    values.insert(bare.to_owned(), (shape, decode(view.data(), DType::F32)));
                }
            }
            if values.is_empty() {
                others.sort_unstable();
                let found = match others.is_empty() {
                    true => String::new(),
                    false => format!(" ({})", others.join(", ")),
                };
                return Err(broken(format!(
                    "it has `{prefix}ids`, but no F32 value to compare with them{found}"
                )));
            }
            cases.push(ReferenceCase {
                name: prefix.trim_end_matches('.').to_owned(),
                batch: Batch::from_packed(counts("ids")?, &counts("lens")?)?,
                rows,
                values,
            });
        }
        if cases.is_empty() {
            return Err(broken("it holds no `ids`".to_owned()));
        }
        cases.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { cases })
    }

    /// Returns the names of all values of all cases.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .cases
            .iter()
            .flat_map(|c| c.values.keys().cloned())
            .collect();
        names.sort();
        names.dedup();
        names
    }
}

impl ReferenceCase {
    /// Runs the case and compares all of its values.
    pub fn compare(&self, session: &mut Session) -> Result<Vec<Comparison>, EngineError> {
        let outputs = session.run(&self.batch)?;
        self.values
            .iter()
            .map(|(name, (shape, want))| {
                let output = outputs.get(name)?;
                let got = self.select(output, shape);
                let got = got.filter(|got| got.len() == want.len());
                let got = got.ok_or_else(|| EngineError::ReferenceShape {
                    case: self.name.clone(),
                    value: name.clone(),
                    found: shape.clone(),
                    expected: output.shape.clone(),
                })?;
                let mut comparison =
                    compare(&got, want, shape.last().copied().unwrap_or(1) as usize);
                (comparison.case, comparison.name) = (self.name.clone(), name.clone());
                Ok(comparison)
            })
            .collect()
    }

    /// Returns the part of an output that the reference contains: all elements, or the first columns of the rows `self.rows`. Returns `None`
    /// if the shape of the reference does not fit the output.
    fn select(&self, output: &Output, shape: &[u64]) -> Option<Vec<f32>> {
        let width = output.shape.last().copied().unwrap_or(1).max(1) as usize;
        let kept = (shape.last().copied().unwrap_or(1) as usize).min(width);
        let n_rows = output.values.len() / width;
        // Whether the output has a row for each token. If every sequence has one token, this is also true for an output with a row for each
        // sequence.
        let per_token = n_rows as u64 == self.batch.extents().tokens;
        let rows = match &self.rows {
            _ if shape == output.shape => return Some(output.values.clone()),
            Some(rows) if per_token => rows,
            _ => return None,
        };
        let rows = rows
            .iter()
            .map(|&r| output.values.get(r * width..r * width + kept));
        let rows: Vec<&[f32]> = rows.collect::<Option<_>>()?;
        Some(rows.concat())
    }
}

fn compare(got: &[f32], want: &[f32], width: usize) -> Comparison {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter()
            .zip(b)
            .map(|(x, y)| f64::from(*x) * f64::from(*y))
            .sum()
    };
    let width = width.max(1);
    let mut result = Comparison {
        case: String::new(),
        name: String::new(),
        max: 0.0,
        mean: 0.0,
        cosine: 1.0,
        largest: want.iter().fold(0.0, |m, v| m.max(v.abs())),
        width,
        unit_rows: want
            .chunks(width)
            .all(|row| (dot(row, row) - 1.0).abs() < 1e-5),
    };
    if got.len() != want.len() {
        return Comparison {
            max: f32::INFINITY,
            mean: f32::INFINITY,
            cosine: -1.0,
            ..result
        };
    }
    let mut sum = 0f64;
    for (g, w) in got.iter().zip(want) {
        let error = (g - w).abs();
        sum += f64::from(error);
        result.max = if error.is_nan() {
            f32::INFINITY
        } else {
            result.max.max(error)
        };
    }
    result.mean = (sum / want.len().max(1) as f64) as f32;
    for (g, w) in got.chunks(width).zip(want.chunks(width)) {
        let cosine = dot(g, w) / (dot(g, g) * dot(w, w)).sqrt();
        result.cosine = if cosine.is_nan() {
            -1.0
        } else {
            result.cosine.min(cosine as f32)
        };
    }
    result
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::TensorView;

    use super::*;

    #[test]
    fn a_reference_with_nothing_to_compare_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("r.safetensors");
        let long = |v: &[i64]| v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let (ids, lens) = (long(&[1, 2, 3]), long(&[3]));
        let error = |more: &[(&str, Dtype, Vec<usize>, &[u8])]| {
            let own = [
                ("a.ids", Dtype::I64, vec![3], &ids[..]),
                ("a.lens", Dtype::I64, vec![1], &lens[..]),
            ];
            let views = own.iter().chain(more).map(|(name, dtype, shape, bytes)| {
                let view = TensorView::new(*dtype, shape.clone(), bytes).expect("it fits");
                (name.to_string(), view)
            });
            let bytes = safetensors::serialize(views, None).expect("it is sound");
            std::fs::write(&file, bytes).expect("it is written");
            let error = Reference::read(&file)
                .map(|r| r.cases)
                .expect_err("refused");
            let folder = folder.path().display().to_string();
            error.to_string().replace(&folder, "[dir]")
        };
        let half = [0; 12];
        insta::assert_snapshot!(error(&[]), @"`[dir]/r.safetensors` is not a reference: it has `a.ids`, but no F32 value to compare with them");
        insta::assert_snapshot!(error(&[("a.hidden", Dtype::F16, vec![3, 2], &half)]), @"`[dir]/r.safetensors` is not a reference: it has `a.ids`, but no F32 value to compare with them (`a.hidden` is F16)");
        insta::assert_snapshot!(error(&[("a.hidden", Dtype::F32, vec![0, 4], &[])]), @"`[dir]/r.safetensors` is not a reference: the value `a.hidden` of shape [0, 4] has no elements, so there is nothing to compare");
        // A case without values is an error even if another case has values.
        let other = [
            ("b.ids", Dtype::I64, vec![3], &ids[..]),
            ("b.lens", Dtype::I64, vec![1], &lens[..]),
            ("b.hidden", Dtype::F32, vec![3, 1], &half),
        ];
        insta::assert_snapshot!(error(&other), @"`[dir]/r.safetensors` is not a reference: it has `a.ids`, but no F32 value to compare with them");
    }

    #[test]
    fn nan_and_missing_values_fail_every_bound() {
        let bound = Bound::of(DType::BF16);
        assert!(bound.holds(&compare(&[0.6, 0.8], &[0.6, 0.8], 2)));
        assert!(!bound.holds(&compare(&[f32::NAN, 0.8], &[0.6, 0.8], 2)));
        assert!(!bound.holds(&compare(&[0.6], &[0.6, 0.8], 2)));
        assert!(!bound.holds(&compare(&[0.8, 0.6], &[0.6, 0.8], 2)));
    }
}
