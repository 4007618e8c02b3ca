//! Times at sizes that were not measured, from those that were and the cost model's ratios.
//!
//! A kernel's time goes up in steps, by a wave of tiles at a time, and every tile has its steps at other
//! sizes. So of two sizes far apart the same tile may be the fastest at both, and lose between them.
//! Where the steps are the model knows; how long a step takes was measured on both sides.

use super::{Choice, Sample};

/// Sizes between two measured ones.
const BETWEEN: u32 = 6;

/// The samples, and between each and the next some sizes with the times that the choices would take:
/// `time(choice, size) = measured(choice, neighbour) · model(size) / model(neighbour)`, from both
/// neighbours, or the one at which the choice was timed, weighted by how near they are.
///
/// `model` estimates a choice's time at a size, in any unit; where it has no estimate the samples stay as they
/// are. All sizes between two measured ones together weigh as much as a measured one.
pub fn between(samples: &[Sample], model: impl Fn(Choice, u64) -> Option<f64>) -> Vec<Sample> {
    let mut all: Vec<Sample> = Vec::new();
    for (at, sample) in samples.iter().enumerate() {
        all.push(sample.clone());
        let Some(next) = samples.get(at + 1) else {
            continue;
        };
        let ratio = next.size as f64 / sample.size as f64;
        let size = |i: u32| sample.size as f64 * ratio.powf(f64::from(i) / f64::from(BETWEEN + 1));
        let mut sizes: Vec<u64> = (1..=BETWEEN).map(|i| size(i).round() as u64).collect();
        sizes.dedup();
        sizes.retain(|&size| size > sample.size && size < next.size);
        let weight = 1.0 / sizes.len().max(1) as f64;
        for size in sizes {
            let us = estimated(sample, next, size, &model);
            if !us.is_empty() {
                all.push(Sample { size, us, weight });
            }
        }
    }
    all
}

/// The times at a size between two samples, of the choices that were timed at one at least.
pub(super) fn estimated(
    below: &Sample,
    above: &Sample,
    size: u64,
    model: &impl Fn(Choice, u64) -> Option<f64>,
) -> Vec<(Choice, f64)> {
    let log = |size: u64| (size as f64).ln();
    let nearness = (log(size) - log(below.size)) / (log(above.size) - log(below.size));
    let from = |neighbour: &Sample, choice: Choice| {
        let ratio = model(choice, size)? / model(choice, neighbour.size)?;
        let us = neighbour.of(choice)? * ratio;
        (us.is_finite() && us > 0.0).then_some(us)
    };
    let mut us: Vec<(Choice, f64)> = Vec::new();
    for &(choice, _) in below.us.iter().chain(&above.us) {
        if us.iter().any(|(known, _)| *known == choice) {
            continue;
        }
        let time = match (from(below, choice), from(above, choice)) {
            (Some(a), Some(b)) => a.powf(1.0 - nearness) * b.powf(nearness),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => continue,
        };
        us.push((choice, time));
    }
    us
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::{Problem, choice_at, problem::tests::gemm, settle};

    const SMS: u32 = 132;

    /// The card's own times: the model's, each choice slower or faster by a factor of its own.
    fn truth(problem: &Problem, choice: Choice, size: u64) -> f64 {
        let choices = problem.candidates();
        let at = choices.iter().position(|c| *c == choice).expect("a choice");
        let factor = 1.0 + 0.03 * ((at * 7) % 5) as f64;
        factor * problem.cost(choice, size, SMS) / 1755.0
    }

    fn measured(problem: &Problem, sizes: &[u64]) -> Vec<Sample> {
        let all = |size| {
            let choices = problem.candidates().into_iter();
            choices.map(|c| (c, truth(problem, c, size))).collect()
        };
        let sample = |&size: &u64| Sample::new(size, all(size));
        sizes.iter().map(sample).collect()
    }

    /// The most that ranges lose at any of these sizes, and the mean, as parts of the best choice's time.
    fn loss(problem: &Problem, ranges: &[crate::tune::Range], sizes: &[u64]) -> (f64, f64) {
        let losses = sizes.iter().map(|&size| {
            let choices = problem.candidates().into_iter();
            let best = choices
                .map(|c| truth(problem, c, size))
                .fold(f64::MAX, f64::min);
            let chosen = choice_at(ranges, size).expect("all sizes are served");
            truth(problem, chosen, size) / best - 1.0
        });
        let losses: Vec<f64> = losses.collect();
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        (losses.into_iter().fold(0.0, f64::max), mean)
    }

    #[test]
    fn where_the_model_is_right_up_to_a_factor_so_are_the_times_between() {
        let problem = gemm();
        let samples = measured(&problem, &[640, 1280, 2560]);
        let model = |c, size| Some(problem.cost(c, size, SMS));
        let all = between(&samples, model);
        assert!(all.is_sorted_by(|a, b| a.size < b.size));
        assert_eq!(all.iter().filter(|s| s.weight == 1.0).count(), 3);
        assert_eq!(all.len(), 3 + 2 * BETWEEN as usize);
        let weights: f64 = all.iter().map(|s| s.weight).sum();
        assert!((weights - 5.0).abs() < 1e-9, "{weights}");
        for sample in &all {
            for &(choice, us) in &sample.us {
                let ratio = us / truth(&problem, choice, sample.size);
                assert!(
                    (ratio - 1.0).abs() < 1e-9,
                    "{} {choice}: {ratio}",
                    sample.size
                );
            }
        }
    }

    #[test]
    fn ranges_settled_with_them_lose_less_between_the_sizes_that_were_timed() {
        let problem = gemm();
        let sizes = [20, 80, 160, 320, 640, 905, 1280, 1810, 2560, 5120, 10240];
        let samples = measured(&problem, &sizes);
        let model = |c, size| Some(problem.cost(c, size, SMS));
        let without = settle(&samples, 4);
        let with = settle(&between(&samples, model), 4);
        assert!(with.len() <= 4);
        let between: Vec<u64> = (25..10_000).step_by(37).collect();
        let ((_, before), (_, after)) = (
            loss(&problem, &without, &between),
            loss(&problem, &with, &between),
        );
        assert!(after < before, "{after} is not less than {before}");
    }

    #[test]
    fn a_choice_timed_on_one_side_is_estimated_from_there_and_one_without_a_model_is_not() {
        let (a, b) = (Choice::MhaOnline, Choice::MhaGrouped);
        let samples = [
            Sample::new(100, vec![(a, 1.0)]),
            Sample::new(400, vec![(a, 4.0), (b, 8.0)]),
        ];
        let proportional = |choice, size| (choice == b).then_some(size as f64);
        let all = between(&samples, proportional);
        let inner = &all[1..all.len() - 1];
        assert_eq!(inner.len(), BETWEEN as usize);
        for sample in inner {
            assert_eq!(sample.of(a), None);
            let us = sample.of(b).expect("it was timed above");
            assert!((us - 8.0 * sample.size as f64 / 400.0).abs() < 1e-9);
        }
        assert_eq!(between(&samples, |_, _| None), samples);
        // Neighbours without a size between them.
        let close = [
            Sample::new(1, vec![(b, 1.0)]),
            Sample::new(2, vec![(b, 1.0)]),
        ];
        assert_eq!(between(&close, proportional), close);
    }
}
