//! Text generation: one thread runs the steps of the generator. Texts start and end between steps.

mod detokenizer;
mod params;
mod queue;
mod step_loop;
mod stream;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use self::{detokenizer::DetokenizerPool, step_loop::GenerationLoop, stream::EarlyEnd};
pub use self::{
    params::{GenerationParams, TextSource},
    stream::{Ending, Piece, Scored, TokenStream},
};
use super::{
    Metrics, ModelHandle, ServeError, Share, Submit,
    backlog::{Tenants, Work},
    service::LOST,
};
use crate::{
    Engine, EngineError,
    generate::{Admission, GenerateError, Request, SamplingParams, generation_config_of},
    schedule::Scheduler,
    text::{ChatOptions, ChatTemplate, Message, TextEncoder, TextError},
};

/// Max number of waiting texts of all tenants. Once it is reached, a tenant may still add texts until it has its equal share of this
/// number.
const MAX_WAITING: u64 = 1024;

/// A prompt that is too long for the model is still tokenized to its end if it has at most this many tokens. The error then states its
/// number of tokens.
const COUNTED: usize = 1 << 17;

/// A served model that generates text.
pub struct GenerationService {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    encoder: Arc<TextEncoder>,
    /// The chat template, or the reason why there is none.
    template: Result<ChatTemplate, String>,
    defaults: SamplingParams,
    admission: Admission,
    /// Max estimated time of the waiting texts. Beyond this time, requests are refused, except requests of tenants that have less than
    /// their share of the waiting texts.
    queue: Duration,
    shared: Arc<Shared>,
}

/// State shared by a service and its thread.
struct Shared {
    metrics: Arc<Metrics>,
    is_lost: AtomicBool,
    /// Estimated time that the generator takes per requested token of the waiting texts, in nanoseconds; 0 if no text is waiting.
    token_nanos: AtomicU64,
    /// Number of waiting texts and number of their requested tokens, by tenant.
    waiting: Mutex<Tenants>,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Tenants> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add_waiting(&self, job: &Job) {
        Metrics::count(&self.metrics.queue_requests, 1);
        let mut waiting = self.waiting();
        waiting.change(job.tenant, |work| {
            work.texts += 1;
            work.tokens.add(job.class, job.tokens());
        });
        Metrics::set(&self.metrics.queue_tokens, waiting.all().tokens.before(0));
    }

    fn remove_waiting(&self, job: &Job) {
        let requests = &self.metrics.queue_requests;
        requests.fetch_sub(1, Ordering::Relaxed);
        let mut waiting = self.waiting();
        waiting.change(job.tenant, |work| {
            work.texts -= 1;
            work.tokens.take(job.class, job.tokens());
        });
        Metrics::set(&self.metrics.queue_tokens, waiting.all().tokens.before(0));
    }
}

struct Job {
    request: Request,
    class: u8,
    tenant: u32,
    /// Deadline.
    until: Option<Instant>,
    arrived: Instant,
    stop: Vec<String>,
    goes_on: bool,
    /// Number of hypotheses to return when the text ends.
    hypotheses: usize,
    pieces: UnboundedSender<Result<Piece, ServeError>>,
    ending: Arc<EarlyEnd>,
    /// Memory that is charged to the request. It includes the pieces that have not been read yet.
    share: Arc<Share>,
}

impl Job {
    /// Sends a piece. The piece is charged to its request until it is read.
    fn send(&self, piece: Piece) -> Result<(), ServeError> {
        self.share.add(piece.memory())?;
        // The client may have left.
        let _ = self.pieces.send(Ok(piece));
        Ok(())
    }

    /// Max number of new tokens.
    fn tokens(&self) -> u64 {
        self.request.options.rules.max_new_tokens as u64
    }

    fn is_late(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until <= now)
    }
}

impl GenerationService {
    /// Starts a model that was built for generation. `cache_bytes` is the size of the KV cache, and `queue` the max estimated time of the
    /// waiting texts. `scheduler` decides the order in which texts start. `seat` is this model's handle of the device's fair lock, if other
    /// models also use the device.
    ///
    /// # Errors
    /// Returns an error if the folder's generation settings are not valid, if the KV cache does not fit in memory, or if the system cannot
    /// start a thread.
    pub fn start(
        engine: &Engine,
        encoder: TextEncoder,
        cache_bytes: Option<u64>,
        queue: Duration,
        scheduler: Box<dyn Scheduler>,
        seat: Option<ModelHandle>,
    ) -> Result<Self, EngineError> {
        let files = encoder.folder().files();
        let defaults = generation_config_of(files)?;
        let bytes = match cache_bytes {
            Some(bytes) => bytes,
            None => engine.default_cache_bytes(&defaults)?,
        };
        let generator = engine.generator(bytes)?;
        let checked = generator.check_options(&defaults);
        checked.map_err(|problem| GenerateError::GenerationConfig {
            file: files.name("generation_config.json"),
            problem: problem.to_string(),
        })?;
        let admission = generator.admission();
        if generator.cache_bytes().1 == 0 {
            let block = engine.program().block_bytes();
            return Err(GenerateError::NoBlock { bytes, block }.into());
        }
        // A model without a chat template can only complete prompts.
        let template = ChatTemplate::of(files).map_err(|e| match e {
            // The other fields of this error contain paths, which clients must not see.
            TextError::ChatTemplate { problem, .. } => problem,
            other => other.to_string(),
        });
        let (jobs, come) = channel();
        let encoder = Arc::new(encoder);
        let metrics = Arc::new(Metrics::of([engine]));
        let texts = DetokenizerPool::start(&encoder, &metrics)?;
        let shared = Arc::new(Shared {
            metrics,
            is_lost: AtomicBool::new(false),
            token_nanos: AtomicU64::new(0),
            waiting: Mutex::default(),
        });
        let steps = GenerationLoop::new(generator, texts, Arc::clone(&shared), scheduler, seat);
        let thread = std::thread::Builder::new().name("generate".to_owned());
        let thread = thread.spawn(move || steps.run(&come));
        let thread = thread.map_err(|e| EngineError::Threads {
            problem: e.to_string(),
        })?;
        Ok(Self {
            jobs: Some(jobs),
            thread: Some(thread),
            encoder,
            template,
            defaults,
            admission,
            queue,
            shared,
        })
    }

