//! From what was found at some numbers of tokens to the ranges of each problem.

use super::{
    Choice, Problem, Range, Sample, Timing,
    chain::{Found, times_of},
    choice_at, mend,
};

/// Problems that one choice is made of, the first of which says whether the second's kernels are launched.
#[derive(Clone, Debug, PartialEq)]
pub struct Coupled {
    /// Indices.
    pub problems: Vec<usize>,
    /// How often a run launches them.
    pub launches: usize,
}

/// What was found for a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Raced {
    pub tokens: u64,
    /// By problem.
    pub sizes: Vec<u64>,
    pub found: Found,
    /// Microseconds of a run, and of one with the kernels before.
    pub us: f64,
    pub guess_us: f64,
}

/// The ranges of a problem, and the runs that they were found from.
#[derive(Clone, Debug, PartialEq)]
pub struct Pick {
    pub problem: Problem,
    pub ranges: Vec<Range>,
    pub timings: Vec<Timing>,
}

/// The ranges of all problems, from batches of ascending tokens; `groups` as those of what was found.
pub fn ranges_of(
    problems: &[Problem],
    groups: &[Coupled],
    raced: &[Raced],
    n_sms: u32,
) -> Vec<Pick> {
    let mut picks = Vec::new();
    for (
        group,
        Coupled {
            problems: members,
            launches,
        },
    ) in groups.iter().enumerate()
    {
        let mut decides: Option<Vec<Range>> = None;
        for (place, &member) in members.iter().enumerate() {
            let problem = &problems[member];
            let samples = raced.iter().filter_map(|one| {
                let times = times_of(&one.found, group, place);
                sample(
                    problem,
                    one.sizes[member],
                    times,
                    one.us / *launches as f64,
                    n_sms,
                )
            });
            let samples = merged(samples.collect());
            let is_launched = |rows: u64| {
                let first = decides.as_ref().and_then(|ranges| choice_at(ranges, rows));
                first.is_none_or(|choice| choice == Choice::Apart)
            };
            let ranges = mend(problem, &samples, n_sms, is_launched);
            let mut timings: Vec<Timing> = raced
                .iter()
                .map(|one| Timing {
                    size: one.sizes[member],
                    us: rounded(one.us),
                    guess_us: rounded(one.guess_us),
                })
                .collect();
            timings.sort_by_key(|timing| timing.size);
            timings.dedup_by_key(|timing| timing.size);
            picks.push(Pick {
                problem: problem.clone(),
                ranges: ranges.clone(),
                timings,
            });
            decides.get_or_insert(ranges);
        }
    }
    picks
}

/// To the nanosecond.
fn rounded(us: f64) -> f64 {
    (us * 1e3).round().max(1.0) / 1e3
}

/// What choices take in a launch: the fastest as the cost model has it, and others what they were measured to take more.
/// Without a model, parts of the run. `us` is what a run takes for each of the launches.
fn sample(
    problem: &Problem,
    size: u64,
    times: Vec<(Choice, f64)>,
    us: f64,
    n_sms: u32,
) -> Option<Sample> {
    /// Cycles a microsecond that the model counts.
    const CLOCK: f64 = 1755.0;
    let least = |a: &(Choice, f64), b: &(Choice, f64)| a.1.total_cmp(&b.1);
    let (best, least) = times.iter().copied().min_by(least)?;
    let times = match problem.cycles(best, size, n_sms) {
        None => times,
        Some(cycles) => {
            let more = |time: f64| (time - least) * us;
            let all = times.into_iter();
            all.map(|(choice, time)| (choice, cycles / CLOCK + more(time)))
                .collect()
        }
    };
    Some(Sample::new(size, times))
}

/// Ascending sizes, and one sample of those of a size: the geometric mean of each choice that all have.
fn merged(mut samples: Vec<Sample>) -> Vec<Sample> {
    samples.sort_by_key(|sample| sample.size);
    let of_size = samples.chunk_by(|a, b| a.size == b.size);
    let one = |same: &[Sample]| {
        let first = &same[0];
        let mean = |&(choice, _): &(Choice, f64)| {
            let all: Option<Vec<f64>> = same.iter().map(|sample| sample.of(choice)).collect();
            let logs: f64 = all?.iter().map(|us| us.ln()).sum();
            Some((choice, (logs / same.len() as f64).exp()))
        };
        Sample::new(first.size, first.us.iter().filter_map(mean).collect())
    };
    of_size.map(one).collect()
}
