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

/// Where a kernel is this much slower than the best one of the chosen, that one takes over.
const WORTH_A_RANGE: f64 = 1.01;
/// Rows of the smallest tile: between multiples of it no time of a kernel with such tiles changes.
const STEP: u64 = 64;
/// Of the numbers of rows that are looked at.
pub(super) const LAST_ROWS: u64 = 16384;

/// As [`ranges`], where a candidate may serve several of them, so that a kernel more brings
/// more and the ranges may be as many as the row counts where waves begin.
///
/// Candidates are chosen one after the other, each the one that then saves most, as [`Kernels`] says; then one is exchanged
/// for another as long as that saves time. Beyond 16384 rows the one serves that is best in the mean of the last octave.
/// Numbers of rows that others serve do not count.
pub(super) fn ranges_among(
    served: Served,
    kernels: Kernels,
    n_candidates: usize,
    cycles: impl Fn(u64, usize) -> f64,
) -> Vec<(Option<u64>, usize)> {
    let estimates = Estimates::new(served, n_candidates, cycles);
    let chosen = estimates.choose(Vec::new(), kernels, LAST_ROWS);
    estimates.ranges(&estimates.exchange(chosen))
}

/// How many are chosen of some candidates: each takes 0.1 to 0.4 s of NVRTC.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    /// So many that save any time.
    pub usual: usize,
    pub most: usize,
    /// The part of the time that each beyond the usual ones saves.
    pub worth: f64,
}

impl Kernels {
    /// No more than these, each of which saves this part of the time.
    pub(super) fn worth(most: usize, worth: f64) -> Self {
        Self {
            usual: 0,
            most,
            worth,
        }
    }
}

/// Numbers of rows that other kernels serve.
#[derive(Clone, Copy)]
pub(super) struct Served<'a> {
    /// All up to this one, less than those of the last octave.
    pub up_to: u64,
    /// And those above the first and up to the second.
    pub beside: &'a [RowRange],
}

/// Above the first, up to the second.
pub type RowRange = (u64, Option<u64>);

impl Served<'_> {
    pub(super) fn up_to(rows: u64) -> Self {
        Self {
            up_to: rows,
            beside: &[],
        }
    }

    fn leave(self, rows: u64) -> bool {
        let holds = |&(above, end): &RowRange| rows > above && end.is_none_or(|end| rows <= end);
        rows > self.up_to && !self.beside.iter().any(holds)
    }
}

/// As [`ranges_among`], with the first `n_given` candidates among them whatever they save, and at most so
/// many more, of which each saves the part `worth` of the time up to `most_rows`, beyond which they serve none.
pub(super) fn ranges_with_more(
    after: u64,
    (n_given, most_more, worth): (usize, usize, f64),
    most_rows: u64,
    n_candidates: usize,
    cycles: impl Fn(u64, usize) -> f64,
) -> Vec<(Option<u64>, usize)> {
    let cycles = |rows, at: usize| match at >= n_given && rows > most_rows {
        true => f64::INFINITY,
        false => cycles(rows, at),
    };
    let estimates = Estimates::new(Served::up_to(after), n_candidates, cycles);
    let given = (0..n_given).collect();
    let kernels = Kernels::worth(n_given + most_more, worth);
    let chosen = estimates.choose(given, kernels, most_rows);
    estimates.ranges(&chosen)
}

/// What a further range of `ranges_of_times` must save: a part of the time, times the octaves that it is saved over,
/// by the natural logarithm.
const WORTH_A_CHANGE: f64 = 0.001;

/// As `ranges_among`, of times that were measured, infinite where none was: `given` are candidates that are compiled anyway,
/// and each further one saves a part `worth` of the time. Of all ways to change from one of them to another the one that loses
/// least, with a price for each change.
pub fn ranges_of_times(
    after: u64,
    given: Vec<usize>,
    (most_kernels, worth): (usize, f64),
    n_candidates: usize,
    cycles: impl Fn(u64, usize) -> f64,
) -> Vec<(Option<u64>, usize)> {
    let estimates = Estimates::new(Served::up_to(after), n_candidates, cycles);
    let chosen = estimates.thin(&given, most_kernels, worth);
    estimates.with_few_changes(&chosen)
}

/// The time of every candidate on every number of rows.
struct Estimates {
    rows: Vec<u64>,
    times: Vec<Vec<f64>>,
    /// How much a number of rows counts.
    weights: Vec<f64>,
}

