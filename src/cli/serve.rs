//! `gemmule serve`: an HTTP server for models.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    num::{NonZeroU32, NonZeroUsize},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use miette::{IntoDiagnostic, Report, miette};

use super::{Outcome, allow_connections, location, say, simulate::Chosen, write_file};
use crate::{
    DType, DeviceChoice, EngineError,
    engine::{KvCacheChoice, hub::Files},
    files::{self, Kind},
    http::{Ended, HttpChoice, Keys, Origin, Public, Server},
    schedule::{CostTable, served},
    serve::{
        Cache, CacheChoice, DefaultPrompt, Devices, Model, ModelChoice, ModelConfig, Models,
        Recorder, ServeConfig, check_name,
    },
};

#[derive(clap::Args)]
pub(super) struct Args {
    /// A model on the Hugging Face hub, ORG/NAME or ORG/NAME@REVISION (with several GGUF files, ORG/NAME:Q8_0 or :FILE selects one), or a
    /// path as for --weights (repeat for several models)
    #[arg(long, value_name = "MODEL", required_unless_present_any = ["weights", "config"], add = super::manual::model_completer())]
    model: Vec<String>,
    /// A checkpoint folder or a GGUF file (repeat for several models)
    #[arg(long, value_name = "DIR")]
    weights: Vec<PathBuf>,
    /// A RON file that lists models with their devices, names and limits, such as `examples/serve.ron`
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "model", "weights", "name", "device", "dtype", "kv_dtype", "max_context", "invariant", "costs", "write_costs", "all_tokens",
        "sparse", "token_vectors", "fill_mask", "task", "default_prompt_name", "default_prompt",
    ])]
    config: Option<PathBuf>,
    /// Task of the texts. Selects the adapter that is applied to the weights (such as retrieval.query of jina-embeddings-v3), or the
    /// default route of a sentence-transformers Router
    #[arg(long, value_name = "TASK")]
    task: Option<String>,
    /// Name of a model in requests: one for each --model, then one for each --weights. By default, the name of the folder, or the name on
    /// the hub without ORG
    #[arg(long, value_name = "NAME", value_parser = name)]
    name: Vec<String>,
    /// IP address to listen on; 0.0.0.0 for all addresses of this machine
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = address)]
    host: IpAddr,
    /// Port to listen on; 0 for any free port
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Accept administrative commands on this port of 127.0.0.1. POST /admin/reload reloads keys and models, like SIGHUP
    #[arg(long, value_name = "PORT")]
    admin_port: Option<u16>,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// f32, f16 or bf16; by default f16 on CUDA and f32 on the CPU
    #[arg(long)]
    dtype: Option<DType>,
    /// Format of the KV cache of models that generate text: auto (the type of the activations) or fp8 (E4M3, which takes half the memory of
    /// f16)
    #[arg(long, value_name = "KIND", default_value_t)]
    kv_dtype: KvCacheChoice,
    /// Maximum number of tokens of a sequence. For models with LongRoPE (Phi-3 with 128k tokens), the default is the original number of
    /// positions; a larger N selects other rotary frequencies, for all sequences
    #[arg(long, value_name = "N")]
    max_context: Option<NonZeroU32>,
    /// Make the results of a sequence bitwise independent of the rest of the batch
    #[arg(long)]
    invariant: bool,
    /// Also return the vectors of all tokens, for /embed_all. Models without sentence-transformers modules always return them
    #[arg(long)]
    all_tokens: bool,
    /// Compute sparse weights of tokens for /embed_sparse, with embedding models that support this (BGE-M3). SPLADE models always do
    #[arg(long)]
    sparse: bool,
    /// Compute token vectors for /v1/multi-vector and for ranking, with embedding models that support this (BGE-M3). Late-interaction
    /// models always do
    #[arg(long)]
    token_vectors: bool,
    /// Serve a masked language model for /v1/fill-mask instead of embeddings
    #[arg(long)]
    fill_mask: bool,
    /// Put the prompt with this name, from the model's folder, before texts for which a request specifies no prompt
    #[arg(long, value_name = "NAME")]
    default_prompt_name: Option<String>,
    /// Put this text before texts for which a request specifies no prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "default_prompt_name")]
    default_prompt: Option<String>,
    /// Scheduler: `packed` fills batches and lets tenants take turns; `no-batch` runs one request at a time, in order of arrival.
    /// `gemmule simulate` compares them with schedulers from papers
    #[arg(long, value_name = "NAME", default_value = "packed")]
    scheduler: String,
    #[command(flatten)]
    settings: Chosen,
    /// File with the times of batches by size (costs), which the scheduler uses. By default, they are measured for three seconds. Only for
    /// a single model
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    /// Write the times of batches by size (costs) to this file, for --costs and `gemmule simulate`. Only for a single model
    #[arg(long, value_name = "FILE")]
    write_costs: Option<PathBuf>,
    /// Max bytes of the response cache in memory; 0 for no cache
    #[arg(long, alias = "cache-bytes", value_name = "BYTES", default_value_t = 0)]
    response_cache_bytes: u64,
    /// Also cache responses in this file, which survives a restart
    #[arg(long, value_name = "FILE")]
    cache_file: Option<PathBuf>,
    /// Max size of the cache file in bytes; the oldest responses are overwritten when it is full
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30, requires = "cache_file")]
    cache_file_bytes: u64,
    /// Share cached responses with other servers through a Redis server, such as redis://127.0.0.1:6379/0
    #[cfg(feature = "shared-cache")]
    #[arg(long, value_name = "URL")]
    cache_redis: Option<String>,
    /// Record requests and scheduling decisions in this file, for `gemmule simulate --trace`. Only for a single model
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Max size of the trace in bytes. Recording stops when it is reached
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30)]
    trace_bytes: u64,
    /// Max bytes of a batch's intermediate tensors
    #[arg(long, value_name = "BYTES", default_value_t = 8 << 30, value_parser = clap::value_parser!(u64).range(1..))]
    batch_bytes: u64,
    /// Bytes of the KV cache of each model that generates text. The default has room for eight texts of full length; on a GPU it is larger,
    /// up to half of the free memory
    #[arg(long, alias = "kv-bytes", value_name = "BYTES")]
    kv_cache_bytes: Option<u64>,
    /// Refuse requests if the queued work takes longer than this, in milliseconds. The estimate uses the recent pace of tokenizers or
    /// devices, whichever is slower; for text generation, it uses the pace of generated tokens
    #[arg(long, alias = "queue-ms", value_name = "MS", default_value_t = 2000)]
    max_queue_ms: u64,
    /// Default time limit of a request in milliseconds. For a stream, it limits the whole stream
    #[arg(long, value_name = "MS", default_value_t = 60_000, value_parser = clap::value_parser!(u64).range(1..))]
    timeout_ms: u64,
    /// Threads that tokenize a model's texts; by default one per core, at most 64
    #[arg(long, value_name = "N")]
    tokenizers: Option<NonZeroUsize>,
    /// File with API keys, which requests then need. Each line has a name, the SHA-256 of a key, and optionally `max-priority=N`, the max
    /// x-priority of requests with this key
    #[arg(long, value_name = "FILE")]
    api_keys: Option<PathBuf>,
    /// Routes that need no key: none; health (/health and /ready); or all (also /metrics, /openapi.json, / and /status.json)
    #[arg(long, value_name = "ROUTES", default_value = "all")]
    public: PublicArg,
    /// Origin whose web pages may use the server, such as `https://example.com`, or `*` for all origins (repeat for several)
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<Origin>,
    /// Truncate inputs that are too long, unless a request sets `truncate`. By default, they are errors
    #[arg(long)]
    auto_truncate: bool,
    /// Score /predict like text-embeddings-inference: with a sigmoid for one label, and a softmax for several. By default, `problem_type`
    /// of config.json decides, as in transformers
    #[arg(long)]
    tei_scores: bool,
    /// Max bytes of a request body, compressed or not
    #[arg(long, value_name = "BYTES", default_value = "8388608")]
    body_bytes: NonZeroUsize,
    /// Milliseconds after SIGTERM during which requests are still accepted, so that load balancers can notice that /ready fails
    #[arg(long, value_name = "MS", default_value_t = 5000)]
    drain_delay_ms: u64,
    /// Milliseconds after --drain-delay-ms for in-flight requests to finish. Requests without a response by then get 503
    #[arg(long, value_name = "MS", default_value_t = 25_000)]
    drain_limit_ms: u64,
}

