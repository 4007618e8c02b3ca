//! For which numbers of rows which of several kernels is launched, from their estimated times.

/// Most kernels that one GEMM is compiled with: each costs a few tenths of a second of NVRTC.
pub(super) const MOST_RANGES: usize = 4;

/// A further kernel must save this part of the time, averaged over the row counts.
const WORTH_A_KERNEL: f64 = 0.01;

/// What a further kernel must save where some of the candidates are there anyway.
const WORTH_A_RANGE: f64 = 0.002;
/// Most ranges then.
const MOST_FINE_RANGES: usize = 7;

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
    let splits = Splits::new(n_candidates, MOST_RANGES, cycles);
    let worth = WORTH_A_KERNEL * splits.weights;
    let pairs = splits.best.windows(2);
    let more = pairs.take_while(|pair| pair[0].0 - pair[1].0 >= worth);
    splits.ranges(more.count())
}

/// As [`ranges`], in more of them: where what is gained in one is lost in the next, both are kept apart.
pub(super) fn fine_ranges(
    n_candidates: usize,
    cycles: impl Fn(u64, usize) -> f64,
) -> Vec<(Option<u64>, usize)> {
    let splits = Splits::new(n_candidates, MOST_FINE_RANGES, cycles);
    let cost = |more: usize| splits.best[more].0 + more as f64 * WORTH_A_RANGE * splits.weights;
    let most = 0..splits.best.len();
    let least = most.min_by(|&a, &b| cost(a).total_cmp(&cost(b)));
    splits.ranges(least.unwrap_or(0))
}

/// The best split into one range, into at most two, and so on.
struct Splits {
    rows: Vec<u64>,
    /// Of all row counts together.
    weights: f64,
    /// The cost, and the ranges as (end, candidate), an end being an index of `rows`.
    best: Vec<(f64, Vec<(usize, usize)>)>,
}

impl Splits {
    fn new(n_candidates: usize, most: usize, cycles: impl Fn(u64, usize) -> f64) -> Self {
        let rows = sampled_rows();
        // slowdown[c][i]: weighted sum, over the first i row counts, of candidate c's time over the
        // best one's.
        let mut slowdown = vec![vec![0.0]; n_candidates];
        let mut weights = 0.0;
        for &rows in &rows {
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
        // best[to]: the least cost of the first `to` row counts in as many ranges as made so far.
        let mut best: Vec<(f64, Vec<(usize, usize)>)> = (0..=rows.len())
            .map(|to| {
                let (cost, candidate) = one_candidate(0, to);
                (cost, vec![(to, candidate)])
            })
            .collect();
        let mut of_all = vec![best[rows.len()].clone()];
        for _ in 1..most {
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
            of_all.push(best[rows.len()].clone());
        }
        Self {
            rows,
            weights,
            best: of_all,
        }
    }

    /// The split that was found with `more` ranges than one.
    fn ranges(&self, more: usize) -> Vec<(Option<u64>, usize)> {
        let ranges = &self.best[more].1;
        let last = ranges.len() - 1;
        let end = |i: usize, end: usize| (i < last).then(|| self.rows[end - 1]);
        let ranges = ranges.iter().enumerate();
        ranges
            .map(|(i, &(to, candidate))| (end(i, to), candidate))
            .collect()
    }
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
