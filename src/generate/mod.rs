//! Token generation with continuous batching: requests are admitted while others run, each step computes the next tokens of all running
//! sequences, and a sequence's memory is freed when the sequence ends.
//!
//! A step is one batch: chunks of prompts, and one token of each decoding sequence. Keys and values are stored in blocks of a pool. A
//! request reserves all of its blocks when it is admitted, so a running request never runs out of memory.

mod admit;
mod cache;
mod config;
mod device;
mod error;
mod fill;
mod memory;
mod request;
mod row;
mod source;
mod step;
#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, VecDeque},
    ops::ControlFlow,
};

pub use admit::Admission;
pub use config::{MAX_TOKENS, generation_config, generation_config_of};
use device::DeviceRows;
pub use error::GenerateError;
use fill::Fills;
pub use memory::GeneratorBytes;
pub use request::{
    AdmitError, Event, Failure, Generation, Reason, Request, SamplingParams, Stop, Ticket,
    UnsupportedDraw,
};
use row::{Advanced, Row};
use source::Parts;
pub use step::DecodeStep;

use rayon::prelude::*;

use crate::{
    kernels::cache::BLOCK,
    plan::Blocks,
    program::{NEXT_LOGITS, Program},
    runtime::{
        AllocatorChoice, GraphChoice, LoadedModel, Output,
        batch::{Batch, Limits, Past, Sources},
        cpu::{CpuCache, CpuSession, Threads},
        cuda::{CudaCache, CudaSession, DecodeLoop, Fence},
    },
};

/// Default max number of prompt tokens per step on a CPU. Decoding sequences wait while a step processes these tokens.
const PROMPT_TOKENS: usize = 512;
/// Default max number of prompt tokens per prefill run on a device. Prefill runs and decode steps execute concurrently.
const PROMPT_TOKENS_ON_DEVICE: usize = 2048;

fn default_prompt_tokens(on_device: bool) -> usize {
    match on_device {
        true => PROMPT_TOKENS_ON_DEVICE,
        false => PROMPT_TOKENS,
    }
}

/// Generates several sequences at once. Several generators of one engine can run concurrently.
///
/// On a GPU, a loop on the device decodes sequences and beams. The host adds each prompt except its last token to the KV cache, or the
/// whole prompt if the device is idle. After that, the device decodes without the host, some steps ahead of the events that
/// [`poll`](Self::poll) has returned.
pub struct Generator {
    /// Decode loop of the device. The loop uses the executor's memory, so this field is declared first to be dropped first.
    device: Option<DeviceRows>,
    executor: Executor,
    /// Thread pool; `None` on a GPU.
    threads: Option<Threads>,
    limits: Limits,
    blocks: Blocks,
    block_bytes: u64,
    /// Running requests, in order of admission.
    rows: Vec<Row>,
    fills: Fills,
    /// Events not yet returned by `poll`.
    events: VecDeque<Event>,
    next_ticket: u64,
    /// Maximum number of prompt tokens per step on a CPU, or per prefill run on a device.
    max_prompt_tokens: usize,
    steps: u64,
    parts: Option<Parts>,
}

/// Executor of a generator, and its KV cache.
pub(crate) enum Executor {
    Cpu(Box<CpuSession>, CpuCache),
    Cuda(Box<CudaSession>, CudaCache),
}

impl Executor {
    /// Runs a batch, updates the cache, and returns all outputs.
    fn leave(&mut self, batch: &Batch) -> Result<Vec<Output>, GenerateError> {
        Ok(match self {
            Self::Cpu(session, cache) => session.run_cached(batch, cache)?,
            Self::Cuda(session, cache) => session.run_cached(batch, cache)?,
        })
    }

    /// Returns the logits of each sequence's next token, row-major.
    fn run(&mut self, batch: &Batch) -> Result<Vec<f32>, GenerateError> {
        let outputs = self.leave(batch)?;
        let logits = outputs.into_iter().find(|o| o.name == NEXT_LOGITS);
        logits.map(|o| o.values).ok_or(GenerateError::NotGenerating)
    }

    /// Adds the sequences' tokens to the cache. On a device, returns a fence that other streams can wait for; on a CPU, returns `None`.
    fn fill(&mut self, batch: &Batch) -> Result<Option<Fence>, GenerateError> {
        Ok(match self {
            Self::Cpu(session, cache) => session.run_cached(batch, cache).map(|_| None)?,
            Self::Cuda(session, cache) => Some(session.fill(batch, cache)?),
        })
    }

