//! The queue of a model in this process, and the engine alone beside it.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use miette::{IntoDiagnostic, Report, miette};

use super::{
    Answered, Target,
    inputs::{Input, Inputs},
};
use crate::{
    Batch, DType, DeviceChoice, Engine, EngineError,
    cli::simulate::Chosen,
    engine::{Folder, Pipeline},
    files::{self, Kind as File},
    schedule::{CostTable, scheduler},
    serve::{Kind, Model, ModelChoice, ServeError, Service, Submit, Text, measure},
    simulate::Load,
};

/// As those of `gemmule serve`.
#[derive(clap::Args)]
pub(super) struct InsideOptions {
    /// A checkpoint's folder, with --in-process
    #[arg(long, value_name = "DIR", requires = "in_process")]
    weights: Option<PathBuf>,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto", requires = "in_process")]
    device: DeviceChoice,
    /// f32, f16 or bf16
    #[arg(long, requires = "in_process")]
    dtype: Option<DType>,
    /// Which requests run next
    #[arg(
        long,
        value_name = "NAME",
        default_value = "packed",
        requires = "in_process"
    )]
    scheduler: String,
    #[command(flatten)]
    settings: Chosen,
    /// What batches cost, from this table
    #[arg(long, value_name = "FILE", requires = "in_process")]
    costs: Option<PathBuf>,
    /// Threads that tokenize
    #[arg(long, value_name = "N", requires = "in_process")]
    tokenizers: Option<usize>,
}

#[derive(Clone)]
pub(super) struct Inside {
    model: Arc<Model>,
    inputs: Inputs,
    within: Option<Duration>,
}

/// How long the engine alone is measured, at most.
const OFFLINE: f64 = 5.0;

/// A model that is served here, and the tokens a second of its engine alone on lengths of the same distribution.
pub(super) fn start(args: &super::Args) -> Result<(Inside, f64), Report> {
    let inside = &args.inside;
    let folder = inside.weights.clone().ok_or_else(|| {
        miette!("--in-process needs --weights, the folder of the model that is asked")
    })?;
    let mut builder = Engine::from_checkpoint(&folder).device(inside.device);
    let outputs = Model::outputs(&Folder::open(&folder)?, false, false)?;
    if !outputs.is_empty() {
        builder = builder.outputs(outputs);
    }
    if let Some(dtype) = inside.dtype {
        builder = builder.dtype(dtype);
    }
    let engine = builder.build()?;
    let mut session = engine.session()?;
    let costs = match &inside.costs {
        Some(file) => {
            let text = files::text(file, File::Costs).map_err(EngineError::from)?;
            CostTable::parse(&text).map_err(|e| miette!("`{}`: {e}", file.display()))?
        }
        None => measure(&engine, &mut session, Duration::from_secs(3))?,
    };
    let offline = offline(args, &engine, session, &costs)?;
    drop(engine);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let settings = inside.settings.settings()?;
    let model = Model::open(ModelChoice {
        name: Model::name_of(&folder),
        folder,
        devices: vec![inside.device],
        dtype: inside.dtype,
        invariant: false,
        scheduler: scheduler(&inside.scheduler, &settings).into_diagnostic()?,
        costs: Some(costs),
        batch_bytes: 8 << 30,
        cache_bytes: None,
        queue: Duration::from_secs(2),
        tokenizers: inside.tokenizers.unwrap_or(cores.clamp(1, 64)),
        all_tokens: false,
        sparse: false,
        share: None,
        previous: None,
        trace: None,
        cache: None,
    })?;
    let target = Inside {
        model: Arc::new(model),
        inputs: Inputs::of(&args.inputs)?,
        within: args.deadline_ms.map(Duration::from_millis),
    };
    target.service()?;
    Ok((target, offline))
}

