//! Where problems are raced.

use std::collections::HashMap;

use super::{EngineError, Stage, Tuner, emit};
use crate::{
    jit::Cubin,
    kernels::{KernelSpec, chain::Chain},
    runtime::cuda::{CudaError, Stopwatch},
    tune::{Choice, Heat, Problem, Schedule},
};

/// Where problems are raced.
pub(super) trait Track {
    /// Gets everything ready that these races need.
    fn prepare(&mut self, races: &[(&Problem, Schedule)]) -> Result<(), EngineError>;

    /// Races the contenders of a heat; one run for each. `None` where there is no memory for its
    /// operands.
    fn race(&mut self, problem: &Problem, heat: &Heat) -> Result<Option<Vec<Run>>, EngineError>;
}

/// How a contender did.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub us: f64,
    /// Whether its result is the first contender's.
    pub agrees: bool,
}

/// Timed replays of a candidate at a size: there are hundreds of these.
const REPLAYS: usize = 8;
/// A candidate that takes so many times the best one's time in its first replays has no more of them.
const HOPELESS: f64 = 1.15;

/// Races on a device.
pub(super) struct OnDevice<'a> {
    tuner: &'a Tuner<'a>,
    /// A stopwatch, and code by symbol.
    ready: Option<(Stopwatch, HashMap<String, Cubin>)>,
}

impl<'a> OnDevice<'a> {
    pub fn new(tuner: &'a Tuner<'a>) -> Self {
        Self { tuner, ready: None }
    }
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
            Stopwatch::new(device)?
                .with_replays(REPLAYS)
                .giving_up(HOPELESS)
                .starting_as_in_a_run()?,
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