    /// Makes later work on the executor's stream wait for a fence. Does nothing on a CPU.
    fn wait_behind(&self, fence: &Fence) -> Result<(), GenerateError> {
        if let Self::Cuda(session, _) = self {
            session.wait_behind(fence)?;
        }
        Ok(())
    }
}

/// A loaded model and the settings of its generators.
///
/// Its methods are documented on [`Engine`](crate::Engine), which calls them.
pub(crate) struct GenerationModel<'m> {
    pub(crate) model: &'m LoadedModel,
    pub(crate) limits: Limits,
    pub(crate) plain_launches: bool,
    pub(crate) graphs: GraphChoice,
}

impl GenerationModel<'_> {
    fn program(&self) -> &Program {
        self.model.program()
    }

    pub(crate) fn generator(&self, cache_bytes: u64) -> Result<Generator, GenerateError> {
        let program = self.program();
        check_generating(program)?;
        let block_bytes = program.block_bytes();
        let parts = Parts::of(program);
        // Slots are signed 32-bit numbers.
        let max_blocks = u64::from(i32::MAX as u32 / BLOCK);
        let n_blocks = (cache_bytes / block_bytes.max(1)).min(max_blocks);
        let allocator = AllocatorChoice::default();
        let (device, executor, threads) = match self.model {
            LoadedModel::Cpu(model) => {
                let session = CpuSession::new(model.clone(), &allocator)?;
                let cache = CpuCache::new(program, n_blocks)?;
                let threads = model.threads().clone();
                let executor = Executor::Cpu(Box::new(session), cache);
                (None, executor, Some(threads))
            }
            LoadedModel::Cuda(model) => {
                let (plain, graphs) = (self.plain_launches, self.graphs);
                let session = CudaSession::new(model.clone(), &allocator, plain, graphs)?;
                let cache = CudaCache::new(model, n_blocks)?;
                let part = parts.map_or(0, |parts| parts.decode);
                let device = DecodeLoop::new(&session, &cache, part)?.map(DeviceRows::new);
                (device, Executor::Cuda(Box::new(session), cache), None)
            }
        };
        Ok(Generator {
            device,
            executor,
            max_prompt_tokens: default_prompt_tokens(threads.is_none()),
            threads,
            limits: self.limits,
            blocks: Blocks::new(n_blocks as u32),
            block_bytes,
            rows: Vec::new(),
            fills: Fills::default(),
            events: VecDeque::new(),
            next_ticket: 0,
            steps: 0,
            parts,
        })
    }

    pub(crate) fn has_source(&self) -> bool {
        Parts::of(self.program()).is_some()
    }

    pub(crate) fn generate(
        &self,
        prompts: &[Vec<u32>],
        options: &SamplingParams,
        on_event: impl FnMut(usize, &Event) -> ControlFlow<Stop>,
    ) -> Result<Vec<Generation>, GenerateError> {
        if prompts.is_empty() {
            return Ok(Vec::new());
        }
        let lens: Vec<usize> = prompts.iter().map(Vec::len).collect();
        let mut generator = self.generator(self.cache_bytes_at_most(&lens, options)?)?;
        generator.check_options(options)?;
        let requests = prompts.iter().map(|prompt| Request {
            prompt: prompt.clone(),
            options: options.clone(),
        });
        generator.write_all(requests, on_event)
    }
}

fn check_generating(program: &Program) -> Result<(), GenerateError> {
    let writes = program.outputs.iter().any(|(name, _)| name == NEXT_LOGITS);
    match writes && !program.caches.is_empty() {
        true => Ok(()),
        false => Err(GenerateError::NotGenerating),
    }
}

