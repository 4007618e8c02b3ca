//! Implementations of sites. A [`Site`] is the problem of one node of a graph, such as a linear layer or a norm. An implementation computes
//! one site, or several adjacent sites in fused launches. Each implementation has its own file and a line in [`ALL`].

mod deferred_norm;
mod fp8;
mod gate;
mod gemm;
mod gemm_norm;
mod norm;
mod norm_between;
mod prepare;

use super::site::{Link, Site};
use crate::{kernels::KernelSpec, machine::Machine, tensor::DType};

/// Returns the implementation of the first sites of a chain on a card; `None` if the implementation does not support these sites.
type Implement = fn(&[Link], &Machine) -> Option<Implementation>;

/// All implementations. If two implementations take equal time, the first is used.
pub(super) const ALL: &[Implement] = &[
    gemm::implement,
    norm::implement,
    gemm_norm::after_linear,
    gemm_norm::after_sum,
    deferred_norm::implement,
    gate::alone,
    gate::after_gemm,
    norm_between::implement,
    prepare::alone,
    prepare::after_gemm,
    fp8::conversion,
    fp8::after_norm,
    fp8::after_gemm,
    fp8::after_gate,
];

/// An implementation of the first sites of a chain.
#[derive(Clone, Debug, PartialEq)]
pub struct Implementation {
    /// Name in tables and messages.
    pub name: &'static str,
    /// Number of sites that the implementation covers, starting with the first.
    pub sites: usize,
    pub launches: Vec<Launch>,
    /// Cycles that the launches save together compared with the sum of their estimates.
    pub saved: f64,
}

/// One launch of an implementation.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The site where the implementation is launched.
    pub site: usize,
    pub bindings: Bindings,
    /// Kernels for the launch, all with the same parameters.
    pub candidates: Vec<Candidate>,
}

/// A kernel, and the maximum number of rows that it supports.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub kernel: KernelSpec,
    pub max_rows: Option<u64>,
}

/// The tensors of a launch's parameters, by name. Sites are relative to the implementation's first site.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bindings {
    /// Sites whose operands the kernel reads. A parameter that is not in `values` reads the operand of the same name, from the first of
    /// these sites that has such an operand.
    pub operands_of: Vec<usize>,
    /// Parameters that are values of sites or scratch tensors. These are all parameters that the kernel writes, and parameters that it
    /// reads if another launch of the implementation writes their tensor.
    pub values: Vec<(&'static str, Operand)>,
}

impl Bindings {
    /// Binds parameters to the operands of these sites.
    fn to_operands_of(sites: &[usize]) -> Self {
        Self {
            operands_of: sites.to_vec(),
            values: Vec::new(),
        }
    }

    /// Binds a parameter to a value or a scratch tensor.
    fn with(mut self, param: &'static str, operand: Operand) -> Self {
        self.values.push((param, operand));
        self
    }

    /// Returns the value or scratch tensor that a parameter is bound to.
    pub fn value(&self, param: &str) -> Option<Operand> {
        let mut values = self.values.iter();
        values
            .find(|(name, _)| *name == param)
            .map(|&(_, operand)| operand)
    }
}

/// A value of a site, or a scratch tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operand {
    /// The value of a site; for a site with two values, the first.
    Value(usize),
    /// The second value of a site with two values.
    Second(usize),
    /// A scratch tensor of the implementation, `[rows, columns]`, named after a site's value.
    Scratch {
        site: usize,
        name: &'static str,
        dtype: DType,
        columns: u64,
        /// Additional rows after those of the batch.
        more_rows: u64,
    },
}

impl Candidate {
    pub fn new(kernel: impl Into<KernelSpec>) -> Self {
        let kernel = kernel.into();
        let max_rows = kernel.as_kernel().max_rows();
        Self { kernel, max_rows }
    }
}

/// Returns the kernels that compute a single site in one launch on a card. The max number of rows of each kernel is
/// [`Kernel::max_rows`](crate::kernels::Kernel::max_rows).
pub fn candidates(site: &Site, machine: &Machine) -> Vec<KernelSpec> {
    let alone = [Link {
        site: site.clone(),
        is_private: false,
    }];
    let implementations = ALL.iter().filter_map(|f| f(&alone, machine));
    let launches = implementations.filter_map(|implementation| {
        let launch: Result<[Launch; 1], _> = implementation.launches.try_into();
        launch.ok()
    });
    launches
        .flat_map(|[launch]| launch.candidates)
        .map(|candidate| candidate.kernel)
        .collect()
}

#[cfg(test)]
mod tests;
