use super::*;
use crate::{
    kernels::trial::uniform,
    machine::testing::{hopper, usual},
    select::{Batches, Operand, implementations::Implementation, testing},
    tensor::DType,
};

const N_KERNELS: u64 = 9;

/// Returns a random number in [0, 1).
fn part(state: &mut u64) -> f64 {
    (uniform(state) % 1000) as f64 / 1000.0
}

fn edge(state: &mut u64, from: usize, sites: usize) -> Edge {
    let n_launches = 1 + uniform(state) % 2;
    let kernels = (0..n_launches).map(|_| {
        let n = 1 + uniform(state) % 3;
        (0..n)
            .map(|_| (uniform(state) % N_KERNELS) as usize)
            .collect()
    });
    let kernels = kernels.collect();
    Edge {
        rule: "made up",
        from,
        implementation: Implementation {
            sites,
            launches: Vec::new(),
            saved: if sites > 1 { part(state) } else { 0.0 },
        },
        kernels,
    }
}

/// Returns a random chain of up to five sites. Most sites have a separate edge, and some edges cover several sites.
fn edges(state: &mut u64) -> Edges {
    let n_sites = 1 + (uniform(state) % 5) as usize;
    let mut edges = Vec::new();
    for from in 0..n_sites {
        for sites in 1..=(n_sites - from).min(3) {
            let most = if sites == 1 { 9 } else { 5 };
            if uniform(state) % 10 < most {
                edges.push(edge(state, from, sites));
            }
        }
    }
    Edges {
        edges,
        n_sites,
        times: 1,
    }
}

/// Returns the min time of all covers of the sites from `from` on, by exhaustive search.
fn least(edges: &Edges, from: usize, times: &[f64]) -> f64 {
    if from == edges.n_sites {
        return 0.0;
    }
    let at = edges.edges.iter().filter(|edge| edge.from == from);
    let each = at.flat_map(|edge| {
        let after = least(edges, from + edge.implementation.sites, times);
        let sums = edge.kernels.iter().fold(vec![0.0], |sums: Vec<f64>, all| {
            let times = all.iter().map(|&kernel| times[kernel]);
            times
                .flat_map(|time| sums.iter().map(move |sum| sum + time))
                .collect()
        });
        sums.into_iter()
            .map(move |sum| sum - edge.implementation.saved + after)
    });
    each.fold(f64::INFINITY, f64::min)
}

#[test]
fn no_other_cover_is_cheaper_than_the_one_found() {
    let (mut n_found, mut n_fused) = (0, 0);
    let mut state = 5;
    for _ in 0..3000 {
        let edges = edges(&mut state);
        let time = |state: &mut u64| match uniform(state) % 12 {
            0..3 => f64::INFINITY,
            _ => 0.1 + part(state),
        };
        let times: Vec<f64> = (0..N_KERNELS).map(|_| time(&mut state)).collect();
        let least = least(&edges, 0, &times);
        let found = edges.cheapest(&times);
        assert_eq!(found.is_some(), least.is_finite());
        let Some((cycles, cover)) = found else {
            continue;
        };
        n_found += 1;
        n_fused += usize::from(cover.len() < edges.n_sites);
        assert!((cycles - least).abs() < 1e-9, "{cycles}, {least}");
        assert!((edges.cycles(&cover, &times) - cycles).abs() < 1e-9);
        // The cover contains each site once, with a supported kernel for each launch.
        let mut at = 0;
        for (number, kernels) in &cover {
            let edge = &edges.edges[*number];
            assert_eq!((edge.from, edge.kernels.len()), (at, kernels.len()));
            let mut each = kernels.iter().zip(&edge.kernels);
            assert!(each.all(|(kernel, all)| all.contains(kernel) && times[*kernel].is_finite()));
            at += edge.implementation.sites;
        }
        assert_eq!(at, edges.n_sites);
    }
    assert!(n_found > 1000 && n_fused > 500, "{n_found}, {n_fused}");
}

/// Returns the loss of a path that uses choice `each[i]` at the `i`th number of rows, plus [`CHANGE`] for each change. Numbers of rows
/// above `MAX_ROWS / 2` count twice, because they also represent all larger batches.
fn lost(each: &[usize], grid: &[(u64, Vec<f64>)], best: &[f64]) -> f64 {
    let part = |at: usize, choice: usize| {
        let before = if at == 0 { 1 } else { grid[at - 1].0 };
        let octaves = (grid[at].0 as f64 / before as f64).ln().max(1e-3);
        (grid[at].1[choice] / best[at] - 1.0) * octaves
    };
    let own: f64 = each
        .iter()
        .enumerate()
        .map(|(at, &choice)| part(at, choice))
        .sum();
    let changes = each.windows(2).filter(|pair| pair[0] != pair[1]).count();
    let Some(&last) = each.last() else {
        return 0.0;
    };
    let beyond = (0..grid.len()).filter(|&at| grid[at].0 > MAX_ROWS / 2);
    let beyond: f64 = beyond.map(|at| part(at, last)).sum();
    own + changes as f64 * CHANGE + beyond
}

