//! The tuner: tries kernels whose estimates are close to those of the selected kernels. Each of these kernels replaces the selected kernel
//! in a whole run, and the change of the run's time corrects the cost model.
//!
//! A kernel timed in isolation says little about its share of a run, since kernels overlap (programmatic dependent launch) and the card may
//! be at its power limit. Whole runs with random weights are therefore timed, alternately with and without the kernel.

mod trial;

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    time::{Duration, Instant},
};

use super::{
    Compiled, EngineError, Stage,
    timings::{Store, TimedOn, check_on, read_timings, refused},
};
use crate::{
    jit::Jit,
    kernels::trial::uniform,
    runtime::{
        batch::{Batch, Limits},
        cuda::{CudaError, Device},
    },
    select::Timings,
};
use trial::Trials;

/// Whether and how thoroughly kernels are timed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TuneMode {
    /// Kernels are not timed. The cost model selects them, corrected by a file of timings if one is given.
    #[default]
    Off,
    /// One batch size (in tokens) per octave; takes seconds.
    Quick,
    /// Four batch sizes per octave, and more kernels at each.
    Full,
}

impl TuneMode {
    const ALL: [Self; 3] = [Self::Off, Self::Quick, Self::Full];

    /// Returns the batch sizes to time, in tokens, ascending. They are not powers of two, because a power of two fills every tile and would
    /// favor large tiles.
    fn tokens(self) -> Vec<u64> {
        let per_octave = match self {
            Self::Off => return Vec::new(),
            Self::Quick => 1.0,
            Self::Full => 4.0,
        };
        const FIRST: f64 = 226.0;
        const LAST: f64 = 14_600.0;
        let number = |at: u32| FIRST * 2f64.powf(f64::from(at) / per_octave);
        let numbers = (0..).map(number).take_while(|&tokens| tokens < LAST);
        numbers.map(|tokens| tokens.round() as u64).collect()
    }

    /// Returns the fraction by which a kernel's estimate may exceed the best estimate. Slower kernels are not timed.
    fn more(self) -> f64 {
        match self {
            Self::Off | Self::Quick => 0.05,
            Self::Full => 0.12,
        }
    }
}

impl fmt::Display for TuneMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Off => "off",
            Self::Quick => "quick",
            Self::Full => "full",
        })
    }
}

impl FromStr for TuneMode {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        Self::ALL
            .into_iter()
            .find(|mode| mode.to_string() == text)
            .ok_or_else(|| EngineError::UnknownTuneMode {
                text: text.to_owned(),
            })
    }
}

/// Progress callback. Its arguments are the stage, the number of finished items, and the total number of items.
type Progress<'a> = &'a (dyn Fn(Stage, usize, usize) + Sync);

/// Times kernels on one device.
pub struct Tuner<'a> {
    device: &'a Device,
    jit: &'a Jit,
    mode: TuneMode,
    given: Option<PathBuf>,
    again: bool,
    within: Duration,
    progress: Progress<'a>,
}

/// Default time limit of [`Tuner::time`].
const WITHIN: Duration = Duration::from_secs(120);
/// Maximum length of a sequence in a batch.
const LONGEST: u64 = 512;

impl<'a> Tuner<'a> {
    /// Creates a tuner without given timings and with the default time limit.
    pub fn new(device: &'a Device, jit: &'a Jit, mode: TuneMode) -> Self {
        Self {
            device,
            jit,
            mode,
            given: None,
            again: false,
            within: WITHIN,
            progress: &|_, _, _| (),
        }
    }

    /// Sets a file of timings, which is read before any kernel is timed. If the file is refused, [`Tuner::time`] returns an error in mode
    /// `Off`, and logs a warning in other modes.
    pub fn given(mut self, file: Option<&Path>) -> Self {
        self.given = file.map(Path::to_owned);
        self
    }

    /// Sets whether to ignore cached timings and measure again.
    pub fn again(mut self, again: bool) -> Self {
        self.again = again;
        self
    }

    /// Sets the time limit of [`Tuner::time`]. For batch sizes that are not reached within the limit, the cost model remains uncorrected.
    pub fn within(mut self, time: Option<Duration>) -> Self {
        self.within = time.unwrap_or(WITHIN);
        self
    }

    /// Sets a callback for the progress of timing.
    pub fn progress(mut self, progress: Progress<'a>) -> Self {
        self.progress = progress;
        self
    }

    /// Returns the card and the compiler that this tuner measures timings with.
    pub fn timed_on(&self) -> TimedOn {
        TimedOn::new(self.device.info(), self.jit.nvrtc().version())
    }

