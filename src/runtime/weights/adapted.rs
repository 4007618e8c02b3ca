//! Weights with low-rank adapters (LoRA) in the layout of torch's parametrizations. An adapter adds the product of two narrow matrices to
//! the weight. The matrices of several adapters are stacked in one tensor.

use std::collections::BTreeMap;

use super::{
    CheckpointError, elements,
    shard::{Place, Shard},
};
use crate::graph::Adapter;

/// Ending of the name of an adapted weight.
const ORIGINAL: &str = ".parametrizations.weight.original";
/// Endings of the names of the two tensors with the adapters of a weight.
const PARTS: [&str; 2] = [
    ".parametrizations.weight.0.lora_A",
    ".parametrizations.weight.0.lora_B",
];

/// Names of the tensors of an adapted weight.
pub(super) struct Names {
    /// Name of the weight without parametrizations.
    pub weight: String,
    pub original: String,
    pub parts: [String; 2],
}

impl Names {
    /// Returns the names of all adapted weights among the tensors of a checkpoint.
    pub fn among<T>(tensors: &BTreeMap<String, T>) -> Vec<Self> {
        let stems = tensors
            .keys()
            .filter_map(|name| name.strip_suffix(ORIGINAL));
        let named = stems.map(|stem| Self {
            weight: format!("{stem}.weight"),
            original: format!("{stem}{ORIGINAL}"),
            parts: PARTS.map(|ending| format!("{stem}{ending}")),
        });
        let is_whole = |names: &Self| names.parts.iter().all(|name| tensors.contains_key(name));
        named.filter(is_whole).collect()
    }
}

/// A weight with adapters. At most one of them is added when the weight is read.
pub(super) struct Adapted {
    original: Place,
    /// The factors of all adapters, each `[adapters, rows, columns]`. For each adapter, `left · right` has the shape of the weight.
    left: Place,
    right: Place,
    names: Names,
    dims: [u64; 2],
    rank: u64,
    adapter: Option<Adapter>,
}

impl Adapted {
    /// Creates the weight from its original tensor and from `a` and `b`, the tensors `lora_A` and `lora_B` of its adapters.
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit each other, or if the number of adapters differs from that in config.json.
    pub fn new(
        names: Names,
        original: Place,
        [a, b]: [Place; 2],
        adapter: Option<Adapter>,
        shards: &[Shard],
    ) -> Result<Self, CheckpointError> {
        let (weight, sides) = (&original.stored.dims, [&a.stored.dims, &b.stored.dims]);
        let wrong = |problem: String| CheckpointError::Adapters {
            file: shards[original.shard].file().to_owned(),
            tensor: names.weight.clone(),
            problem,
        };
        let found = || {
            format!(
                "the weight is {weight:?}, and `lora_A` and `lora_B` are {:?} and {:?}",
                sides[0], sides[1]
            )
        };
        let &[rows, columns] = weight.as_slice() else {
            return Err(wrong(format!("{}; expected a matrix", found())));
        };
        // The adapter adds `B · A` to a linear layer, and `A · B` to an embedding table.
        let fits = |left: &[u64], right: &[u64]| match (left, right) {
            (&[n, r, rank], &[m, other, c]) => {
                (n == m && rank == other && [r, c] == [rows, columns]).then_some((n, rank))
            }
            _ => None,
        };
        let (of_linear, of_table) = (fits(sides[1], sides[0]), fits(sides[0], sides[1]));
        let (left, right, (count, rank)) = match (of_linear, of_table) {
            (Some(fit), None) => (b, a, fit),
            (None, Some(fit)) => (a, b, fit),
            (Some(_), Some(_)) => {
                let problem = format!("{}, so their order is not clear", found());
                return Err(wrong(problem));
            }
            (None, None) => {
                let problem = format!(
                    "{}; expected a product with the shape of the weight for each adapter",
                    found()
                );
                return Err(wrong(problem));
            }
        };
        if let Some(adapter) = &adapter
            && u64::from(adapter.count) != count
        {
            let problem = format!(
                "it has {count} adapters, and config.json names {}",
                adapter.count
            );
            return Err(wrong(problem));
        }
        Ok(Self {
            original,
            left,
            right,
            names,
            dims: [rows, columns],
            rank,
            adapter,
        })
    }

    pub fn shard(&self) -> usize {
        self.original.shard
    }

    pub fn dims(&self) -> &[u64; 2] {
        &self.dims
    }

    /// Reads the weight and adds the chosen adapter. Also returns the number of values that are not finite.
    ///
    /// # Errors
    /// Returns the errors of [`Shard::read`], and an error for elements of a type other than f32, f16 and bf16.
    pub fn read(&self, shards: &[Shard]) -> Result<(Vec<f32>, usize), CheckpointError> {
        let read = |name: &str, place: &Place| {
            let shard = &shards[place.shard];
            let dtype = place.stored.dtype();
            let dtype = dtype.map_err(|found| CheckpointError::DType {
                file: shard.file().to_owned(),
                tensor: name.to_owned(),
                found,
            })?;
            shard.read(name, &place.stored, dtype)
        };
        let (mut values, n_bad) = read(&self.names.original, &self.original)?;
        let Some(adapter) = &self.adapter else {
            return Ok((values, n_bad));
        };
        let part = |place: &Place| {
            let (all, _) = read(&self.names.weight, place)?;
            let n = elements(&place.stored.dims[1..]) as usize;
            let from = n * adapter.index as usize;
            Ok::<Vec<f32>, CheckpointError>(all[from..from + n].to_vec())
        };
        let (left, right) = (part(&self.left)?, part(&self.right)?);
        let (columns, rank) = (self.dims[1] as usize, self.rank as usize);
        if columns == 0 || rank == 0 {
            return Ok((values, n_bad));
        }
        let mut sums = vec![0.0_f64; columns];
        for (row, factors) in values.chunks_mut(columns).zip(left.chunks(rank)) {
            sums.fill(0.0);
            for (factor, other) in factors.iter().zip(right.chunks(columns)) {
                for (sum, value) in sums.iter_mut().zip(other) {
                    *sum += f64::from(*factor) * f64::from(*value);
                }
            }
            for (value, sum) in row.iter_mut().zip(&sums) {
                *value = (f64::from(*value) + adapter.scale * sum) as f32;
            }
        }
        let n_bad = values.iter().filter(|value| !value.is_finite()).count();
        Ok((values, n_bad))
    }
}
