//! Threads of a service. One launch thread submits the scheduler's batches to all devices. For each device, a collect thread waits for
//! results and answers the requests.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, Sender},
    },
    time::{Duration, Instant},
};

use super::{
    Answer, LOST, OutputKind, SPARSE, STATES,
    queue::{Entry, Shared, State},
};
use crate::{
    AllocatorChoice, Batch, ChunkPolicy, Engine, EngineError, Outputs, Session,
    engine::{DeviceName, Pending, Pipeline},
    heads::TokenVectors,
    model::TOKEN_VECTORS,
    schedule::{CostTable, Costs, Layout, Micros, Planned, Refusal},
    serve::{DevicePermit, Metrics, ModelHandle, ServeError, costs::full_batch},
    simulate::Happened,
    tensor::Extents,
    text::{Encoded, TextRole},
};

/// A batch that was submitted to the executor.
pub(super) struct Launched {
    pending: Result<Pending, EngineError>,
    members: Vec<(u64, Entry)>,
    estimate: Micros,
    /// Whether the scheduler let the requests join a batch that was already running ([`Planned::joins`]). The executor runs them as a
    /// separate batch, but the scheduler state counts both batches as one.
    joins: bool,
    launched: Instant,
    /// Permit for the shared device, which is held until the batch is done.
    turn: Option<DevicePermit>,
}

/// A device's handles for the launch thread.
pub(super) struct Launcher {
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) launched: Sender<Launched>,
    pub(super) seat: Option<ModelHandle>,
}

/// Format of a model's sparse weights.
#[derive(Clone)]
pub(super) enum Weights {
    /// One weight for each vocabulary entry.
    OfEntries,
    /// One weight for each token of a text. Tokens with these ids are left out.
    OfTokens(Arc<[u32]>),
}

/// Max sequence length for which memory is reserved at the start.
const MAX_RESERVED_LENGTH: u64 = 512;
const MEAN_LENGTH: u64 = 64;

/// Opens a session. On a CUDA device, the session never releases memory, and memory for typical batches is reserved at once, because
/// allocating or freeing memory would wait for the batches in flight.
pub(super) fn session_of(
    engine: &Engine,
    costs: &CostTable,
    batch_bytes: u64,
) -> Result<Session, EngineError> {
    let DeviceName::Cuda(_) = engine.device() else {
        return engine.session();
    };
    let allocator = match *engine.allocator() {
        AllocatorChoice::Chunk(policy) => AllocatorChoice::Chunk(ChunkPolicy {
            release_after: u32::MAX,
            keep_limit: u64::MAX,
            ..policy
        }),
        other => other,
    };
    let mut session = engine.session_with(&allocator)?;
    if allocator.maximum().is_some() {
        // An allocator with a declared maximum allocates its memory at the first batch.
        return Ok(session);
    }
    let longest = engine
        .limits()
        .longest
        .map_or(MAX_RESERVED_LENGTH, u64::from);
    let longest = longest.min(MAX_RESERVED_LENGTH);
    // A batch may exceed `full_batch`, because a device may round up its number of tokens, and schedulers then fill the difference. Reserve
    // memory for twice as many tokens.
    let mut tokens = 2 * full_batch(costs);
    loop {
        let extents = Extents {
            pairs: tokens * longest.min(tokens),
            longest: longest.min(tokens),
            batch: tokens.div_ceil(MEAN_LENGTH),
            ..Layout::Packed.computed([tokens as u32])
        };
        if costs.bytes(Layout::Packed, &extents) <= batch_bytes {
            match session.reserve(&extents) {
                Err(error) if error.is_out_of_memory() => {
                    tracing::warn!(
                        "no memory was reserved for batches of {tokens} tokens: {error}"
                    );
                }
                done => return done.map(|()| session),
            }
        }
        tokens /= 2;
        if tokens == 0 {
            return Ok(session);
        }
    }
}

