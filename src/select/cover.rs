//! Covers of chains. A cover is a list of implementations that together compute all sites of a [`Chain`]. For one number of rows, the
//! cheapest cover is a shortest path over the sites. Over all numbers of rows, the selection weighs the loss of time against the number of
//! kernels and the number of changes of cover.

use super::{
    Dispatch, Timings,
    edges::{Cover, Edge, Edges, MAX_ROWS},
    implementations::{ALL, Bindings, Unfit, implementations, quantized_rows},
    prune::{Kernels, prune},
    site::Chain,
};
use crate::{kernels::KernelSpec, machine::Machine, tensor::Extents};

/// The input of a kernel selection.
pub struct SelectionInput<'a> {
    /// Distinct chains, each with the number of its occurrences in the program.
    pub chains: &'a [(Chain, usize)],
    pub machine: &'a Machine,
    /// Timings that correct the cost model.
    pub timings: Option<&'a Timings>,
    /// Whether fused implementations may be used, which compute several sites (the problems of several nodes).
    pub may_fuse: bool,
    /// Whether each site (the problem of one node of the graph) must have one kernel for all numbers of rows.
    pub invariant: bool,
    /// Whether the input rows of linear layers may be rounded to E4M3 or int8, for products with a weight of the same type.
    pub quantizes_rows: bool,
}

/// One launch that was chosen for a [`Chain`].
#[derive(Clone, Debug, PartialEq)]
pub struct ChosenLaunch {
    /// Name of the implementation.
    pub rule: &'static str,
    /// Number of adjacent sites of the chain that the implementation computes.
    pub sites: usize,
    /// The implementation's first site in the chain; the sites of `bindings` are relative to it.
    pub first: usize,
    /// Index of a site in the chain. The launch is appended to the program when the node of this site is lowered.
    pub site: usize,
    pub bindings: Bindings,
    pub dispatch: Dispatch<KernelSpec>,
}

/// A fused implementation that could compute some sites of a chain but is not used, with the reason.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// Index in [`SelectionInput::chains`].
    pub chain: usize,
    /// Index in the chain of the first site that the implementation could compute.
    pub first: usize,
    /// Name of the implementation.
    pub rule: &'static str,
    pub because: String,
}

/// A kernel that is not selected for a given number of rows. `cover` lists all kernels of the cheapest cover that contains it. A cover is a
/// list of implementations that together compute a whole chain.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    pub kernel: KernelSpec,
    pub cover: Vec<KernelSpec>,
}

impl Edges {
    /// Returns a separate launch for each site, with the kernel that is fastest at [`MAX_ROWS`]. Large batches are only slightly
    /// slower than with a dispatch by rows, and small batches take little time anyway.
    fn invariant(&self, kernels: &Kernels) -> Vec<ChosenLaunch> {
        let (_, times) = kernels.times_on(&[MAX_ROWS]).remove(0);
        let mut covered = Vec::new();
        for edge in &self.edges {
            for (launch, candidates) in edge.implementation.launches.iter().zip(&edge.kernels) {
                let fastest = candidates
                    .iter()
                    .min_by(|a, b| times[**a].total_cmp(&times[**b]));
                covered.extend(fastest.map(|&kernel| ChosenLaunch {
                    rule: edge.rule,
                    sites: edge.implementation.sites,
                    first: edge.from,
                    site: edge.from + launch.site,
                    bindings: launch.bindings.clone(),
                    dispatch: Dispatch::always(kernels.spec(kernel).clone()),
                }));
            }
        }
        covered
    }
}

