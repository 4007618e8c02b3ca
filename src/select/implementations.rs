//! Implementations of sites. A [`Site`] is the problem of one node of a graph, such as a linear layer or a norm. An implementation computes
//! one site, or several adjacent sites in fused launches. Each implementation has its own file and a line in [`ALL`].

mod deferred_norm;
mod fp8;
mod gate;
mod gemm;
mod gemm_norm;
mod norm;
mod norm_between;
mod norm_sum;
mod prepare;
pub(super) mod quantized_rows;
mod unpacked;

use super::site::{Link, Site};
use crate::{kernels::KernelSpec, machine::Machine, tensor::Element};

/// Function that returns the implementation of the first sites of a chain on a card.
type Implement = fn(&[Link], &Machine) -> Result<Implementation, Unfit>;

/// Reason why an implementation does not cover the first sites of a chain.
#[derive(Clone, Debug, PartialEq)]
pub enum Unfit {
    /// The chain does not start with the sites that the implementation covers.
    Sites,
    /// A condition of the implementation does not hold.
    Because(String),
}

/// Returns [`Unfit::Because`] with the reason `otherwise` unless a condition of a rule holds.
pub fn require(holds: bool, otherwise: impl Into<String>) -> Result<(), Unfit> {
    match holds {
        true => Ok(()),
        false => Err(Unfit::Because(otherwise.into())),
    }
}

const ONLY_HOPPER: &str = "its kernels need the WGMMA instructions of Hopper";
const IS_READ: &str = "another operator reads a value that it would not store";
const NOT_PLAIN: &str = "a weight is not stored in the type of the activations";

/// A named function that creates an [`Implementation`]. The kernels of the implementation compute `equation`.
pub(super) struct Rule {
    pub name: &'static str,
    equation: &'static str,
    pub implement: Implement,
}

impl Rule {
    const fn new(name: &'static str, equation: &'static str, implement: Implement) -> Self {
        Self {
            name,
            equation,
            implement,
        }
    }
}

/// Returns all implementations of the first sites of a chain on a card, with the names of their rules.
pub(super) fn implementations(
    chain: &[Link],
    machine: &Machine,
) -> Vec<(&'static str, Implementation)> {
    let direct = ALL.iter().filter_map(|rule| {
        let found = (rule.implement)(chain, machine);
        Some((rule.name, found.ok()?))
    });
    direct.chain(unpacked::all(chain, machine)).collect()
}

/// All rules except that of [`unpacked`], which is derived from these rules. If two implementations take equal time, the one whose rule
/// comes first in this list is used.
#[rustfmt::skip]
pub(super) const ALL: &[Rule] = &[
    Rule::new("gemm", "act(x · weightᵀ + bias) + residual", gemm::implement),
    Rule::new("norm", "norm(x)", norm::implement),
    Rule::new("gemm+norm", "norm(x · weightᵀ + bias + residual)", gemm_norm::after_linear),
    Rule::new("gemm+sum+norm", "sum = x · weightᵀ + bias + residual, norm(sum)", gemm_norm::after_sum),
    Rule::new("deferred norm", "act(norm(x · weightᵀ + bias + residual) · weight₂ᵀ + bias₂), the norm in the second GEMM", deferred_norm::implement),
    Rule::new("gate", "act(x₁) · x₂", gate::alone),
    Rule::new("gemm+gate", "act(y₁) · y₂ of y = x · weightᵀ + bias", gate::after_gemm),
    Rule::new("norm between gemms", "sum = x · weightᵀ + bias + residual, norm(sum) · weight₂ᵀ, the norm in the second GEMM", norm_between::implement),
    Rule::new("sum", "norm(x) + residual", norm_sum::alone),
    Rule::new("norm+sum+norm", "sum = norm(x) + residual, norm(sum)", norm_sum::with_norms),
    Rule::new("prepare attention", "rotary(norm(x)) of queries and keys", prepare::alone),
    Rule::new("gemm+prepare attention", "rotary(norm(x · weightᵀ + bias)) of queries and keys", prepare::after_gemm),
    Rule::new("conversion to E4M3", "e4m3(x / scale)", fp8::conversion),
    Rule::new("norm+conversion to E4M3", "e4m3(norm(x) / scale)", fp8::after_norm),
    Rule::new("gemm+conversion to E4M3", "e4m3(act(x · weightᵀ + bias) / scale)", fp8::after_gemm),
    Rule::new("gate+conversion to E4M3", "e4m3(act(x₁) · x₂ / scale)", fp8::with_gate),
    Rule::new("gemm+gate+conversion to E4M3", "e4m3(act(y₁) · y₂ / scale) of y = x · weightᵀ + bias", fp8::after_gate),
    Rule::new(quantized_rows::NAMES[0], "act(x₈ · weightᵀ · scales + bias) + residual of x₈, scales = quantize_rows(x)", quantized_rows::linear),
    Rule::new(quantized_rows::NAMES[1], "act(y₁) · y₂ of y = x₈ · weightᵀ · scales + bias of x₈, scales = quantize_rows(x)", quantized_rows::with_gate),
];

