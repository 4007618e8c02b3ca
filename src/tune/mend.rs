//! From what choices take in a whole program to ranges: the cost model's estimates, mended where they were
//! measured, and then split as the guess is.

use super::{
    Choice, Counted, Problem, Range, Sample, choice_at, interpolate::estimated,
    settle::settle_worth,
};
use crate::kernels::gemm::{ranges_of_times, without_slivers};

/// From a size to half-way to the next one, which is a quarter of an octave larger.
const HALF_A_STEP: f64 = 1.0905;
/// Kernels of a problem for the sizes that were measured.
const MOST_KERNELS: usize = 4;
/// One more, as two launches need none.
const MOST_OF_PAIRS: usize = 5;
/// The part of a problem's time that each further kernel saves.
const WORTH_A_KERNEL: f64 = 0.003;
/// A choice that is not the guess's must be so much faster.
const DOUBT: f64 = 1.015;
/// As a part of a whole run.
const WORTH_A_RANGE: f64 = 0.012;

/// The ranges of a problem that was timed at `samples`, ascending: below and above them as guessed. `is_launched` says for which
/// sizes the problem's kernels are launched at all.
///
/// Between two measured sizes a choice takes what the cost model says, times what it was off by on both sides: so a wave
/// of tiles more is counted where it is, also at sizes that nobody timed. Without a model, as for attention, what was timed decides.
pub fn mend(
    problem: &Problem,
    samples: &[Sample],
    n_sms: u32,
    is_launched: impl Fn(u64) -> bool,
) -> Vec<Range> {
    let guess = problem.guess();
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else {
        return guess;
    };
    // From the one to the other the nearest size is one that was raced.
    let (after, until) = match problem.counted() {
        Counted::Longest => (0, last.size),
        Counted::Rows => (
            (first.size as f64 / HALF_A_STEP) as u64,
            (last.size as f64 * HALF_A_STEP) as u64,
        ),
    };
    let above: Vec<Range> = guess
        .iter()
        .copied()
        .filter(|range| range.up_to.is_none_or(|up_to| up_to > until))
        .collect();
    let mended = match problem.counted() {
        Counted::Longest => settle_worth(samples, MOST_KERNELS, WORTH_A_RANGE),
        Counted::Rows => {
            let given = within(&guess, after).chain(&above);
            let given: Vec<Choice> = given.map(|range| range.choice).collect();
            let is_launched = |rows| rows <= until && is_launched(rows);
            by_model(problem, samples, n_sms, (after, &given), is_launched)
        }
    };
    if mended.is_empty() {
        return guess;
    }
    let up_to = |ranges: &[Range], most: u64| -> Vec<Range> {
        let reached = within(ranges, most).map(|range| Range {
            up_to: Some(range.up_to.map_or(most, |up_to| up_to.min(most))),
            choice: range.choice,
        });
        reached.collect()
    };
    let all = up_to(&guess, after).into_iter();
    let all = all.chain(up_to(&mended, until)).chain(above);
    let mut ranges: Vec<Range> = Vec::new();
    for range in all {
        match ranges.last_mut() {
            Some(last) if last.choice == range.choice => last.up_to = range.up_to,
            _ => ranges.push(range),
        }
    }
    ranges
}

/// The ranges that sizes up to one reach.
fn within(guess: &[Range], most: u64) -> impl Iterator<Item = &Range> {
    let mut above = 0;
    guess.iter().take_while(move |range| {
        let is_reached = above < most;
        above = range.up_to.unwrap_or(u64::MAX);
        is_reached
    })
}

fn by_model(
    problem: &Problem,
    samples: &[Sample],
    n_sms: u32,
    (after, compiled): (u64, &[Choice]),
    is_launched: impl Fn(u64) -> bool,
) -> Vec<Range> {
    let mut choices: Vec<Choice> = Vec::new();
    for &(choice, _) in samples.iter().flat_map(|sample| &sample.us) {
        if !choices.contains(&choice) {
            choices.push(choice);
        }
    }
    // Two launches, which need no kernel of their own, come first.
    choices.sort_by_key(|&choice| choice != Choice::Apart);
    let serves_all = |&choice: &Choice| choice.most().is_none();
    if !choices.iter().any(serves_all) {
        return Vec::new();
    }
    let guess = problem.guess();
    let model = |choice, size| problem.cycles(choice, size, n_sms);
    let times = |size: u64| -> Vec<(Choice, f64)> {
        let above = samples.partition_point(|sample| sample.size < size);
        let last = samples.len() - 1;
        let (a, b) = (above.saturating_sub(1), above.min(last));
        if a < b && samples[b].size > size {
            return estimated(&samples[a], &samples[b], size, &model);
        }
        let of = |&(choice, us): &(Choice, f64)| {
            let ratio = model(choice, size)? / model(choice, samples[b].size)?;
            Some((choice, us * ratio))
        };
        samples[b].us.iter().filter_map(of).collect()
    };
    // Far from anything that was timed, a kernel is no candidate.
    let cycles = |rows: u64, at: usize| {
        let choice = choices[at];
        if choice.most().is_some_and(|most| rows > most) {
            return NOT_TIMED;
        }
        let known = times(rows).into_iter().find(|(known, _)| *known == choice);
        let us = known.map_or(NOT_TIMED, |(_, us)| us);
        // What the estimate would take has the benefit of the doubt.
        let us = match choice_at(&guess, rows) == Some(choice) {
            true => us,
            false => us * DOUBT,
        };
        match is_launched(rows) {
            true => us,
            false => us * SELDOM,
        }
    };
    let is_given = |choice: &Choice| compiled.contains(choice) || *choice == Choice::Apart;
    let given: Vec<usize> = (0..choices.len())
        .filter(|&at| is_given(&choices[at]))
        .collect();
    let kernels = match problem {
        Problem::LinearLayerNorm(_) => MOST_OF_PAIRS,
        _ => MOST_KERNELS,
    };
    let most = given.len().max(1) + kernels - 1;
    let ranges = ranges_of_times(after, given, (most, WORTH_A_KERNEL), choices.len(), cycles);
    let ranges = match problem {
        Problem::LinearLayerNorm(_) => without_slivers(ranges),
        _ => ranges,
    };
    let mut ranges: Vec<Range> = ranges
        .into_iter()
        .map(|(up_to, at)| Range {
            up_to,
            choice: choices[at],
        })
        .collect();
    // The last serves every size.
    if let Some(last) = ranges.last()
        && let Some(most) = last.choice.most()
    {
        let any = choices.iter().copied().find(serves_all);
        let any = choice_at(&guess, u64::MAX).filter(serves_all).or(any);
        if let (Some(choice), Some(last)) = (any, ranges.last_mut()) {
            last.up_to = Some(most);
            ranges.push(Range {
                up_to: None,
                choice,
            });
        }
    }
    ranges
}

/// Where a kernel is not launched, unless linear layers and LayerNorms are asked to be apart, its time counts for little, but
/// it is to be a good one.
const SELDOM: f64 = 1e-6;
/// Microseconds that are more than any kernel takes, and still can be added up.
const NOT_TIMED: f64 = 1e9;
