//! Removes kernels whose benefit does not justify their compilation; NVRTC takes 0.1 to 0.4 s for
//! each.

use super::{
    Timings,
    edges::{Cover, Edges, MAX_ROWS},
    implementations::Candidate,
    measure::correction,
};
use crate::{kernels::KernelSpec, machine::Machine};

/// Minimum saving of a kernel, measured by [`Pruning::loss`] as a fraction of the time of a run's
/// chains, averaged over octaves of rows.
const WORTH_A_KERNEL: f64 = 0.0009;
/// Pruning starts with the kernels of the best cover at some number of rows, and with those at most
/// this factor slower.
const NEAR: f64 = 1.03;

/// Distinct candidates with their estimates, identified by index.
pub(super) struct Kernels<'a> {
    machine: &'a Machine,
    timings: Option<&'a Timings>,
    candidates: Vec<Candidate>,
    /// Timed numbers of rows with the correction of the estimate, by kernel.
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

    /// Returns the cycles of each kernel at the given numbers of rows; infinite if it does not
    /// support them or was pruned.
    pub(super) fn times_on(&self, rows: &[u64]) -> Vec<(u64, Vec<f64>)> {
        let of_rows = |&rows: &u64| {
            let each = (0..self.candidates.len()).map(|at| self.cycles(at, rows));
            (rows, each.collect())
        };
        rows.iter().map(of_rows).collect()
    }

    fn cycles(&self, at: usize, rows: u64) -> f64 {
        let candidate = &self.candidates[at];
        if !self.is_kept[at] || candidate.max_rows.is_some_and(|most| rows > most) {
            return f64::INFINITY;
        }
        let cycles = candidate.kernel.as_kernel().cycles(rows, self.machine);
        cycles.map_or(f64::INFINITY, |cycles| {
            cycles * correction(&self.factors[at], rows)
        })
    }
}

/// Returns whether each kernel is kept. Among the kernels that are near the best at some number of
/// rows, the one whose removal costs least is removed repeatedly, until each remaining kernel saves
/// at least [`WORTH_A_KERNEL`].
pub(super) fn prune(edges: &[Edges], kernels: &Kernels) -> Vec<bool> {
    let n = kernels.candidates.len();
    let samples = kernels.times_on(&coarse_rows());
    let mut is_kept = vec![false; n];
    let mut best = Vec::new();
    for (_, times) in &samples {
        let mut sum = 0.0;
        for edges in edges {
            if let Some((cycles, cover)) = edges.cheapest(times, |_| true) {
                sum += cycles * edges.times as f64;
                edges
                    .near(&cover, times, NEAR)
                    .into_iter()
                    .for_each(|k| is_kept[k] = true);
            }
        }
        best.push(sum);
    }
    let edges: Vec<Edges> = edges
        .iter()
        .map(|edges| edges.clone().with_only(&is_kept))
        .collect();
    let mut pruning = Pruning::new(&edges, &samples, &best, is_kept);
    pruning.run();
    pruning.is_kept
}

struct Pruning<'a> {
    edges: &'a [Edges],
    samples: &'a [(u64, Vec<f64>)],
    best: &'a [f64],
    is_kept: Vec<bool>,
    /// Cheapest covers with the kept kernels, by sample and chain.
    covers: Vec<Vec<(f64, Cover)>>,
    /// Whether these covers use each kernel, by sample.
    uses: Vec<Vec<bool>>,
}

impl<'a> Pruning<'a> {
    fn new(
        edges: &'a [Edges],
        samples: &'a [(u64, Vec<f64>)],
        best: &'a [f64],
        is_kept: Vec<bool>,
    ) -> Self {
        let mut pruning = Self {
            edges,
            samples,
            best,
            covers: vec![Vec::new(); samples.len()],
            uses: vec![vec![false; is_kept.len()]; samples.len()],
            is_kept,
        };
        (0..samples.len()).for_each(|at| pruning.cover(at));
        pruning
    }

