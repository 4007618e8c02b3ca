//! Compiled models as plain data: kernels, launches, tensors and weights. A program contains
//! everything that an executor needs and nothing that depends on a device, so that it can be
//! printed, stored and compared.

mod attention;
mod buckets;
mod fusions;
mod launches;
mod lower;
mod padding;
mod print;
mod step;
mod validate;

use serde::{Deserialize, Serialize};

pub use attention::{AttentionChoice, UnknownAttention};
pub use buckets::Buckets;
pub use fusions::Fusions;
pub use launches::Launches;
pub use lower::{LowerError, LowerOptions, alternatives, explain, lower};
pub use padding::Padding;
#[cfg(test)]
pub(crate) use validate::check_kernel;

pub use step::{LaunchError, Step};

use crate::{
    graph::{Part, WeightExpr},
    kernels::{
        Class, KernelSpec,
        cache::{BLOCK, Pool},
    },
    ops::BatchInput,
    plan::UsageRecord,
    tensor::{DType, Element, Extents, Format, Shape, Size, Symbol},
};

/// Index into [`Program::tensors`].
pub type TensorIndex = usize;

/// A compiled model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Storage type of activations and weights.
    pub dtype: DType,
    /// Whether the results are batch-invariant: bitwise independent of the other sequences of the batch. Every step then has a single
    /// kernel for all batches, which computes each row with the same order of operations.
    pub invariant: bool,
    /// Distinct kernels; layers share them.
    pub kernels: Vec<KernelSpec>,
    pub tensors: Vec<Tensor>,
    /// Launches, in order.
    pub steps: Vec<Step>,
    /// Outputs by name.
    pub outputs: Vec<(String, TensorIndex)>,
    /// Caches of the sequences, in the order in which a block of the KV cache contains them.
    pub caches: Vec<Cache>,
    /// Parts of a model with several parts, such as an encoder and a decoder, in the order in which a sequence runs them. Each step belongs
    /// to one part. Empty for other models.
    pub parts: Vec<Part>,
}

/// The cached keys or values of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    pub name: String,
    pub heads: u32,
    pub head: u32,
    /// Index in [`Program::parts`] of the part that appends to the cache. A position of the cache is the position of a token in the stream
    /// of that part ([`Part::stream`]).
    pub part: u32,
    /// Whether the cache has exactly one position per sequence, regardless of the sequence's length.
    pub one_position: bool,
    /// Format of the rows. All caches of a program have the same format, because their elements share blocks.
    pub format: Format,
    /// Whether the rows are divided by a scale before they are stored. This applies to all caches of a program or to none.
    pub scaled: bool,
}

fn block_elements(caches: &[Cache]) -> u64 {
    let of_part = |part: u32| {
        let own = caches.iter().filter(move |c| c.part == part);
        own.map(Cache::elements).sum()
    };
    caches.iter().map(|c| of_part(c.part)).max().unwrap_or(0)
}

impl Cache {
    /// Returns the number of elements of this cache in a block of the KV cache.
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
    pub place: Storage,
}

/// Source of a tensor's memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Storage {
    /// Written by the runtime from the batch.
    Batch(BatchInput),
    /// Loaded once, with the model.
    Weight(WeightExpr),
    /// Allocated by the planner; alive from step `first` to `last`, both inclusive. Outputs stay alive until the last step.
    Planned { first: u32, last: u32 },
    /// In the KV cache blocks of the sequences; an index into [`Program::caches`].
    Cached(u32),
}

/// Error for a size that does not fit in 64 bits.
#[derive(Debug, thiserror::Error)]
#[error(
    "the size of `{tensor}`, {shape}, does not fit in 64 bits for this batch; send fewer tokens"
)]
pub struct SizeOverflow {
    pub tensor: String,
    pub shape: Shape,
}

pub use crate::graph::NEXT_LOGITS;
use crate::graph::TOKEN_VECTORS;

impl Program {
    /// Returns the logits for text generation, `[batch, vocabulary]`, and the vocabulary size; `None` if the program has no output
    /// [`NEXT_LOGITS`] of this shape, or no caches.
    pub fn next_logits(&self) -> Option<(TensorIndex, u32)> {
        let (_, tensor) = self.outputs.iter().find(|(name, _)| name == NEXT_LOGITS)?;
        let [rows, vocabulary] = self.tensors[*tensor].shape.0.as_slice() else {
            return None;
        };
        let vocabulary = u32::try_from(vocabulary.as_constant()?).ok()?;
        let is_one = rows.as_symbol() == Some(Symbol::Batch) && !self.caches.is_empty();
        is_one.then_some((*tensor, vocabulary))
    }