/// Argument for [`Public`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum PublicArg {
    None,
    Health,
    All,
}

impl From<PublicArg> for Public {
    fn from(arg: PublicArg) -> Self {
        match arg {
            PublicArg::None => Self::None,
            PublicArg::Health => Self::Health,
            PublicArg::All => Self::All,
        }
    }
}

pub(super) fn run(args: Args) -> Outcome {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let keys = match &args.api_keys {
        Some(file) => Some(Keys::open(file).into_diagnostic()?),
        None if args.public != PublicArg::All => {
            return Err(miette!(
                "--public closes routes to requests without a key, but the server has no keys; give --api-keys, or leave --public out"
            ));
        }
        None => None,
    };
    allow_connections();
    // Bind first, so that a port in use is reported before models are loaded.
    let address = SocketAddr::new(args.host, args.port);
    let socket = TcpListener::bind(address)
        .map_err(|e| miette!("cannot listen on {address}: {e}; choose another --port"))?;
    let admin = match args.admin_port {
        Some(port) => {
            let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
            let socket = TcpListener::bind(address).map_err(|e| {
                miette!("cannot listen on {address}: {e}; choose another --admin-port")
            })?;
            Some(socket)
        }
        None => None,
    };
    let args = Arc::new(args);
    let (again, devices) = (Arc::clone(&args), Arc::new(Devices::default()));
    let cache = cache(&args)?;
    let trace = match &args.trace {
        Some(file) => Some(Recorder::create(file, args.trace_bytes)?),
        None => None,
    };
    let choice = HttpChoice {
        max_body: args.body_bytes.get(),
        timeout: Duration::from_millis(args.timeout_ms),
        keys,
        public: args.public.into(),
        cors: args.cors_origin.clone(),
        auto_truncate: args.auto_truncate,
        tei_scores: args.tei_scores,
        drain_delay: Duration::from_millis(args.drain_delay_ms),
        drain_limit: Duration::from_millis(args.drain_limit_ms),
        threads: (cores / 2).clamp(1, 8),
        ..HttpChoice::default()
    };
    let models = {
        let (devices, cache) = (Arc::clone(&devices), cache.clone());
        Models::loading(move |previous| {
            let models = open(&again, previous, &devices, cache.clone(), None);
            let models = models.map_err(|e| format!("{e:#}"))?;
            if again.trace.is_some() {
                say("the trace ends here; it covers only the models that were loaded first");
            }
            say("the models are reloaded");
            Ok(models)
        })
    };
    let server = Server::start_with_signals(socket, models, choice).into_diagnostic()?;
    let address = server.address();
    let admin = admin.map(|socket| server.listen_admin(socket));
    let admin = admin.transpose().into_diagnostic()?;
    let load = move |models: &Models| {
        let loaded = open(&args, &[], &devices, cache, trace)?;
        if args.trace.is_some() && loaded.iter().any(|model| model.costs.is_none()) {
            return Err(miette!(
                "a model that generates text has no schedule to record; leave --trace out"
            ));
        }
        if let Some(file) = &args.write_costs {
            let costs = loaded.first().and_then(|model| model.costs.as_ref());
            let costs = costs.ok_or_else(|| {
                miette!(
                    "a model that generates text has no table of costs; leave --write-costs out"
                )
            })?;
            write_file(file, costs.to_ron().into_diagnostic()?.as_bytes())?;
        }
        let example = loaded.first().map(example);
        models.begin(loaded);
        if let Some(address) = admin {
            say(&format!("commands on http://{address}/admin/reload"));
        }
        say(&format!("listening on http://{address}"));
        if let Some((route, body)) = example {
            say(&format!("try: curl http://{address}{route} -d '{body}'"));
        }
        Ok(())
    };
    match server.run(load).into_diagnostic()? {
        Ended::Asked => {
            say("shut down");
            Ok(ExitCode::SUCCESS)
        }
        Ended::NotLoaded(error) => Err(error),
        Ended::DeviceLost => Err(miette!(
            "a device was lost, and this process cannot use it any more; start the server again"
        )),
    }
}