    /// Returns the timings of a program's kernels: those of the given file, or else of the cache, with new measurements added. With
    /// [`TuneMode::Off`], returns only timings of the given file.
    ///
    /// # Errors
    /// Returns errors of NVRTC and the device. In mode `Off`, also returns an error if the file is refused.
    pub fn time(&self, compiled: &Compiled) -> Result<Timings, EngineError> {
        let on = self.timed_on();
        let mut timings = self.known(&on)?;
        if self.mode == TuneMode::Off {
            return Ok(timings);
        }
        let limits = Limits::of(&compiled.model);
        let longest = limits.longest.map_or(LONGEST, u64::from).min(LONGEST);
        let end = Instant::now() + self.within;
        let all = spread(self.mode.tokens());
        let mut trials = Trials::new(self, compiled);
        for (done, &tokens) in all.iter().enumerate() {
            (self.progress)(Stage::Tuning, done, all.len());
            if Instant::now() >= end {
                tracing::warn!("no time was left for {tokens} tokens");
                continue;
            }
            let batch = batch_of(tokens, longest, &limits)?;
            match trials.run(&batch, tokens, &mut timings) {
                Ok(()) => {}
                Err(EngineError::Cuda(CudaError::OutOfMemory { .. })) => {
                    tracing::warn!(
                        "{tokens} tokens are not timed: they do not fit in the device's memory"
                    );
                }
                Err(error) => return Err(error),
            }
            self.keep(&timings, &on);
        }
        (self.progress)(Stage::Tuning, all.len(), all.len());
        Ok(timings)
    }

    /// Returns the timings that are known before any kernel is timed: those of the given file, or else the cached timings. The cached
    /// timings are also used if the file is refused and kernels are timed. In mode `Off` and with [`Tuner::again`], the cache is not read,
    /// so no timings are known without a file.
    fn known(&self, on: &TimedOn) -> Result<Timings, EngineError> {
        if let Some(file) = &self.given {
            let read = read_timings(file).and_then(|(timings, found)| {
                check_on(&found, on).map_err(|problem| refused(file, problem))?;
                Ok(timings)
            });
            match read {
                Err(error @ EngineError::Timings { .. }) if self.mode != TuneMode::Off => {
                    tracing::warn!("{error}; kernels are timed again");
                }
                read => return read,
            }
        }
        match self.store(on) {
            Some(store) if self.mode != TuneMode::Off && !self.again => {
                store.get(on).or_else(|error| {
                    tracing::warn!("{error}; kernels are timed again");
                    Ok(Timings::default())
                })
            }
            _ => Ok(Timings::default()),
        }
    }

    /// Stores all timings in the cache. This is called after each batch size, so an interrupted run loses little.
    fn keep(&self, timings: &Timings, on: &TimedOn) {
        if let Some(store) = self.store(on)
            && let Err(error) = store.put(timings, on)
        {
            tracing::warn!("{error}; the timings are not stored");
        }
    }

    fn store(&self, on: &TimedOn) -> Option<Store> {
        let cache = self.jit.own_cache()?;
        Some(Store::at(cache.path(), on))
    }
}

/// Reorders batch sizes so that every prefix is spread over the range. If the time limit is reached, the timed sizes then still cover the
/// range.
fn spread(tokens: Vec<u64>) -> Vec<u64> {
    let mut order: Vec<usize> = (0..tokens.len()).collect();
    order.sort_by_key(|at| (at % 2 == 1, at / 2 % 2 == 0));
    order.into_iter().map(|at| tokens[at]).collect()
}

/// Creates a batch with random ids and sequences of `longest / 5` to `longest` tokens, or shorter ones if `tokens` is small.
fn batch_of(tokens: u64, longest: u64, limits: &Limits) -> Result<Batch, EngineError> {
    let longest = longest.min((tokens / 4).max(1));
    let mut state = tokens;
    let mut lens: Vec<u32> = Vec::new();
    let mut left = tokens;
    while left > 0 {
        let length = longest / 5 + uniform(&mut state) % (longest - longest / 5).max(1);
        let length = length.clamp(1, left);
        lens.push(length as u32);
        left -= length;
    }
    let id = |_| limits.token_id(uniform(&mut state));
    let batch = Batch::from_packed((0..tokens).map(id).collect(), &lens)?;
    Ok(batch.with_required_ends(limits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_mode_times_more_token_counts_than_quick_and_both_are_spread() {
        let quick = TuneMode::Quick.tokens();
        let full = TuneMode::Full.tokens();
        assert_eq!(quick.first(), Some(&226));
        assert!(quick.iter().all(|tokens| full.contains(tokens)));
        assert!((5..=8).contains(&quick.len()) && full.len() > 3 * quick.len());
        let mut turned = spread(full.clone());
        // The first numbers are an octave apart, up to rounding.
        assert!(
            turned[..3]
                .windows(2)
                .all(|pair| 10 * pair[1] > 19 * pair[0])
        );
        turned.sort_unstable();
        assert_eq!(turned, full);
    }

    #[test]
    fn modes_read_back_from_their_names() {
        for mode in TuneMode::ALL {
            assert_eq!(mode.to_string().parse::<TuneMode>().ok(), Some(mode));
        }
        let error = "chain".parse::<TuneMode>().expect_err("none");
        insta::assert_snapshot!(error, @"`chain` is not a tuning mode; expected off, quick or full");
    }
}
