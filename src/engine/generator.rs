//! Writing: requests are admitted while others run, each step computes the next tokens of all, and a sequence's memory is
//! free again when it ends.
//!
//! A step is one batch: prompts in parts, and one token of each sequence that goes on. The keys and values of what is there
//! lie in blocks of a pool, which are reserved when a request is admitted, so that nothing that runs is ever out of memory.

mod admit;
mod breakdown;
mod cache;
mod config;
mod device;
mod fill;
mod memory;
mod request;
mod row;
mod source;
#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, VecDeque},
    ops::ControlFlow,
};

pub use admit::Admission;
pub use breakdown::DecodeStep;
pub use config::{MAX_TOKENS, generation_config};
use device::DeviceRows;
use fill::Fills;
pub use memory::GeneratorBytes;
pub use request::{
    AdmitError, Event, Failure, Generate, Reason, Request, Stop, Ticket, UnsupportedDraw, Written,
};
use row::{Advanced, Row};
use source::Parts;

use rayon::prelude::*;

use super::{Backend, Engine, EngineError};
use crate::{
    kernels::cache::BLOCK,
    plan::Blocks,
    program::{NEXT_LOGITS, Program},
    runtime::{
        AllocatorChoice, Output,
        batch::{Batch, Limits, Past, Sources},
        cpu::{CpuCache, CpuSession, Threads},
        cuda::{CudaCache, CudaSession, DecodeLoop, Fence},
    },
};

/// Tokens of prompts that a step on a CPU takes at most, where nobody says otherwise. Who writes waits for them.
const PROMPT_TOKENS: usize = 512;
/// The same on a device, which reads prompts beside the steps.
const PROMPT_TOKENS_ON_DEVICE: usize = 2048;

fn usual_prompt_tokens(on_device: bool) -> usize {
    match on_device {
        true => PROMPT_TOKENS_ON_DEVICE,
        false => PROMPT_TOKENS,
    }
}

/// Writes several sequences at once. Those of one engine run beside each other.
///
/// On a GPU sequences and beams are decoded by a loop on the device: each is asked for its prompt's tokens but the last, and from
/// then on the device goes on by itself, some steps ahead of what [`poll`](Self::poll) has returned.
pub struct Generator {
    /// Sequences on a device; before the executor, whose memory it uses.
    device: Option<DeviceRows>,
    executor: Executor,
    /// Where a CPU computes.
    threads: Option<Threads>,
    limits: Limits,
    blocks: Blocks,
    block_bytes: u64,
    /// In the order in which they were admitted.
    rows: Vec<Row>,
    fills: Fills,
    /// Events that were not polled yet.
    events: VecDeque<Event>,
    next_ticket: u64,
    /// Tokens of prompts that a step takes at most.
    most_prompt_tokens: usize,
    steps: u64,
    parts: Option<Parts>,
}

enum Executor {
    Cpu(Box<CpuSession>, CpuCache),
    Cuda(Box<CudaSession>, CudaCache),
}

impl Executor {
    /// Runs a batch for what it leaves in the cache, and its outputs.
    fn leave(&mut self, batch: &Batch) -> Result<Vec<Output>, EngineError> {
        Ok(match self {
            Self::Cpu(session, cache) => session.run_cached(batch, cache)?,
            Self::Cuda(session, cache) => session.run_cached(batch, cache)?,
        })
    }

    /// The logits of the next token of each sequence, one row after another.
    fn run(&mut self, batch: &Batch) -> Result<Vec<f32>, EngineError> {
        let outputs = self.leave(batch)?;
        let logits = outputs.into_iter().find(|o| o.name == NEXT_LOGITS);
        logits.map(|o| o.values).ok_or(EngineError::NotGenerating)
    }

    /// Adds the sequences' tokens to the cache. On a device there is a fence behind them, for what comes on another stream.
    fn fill(&mut self, batch: &Batch) -> Result<Option<Fence>, EngineError> {
        Ok(match self {
            Self::Cpu(session, cache) => session.run_cached(batch, cache).map(|_| None)?,
            Self::Cuda(session, cache) => Some(session.fill(batch, cache)?),
        })
    }

    /// Lets what comes wait for a fence.
    fn wait_behind(&self, fence: &Fence) -> Result<(), EngineError> {
        if let Self::Cuda(session, _) = self {
            session.wait_behind(fence)?;
        }
        Ok(())
    }
}

