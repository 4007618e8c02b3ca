//! Service of a model that computes embeddings or scores: the queue between clients and the executor.

mod admission;
mod joint;
mod lanes;
mod queue;
mod request;
mod tasks;
mod waiter;

use std::{
    sync::{Arc, Condvar, Mutex, mpsc::channel},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

pub use self::request::Reply;
use self::{
    lanes::{Collect, Launcher, Weights, run_launch, session_of},
    queue::{Kept, Shared, State},
    request::Open,
    waiter::{Leader, Ticket, Waiter},
};
use super::{
    Answer, Cache, Lookup, Metrics, ModelHandle, OutputKind, Recorder, ServeError, Share, Submit,
    Text, Tier,
    backlog::{Backlog, Load, Miss},
    cache::{Deep, Key, Role, digest, key},
    submit::{INPUT, SCORE, VALUE},
    tokenize::{Pool, prompt},
    trace::began,
};
use crate::{
    Batch, Engine, EngineError,
    engine::{LOGITS, LateScorer, Pipeline},
    heads::{MASK_LOGITS, TOKEN_LOGITS},
    model::{EMBEDDING, TOKEN_VECTORS},
    names::excerpt,
    schedule::{CostTable, Scheduler, SchedulerState},
    text::{ClassScore, Prompt, TextEncoder, TextRole},
};

/// Texts with fewer bytes are tokenized on the caller's thread, if the request has at most [`FEW`] inputs.
const SHORT: usize = 256;
/// Inputs of token ids with fewer bytes are copied on the caller's thread, because waking another thread would take longer.
const SHORT_IDS: usize = 64 << 10;
const FEW: usize = 4;

/// Name of the output that has a row for each token, before pooling.
pub(super) const STATES: &str = "last_hidden_state";
/// Name of the output for sparse embeddings. Its shape is either `[batch, vocabulary]` (SPLADE, where most weights are 0) or `[tokens, 1]`
/// (BGE-M3, where the weight of a vocabulary entry is the largest weight of its tokens).
pub const SPARSE: &str = "sparse";

/// Outputs with a row for each sequence, in order of preference. A service returns the first of these outputs that the model has.
pub(super) const ROWS: [&str; 3] = [EMBEDDING, LOGITS, SPARSE];

/// Outputs of task heads with a row for each token.
const HEADS: [&str; 2] = [TOKEN_LOGITS, MASK_LOGITS];

/// Reason for refusing requests after a permanent failure of the device.
pub(super) const LOST: &str = "its device was lost, and it is shutting down";

/// Max number of batches in the executor of a device: the running batch and the next batch.
const DEPTH: u8 = 2;

/// Options of a service.
pub struct ServiceChoice {
    pub scheduler: Box<dyn Scheduler>,
    pub costs: CostTable,
    /// Memory for the intermediate tensors of a batch, in bytes.
    pub batch_bytes: u64,
    /// Max estimated time of the queued work. Beyond this time, requests are refused, except requests of tenants that have less than their
    /// share of the queued work.
    pub queue: Duration,
    pub tokenizers: usize,
    /// Handles of the fair locks of the devices, in the order of the engines. Empty if no other model uses the devices.
    pub seats: Vec<ModelHandle>,
    /// Recorder of scheduling events.
    pub trace: Option<Recorder>,
    /// Response cache. Without it, equal requests are computed separately.
    pub cache: Option<Arc<Cache>>,
}

/// A served model that computes embeddings or scores.
pub struct Service {
    shared: Arc<Shared>,
    pool: Pool,
    threads: Vec<JoinHandle<()>>,
    output: &'static str,
    width: usize,
    has_states: bool,
    has_sparse: bool,
    /// Width of the token vectors for late interaction; 0 if there are none.
    token_width: usize,
    late_scorer: LateScorer,
    labels: Vec<String>,
    class_score: ClassScore,
}

impl Service {
    /// Starts the threads of a model that computes embeddings or scores. All engines have the same checkpoint, each on its own device, and
    /// share one queue.
    ///
    /// # Errors
    /// Returns an error if the model has none of the outputs that a service returns, if one of its files cannot be read, if a first small
    /// batch fails, or if the system cannot start threads.
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
        let known = ROWS.into_iter().chain(HEADS).chain([TOKEN_VECTORS]);
        let output = known.into_iter().find(|name| names().any(|n| n == *name));
        let output = output.ok_or_else(|| EngineError::NoOutput {
            name: EMBEDDING.to_owned(),
            known: names().map(str::to_owned).collect(),
        })?;
        let has_states = names().any(|name| name == STATES);
        let kept = match choice.cache {
            Some(cache) => Some(Kept {
                cache,
                model: {
                    let folder = encoder.folder();
                    let prompt = folder.prompt(Prompt::Default)?;
                    // The program and the files are the same for all adapters, so the digest also depends on the task of the adapter.
                    let task = folder.adapter().unwrap_or_default();
                    digest(engine, folder.root_files(), output, [prompt, task])?
                },
                joined: Arc::default(),
            }),
            None => None,
        };
        let mut sessions = Vec::new();
        for engine in [engine].into_iter().chain(others) {
            sessions.push(session_of(engine, &choice.costs, choice.batch_bytes)?);
        }
        let session = sessions.first_mut().expect("there is an engine");
        const N: u32 = 4;
        let ids = (0..N)
            .map(|i| engine.limits().token_id(u64::from(i) + 1))
            .collect();
        let batch = Batch::from_packed(ids, &[N])?.with_required_ends(&engine.limits());
        let outputs = session.run(&batch)?;
        let token_width = outputs.get(TOKEN_VECTORS).map_or(0, |all| all.values.len()) / N as usize;
        let width = match HEADS.contains(&output) || output == TOKEN_VECTORS {
            true => outputs.get(output)?.values.len() / N as usize,
            false => outputs.get(output)?.values.len(),
        };
        let late_scorer = engine.late_scorer(encoder.folder().late_score());
        let vocabulary = engine.limits().vocabulary as usize;
        let weights = match outputs.get(SPARSE).map(|output| output.values.len()) {
            Ok(n) if n == vocabulary => Some(Weights::OfEntries),
            Ok(_) => Some(Weights::OfTokens(encoder.unweighed()?.into())),
            Err(_) => None,
        };
        let has_sparse = weights.is_some();
        let score = (output == LOGITS).then(|| {
            let folder = encoder.folder();
            folder.score(width as u64)
        });
        let labels = match output {
            MASK_LOGITS => Vec::new(),
            _ => encoder.folder().labels(width),
        };
        let mask = encoder.named_token("mask_token")?;
        let class_score = match output == LOGITS {
            true => encoder.folder().class_score(width)?,
            false => ClassScore::Identity,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                scheduling: SchedulerState::new(&vec![choice.batch_bytes; 1 + others.len()], DEPTH),
                scheduler: choice.scheduler,
                entries: Default::default(),
                joints: Vec::new(),
                backlog: Backlog::new(choice.tokenizers, 1 + others.len()),
                is_over: None,
                trace: choice.trace.map(|mut trace| {
                    trace.record(began(vec![choice.batch_bytes; 1 + others.len()], DEPTH));
                    trace
                }),
            }),
            changed: Condvar::new(),
            costs: choice.costs,
            queue: choice.queue,
            began: Instant::now(),
            limits: engine.limits(),
            metrics: Metrics::of([engine].into_iter().chain(others)),
            encoder,
            kept,
        });
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
                weights: weights.clone(),
                mask: mask.filter(|_| output == MASK_LOGITS),
                bytes: choice.batch_bytes,
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
            token_width,
            late_scorer,
            labels,
            class_score,
        })
    }

    /// Returns the width of an embedding, or the number of labels. For an output with a row for each token, returns the width of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns the scorer for token vectors, which uses the device of the first engine.
    pub fn late_scorer(&self) -> &LateScorer {
        &self.late_scorer
    }

    /// Returns the names of the model's labels.
    pub fn labels(&self) -> &[String] {
        &self.labels
    }

    /// Returns the function that turns logits into the scores of a classifier.
    pub fn class_score(&self) -> ClassScore {
        self.class_score
    }

    /// Returns the index of a prompt among the prompts of the model's folder: the prompt with the first of `names` that the folder defines.
    ///
    /// # Errors
    /// Returns an error if there is no such prompt, or if texts with this prompt need a route of a Router that is not loaded. `param` is
    /// the field that names the prompt.
    pub fn prompt(&self, param: &'static str, names: &[&str]) -> Result<usize, ServeError> {
        let (index, _) = prompt(self.encoder().folder(), param, names)?;
        Ok(index)
    }

    /// Checks that the loaded adapter is the one for a task. `names` are the possible names of the task's adapter. `param` is the field
    /// that contains the task.
    ///
    /// # Errors
    /// Returns an error if the checkpoint has an adapter with one of these names, but another adapter or none is loaded.
    pub fn check_adapter(&self, param: &'static str, names: &[&str]) -> Result<(), ServeError> {
        let folder = self.encoder().folder();
        let has = |name: &&&str| folder.adapters().iter().any(|own| own == **name);
        match (names.iter().find(has), folder.adapter()) {
            (None, _) => Ok(()),
            (Some(name), Some(loaded)) if *name == loaded => Ok(()),
            (Some(name), loaded) => {
                let loaded = match loaded {
                    Some(loaded) => format!("the adapter for `{loaded}`"),
                    None => "no adapter".to_owned(),
                };
                let problem = format!(
                    "`{param}` is `{}`, whose adapter is `{name}`, and the model was loaded with {loaded}; start the server with --task {name}",
                    excerpt(names.first().unwrap_or(name))
                );
                Err(ServeError::Invalid { param, problem })
            }
        }
    }

    /// Returns whether the model's folder defines prompts.
    pub fn has_prompts(&self) -> bool {
        !self.encoder().folder().prompt_names().is_empty()
    }

    /// Returns the max number of tokens of a text: the smaller of the model's positions and the folder's limit; `None` if there is neither.
    /// Inputs of token ids are limited only by the positions.
    pub fn max_text_tokens(&self) -> Option<usize> {
        let positions = self.shared.limits.longest.map(|n| n as usize);
        let limit = match self.encoder().folder().late_interaction() {
            Some(late) => Some(late.length(TextRole::Document)),
            None => self.encoder().max_tokens(),
        };
        positions.into_iter().chain(limit).min()
    }

    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    pub fn encoder(&self) -> &TextEncoder {
        &self.shared.encoder
    }

    /// Queues the inputs of a request. Each input is computed independently and has its own reply.
    ///
    /// # Errors
    /// Returns an error if an input is an empty text or has invalid token ids, if the model does not compute the requested output, if the
    /// queued work takes too long, if the service is shutting down, or if its device is lost. With [`Submit::is_joint`], also returns an
    /// error if the inputs together cannot be answered before the deadline. The reply of an input returns any other error of that input.
    pub fn submit(&self, inputs: Vec<Text>, submit: Submit) -> Result<Vec<Reply>, ServeError> {
        self.submit_within(inputs, submit, &Share::unlimited())
    }

    /// Returns the number of bytes of memory that `inputs` inputs take until they are answered. This includes answers whose size is known
    /// in advance.
    pub fn memory(&self, inputs: usize, wanted: OutputKind) -> u64 {
        let answer = match wanted {
            OutputKind::AllTokens
            | OutputKind::Sparse
            | OutputKind::Tokens
            | OutputKind::QueryVectors
            | OutputKind::DocumentVectors
            | OutputKind::Several(_) => 0,
            OutputKind::Usual | OutputKind::Logits if self.is_scoring() => {
                SCORE * self.width as u64
            }
            OutputKind::Usual | OutputKind::Logits => VALUE * self.width as u64,
        };
        (INPUT + answer).saturating_mul(inputs as u64)
    }

    /// Like [`submit`](Self::submit), but charges the memory of answers whose size is not known in advance to `share`.
    ///
    /// # Errors
    /// Returns the errors of `submit`.
    pub fn submit_within(
        &self,
        inputs: Vec<Text>,
        submit: Submit,
        share: &Arc<Share>,
    ) -> Result<Vec<Reply>, ServeError> {
        for (index, text) in inputs.iter().enumerate() {
            self.check(index, text)?;
        }
        if submit.wanted == OutputKind::AllTokens && !self.has_states {
            let problem = "the model was not loaded for the vectors of all tokens; start the server with --all-tokens, or request embeddings";
            return Err(ServeError::invalid("model", problem));
        }
        self.check_vectors(submit.wanted)?;
        let sent = Instant::now();
        let shared = &self.shared;
        let mut replies = Vec::with_capacity(inputs.len());
        // Inputs whose answers are not in the memory tier of the cache, with their keys and the clients that wait for them.
        let mut left: Vec<(Text, Option<Key>, Waiter)> = Vec::new();
        for (index, text) in inputs.into_iter().enumerate() {
            let (sender, answer) = oneshot::channel();
            let kept = shared.kept.as_ref();
            let key = kept.map(|kept| key(&kept.model, &text, submit));
            replies.push(Reply {
                answer,
                ticket: Arc::new(Ticket::of(&submit, sent)),
                key: None,
                shared: Arc::clone(shared),
                is_answered: false,
                open: None,
            });
            let waiter = Waiter {
                answer: sender,
                index,
                submit,
                sent,
                share: Arc::clone(share),
                load: Load::default(),
                joint: None,
            };
            if let (Some(kept), Some(key)) = (kept, &key)
                && let Some(answer) = kept.cache.in_memory(key)
            {
                shared.metrics.cache.add(Tier::Memory, Lookup::Hit);
                waiter.give(&answer);
                continue;
            }
            left.push((text, key, waiter));
        }
        let is_deep = shared.kept.as_ref().is_some_and(|k| k.cache.is_deep());
        let is_short = |text: &Text| match text {
            Text::Ids(_) | Text::Encoded(_) => text.bytes() < SHORT_IDS,
            Text::One(_) | Text::Prompted(..) | Text::Pair(..) => text.bytes() < SHORT,
        };
        let is_short = left.len() <= FEW && left.iter().all(|(text, ..)| is_short(text));
        let is_inline = is_short && !is_deep;
        let mut joint = None;
        if !left.is_empty() {
            let mut state = shared.lock();
            if let Some(why) = state.is_over {
                return Err(ServeError::NotReady { why });
            }
            let loads = self.loads(&state.backlog, left.iter().map(|(text, ..)| text));
            joint = self.admit(&mut state, &loads, submit)?;
            if !is_inline {
                let tenants = &mut state.backlog.tenants;
                tenants.change(submit.tenant, |work| {
                    for &load in &loads {
                        work.add_untokenized(submit.class, load);
                    }
                });
                if let Some(joint) = &joint {
                    loads.iter().for_each(|&load| joint.add_untokenized(load));
                }
            }
            for ((.., waiter), load) in left.iter_mut().zip(loads) {
                waiter.load = load;
                waiter.joint = joint.clone();
                replies[waiter.index].open = Some(Open::new(shared, &mut state, submit.tenant));
            }
        }
        for (text, key, waiter) in left {
            let (n_bytes, load) = (text.bytes(), waiter.load);
            let reply = &mut replies[waiter.index];
            let mut lead = Leader {
                waiter: None,
                ticket: Arc::clone(&reply.ticket),
                coalesced: None,
            };
            lead.waiter = match (&shared.kept, key) {
                (Some(kept), Some(key)) => {
                    reply.key = Some(key);
                    // Join a computation in progress only if it ends no later than a separate computation for this request would.
                    let serves = |ahead: &Ticket| ahead.goes_before(&lead.ticket);
                    let waiter = match kept.joined.join(key, &lead.ticket, waiter, serves) {
                        Role::Follower(ticket) => {
                            shared.metrics.cache.add(Tier::Memory, Lookup::Joined);
                            reply.ticket = ticket;
                            if !is_inline {
                                shared.is_tokenized(submit, load, joint.as_deref());
                            }
                            continue;
                        }
                        Role::Leader(waiter) => {
                            lead.coalesced = Some((key, Arc::clone(&kept.joined)));
                            waiter
                        }
                        Role::Alone(waiter) => waiter,
                    };
                    shared.metrics.cache.add(Tier::Memory, Lookup::Miss);
                    Some(waiter)
                }
                _ => Some(waiter),
            };
            if is_inline {
                shared.tokenize(&text, lead);
                continue;
            }
            let shared = Arc::clone(shared);
            let joint = joint.clone();
            let tokenize = {
                let (shared, joint) = (Arc::clone(&shared), joint.clone());
                move |lead| {
                    shared.is_tokenized(submit, load, joint.as_deref());
                    shared.tokenize(&text, lead);
                }
            };
            let Some(key) = key.filter(|_| is_deep) else {
                self.pool.run(submit, n_bytes, move || tokenize(lead));
                continue;
            };
            let pool = self.pool.clone();
            self.pool.run(submit, n_bytes, move || {
                let Some(kept) = &shared.kept else {
                    return;
                };
                let then = {
                    let (shared, joint) = (Arc::clone(&shared), joint);
                    move |found: Option<Arc<Answer>>, deep| {
                        if let Deep::Shared(lookup) = deep {
                            shared.metrics.cache.add(Tier::Shared, lookup);
                        }
                        match (found, deep) {
                            (Some(answer), _) => {
                                shared.is_tokenized(submit, load, joint.as_deref());
                                shared.answer_kept(lead, &answer);
                            }
                            (None, Deep::File) => tokenize(lead),
                            // Do not tokenize on the thread that queries the shared server.
                            (None, Deep::Shared(_)) => {
                                pool.run(submit, n_bytes, move || tokenize(lead));
                            }
                        }
                    }
                };
                kept.cache.look_deep(key, &shared.metrics.cache, then);
            });
        }
        Ok(replies)
    }

    /// Returns how long the oldest input in the queue has been waiting.
    pub fn oldest(&self) -> Duration {
        let now = self.shared.now();
        let state = self.shared.lock();
        let first = state.scheduling.waiting().first();
        first.map_or(Duration::ZERO, |first| {
            Duration::from_micros(now.since(first.arrived).0)
        })
    }

    /// Returns the response cache, if there is one.
    pub fn cache(&self) -> Option<&Cache> {
        self.shared.kept.as_ref().map(|kept| &*kept.cache)
    }

    /// Stops accepting requests. Queued requests are still answered.
    pub fn drain(&self) {
        let why = "it is shutting down";
        self.shared.lock().is_over.get_or_insert(why);
        self.shared.changed.notify_one();
    }

    /// Makes the service behave as if its device were lost.
    #[cfg(test)]
    pub(crate) fn lose_device(&self) {
        self.shared.lock().is_over = Some(LOST);
    }

    /// Returns whether a device is lost, which means that it can run no more batches.
    pub fn is_lost(&self) -> bool {
        self.shared.lock().is_over == Some(LOST)
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

#[cfg(test)]
mod tests;
