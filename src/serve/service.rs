//! Embeddings and scores: the queue between those who ask and the executor.

use std::{
    collections::HashMap,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    task::{Context, Poll},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

use super::{
    Metrics, Seat, ServeError, Text, Turn,
    tokenize::{Pool, encode},
};
use crate::{
    Batch, Engine, EngineError, Outputs,
    engine::{Encoded, LOGITS, Pending, Pipeline, TextEncoder},
    model::EMBEDDING,
    runtime::batch::Limits,
    schedule::{CostTable, Costs, Desk, Micros, Planned, Scheduler, Waiting},
};

/// Texts of fewer bytes are tokenized where they come in, if a request has not more than [`FEW`] inputs.
const SHORT: usize = 256;
const FEW: usize = 4;

/// The output of descriptions that has a row for each token, before pooling.
pub(super) const STATES: &str = "last_hidden_state";
/// The output of models that weigh the entries of their vocabulary, as SPLADE does: `[batch, vocabulary]`, mostly 0.
pub const SPARSE: &str = "sparse";

/// Which of a model's outputs an answer has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// The embedding, or the scores.
    #[default]
    Usual,
    /// The vectors of all tokens, one after another.
    AllTokens,
    /// A weight for each entry of the vocabulary.
    Sparse,
}

/// How a service works.
pub struct ServiceChoice {
    pub scheduler: Box<dyn Scheduler>,
    pub costs: CostTable,
    /// Memory for the intermediate tensors of a batch, in bytes.
    pub batch_bytes: u64,
    /// Requests are refused when what waits would take longer than this.
    pub queue: Duration,
    pub tokenizers: usize,
    /// Its place among the models of each engine's device, in their order; none where it has the devices to itself.
    pub seats: Vec<Seat>,
}

/// What comes with inputs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Submit {
    /// Whether a text that is too long is cut; without, it is an error.
    pub truncate: bool,
    /// How long its answer is of use.
    pub within: Option<Duration>,
    pub class: u8,
    pub tenant: u32,
    pub wanted: Wanted,
}

/// The result for one input.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// An embedding or scores by label, or what else was [`Wanted`].
    pub values: Vec<f32>,
    /// Tokens that were computed for it.
    pub tokens: usize,
}

/// An answer to come. Dropping it cancels the request: if it waits, it never runs.
pub struct Reply {
    answer: oneshot::Receiver<Result<Answer, ServeError>>,
    ticket: Arc<Ticket>,
    shared: Arc<Shared>,
}

/// Where a request is, for those who may cancel it.
#[derive(Default)]
struct Ticket {
    /// The desk's id plus one; 0 before it waits there.
    id: AtomicU64,
    is_cancelled: AtomicBool,
}

/// A request that waits or runs.
struct Entry {
    encoded: Encoded,
    answer: oneshot::Sender<Result<Answer, ServeError>>,
    index: usize,
    arrived: Instant,
    wanted: Wanted,
}

struct State {
    desk: Desk,
    scheduler: Box<dyn Scheduler>,
    entries: HashMap<u64, Entry>,
    /// Bytes of texts that are being tokenized.
    untokenized: usize,
    is_over: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    costs: CostTable,
    queue: Duration,
    began: Instant,
    limits: Limits,
    metrics: Metrics,
    encoder: TextEncoder,
}

/// A batch on its way through the executor.
struct Launched {
    pending: Result<Pending, EngineError>,
    members: Vec<(u64, Entry)>,
    estimate: Micros,
    launched: Instant,
    /// The device's time, until the batch is done.
    turn: Option<Turn>,
}

/// A device as the launch thread sees it.
struct Launcher {
    pipeline: Arc<Pipeline>,
    launched: Sender<Launched>,
    seat: Option<Seat>,
}

