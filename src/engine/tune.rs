//! The tuner: for each problem of a model the candidates that the cost model proposes are compiled,
//! raced on the card, compared, and the fastest are kept on disk.

use std::{
    collections::HashMap,
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

use super::{
    EngineError, Stage, emit,
    picks::{Store, digests, read_picks, refused},
};
use crate::{
    jit::{Cubin, Jit},
    kernels::{KernelSpec, chain::Chain},
    runtime::cuda::{CudaError, Device, Stopwatch},
    tune::{
        Choice, Effort, Heat, Made, Picked, Picks, PicksError, Problem, Range, Sample, Schedule,
        Timing, choice_at, settle,
    },
};

/// Whether kernels are chosen by measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TuneMode {
    /// The cost model's first guess, or the picks that are given.
    #[default]
    Off,
    /// What was not measured yet on this card is, within seconds.
    Quick,
    /// As `Quick`, with all candidates at many sizes: minutes.
    Full,
}

impl TuneMode {
    /// How much is measured; `None` for nothing.
    pub fn effort(self) -> Option<Effort> {
        match self {
            Self::Off => None,
            Self::Quick => Some(Effort::Quick),
            Self::Full => Some(Effort::Full),
        }
    }
}

impl fmt::Display for TuneMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.effort() {
            None => f.pad("off"),
            Some(effort) => effort.fmt(f),
        }
    }
}

impl FromStr for TuneMode {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        [Self::Off, Self::Quick, Self::Full]
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
    progress: Progress<'a>,
}

