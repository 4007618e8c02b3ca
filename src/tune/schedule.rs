use super::{Choice, Counted, Effort, Problem, choice_at};
use crate::tensor::Extents;

/// Rows that GEMMs and rows are timed on: short batches to those that fill any card several times,
/// closest where one more wave of tiles costs most. Token counts are no powers of two, for which
/// tiles would look better than they are.
const QUICK_ROWS: [u64; 11] = [20, 80, 160, 320, 640, 905, 1280, 1810, 2560, 5120, 10240];
/// From the first on, each is √2 times the one before.
const FULL_ROWS: [u64; 2] = [10, 30_000];
/// Longest sequences that attention is timed on.
const QUICK_LENGTHS: [u64; 6] = [32, 64, 128, 256, 512, 2048];
const FULL_LENGTHS: [u64; 2] = [16, 8192];
/// Candidates that a quick race has for their place among the promising ones. Kernels over rows
/// have no cost model, and take little time to compile and to race.
const QUICK_TILES: usize = 4;
const QUICK_SHARINGS: usize = 6;
/// Candidates whose estimated time is so many times the least are not raced in full either. The model was
/// fitted to 500 rows and more, where it is within a tenth; below, it is rough.
const HOPELESS: f64 = 4.0;
/// Of a full schedule's sizes every eighth is raced in any case, then every fourth, and so on.
const STRIDES: [usize; 4] = [8, 4, 2, 1];
/// Tokens of a batch that attention is timed on, or one sequence if that is longer.
const TOKENS: u64 = 8192;

/// What is raced on one problem: for each size, in ascending order, the contenders.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    pub heats: Vec<Heat>,
    effort: Effort,
}

/// One race. All contenders serve the size.
#[derive(Clone, Debug, PartialEq)]
pub struct Heat {
    pub size: u64,
    /// The first guess, with whose result the others' are compared, and then the others.
    pub contenders: Vec<Choice>,
}

impl Schedule {
    /// The races that decide a problem on a card of so many multiprocessors.
    ///
    /// A quick race is between the most promising candidates and the first of both neighbouring
    /// sizes, so that neighbours can always be served by one kernel.
    pub fn new(problem: &Problem, effort: Effort, n_sms: u32) -> Self {
        let guess = problem.guess();
        let sizes = sizes(problem, effort);
        let ranked: Vec<Vec<Choice>> = sizes
            .iter()
            .map(|&size| problem.ranked(size, n_sms))
            .collect();
        let heats = sizes.iter().enumerate().map(|(at, &size)| {
            let all = &ranked[at];
            let mut contenders: Vec<Choice> = choice_at(&guess, size).into_iter().collect();
            let mut add = |choices: &[Choice]| {
                for choice in choices {
                    if all.contains(choice) && !contenders.contains(choice) {
                        contenders.push(*choice);
                    }
                }
            };
            let most = match (effort, problem) {
                (Effort::Full | Effort::Chain, Problem::Gemm { .. }) => {
                    let cost = |choice: &Choice| problem.cost(*choice, size, n_sms);
                    let least = all.first().map_or(0.0, cost);
                    all.partition_point(|choice| cost(choice) <= HOPELESS * least)
                }
                (Effort::Full | Effort::Chain, _) | (_, Problem::Attention { .. }) => all.len(),
                (Effort::Quick, Problem::Gemm { .. }) => QUICK_TILES,
                (Effort::Quick, _) => QUICK_SHARINGS,
            };
            add(&all[..all.len().min(most)]);
            let neighbours = [at.checked_sub(1), Some(at + 1)].into_iter().flatten();
            for ranked in neighbours.filter_map(|at| ranked.get(at)) {
                add(&ranked[..ranked.len().min(1)]);
            }
            if problem.counted() == Counted::Longest {
                // Ranges end where choices serve no more: one that serves all is raced everywhere.
                let serves_all = all.iter().filter(|choice| choice.most().is_none());
                add(&serves_all.copied().collect::<Vec<_>>());
            }
            Heat { size, contenders }
        });
        Self {
            heats: heats.collect(),
            effort,
        }
    }

    /// Every choice that some race has, once.
    pub fn choices(&self) -> Vec<Choice> {
        let mut choices: Vec<Choice> = Vec::new();
        for &choice in self.heats.iter().flat_map(|heat| &heat.contenders) {
            if !choices.contains(&choice) {
                choices.push(choice);
            }
        }
        choices
    }

