//! Checks of a kernel with a batch: random inputs for the kernel's parameters, and the comparison of results with the reference. Every
//! executor uses these checks.

use std::sync::Arc;

use super::{Case, Fill, HostTensor, Kernel, Role, Tolerance, cache::BLOCK};
use crate::{
    ops::BatchInput,
    tensor::{Element, Extents, LengthsError},
};

/// Inputs of a kernel for one batch, and the results of the kernel's reference.
pub struct Trial {
    pub extents: Extents,
    /// Tensors of the `Read` parameters, in the order of the signature, with their element types.
    pub reads: Vec<(Element, Arc<HostTensor>)>,
    /// Expected tensors of the `Write` parameters, in order, with element types and names.
    pub writes: Vec<(Element, &'static str, HostTensor)>,
}

/// Differences between a result and its reference.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Difference {
    pub max: f32,
    pub mean: f32,
    /// Max ratio of an element's difference to its tolerance. The check passes if this ratio is at most 1.
    pub worst: f32,
    /// Index of the element with the ratio `worst`. `got` and `want` are its values in the result and in the reference.
    pub at: usize,
    pub got: f32,
    pub want: f32,
}

impl Trial {
    /// Creates one trial for each of the kernel's cases that has at most `max_tokens` tokens. The trials share the tensors that do not
    /// depend on the batch, such as weights.
    pub fn all(
        kernel: &dyn Kernel,
        seed: u64,
        max_tokens: u64,
    ) -> Result<Vec<(Case, Self)>, LengthsError> {
        let tokens = |case: &Case| case.lens.iter().map(|&len| u64::from(len)).sum::<u64>();
        let mut shared = vec![None; kernel.params().len()];
        let trial =
            |case: Case| Self::sharing(kernel, &case, seed, &mut shared).map(|trial| (case, trial));
        let cases = kernel.cases().into_iter();
        cases
            .filter(|case| tokens(case) <= max_tokens)
            .map(trial)
            .collect()
    }

    /// Creates random inputs, and computes the reference's results. Inputs are not zero, because zeros would hide unwritten outputs.
    pub fn new(kernel: &dyn Kernel, case: &Case, seed: u64) -> Result<Self, LengthsError> {
        let mut shared = vec![None; kernel.params().len()];
        Self::sharing(kernel, case, seed, &mut shared)
    }

    /// Creates a trial like [`Self::new`]. `shared` has an entry for each parameter. A tensor that does not depend on the batch is taken
    /// from its entry. If the entry is empty, the tensor is created and stored there.
    fn sharing(
        kernel: &dyn Kernel,
        case: &Case,
        seed: u64,
        shared: &mut [Option<Arc<HostTensor>>],
    ) -> Result<Self, LengthsError> {
        let batch = case.extents()?.with_sources(&case.lens, &case.sources);
        let extents = batch.with_rows(kernel.check_rows(&batch));
        let mut reads = Vec::new();
        let mut seeds = seed;
        for (param, shared) in kernel.params().into_iter().zip(shared) {
            if let Role::Read {
                element,
                shape,
                fill,
            } = param.role
            {
                let size = shape.elements();
                let n = size.eval(&extents).unwrap_or(0) as usize;
                // Each tensor has its own seed, so its elements do not depend on which other tensors are shared.
                let mut state = uniform(&mut seeds);
                let is_shared = size.as_constant().is_some() && !fill.depends_on_case();
                let tensor = match shared {
                    Some(known) if is_shared => Arc::clone(known),
                    _ => Arc::new(fill.make(element, n, case, &mut state)),
                };
                if is_shared {
                    *shared = Some(Arc::clone(&tensor));
                }
                reads.push((element, tensor));
            }
        }
        let borrowed: Vec<&HostTensor> = reads.iter().map(|(_, tensor)| &**tensor).collect();
        for (index, tensor) in kernel.derived_inputs(&borrowed) {
            reads[index].1 = Arc::new(tensor);
        }
        let borrowed: Vec<&HostTensor> = reads.iter().map(|(_, tensor)| &**tensor).collect();
        let results = kernel.reference(&extents, &borrowed);
        let written = kernel.params().into_iter().filter_map(|p| match p.role {
            Role::Write { element, .. } => Some((element, p.name)),
            _ => None,
        });
        let writes = written
            .zip(results)
            .map(|((element, name), t)| (element, name, t))
            .collect();
        Ok(Self {
            extents,
            reads,
            writes,
        })
    }
}