    /// Returns whether the model generates from a source text, as translation models do.
    pub fn has_source(&self) -> bool {
        self.admission.has_source()
    }

    /// Returns the max number of new tokens after a prompt of `prompt` tokens, with the settings of the folder.
    pub(super) fn room(&self, prompt: usize) -> usize {
        self.admission.room(prompt, &self.defaults)
    }

    /// Returns the generation settings of the folder.
    pub(super) fn defaults(&self) -> &SamplingParams {
        &self.defaults
    }

    /// Returns whether the folder has a chat template.
    pub fn has_template(&self) -> bool {
        self.template.is_ok()
    }

    /// Returns whether the device is lost, which means that it can run no more batches.
    pub fn is_lost(&self) -> bool {
        self.shared.is_lost.load(Ordering::Acquire)
    }

    /// Returns the max number of tokens of a prompt that leaves room for one new token in the model's positions and the KV cache. Returns
    /// `None` for a model that generates from a source text, because the source has its own positions.
    pub fn max_prompt_tokens(&self) -> Option<usize> {
        let room = self.admission.room(0, &self.defaults);
        (!self.admission.has_source()).then(|| room.saturating_sub(1))
    }

    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    pub fn encoder(&self) -> &TextEncoder {
        &self.encoder
    }

    /// Returns the temperature for a request that needs sampling but sets no temperature. Returns `None` if the folder selects sampling,
    /// because the folder's temperature then applies.
    pub fn default_temperature(&self) -> Option<f32> {
        let is_greedy = self.defaults.sampling.is_none();
        let own = self.defaults.default_sampling.temperature;
        is_greedy.then_some(if own > 0.0 { own } else { 1.0 })
    }

    /// Tokenizes prompts.
    ///
    /// # Errors
    /// Returns an error if the tokenizer refuses a prompt, or if a prompt has too many tokens.
    pub fn prompts(&self, prompts: &[&str]) -> Result<Vec<Vec<u32>>, ServeError> {
        let each = prompts.iter();
        each.map(|prompt| self.tokens_within(prompt, true, "prompt"))
            .collect()
    }

    /// Tokenizes a text. Stops with an error if the text has more than [`COUNTED`] tokens and more tokens than the max prompt of the model.
    fn tokens_within(
        &self,
        text: &str,
        adds_special: bool,
        param: &'static str,
    ) -> Result<Vec<u32>, ServeError> {
        // The source of an encoder-decoder model does not take up positions of the generated text. Its length is checked later.
        let room = match self.admission.has_source() {
            true => usize::MAX,
            false => self.admission.room(0, &self.defaults),
        };
        let max = room.max(COUNTED);
        let ids = self.encoder.prompt_within(text, adds_special, max);
        let ids = ids.map_err(|e| ServeError::invalid(param, e.to_string()))?;
        ids.ok_or_else(|| {
            let problem = format!(
                "the prompt has more than {max} tokens, and the model's positions and KV cache have room for {room}; shorten it"
            );
            ServeError::ContextLength { param, problem }
        })
    }

    /// Renders a conversation with the chat template, and tokenizes it.
    ///
    /// # Errors
    /// Returns an error if the model has no template, if the template ignores tools that are given or refuses the conversation, or if the
    /// rendered prompt has too many tokens or is refused by the tokenizer.
    pub fn conversation(
        &self,
        messages: &[Message],
        options: &ChatOptions,
    ) -> Result<Vec<u32>, ServeError> {
        let template = self.template.as_ref().map_err(|problem| {
            ServeError::invalid(
                "model",
                format!("the model has no usable chat template: {problem}; use /v1/completions"),
            )
        })?;
        let has_tools = options
            .tools
            .as_ref()
            .is_some_and(|tools| !tools.is_empty());
        if has_tools && !template.takes_tools() {
            return Err(ServeError::invalid(
                "tools",
                "the model's chat template does not support tools; leave `tools` out, or use another model",
            ));
        }
        let wrong = |e: TextError| {
            let param = match &e {
                TextError::Conversation { param, .. } => param,
                _ => "messages",
            };
            ServeError::invalid(param, e.to_string())
        };
        let prompt = template.render_with(messages, options).map_err(wrong)?;
        self.tokens_within(&prompt, false, "messages")
    }