    /// Removes kernels greedily. Unused kernels stay until the end, because they may replace
    /// removed ones.
    fn run(&mut self) {
        // The loss without each kernel, and whether it is up to date. Removing kernels increases
        // the loss without their substitutes, so that a known loss is a lower bound (lazy greedy).
        // The loss without kernels of the same covers may decrease, so that its bound is reset to
        // 0.
        let mut losses: Vec<(f64, bool)> = vec![(0.0, false); self.is_kept.len()];
        let mut used = self.used();
        loop {
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
                if !self.uses[at][kernel] {
                    continue;
                }
                for &beside in kernels_of(&self.covers[at]) {
                    losses[beside] = (0.0, false);
                }
                self.cover(at);
                for &used in kernels_of(&self.covers[at]) {
                    losses[used].1 = false;
                }
            }
            used = self.used();
        }
        self.is_kept = used;
    }

    /// Returns whether some cover uses each kernel.
    fn used(&self) -> Vec<bool> {
        let mut used = vec![false; self.is_kept.len()];
        let all = self.covers.iter().flat_map(|covers| kernels_of(covers));
        all.for_each(|&kernel| used[kernel] = true);
        used
    }

    /// Sets the cheapest cover of each chain at a sample.
    fn cover(&mut self, at: usize) {
        let each = self.edges.iter().map(|edges| self.cheapest(at, edges));
        self.covers[at] = each.collect();
        self.uses[at].fill(false);
        for &kernel in kernels_of(&self.covers[at]) {
            self.uses[at][kernel] = true;
        }
    }

    fn cheapest(&self, at: usize, edges: &Edges) -> (f64, Cover) {
        let (_, times) = &self.samples[at];
        let none = || (f64::INFINITY, Vec::new());
        let found = edges.cheapest(times, |k| self.is_kept[k]);
        found.unwrap_or_else(none)
    }

    /// Returns the mean loss without a kernel, over all samples.
    fn loss_without(&mut self, kernel: usize) -> f64 {
        self.is_kept[kernel] = false;
        let mut lost = 0.0;
        for (at, covers) in self.covers.iter().enumerate() {
            if !self.uses[at][kernel] {
                continue;
            }
            // Covers of chains that do not use the kernel do not change.
            let without = self
                .edges
                .iter()
                .zip(covers)
                .map(|(edges, (cycles, cover))| {
                    let mut used = cover.iter().flat_map(|(_, kernels)| kernels);
                    match used.any(|&k| k == kernel) {
                        true => {
                            let (_, times) = &self.samples[at];
                            edges.least(times, |k| self.is_kept[k])
                        }
                        false => *cycles,
                    }
                });
            let with = covers.iter().map(|(cycles, _)| *cycles);
            lost += self.loss(at, without) - self.loss(at, with);
        }
        self.is_kept[kernel] = true;
        lost / self.samples.len() as f64
    }

    /// Returns the loss of covers at a sample, compared with all kernels. It is a fraction of the
    /// time plus a quadratic penalty, which equals it at `MUCH`: a bad kernel at one number of rows
    /// is not compensated at others.
    fn loss(&self, at: usize, cycles: impl Iterator<Item = f64>) -> f64 {
        const MUCH: f64 = 0.02;
        let each = self.edges.iter().zip(cycles);
        let sum: f64 = each
            .map(|(edges, cycles)| cycles * edges.times as f64)
            .sum();
        let part = (sum / self.best[at] - 1.0).max(0.0);
        part + part * part / MUCH
    }
}

/// Returns the kernels of the covers of all chains.
fn kernels_of(covers: &[(f64, Cover)]) -> impl Iterator<Item = &usize> {
    let coverings = covers.iter().flat_map(|(_, cover)| cover);
    coverings.flat_map(|(_, kernels)| kernels)
}

/// Returns sixteen numbers of rows in each octave, without duplicates at the low end.
fn coarse_rows() -> Vec<u64> {
    let octaves = (MAX_ROWS as f64).log2();
    let numbers = (0..=(octaves * 16.0) as u32)
        .map(|sixteenths| 2f64.powf(f64::from(sixteenths) / 16.0).round() as u64);
    let mut rows: Vec<u64> = numbers.collect();
    rows.dedup();
    rows
}

#[cfg(test)]
mod tests;
