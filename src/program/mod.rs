//! A model as plain data: kernels, launches, tensors and weights. Everything that an executor needs
//! and nothing that needs a device, so it can be printed, stored and compared.

mod lower;
mod print;

use serde::{Deserialize, Serialize};

pub use lower::{LowerError, lower};

use crate::{
    graph::WeightExpr,
    kernels::{KernelSpec, Meta, Role},
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

    /// Whether a step reads data of this kind.
    pub fn reads(&self, meta: Meta) -> bool {
        self.tensors.iter().any(|t| t.place == Place::Batch(meta))
    }

    /// Checks what an executor relies on, for programs that were read from a file: every index is
    /// in range and every step binds as many tensors as its kernels take. The message says what
    /// does not fit.
    pub fn validate(&self) -> Result<(), String> {
        let n_tensors = self.tensors.len();
        let n_steps = self.steps.len();
        for (name, tensor) in &self.outputs {
            match self.tensors.get(*tensor).map(|t| &t.place) {
                Some(Place::Planned { .. }) => {}
                _ => {
                    return Err(format!(
                        "the output `{name}` is no tensor that a step computes"
                    ));
                }
            }
        }
        for tensor in &self.tensors {
            if let Place::Planned { first, last } = tensor.place
                && (first > last || last as usize >= n_steps)
            {
                return Err(format!(
                    "`{}` lives from step {first} to {last} of {n_steps}",
                    tensor.name
                ));
            }
            if let Place::Weight(expr) = &tensor.place
                && Shape::fixed(&expr.dims()) != tensor.shape
            {
                return Err(format!(
                    "the weight `{}` has another shape than its parts",
                    tensor.name
                ));
            }
        }
        for (at, step) in self.steps.iter().enumerate() {
            let fail = |problem: String| Err(format!("the step `{}` {problem}", step.name));
            if step.variants.last().is_none_or(|v| v.limit.is_some()) {
                return fail("has no kernel for every batch".to_owned());
            }
            if let Some(&operand) = step.operands.iter().find(|&&o| o >= n_tensors) {
                return fail(format!("binds tensor {operand} of {n_tensors}"));
            }
            for variant in &step.variants {
                let Some(kernel) = self.kernels.get(variant.kernel) else {
                    return fail(format!(
                        "launches kernel {} of {}",
                        variant.kernel,
                        self.kernels.len()
                    ));
                };
                self.bindings(at as u32, step, kernel).or_else(fail)?;
            }
        }
        Ok(())
    }

    /// Whether a step binds to each parameter of its kernel a tensor of its type and size.
    fn bindings(&self, at: u32, step: &Step, kernel: &KernelSpec) -> Result<(), String> {
        let params = kernel.as_kernel().params();
        let tensors = params.iter().filter(|p| !matches!(p.role, Role::Count(_)));
        if tensors.clone().count() != step.operands.len() {
            return Err(format!(
                "binds {} tensors to `{}`",
                step.operands.len(),
                kernel.as_kernel().symbol()
            ));
        }
        for (param, &operand) in tensors.zip(&step.operands) {
            let tensor = &self.tensors[operand];
            let (dtype, shape, writes) = match &param.role {
                Role::Read { dtype, shape, .. } => (*dtype, shape, false),
                Role::Write { dtype, shape } => (*dtype, shape, true),
                Role::Count(_) => continue,
            };
            let needed = shape.elements().bind(Symbol::Rows, &step.rows);
            if tensor.dtype != dtype || tensor.shape.elements() != needed {
                return Err(format!(
                    "binds `{}`, {} {}, to `{}`, {dtype} of {needed} elements",
                    tensor.name, tensor.dtype, tensor.shape, param.name
                ));
            }
            match tensor.place {
                Place::Planned { first, last }
                    if first > at || last < at || (writes && first != at) =>
                {
                    return Err(format!("binds `{}` outside its life", tensor.name));
                }
                Place::Batch(_) | Place::Weight(_) if writes => {
                    return Err(format!("writes `{}`, which is only read", tensor.name));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
