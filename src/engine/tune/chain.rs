//! Kernels raced in the programs that launch them.

use std::{
    collections::{HashMap, HashSet},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{Chosen, EngineError, Stage, TuneMode, Tuner, Wanted, emit, given, say, with_causes};
use crate::{
    engine::{Compiled, picks::Store},
    jit::Cubin,
    kernels::{KernelSpec, trial::uniform},
    program::Program,
    runtime::{
        AllocatorChoice, GraphChoice, Output,
        batch::{Batch, Limits},
        cuda::{Code, CudaError, CudaModel, CudaSession},
        weights::RandomWeights,
    },
    tensor::DType,
    tune::{
        Effort, Made, Origin, Picked, Picks, Problem, Range, Sample, Timing,
        chain::{
            Course, Found, Group, Lineup, alone, bucket_lens, bucket_tokens, descend, size_of,
            times_of,
        },
        choice_at, mend,
    },
};

/// Longest sequence of a batch.
const LONGEST: u64 = 512;
/// Turns of a quick look and of a long one, runs of each lineup in a turn, and one before them that does not count.
const QUICK_TURNS: usize = 4;
const LONG_TURNS: usize = 12;
const RUNS: usize = 4;
/// Turns after which a lineup that is so much slower than the first is given up.
const FIRST_TURNS: usize = 2;
const HOPELESS: f64 = 1.04;
/// Before a race: the card's clock falls under lasting load.
const REST: Duration = Duration::from_millis(20);

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
                    first.is_none_or(|choice| choice == crate::tune::Choice::Apart)
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
struct Bucket {
    lens: Vec<u32>,
    /// By problem.
    sizes: Vec<u64>,
    start: Lineup,
    groups: Vec<Group>,
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
        let names = |choices: &[crate::tune::Choice]| {
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

/// A program's weights on the device, and code by symbol.
struct Field<'a> {
    tuner: &'a Tuner<'a>,
    compiled: &'a Compiled,
    problems: &'a [Problem],
    base: CudaModel,
    cubins: HashMap<String, Cubin>,
    code: Code,
}

impl<'a> Field<'a> {
    fn new(
        tuner: &'a Tuner<'a>,
        compiled: &'a Compiled,
        problems: &'a [Problem],
        buckets: &[Bucket],
    ) -> Result<Self, EngineError> {
        let program = compiled.program.clone();
        let mut kernels = CudaModel::kernels(&program);
        for problem in compiled.problems()? {
            let guess = problem.guess().into_iter();
            kernels.extend(guess.flat_map(|range| problem.kernels(range.choice)));
        }
        let mut asked = HashSet::new();
        for group in buckets.iter().flat_map(|bucket| &bucket.groups) {
            for made in &group.moves {
                asked.extend(group.problems.iter().copied().zip(made.iter().copied()));
            }
        }
        let asked = asked.into_iter();
        kernels.extend(asked.flat_map(|(at, choice)| problems[at].kernels(choice)));
        let cubins = compile(tuner, &kernels)?;
        let source = RandomWeights::new(1);
        let device = tuner.device.clone();
        let show = |done, total| (tuner.progress)(Stage::Weights, done, total);
        let all: Vec<Cubin> = cubins.values().cloned().collect();
        let base = CudaModel::load(device, program, &all, &source, &show)?;
        Ok(Self {
            tuner,
            compiled,
            problems,
            base,
            cubins,
            code: Code::default(),
        })
    }

    fn course(&mut self, batch: Batch) -> OnCourse<'_, 'a> {
        OnCourse {
            field: self,
            batch,
            programs: HashMap::new(),
            us: HashMap::new(),
        }
    }
}

fn compile(tuner: &Tuner, kernels: &[KernelSpec]) -> Result<HashMap<String, Cubin>, EngineError> {
    let mut once: Vec<KernelSpec> = Vec::new();
    for kernel in kernels {
        if !once.contains(kernel) {
            once.push(kernel.clone());
        }
    }
    let show = |done, total| (tuner.progress)(Stage::Kernels, done, total);
    let (sources, target) = (emit(&once)?, tuner.device.target()?);
    let cubins = tuner.jit.compile_all(&sources, target, &show)?;
    let by_symbol = cubins.into_iter().map(|c| (c.symbol.clone(), c));
    Ok(by_symbol.collect())
}

/// A program with one lineup: what it launches for the batch, by symbol.
struct Lowered {
    program: Program,
    launched: Vec<String>,
}

struct OnCourse<'c, 'a> {
    field: &'c mut Field<'a>,
    batch: Batch,
    programs: HashMap<Lineup, Rc<Lowered>>,
    /// Of a run, as measured last.
    us: HashMap<Lineup, f64>,
}

impl OnCourse<'_, '_> {
    fn lowered(&mut self, lineup: &Lineup) -> Result<Rc<Lowered>, EngineError> {
        if let Some(known) = self.programs.get(lineup) {
            return Ok(Rc::clone(known));
        }
        let made = Made {
            card: self.field.tuner.device.info().into(),
            nvrtc: self.field.tuner.jit.nvrtc().version(),
        };
        let mut picks = Picks::new(made);
        for (problem, &choice) in self.field.problems.iter().zip(lineup) {
            let picked = Picked {
                digest: String::new(),
                effort: Effort::Chain,
                ranges: alone(problem, choice),
                timings: Vec::new(),
            };
            picks.problems.insert(problem.key(), picked);
        }
        let program = self.field.compiled.program_with(&picks)?;
        let extents = self.batch.extents();
        let mut launched = Vec::new();
        for step in &program.steps {
            if let Some((kernel, _)) = step.launch(&extents).map_err(CudaError::from)? {
                launched.push(program.kernels[kernel].as_kernel().symbol());
            }
        }
        let lowered = Rc::new(Lowered { program, launched });
        self.programs.insert(lineup.clone(), Rc::clone(&lowered));
        Ok(lowered)
    }

    /// A session of a lineup that has run, and has its graph.
    fn session(&mut self, lineup: &Lineup) -> Result<CudaSession, EngineError> {
        let lowered = self.lowered(lineup)?;
        let field = &mut *self.field;
        let (program, extents) = (lowered.program.clone(), self.batch.extents());
        // Nearly all are compiled at the beginning, all at once.
        let mut late: Vec<KernelSpec> = Vec::new();
        for kernel in &program.kernels {
            let symbol = kernel.as_kernel().symbol();
            if lowered.launched.contains(&symbol) && !field.cubins.contains_key(&symbol) {
                late.push(kernel.clone());
            }
        }
        if !late.is_empty() {
            field.cubins.extend(compile(field.tuner, &late)?);
        }
        let (cubins, code) = (&field.cubins, &mut field.code);
        let model = field.base.sibling(program, &extents, cubins, code)?;
        let (allocator, graphs) = (AllocatorChoice::default(), GraphChoice::default());
        let mut session = CudaSession::new(Arc::new(model), &allocator, false, graphs)?;
        session.time(&self.batch, 3, 0)?;
        Ok(session)
    }

    /// Microseconds of a run with a lineup.
    fn us(&mut self, lineup: &Lineup) -> Result<f64, EngineError> {
        if let Some(&us) = self.us.get(lineup) {
            return Ok(us);
        }
        let mut session = self.session(lineup)?;
        std::thread::sleep(REST);
        let timing = session.time(&self.batch, 2, QUICK_TURNS * RUNS)?;
        Ok(f64::from(timing.median()) * 1e3)
    }
}

impl Course for OnCourse<'_, '_> {
    type Error = EngineError;

    fn is_same(&mut self, a: &Lineup, b: &Lineup) -> Result<bool, EngineError> {
        Ok(self.lowered(a)?.launched == self.lowered(b)?.launched)
    }

    fn race(&mut self, lineups: &[Lineup], long: bool) -> Result<Vec<Option<f64>>, EngineError> {
        let mut sessions = Vec::new();
        for lineup in lineups {
            sessions.push(self.session(lineup)?);
        }
        let mut is_in = vec![true; lineups.len()];
        if long {
            let reference = sessions[0].run(&self.batch)?;
            for at in 1..sessions.len() {
                let outputs = sessions[at].run(&self.batch)?;
                is_in[at] = agree(&outputs, &reference, self.field.compiled.options.dtype);
                if !is_in[at] {
                    let names: Vec<String> = lineups[at].iter().map(ToString::to_string).collect();
                    tracing::warn!("results differ with {}: not picked", names.join(", "));
                }
            }
        }
        std::thread::sleep(REST);
        let turns = if long { LONG_TURNS } else { QUICK_TURNS };
        let mut ms: Vec<Vec<f64>> = vec![Vec::new(); lineups.len()];
        for turn in 0..turns {
            let mut order: Vec<usize> = (0..lineups.len()).collect();
            if turn % 2 == 1 {
                order.reverse();
            }
            for at in order {
                if is_in[at] {
                    let timing = sessions[at].time(&self.batch, 1, RUNS)?;
                    ms[at].push(timing.median().into());
                }
            }
            if turn + 1 == FIRST_TURNS {
                for at in 1..lineups.len() {
                    is_in[at] &= ratio(&ms[at], &ms[0]).is_some_and(|ratio| ratio < HOPELESS);
                }
            }
        }
        if let Some(first) = median(ms[0].clone()) {
            self.us.insert(lineups[0].clone(), first * 1e3);
        }
        for (lineup, ms) in lineups.iter().zip(&ms).skip(1).filter(|_| long) {
            if let Some(ms) = median(ms.clone()) {
                self.us.insert(lineup.clone(), ms * 1e3);
            }
        }
        Ok(ms.iter().map(|own| ratio(own, &ms[0])).collect())
    }
}

/// The median, over turns, of the ratio to the first lineup's time in the same turn.
fn ratio(own: &[f64], first: &[f64]) -> Option<f64> {
    median(
        own.iter()
            .zip(first)
            .map(|(own, first)| own / first)
            .collect(),
    )
}

/// Of an even number the mean of the two in the middle.
fn median(mut of: Vec<f64>) -> Option<f64> {
    of.sort_by(f64::total_cmp);
    let (below, above) = (
        of.get(of.len().saturating_sub(1) / 2)?,
        of.get(of.len() / 2)?,
    );
    Some((below + above) / 2.0)
}

/// Whether results are the same up to rounding, as it adds up over layers.
fn agree(own: &[Output], reference: &[Output], dtype: DType) -> bool {
    let bound = match dtype {
        DType::BF16 => 0.125,
        DType::F16 => 0.0157,
        _ => 1e-3,
    };
    own.iter().zip(reference).all(|(own, reference)| {
        let pairs = own.values.iter().zip(&reference.values);
        let (mut of_difference, mut of_all) = (0.0, 0.0);
        for (&a, &b) in pairs {
            of_difference += f64::from(a - b).powi(2);
            of_all += f64::from(b).powi(2);
        }
        // A NaN is none.
        of_difference <= of_all * bound * bound
    })
}
