//! Detokenizes generated tokens on separate threads. On the generator's thread, detokenizing would make a step of a hundred sequences half
//! a millisecond longer.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
};

use super::{Ending, Job, Piece, Scored};
use crate::{
    EngineError,
    generate::{Event, Reason, Ticket},
    search::Hypothesis,
    serve::{Metrics, ServeError},
    text::{StreamDecoder, TextEncoder},
};

/// Max number of threads. A thread handles 200,000 tokens per second.
const MAX_THREADS: usize = 4;

/// Message to a thread.
pub(super) enum DetokenizerMsg {
    Begins(Ticket, Box<Job>),
    Event(Event),
    /// The request failed or its deadline passed.
    Failed(Ticket, ServeError),
    /// The client has stopped reading, or the text is complete.
    Gone(Ticket),
}

/// The detokenizer threads. Requests are assigned to the threads in turn.
pub(super) struct DetokenizerPool {
    threads: Vec<Thread>,
    next: usize,
}

struct Thread {
    news: Option<Sender<Vec<DetokenizerMsg>>>,
    /// Messages that have not been sent yet.
    open: Vec<DetokenizerMsg>,
    thread: Option<JoinHandle<()>>,
}

impl DetokenizerPool {
    pub(super) fn start(
        encoder: &Arc<TextEncoder>,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, EngineError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let started = (0..(cores / 4).clamp(1, MAX_THREADS)).map(|_| {
            let (news, queue) = channel();
            let making = Detokenizer {
                encoder: Arc::clone(encoder),
                metrics: Arc::clone(metrics),
                rows: HashMap::new(),
            };
            let thread = std::thread::Builder::new().name("texts".to_owned());
            let thread = thread.spawn(move || making.run(&queue));
            let thread = thread.map_err(|e| EngineError::Threads {
                problem: e.to_string(),
            })?;
            Ok(Thread {
                news: Some(news),
                open: Vec::new(),
                thread: Some(thread),
            })
        });
        Ok(Self {
            threads: started.collect::<Result<_, EngineError>>()?,
            next: 0,
        })
    }

    /// Assigns a request to a thread, and returns the thread's index.
    pub(super) fn begin(&mut self, ticket: Ticket, job: Job) -> usize {
        let thread = self.next;
        self.next = (thread + 1) % self.threads.len();
        self.tell(thread, DetokenizerMsg::Begins(ticket, Box::new(job)));
        thread
    }

    /// Queues a message for a thread.
    pub(super) fn tell(&mut self, thread: usize, news: DetokenizerMsg) {
        self.threads[thread].open.push(news);
    }

    /// Sends the queued messages. Each thread is woken at most once per call.
    pub(super) fn send(&mut self) {
        for thread in &mut self.threads {
            if let Some(news) = thread.news.as_ref().filter(|_| !thread.open.is_empty()) {
                let _ = news.send(std::mem::take(&mut thread.open));
            }
        }
    }
}