/// The shortest of some candidates' times, and whose it is.
fn least(times: &[f64], of: &[usize]) -> (f64, usize) {
    let times = of.iter().map(|&c| (times[c], c));
    times.fold((f64::INFINITY, 0), |best, this| {
        if this.0 < best.0 { this } else { best }
    })
}

impl Estimates {
    fn new(served: Served, n_candidates: usize, cycles: impl Fn(u64, usize) -> f64) -> Self {
        let small = sampled_rows().into_iter().filter(|&rows| rows < STEP);
        let all = small.chain((STEP..=LAST_ROWS).step_by(STEP as usize));
        let all: Vec<u64> = all.filter(|&rows| rows > served.up_to).collect();
        let steps = all.iter().zip(all.iter().skip(1).chain([&LAST_ROWS]));
        let of = |(&from, &to): (&u64, &u64)| (from, (to as f64 / from as f64).ln());
        let mut steps: Vec<(u64, f64)> = steps.map(of).collect();
        // Where others serve all there are, it does not matter what is chosen.
        if all.iter().any(|&rows| served.leave(rows)) {
            steps.retain(|&(rows, _)| served.leave(rows));
        }
        let (rows, steps): (Vec<u64>, Vec<f64>) = steps.into_iter().unzip();
        let times: Vec<Vec<f64>> = rows
            .iter()
            .map(|&rows| (0..n_candidates).map(|c| cycles(rows, c)).collect())
            .collect();
        let all: Vec<usize> = (0..n_candidates).collect();
        // Evenly by the logarithm of rows, and by the square root of the time, as in `ranges`.
        let weights = steps
            .iter()
            .zip(&times)
            .map(|(step, times)| step / least(times, &all).0.sqrt())
            .collect();
        Self {
            rows,
            times,
            weights,
        }
    }

    fn candidates(&self) -> usize {
        self.times.first().map_or(0, Vec::len)
    }

    /// Candidates beside those that are chosen already, for rows up to so many.
    fn choose(&self, mut chosen: Vec<usize>, kernels: Kernels, most_rows: u64) -> Vec<usize> {
        let counted = self.rows.partition_point(|&rows| rows <= most_rows);
        let all: Vec<usize> = (0..self.candidates()).collect();
        let mut lowest = self.cost(&chosen, counted);
        while chosen.len() < kernels.most {
            let worth = match chosen.len() < kernels.usual {
                true => 0.0,
                false => kernels.worth,
            };
            let (found, candidate) = least(&self.costs_with_each(&chosen, counted), &all);
            if found >= lowest * (1.0 - worth) {
                break;
            }
            lowest = found;
            chosen.push(candidate);
        }
        chosen
    }

    /// The chosen ones, each exchanged for another candidate as long as that saves time: what was best first, by itself,
    /// may be none of the best few.
    fn exchange(&self, mut chosen: Vec<usize>) -> Vec<usize> {
        /// What saves less is a tie.
        const WORTH_AN_EXCHANGE: f64 = 1e-6;
        let mut lowest = self.cost(&chosen, self.rows.len());
        loop {
            let mut best = (lowest * (1.0 - WORTH_AN_EXCHANGE), None);
            for at in 0..chosen.len() {
                let mut rest = chosen.clone();
                rest.remove(at);
                let costs = self.costs_with_each(&rest, self.rows.len());
                for (candidate, cost) in costs.into_iter().enumerate() {
                    if cost < best.0 && !chosen.contains(&candidate) {
                        best = (cost, Some((at, candidate)));
                    }
                }
            }
            let (cost, Some((at, candidate))) = best else {
                return chosen;
            };
            lowest = cost;
            chosen[at] = candidate;
        }
    }

    /// The weighted time of the best of these on the first so many numbers of rows.
    fn cost(&self, of: &[usize], counted: usize) -> f64 {
        let each = self.times[..counted].iter().zip(&self.weights);
        each.map(|(times, weight)| weight * least(times, of).0)
            .sum()
    }

    /// By candidate: what these and it would cost.
    fn costs_with_each(&self, of: &[usize], counted: usize) -> Vec<f64> {
        let mut costs = vec![0.0; self.candidates()];
        for (times, weight) in self.times[..counted].iter().zip(&self.weights) {
            let (shortest, _) = least(times, of);
            for (cost, &time) in costs.iter_mut().zip(times) {
                *cost += weight * shortest.min(time);
            }
        }
        costs
    }

