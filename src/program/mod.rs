//! A model as plain data: kernels, launches, tensors and weights. It holds all that an executor needs
//! and nothing that needs a device, so it can be printed, stored and compared.

mod attention;
mod buckets;
mod lower;
mod padding;
mod print;
mod step;
mod validate;

use serde::{Deserialize, Serialize};

pub use attention::{AttentionChoice, UnknownAttention};
pub use buckets::Buckets;
pub use lower::{LowerError, LowerOptions, alternatives, lower};
pub use padding::Padding;
#[cfg(test)]
pub(crate) use validate::check_kernel;

pub use step::{LaunchError, Step};

use crate::{
    graph::{Part, WeightExpr},
    kernels::{Class, KernelSpec, Meta, cache::BLOCK},
    plan::UsageRecord,
    tensor::{DType, Element, Extents, Shape, Size, Symbol},
};

/// Index into [`Program::tensors`].
pub type TensorIndex = usize;

/// A compiled model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Storage type of activations and weights.
    pub dtype: DType,
    /// Whether the results are batch-invariant: bitwise independent of the other sequences of the batch. Every step then
    /// has one kernel for all batches, which computes each row in one order of operations.
    pub invariant: bool,
    /// The kernels, without duplicates; layers share them.
    pub kernels: Vec<KernelSpec>,
    pub tensors: Vec<Tensor>,
    /// Launches, in order.
    pub steps: Vec<Step>,
    /// Results by name.
    pub outputs: Vec<(String, TensorIndex)>,
    /// What sequences leave for their later tokens, in the order in which a block of a KV cache holds it.
    pub caches: Vec<Cache>,
    /// The parts of a model that has several, in the order in which a sequence takes them; each step is of one.
    pub parts: Vec<Part>,
}

/// The keys or the values of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    pub name: String,
    pub heads: u32,
    pub head: u32,
    /// The part that adds to it, and whose stream its positions are of.
    pub part: u32,
    /// Whether a sequence has one position in it, however many tokens it has.
    pub one_position: bool,
}

fn block_elements(caches: &[Cache]) -> u64 {
    let of_part = |part: u32| {
        let own = caches.iter().filter(move |c| c.part == part);
        own.map(Cache::elements).sum()
    };
    caches.iter().map(|c| of_part(c.part)).max().unwrap_or(0)
}

impl Cache {
    /// Elements of a block.
    fn elements(&self) -> u64 {
        u64::from(BLOCK) * u64::from(self.heads) * u64::from(self.head)
    }
}

/// A tensor of a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tensor {
    pub name: String,
    pub element: Element,
    pub shape: Shape,
    pub place: Place,
}

/// Where a tensor's memory comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Place {
    /// The runtime writes it from the batch.
    Batch(Meta),
    /// It is loaded once, with the model.
    Weight(WeightExpr),
    /// The planner places it, from step `first` to `last`, both inclusive. Outputs live to the last step.
    Planned { first: u32, last: u32 },
    /// It lies in the blocks of the sequences that go on: one of [`Program::caches`].
    Cached(u32),
}

/// A size that does not fit 64 bits.
#[derive(Debug, thiserror::Error)]
#[error("the size of `{tensor}`, {shape}, does not fit 64 bits for this batch; send fewer tokens")]
pub struct SizeOverflow {
    pub tensor: String,
    pub shape: Shape,
}

pub use crate::graph::NEXT_LOGITS;

impl Program {
    /// The logits by which the program writes, `[batch, vocabulary]`, and the vocabulary; `None` where it does not, or has no
    /// caches.
    pub fn next_logits(&self) -> Option<(TensorIndex, u32)> {
        let (_, tensor) = self.outputs.iter().find(|(name, _)| name == NEXT_LOGITS)?;
        let [rows, vocabulary] = self.tensors[*tensor].shape.0.as_slice() else {
            return None;
        };
        let vocabulary = u32::try_from(vocabulary.as_constant()?).ok()?;
        let is_one = rows.as_symbol() == Some(Symbol::Batch) && !self.caches.is_empty();
        is_one.then_some((*tensor, vocabulary))
    }

    /// How many of the first steps fill the caches; those behind compute outputs alone.
    pub fn steps_to_fill_caches(&self) -> usize {
        let writes = |step: &Step| {
            let n_writes = |&kernel: &usize| self.kernels[kernel].n_writes();
            let n = step.kernels().iter().map(n_writes).max().unwrap_or(0);
            let written = step.operands.iter().rev().take(n);
            let mut places = written.map(|&operand| &self.tensors[operand].place);
            places.any(|place| matches!(place, Place::Cached(_)))
        };
        let last = self.steps.iter().rposition(writes);
        last.map_or(0, |last| last + 1)
    }

    /// Elements of a block of the KV cache: [`BLOCK`] positions of all caches of a stream, of which the largest counts, so
    /// that a block serves any.
    pub fn block_elements(&self) -> u64 {
        block_elements(&self.caches)
    }

    /// Bytes of a block of the KV cache.
    pub fn block_bytes(&self) -> u64 {
        self.block_elements() * self.dtype.bytes()
    }

