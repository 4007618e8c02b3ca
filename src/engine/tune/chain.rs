//! Kernels raced in the programs that launch them.

use std::{collections::HashMap, time::Instant};

use super::{
    Chosen, EngineError, Stage, TuneMode, Tuner, Wanted,
    course::{Field, OnCourse},
    given, say, with_causes,
};
use crate::{
    engine::{Compiled, picks::Store},
    kernels::trial::uniform,
    runtime::{
        batch::{Batch, Limits},
        cuda::CudaError,
    },
    tune::{
        Choice, Coupled, Effort, Made, Origin, Pick, Picked, Problem, Raced, Range,
        chain::{Course, Found, Group, Lineup, bucket_lens, bucket_tokens, descend, size_of},
        choice_at, ranges_of,
    },
};

/// Longest sequence of a batch.
const LONGEST: u64 = 512;

impl Tuner<'_> {
    /// As [`Tuner::choose`], of all that programs have several kernels for. With [`TuneMode::Chain`] kernels are raced
    /// in these programs, with random weights and at numbers of tokens of the tuner's own.
    ///
    /// # Errors
    /// As [`Tuner::choose`].
    pub fn choose_in(&self, programs: &[Compiled]) -> Result<Chosen, EngineError> {
        let mut problems: Vec<Problem> = Vec::new();
        for compiled in programs {
            for problem in compiled.problems()? {
                if !problems.contains(&problem) {
                    problems.push(problem);
                }
            }
        }
        if self.mode != TuneMode::Chain {
            return self.choose(&problems);
        }
        let made = Made {
            card: self.device.info().into(),
            nvrtc: self.jit.nvrtc().version(),
        };
        let wanted = Wanted::of(&problems)?;
        let mut known = match &self.given {
            Some(file) => given(file, &made, &wanted, self.mode)?,
            None => HashMap::new(),
        };
        let store = self.jit.own_cache().map(|cache| Store::at(cache.path()));
        let mut chosen = Chosen::new(made.clone());
        for one in &wanted {
            let key = one.problem.key();
            let is_given = known.contains_key(&key);
            let from = if is_given {
                Origin::Given
            } else {
                Origin::Kept
            };
            if let (false, false, Some(store)) = (is_given, self.again, &store) {
                match store.get(&made, one.problem, &one.digest) {
                    Ok(Some(picked)) if picked.effort == Effort::Chain => {
                        known.insert(key.clone(), picked);
                    }
                    Ok(_) => {}
                    Err(error) => tracing::warn!("{}; it is tuned anew", with_causes(&error)),
                }
            }
            if let Some(picked) = known.get(&key) {
                say(&key, &picked.ranges, from);
                chosen.add(key, picked.clone(), from);
            }
        }
        let end = Instant::now() + self.within.unwrap_or(super::WITHIN);
        for (at, compiled) in programs.iter().enumerate() {
            let left = end.saturating_duration_since(Instant::now());
            let end = Instant::now() + left / (programs.len() - at) as u32;
            for Pick {
                problem,
                ranges,
                timings,
            } in self.race_in(compiled, &chosen, end)?
            {
                let key = problem.key();
                let digest = wanted.iter().find(|one| *one.problem == problem);
                let picked = Picked {
                    digest: digest.map(|one| one.digest.clone()).unwrap_or_default(),
                    effort: Effort::Chain,
                    ranges,
                    timings,
                };
                say(&key, &picked.ranges, Origin::Measured);
                if let Some(store) = &store
                    && let Err(error) = store.put(&made, &problem, &picked)
                {
                    tracing::warn!("{}; the picks are not kept", with_causes(&error));
                }
                chosen.add(key, picked, Origin::Measured);
            }
        }
        for problem in &problems {
            if !chosen.origins.contains_key(&problem.key()) {
                chosen.guess(problem);
            }
        }
        Ok(chosen)
    }

    /// The picks of those problems of a program that have none yet.
    fn race_in(
        &self,
        compiled: &Compiled,
        chosen: &Chosen,
        end: Instant,
    ) -> Result<Vec<Pick>, EngineError> {
        let groups = compiled.groups()?;
        let mut problems: Vec<Problem> = Vec::new();
        for problem in groups.iter().flat_map(|(group, _)| group) {
            if !problems.contains(problem) {
                problems.push(problem.clone());
            }
        }
        let missing = |problem: &Problem| !chosen.origins.contains_key(&problem.key());
        if !problems.iter().any(missing) {
            return Ok(Vec::new());
        }
        let place = |problem: &Problem| problems.iter().position(|p| p == problem);
        let members: Vec<Coupled> = groups
            .iter()
            .map(|(group, n)| Coupled {
                problems: group.iter().filter_map(place).collect(),
                launches: *n,
            })
            .collect();
        let is_open: Vec<bool> = members
            .iter()
            .map(|group| group.problems.iter().any(|&at| missing(&problems[at])))
            .collect();
        let before: Vec<Vec<Range>> = problems
            .iter()
            .map(|p| match chosen.picks.problems.get(&p.key()) {
                Some(picked) => picked.ranges.clone(),
                None => p.guess(),
            })
            .collect();
        let limits = Limits::of(&compiled.model);
        let race = Race {
            problems: &problems,
            members: &members,
            is_open: &is_open,
            before: &before,
            longest: limits.longest.map_or(LONGEST, u64::from).min(LONGEST),
            n_sms: self.device.info().n_sms,
        };
        let buckets: Vec<Bucket> = bucket_tokens()
            .into_iter()
            .map(|tokens| race.bucket(tokens))
            .collect();
        let n = buckets.len();
        let mut field = Field::new(self, compiled, &problems, &buckets)?;
        let mut raced: Vec<Raced> = Vec::new();
        for at in in_turn(buckets.len()) {
            (self.progress)(Stage::Tuning, raced.len(), n);
            if Instant::now() >= end {
                tracing::warn!("no time was left for {} tokens", buckets[at].tokens());
                continue;
            }
            let batch = batch_of(&buckets[at].lens, &limits)?;
            match race.run(&buckets[at], &mut field.course(batch)) {
                Ok(one) => raced.push(one),
                Err(EngineError::Cuda(CudaError::OutOfMemory { .. })) => {
                    tracing::warn!("{} tokens are not raced: no memory", buckets[at].tokens());
                }
                Err(error) => return Err(error),
            }
        }
        raced.sort_by_key(|one| one.tokens);
        (self.progress)(Stage::Tuning, n, n);
        let mut picks = ranges_of(&problems, &members, &raced, race.n_sms);
        picks.retain(|pick| missing(&pick.problem));
        Ok(picks)
    }
}

