//! The tuner: for each problem of a model the candidates that the cost model proposes are compiled,
//! raced on the card, compared, and the fastest are kept on disk.

mod chain;
mod chosen;
mod course;
mod track;

use std::{
    collections::HashMap,
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    time::{Duration, Instant},
};

use super::{
    EngineError, Stage, emit,
    picks::{Store, digests, read_picks, refused},
    shipped,
};
use crate::{
    jit::Jit,
    runtime::cuda::Device,
    tune::{
        Effort, Heat, Made, Origin, Picked, PicksError, Problem, Range, Sample, Schedule, Timing,
        between, choice_at, settle,
    },
};
pub use chosen::Chosen;
pub(super) use chosen::say;
use track::{OnDevice, Run, Track};

/// Whether kernels are chosen by measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TuneMode {
    /// The picks that are given, else those that come with gemmule for the card, else the cost model's
    /// first guess.
    #[default]
    Off,
    /// The cost model's first guess of every problem, also where picks come with gemmule: to time guesses
    /// against picks.
    Guess,
    /// What was not measured yet on this card is, within seconds.
    Quick,
    /// As `Quick`, with all candidates that are not hopeless, at as many sizes as there is time for
    /// ([`Tuner::within`]).
    Full,
    /// In the whole program, one choice exchanged at a time: what kernels by themselves say does not hold where the next
    /// one begins early and the card is at the limit of its power ([`Tuner::choose_in`]).
    Chain,
}

impl TuneMode {
    /// How much is measured; `None` for nothing.
    pub fn effort(self) -> Option<Effort> {
        match self {
            Self::Off | Self::Guess => None,
            Self::Quick => Some(Effort::Quick),
            Self::Full => Some(Effort::Full),
            Self::Chain => Some(Effort::Chain),
        }
    }
}

impl fmt::Display for TuneMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.effort()) {
            (Self::Guess, _) => f.pad("guess"),
            (_, None) => f.pad("off"),
            (_, Some(effort)) => effort.fmt(f),
        }
    }
}

impl FromStr for TuneMode {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        [Self::Off, Self::Guess, Self::Quick, Self::Full, Self::Chain]
            .into_iter()
            .find(|mode| mode.to_string() == text)
            .ok_or_else(|| EngineError::UnknownTuneMode {
                text: text.to_owned(),
            })
    }
}

/// Called with the stage, what is done, and the total.
type Progress<'a> = &'a (dyn Fn(Stage, usize, usize) + Sync);

/// Chooses kernels on one device.
pub struct Tuner<'a> {
    device: &'a Device,
    jit: &'a Jit,
    mode: TuneMode,
    given: Option<PathBuf>,
    again: bool,
    within: Option<Duration>,
    progress: Progress<'a>,
}

/// Time for [`TuneMode::Full`], unless another is asked for.
const WITHIN: Duration = Duration::from_secs(120);
/// Time without a limit: an instant so much later still is one.
const ENDLESS: Duration = Duration::from_secs(1 << 30);

impl<'a> Tuner<'a> {
    pub fn new(device: &'a Device, jit: &'a Jit, mode: TuneMode) -> Self {
        Self {
            device,
            jit,
            mode,
            given: None,
            again: false,
            within: None,
            progress: &|_, _, _| (),
        }
    }

    /// Takes picks from this file before any others. With [`TuneMode::Off`] it is an error that they
    /// are refused; else a warning says so, and what was refused is measured.
    pub fn given(mut self, file: Option<&Path>) -> Self {
        self.given = file.map(Path::to_owned);
        self
    }

    /// Measures also what was measured before.
    pub fn again(mut self, again: bool) -> Self {
        self.again = again;
        self
    }

    /// When to end: problems get equal parts of the time that is left, go from coarse sizes to finer
    /// ones as long as theirs lasts, and those that are not begun at the end are left to the first guess.
    /// Two minutes of [`TuneMode::Full`] and no end of [`TuneMode::Quick`] if it is not said.
    pub fn within(mut self, time: Option<Duration>) -> Self {
        self.within = time;
        self
    }

    pub fn progress(mut self, progress: Progress<'a>) -> Self {
        self.progress = progress;
        self
    }