    /// Returns the token vectors for late interaction, `[tokens, width]`, and their width; `None` if the program has no output
    /// [`TOKEN_VECTORS`] of this shape.
    pub fn token_vectors(&self) -> Option<(TensorIndex, u32)> {
        let (_, tensor) = self
            .outputs
            .iter()
            .find(|(name, _)| name == TOKEN_VECTORS)?;
        let [rows, width] = self.tensors[*tensor].shape.0.as_slice() else {
            return None;
        };
        let width = u32::try_from(width.as_constant()?).ok()?;
        (rows.as_symbol() == Some(Symbol::Tokens)).then_some((*tensor, width))
    }

    /// Returns the format of the first weight matrix that is not stored in [`Program::dtype`]; `None` if there is no such matrix.
    pub fn weight_format(&self) -> Option<Format> {
        let matrices = self
            .tensors
            .iter()
            .filter(|tensor| tensor.shape.rank() == 2);
        let mut others = matrices.filter_map(|tensor| match tensor.place {
            Storage::Weight(_) => match tensor.element {
                Element::Value(dtype) => Some(Format::Plain(dtype)),
                Element::Scaled(scaled) => Some(Format::Scaled(scaled)),
                Element::E4m3 => Some(Format::FP8),
                Element::I8 | Element::I32 | Element::I64 => None,
            },
            Storage::Batch(_) | Storage::Planned { .. } | Storage::Cached(_) => None,
        });
        others.find(|&format| format != self.dtype.into())
    }

    /// Returns the number of leading steps that are needed to fill the caches. Later steps only
    /// compute outputs.
    pub fn steps_to_fill_caches(&self) -> usize {
        let writes = |step: &Step| {
            let n_writes = |&kernel: &usize| self.kernels[kernel].as_kernel().n_writes();
            let n = step.kernels().iter().map(n_writes).max().unwrap_or(0);
            let written = step.operands.iter().rev().take(n);
            let mut places = written.map(|&operand| &self.tensors[operand].place);
            places.any(|place| matches!(place, Storage::Cached(_)))
        };
        let last = self.steps.iter().rposition(writes);
        last.map_or(0, |last| last + 1)
    }

    /// Returns whether an earlier step computes the weight of a step's linear layer. Kernels load weights before they wait for earlier
    /// kernels, so such a step must not start before earlier steps are complete.
    pub fn computes_weight_of(&self, step: &Step) -> bool {
        step.kernels().into_iter().any(|kernel| {
            let at = self.kernels[kernel].as_kernel().weight_operand();
            let operand = at.and_then(|at| step.operands.get(at));
            operand.is_some_and(|&weight| {
                matches!(self.tensors[weight].place, Storage::Planned { .. })
            })
        })
    }

    /// Returns the number of elements in a block of the KV cache: [`BLOCK`] positions of all caches of a stream ([`Part::stream`]). The
    /// largest stream determines the size, so that any stream can use a block.
    pub fn block_elements(&self) -> u64 {
        block_elements(&self.caches)
    }

    /// Returns the number of bytes in a block of the KV cache.
    pub fn block_bytes(&self) -> u64 {
        self.block_elements() * Element::from(self.cache_format()).bytes()
    }

    /// Returns the format of the KV cache.
    pub fn cache_format(&self) -> Format {
        let first = self.caches.first();
        first.map_or(self.dtype.into(), |cache| cache.format)
    }

    /// Returns the layout of the KV cache's blocks for kernels.
    pub fn pool(&self) -> Pool {
        Pool {
            stride: self.block_elements(),
            format: self.cache_format(),
            scaled: self.caches.first().is_some_and(|cache| cache.scaled),
        }
    }

    /// Returns the offset of a cache in a block of its stream, in bytes.
    pub fn cache_offset_bytes(&self, cache: u32) -> u64 {
        self.cache_offset(cache) * Element::from(self.cache_format()).bytes()
    }

    /// Returns the offset of a cache in a block of its stream, in elements.
    pub fn cache_offset(&self, cache: u32) -> u64 {
        let part = self.caches.get(cache as usize).map(|c| c.part);
        let before = self.caches.iter().take(cache as usize);
        let of_stream = before.filter(|c| Some(c.part) == part);
        of_stream.map(Cache::elements).sum()
    }

    /// Returns the outputs that a part of the model computes.
    pub fn outputs_of(&self, part: u32) -> impl Iterator<Item = &(String, TensorIndex)> {
        let is_of = move |tensor: TensorIndex| {
            let mut steps = self.steps.iter();
            self.parts.is_empty()
                || steps.any(|step| step.part == part && step.operands.contains(&tensor))
        };
        let outputs = self.outputs.iter();
        outputs.filter(move |(_, tensor)| is_of(*tensor))
    }

