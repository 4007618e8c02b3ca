//! Kernels raced in the programs that launch them.

use std::{collections::HashMap, time::Instant};

use super::{
    Chosen, EngineError, Stage, TuneMode, Tuner, Wanted, course::Field, given, say, with_causes,
};
use crate::{
    engine::{Compiled, picks::Store},
    kernels::trial::uniform,
    runtime::{
        batch::{Batch, Limits},
        cuda::CudaError,
    },
    tune::{
        Choice, Effort, Made, Origin, Picked, Problem, Range, Sample, Timing,
        chain::{Found, Group, Lineup, bucket_lens, bucket_tokens, descend, size_of, times_of},
        choice_at, mend,
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
        let store = self.jit.cache().map(|cache| Store::at(cache.path()));
        let mut chosen = Chosen::new(made.clone());
        for one in &wanted {
            let key = one.problem.key();
            let from = match known.contains_key(&key) {
                true => Origin::Given,
                false => Origin::Kept,
            };
            if let (false, false, Some(store)) = (known.contains_key(&key), self.again, &store) {
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
            for (problem, ranges, timings) in self.race_in(compiled, &chosen, end)? {
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
    ) -> Result<Vec<(Problem, Vec<Range>, Vec<Timing>)>, EngineError> {
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
        let members: Vec<(Vec<usize>, usize)> = groups
            .iter()
            .map(|(group, n)| (group.iter().filter_map(place).collect(), *n))
            .collect();
        let is_open: Vec<bool> = members
            .iter()
            .map(|(group, _)| group.iter().any(|&at| missing(&problems[at])))
            .collect();
        let before: Vec<Vec<Range>> = problems
            .iter()
            .map(|p| match chosen.picks.problems.get(&p.key()) {
                Some(picked) => picked.ranges.clone(),
                None => p.guess(),
            })
            .collect();
        let limits = Limits::of(&compiled.model);
        let n_sms = self.device.info().n_sms;
        let longest = limits.longest.map_or(LONGEST, u64::from).min(LONGEST);
        let buckets: Vec<Bucket> = bucket_tokens()
            .into_iter()
            .map(|tokens| {
                let lens = bucket_lens(tokens, longest);
                let sizes: Vec<u64> = problems.iter().map(|p| size_of(p, &lens)).collect();
                let start: Option<Lineup> = before
                    .iter()
                    .zip(&sizes)
                    .map(|(ranges, &size)| choice_at(ranges, size))
                    .collect();
                let groups = members.iter().zip(&is_open).map(|((group, _), &is_open)| {
                    let with_size = |&at: &usize| (at, &problems[at], sizes[at]);
                    let with_sizes: Vec<_> = group.iter().map(with_size).collect();
                    let mut group = Group::new(&with_sizes, n_sms);
                    if !is_open {
                        group.moves.clear();
                    }
                    group
                });
                Bucket {
                    groups: groups.collect(),
                    start: start.unwrap_or_default(),
                    sizes,
                    lens,
                }
            })
            .collect();
        let mut field = Field::new(self, compiled, &problems, &buckets)?;
        let mut found: Vec<(usize, Found, f64, f64)> = Vec::new();
        for (done, at) in in_turn(buckets.len()).into_iter().enumerate() {
            (self.progress)(Stage::Tuning, done, buckets.len());
            if Instant::now() >= end {
                tracing::warn!("no time was left for {} tokens", buckets[at].tokens());
                continue;
            }
            let bucket = &buckets[at];
            let batch = batch_of(&bucket.lens, &limits)?;
            let mut course = field.course(batch);
            match descend(bucket.start.clone(), &bucket.groups, &mut course) {
                Ok(one) => {
                    let (us, guess_us) = (course.us(&one.lineup)?, course.us(&bucket.start)?);
                    tell(bucket, &problems, &one, us, guess_us);
                    found.push((at, one, us, guess_us));
                }
                Err(EngineError::Cuda(CudaError::OutOfMemory { .. })) => {
                    tracing::warn!("{} tokens are not raced: no memory", bucket.tokens());
                }
                Err(error) => return Err(error),
            }
        }
        (self.progress)(Stage::Tuning, buckets.len(), buckets.len());
        found.sort_by_key(|one| one.0);
        let mut picks: Vec<(Problem, Vec<Range>, Vec<Timing>)> = Vec::new();
        for (at, ((group, n), is_open)) in members.iter().zip(is_open).enumerate() {
            if !is_open {
                continue;
            }
            let mut decides: Option<Vec<Range>> = None;
            for (place, &problem) in group.iter().enumerate() {
                let (at, is_first) = ((at, place), place == 0);
                let samples: Vec<Sample> = found
                    .iter()
                    .filter_map(|(bucket, one, us, _)| {
                        let size = buckets[*bucket].sizes[problem];
                        sample(&problems[problem], size, one, at, (*us, *n), n_sms)
                    })
                    .collect();
                let samples = merged(samples);
                let is_launched = |rows: u64| {
                    let first = decides.as_ref().and_then(|ranges| choice_at(ranges, rows));
                    first.is_none_or(|choice| choice == Choice::Apart)
                };
                let ranges = mend(&problems[problem], &samples, n_sms, is_launched);
                if is_first {
                    decides = Some(ranges.clone());
                }
                let mut timings: Vec<Timing> = found
                    .iter()
                    .map(|(bucket, _, us, guess_us)| Timing {
                        size: buckets[*bucket].sizes[problem],
                        us: rounded(*us),
                        guess_us: rounded(*guess_us),
                    })
                    .collect();
                timings.dedup_by_key(|timing| timing.size);
                picks.push((problems[problem].clone(), ranges, timings));
            }
        }
        picks.retain(|(problem, ..)| missing(problem));
        Ok(picks)
    }
}

/// To the nanosecond.
fn rounded(us: f64) -> f64 {
    (us * 1e3).round().max(1.0) / 1e3
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

/// Every other one first, so that where time is short, what is found is spread.
fn in_turn(n: usize) -> Vec<usize> {
    let (even, odd): (Vec<usize>, Vec<usize>) = (0..n).partition(|at| at % 2 == 1);
    even.into_iter().chain(odd).collect()
}

fn batch_of(lens: &[u32], limits: &Limits) -> Result<Batch, EngineError> {
    let mut state = 1;
    let tokens: u32 = lens.iter().sum();
    let id = |_| (uniform(&mut state) % u64::from(limits.vocabulary.max(1))) as u32;
    Ok(Batch::from_packed((0..tokens).map(id).collect(), lens)?)
}

/// What one choice takes in a launch: that of the lineup as the cost model has it, and what others were measured to take more
/// or less. Without a model, the whole run.
fn sample(
    problem: &Problem,
    size: u64,
    found: &Found,
    (group, place): (usize, usize),
    (us, n): (f64, usize),
    n_sms: u32,
) -> Option<Sample> {
    /// Cycles a microsecond that the model counts.
    const CLOCK: f64 = 1755.0;
    let times = times_of(found, group, place);
    let (best, least) = times.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1))?;
    let Some(cycles) = problem.cycles(best, size, n_sms) else {
        let all = times.iter().map(|&(choice, time)| (choice, time * us));
        return Some(Sample::new(size, all.collect()));
    };
    let of_best = cycles / CLOCK;
    let all = times.into_iter().map(|(choice, time)| {
        let more = (time - least) * us / n.max(1) as f64;
        (choice, of_best + more)
    });
    Some(Sample::new(size, all.collect()))
}

/// One sample of those of a size: the mean of what a choice took over the best.
fn merged(samples: Vec<Sample>) -> Vec<Sample> {
    let mut all: Vec<Sample> = Vec::new();
    for sample in samples {
        match all.last_mut().filter(|last| last.size == sample.size) {
            None => all.push(sample),
            Some(last) => {
                last.us.retain(|(choice, _)| sample.of(*choice).is_some());
                for (choice, us) in &mut last.us {
                    *us = (*us * sample.of(*choice).unwrap_or(*us)).sqrt();
                }
            }
        }
    }
    all
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
