//! From timings to ranges.

use super::{Choice, Range};

/// A further range must save so much of one size's time: less is noise.
const WORTH_A_RANGE: f64 = 0.02;

/// What was measured at one size: microseconds of each choice whose result was right.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub size: u64,
    pub us: Vec<(Choice, f64)>,
    /// How much the size counts: 1 where it was measured.
    pub weight: f64,
}

impl Sample {
    /// What was measured.
    pub fn new(size: u64, us: Vec<(Choice, f64)>) -> Self {
        Self {
            size,
            us,
            weight: 1.0,
        }
    }

    /// What a choice took; `None` where it was not raced, or was wrong.
    pub fn of(&self, choice: Choice) -> Option<f64> {
        self.us
            .iter()
            .find(|(c, _)| *c == choice)
            .map(|&(_, us)| us)
    }

    fn best(&self) -> f64 {
        let times = self.us.iter().map(|&(_, us)| us);
        times.fold(f64::INFINITY, f64::min)
    }
}

/// The ranges, at most so many, that lose the least: over the sizes, the sum of the time above the
/// best choice's as a part of it, times the size's weight, and 0.02 for each range after the first. So a range that noise
/// alone would make is not made, and where there would be too many, those are joined that cost
/// least.
///
/// Sizes are ascending; a choice is taken only for sizes at which it was timed. A limit is the
/// geometric middle of two sizes, or less where the choice serves less. `samples` without times are
/// passed over; where none has any, or no choice serves every size, there are no ranges. More ranges than asked for are returned
/// where fewer have no choice that was timed at all their sizes.
pub fn settle(samples: &[Sample], most_ranges: usize) -> Vec<Range> {
    settle_worth(samples, most_ranges, WORTH_A_RANGE)
}

/// As [`settle`], with another price of a range than 0.02.
pub(super) fn settle_worth(samples: &[Sample], most_ranges: usize, worth: f64) -> Vec<Range> {
    let samples: Vec<&Sample> = samples.iter().filter(|s| s.best().is_finite()).collect();
    let n = samples.len();
    if n == 0 {
        return Vec::new();
    }
    let mut choices: Vec<Choice> = Vec::new();
    for &(choice, _) in samples.iter().flat_map(|s| &s.us) {
        if !choices.contains(&choice) {
            choices.push(choice);
        }
    }
    // By choice and number of samples: what it loses on so many of the first, and on how many of them it was
    // not timed. So that a range's loss is a difference of two.
    let sums: Vec<Vec<(f64, usize)>> = choices
        .iter()
        .map(|&choice| {
            let mut sums = vec![(0.0, 0)];
            for sample in &samples {
                let (loss, missing) = sums[sums.len() - 1];
                sums.push(match sample.of(choice) {
                    Some(us) => (loss + sample.weight * (us / sample.best() - 1.0), missing),
                    None => (loss, missing + 1),
                });
            }
            sums
        })
        .collect();
    // The choice that loses least on samples[from..to], and what it loses.
    let one = |from: usize, to: usize| -> (f64, Choice) {
        let losses = choices.iter().zip(&sums).map(|(&choice, sums)| {
            let ((before, missing), (after, still)) = (sums[from], sums[to]);
            let loss = if still == missing {
                after - before
            } else {
                f64::INFINITY
            };
            (loss, choice)
        });
        losses.fold((f64::INFINITY, choices[0]), |best, this| {
            if this.0 < best.0 { this } else { best }
        })
    };
    // best[to]: the least loss on the first `to` samples in as many ranges as made so far, and these
    // ranges as (end, choice).
    let mut best: Vec<(f64, Vec<(usize, Choice)>)> = (0..=n)
        .map(|to| {
            let (loss, choice) = one(0, to);
            (loss, vec![(to, choice)])
        })
        .collect();
    let mut chosen = best[n].clone();
    for n_ranges in 2..=n {
        if n_ranges > most_ranges && chosen.0.is_finite() {
            break;
        }
        best = (0..=n)
            .map(|to| {
                let mut found = (f64::INFINITY, Vec::new());
                for (from, (before, ranges)) in best.iter().enumerate().take(to).skip(1) {
                    let (loss, choice) = one(from, to);
                    if before + loss < found.0 {
                        let mut ranges = ranges.clone();
                        ranges.push((to, choice));
                        found = (before + loss, ranges);
                    }
                }
                found
            })
            .collect();
        // `chosen` has its own surcharge in it.
        let loss = best[n].0 + worth * (n_ranges - 1) as f64;
        if loss < chosen.0 {
            chosen = (loss, best[n].1.clone());
        }
    }
    let ends = chosen.1;
    let mut ranges: Vec<Range> = Vec::new();
    for &(end, choice) in &ends {
        let up_to = (end < n).then(|| {
            let middle = middle(samples[end - 1].size, samples[end].size);
            choice.most().map_or(middle, |most| middle.min(most))
        });
        match ranges.last_mut() {
            Some(last) if last.choice == choice => last.up_to = up_to,
            _ => ranges.push(Range { up_to, choice }),
        }
    }
    // Where large sizes could not be timed, the last may be a choice that does not serve them.
    if let Some(last) = ranges.last_mut()
        && let Some(most) = last.choice.most()
    {
        last.up_to = Some(most);
        match choices.iter().find(|choice| choice.most().is_none()) {
            Some(&choice) => ranges.push(Range {
                up_to: None,
                choice,
            }),
            None => return Vec::new(),
        }
    }
    ranges
}

