//! Writing on from prompts: one thread steps the generator, and requests join and leave between steps.

mod texts;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel},
    },
    task::{Context, Poll},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use self::texts::{News, Texts};
use super::{Metrics, Seat, ServeError};
use crate::{
    Engine, EngineError,
    engine::{
        AdmitError, ChatTemplate, Event, Generate, Generator, Message, Request, TextEncoder,
        Ticket, Tool, generation_config,
    },
    schedule::Micros,
    search::Sampling,
};

/// Texts that wait at most; who asks for one more is told to come again.
const MOST_WAITING: u64 = 1024;

/// What is asked of a writer.
#[derive(Clone, Debug, Default)]
pub struct Writing {
    /// New tokens at most; what is left of the model's positions where it is not given.
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
    /// Lets each token come with its log-probability and those of so many of the most probable ones.
    pub log_probabilities: Option<usize>,
}

/// A token of a text with its log-probability, before rules and sampling.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// Its text; U+FFFD where its bytes are no whole characters.
    pub text: String,
    pub log_probability: f32,
    /// The most probable tokens in its place, the most probable first.
    pub most_probable: Vec<(String, f32)>,
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

/// The pieces of a text as they come. Dropping it ends the writing.
pub struct Pieces {
    pieces: UnboundedReceiver<Result<Piece, ServeError>>,
    is_over: Arc<AtomicBool>,
}

impl Pieces {
    /// The next piece; `None` after the last one, or an error.
    pub async fn next(&mut self) -> Option<Result<Piece, ServeError>> {
        self.pieces.recv().await
    }

    /// As [`next`](Self::next), for bodies of responses.
    pub fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Piece, ServeError>>> {
        self.pieces.poll_recv(context)
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
    }
}

/// One model that writes.
pub struct Writer {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    encoder: Arc<TextEncoder>,
    template: Option<ChatTemplate>,
    usual: Generate,
    positions: Option<u32>,
    has_source: bool,
    metrics: Arc<Metrics>,
}

struct Job {
    request: Request,
    stop: Vec<String>,
    pieces: UnboundedSender<Result<Piece, ServeError>>,
    is_over: Arc<AtomicBool>,
}

/// A request that runs.
struct Row {
    /// The thread that makes its text.
    thread: usize,
    /// Nobody reads on, or a stop was found.
    is_over: Arc<AtomicBool>,
}

impl Writer {
    /// Starts a model that was built for writing, with `cache_bytes` for the keys and values of what runs at once, and its place
    /// among the models of its device, if there are others.
    ///
    /// # Errors
    /// Settings of the folder that cannot be, memory that cannot be had, and a thread that the system does not give.
    pub fn start(
        engine: &Engine,
        encoder: TextEncoder,
        cache_bytes: Option<u64>,
        seat: Option<Seat>,
    ) -> Result<Self, EngineError> {
        let folder = encoder.folder().trunk().to_owned();
        let usual = generation_config(&folder)?;
        let positions = engine.limits().longest;
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
        // A model without a template writes on from prompts alone.
        let template = ChatTemplate::open(&folder).ok();
        let (jobs, queue) = channel();
        let encoder = Arc::new(encoder);
        let metrics = Arc::new(Metrics::default());
        let writing = Running {
            generator,
            texts: Texts::start(&encoder, &metrics)?,
            metrics: Arc::clone(&metrics),
            rows: HashMap::new(),
            waiting: None,
            seat,
            step: Micros(1_000),
        };
        let thread = std::thread::Builder::new().name("write".to_owned());
        let thread = thread.spawn(move || writing.run(&queue));
        let thread = thread.map_err(|e| EngineError::Threads {
            problem: e.to_string(),
        })?;
        Ok(Self {
            jobs: Some(jobs),
            thread: Some(thread),
            encoder,
            template,
            usual,
            positions,
            has_source: engine.has_source(),
            metrics,
        })
    }

