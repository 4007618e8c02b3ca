//! How many kernels are worth NVRTC's time: each takes 0.1 to 0.4 s of it.

use super::{
    Timings,
    cover::{Cover, Edges, MOST_ROWS},
    implementations::Candidate,
    measure::correction,
};
use crate::{kernels::KernelSpec, machine::Machine};

/// What a kernel must save, as [`Thinning::loss`] counts it: a part of the time of the chains that a run has, in the mean over
/// numbers of rows that are evenly spread by their logarithm.
const WORTH_A_KERNEL: f64 = 0.0009;
/// Kernels that are looked at: those of the best cover at some number of rows, and others that take so many times as long.
const NEAR: f64 = 1.03;

/// Candidates by their numbers, each once, with their estimates.
pub(super) struct Kernels<'a> {
    machine: &'a Machine,
    timings: Option<&'a Timings>,
    candidates: Vec<Candidate>,
    /// By kernel: rows with the factor of its estimate at each.
    factors: Vec<Vec<(u64, f64)>>,
    is_kept: Vec<bool>,
}

impl<'a> Kernels<'a> {
    pub(super) fn new(machine: &'a Machine, timings: Option<&'a Timings>) -> Self {
        Self {
            machine,
            timings,
            candidates: Vec::new(),
            factors: Vec::new(),
            is_kept: Vec::new(),
        }
    }

    pub(super) fn number(&mut self, candidate: Candidate) -> usize {
        if let Some(known) = self.candidates.iter().position(|c| *c == candidate) {
            return known;
        }
        let factors = self
            .timings
            .map(|timings| timings.factors(&candidate.kernel, self.machine));
        self.factors.push(factors.unwrap_or_default());
        self.candidates.push(candidate);
        self.is_kept.push(true);
        self.candidates.len() - 1
    }

    pub(super) fn spec(&self, number: usize) -> &KernelSpec {
        &self.candidates[number].kernel
    }

    pub(super) fn keep(&mut self, is_kept: &[bool]) {
        self.is_kept = is_kept.to_vec();
    }

    /// Cycles of each kernel at these numbers of rows; infinite where it does not serve, or is not kept.
    pub(super) fn times_on(&self, rows: &[u64]) -> Vec<(u64, Vec<f64>)> {
        let of_rows = |&rows: &u64| {
            let each = (0..self.candidates.len()).map(|at| self.cycles(at, rows));
            (rows, each.collect())
        };
        rows.iter().map(of_rows).collect()
    }

    fn cycles(&self, at: usize, rows: u64) -> f64 {
        let candidate = &self.candidates[at];
        if !self.is_kept[at] || candidate.most_rows.is_some_and(|most| rows > most) {
            return f64::INFINITY;
        }
        let cycles = candidate.kernel.as_kernel().cycles(rows, self.machine);
        cycles.map_or(f64::INFINITY, |cycles| {
            cycles * correction(&self.factors[at], rows)
        })
    }
}

/// Which kernels are kept. All that are near the best at some number of rows are thinned: one after the other goes that is
/// missed least, until each that is left saves enough.
pub(super) fn prune(edges: &[Edges], kernels: &Kernels) -> Vec<bool> {
    let n = kernels.candidates.len();
    let samples = kernels.times_on(&coarse_rows());
    let all = vec![true; n];
    let mut is_kept = vec![false; n];
    let mut best = Vec::new();
    for (_, times) in &samples {
        let mut sum = 0.0;
        for edges in edges {
            if let Some((cycles, cover)) = edges.cheapest(times, &all) {
                sum += cycles * edges.times as f64;
                edges
                    .near(&cover, times, NEAR)
                    .into_iter()
                    .for_each(|k| is_kept[k] = true);
            }
        }
        best.push(sum);
    }
    let mut thinning = Thinning {
        edges,
        samples: &samples,
        best: &best,
        is_kept,
        covers: Vec::new(),
    };
    thinning.run();
    thinning.is_kept
}

struct Thinning<'a> {
    edges: &'a [Edges],
    samples: &'a [(u64, Vec<f64>)],
    best: &'a [f64],
    is_kept: Vec<bool>,
    /// By sample and chain.
    covers: Vec<Vec<(f64, Cover)>>,
}