    /// Checks whether the queue has room for the `texts` texts of one request.
    ///
    /// # Errors
    /// Returns an error if there are too many texts, if the waiting texts take too long and the tenant already has its share of them, or if
    /// the device is lost.
    pub fn has_place(&self, texts: u64, submit: Submit) -> Result<(), ServeError> {
        if self.is_lost() {
            return Err(ServeError::NotReady { why: LOST });
        }
        if texts > MAX_WAITING {
            let problem = format!(
                "the request is for {texts} texts (prompts times `n`); expected at most {MAX_WAITING}, so send several requests"
            );
            return Err(ServeError::invalid("prompt", problem));
        }
        let Submit { tenant, class, .. } = submit;
        let nanos = self.shared.token_nanos.load(Ordering::Relaxed);
        let time = |work: &Work| {
            let tokens = work.tokens.before(class);
            Duration::from_nanos(nanos.saturating_mul(tokens))
        };
        let waiting = self.shared.waiting();
        let has_place = waiting.has_place(tenant, texts, MAX_WAITING);
        let admitted = waiting.admit(tenant, self.queue, time);
        drop(waiting);
        match admitted {
            Err(ahead) => Err(self.overloaded(ahead.saturating_sub(self.queue / 2))),
            Ok(()) if !has_place => Err(self.overloaded(Duration::from_secs(1))),
            Ok(()) => Ok(()),
        }
    }

    fn overloaded(&self, retry_after: Duration) -> ServeError {
        Metrics::count(&self.metrics().overloaded, 1);
        ServeError::Overloaded { retry_after }
    }

    /// Generates text from token ids. The model's scheduler decides when a waiting text starts.
    ///
    /// # Errors
    /// Returns an error if the prompt is empty or too long, if the sampling parameters are not valid, if too many texts are waiting, or if
    /// the service is shutting down.
    pub fn submit(
        &self,
        prompt: Vec<u32>,
        writing: GenerationParams,
        submit: Submit,
    ) -> Result<TokenStream, ServeError> {
        self.submit_within(prompt, writing, submit, &Share::unlimited())
    }

    /// Like [`submit`](Self::submit), but charges the memory of each piece to `share` until the piece is read.
    ///
    /// # Errors
    /// Returns the errors of `submit`.
    pub fn submit_within(
        &self,
        prompt: Vec<u32>,
        writing: GenerationParams,
        submit: Submit,
        share: &Arc<Share>,
    ) -> Result<TokenStream, ServeError> {
        let (stop, source) = (writing.stop.clone(), writing.source);
        let has_max_tokens = writing.max_tokens.is_some();
        let hypotheses = writing.hypotheses;
        let mut options = writing.options(&self.defaults)?;
        if !has_max_tokens {
            // Lower the default max number of new tokens to what fits in the remaining positions and in the KV cache. Otherwise, a long
            // prompt would be refused because of a limit that the request does not set.
            let room = self.admission.room(prompt.len(), &options);
            let rules = &mut options.rules;
            rules.max_new_tokens = rules.max_new_tokens.min(room).max(1);
        }
        let mut request = Request { prompt, options };
        // Check before queueing, so that refused requests do not count as waiting.
        let checked = self.admission.check(&request).map_err(ServeError::from);
        checked.map_err(|error| error.of_source(source.field()))?;
        // Set the actual max number of new tokens, because the estimated time of the queue depends on it.
        request.options.rules.max_new_tokens = self.admission.new_tokens(&request);
        request.options.max_length = None;
        let (sender, pieces) = unbounded_channel();
        let (ending, now) = (Arc::new(EarlyEnd::default()), Instant::now());
        let job = Job {
            request,
            class: submit.class,
            tenant: submit.tenant,
            until: submit.within.and_then(|w| now.checked_add(w)),
            arrived: now,
            stop,
            goes_on: source == TextSource::Prompt && !self.admission.has_source(),
            hypotheses,
            pieces: sender,
            ending: Arc::clone(&ending),
            share: Arc::clone(share),
        };
        let why = "it is shutting down";
        let jobs = self.jobs.as_ref().ok_or(ServeError::NotReady { why })?;
        let waiting = self.shared.waiting();
        let has_place = waiting.has_place(submit.tenant, 1, MAX_WAITING);
        drop(waiting);
        if !has_place {
            return Err(self.overloaded(Duration::from_secs(1)));
        }
        self.shared.add_waiting(&job);
        if let Err(unsent) = jobs.send(job) {
            self.shared.remove_waiting(&unsent.0);
            return Err(ServeError::NotReady { why });
        }
        Ok(TokenStream {
            pieces,
            ending,
            share: Arc::clone(share),
        })
    }
}

impl Drop for GenerationService {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