/// One model that computes embeddings or scores.
pub struct Service {
    shared: Arc<Shared>,
    pool: Pool,
    threads: Vec<JoinHandle<()>>,
    output: &'static str,
    width: usize,
    has_states: bool,
    has_sparse: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // What a thread that panicked left is whole: each change is a single call.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Micros {
        Micros(self.began.elapsed().as_micros() as u64)
    }

    /// Lets a tokenized input wait for the executor.
    fn enqueue(&self, encoded: Encoded, entry: NewEntry) {
        let NewEntry {
            answer,
            index,
            submit,
            ticket,
            arrived,
        } = entry;
        let mut state = self.lock();
        if ticket.is_cancelled.load(Ordering::Acquire) {
            Metrics::count(&self.metrics.cancelled, 1);
            return;
        }
        if state.is_over {
            let why = "it is shutting down";
            let _ = answer.send(Err(ServeError::NotReady { why }));
            return;
        }
        let since = arrived.duration_since(self.began);
        let at = Micros(since.as_micros() as u64);
        let id = state.desk.arrive(Waiting {
            deadline: submit.within.map(|w| at.plus(Micros(w.as_micros() as u64))),
            class: submit.class,
            tenant: submit.tenant,
            ..Waiting::new(encoded.ids.len() as u32, at)
        });
        ticket.id.store(id + 1, Ordering::Release);
        state.entries.insert(
            id,
            Entry {
                encoded,
                answer,
                index,
                arrived,
                wanted: submit.wanted,
            },
        );
        self.count_waiting(&state);
        drop(state);
        self.changed.notify_one();
    }

    fn count_waiting(&self, state: &State) {
        Metrics::set(&self.metrics.queue_tokens, state.desk.tokens());
        let n = state.desk.waiting().len() as u64;
        Metrics::set(&self.metrics.queue_requests, n);
    }

    /// How long what waits will take.
    fn backlog(&self, state: &State) -> Duration {
        // A text has about one token for four bytes.
        let tokens = state.desk.tokens() + state.untokenized as u64 / 4;
        if tokens == 0 {
            return Duration::ZERO;
        }
        let size = tokens.min(4096);
        let extents = crate::schedule::Layout::Packed.computed([size as u32]);
        let extents = crate::tensor::Extents {
            pairs: size * 128.min(size),
            ..extents
        };
        let time = self.costs.time(crate::schedule::Layout::Packed, &extents);
        Duration::from_secs_f64(time.seconds() * tokens as f64 / size as f64)
    }
}

/// What an input waits with.
struct NewEntry {
    answer: oneshot::Sender<Result<Answer, ServeError>>,
    index: usize,
    submit: Submit,
    ticket: Arc<Ticket>,
    arrived: Instant,
}

