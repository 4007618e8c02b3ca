//! Writing on from prompts: one thread steps the generator, and requests join and leave between steps.

mod line;
mod running;
mod texts;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Sender, channel},
    },
    task::{Context, Poll},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use self::{running::Running, texts::Texts};
use super::{
    Metrics, Seat, ServeError, Share, Submit,
    backlog::{Tenants, Work},
    service::LOST,
};
use crate::{
    Engine, EngineError,
    engine::{
        Admission, ChatOptions, ChatTemplate, Generate, Message, Request, TextEncoder,
        generation_config,
    },
    search::Sampling,
};

/// Maximum number of texts that wait; a tenant with less than its share of them may exceed it.
const MAX_WAITING: u64 = 1024;

/// Tokens of a prompt that are counted, also where the model has fewer positions.
const COUNTED: usize = 1 << 17;

/// What is asked of a writer.
#[derive(Clone, Debug, Default)]
pub struct Writing {
    /// Maximum number of new tokens. Without one, the model's folder limits them, if it does, and else the model's positions and the
    /// KV cache.
    pub max_tokens: Option<usize>,
    /// Draws tokens by this temperature; 0 takes the most probable one. Where it is not given, as the model's folder asks.
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub seed: Option<u64>,
    /// As [`Rules`](crate::search::Rules) have them.
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    pub bias: Vec<(u32, f32)>,
    /// Texts before which the writing ends.
    pub stop: Vec<String>,
    /// Whether the text goes on from the prompt, as an answer in a conversation does not.
    pub goes_on: bool,
    /// Lets each token come with its log-probability and those of so many of the most probable ones.
    pub log_probabilities: Option<usize>,
}

/// A token of a text with its log-probability, before rules and sampling.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// The bytes that it adds to the text; they may be a part of a character only.
    pub bytes: Vec<u8>,
    pub log_probability: f32,
    /// The most probable tokens in its place, the most probable first.
    pub most_probable: Vec<(Vec<u8>, f32)>,
    /// Where it begins in the whole text, in bytes, and in characters.
    pub start: usize,
    pub offset: usize,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// By a token that ends sequences, or before a stop.
    Stop,
    /// As it has as many tokens as were asked for.
    Length,
}

/// What comes of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// The next part of the text, with the tokens that begin in it where they were asked for; parts are never taken back.
    Text { text: String, tokens: Vec<Scored> },
    /// The last piece, with the tokens of the prompt and of the text.
    End {
        ending: Ending,
        prompt_tokens: usize,
        tokens: usize,
    },
}

impl Piece {
    /// Bytes that it takes until it is read.
    fn memory(&self) -> u64 {
        let scored = |(bytes, _): &(Vec<u8>, f32)| bytes.len() + 64;
        let token = |token: &Scored| {
            let most = token.most_probable.iter().map(scored);
            token.bytes.len() + 128 + most.sum::<usize>()
        };
        match self {
            Self::Text { text, tokens } => {
                let tokens: usize = tokens.iter().map(token).sum();
                (text.len() + 128 + tokens) as u64
            }
            Self::End { .. } => 0,
        }
    }
}

/// The pieces of a text as they come. Dropping it ends the writing.
pub struct Pieces {
    pieces: UnboundedReceiver<Result<Piece, ServeError>>,
    ending: Arc<EarlyEnd>,
    /// The memory that is charged for pieces until they are read.
    share: Arc<Share>,
}

/// Why a text ends before the generator ends it.
#[derive(Default)]
struct EarlyEnd {
    /// Nobody reads on.
    is_abandoned: AtomicBool,
    /// It is complete, as a stop was found, or it failed. Set before the last piece is sent, so before its reader leaves.
    is_complete: AtomicBool,
}

impl EarlyEnd {
    fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Ordering::Acquire)
    }

    fn is_complete(&self) -> bool {
        self.is_complete.load(Ordering::Acquire)
    }

    fn complete(&self) {
        self.is_complete.store(true, Ordering::Release);
    }
}

impl Pieces {
    /// The next piece; `None` after the last one, or an error.
    pub async fn next(&mut self) -> Option<Result<Piece, ServeError>> {
        let piece = self.pieces.recv().await;
        self.note_read(piece.as_ref());
        piece
    }