    /// Returns the index of the part whose stream is `stream`.
    pub fn part_of_stream(&self, stream: &str) -> Option<u32> {
        let found = self.parts.iter().position(|part| part.stream == stream);
        found.map(|part| part as u32)
    }

    /// Returns the tensors that the planner places, in the order of [`Program::usage`].
    pub fn planned(&self) -> impl Iterator<Item = (TensorIndex, &Tensor)> {
        self.tensors
            .iter()
            .enumerate()
            .filter(|(_, t)| matches!(t.place, Storage::Planned { .. }))
    }

    /// Returns the size of a tensor in bytes for a batch.
    pub fn bytes(&self, tensor: &Tensor, extents: &Extents) -> Result<u64, SizeOverflow> {
        let dims = tensor.shape.0.iter().map(|size| size.eval(extents));
        dims.collect::<Option<Vec<u64>>>()
            .and_then(|dims| tensor.element.tensor_bytes(&dims))
            .ok_or_else(|| SizeOverflow {
                tensor: tensor.name.clone(),
                shape: tensor.shape.clone(),
            })
    }

    /// Returns the steps that a batch launches, with the indices of their kernels. Steps for other batches are omitted.
    ///
    /// # Errors
    /// Returns an error if [`Step::launch`] returns one.
    pub fn launched(&self, extents: &Extents) -> Result<Vec<(&Step, usize)>, LaunchError> {
        let of = |step| Ok(Step::launch(step, extents)?.map(|(kernel, _)| (step, kernel)));
        self.steps
            .iter()
            .filter_map(|step| of(step).transpose())
            .collect()
    }

    /// Returns the usage records of the planned tensors for a batch (TurboTransformers 4.2). A
    /// tensor that no launched step uses has zero bytes.
    ///
    /// # Errors
    /// Returns an error if a size does not fit in 64 bits, or if a sequence is too long for a step.
    pub fn usage(&self, extents: &Extents) -> Result<Vec<UsageRecord>, LaunchError> {
        let mut touched = vec![false; self.tensors.len()];
        for step in &self.steps {
            if step.launch(extents)?.is_some() {
                step.operands.iter().for_each(|&o| touched[o] = true);
            }
        }
        Ok(self.records(extents, &touched)?)
    }

    /// Returns usage records that suffice for every batch with extents up to `extents`.
    pub fn max_usage(&self, extents: &Extents) -> Result<Vec<UsageRecord>, SizeOverflow> {
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
                let Storage::Planned { first, last } = tensor.place else {
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

    /// Returns the total bytes of the weights, in their storage types.
    pub fn weight_bytes(&self) -> u64 {
        let none = Extents::default();
        self.tensors
            .iter()
            .filter(|t| matches!(t.place, Storage::Weight(_)))
            .filter_map(|t| self.bytes(t, &none).ok())
            .sum()
    }

    /// Returns the floating-point operations of the matrix products of one class, as a function of
    /// the batch (ByteTransformer, table II). A value may have several alternative steps, each for a range of batches. They do equal work,
    /// so only those for the largest batches are counted.
    pub fn flop(&self, class: Class) -> Size {
        let largest = Extents {
            rows: u64::MAX,
            longest: u64::MAX,
            ..Extents::default()
        };
        self.steps
            .iter()
            .filter_map(|step| Some((step, &self.kernels[*step.dispatch.at(&largest)?])))
            .filter(|(_, kernel)| kernel.as_kernel().class() == class)
            .fold(Size::default(), |sum, (step, kernel)| {
                &sum + &kernel.as_kernel().flop().bind(Symbol::Rows, &step.rows)
            })
    }

    /// Returns the field `first` of each input [`BatchInput::PreviousIds`]: the previous id of a sequence's first token.
    pub fn first_ids(&self) -> impl Iterator<Item = u32> {
        let places = self.tensors.iter().map(|tensor| &tensor.place);
        places.filter_map(|place| match place {
            Storage::Batch(BatchInput::PreviousIds { first }) => Some(*first),
            Storage::Batch(_)
            | Storage::Weight(_)
            | Storage::Planned { .. }
            | Storage::Cached(_) => None,
        })
    }

    /// Returns whether some step reads this batch input.
    pub fn reads(&self, meta: BatchInput) -> bool {
        self.tensors.iter().any(|t| t.place == Storage::Batch(meta))
    }
}