/// Returns the equation of the rule with this name.
pub fn equation(rule: &str) -> Option<&'static str> {
    if rule == unpacked::NAME {
        return Some(unpacked::EQUATION);
    }
    let mut rules = ALL.iter();
    rules
        .find(|known| known.name == rule)
        .map(|known| known.equation)
}

/// An implementation of the first sites of a chain.
#[derive(Clone, Debug, PartialEq)]
pub struct Implementation {
    /// Number of sites that the implementation covers, starting with the first.
    pub sites: usize,
    pub launches: Vec<Launch>,
    /// Cycles by which all launches together are faster than the sum of their estimates.
    pub saved: f64,
}

impl Implementation {
    /// Creates an implementation with one launch at its last site.
    fn one_launch(
        sites: usize,
        bindings: Bindings,
        candidates: Vec<Candidate>,
    ) -> Result<Self, Unfit> {
        let launch = Launch {
            site: sites - 1,
            bindings,
            candidates,
        };
        Self::of(sites, vec![launch], 0.0)
    }

    /// Creates an implementation. Returns an error if a launch has no candidate kernels.
    fn of(sites: usize, launches: Vec<Launch>, saved: f64) -> Result<Self, Unfit> {
        let is_served = launches.iter().all(|launch| !launch.candidates.is_empty());
        require(
            is_served,
            "no kernel for this card supports the sizes and types",
        )?;
        Ok(Self {
            sites,
            launches,
            saved,
        })
    }
}

/// One launch of an implementation.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// Index of a site, relative to the implementation's first site. The launch is appended to the program when the node of this site is
    /// lowered.
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
    /// Parameters that are bound to a given tensor:
    ///
    /// - all parameters that the kernel writes,
    /// - parameters that the kernel reads from another launch of the implementation, and
    /// - parameters that read an operand of a site, if the operand has another name in the graph than the parameter.
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

    /// Binds a parameter to a tensor.
    fn with(mut self, param: &'static str, operand: Operand) -> Self {
        self.values.push((param, operand));
        self
    }

    /// Returns the tensor that a parameter is bound to; `None` if it reads the operand of the same name.
    pub fn value(&self, param: &str) -> Option<Operand> {
        let mut values = self.values.iter();
        values
            .find(|(name, _)| *name == param)
            .map(|&(_, operand)| operand)
    }
}

/// A tensor that a parameter is bound to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operand {
    /// The value of a site; for a site with two values, the first.
    Value(usize),
    /// The second value of a site with two values.
    Second(usize),
    /// An operand of a site, by its name in the graph.
    Input { site: usize, name: &'static str },
    /// A scratch tensor of the implementation, `[rows, columns]`, named after a site's value.
    Scratch {
        site: usize,
        name: &'static str,
        element: Element,
        columns: u64,
        rows: ScratchRows,
    },
}

/// Number of rows of a scratch tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScratchRows {
    /// The rows of the batch, and this number of additional rows after them.
    OfBatch {
        more: u64,
    },
    Fixed(u64),
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
    let implementations = ALL
        .iter()
        .filter_map(|rule| (rule.implement)(&alone, machine).ok());
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