    /// Whether the folder has a template for conversations.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    pub fn encoder(&self) -> &TextEncoder {
        &self.encoder
    }

    /// Writes on from a prompt.
    ///
    /// # Errors
    /// A prompt that is empty or too long, settings that cannot be, and too many texts that wait.
    pub fn write(&self, prompt: &str, writing: Writing) -> Result<Pieces, ServeError> {
        let ids = self.encoder.prompts(&[prompt]);
        let ids = ids.map_err(|e| ServeError::invalid("prompt", e.to_string()))?;
        self.go_on(ids.into_iter().next().unwrap_or_default(), writing)
    }

    /// Answers a conversation.
    ///
    /// # Errors
    /// A model without a template, tools that the template does not write down, what it refuses, and as [`write`](Self::write).
    pub fn answer(
        &self,
        messages: &[Message],
        tools: &[Tool],
        writing: Writing,
    ) -> Result<Pieces, ServeError> {
        let template = self.template.as_ref().ok_or_else(|| {
            ServeError::invalid(
                "model",
                "the model has no chat template, as it was not made for conversations; ask /v1/completions",
            )
        })?;
        let wrong = |e: EngineError| ServeError::invalid("messages", e.to_string());
        if !tools.is_empty() && !template.takes_tools() {
            return Err(ServeError::invalid(
                "tools",
                "the model's chat template has no place for tools, as it was not taught to call them; leave `tools` out, or ask another model",
            ));
        }
        let prompt = template.render_with(messages, tools).map_err(wrong)?;
        let ids = self.encoder.prompt_as_written(&prompt).map_err(wrong)?;
        self.go_on(ids, writing)
    }

    /// Writes on from token ids.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn go_on(&self, prompt: Vec<u32>, writing: Writing) -> Result<Pieces, ServeError> {
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
            log_probabilities,
        } = writing;
        if stop.iter().any(String::is_empty) {
            return Err(ServeError::invalid(
                "stop",
                "an empty stop ends every text at once",
            ));
        }
        let before = match self.has_source {
            true => 1,
            false => prompt.len(),
        };
        let left = self.positions.map(|n| (n as usize).saturating_sub(before));
        if max_tokens.or(left).is_some() {
            options.max_length = None;
        }
        let rules = &mut options.rules;
        (rules.frequency_penalty, rules.presence_penalty) = (frequency_penalty, presence_penalty);
        rules.bias = bias;
        rules.max_new_tokens = match (max_tokens, left) {
            (Some(n), _) => n,
            (None, Some(left)) => left.max(1),
            (None, None) => rules.max_new_tokens,
        };
        if temperature == Some(0.0) {
            options.sampling = None;
        } else if temperature.is_some() || top_p.is_some() {
            let usual = options.sampling.unwrap_or(Sampling {
                top_k: 0,
                ..Sampling::default()
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
        let (sender, pieces) = unbounded_channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let job = Job {
            request: Request { prompt, options },
            stop,
            pieces: sender,
            is_over: Arc::clone(&is_over),
        };
        let why = "it is shutting down";
        let jobs = self.jobs.as_ref().ok_or(ServeError::NotReady { why })?;
        let waiting = &self.metrics.queue_requests;
        if waiting.load(Ordering::Relaxed) >= MOST_WAITING {
            Metrics::count(&self.metrics.overloaded, 1);
            let retry_after = Duration::from_secs(1);
            return Err(ServeError::Overloaded { retry_after });
        }
        Metrics::count(waiting, 1);
        jobs.send(job).map_err(|_| ServeError::NotReady { why })?;
        Ok(Pieces { pieces, is_over })
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

/// The thread's side.
struct Running {
    generator: Generator,
    texts: Texts,
    metrics: Arc<Metrics>,
    rows: HashMap<Ticket, Row>,
    /// The first request for which there was no room.
    waiting: Option<Job>,
    seat: Option<Seat>,
    /// What the last step took.
    step: Micros,
}

impl Running {
    fn run(mut self, queue: &Receiver<Job>) {
        loop {
            if !self.take_in(queue) {
                return;
            }
            let gone = self.rows.iter();
            let gone = gone.filter(|(_, row)| row.is_over.load(Ordering::Acquire));
            let gone: Vec<Ticket> = gone.map(|(&ticket, _)| ticket).collect();
            for ticket in gone {
                self.generator.cancel(ticket);
                if let Some(row) = self.rows.remove(&ticket) {
                    self.texts.tell(row.thread, News::Gone(ticket));
                }
            }
            self.texts.send();
            if !self.generator.is_busy() {
                continue;
            }
            let turn = self.seat.as_ref().map(|seat| seat.take(self.step));
            let began = Instant::now();
            let polled = self.generator.poll();
            self.step = Micros(began.elapsed().as_micros() as u64);
            drop(turn);
            match polled {
                Ok(events) => events.into_iter().for_each(|event| self.tell(event)),
                Err(error) => {
                    // The step was of all of them.
                    let error = Arc::new(error);
                    for (ticket, row) in std::mem::take(&mut self.rows) {
                        self.generator.cancel(ticket);
                        let error = Arc::clone(&error);
                        self.texts.tell(row.thread, News::Failed(ticket, error));
                    }
                }
            }
            self.texts.send();
        }
    }

    /// Admits what has come and has room. `false` when nobody can ask any more and all is written.
    fn take_in(&mut self, queue: &Receiver<Job>) -> bool {
        loop {
            let job = match self.waiting.take() {
                Some(job) => job,
                None if self.rows.is_empty() && !self.generator.is_busy() => {
                    match queue.recv_timeout(Duration::from_secs(3600)) {
                        Ok(job) => job,
                        Err(RecvTimeoutError::Timeout) => continue,
                        Err(RecvTimeoutError::Disconnected) => return false,
                    }
                }
                None => match queue.try_recv() {
                    Ok(job) => job,
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => return true,
                },
            };
            if job.is_over.load(Ordering::Acquire) {
                Metrics::count(&self.metrics.cancelled, 1);
                self.waits_no_more();
                continue;
            }
            match self.generator.admit(job.request.clone()) {
                Ok(ticket) => {
                    let row = Row {
                        is_over: Arc::clone(&job.is_over),
                        thread: self.texts.begin(ticket, job),
                    };
                    self.rows.insert(ticket, row);
                    self.waits_no_more();
                }
                Err(AdmitError::Full { .. }) => {
                    self.waiting = Some(job);
                    return true;
                }
                Err(error) => {
                    let _ = job.pieces.send(Err(error.into()));
                    self.waits_no_more();
                }
            }
        }
    }

    fn waits_no_more(&self) {
        self.metrics.queue_requests.fetch_sub(1, Ordering::Relaxed);
    }

    /// Passes on what the generator says of a request.
    fn tell(&mut self, event: Event) {
        let ticket = event.ticket();
        let ends = matches!(event, Event::Done { .. } | Event::Failed { .. });
        let thread = match ends {
            true => self.rows.remove(&ticket).map(|row| row.thread),
            false => self.rows.get(&ticket).map(|row| row.thread),
        };
        if let Some(thread) = thread {
            self.texts.tell(thread, News::Event(event));
        }
    }
}