    /// Index of the first element of a cache in a block of its stream.
    pub fn cache_offset(&self, cache: u32) -> u64 {
        let part = self.caches.get(cache as usize).map(|c| c.part);
        let before = self.caches.iter().take(cache as usize);
        let of_stream = before.filter(|c| Some(c.part) == part);
        of_stream.map(Cache::elements).sum()
    }

    /// The outputs of the part that a batch is for.
    pub fn outputs_of(&self, part: u32) -> impl Iterator<Item = &(String, TensorIndex)> {
        let is_of = move |tensor: TensorIndex| {
            let mut steps = self.steps.iter();
            self.parts.is_empty()
                || steps.any(|step| step.part == part && step.operands.contains(&tensor))
        };
        let outputs = self.outputs.iter();
        outputs.filter(move |(_, tensor)| is_of(*tensor))
    }

    /// The part with this stream.
    pub fn part_of_stream(&self, stream: &str) -> Option<u32> {
        let found = self.parts.iter().position(|part| part.stream == stream);
        found.map(|part| part as u32)
    }

    /// Tensors that the planner places, in the order of [`Program::usage`].
    pub fn planned(&self) -> impl Iterator<Item = (TensorIndex, &Tensor)> {
        self.tensors
            .iter()
            .enumerate()
            .filter(|(_, t)| matches!(t.place, Place::Planned { .. }))
    }

    /// The bytes of a tensor for a batch.
    pub fn bytes(&self, tensor: &Tensor, extents: &Extents) -> Result<u64, SizeOverflow> {
        tensor
            .shape
            .elements()
            .eval(extents)
            .and_then(|n| n.checked_mul(tensor.element.bytes()))
            .ok_or_else(|| SizeOverflow {
                tensor: tensor.name.clone(),
                shape: tensor.shape.clone(),
            })
    }

    /// The steps that a batch launches, each with its kernel. Steps for batches of other sizes are left out.
    ///
    /// # Errors
    /// As [`Step::launch`].
    pub fn launched(&self, extents: &Extents) -> Result<Vec<(&Step, usize)>, LaunchError> {
        let of = |step| Ok(Step::launch(step, extents)?.map(|(kernel, _)| (step, kernel)));
        self.steps
            .iter()
            .filter_map(|step| of(step).transpose())
            .collect()
    }

    /// Usage records of the planned tensors for a batch (TurboTransformers 4.2). A tensor that no
    /// launched step touches has no bytes.
    ///
    /// # Errors
    /// Sizes that do not fit 64 bits, and a batch that some step has no kernel for.
    pub fn usage(&self, extents: &Extents) -> Result<Vec<UsageRecord>, LaunchError> {
        let mut touched = vec![false; self.tensors.len()];
        for step in &self.steps {
            if step.launch(extents)?.is_some() {
                step.operands.iter().for_each(|&o| touched[o] = true);
            }
        }
        Ok(self.records(extents, &touched)?)
    }

    /// Usage records that suffice for every batch none of whose extents is larger than this one's.
    pub fn most_usage(&self, extents: &Extents) -> Result<Vec<UsageRecord>, SizeOverflow> {
        let mut touched = vec![false; self.tensors.len()];
        for step in &self.steps {
            if step.begins_within(extents) {
                step.operands.iter().for_each(|&o| touched[o] = true);
            }
        }
        self.records(extents, &touched)
    }

    fn records(
        &self,
        extents: &Extents,
        touched: &[bool],
    ) -> Result<Vec<UsageRecord>, SizeOverflow> {
        self.planned()
            .map(|(index, tensor)| {
                let Place::Planned { first, last } = tensor.place else {
                    unreachable!("`planned` yields planned tensors only")
                };
                let bytes = match touched[index] {
                    true => self.bytes(tensor, extents)?,
                    false => 0,
                };
                Ok(UsageRecord {
                    first_op: first,
                    last_op: last,
                    bytes,
                })
            })
            .collect()
    }

    /// The bytes of all weights, in their storage type.
    pub fn weight_bytes(&self) -> u64 {
        let none = Extents::default();
        self.tensors
            .iter()
            .filter(|t| matches!(t.place, Place::Weight(_)))
            .filter_map(|t| self.bytes(t, &none).ok())
            .sum()
    }

    /// The floating-point operations of the matrix products of one class, for any batch (ByteTransformer,
    /// table II). Steps that compute one value for different batches do equal work, so only those of the largest batches
    /// are counted.
    pub fn flop(&self, class: Class) -> Size {
        let largest = Extents {
            rows: u64::MAX,
            longest: u64::MAX,
            ..Extents::default()
        };
        self.steps
            .iter()
            .filter_map(|step| Some((step, &self.kernels[*step.dispatch.at(&largest)?])))
            .filter(|(_, kernel)| kernel.class() == class)
            .fold(Size::default(), |sum, (step, kernel)| {
                &sum + &kernel.flop().bind(Symbol::Rows, &step.rows)
            })
    }

    /// Whether a step reads data of this kind.
    pub fn reads(&self, meta: Meta) -> bool {
        self.tensors.iter().any(|t| t.place == Place::Batch(meta))
    }
}
