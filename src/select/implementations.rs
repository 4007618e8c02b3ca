//! Implementations of one site, or of several neighbours fused: one file each, and a line in [`ALL`].

mod deferred_norm;
mod gate;
mod gemm;
mod gemm_norm;
mod norm;
mod norm_between;
mod prepare;

use super::site::{Link, Site};
use crate::{kernels::KernelSpec, machine::Machine, tensor::DType};

/// Makes the implementation of the first sites of a chain on a card; `None` where it does not serve them.
type Implement = fn(&[Link], &Machine) -> Option<Implementation>;

/// All implementations. Where two take equal time, the first is launched.
pub(super) const ALL: &[Implement] = &[
    gemm::implement,
    norm::implement,
    gemm_norm::behind_linear,
    gemm_norm::behind_sum,
    deferred_norm::implement,
    gate::alone,
    gate::behind_gemm,
    norm_between::implement,
    prepare::alone,
    prepare::behind_gemm,
];

/// How the first sites of a chain are computed.
#[derive(Clone, Debug, PartialEq)]
pub struct Implementation {
    /// Name in tables and messages.
    pub name: &'static str,
    /// Number of sites that it covers, from the first on.
    pub sites: usize,
    pub launches: Vec<Launch>,
    /// Cycles that the launches together take less than the sum of their estimates.
    pub saved: f64,
}

/// One launch of an implementation.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The site in whose place it is launched.
    pub site: usize,
    /// Bindings of its parameters, counts left out.
    pub operands: Vec<Operand>,
    /// Kernels that compute it, with equal parameters.
    pub candidates: Vec<Candidate>,
}

/// A kernel, and the most rows that it serves.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub kernel: KernelSpec,
    pub most_rows: Option<u64>,
}

/// The binding of a parameter. Sites are relative to the implementation's first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operand {
    /// What a site reads, by its place.
    Of { site: usize, place: usize },
    /// The value of a site, or its first.
    Value(usize),
    /// The second value of a site that has two.
    Second(usize),
    /// A tensor of the implementation's own, `[rows, columns]`, named after a site's value.
    Scratch {
        site: usize,
        name: &'static str,
        dtype: DType,
        columns: u64,
        /// Rows behind those of the batch.
        more_rows: u64,
    },
}

impl Candidate {
    pub fn new(kernel: impl Into<KernelSpec>) -> Self {
        let kernel = kernel.into();
        let most_rows = kernel.as_kernel().most_rows();
        Self { kernel, most_rows }
    }
}

/// Kernels that compute a single site by one launch on a card, for any number of rows; each says how many it serves
/// ([`Kernel::most_rows`](crate::kernels::Kernel::most_rows)).
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

/// What a site reads, by places.
fn operands(site: usize, places: std::ops::Range<usize>) -> impl Iterator<Item = Operand> {
    places.map(move |place| Operand::Of { site, place })
}

#[cfg(test)]
mod tests;
