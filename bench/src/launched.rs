//! Finds the kernel that a model launches for a single operator, given the number of rows and the card. The library itself makes the
//! selection.

use std::cell::RefCell;

use gemmule::{
    kernels::KernelSpec,
    machine::Machine,
    select::{Chain, Dispatch, SelectionInput, Site, Timings, candidates},
    tensor::Extents,
};
use miette::{Report, miette};
use serde::Serialize;

/// Basis of the selection of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ChosenBy {
    /// The cost model of the card.
    CostModel,
    /// The cost model, corrected by timings of some of the operator's kernels.
    Timings,
    /// A rule based on the longest sequence.
    Rule,
}

impl ChosenBy {
    /// Returns the basis in one or two words.
    pub(crate) fn name(self) -> &'static str {
        match self {
            ChosenBy::CostModel => "cost model",
            ChosenBy::Timings => "timings",
            ChosenBy::Rule => "rule",
        }
    }
}

/// A card, with a cache of the kernels selected on it.
pub(crate) struct Launched {
    pub(crate) machine: Machine,
    timings: Option<Timings>,
    /// For each [`Site`] (one operator of a model, such as a linear layer), the selected kernels by number of rows.
    known: RefCell<Vec<(Site, Dispatch<KernelSpec>)>>,
}

impl Launched {
    /// Creates a selection by the cost model of a card, corrected by `timings`.
    pub(crate) fn new(machine: Machine, timings: Option<Timings>) -> Self {
        Self {
            machine,
            timings,
            known: RefCell::default(),
        }
    }

    /// Returns the kernel that a model launches for `rows` rows of a site (one operator), if the site is not fused with other sites.
    ///
    /// # Errors
    /// Returns an error if no kernel supports the site on the card.
    pub(crate) fn kernel(&self, site: &Site, rows: u64) -> Result<KernelSpec, Report> {
        let mut known = self.known.borrow_mut();
        let at = match known.iter().position(|(asked, _)| asked == site) {
            Some(at) => at,
            None => {
                known.push((site.clone(), self.answer(site)));
                known.len() - 1
            }
        };
        let batch = Extents {
            longest: 1,
            rows,
            ..Extents::default()
        };
        let kernel = known[at].1.at(&batch).cloned();
        kernel.ok_or_else(|| {
            miette!(
                "no kernel computes {site:?} for {rows} rows on the card `{}`",
                self.machine.name
            )
        })
    }

    fn answer(&self, site: &Site) -> Dispatch<KernelSpec> {
        let question = SelectionInput {
            chains: &[(Chain::of(site.clone()), 1)],
            machine: &self.machine,
            timings: self.timings.as_ref(),
            may_fuse: false,
            invariant: false,
            quantizes_rows: false,
        };
        let covered = question.answer().into_iter().flatten().next();
        covered.map_or_else(|| Dispatch::of(Vec::new()), |launch| launch.dispatch)
    }

    /// Returns whether the cost model alone or timings select the kernel for a site.
    pub(crate) fn chosen_by(&self, site: &Site) -> ChosenBy {
        let is_timed = |timings: &Timings| {
            let all = candidates(site, &self.machine);
            all.iter().any(|kernel| {
                timings
                    .by_symbol()
                    .contains_key(&kernel.as_kernel().symbol())
            })
        };
        match self.timings.as_ref().is_some_and(is_timed) {
            true => ChosenBy::Timings,
            false => ChosenBy::CostModel,
        }
    }
}

#[cfg(test)]
mod tests {
    use gemmule::{DType, kernels::gemm::GemmProblem, ops::Epilogue};

    use super::*;

    fn linear() -> Site {
        let epilogue = Epilogue::default();
        Site::Linear(GemmProblem::new(768, 768, DType::F16, epilogue))
    }

    #[test]
    fn the_launched_kernel_is_a_candidate_for_the_rows() {
        for machine in Machine::all().unwrap() {
            let launched = Launched::new(machine.clone(), None);
            let all = candidates(&linear(), machine);
            for rows in [1, 10, 1229, 100_000] {
                let kernel = launched.kernel(&linear(), rows).unwrap();
                assert!(all.contains(&kernel), "{}: {rows}", machine.name);
                let most = kernel.as_kernel().max_rows();
                assert!(most.is_none_or(|most| rows <= most), "{}", machine.name);
            }
        }
    }

    #[test]
    fn timings_change_the_launched_kernel() {
        let machine = Machine::usual().unwrap();
        let rows = 1229;
        let before = Launched::new(machine.clone(), None);
        assert_eq!(before.chosen_by(&linear()), ChosenBy::CostModel);
        let usual = before.kernel(&linear(), rows).unwrap();
        let mut timings = Timings::default();
        timings.add("of_another_program", rows, 1.0);
        let unrelated = Launched::new(machine.clone(), Some(timings.clone()));
        assert_eq!(unrelated.chosen_by(&linear()), ChosenBy::CostModel);
        // One second per launch.
        for rows in [512, 1024, 1229, 2048, 4096] {
            timings.add(&usual.as_kernel().symbol(), rows, 1e6);
        }
        let corrected = Launched::new(machine, Some(timings));
        assert_eq!(corrected.chosen_by(&linear()), ChosenBy::Timings);
        assert_ne!(corrected.kernel(&linear(), rows).unwrap(), usual);
    }
}