    /// What is left of all candidates but those that are `given`, when one after the other goes that is missed least, until
    /// there are so few and each is worth it.
    fn thin(&self, given: &[usize], most: usize, worth: f64) -> Vec<usize> {
        let cost = |of: &[usize]| self.cost(of, self.rows.len());
        let mut chosen: Vec<usize> = (0..self.candidates()).collect();
        let mut now = cost(&chosen);
        loop {
            let without =
                |at: usize| -> Vec<usize> { chosen.iter().copied().filter(|&c| c != at).collect() };
            let may_go = chosen.iter().filter(|at| !given.contains(at));
            let costs = may_go.map(|&at| (cost(&without(at)), at));
            let Some((cheapest, at)) = costs.min_by(|a, b| a.0.total_cmp(&b.0)) else {
                break;
            };
            let is_last = chosen.len() <= 1;
            if is_last || (chosen.len() <= most && cheapest > now * (1.0 + worth)) {
                break;
            }
            chosen = without(at);
            now = cheapest;
        }
        chosen
    }

    /// The chosen ones by rows, so that what is lost to the best of them and to changes is least.
    fn with_few_changes(&self, chosen: &[usize]) -> Vec<(Option<u64>, usize)> {
        // By candidate: the least loss up to the rows so far where it serves the last, and the ranges that lose it.
        let mut ways: Vec<(f64, Vec<(u64, usize)>)> = Vec::new();
        let next = self.rows.iter().skip(1).chain([&LAST_ROWS]);
        for ((&rows, &to), times) in self.rows.iter().zip(next).zip(&self.times) {
            let (best, _) = least(times, chosen);
            let octaves = (to.max(rows + 1) as f64 / rows as f64).ln();
            let cheapest = ways.iter().min_by(|a, b| a.0.total_cmp(&b.0)).cloned();
            let way = |at: usize| {
                let candidate = chosen[at];
                let lost = (times[candidate] / best - 1.0) * octaves;
                let (before, mut ranges) = match (ways.get(at), &cheapest) {
                    (Some(own), Some(other)) if other.0 + WORTH_A_CHANGE < own.0 => {
                        (other.0 + WORTH_A_CHANGE, other.1.clone())
                    }
                    (Some(own), _) => own.clone(),
                    (None, _) => (0.0, Vec::new()),
                };
                match ranges.last_mut() {
                    Some(last) if last.1 == candidate => last.0 = rows,
                    _ => ranges.push((rows, candidate)),
                }
                (before + lost, ranges)
            };
            ways = (0..chosen.len()).map(way).collect();
        }
        let least_lost = ways.into_iter().min_by(|a, b| a.0.total_cmp(&b.0));
        let ranges = least_lost.map_or_else(Vec::new, |way| way.1);
        let last = ranges.len().saturating_sub(1);
        let ranges = ranges.into_iter().enumerate();
        ranges
            .map(|(at, (up_to, candidate))| ((at < last).then_some(up_to), candidate))
            .collect()
    }

    /// The chosen one that is best, or hardly slower than the best and the one for fewer rows.
    fn ranges(&self, chosen: &[usize]) -> Vec<(Option<u64>, usize)> {
        let all: Vec<usize> = (0..self.candidates()).collect();
        // Of which others may have taken all.
        let last_octave = match self.rows.partition_point(|&rows| rows < LAST_ROWS / 2) {
            none if none == self.rows.len() => 0,
            some => some,
        };
        let mut means = vec![0.0; self.candidates()];
        for times in &self.times[last_octave..] {
            for (mean, time) in means.iter_mut().zip(times) {
                *mean += time / least(times, &all).0;
            }
        }
        let (_, of_the_rest) = least(&means, chosen);
        let mut ranges: Vec<(Option<u64>, usize)> = Vec::new();
        for (&rows, times) in self.rows.iter().zip(&self.times) {
            let (time, best) = least(times, chosen);
            match ranges.last_mut() {
                Some((up_to, current)) if times[*current] <= time * WORTH_A_RANGE => {
                    *up_to = Some(rows);
                }
                _ => ranges.push((Some(rows), best)),
            }
        }
        match ranges.last_mut() {
            Some((up_to, current)) if *current == of_the_rest => *up_to = None,
            _ => ranges.push((None, of_the_rest)),
        }
        ranges
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