fn address(text: &str) -> Result<IpAddr, &'static str> {
    let problem = "expected an IP address of this machine, such as 127.0.0.1 or ::1";
    text.parse().map_err(|_| problem)
}

fn name(text: &str) -> Result<String, &'static str> {
    check_name(text).map(|()| text.to_owned())
}

/// Loads the models that the arguments or the file `--config` list. Each call reads the folders and the file again. `previous` are the
/// models that are replaced, if any. Their costs are reused if config.json, devices and dtype are unchanged.
fn open(
    args: &Args,
    previous: &[Arc<Model>],
    devices: &Arc<Devices>,
    cache: Option<Arc<Cache>>,
    mut trace: Option<Recorder>,
) -> Result<Vec<Model>, Report> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let settings = args.settings.settings()?;
    let configs = configs(args)?;
    let is_alone = configs.len() == 1;
    let mut models: Vec<Model> = Vec::new();
    for config in configs {
        let began = Instant::now();
        let default_prompt = config.prompt();
        let (folder, own_name) = located(&config)?;
        let name = config.name.unwrap_or(own_name);
        if models.iter().any(|model| model.name == name) {
            return Err(miette!(
                "two models have the name `{name}`; give them different names with --name, or `name` in the file"
            ));
        }
        let costs = config.costs.as_deref().map(costs).transpose()?;
        let chosen = config.scheduler.as_deref().unwrap_or(&args.scheduler);
        let queue = config.max_queue_ms.unwrap_or(args.max_queue_ms);
        let tokenizers = config.tokenizers.or(args.tokenizers.map(NonZeroUsize::get));
        let mut open = |name: String, task: Option<String>, route_of: Option<String>| {
            let choice = ModelChoice {
                folder: folder.clone(),
                devices: config.devices.clone(),
                dtype: config.dtype,
                kv_dtype: config.kv_dtype.unwrap_or_default(),
                max_context: config.max_context,
                invariant: config.invariant,
                scheduler: served(chosen, &settings).into_diagnostic()?,
                costs: costs.clone().filter(|_| route_of.is_none()),
                batch_bytes: config.batch_bytes.unwrap_or(args.batch_bytes),
                cache_bytes: config.kv_cache_bytes.or(args.kv_cache_bytes),
                queue: Duration::from_millis(queue),
                tokenizers: tokenizers.unwrap_or(cores.clamp(1, 64)),
                all_tokens: config.all_tokens,
                sparse: config.sparse,
                token_vectors: config.token_vectors,
                fill_mask: config.fill_mask,
                default_prompt: match &route_of {
                    None => default_prompt.clone(),
                    Some(_) => DefaultPrompt::OfFolder,
                },
                task,
                route_of,
                share: (!is_alone).then(|| (Arc::clone(devices), config.share.unwrap_or(1.0))),
                trace: trace.take(),
                cache: cache.clone(),
                previous: previous.iter().find(|model| model.name == name).cloned(),
                name,
            };
            Ok::<_, Report>(Model::open(choice)?)
        };
        let model = open(name.clone(), config.task.clone(), None)?;
        say_ready(&model, began);
        let folder = model.encoder().folder();
        let tasks = folder.other_tasks().into_iter().map(str::to_owned);
        let tasks: Vec<String> = tasks.collect();
        models.push(model);
        for task in tasks {
            let began = Instant::now();
            // If a route cannot be loaded, report it and serve the default route alone.
            let own_name = format!("{name}:{task}");
            match open(own_name, Some(task.clone()), Some(name.clone())) {
                Ok(model) => {
                    say_ready(&model, began);
                    models.push(model);
                }
                Err(error) => say(&format!(
                    "{name}: texts of the task `{task}` are refused, since their route cannot be loaded: {error:#}"
                )),
            }
        }
    }
    Ok(models)
}