impl Generator {
    /// Runs all `requests`, each admitted when there is room, and returns their results in order. `on_event` receives each event with the
    /// index of its request, and may stop this request or all requests. If a request is refused or fails, its result has the tokens so far
    /// and the [`problem`](Generation::problem); other requests continue. Events of requests that were admitted before this call are
    /// discarded.
    ///
    /// # Errors
    /// Returns an error if an entire step fails. All requests are then canceled.
    pub fn write_all(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
        mut on_event: impl FnMut(usize, &Event) -> ControlFlow<Stop>,
    ) -> Result<Vec<Generation>, GenerateError> {
        let mut waiting = requests.into_iter().peekable();
        let mut written: Vec<Generation> = Vec::new();
        let mut running: HashMap<Ticket, usize> = HashMap::new();
        while waiting.peek().is_some() || self.is_busy() {
            while let Some(request) = waiting.peek() {
                let index = written.len();
                let problem = match self.admit(request.clone()) {
                    Ok(ticket) => {
                        running.insert(ticket, index);
                        None
                    }
                    // The request waits until running requests have ended.
                    Err(AdmitError::Full { .. }) => break,
                    Err(refused) => Some(refused.into()),
                };
                waiting.next();
                written.push(Generation {
                    problem,
                    ..Generation::default()
                });
            }
            let events = match self.poll() {
                Ok(events) => events,
                Err(error) => {
                    running.keys().for_each(|&ticket| _ = self.cancel(ticket));
                    return Err(error);
                }
            };
            for event in events {
                let ticket = event.ticket();
                let Some(&index) = running.get(&ticket) else {
                    continue;
                };
                written[index].add(&event);
                match on_event(index, &event) {
                    ControlFlow::Continue(()) => {}
                    ControlFlow::Break(Stop::One) => {
                        running.remove(&ticket);
                        self.cancel(ticket);
                    }
                    ControlFlow::Break(Stop::All) => {
                        running.keys().for_each(|&ticket| _ = self.cancel(ticket));
                        written.extend(waiting.map(|_| Generation::default()));
                        return Ok(written);
                    }
                }
            }
        }
        Ok(written)
    }