impl Engine {
    /// A generator with `cache_bytes` for the keys and values of what runs at once, rounded down to whole blocks.
    ///
    /// # Errors
    /// An engine that was not built by [`Builder::generating`](super::Builder::generating), and memory that cannot be had.
    pub fn generator(&self, cache_bytes: u64) -> Result<Generator, EngineError> {
        let program = self.program();
        check_generating(program)?;
        let block_bytes = program.block_bytes();
        let parts = Parts::of(program);
        // Slots have 32 bits, one of them for the sign.
        let most = u64::from(i32::MAX as u32 / BLOCK);
        let n_blocks = (cache_bytes / block_bytes.max(1)).min(most);
        let (device, executor) = match &self.backend {
            Backend::Cpu(model) => {
                let session = CpuSession::new(model.clone(), &AllocatorChoice::default())?;
                let cache = CpuCache::new(program, n_blocks)?;
                (None, Executor::Cpu(Box::new(session), cache))
            }
            Backend::Cuda(model) => {
                let plain = self.plain_launches;
                let allocator = AllocatorChoice::default();
                let session = CudaSession::new(model.clone(), &allocator, plain, self.graphs)?;
                let cache = CudaCache::new(model, n_blocks)?;
                let part = parts.map_or(0, |parts| parts.decode);
                let device = DecodeLoop::new(&session, &cache, part)?.map(DeviceRows::new);
                (device, Executor::Cuda(Box::new(session), cache))
            }
        };
        Ok(Generator {
            device,
            executor,
            threads: self.cpu_threads(),
            limits: self.limits,
            blocks: Blocks::new(n_blocks as u32),
            block_bytes,
            rows: Vec::new(),
            fills: Fills::default(),
            events: VecDeque::new(),
            next_ticket: 0,
            most_prompt_tokens: usual_prompt_tokens(matches!(self.backend, Backend::Cuda(_))),
            steps: 0,
            parts,
        })
    }

    /// The threads that a CPU runs on.
    fn cpu_threads(&self) -> Option<Threads> {
        match &self.backend {
            Backend::Cpu(model) => Some(model.threads().clone()),
            Backend::Cuda(_) => None,
        }
    }

    /// Whether the model writes from a source, as one that translates, and not on from a prompt.
    pub fn has_source(&self) -> bool {
        Parts::of(self.program()).is_some()
    }