    fn note_read(&self, piece: Option<&Result<Piece, ServeError>>) {
        if let Some(Ok(piece)) = piece {
            self.share.free(piece.memory());
        }
    }

    /// As [`next`](Self::next), for bodies of responses.
    pub fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Piece, ServeError>>> {
        let polled = self.pieces.poll_recv(context);
        if let Poll::Ready(piece) = &polled {
            self.note_read(piece.as_ref());
        }
        polled
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        self.ending.is_abandoned.store(true, Ordering::Release);
    }
}

/// One model that writes.
pub struct Writer {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    encoder: Arc<TextEncoder>,
    /// The chat template, or why there is none.
    template: Result<ChatTemplate, String>,
    usual: Generate,
    admission: Admission,
    /// Texts are refused when those that wait would take longer than this.
    queue: Duration,
    shared: Arc<Shared>,
}

/// What a writer and its thread tell each other.
struct Shared {
    metrics: Arc<Metrics>,
    is_lost: AtomicBool,
    /// What a token that waits takes of the thread's time, in nanoseconds; 0 while all have room.
    token_nanos: AtomicU64,
    /// Tokens of texts that wait, of which the sum is a metric, and the number of these texts.
    waiting: Mutex<Tenants>,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Tenants> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waits(&self, job: &Job) {
        Metrics::count(&self.metrics.queue_requests, 1);
        let mut waiting = self.waiting();
        waiting.change(job.tenant, |work| {
            work.requests += 1;
            work.tokens.add(job.class, job.tokens());
        });
        Metrics::set(&self.metrics.queue_tokens, waiting.all().tokens.before(0));
    }

    fn waits_no_more(&self, job: &Job) {
        let requests = &self.metrics.queue_requests;
        requests.fetch_sub(1, Ordering::Relaxed);
        let mut waiting = self.waiting();
        waiting.change(job.tenant, |work| {
            work.requests -= 1;
            work.tokens.take(job.class, job.tokens());
        });
        Metrics::set(&self.metrics.queue_tokens, waiting.all().tokens.before(0));
    }
}

struct Job {
    request: Request,
    class: u8,
    tenant: u32,
    /// Until when it is of use.
    until: Option<Instant>,
    came: Instant,
    stop: Vec<String>,
    goes_on: bool,
    pieces: UnboundedSender<Result<Piece, ServeError>>,
    ending: Arc<EarlyEnd>,
    /// The memory of its request.
    share: Arc<Share>,
}

impl Job {
    /// Passes on a piece, which its request is charged for until it is read.
    fn send(&self, piece: Piece) -> Result<(), ServeError> {
        self.share.add(piece.memory())?;
        // A client that has gone needs none.
        let _ = self.pieces.send(Ok(piece));
        Ok(())
    }

    /// Maximum number of new tokens.
    fn tokens(&self) -> u64 {
        self.request.options.rules.max_new_tokens as u64
    }

    fn is_late(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until <= now)
    }
}