impl Thinning<'_> {
    /// Kernels that no cover uses stay until the end: they take the place of those that go.
    fn run(&mut self) {
        self.covers = (0..self.samples.len())
            .map(|at| self.cover(at, None))
            .collect();
        // By kernel: what is lost without it, and whether that is so with what is kept now. As kernels go, those that take
        // their place are missed more, so that what was found before is no more than what is true. Those that were
        // beside them may be missed less, which is not looked at again: some are then kept that save a little less.
        let mut losses: Vec<(f64, bool)> = vec![(0.0, false); self.is_kept.len()];
        loop {
            let used = self.used();
            let each = used.iter().enumerate().filter(|&(_, &used)| used);
            let each = each.map(|(kernel, _)| (kernel, losses[kernel]));
            let Some((kernel, (loss, is_known))) = each.min_by(|a, b| a.1.0.total_cmp(&b.1.0))
            else {
                break;
            };
            if loss >= WORTH_A_KERNEL {
                break;
            }
            if !is_known {
                losses[kernel] = (self.loss_without(kernel), true);
                continue;
            }
            self.is_kept[kernel] = false;
            for at in 0..self.samples.len() {
                if !self.uses(at, kernel) {
                    continue;
                }
                self.covers[at] = self.cover(at, None);
                for &used in kernels_of(&self.covers[at]) {
                    losses[used].1 = false;
                }
            }
        }
        self.is_kept = self.used();
    }

    /// Kernels of some cover.
    fn used(&self) -> Vec<bool> {
        let mut used = vec![false; self.is_kept.len()];
        let all = self.covers.iter().flat_map(|covers| kernels_of(covers));
        all.for_each(|&kernel| used[kernel] = true);
        used
    }

    fn uses(&self, at: usize, kernel: usize) -> bool {
        kernels_of(&self.covers[at]).any(|&used| used == kernel)
    }

    fn cover(&mut self, at: usize, without: Option<usize>) -> Vec<(f64, Cover)> {
        if let Some(kernel) = without {
            self.is_kept[kernel] = false;
        }
        let (_, times) = &self.samples[at];
        let none = || (f64::INFINITY, Vec::new());
        let cheapest = |edges: &Edges| edges.cheapest(times, &self.is_kept).unwrap_or_else(none);
        // Without a kernel other chains than those that use it are as before.
        let is_as_before = |chain: usize| {
            let kernel = without?;
            let own = self.covers[at].get(chain)?;
            let mut used = own.1.iter().flat_map(|(_, kernels)| kernels);
            (!used.any(|&k| k == kernel)).then(|| own.clone())
        };
        let covers = self.edges.iter().enumerate();
        let covers =
            covers.map(|(chain, edges)| is_as_before(chain).unwrap_or_else(|| cheapest(edges)));
        let covers = covers.collect();
        if let Some(kernel) = without {
            self.is_kept[kernel] = true;
        }
        covers
    }

    /// What is lost without a kernel, in the mean.
    fn loss_without(&mut self, kernel: usize) -> f64 {
        let mut lost = 0.0;
        for at in 0..self.samples.len() {
            if self.uses(at, kernel) {
                let others = self.cover(at, Some(kernel));
                lost += self.loss(at, &others) - self.loss(at, &self.covers[at]);
            }
        }
        lost / self.samples.len() as f64
    }

    /// What covers lose at a sample to those of all kernels: the part of the time, and more than in proportion where it is much,
    /// as a number of rows with a bad kernel is not made good by others.
    fn loss(&self, at: usize, covers: &[(f64, Cover)]) -> f64 {
        const MUCH: f64 = 0.02;
        let each = self.edges.iter().zip(covers);
        let sum: f64 = each
            .map(|(edges, (cycles, _))| cycles * edges.times as f64)
            .sum();
        let part = (sum / self.best[at] - 1.0).max(0.0);
        part + part * part / MUCH
    }
}

/// The kernels of the covers of all chains.
fn kernels_of(covers: &[(f64, Cover)]) -> impl Iterator<Item = &usize> {
    let coverings = covers.iter().flat_map(|(_, cover)| cover);
    coverings.flat_map(|(_, kernels)| kernels)
}

/// Sixteen numbers of rows in each octave, and all of the fewest.
fn coarse_rows() -> Vec<u64> {
    let octaves = (MOST_ROWS as f64).log2();
    let numbers = (0..=(octaves * 16.0) as u32)
        .map(|sixteenths| 2f64.powf(f64::from(sixteenths) / 16.0).round() as u64);
    let mut rows: Vec<u64> = numbers.collect();
    rows.dedup();
    rows
}

#[cfg(test)]
mod tests;