impl Drop for DetokenizerPool {
    fn drop(&mut self) {
        self.send();
        for thread in &mut self.threads {
            thread.news = None;
            if let Some(thread) = thread.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

/// State of a detokenizer thread.
struct Detokenizer {
    encoder: Arc<TextEncoder>,
    metrics: Arc<Metrics>,
    rows: HashMap<Ticket, Sequence>,
}

/// A text in progress.
struct Sequence {
    job: Job,
    text: StreamDecoder,
    /// Tokens with log-probabilities that have not been sent yet.
    scored: Vec<Scored>,
    /// The requested hypotheses of the beam search, with their scores.
    hypotheses: Vec<(String, f32)>,
}

impl Detokenizer {
    fn run(mut self, queue: &Receiver<Vec<DetokenizerMsg>>) {
        while let Ok(all) = queue.recv() {
            all.into_iter().for_each(|news| self.take(news));
        }
    }

    fn take(&mut self, news: DetokenizerMsg) {
        match news {
            DetokenizerMsg::Begins(ticket, job) => {
                let mut row = Sequence {
                    job: *job,
                    text: StreamDecoder::default(),
                    scored: Vec::new(),
                    hypotheses: Vec::new(),
                };
                if row.job.goes_on {
                    let decode = |tokens: &[u32]| self.encoder.decode(tokens);
                    match StreamDecoder::after(&row.job.request.prompt, decode) {
                        Ok(text) => row.text = text,
                        Err(problem) => row.fail(problem.into()),
                    }
                }
                self.rows.insert(ticket, row);
            }
            DetokenizerMsg::Event(event) => self.tell(event),
            DetokenizerMsg::Failed(ticket, error) => {
                if let Some(row) = self.rows.remove(&ticket) {
                    let _ = row.job.pieces.send(Err(error));
                }
            }
            DetokenizerMsg::Gone(ticket) => drop(self.rows.remove(&ticket)),
        }
    }

    fn tell(&mut self, event: Event) {
        let ticket = event.ticket();
        let Some(row) = self.rows.get_mut(&ticket) else {
            return;
        };
        match event {
            Event::Token {
                id,
                log_probability,
                top_tokens,
                ..
            } => {
                if row.text.stopped {
                    return;
                }
                let step = Step {
                    id,
                    log_probability,
                    top_tokens,
                };
                Metrics::count(&self.metrics.tokens, 1);
                if let Err(error) = row.grow(&self.encoder, step) {
                    return row.fail(error);
                }
                let stopped = row.text.cut(&row.job.stop);
                if let Err(error) = row.show(stopped) {
                    return row.fail_with(error);
                }
                if stopped {
                    row.stop();
                    if let Err(error) = row.end(Ending::Stop) {
                        row.fail_with(error);
                    }
                }
            }
            Event::Found { hypotheses, .. } => {
                if let Err(error) = row.keep(&self.encoder, &hypotheses) {
                    row.fail(error);
                }
            }
            Event::Done { reason, .. } => {
                let Some(mut row) = self.rows.remove(&ticket) else {
                    return;
                };
                if row.text.stopped {
                    return;
                }
                if let Err(error) = row.show(true) {
                    return row.fail_with(error);
                }
                let ended = row.end(match reason {
                    Reason::Length => Ending::Length,
                    Reason::End | Reason::Cancelled => Ending::Stop,
                });
                if let Err(error) = ended {
                    row.fail_with(error);
                }
            }
            Event::Failed { problem, .. } => {
                if let Some(row) = self.rows.remove(&ticket) {
                    let _ = row
                        .job
                        .pieces
                        .send(Err(ServeError::Internal(problem.to_string())));
                }
            }
        }
    }
}

/// A token from the generator.
struct Step {
    id: u32,
    log_probability: Option<f32>,
    top_tokens: Vec<(u32, f32)>,
}

impl Sequence {
    /// Appends a token to the text.
    fn grow(&mut self, encoder: &TextEncoder, step: Step) -> Result<(), EngineError> {
        let prompt = &self.job.request.prompt;
        let before = self.text.tokens.last().or(prompt.last()).copied();
        let start = self.text.text.trim_end_matches('\u{fffd}').len();
        self.text.push(step.id, |tokens| encoder.decode(tokens))?;
        let ends = self.job.request.options.rules.ends(step.id);
        if let Some(log_probability) = step.log_probability.filter(|_| !ends) {
            let bytes = |id: u32| encoder.bytes_after(before, id);
            let top_tokens = step.top_tokens.into_iter();
            self.scored.push(Scored {
                bytes: bytes(step.id)?,
                log_probability,
                top_tokens: top_tokens
                    .map(|(id, value)| Ok((bytes(id)?, value)))
                    .collect::<Result<_, EngineError>>()?,
                start,
                offset: self
                    .text
                    .text
                    .get(..start)
                    .unwrap_or_default()
                    .chars()
                    .count(),
            });
        }
        Ok(())
    }

    /// Sends the part of the unsent text that can no longer change. If `is_over`, sends all of the unsent text.
    ///
    /// # Errors
    /// Returns an error if there is too little memory for pieces that the client has not read.
    fn show(&mut self, is_over: bool) -> Result<(), ServeError> {
        let text = &mut self.text;
        let to = match is_over {
            true => text.text.len().max(text.shown),
            false => text.ready(&self.job.stop),
        };
        let piece = text.text.get(text.shown..to).unwrap_or_default();
        // Do not send the text after a stop string, or the tokens of that text. Tokens that add no text are sent with the next piece.
        let n = match is_over && !text.stopped {
            true => self.scored.len(),
            false => self.scored.partition_point(|token| token.start < to),
        };
        if !piece.is_empty() || is_over && n > 0 {
            let piece = Piece::Text {
                text: piece.to_owned(),
                tokens: self.scored.drain(..n).collect(),
            };
            self.job.send(piece)?;
            text.shown = to;
        }
        Ok(())
    }

    /// Ends the text because of a decoding error.
    fn fail(&mut self, error: EngineError) {
        self.fail_with(ServeError::Engine(Arc::new(error)));
    }

    fn fail_with(&mut self, error: ServeError) {
        self.stop();
        let _ = self.job.pieces.send(Err(error));
    }

    /// Tells the generator to end the text. Until the generator ends the text, further tokens are ignored. This must be called before the
    /// last piece is sent.
    fn stop(&mut self) {
        self.text.stopped = true;
        self.job.ending.complete();
    }

    /// Decodes the requested number of hypotheses of a beam search, and stores their texts and scores.
    fn keep(&mut self, encoder: &TextEncoder, all: &[Hypothesis]) -> Result<(), EngineError> {
        let n = self.job.hypotheses;
        if n == 0 {
            return Ok(());
        }
        for found in Hypothesis::best(all, n) {
            self.hypotheses
                .push((encoder.decode(&found.tokens)?, found.score));
        }
        Ok(())
    }

    /// Sends the last piece.
    ///
    /// # Errors
    /// Returns an error if there is too little memory for the piece.
    fn end(&mut self, ending: Ending) -> Result<(), ServeError> {
        let piece = Piece::End {
            ending,
            prompt_tokens: self.job.request.prompt.len(),
            tokens: self.text.tokens.len(),
            hypotheses: std::mem::take(&mut self.hypotheses),
        };
        self.job.send(piece)
    }
}