    /// Cancels a request and frees its memory. Returns `false` if the request has already ended.
    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        let found = self.rows.iter().position(|row| row.ticket == ticket);
        if let Some(at) = found {
            self.remove(at, false);
            let reason = Reason::Cancelled;
            self.events.push_back(Event::Done { ticket, reason });
        }
        found.is_some()
    }

    /// Sets the maximum number of prompt tokens per step on a CPU, or per prefill run on a device. The default is 512 on a CPU and 2,048 on
    /// a device. A small maximum keeps a long prompt from delaying the tokens of other sequences.
    pub fn prompt_tokens_per_step(&mut self, n: usize) {
        self.max_prompt_tokens = n.max(1);
    }

    /// Returns whether a request is running or an event has not been returned yet.
    pub fn is_busy(&self) -> bool {
        !self.rows.is_empty() || !self.events.is_empty()
    }

    /// Returns the KV cache bytes reserved by running requests, and the total.
    pub fn cache_bytes(&self) -> (u64, u64) {
        let bytes = |blocks: u32| u64::from(blocks) * self.block_bytes;
        (bytes(self.blocks.held()), bytes(self.blocks.total()))
    }

    /// Returns the number of steps run so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Computes one step of all running requests and returns its events. On a device, steps are enqueued in advance, and the events of the
    /// oldest enqueued step are returned.
    ///
    /// # Errors
    /// Returns an error if an entire step fails. The requests keep their state, and the next call tries again.
    pub fn poll(&mut self) -> Result<Vec<Event>, GenerateError> {
        if self.device.is_some() {
            self.step_on_device()?;
        } else if !self.rows.is_empty() {
            let threads = self.threads.clone();
            let mut step = || {
                self.encode()?;
                self.step(|_| true)
            };
            // Run token selection in the engine's thread pool, too.
            match threads {
                Some(threads) => threads.run(step)?,
                None => step()?,
            }
        }
        Ok(self.events.drain(..).collect())
    }

    /// Enqueues decode steps and prefill runs on the device, and records the results of finished decode steps.
    fn step_on_device(&mut self) -> Result<(), GenerateError> {
        let Some(device) = &mut self.device else {
            return Ok(());
        };
        // Clear canceled sequences first, because later work may reuse their blocks.
        if let Some(cleared) = device.clear()? {
            self.executor.wait_behind(&cleared)?;
        }
        if self
            .rows
            .iter()
            .any(|row| !row.suits_device() && row.is_ready())
        {
            self.step(|row| !row.suits_device())?;
        }
        self.run_ahead()?;
        // Enqueue the prefill of sources and prompts after the decode steps. The device then runs these steps while the host launches the
        // prefill kernels.
        self.encode()?;
        self.fill_caches()?;
        if self.in_flight() == 0 {
            self.run_ahead()?;
        }
        let is_silent = self.events.is_empty();
        match &mut self.device {
            Some(device) if device.in_flight() > 0 => {
                let advanced = device.receive(&mut self.rows, is_silent)?;
                self.settle(advanced);
                Ok(())
            }
            // No decode step is in flight, but a prefill run may be.
            _ if is_silent => self.fills.wait_for_room(),
            _ => Ok(()),
        }
    }

    /// Moves ready sequences to the device's loop, and enqueues steps of the loop.
    fn run_ahead(&mut self) -> Result<(), GenerateError> {
        if let Some(device) = &mut self.device {
            device.seat(&mut self.rows)?;
            self.steps += device.run_ahead(&mut self.rows)?;
        }
        Ok(())
    }

    /// Returns the number of steps that are enqueued on the device and whose results have not been received.
    fn in_flight(&self) -> usize {
        self.device.as_ref().map_or(0, DeviceRows::in_flight)
    }

    /// Builds a batch from `taken`, which lists pairs `(at, n)`: the next `n` tokens of the row at index `at`.
    fn batch(&self, taken: &[(usize, usize)]) -> Result<Batch, GenerateError> {
        let mut ids = Vec::new();
        let mut lens = Vec::new();
        let mut past = Past {
            blocks: u64::from(self.blocks.total()),
            sources: self.parts.map(|_| Sources::default()),
            ..Past::default()
        };
        for &(at, n) in taken {
            let row = &self.rows[at];
            for lane in &row.lanes {
                ids.extend_from_slice(&lane.tokens[row.cached..row.cached + n]);
                lens.push(n as u32);
                past.cached.push(row.cached as u32);
                past.slots.extend_from_slice(&lane.slots[..row.cached + n]);
                if let (Some(source), Some(all)) = (&row.source, &mut past.sources) {
                    source.append_to(all);
                }
            }
        }
        let batch = Batch::from_packed(ids, &lens)?.with_past(past)?;
        let batch = batch.for_part(self.parts.map_or(0, |parts| parts.decode));
        batch.check(&self.limits)?;
        Ok(batch)
    }

    /// Runs a step of the rows that are `wanted` and ready. The host selects their tokens.
    fn step(&mut self, wanted: fn(&Row) -> bool) -> Result<(), GenerateError> {
        // Each decoding sequence takes one token. In addition, up to `max_prompt_tokens` tokens of prompts are taken, in order of
        // admission.
        let mut prompt_tokens = self.max_prompt_tokens;
        let mut taken: Vec<(usize, usize)> = Vec::with_capacity(self.rows.len());
        for (at, row) in self.rows.iter().enumerate() {
            if !wanted(row) || !row.is_ready() {
                continue;
            }
            let open = row.open();
            let n = match open {
                1 => 1,
                open => {
                    let n = open.min(prompt_tokens);
                    prompt_tokens -= n;
                    n
                }
            };
            if n > 0 {
                taken.push((at, n));
            }
        }
        let batch = self.batch(&taken)?;
        let mut logits = self.executor.run(&batch)?;
        self.steps += 1;
        let width = logits.len() / batch.lens().len();
        let mut rows = logits.chunks_exact_mut(width);
        let mut taken = taken.into_iter().peekable();
        let mut work: Vec<(usize, &mut Row, Vec<&mut [f32]>)> = Vec::new();
        for (at, row) in self.rows.iter_mut().enumerate() {
            let Some((_, n)) = taken.next_if(|&(taken, _)| taken == at) else {
                continue;
            };
            let own: Vec<&mut [f32]> = rows.by_ref().take(row.lanes.len()).collect();
            row.cached += n;
            if row.open() == 0 {
                work.push((at, row, own));
            }
        }
        let advanced: Vec<(usize, Ticket, Advanced)> = work
            .into_par_iter()
            .map(|(at, row, mut own)| {
                let advanced = row.advance(&mut own);
                (at, row.ticket, advanced)
            })
            .collect();
        self.settle(advanced);
        Ok(())
    }

    /// Records the results of a step in row order, and removes the rows that ended.
    fn settle(&mut self, advanced: Vec<(usize, Ticket, Advanced)>) {
        let mut ended = Vec::new();
        for (at, ticket, advanced) in advanced {
            match advanced {
                Ok((events, is_done)) => {
                    self.events.extend(events);
                    if is_done {
                        ended.push(at);
                    }
                }
                Err(problem) => {
                    self.events.push_back(Event::Failed { ticket, problem });
                    ended.push(at);
                }
            }
        }
        ended.sort_unstable();
        for at in ended.into_iter().rev() {
            self.remove(at, true);
        }
    }

    /// Removes a row and frees its blocks. `device_knows` is whether the device's loop has already ended the row.
    fn remove(&mut self, at: usize, device_knows: bool) {
        let row = self.rows.remove(at);
        let of_device = row.device_rows();
        self.blocks.free(row.into_blocks());
        if let (Some(device), Some(of_device)) = (&mut self.device, of_device) {
            device.leave(of_device, device_knows);
        }
    }
}