fn say_ready(model: &Model, began: Instant) {
    say(&format!(
        "{}: {}, {}{}, ready after {:.1} s",
        model.name,
        model.device,
        model.dtype,
        model
            .kv_format
            .map_or_else(String::new, |format| format!(", KV cache in {format}")),
        began.elapsed().as_secs_f64()
    ));
}

/// Returns the folder of a model, and the model's default name. If the model is on the hub, fetches it.
fn located(config: &ModelConfig) -> Result<(PathBuf, String), Report> {
    let Some(name) = &config.model else {
        let folder = location::checked(&config.weights)?.to_owned();
        let name = Model::name_of(&folder);
        return Ok((folder, name));
    };
    if let Some(path) = location::local(name) {
        return Ok((path.to_owned(), Model::name_of(path)));
    }
    let id = location::on_hub(name).ok_or_else(|| {
        miette!(
            "`{name}` is neither the name of a model on the hub nor the path of a folder or a GGUF file; expected org/name, org/name@revision, org/name:file or a path"
        )
    })?;
    let folder = location::fetch(&id, Files::All)?;
    Ok((folder, id.name().to_owned()))
}

fn costs(file: &Path) -> Result<CostTable, Report> {
    let text = files::text(file, Kind::Costs).map_err(EngineError::from)?;
    let table = CostTable::parse(&text);
    table.map_err(|e| miette!("`{}`: {e}", file.display()))
}

/// Opens the response cache, if one is configured.
fn cache(args: &Args) -> Result<Option<Arc<Cache>>, Report> {
    let choice = CacheChoice {
        memory_bytes: args.response_cache_bytes,
        file: args
            .cache_file
            .clone()
            .map(|file| (file, args.cache_file_bytes)),
        #[cfg(feature = "shared-cache")]
        shared: args.cache_redis.clone(),
    };
    #[cfg(feature = "shared-cache")]
    let is_shared = choice.shared.is_some();
    #[cfg(not(feature = "shared-cache"))]
    let is_shared = false;
    if choice.memory_bytes == 0 && choice.file.is_none() && !is_shared {
        return Ok(None);
    }
    Ok(Some(Arc::new(Cache::open(&choice)?)))
}

