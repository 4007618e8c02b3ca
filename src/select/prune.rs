//! Removes kernels that save too little to justify their compilation. NVRTC takes 0.1 to 0.4 s per kernel.

use super::{
    Timings,
    edges::{Cover, Edges, MAX_ROWS},
    implementations::Candidate,
    measure::correction,
};
use crate::{kernels::KernelSpec, machine::Machine};

/// Min saving for which a kernel is kept. The saving is the increase of [`Pruning::loss`] if the kernel is removed, averaged over the
/// sampled numbers of rows. The loss is a fraction of the time of all chains.
const WORTH_A_KERNEL: f64 = 0.0009;
/// Pruning starts with the kernels that are nearly fastest at some sampled number of rows. Such a kernel takes at most `NEAR` times as long
/// as the kernel that is used for the same launch by the cheapest cover (the cheapest list of implementations that computes the chain).
const NEAR: f64 = 1.03;

/// Distinct candidate kernels with their estimated times, identified by index.
pub(super) struct Kernels<'a> {
    machine: &'a Machine,
    timings: Option<&'a Timings>,
    candidates: Vec<Candidate>,
    /// Corrections of the estimates at timed numbers of rows, by kernel.
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

    /// Returns the given numbers of rows, each with the cycles of all kernels. The cycles of a kernel are infinite if it does not support
    /// the number of rows or was pruned.
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

/// For each kernel, returns whether it is kept. Starts with the kernels that are nearly fastest at some number of rows ([`NEAR`]).
/// Repeatedly removes the kernel whose removal costs the least, until each remaining kernel saves at least [`WORTH_A_KERNEL`].
pub(super) fn prune(edges: &[Edges], kernels: &Kernels) -> Vec<bool> {
    let n = kernels.candidates.len();
    let mut samples = kernels.times_on(&coarse_rows());
    let mut is_kept = vec![false; n];
    let mut best = Vec::new();
    for (_, times) in &samples {
        let mut sum = 0.0;
        for edges in edges {
            if let Some((cycles, cover)) = edges.cheapest(times) {
                sum += cycles * edges.times as f64;
                for kernel in edges.near(&cover, times, NEAR) {
                    is_kept[kernel] = true;
                }
            }
        }
        best.push(sum);
    }
    remove(&mut samples, &is_kept);
    let edges: Vec<Edges> = edges
        .iter()
        .map(|edges| edges.clone().with_only(&is_kept))
        .collect();
    let mut pruning = Pruning::new(&edges, samples, &best, n);
    pruning.run();
    pruning.used()
}

/// Sets the cycles of kernels that are not kept to infinity.
fn remove(samples: &mut [(u64, Vec<f64>)], is_kept: &[bool]) {
    for (_, times) in samples {
        let each = times.iter_mut().zip(is_kept);
        let removed = each.filter(|(_, is_kept)| !**is_kept);
        removed.for_each(|(time, _)| *time = f64::INFINITY);
    }
}

/// State of the greedy removal of kernels.
struct Pruning<'a> {
    edges: &'a [Edges],
    /// The samples: numbers of rows, each with the cycles of all kernels, which are infinite for removed kernels.
    samples: Vec<(u64, Vec<f64>)>,
    best: &'a [f64],
    /// For each kernel, the chains that have an implementation with this kernel.
    chains: Vec<Vec<usize>>,
    /// Cheapest covers with the kept kernels, by sample and chain.
    covers: Vec<Vec<(f64, Cover)>>,
    /// The losses of `covers`, by sample.
    losses: Vec<f64>,
    /// For each sample and each kernel, the number of launches in `covers` that use the kernel.
    uses: Vec<Vec<u32>>,
    /// The sums of `uses` over all samples.
    all_uses: Vec<u32>,
}

impl<'a> Pruning<'a> {
    fn new(edges: &'a [Edges], samples: Vec<(u64, Vec<f64>)>, best: &'a [f64], n: usize) -> Self {
        let unknown = vec![(f64::INFINITY, Vec::new()); edges.len()];
        let mut chains = vec![Vec::new(); n];
        for (chain, edges) in edges.iter().enumerate() {
            let kernels = edges.edges.iter().flat_map(|edge| edge.kernels.iter());
            for &kernel in kernels.flatten() {
                if chains[kernel].last() != Some(&chain) {
                    chains[kernel].push(chain);
                }
            }
        }
        let mut pruning = Self {
            edges,
            best,
            chains,
            covers: vec![unknown; samples.len()],
            losses: vec![0.0; samples.len()],
            uses: vec![vec![0; n]; samples.len()],
            all_uses: vec![0; n],
            samples,
        };
        for at in 0..pruning.samples.len() {
            (0..edges.len()).for_each(|chain| pruning.cover(at, chain));
            pruning.losses[at] = pruning.loss(at, None);
        }
        pruning
    }

