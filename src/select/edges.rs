//! A graph for the search of covers. A cover is a list of implementations that together compute all sites of a chain. Node `i` means that
//! the first `i` sites of the chain are computed. Each edge is an implementation of one or more sites. The shortest path is the cheapest
//! cover.

use super::implementations::Implementation;

/// Maximum number of rows at which covers are compared. Larger batches use the cover of the last range. To account for them, numbers of
/// rows above half of this maximum count twice.
pub(super) const MAX_ROWS: u64 = 16384;

/// An implementation at a site of a chain. The edge leads from the implementation's first site to the site after its last one.
#[derive(Clone)]
pub(super) struct Edge {
    /// Name of the implementation.
    pub rule: &'static str,
    pub from: usize,
    pub implementation: Implementation,
    /// Indices of the candidate kernels of each launch of the implementation.
    pub kernels: Vec<Vec<usize>>,
}

/// A cover (implementations that together compute a whole chain). Each item is an implementation, as an index into [`Edges::edges`], with
/// the kernel that is chosen for each of its launches.
pub(super) type Cover = Vec<(usize, Vec<usize>)>;

/// All implementations of sites of one chain, as the edges of the chain's graph.
#[derive(Clone)]
pub(super) struct Edges {
    pub edges: Vec<Edge>,
    pub n_sites: usize,
    /// Number of occurrences of the chain in the program.
    pub times: usize,
}

impl Edges {
    /// Returns the cheapest cover and its cycles; `None` if there is no cover. `times` are the cycles of each kernel; they are infinite for
    /// kernels that do not support the size or that must not be used.
    pub(super) fn cheapest(&self, times: &[f64]) -> Option<(f64, Cover)> {
        let best = self.shortest(times);
        let mut cover = Vec::new();
        let mut at = self.n_sites;
        while at > 0 {
            let number = best[at].1?;
            let edge = &self.edges[number];
            let fastest = |candidates: &Vec<usize>| {
                let all = candidates.iter().copied();
                all.min_by(|&a, &b| times[a].total_cmp(&times[b]))
            };
            cover.push((number, edge.kernels.iter().filter_map(fastest).collect()));
            at = edge.from;
        }
        cover.reverse();
        let total = best[self.n_sites].0;
        total.is_finite().then_some((total, cover))
    }

    /// Returns the cycles of the cheapest cover of the chain; infinite if there is no cover.
    pub(super) fn least(&self, times: &[f64]) -> f64 {
        self.shortest(times)[self.n_sites].0
    }

    /// Returns how many more cycles the cheapest cover that uses the given edge takes than the cheapest cover of all.
    pub(super) fn cycles_more(&self, from: usize, sites: usize, rule: &str, times: &[f64]) -> f64 {
        let mut with = self.clone();
        let is_it = |edge: &Edge| (edge.from, edge.rule) == (from, rule);
        let is_apart = |edge: &Edge| {
            edge.from + edge.implementation.sites <= from || edge.from >= from + sites
        };
        with.edges.retain(|edge| is_it(edge) || is_apart(edge));
        with.least(times) - self.least(times)
    }

    /// For each `n` from 0 to `n_sites`, returns the cycles and the last edge of the cheapest cover of the first `n` sites. The cycles are
    /// infinite if there is no such cover.
    fn shortest(&self, times: &[f64]) -> Vec<(f64, Option<usize>)> {
        let mut best: Vec<(f64, Option<usize>)> = vec![(f64::INFINITY, None); self.n_sites + 1];
        best[0].0 = 0.0;
        for (at, edge) in self.edges.iter().enumerate() {
            let to = edge.from + edge.implementation.sites;
            let mut launches = 0.0;
            for candidates in &edge.kernels {
                let mut least = f64::INFINITY;
                for &kernel in candidates {
                    let time = times[kernel];
                    if time < least {
                        least = time;
                    }
                }
                launches += least;
            }
            let sum = best[edge.from].0 - edge.implementation.saved + launches;
            if sum < best[to].0 {
                best[to] = (sum, Some(at));
            }
        }
        best
    }

    /// Removes the kernels that are not kept (`is_kept`) from the edges, which speeds up the search for covers.
    pub(super) fn with_only(mut self, is_kept: &[bool]) -> Self {
        let lists = self.edges.iter_mut().flat_map(|edge| &mut edge.kernels);
        lists.for_each(|kernels| kernels.retain(|&kernel| is_kept[kernel]));
        self
    }

    /// Returns the cycles of a cover.
    pub(super) fn cycles(&self, cover: &Cover, times: &[f64]) -> f64 {
        let of_edge = |(edge, kernels): &(usize, Vec<usize>)| {
            let sum: f64 = kernels.iter().map(|&kernel| times[kernel]).sum();
            sum - self.edges[*edge].implementation.saved
        };
        cover.iter().map(of_edge).sum()
    }

    /// Returns kernels that are nearly as fast as those of a cover. For each launch of the cover, these are the candidates that take at
    /// most `part` times as long as the kernel that the cover uses.
    pub(super) fn near(&self, cover: &Cover, times: &[f64], part: f64) -> Vec<usize> {
        let mut near = Vec::new();
        for (edge, kernels) in cover {
            for (candidates, &chosen) in self.edges[*edge].kernels.iter().zip(kernels) {
                let most = times[chosen] * part;
                near.extend(candidates.iter().copied().filter(|&c| times[c] <= most));
            }
        }
        near
    }
}