impl SelectionInput<'_> {
    /// Returns the launches that are chosen for each chain, in launch order.
    pub fn answer(&self) -> Vec<Vec<ChosenLaunch>> {
        let (mut kernels, edges) = self.edges();
        if self.invariant {
            return edges
                .iter()
                .map(|edges| edges.invariant(&kernels))
                .collect();
        }
        let is_kept = prune(&edges, &kernels);
        kernels.keep(&is_kept);
        let grid = kernels.times_on(&fine_rows());
        edges
            .into_iter()
            .map(|edges| covered(&edges.with_only(&is_kept), &kernels, &grid))
            .collect()
    }

    /// Returns kernels that are not selected for this number of rows, but that might be fastest if their estimates were slightly wrong. Let
    /// B be the cheapest of all covers. For each kernel, let C be the cheapest cover with this kernel, and let `t` be the total time of the
    /// kernels that are in C but not in B. The kernel is returned if C takes at most `more · t` longer than B.
    pub fn alternatives(&self, rows: u64, more: f64) -> Vec<Alternative> {
        let (kernels, all) = self.edges();
        let (_, times) = kernels.times_on(&[rows]).remove(0);
        let mut alternatives: Vec<Alternative> = Vec::new();
        for edges in &all {
            let Some((least, best)) = edges.cheapest(&times) else {
                continue;
            };
            let of = |cover: &Cover| -> Vec<usize> {
                cover
                    .iter()
                    .flat_map(|(_, kernels)| kernels.iter().copied())
                    .collect()
            };
            let in_best = of(&best);
            for kernel in
                (0..times.len()).filter(|&k| times[k].is_finite() && !in_best.contains(&k))
            {
                // A negative time forces the kernel into the cheapest cover.
                let mut forced = times.clone();
                forced[kernel] = -1e12;
                let Some((_, cover)) = edges.cheapest(&forced) else {
                    continue;
                };
                let in_cover = of(&cover);
                let changed = in_cover
                    .iter()
                    .filter(|k| !in_best.contains(k))
                    .map(|&k| times[k]);
                let is_near = edges.cycles(&cover, &times) - least <= more * changed.sum::<f64>();
                let spec = kernels.spec(kernel);
                let is_new = alternatives.iter().all(|known| known.kernel != *spec);
                if in_cover.contains(&kernel) && is_near && is_new {
                    alternatives.push(Alternative {
                        kernel: spec.clone(),
                        cover: in_cover.iter().map(|&k| kernels.spec(k).clone()).collect(),
                    });
                }
            }
        }
        alternatives
    }

    /// Returns the fused implementations that could compute some sites of a chain but are not used for `batch`. `launches` is the result of
    /// [`Self::answer`]. All sites of a fused implementation have one row per token of the batch.
    pub fn refusals(&self, launches: &[Vec<ChosenLaunch>], batch: &Extents) -> Vec<Refusal> {
        let rows = batch.tokens;
        let (kernels, all) = self.edges();
        let (_, times) = kernels.times_on(&[rows]).remove(0);
        let mut refusals = Vec::new();
        for (at, (chain, _)) in self.chains.iter().enumerate() {
            for (first, rule) in
                (0..chain.links.len()).flat_map(|i| ALL.iter().map(move |r| (i, r)))
            {
                let because = match (rule.implement)(&chain.links[first..], self.machine) {
                    Err(Unfit::Sites) => continue,
                    Err(Unfit::Because(reason)) => reason,
                    Ok(_) if self.rounds_rows(rule.name) => KEPT_ROWS.to_owned(),
                    Ok(one) if one.sites == 1 => continue,
                    Ok(_) if self.invariant => {
                        "an invariant program has one launch for each operator".to_owned()
                    }
                    Ok(_) if !self.may_fuse => "fused launches are disabled".to_owned(),
                    Ok(fused) => {
                        let is_it = |l: &&ChosenLaunch| (l.first, l.rule) == (first, rule.name);
                        let mut own = launches[at].iter().filter(is_it);
                        if own.any(|launch| launch.dispatch.at(&batch.with_rows(rows)).is_some()) {
                            continue;
                        }
                        let more = all[at].cycles_more(first, fused.sites, rule.name, &times);
                        match more / f64::from(self.machine.clock_mhz) {
                            us if us.is_infinite() => {
                                format!("its kernels do not support {rows} rows")
                            }
                            us if us > 0.0 => {
                                format!("it takes about {us:.1} µs more for {rows} rows")
                            }
                            us => format!(
                                "it saves only {:.1} µs for {rows} rows, too little for another kernel",
                                -us
                            ),
                        }
                    }
                };
                refusals.push(Refusal {
                    chain: at,
                    first,
                    rule: rule.name,
                    because,
                });
            }
        }
        refusals
    }

    /// Returns whether an implementation by this rule would round rows that must stay in 16 bits.
    fn rounds_rows(&self, rule: &str) -> bool {
        !self.quantizes_rows && quantized_rows::NAMES.contains(&rule)
    }

    pub(super) fn edges(&self) -> (Kernels<'_>, Vec<Edges>) {
        let mut kernels = Kernels::new(self.machine, self.timings);
        let mut all = Vec::new();
        for (chain, times) in self.chains {
            let mut edges = Vec::new();
            for from in 0..chain.links.len() {
                for (rule, mut implementation) in
                    implementations(&chain.links[from..], self.machine)
                {
                    let fuses = implementation.sites > 1;
                    let is_split = implementation.launches.len() > 1;
                    if (fuses && !self.may_fuse)
                        || (self.invariant && (fuses || is_split))
                        || (is_split && chain.in_one_launch)
                        || self.rounds_rows(rule)
                    {
                        continue;
                    }
                    let launches = implementation.launches.iter_mut();
                    let numbers = launches.map(|launch| {
                        let candidates = std::mem::take(&mut launch.candidates).into_iter();
                        candidates
                            .map(|candidate| kernels.number(candidate))
                            .collect()
                    });
                    edges.push(Edge {
                        rule,
                        from,
                        kernels: numbers.collect(),
                        implementation,
                    });
                }
            }
            all.push(Edges {
                edges,
                n_sites: chain.links.len(),
                times: *times,
            });
        }
        (kernels, all)
    }
}

/// Reason for refusing rules that round rows to 8 bits.
const KEPT_ROWS: &str = "inputs of linear layers stay in 16 bits, because the pass `quantize_inputs` is disabled, or because the checkpoint quantizes only weights";