impl Writer {
    /// Starts a model that was built for writing, with `cache_bytes` for the keys and values of what runs at once, the time that
    /// texts may wait, and its place among the models of its device, if there are others.
    ///
    /// # Errors
    /// Settings of the folder that cannot be, memory that cannot be had, and a thread that the system does not give.
    pub fn start(
        engine: &Engine,
        encoder: TextEncoder,
        cache_bytes: Option<u64>,
        queue: Duration,
        seat: Option<Seat>,
    ) -> Result<Self, EngineError> {
        let folder = encoder.folder().trunk().to_owned();
        let usual = generation_config(&folder)?;
        let bytes = match cache_bytes {
            Some(bytes) => bytes,
            None => engine.usual_cache_bytes(&usual)?,
        };
        let generator = engine.generator(bytes)?;
        let checked = generator.check_options(&usual);
        checked.map_err(|problem| EngineError::GenerationConfig {
            file: folder.join("generation_config.json"),
            problem: problem.to_string(),
        })?;
        let admission = generator.admission();
        if generator.cache_bytes().1 == 0 {
            let block = engine.program().block_bytes();
            return Err(EngineError::NoBlock { bytes, block });
        }
        // A model without a template writes on from prompts alone.
        let template = ChatTemplate::open(&folder).map_err(|e| match e {
            // Clients are not told of paths.
            EngineError::ChatTemplate { problem, .. } => problem,
            other => other.to_string(),
        });
        let (jobs, come) = channel();
        let encoder = Arc::new(encoder);
        let metrics = Arc::new(Metrics::of([engine]));
        let texts = Texts::start(&encoder, &metrics)?;
        let shared = Arc::new(Shared {
            metrics,
            is_lost: AtomicBool::new(false),
            token_nanos: AtomicU64::new(0),
            waiting: Mutex::default(),
        });
        let writing = Running::new(generator, texts, Arc::clone(&shared), seat);
        let thread = std::thread::Builder::new().name("write".to_owned());
        let thread = thread.spawn(move || writing.run(&come));
        let thread = thread.map_err(|e| EngineError::Threads {
            problem: e.to_string(),
        })?;
        Ok(Self {
            jobs: Some(jobs),
            thread: Some(thread),
            encoder,
            template,
            usual,
            admission,
            queue,
            shared,
        })
    }

    /// Whether the folder has a template for conversations.
    pub fn has_template(&self) -> bool {
        self.template.is_ok()
    }

    /// Whether its device computes nothing any more.
    pub fn is_lost(&self) -> bool {
        self.shared.is_lost.load(Ordering::Acquire)
    }

    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    pub fn encoder(&self) -> &TextEncoder {
        &self.encoder
    }

    /// The temperature of texts that are drawn without one, where the folder does not have texts drawn by itself; `None` where it does.
    pub fn default_temperature(&self) -> Option<f32> {
        let is_greedy = self.usual.sampling.is_none();
        let own = self.usual.usual_sampling.temperature;
        is_greedy.then_some(if own > 0.0 { own } else { 1.0 })
    }

    /// Token ids of prompts.
    ///
    /// # Errors
    /// A prompt that the tokenizer refuses.
    pub fn prompts(&self, prompts: &[&str]) -> Result<Vec<Vec<u32>>, ServeError> {
        let each = prompts.iter();
        each.map(|prompt| self.tokens_within(prompt, true, "prompt"))
            .collect()
    }