    /// Removes kernels greedily. Unused kernels are kept until the end, because they may replace removed kernels.
    fn run(&mut self) {
        // For each kernel, the loss if it is removed, and whether this value is up to date. An outdated value is a lower bound (lazy
        // greedy): removing another kernel usually makes a kernel more important. Only kernels that are used at the same numbers of rows as
        // a removed kernel may become less important, so their values are reset to 0.
        let mut losses: Vec<(f64, bool)> = vec![(0.0, false); self.all_uses.len()];
        let of_chains = |&kernel: &usize| !self.chains[kernel].is_empty();
        let kernels: Vec<usize> = (0..losses.len()).filter(of_chains).collect();
        loop {
            let kernels = kernels.iter().copied();
            let used = kernels.filter(|&kernel| self.all_uses[kernel] > 0);
            let least = used.min_by(|&a, &b| losses[a].0.total_cmp(&losses[b].0));
            let Some(kernel) = least else { break };
            let (loss, is_known) = losses[kernel];
            if loss >= WORTH_A_KERNEL {
                break;
            }
            if !is_known {
                losses[kernel] = (self.loss_without(kernel), true);
                continue;
            }
            for at in 0..self.samples.len() {
                self.samples[at].1[kernel] = f64::INFINITY;
                if self.uses[at][kernel] == 0 {
                    continue;
                }
                for &beside in kernels_of(&self.covers[at]) {
                    losses[beside] = (0.0, false);
                }
                for chain in self.chains[kernel].clone() {
                    if has(&self.covers[at][chain].1, kernel) {
                        self.cover(at, chain);
                    }
                }
                for &used in kernels_of(&self.covers[at]) {
                    losses[used].1 = false;
                }
                self.losses[at] = self.loss(at, None);
            }
        }
    }

    /// For each kernel, returns whether some cover uses it.
    fn used(&self) -> Vec<bool> {
        self.all_uses.iter().map(|&uses| uses > 0).collect()
    }

    /// Updates the cheapest cover of chain `chain` at sample `at`.
    fn cover(&mut self, at: usize, chain: usize) {
        let found = self.edges[chain].cheapest(&self.samples[at].1);
        let new = found.unwrap_or((f64::INFINITY, Vec::new()));
        for (_, kernels) in &new.1 {
            for &kernel in kernels {
                self.uses[at][kernel] += 1;
                self.all_uses[kernel] += 1;
            }
        }
        let (_, old) = std::mem::replace(&mut self.covers[at][chain], new);
        for (_, kernels) in &old {
            for &kernel in kernels {
                self.uses[at][kernel] -= 1;
                self.all_uses[kernel] -= 1;
            }
        }
    }

    /// Returns the increase of the loss, averaged over all samples, if a kernel is removed. Stops summing when the result reaches
    /// [`WORTH_A_KERNEL`], because the kernel is then kept in any case.
    fn loss_without(&mut self, kernel: usize) -> f64 {
        let (mut lost, n) = (0.0, self.samples.len() as f64);
        for at in 0..self.samples.len() {
            if self.uses[at][kernel] == 0 {
                continue;
            }
            let time = std::mem::replace(&mut self.samples[at].1[kernel], f64::INFINITY);
            lost += self.loss(at, Some(kernel)) - self.losses[at];
            self.samples[at].1[kernel] = time;
            if lost / n >= WORTH_A_KERNEL {
                break;
            }
        }
        lost / n
    }

    /// Returns the loss of the covers of all chains at sample `at`. A cover that uses the kernel `removed` is replaced by the cheapest
    /// cover without this kernel. Let `part` be the additional time, as a fraction of the time if all kernels were available. The loss is
    /// `part` plus a quadratic penalty, which is as large as `part` itself if `part` is `MUCH`. The penalty keeps small gains at many
    /// numbers of rows from compensating for a slow kernel at one number of rows.
    fn loss(&self, at: usize, removed: Option<usize>) -> f64 {
        const MUCH: f64 = 0.02;
        let changed = removed.map_or(&[][..], |kernel| &self.chains[kernel]);
        let mut changed = changed.iter().peekable();
        let mut sum = 0.0;
        for (chain, (cycles, cover)) in self.covers[at].iter().enumerate() {
            let may_change = changed.next_if_eq(&&chain).is_some();
            let edges = &self.edges[chain];
            let cycles = match removed {
                Some(kernel) if may_change && has(cover, kernel) => {
                    edges.least(&self.samples[at].1)
                }
                _ => *cycles,
            };
            sum += cycles * edges.times as f64;
        }
        let part = (sum / self.best[at] - 1.0).max(0.0);
        part + part * part / MUCH
    }
}

/// Returns whether a launch of a cover uses a kernel.
fn has(cover: &Cover, kernel: usize) -> bool {
    cover.iter().any(|(_, kernels)| kernels.contains(&kernel))
}

/// Returns the kernels of the covers of all chains.
fn kernels_of(covers: &[(f64, Cover)]) -> impl Iterator<Item = &usize> {
    let coverings = covers.iter().flat_map(|(_, cover)| cover);
    coverings.flat_map(|(_, kernels)| kernels)
}

/// Returns sixteen numbers of rows between each power of two and the next, without duplicates at the low end.
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
