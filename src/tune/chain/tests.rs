//! Descent on courses that are made up, and what is found there.

use std::convert::Infallible;

use super::*;
use crate::{
    kernels::gemm::WgmmaTile,
    tune::{
        Sample, mend,
        problem::tests::{hopper_attention, hopper_gemm, pair},
    },
};

const SMS: u32 = 132;

const fn tile(m: u32, n: u32) -> Choice {
    let together = true;
    Choice::Wgmma(WgmmaTile { m, n, together })
}
const A: Choice = tile(64, 128);
const B: Choice = tile(128, 128);
const C: Choice = tile(128, 192);
const JOINED: Choice = Choice::Joined(WgmmaTile {
    m: 64,
    n: 256,
    together: true,
});

/// A course on which a lineup takes what a function says.
struct Made<F> {
    us: F,
    wrong: Option<Choice>,
    /// What quick looks add to the first choice's ratio.
    flatters: f64,
    looks: usize,
}

impl<F: Fn(&Lineup) -> f64> Course for Made<F> {
    type Error = Infallible;

    fn is_same(&mut self, a: &Lineup, b: &Lineup) -> Result<bool, Infallible> {
        Ok(a == b)
    }

    fn race(&mut self, lineups: &[Lineup], long: bool) -> Result<Vec<Option<f64>>, Infallible> {
        self.looks += 1;
        let first = (self.us)(&lineups[0]);
        let ratio = |lineup: &Lineup| {
            let is_wrong = long && lineup.iter().any(|&c| Some(c) == self.wrong);
            let flattered = if long { 0.0 } else { self.flatters };
            let is_first = *lineup == lineups[0];
            let less = if is_first { 0.0 } else { flattered };
            (!is_wrong).then(|| (self.us)(lineup) / first - less)
        };
        Ok(lineups.iter().map(ratio).collect())
    }
}

fn course<F: Fn(&Lineup) -> f64>(us: F) -> Made<F> {
    Made {
        us,
        wrong: None,
        flatters: 0.0,
        looks: 0,
    }
}

fn single(problem: usize, choices: &[Choice]) -> Group {
    Group {
        problems: vec![problem],
        moves: choices.iter().map(|&c| vec![c]).collect(),
    }
}

fn found(start: Lineup, groups: &[Group], on: &mut impl Course<Error = Infallible>) -> Found {
    match descend(start, groups, on) {
        Ok(found) => found,
    }
}

#[test]
fn what_is_faster_in_the_whole_is_taken_and_what_noise_explains_is_not() {
    let us = |of: &Lineup| {
        let each = |choice: Choice, gain: f64| if choice == B { 1.0 - gain } else { 1.0 };
        100.0 * each(of[0], 0.05) * each(of[1], 0.004)
    };
    let groups = [single(0, &[A, B, C]), single(1, &[A, B, C])];
    let found = found(vec![A, A], &groups, &mut course(us));
    assert_eq!(found.lineup, [B, A]);
    // Times are parts of that of the lineup that is left.
    let of_first = times_of(&found, 0, 0);
    let of = |choice| of_first.iter().find(|(c, _)| *c == choice).map(|t| t.1);
    assert!((of(B).expect("raced") - 1.0).abs() < 1e-9);
    assert!((of(A).expect("raced") - 1.0 / 0.95).abs() < 1e-9);
}

#[test]
fn a_change_may_make_room_for_another() {
    // The second is worth it only once the first is made.
    let us = |of: &Lineup| match (of[0], of[1]) {
        (B, B) => 90.0,
        (B, _) => 95.0,
        (_, B) => 100.5,
        _ => 100.0,
    };
    let groups = [single(1, &[A, B]), single(0, &[A, B])];
    let found = found(vec![A, A], &groups, &mut course(us));
    assert_eq!(found.lineup, [B, B]);
}

#[test]
fn quick_looks_alone_change_nothing_and_what_is_wrong_never_wins() {
    let even = |_: &Lineup| 100.0;
    let groups = [single(0, &[A, B])];
    let mut flattering = course(even);
    flattering.flatters = 0.05;
    let unchanged = found(vec![A], &groups, &mut flattering);
    assert_eq!(unchanged.lineup, [A]);
    assert!(flattering.looks >= 2, "a long look follows");

    let mut wrong = course(|of: &Lineup| if of[0] == B { 50.0 } else { 100.0 });
    wrong.wrong = Some(B);
    assert_eq!(found(vec![A], &groups, &mut wrong).lineup, [A]);
}

#[test]
fn one_launch_is_raced_against_two_with_each_of_their_kernels() {
    let problems = [pair(), hopper_gemm()];
    let with_sizes: Vec<_> = problems
        .iter()
        .enumerate()
        .map(|(i, p)| (i, p, 2557))
        .collect();
    let group = Group::new(&with_sizes, SMS);
    let apart = group.moves.iter().filter(|made| made[0] == Choice::Apart);
    let kernels: Vec<Choice> = apart.map(|made| made[1]).collect();
    assert!(kernels.len() >= 2, "{kernels:?}");
    let joined = group.moves.iter().filter(|made| made[0] != Choice::Apart);
    let joined: Vec<&Vec<Choice>> = joined.collect();
    assert!(joined.len() >= 4, "{joined:?} {kernels:?}");

    let us = |of: &Lineup| match (of[0], of[1]) {
        (Choice::Apart, second) if second == kernels[1] => 80.0,
        (Choice::Apart, _) => 110.0,
        _ => 100.0,
    };
    let start = vec![JOINED, kernels[0]];
    let found = found(start, &[group], &mut course(us));
    assert_eq!(found.lineup, [Choice::Apart, kernels[1]]);
    let pair = times_of(&found, 0, 0);
    let of = |choice| pair.iter().find(|(c, _)| *c == choice).map(|t| t.1);
    assert!((of(Choice::Apart).expect("raced") - 1.0).abs() < 1e-9);
    assert!((of(JOINED).expect("raced") - 1.25).abs() < 1e-9);
    assert!(times_of(&found, 0, 1).len() >= 2);
}