#[test]
fn no_other_partition_of_rows_loses_less_than_the_one_found() {
    const CHOICES: usize = 3;
    let rows = [1, 2, 64, 128, 4096, 8192, 12_288, MAX_ROWS];
    let mut state = 11;
    let mut n_changes = Vec::new();
    for round in 0..200 {
        // The differences in time grow with `round % 20`: the smallest differences never justify a change, and the largest always do.
        let spread = 10.0 * CHANGE * f64::from(1 + round % 20);
        let time = |state: &mut u64| 1.0 + spread * part(state);
        let grid: Vec<(u64, Vec<f64>)> = rows
            .iter()
            .map(|&rows| (rows, (0..CHOICES).map(|_| time(&mut state)).collect()))
            .collect();
        let fastest =
            |(_, times): &(u64, Vec<f64>)| times.iter().copied().fold(f64::INFINITY, f64::min);
        let best: Vec<f64> = grid.iter().map(fastest).collect();
        let ranges = path(CHOICES, &grid, &best, |choice, times| times[choice]);
        // The ranges ascend, the last one is unbounded, and neighbors differ.
        assert_eq!(ranges.last().map(|&(up_to, _)| up_to), Some(None));
        for pair in ranges.windows(2) {
            let (Some(end), next) = (pair[0].0, pair[1].0) else {
                panic!("{ranges:?}");
            };
            assert!(next.is_none_or(|next| next > end) && pair[0].1 != pair[1].1);
        }
        let of_rows = |rows: u64| {
            let serves = |range: &&(Option<u64>, usize)| range.0.is_none_or(|end| rows <= end);
            ranges.iter().find(serves).expect("the last serves all").1
        };
        let found: Vec<usize> = rows.iter().map(|&rows| of_rows(rows)).collect();
        let all = CHOICES.pow(rows.len() as u32);
        let each = (0..all).map(|number| {
            let digit = |at: usize| number / CHOICES.pow(at as u32) % CHOICES;
            let choices: Vec<usize> = (0..rows.len()).map(digit).collect();
            lost(&choices, &grid, &best)
        });
        let least = each.fold(f64::INFINITY, f64::min);
        let own = lost(&found, &grid, &best);
        assert!((own - least).abs() < 1e-9, "{own}, {least}: {ranges:?}");
        n_changes.push(ranges.len() - 1);
    }
    // Some grids have many changes and some have few.
    assert!(
        n_changes.iter().any(|&n| n >= 5) && n_changes.iter().any(|&n| n <= 2),
        "{n_changes:?}"
    );
}

#[test]
fn each_site_is_computed_once_for_every_number_of_rows() {
    for machine in [hopper(), usual()] {
        for dtype in [DType::F16, DType::F32] {
            let chains = testing::encoder(768, 3072, dtype);
            let mut question = testing::question(&chains, &machine);
            for (may_fuse, invariant) in [(true, false), (false, false), (true, true)] {
                (question.may_fuse, question.invariant) = (may_fuse, invariant);
                for ((chain, _), launches) in chains.iter().zip(question.answer()) {
                    check(chain, &launches);
                    let fused = launches.iter().any(|launch| launch.first != launch.site);
                    assert!(!fused || (may_fuse && !invariant));
                    let mut all = launches.iter();
                    assert!(!invariant || all.all(|l| l.dispatch.covered() == [Batches::ALL]));
                }
            }
        }
    }
}

/// Checks that the last site's value is computed exactly once for every number of rows.
fn check(chain: &Chain, launches: &[ChosenLaunch]) {
    let last = chain.links.len() - 1;
    let mut parts = Vec::new();
    for launch in launches {
        assert_eq!(launch.dispatch.overlap(), None);
        let ends = |operand: &Operand| matches!(operand, Operand::Value(site) if launch.first + site == last);
        if launch
            .bindings
            .values
            .iter()
            .any(|(_, operand)| ends(operand))
        {
            parts.extend(launch.dispatch.covered());
        }
    }
    assert!(Batches::ALL.is_covered_by(&parts));
    for (at, part) in parts.iter().enumerate() {
        assert!(parts[..at].iter().all(|before| !before.meets(*part)));
    }
}
