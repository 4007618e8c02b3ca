//! Whole programs on a device, one for each lineup, and their races.

use std::{
    collections::{HashMap, HashSet},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use super::{EngineError, Stage, Tuner, chain::Bucket, emit};
use crate::{
    engine::Compiled,
    jit::Cubin,
    kernels::KernelSpec,
    program::Program,
    runtime::{
        AllocatorChoice, GraphChoice, Output,
        batch::Batch,
        cuda::{Code, CudaError, CudaModel, CudaSession},
        weights::RandomWeights,
    },
    tensor::DType,
    tune::{
        Effort, Made, Picked, Picks, Problem,
        chain::{Course, Lineup, alone},
    },
};

/// Turns of a quick look and of a long one, runs of each lineup in a turn, and one before them that does not count.
const QUICK_TURNS: usize = 4;
const LONG_TURNS: usize = 12;
const RUNS: usize = 4;
/// Turns after which a lineup that is so much slower than the first is given up.
const FIRST_TURNS: usize = 2;
const HOPELESS: f64 = 1.04;
/// Before a race: the card's clock falls under lasting load.
const REST: Duration = Duration::from_millis(20);

/// A program's weights on the device, and code by symbol.
pub(super) struct Field<'a> {
    tuner: &'a Tuner<'a>,
    compiled: &'a Compiled,
    problems: &'a [Problem],
    base: CudaModel,
    cubins: HashMap<String, Cubin>,
    code: Code,
}

impl<'a> Field<'a> {
    pub(super) fn new(
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

    pub(super) fn course(&mut self, batch: Batch) -> OnCourse<'_, 'a> {
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

pub(super) struct OnCourse<'c, 'a> {
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
        let launched = program.launched(&extents).map_err(CudaError::from)?;
        let symbol = |(_, kernel): (_, usize)| program.kernels[kernel].as_kernel().symbol();
        let launched = launched.into_iter().map(symbol).collect();
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
    pub(super) fn us(&mut self, lineup: &Lineup) -> Result<f64, EngineError> {
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