/// What is raced in a program.
struct Race<'a> {
    problems: &'a [Problem],
    members: &'a [Coupled],
    /// Whether something of a group has no picks yet.
    is_open: &'a [bool],
    /// What is launched before anything was raced.
    before: &'a [Vec<Range>],
    longest: u64,
    n_sms: u32,
}

impl Race<'_> {
    /// A batch with all that is worth trying on it.
    fn bucket(&self, tokens: u64) -> Bucket {
        let lens = bucket_lens(tokens, self.longest);
        let sizes: Vec<u64> = self.problems.iter().map(|p| size_of(p, &lens)).collect();
        let each = self.before.iter().zip(&sizes);
        let each = each.map(|(ranges, &size)| choice_at(ranges, size));
        // The last range has no limit.
        let start = each.map(|choice| choice.unwrap_or(Choice::Apart)).collect();
        let groups = self.members.iter().zip(self.is_open);
        let groups = groups.map(|(group, &is_open)| {
            let with_size = |&at: &usize| (at, &self.problems[at], sizes[at]);
            let with_sizes: Vec<_> = group.problems.iter().map(with_size).collect();
            let mut group = Group::new(&with_sizes, self.n_sms);
            if !is_open {
                group.moves.clear();
            }
            group
        });
        Bucket {
            groups: groups.collect(),
            start,
            sizes,
            lens,
        }
    }

    fn run(&self, bucket: &Bucket, course: &mut OnCourse) -> Result<Raced, EngineError> {
        let found = descend(bucket.start.clone(), &bucket.groups, course)?;
        // Both in one race: what each takes at another time says little.
        let duel = [bucket.start.clone(), found.lineup.clone()];
        let ratio = course.race(&duel, true)?[1].unwrap_or(1.0);
        let guess_us = course.us(&bucket.start)?;
        let us = guess_us * ratio;
        tell(bucket, self.problems, &found, us, guess_us);
        Ok(Raced {
            tokens: bucket.tokens(),
            sizes: bucket.sizes.clone(),
            found,
            us,
            guess_us,
        })
    }
}

/// A batch that a program is raced on.
pub(super) struct Bucket {
    lens: Vec<u32>,
    /// By problem.
    sizes: Vec<u64>,
    start: Lineup,
    pub(super) groups: Vec<Group>,
}

impl Bucket {
    fn tokens(&self) -> u64 {
        self.lens.iter().copied().map(u64::from).sum()
    }
}

/// Every other one first, and of the others, so that where time is short, what is found is spread.
fn in_turn(n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by_key(|at| (at % 2 == 1, at / 2 % 2 == 0));
    order
}

fn batch_of(lens: &[u32], limits: &Limits) -> Result<Batch, EngineError> {
    let mut state = 1;
    let tokens: u32 = lens.iter().sum();
    let id = |_| limits.token_id(uniform(&mut state));
    Ok(Batch::from_packed((0..tokens).map(id).collect(), lens)?)
}

/// Says what was found at a number of tokens.
fn tell(bucket: &Bucket, problems: &[Problem], found: &Found, us: f64, guess_us: f64) {
    tracing::info!(
        "{} tokens, {} in the longest: {us:.1} µs, with the kernels before {guess_us:.1}",
        bucket.tokens(),
        bucket.lens.iter().max().unwrap_or(&0)
    );
    for (group, times) in bucket.groups.iter().zip(&found.times) {
        let mut times = times.clone();
        times.sort_by(|a, b| a.1.total_cmp(&b.1));
        let names = |choices: &[Choice]| {
            let names: Vec<String> = choices.iter().map(ToString::to_string).collect();
            names.join("+")
        };
        let of = |lineup: &Lineup| {
            let choices: Vec<_> = group.problems.iter().map(|&at| lineup[at]).collect();
            names(&choices)
        };
        let shown: Vec<String> = times
            .iter()
            .map(|(choices, time)| format!("{} {time:.4}", names(choices)))
            .collect();
        let key = group.problems.first().map(|&at| problems[at].key());
        tracing::info!(
            "  {}: {} (before {}); {}",
            key.unwrap_or_default(),
            of(&found.lineup),
            of(&bucket.start),
            shown.join(", ")
        );
    }
}
