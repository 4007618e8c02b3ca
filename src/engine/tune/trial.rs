//! In-place trials: two whole programs that differ in one kernel are timed alternately on a device.

use std::{collections::HashMap, sync::Arc, time::Duration};

use super::{EngineError, Stage, Tuner};
use crate::{
    engine::{Compiled, emit},
    jit::Cubin,
    kernels::KernelSpec,
    program::Program,
    runtime::{
        AllocatorChoice, GraphChoice, Output,
        batch::Batch,
        cuda::{Code, CudaError, CudaModel, CudaSession},
        weights::RandomWeights,
    },
    select::Timings,
    tensor::DType,
};

/// Number of rounds of a trial.
const ROUNDS: usize = 8;
/// Runs of each program per round.
const RUNS: usize = 4;
/// Number of rounds after which the trial of a slow program ends ([`GIVE_UP_RATIO`]).
const FIRST_ROUNDS: usize = 2;
/// The trial of a program ends early if its time exceeds the time of the current program by this factor.
const GIVE_UP_RATIO: f64 = 1.03;
/// Pause before a trial, since the card's clock falls under sustained load.
const REST: Duration = Duration::from_millis(10);
/// Artificial time of a launch in microseconds. No kernel is this fast, so the selection prefers kernels with this time.
const FORCED: f64 = 1e-3;

/// Trials of one compiled model. All programs share the weights of `base`; cubins are cached by symbol.
pub(super) struct Trials<'a> {
    tuner: &'a Tuner<'a>,
    compiled: &'a Compiled,
    base: Option<CudaModel>,
    cubins: HashMap<String, Cubin>,
    code: Code,
}

/// A program's session, and the kernels that it launches for a batch.
struct Runner {
    session: CudaSession,
    launched: Vec<KernelSpec>,
}

impl<'a> Trials<'a> {
    pub(super) fn new(tuner: &'a Tuner<'a>, compiled: &'a Compiled) -> Self {
        Self {
            tuner,
            compiled,
            base: None,
            cubins: HashMap::new(),
            code: Code::default(),
        }
    }

    /// Tries every kernel whose estimate for `tokens` tokens is close to that of the selected kernel, and adds its measured time to
    /// `timings`.
    pub(super) fn run(
        &mut self,
        batch: &Batch,
        tokens: u64,
        timings: &mut Timings,
    ) -> Result<(), EngineError> {
        let now = self.compiled.program_with(timings)?;
        let alternatives = self.compiled.alternatives(tokens, self.tuner.mode.more())?;
        let mut programs = Vec::new();
        for alternative in alternatives {
            let symbol = alternative.kernel.as_kernel().symbol();
            if timings.has(&symbol, tokens) {
                continue;
            }
            let mut forced = timings.clone();
            for kernel in &alternative.cover {
                forced.add(&kernel.as_kernel().symbol(), tokens, FORCED);
            }
            let program = self.compiled.program_with(&forced)?;
            if launched(&program, batch)?.contains(&alternative.kernel) {
                programs.push((alternative.kernel, program));
            }
        }
        let all: Vec<&Program> = [&now]
            .into_iter()
            .chain(programs.iter().map(|(_, p)| p))
            .collect();
        self.prepare(&all, batch)?;
        let mut first = self.runner(now, batch)?;
        let reference = first.session.run(batch)?;
        for (kernel, program) in programs {
            let mut other = self.runner(program, batch)?;
            let outputs = other.session.run(batch)?;
            let symbol = kernel.as_kernel().symbol();
            if !agree(&outputs, &reference, self.compiled.options.dtype) {
                tracing::warn!(
                    "results differ with `{symbol}` on {tokens} tokens: the kernel is not timed"
                );
                continue;
            }
            let Some((ms, ratio)) =
                time_interleaved(&mut first.session, &mut other.session, batch)?
            else {
                continue;
            };
            let more = ms * 1e3 * (ratio - 1.0);
            if let Some(us) = self.in_place(&kernel, tokens, &first, &other, more) {
                tracing::info!(
                    "{tokens} tokens: {:+.2} % with {symbol}",
                    100.0 * (ratio - 1.0)
                );
                timings.add(&symbol, tokens, us);
            }
        }
        Ok(())
    }

    /// Returns the time of one launch of `kernel` within a run, in microseconds; `None` if the measurement is implausible. `more` is the
    /// measured time of a run with the kernel minus that of a run without it, in microseconds. The cost model also estimates this
    /// difference, and its error is `more` minus the estimate. The returned time is the kernel's estimated time, plus the error divided by
    /// the number of launches of the kernel in a run.
    fn in_place(
        &self,
        kernel: &KernelSpec,
        tokens: u64,
        without: &Runner,
        with: &Runner,
        more: f64,
    ) -> Option<f64> {
        let machine = &self.compiled.options.machine;
        let us = |kernel: &KernelSpec| {
            let cycles = kernel.as_kernel().cycles(tokens, machine);
            cycles.map_or(0.0, |cycles| cycles / f64::from(machine.clock_mhz))
        };
        let all = |runner: &Runner| runner.launched.iter().map(us).sum::<f64>();
        let launches = with.launched.iter().filter(|k| *k == kernel).count();
        let estimated = all(with) - all(without);
        let own = us(kernel) + (more - estimated) / launches.max(1) as f64;
        // A time far below the estimate is measurement noise.
        (own > 0.2 * us(kernel)).then_some(own)
    }

