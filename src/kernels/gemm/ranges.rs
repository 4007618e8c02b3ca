//! For which numbers of rows which of several kernels is launched, from their estimated times.

/// Most kernels that one GEMM is compiled with: each costs a few tenths of a second of NVRTC.
pub(super) const MOST_RANGES: usize = 4;

/// A further kernel must save this part of the time, averaged over the row counts.
const WORTH_A_KERNEL: f64 = 0.01;

/// Ranges of rows with the candidate for each: up to its number of rows, inclusive; the last for all
/// the rest. `cycles` estimates the time of a candidate on a number of rows.
///
/// Over row counts from 1 to 16384, evenly spread by their logarithm, the split into ranges is
/// the one with the least mean of time relative to the best candidate's. A row count weighs as the
/// square root of its best time: microseconds matter more where there are more of them.
pub(super) fn ranges(
    n_candidates: usize,
    cycles: impl Fn(u64, usize) -> f64,
) -> Vec<(Option<u64>, usize)> {
    ranges_of(&sampled_rows(), n_candidates, cycles)
}

/// [`ranges`] over these row counts, ascending, of which there must be one at least.
pub(super) fn ranges_of(
    rows: &[u64],
    n_candidates: usize,
    cycles: impl Fn(u64, usize) -> f64,
) -> Vec<(Option<u64>, usize)> {
    // slowdown[c][i]: weighted sum, over the first i row counts, of candidate c's time over the
    // best one's.
    let mut slowdown = vec![vec![0.0]; n_candidates];
    let mut weights = 0.0;
    for &rows in rows {
        let times: Vec<f64> = (0..n_candidates).map(|c| cycles(rows, c)).collect();
        let best = times.iter().copied().fold(f64::INFINITY, f64::min);
        weights += best.sqrt();
        for (sums, time) in slowdown.iter_mut().zip(times) {
            sums.push(sums[sums.len() - 1] + time / best.sqrt());
        }
    }
    let one_candidate = |from: usize, to: usize| {
        let cost = |c: usize| slowdown[c][to] - slowdown[c][from];
        (0..n_candidates)
            .map(|c| (cost(c), c))
            .fold((f64::INFINITY, 0), |best, this| {
                if this.0 < best.0 { this } else { best }
            })
    };
    // best[to]: the least cost of the first `to` row counts in as many ranges as made so far,
    // and the ranges as (end, candidate).
    let mut best: Vec<(f64, Vec<(usize, usize)>)> = (0..=rows.len())
        .map(|to| {
            let (cost, candidate) = one_candidate(0, to);
            (cost, vec![(to, candidate)])
        })
        .collect();
    let mut chosen = best[rows.len()].clone();
    for _ in 1..MOST_RANGES {
        best = (0..=rows.len())
            .map(|to| {
                let mut found = best[to].clone();
                for (from, (before, ranges)) in best.iter().enumerate().take(to).skip(1) {
                    let (cost, candidate) = one_candidate(from, to);
                    if before + cost < found.0 {
                        let mut ranges = ranges.clone();
                        ranges.push((to, candidate));
                        found = (before + cost, ranges);
                    }
                }
                found
            })
            .collect();
        let found = &best[rows.len()];
        if chosen.0 - found.0 < WORTH_A_KERNEL * weights {
            break;
        }
        chosen = found.clone();
    }
    let last = chosen.1.len() - 1;
    chosen
        .1
        .iter()
        .enumerate()
        .map(|(i, &(end, candidate))| ((i < last).then(|| rows[end - 1]), candidate))
        .collect()
}

/// Row counts from 1 to 16384: all powers of two, and seven between each and the next.
pub(super) fn sampled_rows() -> Vec<u64> {
    let mut rows: Vec<u64> = (0..14)
        .flat_map(|octave| (8..16).map(move |eighth| (eighth << octave) / 8))
        .collect();
    rows.push(16384);
    rows.dedup();
    rows
}
