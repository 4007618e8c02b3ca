//! Chains of launches on shared tensors, timed as one unit.

use super::{Fill, Kernel, KernelSpec, Role};
use crate::tensor::{Element, Shape};

/// Kernels that together compute one operation, e.g. scores, softmax and context.
#[derive(Clone, Debug, PartialEq)]
pub struct Chain {
    pub tensors: Vec<ChainTensor>,
    /// Launches in execution order.
    pub launches: Vec<ChainLaunch>,
    /// Indices of the tensors that hold the result.
    pub results: Vec<usize>,
}

/// A tensor of a chain. If two chains have a tensor of the same name and size, both fill it with the same values.
#[derive(Clone, Debug, PartialEq)]
pub struct ChainTensor {
    pub name: &'static str,
    pub element: Element,
    pub shape: Shape,
    /// Contents before the first launch; `None` if a launch writes it.
    pub fill: Option<Fill>,
}

/// One launch of a chain.
#[derive(Clone, Debug, PartialEq)]
pub struct ChainLaunch {
    pub kernel: KernelSpec,
    /// Indices of the tensors bound to the kernel's `Read` and `Write` parameters, in the order of the signature.
    pub operands: Vec<usize>,
}

impl Chain {
    /// Creates a chain without launches.
    pub fn new() -> Self {
        Self {
            tensors: Vec::new(),
            launches: Vec::new(),
            results: Vec::new(),
        }
    }

    /// Creates a chain of one kernel, with a separate tensor for each parameter.
    pub fn of(kernel: impl Into<KernelSpec>) -> Self {
        Self::new().then(kernel, &[])
    }

    /// Appends a launch, whose outputs become the chain's results. `names` holds pairs `(parameter, tensor)`. A parameter without a pair is
    /// bound to the tensor of the same name. Tensors that do not exist yet are created as the parameter describes.
    pub fn then(
        mut self,
        kernel: impl Into<KernelSpec>,
        names: &[(&'static str, &'static str)],
    ) -> Self {
        let kernel = kernel.into();
        self.results.clear();
        let mut operands = Vec::new();
        for param in kernel.as_kernel().params() {
            let paired = names.iter().find(|(parameter, _)| *parameter == param.name);
            let name = paired.map_or(param.name, |&(_, tensor)| tensor);
            let (element, shape, fill) = match param.role {
                Role::Read {
                    element,
                    shape,
                    fill,
                } => (element, shape, Some(fill)),
                Role::Write { element, shape } => (element, shape, None),
                Role::Count(_) => continue,
            };
            let known = self.tensors.iter().position(|t| t.name == name);
            let at = known.unwrap_or(self.tensors.len());
            if known.is_none() {
                self.tensors.push(ChainTensor {
                    name,
                    element,
                    shape,
                    fill,
                });
            }
            if fill.is_none() {
                self.results.push(at);
            }
            operands.push(at);
        }
        self.launches.push(ChainLaunch { kernel, operands });
        self
    }

    /// Replaces the tensors `names` with one tensor named `tensor`, like a merged projection that writes several operands to one tensor.
    /// The replaced tensors must have equal elements, shapes and fills.
    pub fn sharing(mut self, names: &[&str], tensor: &'static str) -> Self {
        let shared = self.tensors.iter().position(|t| names.contains(&t.name));
        let Some(shared) = shared else { return self };
        let is_other = |at: usize, t: &ChainTensor| at != shared && names.contains(&t.name);
        let mut moved = Vec::new();
        let mut kept = 0;
        for (at, t) in self.tensors.iter().enumerate() {
            moved.push(if is_other(at, t) { shared } else { kept });
            kept += usize::from(!is_other(at, t));
        }
        let mut at = 0;
        self.tensors.retain(|t| {
            at += 1;
            !is_other(at - 1, t)
        });
        self.tensors[shared].name = tensor;
        let launches = self.launches.iter_mut();
        for tensor in launches
            .flat_map(|l| &mut l.operands)
            .chain(&mut self.results)
        {
            *tensor = moved[*tensor];
        }
        self
    }

    /// Returns the kernel of the last launch, which writes the result.
    pub fn last(&self) -> Option<&dyn Kernel> {
        self.launches.last().map(|l| l.kernel.as_kernel())
    }
}

impl Default for Chain {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use crate::{
        kernels::{
            elementwise::{Activate, AddBias, BinaryOp, Combine},
            gemm::Gemm,
        },
        ops::{Activation, Epilogue},
    };

    #[test]
    fn shared_tensors_are_merged() {
        let add = Combine {
            how: BinaryOp::Sum,
            width: 96,
            dtype: DType::F16,
        };
        let chain = Chain::of(add).sharing(&["a", "b"], "both");
        let names: Vec<&str> = chain.tensors.iter().map(|t| t.name).collect();
        assert_eq!(names, ["both", "out"]);
        assert_eq!(chain.launches[0].operands, [0, 0, 1]);
        assert_eq!(chain.results, [1]);
    }

    #[test]
    fn launches_share_the_named_tensors() {
        let dtype = DType::F16;
        let gemm = Gemm::of(96, 64, dtype, Epilogue::default());
        let activation = Activation::GeluExact;
        let chain = Chain::of(gemm)
            .then(
                AddBias { width: 96, dtype },
                &[("x", "out"), ("out", "sum")],
            )
            .then(
                Activate {
                    activation,
                    width: 96,
                    dtype,
                },
                &[("x", "sum"), ("out", "activated")],
            );
        let names: Vec<&str> = chain.tensors.iter().map(|t| t.name).collect();
        assert_eq!(names, ["x", "weight", "out", "bias", "sum", "activated"]);
        let operands: Vec<&[usize]> = chain.launches.iter().map(|l| &l.operands[..]).collect();
        assert_eq!(operands, [&[0, 1, 2][..], &[2, 3, 4], &[4, 5]]);
        assert_eq!(chain.results, [5]);
        let filled: Vec<bool> = chain.tensors.iter().map(|t| t.fill.is_some()).collect();
        assert_eq!(filled, [true, true, false, true, false, false]);
    }
}
