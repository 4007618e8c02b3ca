//! Texts of tokens, on threads of their own: a step of a hundred sequences leaves the thread that steps half a millisecond for
//! all of them.

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
    engine::{Event, GrowingText, Reason, TextEncoder, Ticket},
    serve::{Metrics, ServeError},
};

/// Threads that make texts at most; one does 200,000 tokens a second.
const MOST_THREADS: usize = 4;

/// What a thread is told.
pub(super) enum News {
    Begins(Ticket, Box<Job>),
    Event(Event),
    /// A step failed that the request was in, or its time is over.
    Failed(Ticket, ServeError),
    /// Nobody waits for it any more.
    Gone(Ticket),
}

/// The threads, and what they are told next.
pub(super) struct Texts {
    threads: Vec<Thread>,
    next: usize,
}

struct Thread {
    news: Option<Sender<Vec<News>>>,
    /// What has not been sent yet.
    open: Vec<News>,
    thread: Option<JoinHandle<()>>,
}

impl Texts {
    pub(super) fn start(
        encoder: &Arc<TextEncoder>,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, EngineError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let started = (0..(cores / 4).clamp(1, MOST_THREADS)).map(|_| {
            let (news, queue) = channel();
            let making = Making {
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

    /// The thread that is to make the text of a new request.
    pub(super) fn begin(&mut self, ticket: Ticket, job: Job) -> usize {
        let thread = self.next;
        self.next = (thread + 1) % self.threads.len();
        self.tell(thread, News::Begins(ticket, Box::new(job)));
        thread
    }

    /// Notes news for a thread.
    pub(super) fn tell(&mut self, thread: usize, news: News) {
        self.threads[thread].open.push(news);
    }

    /// Sends what was noted: a thread is woken once for each step.
    pub(super) fn send(&mut self) {
        for thread in &mut self.threads {
            if let Some(news) = thread.news.as_ref().filter(|_| !thread.open.is_empty()) {
                let _ = news.send(std::mem::take(&mut thread.open));
            }
        }
    }
}

impl Drop for Texts {
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

/// A thread's side.
struct Making {
    encoder: Arc<TextEncoder>,
    metrics: Arc<Metrics>,
    rows: HashMap<Ticket, Row>,
}

/// A request whose text is being made.
struct Row {
    job: Job,
    text: GrowingText,
    /// Tokens that no piece had yet.
    scored: Vec<Scored>,
}

impl Making {
    fn run(mut self, queue: &Receiver<Vec<News>>) {
        while let Ok(all) = queue.recv() {
            all.into_iter().for_each(|news| self.take(news));
        }
    }

    fn take(&mut self, news: News) {
        match news {
            News::Begins(ticket, job) => {
                let mut row = Row {
                    job: *job,
                    text: GrowingText::default(),
                    scored: Vec::new(),
                };
                if row.job.goes_on {
                    let decode = |tokens: &[u32]| self.encoder.decode(tokens);
                    match GrowingText::behind(&row.job.request.prompt, decode) {
                        Ok(text) => row.text = text,
                        Err(problem) => row.fail(problem),
                    }
                }
                self.rows.insert(ticket, row);
            }
            News::Event(event) => self.tell(event),
            News::Failed(ticket, error) => {
                if let Some(row) = self.rows.remove(&ticket) {
                    let _ = row.job.pieces.send(Err(error));
                }
            }
            News::Gone(ticket) => drop(self.rows.remove(&ticket)),
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
                most_probable,
                ..
            } => {
                if row.text.stopped {
                    return;
                }
                let step = Step {
                    id,
                    log_probability,
                    most_probable,
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
                    row.end(Ending::Stop);
                }
            }
            Event::Found { .. } => {}
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
                row.end(match reason {
                    Reason::Length => Ending::Length,
                    Reason::End | Reason::Cancelled => Ending::Stop,
                });
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

/// A token as the generator tells it.
struct Step {
    id: u32,
    log_probability: Option<f32>,
    most_probable: Vec<(u32, f32)>,
}

impl Row {
    /// Adds a token to the text.
    fn grow(&mut self, encoder: &TextEncoder, step: Step) -> Result<(), EngineError> {
        let prompt = &self.job.request.prompt;
        let before = self.text.tokens.last().or(prompt.last()).copied();
        let start = self.text.text.trim_end_matches('\u{fffd}').len();
        self.text.push(step.id, |tokens| encoder.decode(tokens))?;
        let ends = self.job.request.options.rules.ends(step.id);
        if let Some(log_probability) = step.log_probability.filter(|_| !ends) {
            let bytes = |id: u32| encoder.bytes_after(before, id);
            let most_probable = step.most_probable.into_iter();
            self.scored.push(Scored {
                bytes: bytes(step.id)?,
                log_probability,
                most_probable: most_probable
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

    /// Sends what has become certain of the text, at its end all.
    ///
    /// # Errors
    /// Too little memory for pieces that the client has not read.
    fn show(&mut self, is_over: bool) -> Result<(), ServeError> {
        let text = &mut self.text;
        let to = match is_over {
            true => text.text.len().max(text.shown),
            false => text.ready(&self.job.stop),
        };
        let piece = text.text.get(text.shown..to).unwrap_or_default();
        // What lies after a stop is not shown, and its tokens neither. Tokens without a text come with the next text, or with the end.
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

    /// Ends it for a decoder that failed.
    fn fail(&mut self, error: EngineError) {
        self.fail_with(ServeError::Engine(Arc::new(error)));
    }

    fn fail_with(&mut self, error: ServeError) {
        self.stop();
        let _ = self.job.pieces.send(Err(error));
    }

    /// Lets the generator end it, whose tokens until then are ignored. To be called before the last piece is sent.
    fn stop(&mut self) {
        self.text.stopped = true;
        self.job.ending.complete();
    }

    fn end(&self, ending: Ending) {
        let _ = self.job.pieces.send(Ok(Piece::End {
            ending,
            prompt_tokens: self.job.request.prompt.len(),
            tokens: self.text.tokens.len(),
        }));
    }
}