/// Returns the options of each model, from the file `--config` or from the arguments.
fn configs(args: &Args) -> Result<Vec<ModelConfig>, Report> {
    if let Some(file) = &args.config {
        let text = files::text(file, Kind::Config).map_err(EngineError::from)?;
        let config = ServeConfig::parse(&text);
        let mut config = config.map_err(|e| miette!("`{}`: {e}", file.display()))?;
        // Relative paths are relative to the folder of the file.
        let beside = file.parent().unwrap_or(Path::new(""));
        for model in &mut config.models {
            if model.model.is_none() {
                model.weights = beside.join(&model.weights);
            }
            model.costs = model.costs.take().map(|costs| beside.join(costs));
        }
        return Ok(config.models);
    }
    let n = args.model.len() + args.weights.len();
    if !args.name.is_empty() && args.name.len() != n {
        return Err(miette!(
            "there are {n} --model and --weights, and {} --name; give one name for each, or none",
            args.name.len()
        ));
    }
    if n > 1 && (args.costs.is_some() || args.write_costs.is_some() || args.trace.is_some()) {
        return Err(miette!(
            "a table of costs and a trace are of one model, but there are {n}; leave --costs, --write-costs and --trace out"
        ));
    }
    let on_hub = args.model.iter().map(|name| (Some(name), None));
    let folders = args.weights.iter().map(|folder| (None, Some(folder)));
    let configs = on_hub
        .chain(folders)
        .enumerate()
        .map(|(at, (model, folder))| ModelConfig {
            weights: folder.cloned().unwrap_or_default(),
            model: model.cloned(),
            name: args.name.get(at).cloned(),
            devices: vec![args.device],
            dtype: args.dtype,
            kv_dtype: Some(args.kv_dtype),
            max_context: args.max_context.map(NonZeroU32::get),
            invariant: args.invariant,
            costs: args.costs.clone(),
            all_tokens: args.all_tokens,
            sparse: args.sparse,
            token_vectors: args.token_vectors,
            fill_mask: args.fill_mask,
            task: args.task.clone(),
            default_prompt_name: args.default_prompt_name.clone(),
            default_prompt: args.default_prompt.clone(),
            ..ModelConfig::default()
        });
    Ok(configs.collect())
}

/// Returns the route and the body of an example request for a model.
fn example(model: &Model) -> (&'static str, String) {
    let name = serde_json::Value::from(model.name.as_str());
    match &model.kind {
        crate::serve::Kind::Service(service) if service.is_scoring() => (
            "/v1/rerank",
            format!(
                r#"{{"model": {name}, "query": "how tall is the tower?", "documents": ["It is 330 m high.", "It rains."]}}"#
            ),
        ),
        crate::serve::Kind::Service(service) if service.is_tagging() => (
            "/v1/token-classification",
            format!(r#"{{"model": {name}, "inputs": "Ada Lovelace lived in London."}}"#),
        ),
        crate::serve::Kind::Service(service) if service.is_answering() => (
            "/v1/question-answering",
            format!(
                r#"{{"model": {name}, "question": "Where did she live?", "context": "She lived in London."}}"#
            ),
        ),
        crate::serve::Kind::Service(service) if service.is_filling() => (
            "/v1/fill-mask",
            format!(r#"{{"model": {name}, "inputs": "London is a [MASK]."}}"#),
        ),
        crate::serve::Kind::Service(service)
            if service.has_token_vectors() && !service.is_embedding() =>
        {
            (
                "/v1/multi-vector",
                format!(
                    r#"{{"model": {name}, "input": ["a first sentence"], "input_type": "document"}}"#
                ),
            )
        }
        crate::serve::Kind::Service(_) => (
            "/v1/embeddings",
            format!(r#"{{"model": {name}, "input": ["a first sentence"]}}"#),
        ),
        crate::serve::Kind::Generation(service) if service.has_source() => (
            "/v1/translate",
            format!(r#"{{"model": {name}, "text": "It rained."}}"#),
        ),
        crate::serve::Kind::Generation(_) => (
            "/v1/completions",
            format!(r#"{{"model": {name}, "prompt": "One cold morning", "stream": true}}"#),
        ),
    }
}
