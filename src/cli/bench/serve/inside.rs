//! A model that is served in this process. For comparison, its engine is also measured alone: it runs batches or decode steps without
//! requests, queues and a scheduler.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use miette::{IntoDiagnostic, Report, miette};

use super::{
    super::generate,
    Answered, Target,
    client::Route,
    inputs::{Input, Inputs},
};
use crate::{
    Batch, DType, DeviceChoice, Engine, EngineError,
    cli::simulate::Chosen,
    engine::{Builder, KvCacheChoice, Pipeline},
    files::{self, Kind as File},
    generate::{SamplingParams, generation_config_of},
    schedule::{CostTable, scheduler},
    serve::{
        GenerationParams, GenerationService, Kind, Model, ModelChoice, Piece, ServeError, Service,
        Submit, Text, measure,
    },
    simulate::Load,
    text::Folder,
};

/// Options of the model, as in `gemmule serve`.
#[derive(clap::Args)]
pub(super) struct InsideOptions {
    /// Checkpoint folder, with --in-process
    #[arg(long, value_name = "DIR", requires = "in_process")]
    weights: Option<PathBuf>,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto", requires = "in_process")]
    device: DeviceChoice,
    /// f32, f16 or bf16
    #[arg(long, requires = "in_process")]
    dtype: Option<DType>,
    /// Format of the KV cache of a model that generates text: auto (the type of activations) or fp8 (E4M3)
    #[arg(long, value_name = "KIND", default_value_t, requires = "in_process")]
    kv_dtype: KvCacheChoice,
    /// Scheduler
    #[arg(
        long,
        value_name = "NAME",
        default_value = "packed",
        requires = "in_process"
    )]
    scheduler: String,
    #[command(flatten)]
    settings: Chosen,
    /// File with the times of batches by size, which the scheduler uses
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
    /// Number of new tokens per text.
    new: usize,
}

/// Max seconds for measuring the engine without the server.
const OFFLINE: f64 = 5.0;

/// Throughput of the engine without the server, in tokens per second, or the reason why it was not measured.
type Offline = Result<f64, String>;

/// Starts a model in this process. Also measures the throughput of its engine without the server, for the lengths that `args` selects for
/// requests.
pub(super) fn start(args: &super::Args) -> Result<(Inside, Offline), Report> {
    let inside = &args.inside;
    let folder = inside
        .weights
        .clone()
        .ok_or_else(|| miette!("--in-process needs --weights, the folder of the model to test"))?;
    let (offline, costs) = match args.route {
        Route::Embeddings if inside.kv_dtype != KvCacheChoice::Auto => {
            return Err(miette!(
                "--kv-dtype {} is for models that generate text, and embeddings have no KV cache; omit it, or use --route completions",
                inside.kv_dtype
            ));
        }
        Route::Embeddings => {
            let mut builder = builder(&folder, inside);
            let outputs = Model::outputs(&Folder::open(&folder)?, [])?;
            if !outputs.is_empty() {
                builder = builder.outputs(outputs);
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
            (offline(args, &engine, session, &costs), Some(costs))
        }
        Route::Completions => (steps(args, &folder), None),
    };
    let offline = offline.map_err(|report| format!("{report:#}"));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let settings = inside.settings.settings()?;
    let model = Model::open(ModelChoice {
        name: Model::name_of(&folder),
        folder,
        devices: vec![inside.device],
        dtype: inside.dtype,
        kv_dtype: inside.kv_dtype,
        max_context: None,
        invariant: false,
        scheduler: scheduler(&inside.scheduler, &settings).into_diagnostic()?,
        costs,
        batch_bytes: 8 << 30,
        cache_bytes: None,
        queue: Duration::from_secs(2),
        tokenizers: inside.tokenizers.unwrap_or(cores.clamp(1, 64)),
        all_tokens: false,
        sparse: false,
        token_vectors: false,
        fill_mask: false,
        default_prompt: Default::default(),
        task: None,
        route_of: None,
        share: None,
        previous: None,
        trace: None,
        cache: None,
    })?;
    let target = Inside {
        model: Arc::new(model),
        inputs: Inputs::of(&args.inputs)?,
        within: args.deadline_ms.map(Duration::from_millis),
        new: args.new as usize,
    };
    let fits = match args.route {
        Route::Embeddings => target.model.service().map(|_| ()),
        Route::Completions => target.model.generation().map(|_| ()),
    };
    fits.map_err(|e| miette!("{e}"))?;
    Ok((target, offline))
}

fn builder(folder: &Path, inside: &InsideOptions) -> Builder {
    let builder = Engine::from_checkpoint(folder).device(inside.device);
    match inside.dtype {
        Some(dtype) => builder.dtype(dtype),
        None => builder,
    }
}

/// Returns the tokens per second of decode steps with one sequence per client. All prompts have the mean length.
fn steps(args: &super::Args, folder: &Path) -> Result<f64, Report> {
    let batch = args.closed.ok_or_else(|| {
        miette!("completions are compared with decode steps with one sequence for each client; give their number with --closed")
    })?;
    let mut builder = builder(folder, &args.inside).generating();
    if let Some(format) = args.inside.kv_dtype.format() {
        builder = builder.kv_cache(format);
    }
    let engine = builder.build()?;
    let lens = lens(args, &engine);
    let prompt =
        (lens.iter().map(|&n| u64::from(n)).sum::<u64>() / lens.len().max(1) as u64) as usize;
    let mut options: SamplingParams = generation_config_of(Folder::open(folder)?.files())?;
    options.rules.max_new_tokens = args.new as usize;
    options.max_length = None;
    let bytes = engine.cache_bytes_needed(&vec![prompt; batch], &options)?;
    let mut generator = engine.generator(bytes)?;
    let mut write = || generate::write(&mut generator, engine.limits(), (batch, prompt), &options);
    write()?;
    let (step_ms, _) = write()?.step_ms()?;
    Ok(batch as f64 / step_ms * 1e3)
}

/// Returns sequence lengths drawn from the requested distribution. Lengths above the model's max length are reduced to it.
fn lens(args: &super::Args, engine: &Engine) -> Vec<u32> {
    let load = Load {
        rate: 1.0,
        requests: 16_384,
        lengths: args.lens.clone(),
        steps: 1,
        deadlines: None,
        seed: args.seed,
    };
    let longest = engine.limits().longest.unwrap_or(u32::MAX);
    let all = load.arrivals();
    all.iter().map(|w| w.tokens.min(longest)).collect()
}

/// Runs consecutive batches of the size that has the highest throughput in `costs`, and returns the tokens per second.
fn offline(
    args: &super::Args,
    engine: &Engine,
    session: crate::Session,
    costs: &CostTable,
) -> Result<f64, Report> {
    let limits = engine.limits();
    let lens = lens(args, engine);
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
            let batch = Batch::from_packed(ids.collect(), &lens_of).into_diagnostic()?;
            batches.push(batch.with_required_ends(&limits));
            (lens_of, tokens) = (Vec::new(), 0);
        }
        if batches.len() >= 64 {
            break;
        }
    }
    if batches.is_empty() {
        return Err(miette!(
            "requests with the lengths {} do not fill a single batch",
            args.lens
        ));
    }
    let pipeline = Pipeline::new(session)?;
    for batch in batches.iter().take(2) {
        pipeline.submit(batch.clone())?.wait()?;
    }
    let began = Instant::now();
    let within = Duration::from_secs_f64(args.seconds.min(OFFLINE));
    let mut in_flight = std::collections::VecDeque::new();
    let mut done = 0;
    for batch in batches.iter().cycle() {
        in_flight.push_back((
            batch.lens().iter().map(|&n| u64::from(n)).sum::<u64>(),
            pipeline.submit(batch.clone())?,
        ));
        if in_flight.len() > 2
            && let Some((tokens, pending)) = in_flight.pop_front()
        {
            pending.wait()?;
            done += tokens;
        }
        if began.elapsed() >= within {
            break;
        }
    }
    for (tokens, pending) in in_flight {
        pending.wait()?;
        done += tokens;
    }
    Ok(done as f64 / began.elapsed().as_secs_f64())
}