    /// The races in the order in which they are worth most: those of the first stage are run in any
    /// case, of the others as many as there is time for. A quick schedule has one stage.
    ///
    /// In a stage sizes ascend. The first has the limits of the choices, too, as ranges end there.
    pub fn stages(&self) -> Vec<Vec<&Heat>> {
        if self.effort == Effort::Quick {
            return vec![self.heats.iter().collect()];
        }
        let limits: Vec<u64> = self
            .choices()
            .into_iter()
            .filter_map(Choice::most)
            .collect();
        let last = self.heats.len().saturating_sub(1);
        let first_stage = |at: usize, heat: &Heat| {
            at.is_multiple_of(STRIDES[0]) || at == last || limits.contains(&heat.size)
        };
        let stage_of = |at: usize, heat: &Heat| match first_stage(at, heat) {
            true => 0,
            false => STRIDES
                .iter()
                .position(|&stride| at.is_multiple_of(stride))
                .unwrap_or(STRIDES.len() - 1),
        };
        let mut stages: Vec<Vec<&Heat>> = vec![Vec::new(); STRIDES.len()];
        for (at, heat) in self.heats.iter().enumerate() {
            stages[stage_of(at, heat)].push(heat);
        }
        stages
    }
}

impl Problem {
    /// The batch that a size is timed on: its lengths, and the rows where they are the size.
    ///
    /// Attention gets sequences of lengths evenly spread from a fifth of the longest to the longest,
    /// 0.6 of it in the mean as in ByteTransformer IV, at least one, about 8192 tokens in all.
    pub fn batch(&self, size: u64) -> (Vec<u32>, Option<u64>) {
        let size = size.clamp(1, Extents::MAX_TOKENS);
        match self.counted() {
            Counted::Rows => (vec![size as u32], Some(size)),
            Counted::Longest => {
                let n = (TOKENS * 5 / (3 * size)).max(1);
                let shorter = |i: u64| size - size * 4 * i / (5 * (n - 1).max(1));
                let lens = (0..n).map(|i| shorter(i).max(1) as u32).collect();
                (lens, None)
            }
        }
    }
}