    /// Writes on from each prompt, as many at once as [`cache_bytes_at_most`](Self::cache_bytes_at_most) has room for, and returns
    /// what was written, in the order of the prompts; see [`Generator::write_all`].
    ///
    /// # Errors
    /// Options that no prompt can be written on by, memory that cannot be had, and a step that fails as a whole.
    pub fn generate(
        &self,
        prompts: &[Vec<u32>],
        options: &Generate,
        on_event: impl FnMut(usize, &Event) -> ControlFlow<Stop>,
    ) -> Result<Vec<Written>, EngineError> {
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

fn check_generating(program: &Program) -> Result<(), EngineError> {
    let writes = program.outputs.iter().any(|(name, _)| name == NEXT_LOGITS);
    match writes && !program.caches.is_empty() {
        true => Ok(()),
        false => Err(EngineError::NotGenerating),
    }
}

impl Generator {
    /// Writes all of `requests`, each admitted when there is room, and returns what was written, in their order. `on_event` sees
    /// each event as it comes, with the number of its request, and may end that request or all. What a request that is refused or
    /// fails has written is in its place with the [`problem`](Written::problem); the others go on. The generator runs nothing
    /// else meanwhile.
    ///
    /// # Errors
    /// A step that fails as a whole.
    pub fn write_all(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
        mut on_event: impl FnMut(usize, &Event) -> ControlFlow<Stop>,
    ) -> Result<Vec<Written>, EngineError> {
        let mut waiting = requests.into_iter().peekable();
        let mut written: Vec<Written> = Vec::new();
        let mut running: HashMap<Ticket, usize> = HashMap::new();
        while waiting.peek().is_some() || self.is_busy() {
            while let Some(request) = waiting.peek() {
                let index = written.len();
                let problem = match self.admit(request.clone()) {
                    Ok(ticket) => {
                        running.insert(ticket, index);
                        None
                    }
                    // Others end first.
                    Err(AdmitError::Full { .. }) => break,
                    Err(refused) => Some(refused.into()),
                };
                waiting.next();
                written.push(Written {
                    problem,
                    ..Written::default()
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
                written[index].take(&event);
                match on_event(index, &event) {
                    ControlFlow::Continue(()) => {}
                    ControlFlow::Break(Stop::One) => {
                        running.remove(&ticket);
                        self.cancel(ticket);
                    }
                    ControlFlow::Break(Stop::All) => {
                        running.keys().for_each(|&ticket| _ = self.cancel(ticket));
                        written.extend(waiting.map(|_| Written::default()));
                        return Ok(written);
                    }
                }
            }
        }
        Ok(written)
    }

    /// Ends a request; its memory is free at once. `false` where it has ended already.
    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        let found = self.rows.iter().position(|row| row.ticket == ticket);
        if let Some(at) = found {
            self.remove(at, false);
            let reason = Reason::Cancelled;
            self.events.push_back(Event::Done { ticket, reason });
        }
        found.is_some()
    }

    /// Lets a step, or a run that a device reads prompts by beside its steps, take at most so many tokens of prompts (by default
    /// 512 on a CPU and 2,048 on a device), so that those that wait for their next token do not wait for a long prompt.
    pub fn prompt_tokens_per_step(&mut self, n: usize) {
        self.most_prompt_tokens = n.max(1);
    }

    /// Whether a request runs, or an event waits.
    pub fn is_busy(&self) -> bool {
        !self.rows.is_empty() || !self.events.is_empty()
    }

    /// Bytes of the KV cache that running requests have, of all that there are.
    pub fn cache_bytes(&self) -> (u64, u64) {
        let bytes = |blocks: u32| u64::from(blocks) * self.block_bytes;
        (bytes(self.blocks.held()), bytes(self.blocks.total()))
    }

    /// Steps so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Computes one step of all that run, and returns what it gave.
    ///
    /// # Errors
    /// A step that fails as a whole: its requests are where they were, and the next poll tries again.
    pub fn poll(&mut self) -> Result<Vec<Event>, EngineError> {
        if self.device.is_some() {
            self.step_on_device()?;
        } else if !self.rows.is_empty() {
            let threads = self.threads.clone();
            let mut step = || {
                self.encode()?;
                self.step(|_| true)
            };
            // The rules and draws of a step are shared out as its products are.
            match threads {
                Some(threads) => threads.run(step)?,
                None => step()?,
            }
        }
        Ok(self.events.drain(..).collect())
    }

    /// Keeps the device at work, and takes what it has computed.
    fn step_on_device(&mut self) -> Result<(), EngineError> {
        let Some(device) = &mut self.device else {
            return Ok(());
        };
        // First: what follows may use the blocks of sequences that were cancelled.
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
        // Behind: the device has steps to go on with while the host launches these, kernel by kernel.
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
            // There is nothing but prompts that are read.
            _ if is_silent => self.fills.wait_for_place(),
            _ => Ok(()),
        }
    }

    /// Gives the device's loop what it can go on with, and steps.
    fn run_ahead(&mut self) -> Result<(), EngineError> {
        if let Some(device) = &mut self.device {
            device.seat(&mut self.rows)?;
            self.steps += device.run_ahead(&mut self.rows)?;
        }
        Ok(())
    }

    /// Steps that are on their way on a device.
    fn in_flight(&self) -> usize {
        self.device.as_ref().map_or(0, DeviceRows::in_flight)
    }

    /// The batch of so many next tokens of rows.
    fn batch(&self, taken: &[(usize, usize)]) -> Result<Batch, EngineError> {
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
                    source.attended(all);
                }
            }
        }
        let batch = Batch::from_packed(ids, &lens)?.with_past(past)?;
        let batch = batch.for_part(self.parts.map_or(0, |parts| parts.decode));
        batch.check(&self.limits)?;
        Ok(batch)
    }

    /// A step of the rows that are `wanted`, whose tokens the host chooses.
    fn step(&mut self, wanted: fn(&Row) -> bool) -> Result<(), EngineError> {
        // Sequences that go on take a token each; what prompts may take is shared in the order of admission.
        let mut prompt_tokens = self.most_prompt_tokens;
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
        let mut behind = logits.chunks_exact_mut(width);
        let mut taken = taken.into_iter().peekable();
        let mut work: Vec<(usize, &mut Row, Vec<&mut [f32]>)> = Vec::new();
        for (at, row) in self.rows.iter_mut().enumerate() {
            let Some((_, n)) = taken.next_if(|&(taken, _)| taken == at) else {
                continue;
            };
            let own: Vec<&mut [f32]> = behind.by_ref().take(row.lanes.len()).collect();
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

    /// Takes what a step gave of rows, in their order, and frees what those have that ended.
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

    /// Ends a row, whose blocks are free then; `device_knows` where a device that decodes it has ended it, too.
    fn remove(&mut self, at: usize, device_knows: bool) {
        let row = self.rows.remove(at);
        let of_device = row.device_rows();
        self.blocks.free(row.into_blocks());
        if let (Some(device), Some(of_device)) = (&mut self.device, of_device) {
            device.leave(of_device, device_knows);
        }
    }
}