impl Service {
    /// Starts the threads of a model that computes embeddings or scores. Its engines are of one checkpoint on a device each, and
    /// take of one queue.
    ///
    /// # Errors
    /// A model with neither output, and threads that the system does not give.
    pub fn start(
        engine: &Engine,
        others: &[Engine],
        encoder: TextEncoder,
        choice: ServiceChoice,
    ) -> Result<Self, EngineError> {
        let names = || {
            engine
                .program()
                .outputs
                .iter()
                .map(|(name, _)| name.as_str())
        };
        let output = [EMBEDDING, LOGITS, SPARSE]
            .into_iter()
            .find(|name| names().any(|n| n == *name));
        let output = output.ok_or_else(|| EngineError::NoOutput {
            name: EMBEDDING.to_owned(),
            known: names().map(str::to_owned).collect(),
        })?;
        let has_states = names().any(|name| name == STATES);
        let mut session = engine.session()?;
        let ids = (0..4).map(|i| engine.limits().token_id(i + 1)).collect();
        let outputs = session.run(&Batch::from_packed(ids, &[4])?)?;
        let width = outputs.get(output)?.values.len();
        // A weight for each token, as other models give it, is not one for each entry.
        let vocabulary = engine.limits().vocabulary as usize;
        let sparse = outputs.get(SPARSE).map(|output| output.values.len());
        let has_sparse = sparse.is_ok_and(|n| n == vocabulary);
        let score = (output == LOGITS).then(|| {
            let folder = encoder.folder();
            folder.score(width as u64)
        });
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                desk: Desk::new(&vec![choice.batch_bytes; 1 + others.len()], 2),
                scheduler: choice.scheduler,
                entries: HashMap::new(),
                untokenized: 0,
                is_over: false,
            }),
            changed: Condvar::new(),
            costs: choice.costs,
            queue: choice.queue,
            began: Instant::now(),
            limits: engine.limits(),
            metrics: Metrics::default(),
            encoder,
        });
        let mut sessions = vec![session];
        for engine in others {
            sessions.push(engine.session()?);
        }
        let mut seats = choice.seats.into_iter();
        let (mut launchers, mut collectors) = (Vec::new(), Vec::new());
        for (lane, session) in sessions.into_iter().enumerate() {
            let pipeline = Arc::new(Pipeline::new(session)?);
            let (launched, results) = channel();
            launchers.push(Launcher {
                pipeline: Arc::clone(&pipeline),
                launched,
                seat: seats.next(),
            });
            let collect = Collect {
                shared: Arc::clone(&shared),
                pipeline,
                lane,
                output,
                score,
            };
            collectors.push((collect, results));
        }
        let launch = Arc::clone(&shared);
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let thread = std::thread::Builder::new().name(name.to_owned());
            thread.spawn(run).map_err(|e| EngineError::Threads {
                problem: e.to_string(),
            })
        };
        let mut threads = vec![spawn(
            "launch",
            Box::new(move || run_launch(&launch, &launchers)),
        )?];
        for (collect, results) in collectors {
            threads.push(spawn("collect", Box::new(move || collect.run(&results)))?);
        }
        Ok(Self {
            shared,
            pool: Pool::new(choice.tokenizers)?,
            threads,
            output,
            width,
            has_states,
            has_sparse,
        })
    }

    /// Whether it embeds texts.
    pub fn is_embedding(&self) -> bool {
        self.output == EMBEDDING
    }

    /// Whether it weighs the entries of its vocabulary, beside other outputs or alone.
    pub fn has_sparse(&self) -> bool {
        self.has_sparse
    }

    /// Whether it scores pairs or texts by label, as cross-encoders and classifiers do, instead of embedding texts.
    pub fn is_scoring(&self) -> bool {
        self.output == LOGITS
    }

    /// Values of an answer: the width of an embedding, or the number of labels.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The most tokens of an input, where the model has a limit.
    pub fn longest(&self) -> Option<u32> {
        self.shared.limits.longest
    }

    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    pub fn encoder(&self) -> &TextEncoder {
        &self.shared.encoder
    }

    /// Lets inputs of one request be computed, each by itself.
    ///
    /// # Errors
    /// Ids that the model has no row for, a queue that is full, and a service that is ending. What is wrong with an input's
    /// text is told by its reply.
    pub fn submit(&self, inputs: Vec<Text>, submit: Submit) -> Result<Vec<Reply>, ServeError> {
        for (index, text) in inputs.iter().enumerate() {
            self.check(index, text)?;
        }
        if submit.wanted == Wanted::AllTokens && !self.has_states {
            let problem = "the model was not loaded for the vectors of all tokens; start the server with --all-tokens, or ask for embeddings";
            return Err(ServeError::invalid("model", problem));
        }
        let is_short = inputs.len() <= FEW && inputs.iter().all(|text| text.bytes() < SHORT);
        let arrived = Instant::now();
        {
            let mut state = self.shared.lock();
            if state.is_over {
                let why = "it is shutting down";
                return Err(ServeError::NotReady { why });
            }
            let backlog = self.shared.backlog(&state);
            if backlog > self.shared.queue {
                Metrics::count(&self.shared.metrics.overloaded, inputs.len() as u64);
                let retry_after = backlog.saturating_sub(self.shared.queue / 2);
                return Err(ServeError::Overloaded { retry_after });
            }
            if !is_short {
                state.untokenized += inputs.iter().map(Text::bytes).sum::<usize>();
            }
        }
        let mut replies = Vec::with_capacity(inputs.len());
        for (index, text) in inputs.into_iter().enumerate() {
            let (sender, answer) = oneshot::channel();
            let ticket = Arc::new(Ticket::default());
            replies.push(Reply {
                answer,
                ticket: Arc::clone(&ticket),
                shared: Arc::clone(&self.shared),
            });
            let entry = NewEntry {
                answer: sender,
                index,
                submit,
                ticket,
                arrived,
            };
            let shared = Arc::clone(&self.shared);
            let n_bytes = text.bytes();
            let work = move || {
                let began = Instant::now();
                let is_cancelled = entry.ticket.is_cancelled.load(Ordering::Acquire);
                let encoded = (!is_cancelled).then(|| {
                    let longest = shared.limits.longest;
                    encode(&shared.encoder, text, index, submit.truncate, longest)
                });
                if !is_short {
                    let mut state = shared.lock();
                    state.untokenized = state.untokenized.saturating_sub(n_bytes);
                }
                shared.metrics.tokenize.add(began.elapsed().as_secs_f64());
                match encoded {
                    None => Metrics::count(&shared.metrics.cancelled, 1),
                    Some(Ok(encoded)) => shared.enqueue(encoded, entry),
                    Some(Err(error)) => {
                        let _ = entry.answer.send(Err(error));
                    }
                }
            };
            match is_short {
                true => work(),
                false => self.pool.run(work)?,
            }
        }
        Ok(replies)
    }

    /// What is empty, and ids, are checked at the door, so that a wrong one does not fail the batch of others.
    fn check(&self, index: usize, text: &Text) -> Result<(), ServeError> {
        let ids = match text {
            Text::Ids(ids) => ids,
            Text::One(text) if text.is_empty() => {
                let problem =
                    format!("input {index} is an empty text; expected at least one character");
                return Err(ServeError::invalid("input", problem));
            }
            Text::One(_) | Text::Pair(..) => return Ok(()),
        };
        let limits = self.shared.limits;
        let wrong = |at: usize, problem: String| {
            Err(ServeError::invalid(
                "input",
                format!(
                    "input {index}, token {at}, is {problem}; where ids are of another tokenizer, as OpenAI's, send texts (in LangChain: check_embedding_ctx_length=False)"
                ),
            ))
        };
        if let Some(at) = ids.iter().position(|&id| id >= limits.vocabulary) {
            let vocabulary = limits.vocabulary;
            return wrong(
                at,
                format!("{}, but the model has {vocabulary} tokens", ids[at]),
            );
        }
        match ids.iter().position(|&id| Some(id) == limits.skipped) {
            Some(at) => wrong(at, "the model's padding token".to_owned()),
            None => Ok(()),
        }
    }

    /// Takes no more requests; those that wait are answered.
    pub fn drain(&self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_one();
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.drain();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Asks the scheduler whenever something has changed, and gives its batches to the executor.
fn run_launch(shared: &Shared, lanes: &[Launcher]) {
    let mut state = shared.lock();
    loop {
        let now = shared.now();
        let State {
            desk, scheduler, ..
        } = &mut *state;
        let decision = match desk.waiting().is_empty() {
            true => Default::default(),
            false => match desk.decide(now, &mut **scheduler, &shared.costs) {
                Ok(decision) => decision,
                Err(mistake) => {
                    fail_all(&mut state, &mistake.to_string());
                    Default::default()
                }
            },
        };
        for (id, refusal) in decision.refuse {
            let metrics = &shared.metrics;
            let counter = match refusal {
                crate::schedule::Refusal::Expired => &metrics.expired,
                crate::schedule::Refusal::Hopeless => &metrics.hopeless,
                crate::schedule::Refusal::TooLarge => &metrics.too_large,
            };
            Metrics::count(counter, 1);
            if let Some(entry) = state.entries.remove(&id) {
                let error = ServeError::refused(refusal, entry.index);
                let _ = entry.answer.send(Err(error));
            }
        }
        if !decision.run.is_empty() {
            let batches: Vec<_> = decision.run.iter().map(|p| take(&mut state, p)).collect();
            shared.count_waiting(&state);
            drop(state);
            for (lane, members, estimate) in batches {
                let Some(lane) = lanes.get(lane) else {
                    continue;
                };
                // Other models' batches come first here where they have had less of the device.
                let turn = lane.seat.as_ref().map(|seat| seat.take(estimate));
                let pending = batch_of(&members).and_then(|batch| lane.pipeline.submit(batch));
                let sent = lane.launched.send(Launched {
                    pending,
                    members,
                    estimate,
                    launched: Instant::now(),
                    turn,
                });
                if sent.is_err() {
                    return;
                }
            }
            state = shared.lock();
            continue;
        }
        let is_idle = state.desk.lanes().iter().all(|lane| lane.in_flight == 0);
        if state.is_over && is_idle && state.desk.waiting().is_empty() {
            return;
        }
        let wait = decision
            .wake
            .map(|at| Duration::from_micros(at.since(now).0.max(1)));
        // A deadline may pass while nothing else happens.
        let wait = wait.unwrap_or(Duration::from_millis(200));
        state = match shared.changed.wait_timeout(state, wait) {
            Ok((state, _)) => state,
            Err(poisoned) => poisoned.into_inner().0,
        };
    }
}

/// The requests of a batch, which wait no more.
fn take(state: &mut State, planned: &Planned) -> (usize, Vec<(u64, Entry)>, Micros) {
    let members = planned
        .ids()
        .filter_map(|id| Some((id, state.entries.remove(&id)?)));
    (planned.lane, members.collect(), planned.estimate)
}

fn fail_all(state: &mut State, problem: &str) {
    tracing::error!("{problem}");
    let ids: Vec<u64> = state.desk.waiting().iter().map(|w| w.id).collect();
    for id in ids {
        state.desk.cancel(id);
        if let Some(entry) = state.entries.remove(&id) {
            let error = ServeError::Internal(problem.to_owned());
            let _ = entry.answer.send(Err(error));
        }
    }
}

fn batch_of(members: &[(u64, Entry)]) -> Result<Batch, EngineError> {
    let lens: Vec<u32> = members
        .iter()
        .map(|(_, e)| e.encoded.ids.len() as u32)
        .collect();
    let encoded = || members.iter().map(|(_, entry)| &entry.encoded);
    let ids = encoded().flat_map(|e| e.ids.iter().copied()).collect();
    let batch = Batch::from_packed(ids, &lens)?;
    if encoded().all(|e| e.types.is_none()) {
        return Ok(batch);
    }
    let types = encoded().flat_map(|e| match &e.types {
        Some(types) => types.clone(),
        None => vec![0; e.ids.len()],
    });
    Ok(batch.with_type_ids(types.collect())?)
}

/// The thread that waits for results and answers.
struct Collect {
    shared: Arc<Shared>,
    pipeline: Arc<Pipeline>,
    lane: usize,
    output: &'static str,
    score: Option<crate::engine::Score>,
}

impl Collect {
    fn run(&self, results: &Receiver<Launched>) {
        for batch in results {
            let Launched {
                pending,
                members,
                estimate,
                launched,
                turn,
            } = batch;
            let ids: Vec<u64> = members.iter().map(|(id, _)| *id).collect();
            let metrics = &self.shared.metrics;
            for (_, entry) in &members {
                let waited = launched.duration_since(entry.arrived);
                metrics.queue.add(waited.as_secs_f64());
            }
            let outputs = pending.and_then(Pending::wait);
            drop(turn);
            let took = launched.elapsed().as_secs_f64();
            metrics.device.add(took);
            Metrics::count(&metrics.batches, 1);
            Metrics::count(&metrics.batch_sequences, members.len() as u64);
            let ratio = took / estimate.seconds().max(1e-6) * 1e3;
            Metrics::set(&metrics.estimate_ratio, ratio as u64);
            self.answer(members, outputs);
            let mut state = self.shared.lock();
            let now = self.shared.now();
            let State {
                desk, scheduler, ..
            } = &mut *state;
            desk.finished(now, self.lane, &ids, true, &mut **scheduler);
            drop(state);
            self.shared.changed.notify_one();
        }
    }

    /// Answers the requests of a batch. Those of one that failed are run again by halves, so that only the culprit fails.
    fn answer(&self, members: Vec<(u64, Entry)>, outputs: Result<Outputs, EngineError>) {
        let metrics = &self.shared.metrics;
        let error = match outputs.and_then(|outputs| self.rows(&members, &outputs)) {
            Ok(rows) => {
                for ((_, entry), values) in members.into_iter().zip(rows) {
                    let tokens = entry.encoded.ids.len();
                    Metrics::count(&metrics.tokens, tokens as u64);
                    // Who has gone needs no answer.
                    let _ = entry.answer.send(Ok(Answer { values, tokens }));
                }
                return;
            }
            Err(error) => error,
        };
        Metrics::count(&metrics.failed_batches, 1);
        let n = members.len();
        if error.is_out_of_memory() {
            let mut state = self.shared.lock();
            let bytes = state
                .desk
                .lanes()
                .get(self.lane)
                .map_or(0, |lane| lane.bytes);
            let needed = batch_of(&members).map_or(bytes, |batch| {
                let extents = batch.extents();
                self.shared
                    .costs
                    .bytes(crate::schedule::Layout::Packed, &extents)
            });
            state.desk.set_bytes(self.lane, bytes.min(needed) / 4 * 3);
        }
        if n <= 1 || matches!(error, EngineError::PipelineEnded) {
            let error = Arc::new(error);
            for (_, entry) in members {
                let error = ServeError::Engine(Arc::clone(&error));
                let _ = entry.answer.send(Err(error));
            }
            return;
        }
        tracing::warn!("a batch of {n} requests failed, and runs again by halves: {error}");
        let mut first = members;
        let second = first.split_off(n / 2);
        for half in [first, second] {
            let outputs = batch_of(&half).and_then(|batch| self.pipeline.submit(batch)?.wait());
            self.answer(half, outputs);
        }
    }

    fn rows(
        &self,
        members: &[(u64, Entry)],
        outputs: &Outputs,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        outputs.check_finite()?;
        let output = outputs.get(self.output)?;
        let width = output.values.len() / members.len().max(1);
        let score = |x: &f32| self.score.map_or(*x, |score| score.of(*x));
        let rows = output.values.chunks_exact(width.max(1));
        let mut rows: Vec<Vec<f32>> = rows.map(|row| row.iter().map(score).collect()).collect();
        for (at, (_, entry)) in members.iter().enumerate() {
            match entry.wanted {
                Wanted::Usual => {}
                Wanted::AllTokens => rows[at] = outputs.sequence(STATES, at)?.to_vec(),
                Wanted::Sparse => rows[at] = outputs.sequence(SPARSE, at)?.to_vec(),
            }
        }
        Ok(rows)
    }
}

impl Future for Reply {
    type Output = Result<Answer, ServeError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.answer).poll(context).map(|answer| {
            answer.unwrap_or_else(|_| {
                Err(ServeError::Internal(
                    "the request was lost by a panic".to_owned(),
                ))
            })
        })
    }
}

impl Reply {
    /// Waits on a thread, where there is no runtime.
    ///
    /// # Errors
    /// As the future's.
    pub fn wait(mut self) -> Result<Answer, ServeError> {
        let (_, never) = oneshot::channel();
        let answer = std::mem::replace(&mut self.answer, never);
        answer.blocking_recv().unwrap_or_else(|_| {
            Err(ServeError::Internal(
                "the request was lost by a panic".to_owned(),
            ))
        })
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.ticket.is_cancelled.store(true, Ordering::Release);
        let Some(id) = self.ticket.id.load(Ordering::Acquire).checked_sub(1) else {
            return;
        };
        let mut state = self.shared.lock();
        if state.desk.cancel(id) {
            state.entries.remove(&id);
            Metrics::count(&self.shared.metrics.cancelled, 1);
            self.shared.count_waiting(&state);
        }
    }
}