/// Returns the numbers of rows at which covers are compared, in ascending order. From 64 on, they are multiples of 8, like the rows of a
/// tile. The distances between them grow, because one more tile matters less if there are many tiles.
fn fine_rows() -> Vec<u64> {
    let steps = [
        (1, 16, 1),
        (18, 32, 2),
        (36, 60, 4),
        (64, 128, 8),
        (144, 256, 16),
        (288, 1024, 32),
        (1088, MAX_ROWS, 64),
    ];
    steps
        .into_iter()
        .flat_map(|(from, to, step)| (from..=to).step_by(step))
        .collect()
}

/// Min saving that justifies another cover for a range of numbers of rows. A saving is the fraction of the chain's time that the other cover
/// saves, integrated over the natural logarithm of the number of rows. Smaller savings are within the error of the estimates and are not worth another entry in the dispatch.
const CHANGE: f64 = 0.0005;

/// Returns the launches of one chain. Each range of rows has one cover (a list of implementations that together compute the chain). The
/// ranges minimize the loss of time plus [`CHANGE`] for each change of cover.
fn covered(edges: &Edges, kernels: &Kernels, grid: &[(u64, Vec<f64>)]) -> Vec<ChosenLaunch> {
    let mut covers: Vec<Cover> = Vec::new();
    let mut best = Vec::new();
    for (_, times) in grid {
        let found = edges.cheapest(times);
        best.push(found.as_ref().map_or(f64::INFINITY, |(cycles, _)| *cycles));
        if let Some((_, cover)) = found
            // Most covers are equal to the previous one, so the search starts at the end.
            && !covers.iter().rev().any(|known| *known == cover)
        {
            covers.push(cover);
        }
    }
    let ranges = path(covers.len(), grid, &best, |at, times| {
        edges.cycles(&covers[at], times)
    });
    let mut answer = Vec::new();
    for (number, edge) in edges.edges.iter().enumerate() {
        for (at, launch) in edge.implementation.launches.iter().enumerate() {
            let kernel_of = |cover: usize| {
                let own = covers[cover].iter().find(|(edge, _)| *edge == number)?;
                Some(kernels.spec(own.1[at]).clone())
            };
            let ranges = ranges
                .iter()
                .map(|&(up_to, cover)| (up_to, kernel_of(cover)));
            let dispatch = Dispatch::by_rows(ranges);
            if !dispatch.is_empty() {
                answer.push(ChosenLaunch {
                    rule: edge.rule,
                    sites: edge.implementation.sites,
                    first: edge.from,
                    site: edge.from + launch.site,
                    bindings: launch.bindings.clone(),
                    dispatch,
                });
            }
        }
    }
    answer.sort_by_key(|covered| covered.site);
    answer
}

/// Partitions the numbers of rows into ranges with one choice each, by dynamic programming. Minimizes the loss relative to the best choice
/// at each number of rows, plus [`CHANGE`] for each change. Numbers of rows above `MAX_ROWS / 2` count twice, because they also represent
/// all larger batches.
pub(super) fn path(
    n_choices: usize,
    grid: &[(u64, Vec<f64>)],
    best: &[f64],
    cycles: impl Fn(usize, &[f64]) -> f64,
) -> Vec<(Option<u64>, usize)> {
    // `losses[choice]` is the min loss of all paths to the current number of rows that end with `choice`. `from[at][choice]` is the choice
    // at `grid[at - 1]` on the best path that has `choice` at `grid[at]`.
    let mut losses: Vec<f64> = vec![0.0; n_choices];
    let mut from: Vec<Vec<usize>> = Vec::new();
    let mut of_last_octave = vec![0.0; n_choices];
    let mut before = 0;
    for ((rows, times), best) in grid.iter().zip(best) {
        let log_ratio = (*rows as f64 / (before.max(1)) as f64).ln().max(1e-3);
        let cheapest = (0..n_choices)
            .min_by(|&a, &b| losses[a].total_cmp(&losses[b]))
            .unwrap_or(0);
        let least: f64 = losses.get(cheapest).copied().unwrap_or(0.0);
        let mut origin = Vec::with_capacity(n_choices);
        let mut next = Vec::with_capacity(n_choices);
        for choice in 0..n_choices {
            let stays = losses[choice] <= least + CHANGE;
            origin.push(if stays { choice } else { cheapest });
            let so_far = if stays {
                losses[choice]
            } else {
                least + CHANGE
            };
            let lost = cycles(choice, times) / best - 1.0;
            if *rows > MAX_ROWS / 2 {
                of_last_octave[choice] += lost * log_ratio;
            }
            next.push(so_far + lost * log_ratio);
        }
        losses = next;
        from.push(origin);
        before = *rows;
    }
    for (loss, rest) in losses.iter_mut().zip(&of_last_octave) {
        *loss += rest;
    }
    let Some(mut choice) = (0..n_choices).min_by(|&a, &b| losses[a].total_cmp(&losses[b])) else {
        return Vec::new();
    };
    let mut ranges = vec![(None, choice)];
    for at in (1..grid.len()).rev() {
        let earlier = from[at][choice];
        if earlier != choice {
            ranges.push((Some(grid[at - 1].0), earlier));
            choice = earlier;
        }
    }
    ranges.reverse();
    ranges
}

#[cfg(test)]
mod tests;