/// Batches of the size with the best rate, one after another.
fn offline(
    args: &super::Args,
    engine: &Engine,
    session: crate::Session,
    costs: &CostTable,
) -> Result<f64, Report> {
    let load = Load {
        rate: 1.0,
        requests: 16_384,
        lengths: args.lens.clone(),
        steps: 1,
        deadlines: None,
        seed: args.seed,
    };
    let limits = engine.limits();
    let longest = limits.longest.unwrap_or(u32::MAX);
    let lens: Vec<u32> = load
        .arrivals()
        .iter()
        .map(|w| w.tokens.min(longest))
        .collect();
    let rate = |at: usize| costs.packed.x[at] / costs.packed.values[at][0];
    let sizes = 0..costs.packed.x.len();
    let best = sizes.max_by(|&a, &b| rate(a).total_cmp(&rate(b)));
    let size = best.map_or(4096.0, |at| costs.packed.x[at]) as u64;
    let mut batches = Vec::new();
    let (mut lens_of, mut tokens) = (Vec::new(), 0);
    for &len in &lens {
        lens_of.push(len);
        tokens += u64::from(len);
        if tokens >= size {
            let ids = (0..tokens).map(|i| limits.token_id(i.wrapping_mul(2_654_435_761)));
            batches.push(Batch::from_packed(ids.collect(), &lens_of).into_diagnostic()?);
            (lens_of, tokens) = (Vec::new(), 0);
        }
        if batches.len() >= 64 {
            break;
        }
    }
    if batches.is_empty() {
        return Err(miette!(
            "no batch could be made of the lengths {}",
            args.lens
        ));
    }
    let pipeline = Pipeline::new(session)?;
    for batch in batches.iter().take(2) {
        pipeline.submit(batch.clone())?.wait()?;
    }
    let began = Instant::now();
    let within = Duration::from_secs_f64(args.seconds.min(OFFLINE));
    let mut behind = std::collections::VecDeque::new();
    let mut done = 0;
    for batch in batches.iter().cycle() {
        behind.push_back((
            batch.lens().iter().map(|&n| u64::from(n)).sum::<u64>(),
            pipeline.submit(batch.clone())?,
        ));
        if behind.len() > 2
            && let Some((tokens, pending)) = behind.pop_front()
        {
            pending.wait()?;
            done += tokens;
        }
        if began.elapsed() >= within {
            break;
        }
    }
    for (tokens, pending) in behind {
        pending.wait()?;
        done += tokens;
    }
    Ok(done as f64 / began.elapsed().as_secs_f64())
}

impl Inside {
    pub fn name(&self) -> String {
        format!("{} in this process, {}", self.model.name, self.model.device)
    }

    fn service(&self) -> Result<&Service, Report> {
        match &self.model.kind {
            Kind::Service(service) => Ok(service),
            Kind::Writer(_) => Err(miette!(
                "{} writes texts, and has no queue to measure; `gemmule bench generate` measures its steps, and \
                 `gemmule bench serve URL --route completions` its server",
                self.model.name
            )),
        }
    }

    async fn asked(&self, number: u64, tokens: u32) -> Result<u64, ServeError> {
        let Kind::Service(service) = &self.model.kind else {
            return Ok(0);
        };
        let text = match self.inputs.get(number, tokens, 2) {
            Input::Ids(ids) => Text::Ids(ids),
            Input::Text(text) => Text::One(text),
        };
        let submit = Submit {
            truncate: true,
            within: self.within,
            ..Submit::default()
        };
        let mut all = 0;
        for reply in service.submit(vec![text], submit)? {
            all += reply.await?.tokens as u64;
        }
        Ok(all)
    }
}

impl Target for Inside {
    async fn ask(&self, number: u64, tokens: u32) -> Answered {
        match self.asked(number, tokens).await {
            Ok(tokens) => Answered {
                status: 200,
                tokens,
                ..Answered::default()
            },
            Err(error) => Answered {
                // As HTTP would have it.
                status: match &error {
                    ServeError::Overloaded { .. } | ServeError::Hopeless => 429,
                    ServeError::Deadline => 504,
                    _ => 500,
                },
                problem: Some(error.to_string()),
                ..Answered::default()
            },
        }
    }
}