    /// Compiles, in parallel, all kernels that the programs launch for a batch. The first call also loads the weights.
    fn prepare(&mut self, programs: &[&Program], batch: &Batch) -> Result<(), EngineError> {
        let mut missing: Vec<KernelSpec> = Vec::new();
        for program in programs {
            for kernel in launched(program, batch)? {
                let is_known = self.cubins.contains_key(&kernel.as_kernel().symbol());
                if !is_known && !missing.contains(&kernel) {
                    missing.push(kernel);
                }
            }
        }
        if self.base.is_none() {
            for kernel in CudaModel::kernels(&self.compiled.program) {
                if !missing.contains(&kernel) {
                    missing.push(kernel);
                }
            }
        }
        let show = |done, total| (self.tuner.progress)(Stage::Kernels, done, total);
        let (sources, target) = (emit(&missing)?, self.tuner.device.target()?);
        let cubins = self.tuner.jit.compile_all(&sources, target, &show)?;
        self.cubins
            .extend(cubins.into_iter().map(|c| (c.symbol.clone(), c)));
        if self.base.is_none() {
            let program = self.compiled.program.clone();
            let all: Vec<Cubin> = self.cubins.values().cloned().collect();
            let show = |done, total| (self.tuner.progress)(Stage::Weights, done, total);
            let device = self.tuner.device.clone();
            self.base = Some(CudaModel::load(
                device,
                program,
                &all,
                &RandomWeights::new(1),
                &show,
            )?);
        }
        Ok(())
    }

    /// Returns a warmed-up session with a captured CUDA graph.
    fn runner(&mut self, program: Program, batch: &Batch) -> Result<Runner, EngineError> {
        let launched = launched(&program, batch)?;
        let Some(base) = &self.base else {
            unreachable!("`prepare` loads the weights before anything runs")
        };
        let model = base.sibling(program, &batch.extents(), &self.cubins, &mut self.code)?;
        let (allocator, graphs) = (AllocatorChoice::default(), GraphChoice::default());
        let mut session = CudaSession::new(Arc::new(model), &allocator, false, graphs)?;
        session.time(batch, 3, 0)?;
        Ok(Runner { session, launched })
    }
}

/// Returns the kernels of a batch's launches, in order.
fn launched(program: &Program, batch: &Batch) -> Result<Vec<KernelSpec>, EngineError> {
    let launched = program
        .launched(&batch.extents())
        .map_err(CudaError::from)?;
    Ok(launched
        .into_iter()
        .map(|(_, kernel)| program.kernels[kernel].clone())
        .collect())
}

/// Returns the median time of `first` in milliseconds, and the median ratio of the time of `second` to the time of `first`. The sessions
/// alternate in running first. If `second` is slow ([`GIVE_UP_RATIO`]), only [`FIRST_ROUNDS`] rounds are measured.
fn time_interleaved(
    first: &mut CudaSession,
    second: &mut CudaSession,
    batch: &Batch,
) -> Result<Option<(f64, f64)>, EngineError> {
    std::thread::sleep(REST);
    let (mut all, mut ratios) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let time = |session: &mut CudaSession| -> Result<f64, EngineError> {
            Ok(session.time(batch, 1, RUNS)?.median().into())
        };
        let (a, b) = match round % 2 {
            0 => {
                let a = time(first)?;
                (a, time(second)?)
            }
            _ => {
                let b = time(second)?;
                (time(first)?, b)
            }
        };
        all.push(a);
        ratios.push(b / a);
        if round + 1 == FIRST_ROUNDS && median(&ratios).is_none_or(|ratio| ratio > GIVE_UP_RATIO) {
            break;
        }
    }
    Ok(median(&all).zip(median(&ratios)))
}

/// Returns the median; for an even number of values, the mean of the middle two.
fn median(of: &[f64]) -> Option<f64> {
    let mut of = of.to_vec();
    of.sort_by(f64::total_cmp);
    let (below, above) = (
        of.get(of.len().saturating_sub(1) / 2)?,
        of.get(of.len() / 2)?,
    );
    Some((below + above) / 2.0)
}

/// Returns whether results agree up to rounding errors, which accumulate over layers. The measure is the relative error in the 2-norm.
fn agree(own: &[Output], reference: &[Output], dtype: DType) -> bool {
    let bound = match dtype {
        DType::BF16 => 0.125,
        DType::F16 => 0.0157,
        DType::F32 => 1e-3,
    };
    own.iter().zip(reference).all(|(own, reference)| {
        let pairs = own.values.iter().zip(&reference.values);
        let (mut of_difference, mut of_all) = (0.0, 0.0);
        for (&a, &b) in pairs {
            of_difference += f64::from(a - b).powi(2);
            of_all += f64::from(b).powi(2);
        }
        // A negated comparison, `!(a > b)`, would accept NaN.
        of_difference <= of_all * bound * bound
    })
}