#[test]
fn batches_have_their_tokens_and_no_sequence_is_too_long() {
    let sizes = bucket_tokens();
    assert!(sizes.is_sorted() && sizes.len() > 8, "{sizes:?}");
    for tokens in sizes {
        for limit in [64, 512] {
            let lens = bucket_lens(tokens, limit);
            assert_eq!(lens.iter().copied().map(u64::from).sum::<u64>(), tokens);
            assert!(lens.iter().all(|&n| n > 0 && u64::from(n) <= limit));
            assert_eq!(size_of(&hopper_gemm(), &lens), tokens);
            let longest = lens.iter().copied().max().map(u64::from);
            assert_eq!(Some(size_of(&hopper_attention(64), &lens)), longest);
        }
    }
    assert_eq!(bucket_lens(1, 512), [1]);
}

/// What choices would take that are as the model has them, but for a factor of each.
fn samples(problem: &crate::tune::Problem, factor: impl Fn(Choice) -> f64) -> Vec<Sample> {
    let sizes = [320, 639, 1278, 2557, 5114, 10_228];
    let at = |&size: &u64| {
        let all = Group::new(&[(0, problem, size)], SMS).moves;
        let us = all.into_iter().map(|made| {
            let cycles = problem.cost(made[0], size, SMS);
            (made[0], cycles / 1755.0 * factor(made[0]))
        });
        Sample::new(size, us.collect())
    };
    sizes.iter().map(at).collect()
}

#[test]
fn where_the_model_is_right_ranges_are_near_the_best_at_every_size() {
    for problem in [hopper_gemm(), pair()] {
        let ranges = mend(&problem, &samples(&problem, |_| 1.0), SMS, |_| true);
        let (mut losses, mut n) = (0.0, 0);
        for rows in (1..=10_000).step_by(37) {
            let choice = crate::tune::choice_at(&ranges, rows).expect("all sizes are served");
            assert!(choice.most().is_none_or(|most| rows <= most));
            if rows > 300 {
                let cost = |choice| problem.cost(choice, rows, SMS);
                let serves = |choice: &Choice| choice.most().is_none_or(|most| rows <= most);
                let all = problem.candidates().into_iter().filter(serves);
                let best = all.map(cost).fold(f64::MAX, f64::min);
                losses += cost(choice) / best - 1.0;
                n += 1;
            }
        }
        let mean = losses / f64::from(n);
        assert!(mean < 0.05, "{}: {mean}", problem.key());
    }
}

#[test]
fn what_the_chain_says_mends_the_ranges_also_between_the_sizes_that_were_raced() {
    let problem = hopper_gemm();
    let guess = mend(&problem, &samples(&problem, |_| 1.0), SMS, |_| true);
    let usual = crate::tune::choice_at(&guess, 3000).expect("served");
    let slower = |choice: Choice| if choice == usual { 1.3 } else { 1.0 };
    let ranges = mend(&problem, &samples(&problem, slower), SMS, |_| true);
    for rows in [2557, 3000, 3300] {
        let mended = crate::tune::choice_at(&ranges, rows).expect("served");
        assert_ne!(mended, usual, "{rows}");
    }
    // Below the sizes that were raced, as guessed.
    for rows in [1, 8, 40, 100, 200] {
        let of = |ranges: &[Range]| crate::tune::choice_at(ranges, rows);
        assert_eq!(of(&ranges), of(&problem.guess()), "{rows}");
    }
}

#[test]
fn kernels_are_chosen_for_the_sizes_at_which_they_are_launched_and_serve_the_others_well() {
    let problem = hopper_gemm();
    let measured = samples(&problem, |_| 1.0);
    let mean = |ranges: &[Range], from: u64, to: u64| {
        let cost = |rows| {
            let choice = crate::tune::choice_at(ranges, rows).expect("all sizes are served");
            problem.cost(choice, rows, SMS)
        };
        (from..to).step_by(8).map(cost).sum::<f64>() / (to - from) as f64
    };
    let all = mend(&problem, &measured, SMS, |_| true);
    let few = mend(&problem, &measured, SMS, |rows| rows < 900);
    assert!(mean(&few, 300, 900) <= mean(&all, 300, 900));
    assert!(mean(&few, 900, 9000) <= mean(&all, 900, 9000) * 1.2);
    assert_eq!(mend(&problem, &[], SMS, |_| true), problem.guess());
}

#[test]
fn of_attention_the_fastest_at_each_length_is_taken() {
    let problem = hopper_attention(64);
    let all = problem.candidates();
    let tiles: Vec<Choice> = all
        .into_iter()
        .filter(|c| matches!(c, Choice::MhaWgmma(_)))
        .collect();
    let at = |size, first, second| Sample::new(size, vec![(tiles[0], first), (tiles[1], second)]);
    let measured = [at(67, 1.0, 1.05), at(266, 1.04, 1.0), at(512, 1.03, 1.0)];
    let ranges = mend(&problem, &measured, SMS, |_| true);
    let of = |size| crate::tune::choice_at(&ranges, size);
    assert_eq!((of(30), of(67)), (Some(tiles[0]), Some(tiles[0])));
    assert_eq!((of(266), of(512)), (Some(tiles[1]), Some(tiles[1])));
    // Longer than any that was raced: as guessed.
    assert_eq!(of(4000), crate::tune::choice_at(&problem.guess(), 4000));
}