    /// The picks of `problems`: from the given file, else, unless the mode is off, from what was kept
    /// on disk for this card, NVRTC and kernels, else measured now and kept. With the mode off, what the
    /// file does not say is as shipped for the card, and what that does not say has no picks;
    /// [`TuneMode::Guess`] has none at all.
    ///
    /// # Errors
    /// Refused picks, where the mode is off; what NVRTC and the device may fail with;
    /// [`EngineError::Disagree`]; [`EngineError::GuessWithPicks`].
    pub fn choose(&self, problems: &[Problem]) -> Result<Chosen, EngineError> {
        match (self.mode, &self.given) {
            (TuneMode::Chain, _) => return Err(EngineError::NoChain),
            (TuneMode::Guess, Some(file)) => {
                return Err(EngineError::GuessWithPicks { file: file.clone() });
            }
            (TuneMode::Guess, None) => {
                return Ok(Chosen::guesses(&self.device.info().into(), problems));
            }
            _ => {}
        }
        let began = Instant::now();
        let made = Made {
            card: self.device.info().into(),
            nvrtc: self.jit.nvrtc().version(),
        };
        let wanted = Wanted::of(problems)?;
        let given = match &self.given {
            Some(file) => given(file, &made, &wanted, self.mode)?,
            None => HashMap::new(),
        };
        let shipped = match self.mode.effort() {
            None => shipped::held(&made.card, problems)?,
            Some(_) => HashMap::new(),
        };
        let store = self.jit.own_cache().map(|cache| Store::at(cache.path()));
        let usual = match self.mode {
            TuneMode::Full | TuneMode::Chain => WITHIN,
            TuneMode::Off | TuneMode::Guess | TuneMode::Quick => ENDLESS,
        };
        let choosing = Choosing {
            made,
            effort: self.mode.effort(),
            again: self.again,
            end: began + self.within.unwrap_or(usual),
            store,
            shipped,
            progress: self.progress,
        };
        choosing.run(&wanted, given, &mut OnDevice::new(self))
    }
}

/// A problem, and the digest of its candidates.
pub(super) struct Wanted<'a> {
    pub problem: &'a Problem,
    pub digest: String,
}

impl<'a> Wanted<'a> {
    pub fn of(problems: &'a [Problem]) -> Result<Vec<Self>, EngineError> {
        let pairs = problems.iter().zip(digests(problems)?);
        Ok(pairs
            .map(|(problem, digest)| Self { problem, digest })
            .collect())
    }
}

/// The picks of a file that hold here, by problem.
fn given(
    file: &Path,
    made: &Made,
    wanted: &[Wanted],
    mode: TuneMode,
) -> Result<HashMap<String, Picked>, EngineError> {
    let tuned = mode.effort().is_some();
    let refuse = |problem: PicksError| {
        let error = refused(file, problem);
        if !tuned {
            return Err(error);
        }
        tracing::warn!("{error}; what is refused is tuned anew");
        Ok(())
    };
    let picks = match read_picks(file) {
        Err(EngineError::Picks { problem, .. }) => {
            refuse(*problem)?;
            return Ok(HashMap::new());
        }
        picks => picks?,
    };
    if let Err(problem) = picks.check_made(made) {
        refuse(problem)?;
        return Ok(HashMap::new());
    }
    let mut held = HashMap::new();
    for Wanted { problem, digest } in wanted {
        let key = problem.key();
        match (
            picks.check_problem(problem, digest),
            picks.problems.get(&key),
        ) {
            (Err(problem), _) => refuse(problem)?,
            (Ok(()), Some(picked)) => {
                held.insert(key, picked.clone());
            }
            (Ok(()), None) => {}
        }
    }
    Ok(held)
}

/// Picks from all their sources.
struct Choosing<'a> {
    made: Made,
    /// `None` to measure nothing, and to take nothing that was measured before.
    effort: Option<Effort>,
    again: bool,
    /// When no finer sizes are begun, and no problem but the first.
    end: Instant,
    store: Option<Store>,
    /// What serves where nothing is measured and nothing was given.
    shipped: HashMap<String, Picked>,
    progress: Progress<'a>,
}