/// The sizes that a problem is timed at, ascending.
fn sizes(problem: &Problem, effort: Effort) -> Vec<u64> {
    let mut sizes = match (effort, problem.counted()) {
        (Effort::Quick, Counted::Rows) => QUICK_ROWS.to_vec(),
        (Effort::Quick, Counted::Longest) => QUICK_LENGTHS.to_vec(),
        (Effort::Full | Effort::Chain, Counted::Rows) => half_octaves(FULL_ROWS),
        (Effort::Full | Effort::Chain, Counted::Longest) => with_middles(FULL_LENGTHS),
    };
    // A kernel for sizes up to one is timed there, too.
    sizes.extend(problem.candidates().into_iter().filter_map(Choice::most));
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Sizes from the first to the last, each √2 times the one before.
fn half_octaves([first, last]: [u64; 2]) -> Vec<u64> {
    let size = |halves: i32| (first as f64 * 2f64.powf(f64::from(halves) / 2.0)).round() as u64;
    (0..).map(size).take_while(|&size| size <= last).collect()
}

/// The powers of two between two of them, and what is half-way between each and the next.
fn with_middles([first, last]: [u64; 2]) -> Vec<u64> {
    let powers = std::iter::successors(Some(first), |size| Some(size * 2));
    powers
        .take_while(|&size| size <= last)
        .flat_map(|size| [size, size * 3 / 2])
        .filter(|&size| size <= last)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::problem::tests::{attention, gemm, hopper_gemm, layernorm, softmax};

    #[test]
    fn a_full_schedule_has_all_candidates_that_are_not_hopeless_at_every_size() {
        let schedule = Schedule::new(&gemm(), Effort::Full, 132);
        let sizes: Vec<u64> = schedule.heats.iter().map(|h| h.size).collect();
        assert_eq!(sizes[..6], [10, 14, 20, 28, 40, 57]);
        assert_eq!(sizes.last(), Some(&28_963));
        let all = gemm().candidates();
        for heat in &schedule.heats {
            let cost = |choice: &Choice| gemm().cost(*choice, heat.size, 132);
            let least = all.iter().map(cost).fold(f64::MAX, f64::min);
            for choice in &all {
                let hopeful = cost(choice) <= HOPELESS * least;
                assert!(!hopeful || heat.contenders.contains(choice), "{heat:?}");
            }
            assert!(heat.contenders.len() >= 4, "{heat:?}");
        }
        let raced: usize = schedule.heats.iter().map(|h| h.contenders.len()).sum();
        assert!(raced < all.len() * schedule.heats.len(), "{raced}");
        // Where there is no model, all are.
        for heat in Schedule::new(&layernorm(), Effort::Full, 132).heats {
            assert_eq!(heat.contenders.len(), layernorm().candidates().len());
        }
    }

    #[test]
    fn stages_go_from_coarse_to_fine_and_have_every_race_once() {
        for problem in [gemm(), attention(64), layernorm()] {
            let full = Schedule::new(&problem, Effort::Full, 132);
            let stages = full.stages();
            let mut sizes: Vec<u64> = stages.iter().flatten().map(|h| h.size).collect();
            sizes.sort_unstable();
            let all: Vec<u64> = full.heats.iter().map(|h| h.size).collect();
            assert_eq!(sizes, all);
            let coarse: Vec<u64> = stages[0].iter().map(|h| h.size).collect();
            assert!(coarse.is_sorted() && coarse.len() * 2 < all.len() + 6);
            assert_eq!((coarse.first(), coarse.last()), (all.first(), all.last()));
            for limit in problem.candidates().into_iter().filter_map(Choice::most) {
                assert!(coarse.contains(&limit), "{limit}");
            }
            let quick = Schedule::new(&problem, Effort::Quick, 132);
            assert_eq!(quick.stages(), [quick.heats.iter().collect::<Vec<_>>()]);
        }
    }

    #[test]
    fn a_quick_schedule_has_the_guess_first_and_few_candidates() {
        for problem in [gemm(), layernorm(), softmax(), attention(64)] {
            let guess = problem.guess();
            for heat in Schedule::new(&problem, Effort::Quick, 132).heats {
                assert_eq!(Some(heat.contenders[0]), choice_at(&guess, heat.size));
                assert!(heat.contenders.len() <= 9, "{heat:?}");
                assert!(heat.contenders.len() >= 3 || heat.size >= 256, "{heat:?}");
            }
        }
    }

    #[test]
    fn neighbouring_sizes_share_a_contender() {
        for effort in [Effort::Quick, Effort::Full] {
            for problem in [
                gemm(),
                hopper_gemm(),
                attention(64),
                attention(128),
                layernorm(),
                softmax(),
            ] {
                for pair in Schedule::new(&problem, effort, 132).heats.windows(2) {
                    let shared = |c: &&Choice| pair[1].contenders.contains(c);
                    assert!(pair[0].contenders.iter().any(|c| shared(&c)), "{pair:?}");
                }
            }
        }
    }

    #[test]
    fn short_kernels_are_raced_at_their_limit_and_not_beyond() {
        let problem = attention(128);
        let schedule = Schedule::new(&problem, Effort::Quick, 132);
        for choice in problem.candidates() {
            let Some(most) = choice.most() else { continue };
            let raced = |heat: &&Heat| heat.contenders.contains(&choice);
            let largest = schedule.heats.iter().filter(raced).map(|h| h.size).max();
            assert_eq!(largest, Some(most));
        }
    }

    #[test]
    fn a_batch_for_attention_has_the_longest_and_six_tenths_of_it_in_the_mean() {
        for size in [16, 100, 512, 2048, 8192, 32768] {
            let (lens, rows) = attention(64).batch(size);
            assert_eq!(rows, None);
            assert_eq!(lens.iter().copied().max(), Some(size as u32));
            let tokens: u64 = lens.iter().map(|&n| u64::from(n)).sum();
            if lens.len() > 1 {
                let mean = tokens as f64 / lens.len() as f64 / size as f64;
                assert!((mean - 0.6).abs() < 0.06, "{size}: {mean}");
                assert!((4096..=10240).contains(&tokens), "{size}: {tokens}");
            }
        }
        assert_eq!(gemm().batch(500), (vec![500], Some(500)));
    }
}