impl Case {
    /// Extents of the batch. The number of rows is the number of tokens.
    pub fn extents(&self) -> Result<Extents, LengthsError> {
        Extents::continuing(&self.lens, &self.cached, self.blocks())
    }

    /// Number of keys of each sequence.
    fn keys(&self) -> Vec<u32> {
        let past = self.lens.iter().zip(&self.cached);
        past.map(|(&len, &cached)| len + cached).collect()
    }

    /// Number of blocks of the KV cache: the blocks of all keys, one spare block, and the blocks of the source texts.
    fn blocks(&self) -> u64 {
        let sources = self.sources.iter().map(|n| n.div_ceil(BLOCK));
        u64::from(self.blocks_of_keys() + sources.sum::<u32>())
    }

    /// Returns the indices of [`Fill::TakenRows`] for each sequence. A sequence of one token may have none.
    fn taken(&self) -> Vec<Vec<i64>> {
        let mut first = 0;
        let rows = |(nth, &len): (usize, &u32)| {
            let left_out = i64::from(nth % 3 == 1);
            let start = first;
            first += i64::from(len);
            (start + left_out..first).rev().collect()
        };
        self.lens.iter().enumerate().map(rows).collect()
    }

    fn blocks_of_keys(&self) -> u32 {
        let blocks = self.keys().into_iter().map(|n| n.div_ceil(BLOCK));
        blocks.sum::<u32>() + 1
    }

    /// Returns the cache slots of each source text, in descending order. The blocks of the sources come after the blocks of all keys.
    fn source_slots(&self) -> Vec<Vec<i64>> {
        let mut first = self.blocks_of_keys();
        let of = |&n: &u32| {
            let start = i64::from(first * BLOCK);
            first += n.div_ceil(BLOCK);
            (start..start + i64::from(n)).rev().collect()
        };
        self.sources.iter().map(of).collect()
    }

    /// Returns the cache slots of each sequence's keys, by position. Blocks are allocated from the last to the first.
    fn slots(&self) -> Vec<Vec<i64>> {
        let mut end = i64::from(self.blocks_of_keys());
        let block = i64::from(BLOCK);
        let mut of = |n: u32| {
            let first = end - 1;
            end -= i64::from(n.div_ceil(BLOCK));
            (0..i64::from(n))
                .map(|p| (first - p / block) * block + p % block)
                .collect()
        };
        self.keys().into_iter().map(&mut of).collect()
    }
}

impl Fill {
    /// Whether the values of the elements depend on the batch.
    fn depends_on_case(self) -> bool {
        match self {
            Fill::Normal { .. }
            | Fill::Multiples { .. }
            | Fill::Below(_)
            | Fill::Logits { .. }
            | Fill::Chosen { .. } => false,
            Fill::BatchInput(_)
            | Fill::Choices { .. }
            | Fill::Known
            | Fill::Beams(_)
            | Fill::TakenRows
            | Fill::TakenOffsets => true,
        }
    }