/// Runs the scheduler after each change of the queue or the lanes, and submits its batches to the executor.
pub(super) fn run_launch(shared: &Shared, lanes: &[Launcher]) {
    let mut state = shared.lock();
    loop {
        let now = shared.now();
        let lost = state.drop_lost(now, &shared.costs);
        if !lost.is_empty() {
            shared.count_waiting(&state);
            drop(state);
            for (entry, error) in lost {
                if let Some(next) = shared.give_up(entry.lead, error) {
                    shared.enqueue(entry.encoded, next, None);
                }
            }
            state = shared.lock();
            continue;
        }
        let State {
            scheduling,
            scheduler,
            ..
        } = &mut *state;
        let decision = match scheduling.waiting().is_empty() {
            true => Default::default(),
            false => match scheduling.decide(now, &mut **scheduler, &shared.costs) {
                Ok(decision) => {
                    state.record(now, || Happened::Decided(decision.clone()));
                    decision
                }
                Err(mistake) => {
                    let problem = mistake.to_string();
                    tracing::error!("{problem}");
                    let failed = fail_all(&mut state, &ServeError::Internal(problem));
                    drop(state);
                    for (entry, error) in failed {
                        shared.answer(entry.lead, Err(error), None);
                    }
                    state = shared.lock();
                    Default::default()
                }
            },
        };
        let mut refused = Vec::new();
        for (id, refusal) in decision.refuse {
            let metrics = &shared.metrics;
            let counter = match refusal {
                Refusal::Expired => &metrics.expired,
                Refusal::Hopeless => &metrics.hopeless,
                Refusal::TooLarge => &metrics.too_large,
            };
            Metrics::count(counter, 1);
            if let Some(entry) = state.remove(id) {
                let backlog = &state.backlog;
                let retry_after = || {
                    let work = backlog.tenants.all();
                    backlog.time(work, entry.class, &shared.costs)
                };
                let error = ServeError::refused(refusal, entry.lead.index(), retry_after);
                refused.push((entry, error));
            }
        }
        if !decision.run.is_empty() || !refused.is_empty() {
            let batches = decision.run.into_iter().map(|planned| {
                let members = take(&mut state, &planned);
                (planned, members)
            });
            let batches: Vec<_> = batches.collect();
            shared.count_waiting(&state);
            drop(state);
            for (entry, error) in refused {
                shared.answer(entry.lead, Err(error), Some(entry.encoded));
            }
            for (planned, members) in batches {
                let estimate = planned.estimate;
                let Some(lane) = lanes.get(planned.lane) else {
                    continue;
                };
                // Wait for the device's fair lock. Waiting models that have used less of their share go first.
                let turn = lane.seat.as_ref().map(|seat| seat.take(estimate));
                let pending = batch_of(&members).and_then(|batch| lane.pipeline.submit(batch));
                let sent = lane.launched.send(Launched {
                    pending,
                    members,
                    estimate,
                    joins: planned.joins,
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
        let is_idle = state
            .scheduling
            .lanes()
            .iter()
            .all(|lane| lane.in_flight == 0);
        if state.is_over.is_some() && is_idle && state.scheduling.waiting().is_empty() {
            return;
        }
        let wait = decision
            .wake
            .map(|at| Duration::from_micros(at.since(now).0.max(1)));
        // Wake up even if nothing happens, because a deadline may pass.
        let wait = wait.unwrap_or(Duration::from_millis(200));
        state = match shared.changed.wait_timeout(state, wait) {
            Ok((state, _)) => state,
            Err(poisoned) => poisoned.into_inner().0,
        };
    }
}

/// Removes the requests of a batch from the queue, and returns them.
fn take(state: &mut State, planned: &Planned) -> Vec<(u64, Entry)> {
    let members = planned.ids();
    let members = members.filter_map(|id| Some((id, state.remove(id)?)));
    members.collect()
}

/// Removes all queued requests. Returns each request with a copy of `error`.
fn fail_all(state: &mut State, error: &ServeError) -> Vec<(Entry, ServeError)> {
    let ids: Vec<u64> = state.scheduling.waiting().iter().map(|w| w.id).collect();
    let mut failed = Vec::new();
    for id in ids {
        state.scheduling.cancel(id);
        if let Some(entry) = state.remove(id) {
            failed.push((entry, error.clone()));
        }
    }
    failed
}

/// Concatenates the sequences of a batch. The layout that the scheduler planned is ignored, because the executor only runs packed batches.
fn batch_of(members: &[(u64, Entry)]) -> Result<Batch, EngineError> {
    Ok(Encoded::batch(members.iter().map(|(_, e)| &e.encoded))?)
}

/// State of a collect thread, which waits for the results of a device and answers requests.
pub(super) struct Collect {
    pub(super) shared: Arc<Shared>,
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) lane: usize,
    pub(super) output: &'static str,
    pub(super) score: Option<crate::text::Score>,
    pub(super) weights: Option<Weights>,
    /// The mask token, for a model that fills masks. An answer of such a model has the output rows of the input's mask tokens.
    pub(super) mask: Option<u32>,
    /// Memory limit of a batch in bytes. After the device has run out of memory, a lower limit applies for some time ([`RECOVERS`]).
    pub(super) bytes: u64,
}

/// After a lane's memory limit was reduced, each finished batch raises it again by the full limit divided by this number.
pub(super) const RECOVERS: u64 = 256;

impl Weights {
    /// Returns the vocabulary entries of a sequence with nonzero weights, and their weights. `weights` is the model's output, and `ids` are
    /// the sequence's tokens.
    fn of(&self, weights: &[f32], ids: &[u32]) -> (Vec<u32>, Vec<f32>) {
        match self {
            Self::OfEntries => {
                let all = (0_u32..).zip(weights.iter().copied());
                all.filter(|&(_, weight)| weight != 0.0).unzip()
            }
            Self::OfTokens(left_out) => {
                let all = ids.iter().copied().zip(weights.iter().copied());
                let is_one = |&(id, weight): &(u32, f32)| weight != 0.0 && !left_out.contains(&id);
                let mut all: Vec<(u32, f32)> = all.filter(is_one).collect();
                all.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(b.1.total_cmp(&a.1)));
                // Equal entries are adjacent, with their weights in descending order, so this keeps the largest weight of each entry.
                all.dedup_by_key(|(id, _)| *id);
                all.into_iter().unzip()
            }
        }
    }
}

impl Collect {
    pub(super) fn run(&self, results: &Receiver<Launched>) {
        // Time at which the lane finished the previous batch.
        let mut free = self.shared.began;
        for batch in results {
            let Launched {
                pending,
                members,
                estimate,
                joins,
                launched,
                turn,
            } = batch;
            let ids: Vec<u64> = members.iter().map(|(id, _)| *id).collect();
            let metrics = &self.shared.metrics;
            for (_, entry) in &members {
                let waited = launched.duration_since(entry.sent);
                metrics.queue.add(waited.as_secs_f64());
            }
            let outputs = pending.and_then(Pending::wait);
            drop(turn);
            let done = Instant::now();
            // Exclude the time during which the batch waited for the previous batch.
            let took = done - launched.max(std::mem::replace(&mut free, done));
            let seconds = took.as_secs_f64();
            metrics.device.add(seconds);
            if let Some(lane) = metrics.lanes.get(self.lane) {
                lane.seconds.add(seconds);
            }
            let tokens = members.iter().map(|(_, entry)| entry.encoded.ids.len());
            metrics.batch_tokens.add(tokens.sum::<usize>() as f64);
            Metrics::count(&metrics.batches, 1);
            Metrics::count(&metrics.batch_sequences, members.len() as u64);
            let ratio = seconds / estimate.seconds().max(1e-6) * 1e3;
            Metrics::set(&metrics.estimate_ratio, ratio as u64);
            match outputs.and_then(|outputs| self.answers(&members, &outputs)) {
                // Free the lane first, so that the scheduler can run while answers are sent.
                Ok(answers) => {
                    self.finish(ids, joins, Some((estimate, took)));
                    self.answer(members, answers);
                }
                Err(error) => {
                    self.answer_by_halves(members, error);
                    self.finish(ids, joins, None);
                }
            }
        }
    }

    /// Frees the lane of a batch, unless the batch joined another batch, which still occupies the lane. If the batch was successful, its
    /// time updates the device's pace. If the lane's memory limit was lowered, raises the limit by a step.
    pub(super) fn finish(&self, ids: Vec<u64>, joined: bool, took: Option<(Micros, Duration)>) {
        let mut state = self.shared.lock();
        let now = self.shared.now();
        let State {
            scheduling,
            scheduler,
            backlog,
            ..
        } = &mut *state;
        if let Some((estimate, took)) = took {
            backlog.ran(estimate, took);
        }
        scheduling.finished(now, self.lane, &ids, !joined, &mut **scheduler);
        let lane = self.lane;
        let less = scheduling.lanes().get(lane).map(|lane| lane.bytes);
        if let Some(bytes) = less.filter(|&bytes| bytes < self.bytes) {
            let bytes = self.bytes.min(bytes + self.bytes / RECOVERS);
            scheduling.set_bytes(lane, bytes);
            state.record(now, || Happened::Bytes { lane, bytes });
        }
        state.record(now, || Happened::Finished { lane, ids, joined });
        drop(state);
        self.shared.changed.notify_one();
    }

    fn answer(&self, members: Vec<(u64, Entry)>, answers: Vec<Answer>) {
        for ((_, entry), answer) in members.into_iter().zip(answers) {
            Metrics::count(&self.shared.metrics.tokens, answer.tokens as u64);
            self.shared.answer(entry.lead, Ok(answer), None);
        }
    }

    /// Runs the requests of a failed batch again in halves, so that only the request that causes the failure fails.
    pub(super) fn answer_by_halves(&self, members: Vec<(u64, Entry)>, error: EngineError) {
        Metrics::count(&self.shared.metrics.failed_batches, 1);
        let n = members.len();
        if error.is_out_of_memory() {
            let mut state = self.shared.lock();
            let bytes = state
                .scheduling
                .lanes()
                .get(self.lane)
                .map_or(0, |lane| lane.bytes);
            let needed = batch_of(&members).map_or(bytes, |batch| {
                let extents = batch.extents();
                self.shared.costs.bytes(Layout::Packed, &extents)
            });
            let (lane, bytes) = (self.lane, bytes.min(needed) / 4 * 3);
            state.scheduling.set_bytes(lane, bytes);
            let now = self.shared.now();
            state.record(now, || Happened::Bytes { lane, bytes });
        }
        if error.is_device_lost() {
            return self.lose(members, &error);
        }
        if n <= 1 {
            let error = Arc::new(error);
            for (_, entry) in members {
                let error = ServeError::Engine(Arc::clone(&error));
                self.shared.answer(entry.lead, Err(error), None);
            }
            return;
        }
        tracing::warn!("a batch of {n} requests failed and runs again in halves: {error}");
        let mut first = members;
        let second = first.split_off(n / 2);
        for half in [first, second] {
            let outputs = batch_of(&half).and_then(|batch| self.pipeline.submit(batch)?.wait());
            match outputs.and_then(|outputs| self.answers(&half, &outputs)) {
                Ok(answers) => self.answer(half, answers),
                Err(error) => self.answer_by_halves(half, error),
            }
        }
    }

    /// Answers the requests of the failed batch and all waiting requests with an error, because the device is lost.
    fn lose(&self, members: Vec<(u64, Entry)>, error: &EngineError) {
        let gone = ServeError::NotReady { why: LOST };
        let mut state = self.shared.lock();
        if state.is_over != Some(LOST) {
            tracing::error!("the device is lost: {error}");
        }
        state.is_over = Some(LOST);
        let waiting = fail_all(&mut state, &gone);
        self.shared.count_waiting(&state);
        drop(state);
        let members = members.into_iter().map(|(_, entry)| entry);
        for entry in members.chain(waiting.into_iter().map(|(entry, _)| entry)) {
            self.shared.answer(entry.lead, Err(gone.clone()), None);
        }
    }

    fn answers(
        &self,
        members: &[(u64, Entry)],
        outputs: &Outputs,
    ) -> Result<Vec<Answer>, EngineError> {
        outputs.check_finite()?;
        let output = outputs.get(self.output)?;
        let width = output.values.len() / members.len().max(1);
        let score = |x: &f32| self.score.map_or(*x, |score| score.of(*x));
        let rows = output.values.chunks_exact(width.max(1));
        let answers = members.iter().zip(rows).enumerate();
        let answers = answers.map(|(at, ((_, entry), row))| {
            let ids = &entry.encoded.ids;
            let mut answer = Answer {
                values: Vec::new(),
                entries: Vec::new(),
                tokens: ids.len(),
            };
            match (entry.lead.submit().wanted, &self.weights) {
                (OutputKind::AllTokens, _) => {
                    answer.values = outputs.sequence(STATES, at)?.to_vec()
                }
                (OutputKind::Tokens, _) => {
                    let own = outputs.sequence(self.output, at)?;
                    answer.values = match self.mask {
                        None => own.to_vec(),
                        Some(mask) => {
                            let width = own.len() / ids.len().max(1);
                            let rows = ids.iter().zip(own.chunks_exact(width.max(1)));
                            let rows = rows.filter(|(id, _)| **id == mask);
                            rows.flat_map(|(_, row)| row.iter().copied()).collect()
                        }
                    };
                }
                (OutputKind::QueryVectors | OutputKind::DocumentVectors, _) => {
                    let role = entry.lead.submit().wanted.role();
                    let own = outputs.sequence(TOKEN_VECTORS, at)?;
                    let role = role.unwrap_or(TextRole::Document);
                    answer.values = TokenVectors::of(&self.shared.encoder, role, ids, own).values;
                }
                (OutputKind::Several(further), weights) => {
                    answer.values = row.iter().map(score).collect();
                    if let Some(weights) = weights.as_ref().filter(|_| further.sparse) {
                        let own = outputs.sequence(SPARSE, at)?;
                        let (entries, values) = weights.of(own, ids);
                        answer.entries = entries;
                        answer.values.extend(values);
                    }
                    if further.token_vectors {
                        let own = outputs.sequence(TOKEN_VECTORS, at)?;
                        let encoder = &self.shared.encoder;
                        let own = TokenVectors::of(encoder, TextRole::Document, ids, own);
                        answer.values.extend(own.values);
                    }
                }
                (OutputKind::Sparse, Some(weights)) => {
                    let own = outputs.sequence(SPARSE, at)?;
                    (answer.entries, answer.values) = weights.of(own, ids);
                }
                (OutputKind::Logits, _) => answer.values = row.to_vec(),
                _ => answer.values = row.iter().map(score).collect(),
            }
            Ok(answer)
        });
        answers.collect()
    }
}