impl Inside {
    pub fn name(&self) -> String {
        let model = &self.model;
        let cache = model.kv_format;
        let cache = cache.map_or_else(String::new, |format| format!(", KV cache in {format}"));
        format!("{} in this process, {}{cache}", model.name, model.device)
    }

    async fn asked(&self, number: u64, tokens: u32) -> Result<Answered, ServeError> {
        let submit = Submit {
            truncate: true,
            within: self.within,
            ..Submit::default()
        };
        match &self.model.kind {
            Kind::Service(service) => self.embedded(service, number, tokens, submit).await,
            Kind::Generation(service) => self.written(service, number, tokens, submit).await,
        }
    }

    async fn embedded(
        &self,
        service: &Service,
        number: u64,
        tokens: u32,
        submit: Submit,
    ) -> Result<Answered, ServeError> {
        let text = match self.inputs.get(number, tokens, 2) {
            Input::Ids(ids) => Text::Ids(ids),
            Input::Text(text) => Text::One(text),
        };
        let mut answered = Answered::default();
        for reply in service.submit(vec![text], submit)? {
            answered.tokens += reply.await?.tokens as u64;
        }
        Ok(answered)
    }

    async fn written(
        &self,
        service: &GenerationService,
        number: u64,
        tokens: u32,
        submit: Submit,
    ) -> Result<Answered, ServeError> {
        let prompt = match self.inputs.get(number, tokens, 0) {
            Input::Ids(ids) => ids,
            Input::Text(text) => service.prompts(&[&text])?.pop().unwrap_or_default(),
        };
        let writing = GenerationParams {
            max_tokens: Some(self.new),
            seed: Some(number),
            ..GenerationParams::default()
        };
        let mut answered = Answered::default();
        let mut pieces = service.submit(prompt, writing, submit)?;
        while let Some(piece) = pieces.next().await {
            match piece? {
                Piece::Text { .. } => _ = answered.first.get_or_insert_with(Instant::now),
                Piece::End { tokens, .. } => answered.tokens = tokens as u64,
            }
        }
        Ok(answered)
    }
}

impl Target for Inside {
    async fn ask(&self, number: u64, tokens: u32) -> Answered {
        match self.asked(number, tokens).await {
            Ok(answered) => Answered {
                status: 200,
                ..answered
            },
            Err(error) => Answered {
                // Use the status of the HTTP response to this error.
                status: match &error {
                    ServeError::Invalid { .. }
                    | ServeError::Input { .. }
                    | ServeError::ContextLength { .. } => 400,
                    ServeError::NoModel { .. } | ServeError::UnsupportedTask { .. } => 404,
                    ServeError::TooLong { .. }
                    | ServeError::TooLarge { .. }
                    | ServeError::LargeRequest { .. } => 413,
                    ServeError::Overloaded { .. }
                    | ServeError::Hopeless { .. }
                    | ServeError::ShortDeadline { .. } => 429,
                    ServeError::NotReady { .. } => 503,
                    ServeError::Deadline => 504,
                    ServeError::Internal(_) | ServeError::Engine(_) => 500,
                },
                problem: Some(error.to_string()),
                ..Answered::default()
            },
        }
    }
}