impl Choosing<'_> {
    fn run(
        &self,
        wanted: &[Wanted],
        given: HashMap<String, Picked>,
        track: &mut dyn Track,
    ) -> Result<Chosen, EngineError> {
        let mut chosen = Chosen::new(self.made.clone());
        let mut missing = Vec::new();
        for one in wanted {
            let key = one.problem.key();
            let (picked, from) = match (given.get(&key), self.effort) {
                (Some(picked), _) => (Some(picked.clone()), Origin::Given),
                (None, Some(effort)) => (self.kept(one, effort), Origin::Kept),
                (None, None) => (self.shipped.get(&key).cloned(), Origin::Shipped),
            };
            match (picked, self.effort) {
                (Some(picked), _) => {
                    say(&key, &picked.ranges, from);
                    chosen.add(key, picked, from);
                }
                (None, Some(effort)) if one.problem.is_raced_alone() => {
                    missing.push((one, effort));
                }
                (None, _) => chosen.guess(one.problem),
            }
        }
        let n_sms = self.made.card.n_sms;
        let races: Vec<(&Problem, Schedule)> = missing
            .iter()
            .map(|(one, effort)| (one.problem, Schedule::new(one.problem, *effort, n_sms)))
            .collect();
        if races.is_empty() {
            return Ok(chosen);
        }
        track.prepare(&races)?;
        let n_heats: usize = races.iter().map(|(_, schedule)| schedule.heats.len()).sum();
        let mut n_done = 0;
        let mut writable = true;
        for (at, ((one, effort), (problem, schedule))) in
            missing.into_iter().zip(&races).enumerate()
        {
            let left = self.end.saturating_duration_since(Instant::now());
            if left.is_zero() && at > 0 {
                tracing::warn!("no time was left for `{}`", problem.key());
                chosen.guess(problem);
                n_done += schedule.heats.len();
                continue;
            }
            let end = Instant::now() + left / (races.len() - at) as u32;
            let of_problem = |done: usize| (self.progress)(Stage::Tuning, n_done + done, n_heats);
            let samples = self.samples(problem, schedule, end, track, &of_problem)?;
            n_done += schedule.heats.len();
            let key = problem.key();
            let Some(picked) = picked(problem, one.digest.clone(), effort, &samples, n_sms) else {
                let size = samples.first().map_or(0, |sample| sample.size);
                return Err(EngineError::NothingTimed { problem: key, size });
            };
            say(&key, &picked.ranges, Origin::Measured);
            // At once, so that what was measured is not lost with what is still to do.
            if let Some(store) = self.store.as_ref().filter(|_| writable)
                && let Err(error) = store.put(&self.made, problem, &picked)
            {
                tracing::warn!("{}; the picks are not kept", with_causes(&error));
                writable = false;
            }
            chosen.add(key, picked, Origin::Measured);
        }
        (self.progress)(Stage::Tuning, n_heats, n_heats);
        Ok(chosen)
    }

    /// What was timed of one problem, by size: the coarsest stage of its schedule, and until `end` finer ones.
    fn samples(
        &self,
        problem: &Problem,
        schedule: &Schedule,
        end: Instant,
        track: &mut dyn Track,
        progress: &dyn Fn(usize),
    ) -> Result<Vec<Sample>, EngineError> {
        let mut samples: Vec<Sample> = Vec::new();
        // The smallest size that there is no memory for.
        let mut too_large = u64::MAX;
        let mut n_done = 0;
        for (stage, heats) in schedule.stages().into_iter().enumerate() {
            for heat in heats {
                if heat.size >= too_large {
                    continue;
                }
                if stage > 0 && Instant::now() >= end {
                    samples.sort_by_key(|sample| sample.size);
                    return Ok(samples);
                }
                let Some(runs) = track.race(problem, heat)? else {
                    let (key, size) = (problem.key(), heat.size);
                    if samples.iter().all(|sample| sample.size > size) {
                        return Err(EngineError::NothingTimed { problem: key, size });
                    }
                    tracing::warn!(
                        "`{key}` is not timed on {size} {} and more: the device has no memory for it",
                        problem.counted()
                    );
                    too_large = size;
                    continue;
                };
                samples.push(sample(problem, heat, &runs)?);
                n_done += 1;
                progress(n_done);
            }
        }
        samples.sort_by_key(|sample| sample.size);
        Ok(samples)
    }

    /// What was measured before, with as much effort at least.
    fn kept(&self, one: &Wanted, effort: Effort) -> Option<Picked> {
        if self.again {
            return None;
        }
        let kept = self
            .store
            .as_ref()?
            .get(&self.made, one.problem, &one.digest);
        match kept {
            Ok(picked) => picked.filter(|picked| picked.effort >= effort),
            Err(error) => {
                tracing::warn!("{}; it is tuned anew", with_causes(&error));
                None
            }
        }
    }
}

/// The times of the contenders whose result is the first's. Where no other agrees with the first, the
/// first is the odd one out, and there is no telling what is right.
fn sample(problem: &Problem, heat: &Heat, runs: &[Run]) -> Result<Sample, EngineError> {
    let mut us = Vec::new();
    for (at, (&choice, run)) in heat.contenders.iter().zip(runs).enumerate() {
        if at > 0 && !run.agrees {
            tracing::warn!(
                "`{}` on {} {}: {choice} differs from {} and is not picked",
                problem.key(),
                heat.size,
                problem.counted(),
                heat.contenders[0],
            );
        } else if run.us.is_finite() && run.us > 0.0 {
            us.push((choice, run.us));
        }
    }
    if runs.len() > 2 && runs[1..].iter().all(|run| !run.agrees) {
        return Err(EngineError::Disagree {
            problem: problem.key(),
            size: heat.size,
            counted: problem.counted().to_string(),
            choice: heat.contenders[0].to_string(),
        });
    }
    Ok(Sample::new(heat.size, us))
}

/// `None` where nothing was timed.
fn picked(
    problem: &Problem,
    digest: String,
    effort: Effort,
    samples: &[Sample],
    n_sms: u32,
) -> Option<Picked> {
    let guess = problem.guess();
    let cycles = |choice, size| problem.cycles(choice, size, n_sms);
    let ranges = settle(&between(samples, cycles), effort.most_ranges());
    if ranges.is_empty() {
        return None;
    }
    let timing = |sample: &Sample| {
        let of = |ranges: &[Range]| sample.of(choice_at(ranges, sample.size)?);
        // To the nanosecond, as a clock of GPU events is not finer.
        let rounded = |us: f64| (us * 1e3).round().max(1.0) / 1e3;
        Some(Timing {
            size: sample.size,
            us: rounded(of(&ranges)?),
            guess_us: rounded(of(&guess)?),
        })
    };
    Some(Picked {
        digest,
        effort,
        timings: samples.iter().filter_map(timing).collect(),
        ranges,
    })
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let chain = std::iter::successors(Some(error), |e| e.source());
    let texts: Vec<String> = chain.map(ToString::to_string).collect();
    texts.join(": ")
}

#[cfg(test)]
mod tests;