    /// Token ids of a text, of which no more is tokenized than shows that it is too long.
    fn tokens_within(
        &self,
        text: &str,
        adds_special: bool,
        param: &'static str,
    ) -> Result<Vec<u32>, ServeError> {
        // A source is refused by its number of tokens, as it has positions of its own. Shorter prompts are, too.
        let room = match self.admission.has_source() {
            true => usize::MAX,
            false => self.admission.room(0, &self.usual),
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

    /// Token ids of a conversation, as the model's template writes it down.
    ///
    /// # Errors
    /// A model without a template, tools that the template does not write down, and a conversation that it refuses.
    pub fn conversation(
        &self,
        messages: &[Message],
        options: &ChatOptions,
    ) -> Result<Vec<u32>, ServeError> {
        let template = self.template.as_ref().map_err(|problem| {
            ServeError::invalid(
                "model",
                format!(
                    "the model has no chat template that can be used: {problem}; ask /v1/completions"
                ),
            )
        })?;
        let has_tools = options
            .tools
            .as_ref()
            .is_some_and(|tools| !tools.is_empty());
        if has_tools && !template.takes_tools() {
            return Err(ServeError::invalid(
                "tools",
                "the model's chat template has no place for tools, as it was not taught to call them; leave `tools` out, or ask another model",
            ));
        }
        let wrong = |e: EngineError| {
            let param = match &e {
                EngineError::Conversation { param, .. } => param,
                _ => "messages",
            };
            ServeError::invalid(param, e.to_string())
        };
        let prompt = template.render_with(messages, options).map_err(wrong)?;
        self.tokens_within(&prompt, false, "messages")
    }

    /// Whether the texts of another request may wait, which are let in together.
    ///
    /// # Errors
    /// More texts than ever wait, texts that wait for longer than they may, where its tenant has its share of them, and a device that
    /// is lost.
    pub fn has_place(&self, texts: u64, submit: Submit) -> Result<(), ServeError> {
        if self.is_lost() {
            return Err(ServeError::NotReady { why: LOST });
        }
        if texts > MAX_WAITING {
            let problem = format!(
                "the request asks for {texts} texts, of its prompts and `n` together; expected at most {MAX_WAITING}, so send several requests"
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

    /// Writes on from token ids. Of those that wait the highest class is next, of a class tenants by turns.
    ///
    /// # Errors
    /// A prompt that is empty or too long, settings that cannot be, and too many texts that wait.
    pub fn go_on(
        &self,
        prompt: Vec<u32>,
        writing: Writing,
        submit: Submit,
    ) -> Result<Pieces, ServeError> {
        self.go_on_within(prompt, writing, submit, &Share::unlimited())
    }

    /// As [`go_on`](Self::go_on), within the memory of a request, which is charged for pieces that are not read yet.
    ///
    /// # Errors
    /// As `go_on`.
    pub fn go_on_within(
        &self,
        prompt: Vec<u32>,
        writing: Writing,
        submit: Submit,
        share: &Arc<Share>,
    ) -> Result<Pieces, ServeError> {
        let mut options = self.usual.clone();
        let Writing {
            max_tokens,
            temperature,
            top_p,
            seed,
            frequency_penalty,
            presence_penalty,
            bias,
            stop,
            goes_on,
            log_probabilities,
        } = writing;
        if stop.iter().any(String::is_empty) {
            return Err(ServeError::invalid(
                "stop",
                "an empty stop ends every text at once",
            ));
        }
        let rules = &mut options.rules;
        (rules.frequency_penalty, rules.presence_penalty) = (frequency_penalty, presence_penalty);
        rules.bias = bias;
        if let Some(n) = max_tokens {
            (rules.max_new_tokens, options.max_length) = (n, None);
        }
        if temperature == Some(0.0) {
            options.sampling = None;
        } else if temperature.is_some() || top_p.is_some() {
            let usual = options.sampling.unwrap_or(Sampling {
                top_k: 0,
                ..options.usual_sampling
            });
            options.beams = None;
            options.sampling = Some(Sampling {
                temperature: temperature.unwrap_or(usual.temperature),
                top_p: top_p.unwrap_or(usual.top_p),
                ..usual
            });
        }
        if let Some(n) = log_probabilities {
            if options.beams.is_some() {
                return Err(ServeError::invalid(
                    "logprobs",
                    "the model searches beams, whose tokens have no log-probabilities; leave `logprobs` out, or send a `temperature`",
                ));
            }
            (options.log_probabilities, options.most_probable) = (true, n);
        }
        options.seed = seed.unwrap_or_default();
        if max_tokens.is_none() {
            // A limit of the folder is no reason to refuse a long prompt.
            let room = self.admission.room(prompt.len(), &options);
            let rules = &mut options.rules;
            rules.max_new_tokens = rules.max_new_tokens.min(room).max(1);
        }
        let mut request = Request { prompt, options };
        // Refused requests do not count as waiting ones.
        let checked = self.admission.check(&request).map_err(ServeError::from);
        checked.map_err(|error| match goes_on {
            true => error,
            false => error.of_messages(),
        })?;
        // The tokens that wait are counted by this number.
        request.options.rules.max_new_tokens = self.admission.new_tokens(&request);
        request.options.max_length = None;
        let (sender, pieces) = unbounded_channel();
        let (ending, now) = (Arc::new(EarlyEnd::default()), Instant::now());
        let job = Job {
            request,
            class: submit.class,
            tenant: submit.tenant,
            until: submit.within.and_then(|w| now.checked_add(w)),
            came: now,
            stop,
            goes_on: goes_on && !self.admission.has_source(),
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
        self.shared.waits(&job);
        if let Err(unsent) = jobs.send(job) {
            self.shared.waits_no_more(&unsent.0);
            return Err(ServeError::NotReady { why });
        }
        Ok(Pieces {
            pieces,
            ending,
            share: Arc::clone(share),
        })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