impl<'a> Tuner<'a> {
    pub fn new(device: &'a Device, jit: &'a Jit, mode: TuneMode) -> Self {
        Self {
            device,
            jit,
            mode,
            given: None,
            again: false,
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

    pub fn progress(mut self, progress: Progress<'a>) -> Self {
        self.progress = progress;
        self
    }

    /// The picks of `problems`: from the given file, else, unless the mode is off, from what was kept
    /// on disk for this card, NVRTC and kernels, else measured now and kept.
    ///
    /// # Errors
    /// Refused picks, where the mode is off; what NVRTC and the device may fail with;
    /// [`EngineError::Disagree`].
    pub fn picks(&self, problems: &[Problem]) -> Result<Picks, EngineError> {
        let made = Made {
            card: self.device.info().into(),
            nvrtc: self.jit.nvrtc().version(),
        };
        let wanted: Vec<Wanted> = problems
            .iter()
            .zip(digests(problems)?)
            .map(|(problem, digest)| Wanted { problem, digest })
            .collect();
        let given = match &self.given {
            Some(file) => given(file, &made, &wanted, self.mode)?,
            None => HashMap::new(),
        };
        let store = self.jit.cache().map(|cache| Store::at(cache.path()));
        let mut track = OnDevice {
            tuner: self,
            ready: None,
        };
        let choosing = Choosing {
            made,
            effort: self.mode.effort(),
            again: self.again,
            store,
            progress: self.progress,
        };
        choosing.run(&wanted, given, &mut track)
    }
}

/// A problem, and the digest of its candidates.
struct Wanted<'a> {
    problem: &'a Problem,
    digest: String,
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

/// Where problems are raced.
trait Track {
    /// Gets everything ready that these races need.
    fn prepare(&mut self, races: &[(&Problem, Schedule)]) -> Result<(), EngineError>;

    /// Races the contenders of a heat; one run for each. `None` where there is no memory for its
    /// operands.
    fn race(&mut self, problem: &Problem, heat: &Heat) -> Result<Option<Vec<Run>>, EngineError>;
}

/// How a contender did.
#[derive(Clone, Copy, Debug)]
struct Run {
    us: f64,
    /// Whether its result is the first contender's.
    agrees: bool,
}

/// Picks from all their sources.
struct Choosing<'a> {
    made: Made,
    /// `None` to measure nothing, and to take nothing that was measured before.
    effort: Option<Effort>,
    again: bool,
    store: Option<Store>,
    progress: Progress<'a>,
}

impl Choosing<'_> {
    fn run(
        &self,
        wanted: &[Wanted],
        given: HashMap<String, Picked>,
        track: &mut dyn Track,
    ) -> Result<Picks, EngineError> {
        let mut picks = Picks::new(self.made.clone());
        let mut missing = Vec::new();
        for one in wanted {
            let key = one.problem.key();
            let (picked, from) = match (given.get(&key), self.effort) {
                (Some(picked), _) => (Some(picked.clone()), "as given"),
                (None, Some(effort)) => (self.kept(one, effort), "measured before"),
                (None, None) => (None, ""),
            };
            match picked {
                Some(picked) => {
                    say(&key, &picked.ranges, from);
                    picks.problems.insert(key, picked);
                }
                None => match self.effort {
                    Some(effort) => missing.push((one, effort)),
                    None => say(&key, &one.problem.guess(), GUESSED),
                },
            }
        }
        let n_sms = self.made.card.n_sms;
        let races: Vec<(&Problem, Schedule)> = missing
            .iter()
            .map(|(one, effort)| (one.problem, Schedule::new(one.problem, *effort, n_sms)))
            .collect();
        if races.is_empty() {
            return Ok(picks);
        }
        track.prepare(&races)?;
        let n_heats: usize = races.iter().map(|(_, schedule)| schedule.heats.len()).sum();
        let mut n_done = 0;
        let mut writable = true;
        for ((one, effort), (problem, schedule)) in missing.into_iter().zip(&races) {
            let mut samples = Vec::new();
            for heat in &schedule.heats {
                let Some(runs) = track.race(problem, heat)? else {
                    let key = problem.key();
                    let size = heat.size;
                    if samples.is_empty() {
                        return Err(EngineError::NothingTimed { problem: key, size });
                    }
                    tracing::warn!(
                        "`{key}` is not timed on {size} {} and more: the device has no memory for it",
                        problem.counted()
                    );
                    break;
                };
                samples.push(sample(problem, heat, &runs)?);
                n_done += 1;
                (self.progress)(Stage::Tuning, n_done, n_heats);
            }
            let key = problem.key();
            let Some(picked) = picked(problem, one.digest.clone(), effort, &samples) else {
                let size = samples.first().map_or(0, |sample| sample.size);
                return Err(EngineError::NothingTimed { problem: key, size });
            };
            say(&key, &picked.ranges, "measured now");
            // At once, so that what was measured is not lost with what is still to do.
            if let Some(store) = self.store.as_ref().filter(|_| writable)
                && let Err(error) = store.put(&self.made, problem, &picked)
            {
                tracing::warn!("{}; the picks are not kept", with_causes(&error));
                writable = false;
            }
            picks.problems.insert(key, picked);
        }
        (self.progress)(Stage::Tuning, n_heats, n_heats);
        Ok(picks)
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
    Ok(Sample {
        size: heat.size,
        us,
    })
}

/// `None` where nothing was timed.
fn picked(problem: &Problem, digest: String, effort: Effort, samples: &[Sample]) -> Option<Picked> {
    let guess = problem.guess();
    let ranges = settle(samples, effort.most_ranges());
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

/// Says which kernels are launched where nothing was measured.
pub(super) fn say_guesses(problems: &[Problem]) {
    for problem in problems {
        say(&problem.key(), &problem.guess(), GUESSED);
    }
}

const GUESSED: &str = "the cost model's guess";

fn say(key: &str, ranges: &[Range], from: &str) {
    let shown: Vec<String> = ranges
        .iter()
        .map(|range| match range.up_to {
            Some(most) => format!("{} up to {most}", range.choice),
            None => range.choice.to_string(),
        })
        .collect();
    tracing::info!("{key}: {} ({from})", shown.join(", "));
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let chain = std::iter::successors(Some(error), |e| e.source());
    let texts: Vec<String> = chain.map(ToString::to_string).collect();
    texts.join(": ")
}

/// Timed replays of a candidate at a size: there are hundreds of these.
const REPLAYS: usize = 8;

/// Races on a device.
struct OnDevice<'a> {
    tuner: &'a Tuner<'a>,
    /// A stopwatch, and code by symbol.
    ready: Option<(Stopwatch, HashMap<String, Cubin>)>,
}

impl Track for OnDevice<'_> {
    fn prepare(&mut self, races: &[(&Problem, Schedule)]) -> Result<(), EngineError> {
        let mut kernels: Vec<KernelSpec> = Vec::new();
        for (problem, schedule) in races {
            let choices = schedule.choices();
            kernels.extend(choices.into_iter().flat_map(|c| problem.kernels(c)));
        }
        let device = self.tuner.device;
        let show = |done, total| (self.tuner.progress)(Stage::Kernels, done, total);
        let sources = emit(&kernels)?;
        let cubins = self
            .tuner
            .jit
            .compile_all(&sources, device.target()?, &show)?;
        let by_symbol = cubins.into_iter().map(|c| (c.symbol.clone(), c));
        self.ready = Some((
            Stopwatch::new(device)?.with_replays(REPLAYS),
            by_symbol.collect(),
        ));
        Ok(())
    }

    fn race(&mut self, problem: &Problem, heat: &Heat) -> Result<Option<Vec<Run>>, EngineError> {
        let Some((stopwatch, cubins)) = &self.ready else {
            unreachable!("races are prepared before the first of them")
        };
        let (lens, rows) = problem.batch(heat.size);
        let chain = |&choice: &Choice| problem.chain(choice);
        let chains: Vec<Chain> = heat.contenders.iter().filter_map(chain).collect();
        let with_code: Vec<(&Chain, Vec<&Cubin>)> = chains
            .iter()
            .map(|chain| {
                let symbols = chain.launches.iter().map(|l| l.kernel.as_kernel().symbol());
                (chain, symbols.filter_map(|s| cubins.get(&s)).collect())
            })
            .collect();
        match stopwatch.race(&lens, rows, &with_code) {
            Ok(laps) => Ok(Some(
                laps.into_iter()
                    .map(|lap| Run {
                        us: lap.us,
                        agrees: lap.difference.is_none_or(|d| d.worst <= 1.0),
                    })
                    .collect(),
            )),
            Err(CudaError::OutOfMemory { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests;