    /// Creates `n` elements for a batch.
    pub fn make(self, element: Element, n: usize, case: &Case, state: &mut u64) -> HostTensor {
        match self {
            Fill::Normal { mean, deviation } => HostTensor::Real(
                (0..n)
                    .map(|_| element.round(mean + deviation * normal(state)))
                    .collect(),
            ),
            Fill::Multiples { largest, unit } => HostTensor::Real(
                (0..n)
                    .map(|_| {
                        let factor = uniform(state) % (2 * u64::from(largest) + 1);
                        element.round((factor as f32 - largest as f32) * unit)
                    })
                    .collect(),
            ),
            Fill::Below(limit) => HostTensor::Index(
                (0..n)
                    .map(|_| (uniform(state) % u64::from(limit.max(1))) as i64)
                    .collect(),
            ),
            Fill::BatchInput(meta) => HostTensor::Index(meta.make(n, case, state)),
            Fill::Logits { vocabulary } => HostTensor::Real(
                (0..n)
                    .map(|i| {
                        let x = 3.0 * normal(state);
                        let is_rounded = i / vocabulary as usize % 3 == 2;
                        element.round(if is_rounded {
                            4.0 * (x / 4.0).round()
                        } else {
                            x
                        })
                    })
                    .collect(),
            ),
            Fill::Choices { vocabulary } => HostTensor::Index(Self::choices(case, vocabulary)),
            Fill::Known => HostTensor::Index(Self::known(case)),
            Fill::Beams(data) => data.make(case),
            Fill::TakenRows => {
                let mut rows = case.taken().concat();
                rows.resize(n, 0);
                HostTensor::Index(rows)
            }
            Fill::TakenOffsets => {
                let ends = case.taken().into_iter().scan(0, |end, rows| {
                    *end += rows.len() as i64;
                    Some(*end)
                });
                HostTensor::Index(std::iter::once(0).chain(ends).collect())
            }
            Fill::Chosen { vocabulary } => HostTensor::Index(
                (0..n)
                    .map(|_| (uniform(state) % u64::from(vocabulary + 4)) as i64 - 4)
                    .collect(),
            ),
        }
    }
}

impl BatchInput {
    fn make(self, n: usize, case: &Case, state: &mut u64) -> Vec<i64> {
        let lens = &case.lens;
        let sums = |of: fn(i64) -> i64| {
            let mut sum = 0;
            let bounds = lens.iter().map(|&len| {
                sum += of(i64::from(len));
                sum
            });
            std::iter::once(0).chain(bounds).collect::<Vec<i64>>()
        };
        match self {
            BatchInput::TokenIds => (0..n).map(|_| (uniform(state) % 1000) as i64).collect(),
            BatchInput::PreviousIds { .. } => {
                (0..n).map(|_| (uniform(state) % 1000) as i64).collect()
            }
            BatchInput::TypeIds => (0..n).map(|_| (uniform(state) % 2) as i64).collect(),
            BatchInput::Positions => {
                let past = lens.iter().zip(&case.cached);
                past.flat_map(|(&len, &cached)| (0..len).map(move |i| i64::from(cached + i)))
                    .collect()
            }
            BatchInput::CuLens | BatchInput::PooledCuLens => sums(|len| len),
            BatchInput::PooledTokens => (0..n as i64).collect(),
            BatchInput::PairOffsets => sums(|len| len * len),
            BatchInput::Mask => {
                let longest = i64::from(lens.iter().copied().max().unwrap_or(0));
                let row = |&len: &u32| (0..longest).map(move |i| i64::from(i < i64::from(len)));
                lens.iter().flat_map(row).collect()
            }
            BatchInput::ValidLens => {
                let valid = |&len: &u32| 1 + (uniform(state) % u64::from(len.max(1))) as i64;
                lens.iter().map(valid).collect()
            }
            BatchInput::Slots => case.slots().concat(),
            BatchInput::TokenSlots => {
                let past = case.slots().into_iter().zip(&case.cached);
                past.flat_map(|(slots, &cached)| slots[cached as usize..].to_vec())
                    .collect()
            }
            BatchInput::SlotStarts => {
                let keys = case.keys();
                let starts = keys.iter().scan(0, |next, &n| {
                    let start = *next;
                    *next += i64::from(n);
                    Some(start)
                });
                starts.collect()
            }
            BatchInput::KeyLens => case.keys().into_iter().map(i64::from).collect(),
            BatchInput::SourceSlots => case.source_slots().concat(),
            BatchInput::SourceStarts => {
                let starts = case.sources.iter().scan(0, |next, &n| {
                    let start = *next;
                    *next += i64::from(n);
                    Some(start)
                });
                starts.collect()
            }
            BatchInput::Seeds => (0..n).map(|_| i64::from(uniform(state) as i32)).collect(),
            BatchInput::SourceLens => case.sources.iter().map(|&n| i64::from(n)).collect(),
        }
    }
}