/// The geometric middle, rounded down.
fn middle(a: u64, b: u64) -> u64 {
    u64::try_from((u128::from(a) * u128::from(b)).isqrt()).unwrap_or(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Choice = Choice::MhaShort { max_len: 64 };
    const B: Choice = Choice::MhaShort { max_len: 256 };
    const C: Choice = Choice::MhaOnline;

    fn samples(rows: &[(u64, &[(Choice, f64)])]) -> Vec<Sample> {
        rows.iter()
            .map(|&(size, us)| Sample::new(size, us.to_vec()))
            .collect()
    }

    fn shown(ranges: &[Range]) -> Vec<(Option<u64>, Choice)> {
        ranges.iter().map(|r| (r.up_to, r.choice)).collect()
    }

    #[test]
    fn the_fastest_is_taken_and_equal_neighbours_are_one_range() {
        let samples = samples(&[
            (8, &[(A, 1.0), (C, 2.0)]),
            (16, &[(A, 1.0), (C, 2.0)]),
            (64, &[(A, 3.0), (C, 2.0)]),
            (256, &[(C, 2.0)]),
        ]);
        // √(16·64) = 32.
        assert_eq!(shown(&settle(&samples, 4)), [(Some(32), A), (None, C)]);
    }

    #[test]
    fn a_limit_is_never_beyond_what_the_choice_serves() {
        let samples = samples(&[
            (64, &[(A, 1.0), (B, 2.0), (C, 3.0)]),
            (256, &[(B, 1.0), (C, 3.0)]),
            (1024, &[(C, 1.0)]),
        ]);
        assert_eq!(
            shown(&settle(&samples, 4)),
            [(Some(64), A), (Some(256), B), (None, C)]
        );
    }

    #[test]
    fn what_noise_explains_makes_no_range() {
        let noise = samples(&[
            (16, &[(B, 1.00), (C, 1.01)]),
            (64, &[(B, 1.01), (C, 1.00)]),
            (128, &[(B, 1.00), (C, 1.015)]),
        ]);
        let serves_all = (None, C);
        assert_eq!(shown(&settle(&noise, 4)), [(Some(256), B), serves_all]);
        let real = samples(&[(16, &[(B, 1.00), (C, 1.04)]), (64, &[(B, 1.04), (C, 1.00)])]);
        assert_eq!(shown(&settle(&real, 4)), [(Some(32), B), (None, C)]);
    }

    #[test]
    fn too_many_ranges_are_joined_where_it_costs_least() {
        // One choice each, and joining the last two costs the least.
        let table = samples(&[
            (1, &[(A, 1.0), (B, 2.0), (C, 3.0)]),
            (4, &[(A, 2.0), (B, 1.0), (C, 3.0)]),
            (16, &[(A, 3.0), (B, 1.1), (C, 1.0)]),
        ]);
        assert_eq!(
            shown(&settle(&table, 3)),
            [(Some(2), A), (Some(8), B), (None, C)]
        );
        // The last size is served by what serves every size.
        let all = |most| shown(&settle(&table, most));
        assert_eq!(all(2), [(Some(2), A), (Some(256), B), (None, C)]);
        assert_eq!(all(1), [(Some(256), B), (None, C)]);
    }

    #[test]
    fn a_choice_is_not_taken_where_it_was_not_timed() {
        let table = samples(&[(1, &[(A, 1.0)]), (4, &[(B, 1.0)]), (16, &[(C, 1.0)])]);
        // Two ranges are not possible.
        assert_eq!(
            shown(&settle(&table, 2)),
            [(Some(2), A), (Some(8), B), (None, C)]
        );
    }

    #[test]
    fn sizes_at_which_nothing_was_timed_are_passed_over() {
        let table = samples(&[(1, &[(A, 1.0)]), (4, &[]), (16, &[(C, 1.0)])]);
        assert_eq!(shown(&settle(&table, 4)), [(Some(4), A), (None, C)]);
        assert_eq!(settle(&samples(&[(4, &[])]), 4), []);
    }

    #[test]
    fn sizes_beyond_the_last_are_served_whatever_was_the_fastest_there() {
        let table = samples(&[(32, &[(A, 1.0), (C, 2.0)]), (64, &[(A, 1.0), (C, 2.0)])]);
        assert_eq!(shown(&settle(&table, 4)), [(Some(64), A), (None, C)]);
        assert_eq!(settle(&samples(&[(32, &[(A, 1.0)])]), 4), []);
    }

    #[test]
    fn the_least_loss_of_all_splits_is_found() {
        use crate::{DType, kernels::gemm::Tile, kernels::trial::uniform};
        let tiles = Tile::candidates(DType::F16);
        let [a, b, c] = [0, 1, 2].map(|i| Choice::Tile(tiles[i]));
        let mut state = 5;
        for _ in 0..200 {
            let table: Vec<Sample> = (0..5)
                .map(|i| {
                    let mut us = |c| (c, 1.0 + (uniform(&mut state) % 100) as f64 / 100.0);
                    Sample::new(1 << i, [a, b, c].map(&mut us).to_vec())
                })
                .collect();
            let loss = |picks: &[Choice]| -> f64 {
                let each = table.iter().zip(picks).map(|(sample, &choice)| {
                    let us = sample.of(choice).expect("all were timed");
                    us / sample.best() - 1.0
                });
                let changes = picks.windows(2).filter(|p| p[0] != p[1]).count();
                each.sum::<f64>() + WORTH_A_RANGE * changes as f64
            };
            let all = (0..3usize.pow(5)).map(|code| {
                let digit = |i: u32| [a, b, c][code / 3usize.pow(i) % 3];
                [digit(0), digit(1), digit(2), digit(3), digit(4)]
            });
            let few = |p: &[Choice; 5]| p.windows(2).filter(|w| w[0] != w[1]).count() < 3;
            let least = all.filter(few).map(|p| loss(&p)).fold(f64::MAX, f64::min);
            let ranges = settle(&table, 3);
            let got: Vec<Choice> = table
                .iter()
                .map(|s| crate::tune::choice_at(&ranges, s.size).expect("all are served"))
                .collect();
            assert!((loss(&got) - least).abs() < 1e-9, "{table:?}");
        }
    }
}
