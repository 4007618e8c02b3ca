//! A model as plain data: kernels, launches, tensors and weights. Everything that an executor needs
//! and nothing that needs a device, so it can be printed, stored and compared.

mod lower;
mod padding;
mod print;
mod validate;

use serde::{Deserialize, Serialize};

pub use lower::{LowerError, LowerOptions, lower, problems};
pub use padding::Padding;

use crate::{
    graph::WeightExpr,
    kernels::{Class, KernelSpec, Meta},
    plan::UsageRecord,
    tensor::{DType, Extents, Shape, Size, Symbol},
};

/// Index into [`Program::tensors`].
pub type TensorIndex = usize;

/// A compiled model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Storage type of activations and weights.
    pub dtype: DType,
    /// Every kernel once; layers share them.
    pub kernels: Vec<KernelSpec>,
    pub tensors: Vec<Tensor>,
    /// Launches, in order.
    pub steps: Vec<Step>,
    /// Results by name.
    pub outputs: Vec<(String, TensorIndex)>,
}

/// A tensor of a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tensor {
    pub name: String,
    pub dtype: DType,
    pub shape: Shape,
    pub place: Place,
}

/// Where a tensor's bytes are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Place {
    /// Made by the runtime from the batch.
    Batch(Meta),
    /// Loaded once.
    Weight(WeightExpr),
    /// Placed by the planner, from `first` to `last` step (both inclusive). Outputs live to the end.
    Planned { first: u32, last: u32 },
}

/// One launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Name of the value that it computes.
    pub name: String,
    /// Kernels that compute it, the first whose limit holds is launched. All take the same
    /// arguments; the last has no limit.
    pub variants: Vec<Variant>,
    /// Tensors of the kernel's `Read` and `Write` parameters, in the order of the signature.
    pub operands: Vec<TensorIndex>,
    /// What the kernel's `rows` is.
    pub rows: Size,
}

/// A kernel with the batches it is for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Variant {
    /// Index into [`Program::kernels`].
    pub kernel: usize,
    pub limit: Option<Limit>,
}

/// Largest batch that a variant is for, inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Limit {
    Rows(u64),
    Longest(u64),
}

impl Limit {
    fn holds(self, extents: &Extents) -> bool {
        match self {
            Limit::Rows(most) => extents.rows <= most,
            Limit::Longest(most) => extents.longest <= most,
        }
    }
}

impl Step {
    /// The extents with this step's `rows`; `None` where they do not fit 64 bits.
    pub fn extents(&self, batch: &Extents) -> Option<Extents> {
        Some(batch.with_rows(self.rows.eval(batch)?))
    }

    /// Index of the kernel that serves a batch; `extents` come from [`Step::extents`].
    pub fn kernel(&self, extents: &Extents) -> Option<usize> {
        let fits = |v: &&Variant| v.limit.is_none_or(|limit| limit.holds(extents));
        self.variants.iter().find(fits).map(|v| v.kernel)
    }
}

/// A size that does not fit 64 bits.
#[derive(Debug, thiserror::Error)]
#[error("the size of `{tensor}`, {shape}, does not fit 64 bits for this batch; send fewer tokens")]
pub struct SizeOverflow {
    pub tensor: String,
    pub shape: Shape,
}

impl Program {
    /// Tensors that the planner places, in the order of [`Program::usage`].
    pub fn planned(&self) -> impl Iterator<Item = (TensorIndex, &Tensor)> {
        self.tensors
            .iter()
            .enumerate()
            .filter(|(_, t)| matches!(t.place, Place::Planned { .. }))
    }

    /// Bytes of a tensor for a batch.
    pub fn bytes(&self, tensor: &Tensor, extents: &Extents) -> Result<u64, SizeOverflow> {
        tensor
            .shape
            .elements()
            .eval(extents)
            .and_then(|n| n.checked_mul(tensor.dtype.bytes()))
            .ok_or_else(|| SizeOverflow {
                tensor: tensor.name.clone(),
                shape: tensor.shape.clone(),
            })
    }

    /// Usage records of the planned tensors for a batch (TurboTransformers 4.2).
    pub fn usage(&self, extents: &Extents) -> Result<Vec<UsageRecord>, SizeOverflow> {
        self.planned()
            .map(|(_, tensor)| {
                let Place::Planned { first, last } = tensor.place else {
                    unreachable!("`planned` yields planned tensors only")
                };
                let bytes = self.bytes(tensor, extents)?;
                Ok(UsageRecord {
                    first_op: first,
                    last_op: last,
                    bytes,
                })
            })
            .collect()
    }

    /// Bytes of the weights, in their storage type.
    pub fn weight_bytes(&self) -> u64 {
        let none = Extents::default();
        self.tensors
            .iter()
            .filter(|t| matches!(t.place, Place::Weight(_)))
            .filter_map(|t| self.bytes(t, &none).ok())
            .sum()
    }

    /// Floating-point operations of the products of one class, for any batch (ByteTransformer,
    /// table II). All variants of a step compute the same.
    pub fn flop(&self, class: Class) -> Size {
        self.steps
            .iter()
            .filter_map(|step| Some((step, &self.kernels[step.variants.last()?.kernel])))
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