impl Tolerance {
    /// Compares a result with the reference. A non-finite value differs infinitely from a finite reference. A NaN in the reference marks an
    /// element that the kernel must not write. The element must still have the NaN with which the output was filled.
    pub fn compare(&self, got: &[f32], want: &[f32]) -> Difference {
        let mut difference = Difference::default();
        if got.len() != want.len() {
            return Difference {
                max: f32::INFINITY,
                worst: f32::INFINITY,
                ..difference
            };
        }
        let mut sum = 0f64;
        for (at, (&got, &want)) in got.iter().zip(want).enumerate() {
            let error = match (got - want).abs() {
                _ if got.is_nan() && want.is_nan() => 0.0,
                error if error.is_nan() => f32::INFINITY,
                error => error,
            };
            sum += f64::from(error);
            difference.max = difference.max.max(error);
            let worst = match error {
                // Do not divide an error of 0 or infinity by the tolerance. The tolerance may be 0, infinite or NaN, so the quotient could
                // be NaN.
                0.0 | f32::INFINITY => error,
                error => error / (self.absolute + self.relative * want.abs()),
            };
            if worst > difference.worst {
                difference = Difference {
                    worst,
                    at,
                    got,
                    want,
                    ..difference
                };
            }
        }
        difference.mean = (sum / want.len().max(1) as f64) as f32;
        difference
    }
}

/// Returns the next number of SplitMix64 (Steele, Lea, Flood 2014).
pub fn uniform(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns an approximately standard normal value: a scaled sum of four uniform values (Irwin-Hall distribution). The distribution has no
/// far tail, which suits tests of low-precision kernels. A value needs only one 64-bit random number.
pub fn normal(state: &mut u64) -> f32 {
    let bits = uniform(state);
    let part = |shift: u32| ((bits >> shift) & 0xffff) as u32;
    let sum = part(0) + part(16) + part(32) + part(48);
    // Each of the four values is uniform on 0..65536, with variance 65536²/12. The variance of the sum of four is 65536²/3.
    (sum as f32 - 131_070.0) / 37_837.23
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_centered_with_unit_deviation() {
        let mut state = 7;
        let n = 100_000;
        let values: Vec<f64> = (0..n).map(|_| f64::from(normal(&mut state))).collect();
        let mean = values.iter().sum::<f64>() / f64::from(n);
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / f64::from(n);
        assert!(mean.abs() < 0.02, "{mean}");
        assert!((variance - 1.0).abs() < 0.02, "{variance}");
    }

    #[test]
    fn a_result_that_is_nan_never_passes() {
        let tolerance = Tolerance {
            absolute: 1.0,
            relative: 1.0,
            reason: "a test",
        };
        assert!(tolerance.compare(&[1.0, f32::NAN], &[1.0, 2.0]).worst > 1.0);
        assert!(tolerance.compare(&[1.0], &[1.0, 2.0]).worst > 1.0);
        assert!(tolerance.compare(&[1.5, 2.0], &[1.0, 2.0]).worst <= 1.0);
    }

    #[test]
    fn an_element_that_is_nan_in_the_reference_must_not_be_written() {
        let tolerance = Tolerance {
            absolute: 1.0,
            relative: 1.0,
            reason: "a test",
        };
        let want = [1.0, f32::NAN];
        assert_eq!(tolerance.compare(&[1.0, f32::NAN], &want).worst, 0.0);
        assert!(tolerance.compare(&[1.0, 0.0], &want).worst > 1.0);
    }
}
