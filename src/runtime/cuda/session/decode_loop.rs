//! Steps of one token of each sequence, which follow one another on the device without the host.
//!
//! What a step reads of its sequences lies in device memory, and its last kernel writes it for the next one
//! ([`Advance`]). So a step is one CUDA graph, and several are on the stream before the host knows what the first has chosen.
//! The tokens come by a ring in the host's memory, which the host polls.
//!
//! Steps have a stream of their own, of the highest priority: one that writes for few sequences waits for latency more than for the
//! device's units, so that prompts are read beside it ([`CudaSession::fill`]). [`Fence`]s order the two where they use the
//! same blocks of the cache.

mod edit;
mod ring;
mod table;

use std::sync::Arc;

use cudarc::driver::{CudaStream, result};

pub use self::{edit::Entry, ring::ChosenRows, table::LoopRoom};
use self::{
    edit::Upload,
    ring::{RING_BYTES, RING_STEPS, RING_VALUES, Ring},
    table::{Table, found_bytes, move_rows},
};
use super::{
    CudaCache, CudaSession, Fence, advise,
    launcher::{Bound, Launcher},
};
use crate::{
    kernels::decoding::{Advance, Chosen},
    program::{Buckets, TensorIndex},
    runtime::{
        AllocatorChoice, GraphChoice, Planner,
        cuda::{
            device::Device,
            error::{CudaError, During},
            graphs::{Graphs, Site, THREAD, capture},
            memory::{Chunks, Pinned},
            model::Start,
        },
        workspace::{NoRoom, Workspace},
    },
    search::Hypothesis,
    tensor::Extents,
};

/// The loop of one generator.
pub struct DecodeLoop {
    launcher: Launcher,
    /// Memory of its own, so that batches of other shapes in between move nothing that a graph names.
    workspace: Workspace<Chunks>,
    /// By what chooses tokens behind a step.
    graphs: [Graphs; 3],
    buckets: Buckets,
    replays: bool,
    logits: TensorIndex,
    /// The part of the model that writes.
    part: u32,
    /// Address and blocks of the KV cache, the spare one included.
    cache: (u64, u64),
    table: Option<Table>,
    ring: Ring,
    uploads: Vec<Upload>,
    enqueued: u64,
    received: u64,
    /// Rows of each step that is on its way.
    in_flight: std::collections::VecDeque<usize>,
}

// SAFETY: handles and memory of one device, which any thread may use, one at a time.
unsafe impl Send for DecodeLoop {}

/// What chooses tokens behind a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// No sequence is a beam.
    Choice,
    /// All are.
    Search,
    Both,
}

impl Behind {
    /// For sequences that are beams or are not; at least one of the two.
    pub fn of(has_singles: bool, has_beams: bool) -> Self {
        match (has_singles, has_beams) {
            (true, true) => Self::Both,
            (false, true) => Self::Search,
            _ => Self::Choice,
        }
    }
}

impl DecodeLoop {
    /// A loop of a part of the program beside a session's stream, over the sequences in `cache`. `None` where the program writes no
    /// tokens.
    ///
    /// # Errors
    /// Memory that could not be had.
    pub fn new(
        session: &CudaSession,
        cache: &CudaCache,
        part: u32,
    ) -> Result<Option<Self>, CudaError> {
        let model = &session.launcher.model;
        let program = model.program();
        let (Some(logits), true) = (program.next_logits(), model.decoding.is_some()) else {
            return Ok(None);
        };
        let allocator = AllocatorChoice::default();
        let stream = first_stream(&model.device)?;
        let memory = Pinned::new(&model.device, RING_BYTES as usize)?;
        let address = memory.device_address()?;
        Ok(Some(Self {
            launcher: Launcher {
                model: Arc::clone(model),
                stream: Arc::clone(&stream),
                start: session.launcher.start,
            },
            workspace: Workspace::new(
                Planner::new(program, &allocator)?,
                Chunks::new(model.device.clone(), stream),
            ),
            graphs: Default::default(),
            buckets: Buckets::of(program),
            part,
            replays: session.replay != GraphChoice::Off,
            logits: logits.0,
            cache: (cache.memory.start(), cache.blocks),
            table: None,
            ring: Ring { memory, address },
            uploads: Vec::new(),
            enqueued: 0,
            received: 0,
            in_flight: Default::default(),
        }))
    }

    /// A fence behind all steps and edits so far.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn fence(&self) -> Result<Fence, CudaError> {
        Fence::behind(&self.launcher.stream)
    }

    /// Lets the edits and steps to come wait for a fence of another stream.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn wait_behind(&self, fence: &Fence) -> Result<(), CudaError> {
        fence.hold(&self.launcher.stream)
    }

    /// Steps that are on their way.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether there is so much room.
    pub fn has_room(&self, wanted: LoopRoom) -> bool {
        self.table.as_ref().is_some_and(|Table { room, .. }| {
            room.rows >= wanted.rows
                && room.width >= wanted.width
                && room.source_width >= wanted.source_width
        })
    }

    /// Gives sequences other rows: each of `moves` goes from a row to one that is no later, in the order of the rows, and all
    /// other rows are empty then. Makes as much room as is wanted. No step may be on its way.
    ///
    /// # Errors
    /// Memory that could not be had, and failures of the driver; sequences are where they were then.
    pub fn relocate(
        &mut self,
        wanted: LoopRoom,
        moves: &[(usize, usize)],
    ) -> Result<(), CudaError> {
        let grown = match self.has_room(wanted) {
            true => None,
            false => Some(self.larger(wanted)?),
        };
        // Earlier edits may still be on their way to the rows.
        let stream = Arc::clone(&self.launcher.stream);
        let wait = || {
            let waited = stream.synchronize();
            waited.during(|| "wait for the sequences of a generator".to_owned())
        };
        wait()?;
        let cu_stream = stream.cu_stream();
        match (grown, &mut self.table) {
            (Some(mut table), from) => {
                if let Some(from) = from {
                    move_rows(Some(&*from), &mut table, moves, cu_stream)?;
                    wait()?;
                }
                self.graphs.iter_mut().for_each(Graphs::clear);
                self.table = Some(table);
                self.step_from_host()?;
                self.refresh()
            }
            (None, Some(table)) => {
                move_rows(None, table, moves, cu_stream)?;
                let mut left = vec![true; table.room.rows];
                moves.iter().for_each(|&(_, to)| left[to] = false);
                let left = left.into_iter().enumerate().filter(|(_, left)| *left);
                let left: Vec<_> = left.map(|(row, _)| (row, None)).collect();
                match left.is_empty() {
                    true => self.refresh(),
                    false => self.edit(&left),
                }
            }
            (None, None) => Ok(()),
        }
    }

    /// A table that has the room that is wanted, and no less than there is.
    fn larger(&self, wanted: LoopRoom) -> Result<Table, CudaError> {
        let now = self.table.as_ref().map(|table| table.room);
        let most = |of: fn(&LoopRoom) -> usize| of(&wanted).max(now.as_ref().map_or(0, of));
        let room = LoopRoom {
            rows: most(|room| room.rows),
            width: most(|room| room.width),
            source_width: most(|room| room.source_width),
        };
        Table::new(&self.launcher, room)
    }

    /// Puts a step of the first `rows` rows on the stream, which chooses tokens as `behind` says. Its kernels are those for sequences
    /// and sources of at most `keys` tokens; they compute longer ones, too.
    ///
    /// # Errors
    /// Memory that could not be had, and failures of the driver; the step is not on its way then.
    pub fn enqueue(&mut self, rows: usize, keys: usize, behind: Behind) -> Result<(), CudaError> {
        let Some(table) = &self.table else {
            return Ok(());
        };
        let rows = rounded_rows(rows).min(table.room.rows);
        let extents = Extents {
            cached_keys: self.buckets.most_keys(rows as u64, keys as u64),
            ..table.room.extents(rows, self.cache.1, self.part)
        };
        let (model, chunks) = (&self.launcher.model, &mut self.workspace);
        let room = chunks.make_room(model.program(), &extents);
        let (plan, _) = match room {
            Ok(room) => room,
            Err(NoRoom::Plan(error)) => return Err(error.into()),
            Err(NoRoom::Memory { bytes, source }) => {
                self.graphs.iter_mut().for_each(Graphs::clear);
                return Err(advise(source, model, chunks.planner(), bytes, &extents));
            }
        };
        let chunks = self.workspace.chunks();
        let used = (0..plan.chunks.len()).filter(|&chunk| plan.chunks[chunk] > 0);
        let site = Site {
            addresses: used
                .map(|chunk| chunks.at(chunk, 0))
                .chain([table.memory.start()])
                .collect(),
            plan,
        };
        let key = (extents, false, 0);
        if !self.replays {
            self.launch(table, &extents, &site, behind)?;
        } else if !self.graphs[behind as usize].replay(&key, &site)? {
            let launch = || self.launch(table, &extents, &site, behind);
            let graph = capture(&self.launcher.stream, THREAD, launch)?;
            graph.upload().during(|| "upload a graph".to_owned())?;
            graph.launch().during(|| "launch a graph".to_owned())?;
            self.graphs[behind as usize].keep(key, &site, graph);
        }
        self.enqueued += 1;
        self.in_flight.push_back(rows);
        Ok(())
    }

    /// What the oldest step on its way chose; waits for it if `wait`, and is `None` where there is none.
    ///
    /// # Errors
    /// A step that failed on the device.
    pub fn receive(&mut self, wait: bool) -> Result<Option<ChosenRows>, CudaError> {
        let Some(&rows) = self.in_flight.front() else {
            return Ok(None);
        };
        let entry = self.received as usize % Advance::RING;
        let wanted = (self.received + 1) as i32;
        let mut n_looks = 0u32;
        while self.ring.step(entry) != wanted {
            if !wait {
                return Ok(None);
            }
            n_looks += 1;
            if n_looks.is_multiple_of(1 << 12) {
                // A failed step never says its number.
                self.check()?;
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        let rows = self.ring.rows(entry, rows);
        self.in_flight.pop_front();
        self.received += 1;
        Ok(Some(rows))
    }

    /// The sequences that a search over these rows has found, the best first, when it said that it is done.
    pub fn found(&self, first: usize, beams: usize) -> Vec<Hypothesis> {
        let Some(table) = &self.table else {
            return Vec::new();
        };
        let LoopRoom { rows, width, .. } = table.room;
        let ints: &[i32] = bytemuck::cast_slice(&table.found.as_slice()[..found_bytes(table.room)]);
        // SAFETY: as in `Ring::step`.
        let read = |at: usize| unsafe { std::ptr::read_volatile(&ints[at]) };
        let behind = |array: usize, row: usize| read(rows * width + array * rows + row);
        let all = (first..first + beams).map(|row| {
            let n = (behind(1, row).max(0) as usize).min(width);
            let from = (first + behind(2, row).max(0) as usize).min(rows - 1) * width;
            Hypothesis {
                tokens: (from..from + n).map(|at| read(at) as u32).collect(),
                score: f32::from_bits(behind(0, row) as u32),
            }
        });
        Hypothesis::sorted(all.collect())
    }

    /// Which beam of a search over these rows has a logit that is no number, when the search said that one has. Nothing writes
    /// there before the rows have other sequences.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn wrong_beam(&self, first: usize, beams: usize) -> Result<Option<usize>, CudaError> {
        let Some(table) = &self.table else {
            return Ok(None);
        };
        let mut counts = vec![0i32; beams];
        let at = table.memory.start() + table.at.n_candidates + 4 * first as u64;
        // SAFETY: the table has a count for each of its rows.
        unsafe { result::memcpy_dtoh_sync(bytemuck::cast_slice_mut::<i32, u8>(&mut counts), at) }
            .during(|| "read which beam failed".to_owned())?;
        let code = Chosen::NotANumber.code();
        Ok(counts.iter().position(|&count| count == code))
    }

    /// An error that work on the stream has met.
    fn check(&self) -> Result<(), CudaError> {
        use cudarc::driver::{DriverError, sys::CUresult};
        // SAFETY: the stream lives.
        let state = unsafe { cudarc::driver::sys::cuStreamQuery(self.launcher.stream.cu_stream()) };
        match state {
            CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            error => Err(DriverError(error)).during(|| "compute a step".to_owned()),
        }
    }

    /// Launches a step: the program, the choice of tokens, and the batch data of the next step.
    fn launch(
        &self,
        table: &Table,
        extents: &Extents,
        site: &Site,
        behind: Behind,
    ) -> Result<(), CudaError> {
        let data = table.data();
        let bound = Bound {
            extents,
            data: &data,
            plan: &site.plan,
            chunks: self.workspace.chunks(),
            cache: self.cache.0,
        };
        let model = &self.launcher.model;
        let program = model.program();
        self.launcher
            .steps(&bound, program.steps.len(), &|_| true)?;
        let Some([choose, candidates, beams, ..]) = model.decoding.as_deref() else {
            return Ok(());
        };
        let slot = program
            .planned()
            .position(|(index, _)| index == self.logits);
        let at = slot.map(|slot| site.plan.placements[slot]);
        let logits = at.map_or(0, |at| bound.chunks.at(at.chunk as usize, at.offset));
        let (memory, at) = (table.memory.start(), table.at);
        let of = |offset: u64| memory + offset;
        let begin = [
            logits,
            of(at.requests),
            of(at.known),
            of(at.tokens),
            of(at.slot_starts),
            of(at.best_of_group),
            of(at.sum_of_group),
            of(at.raw_of_group),
            of(at.n_arrived),
        ];
        let stream = self.launcher.stream.cu_stream();
        let start = self.launcher.start;
        if behind != Behind::Search {
            let end = [of(at.chosen), of(at.log_probability)];
            let args = [&begin[..], &end].concat();
            // SAFETY: the table has all of these for these extents.
            unsafe { choose.launch(stream, extents, &args, "the choice", start) }?;
        }
        if behind != Behind::Choice {
            let end = [
                of(at.n_candidates),
                of(at.candidate_ids),
                of(at.candidate_values),
            ];
            let args = [&begin[..], &end].concat();
            let (rows, width) = (table.room.rows as u64, table.room.width as u64);
            let found = |array: u64| table.found_address + 4 * rows * (width + array);
            let of_search = [
                of(at.requests),
                of(at.known),
                of(at.slot_starts),
                end[0],
                end[1],
                end[2],
                of(at.scores),
                of(at.states),
                of(at.tokens),
                of(at.slots),
                of(at.chosen),
                of(at.log_probability),
                of(at.scores),
                of(at.states),
                of(at.tokens),
                of(at.slots),
                table.found_address,
                found(0),
                found(1),
                found(2),
            ];
            // SAFETY: the table has all of these for these extents; a search reads what it overwrites before.
            unsafe {
                candidates.launch(stream, extents, &args, "the candidates", start)?;
                beams.launch(stream, extents, &of_search, "the beams", start)?;
            }
        }
        let ring = self.ring.address;
        self.advance(
            table,
            extents,
            at.chosen,
            at.step,
            ring,
            self.launcher.start,
        )
    }

    /// Writes the batch data of all rows anew, after some were changed.
    fn refresh(&self) -> Result<(), CudaError> {
        let Some(table) = &self.table else {
            return Ok(());
        };
        let extents = table.room.extents(table.room.rows, self.cache.1, self.part);
        let at = table.at;
        let unread = table.memory.start() + at.unread;
        self.advance(
            table,
            &extents,
            at.idle,
            at.unread,
            unread + 256,
            Start::Plain,
        )
    }

    fn advance(
        &self,
        table: &Table,
        extents: &Extents,
        chosen: u64,
        step: u64,
        ring: u64,
        start: Start,
    ) -> Result<(), CudaError> {
        let Some([.., advance, _]) = self.launcher.model.decoding.as_deref() else {
            return Ok(());
        };
        let (first, at) = (table.memory.start(), table.at);
        let of = |offset: u64| first + offset;
        let args = [
            of(chosen),
            of(at.log_probability),
            of(at.requests),
            of(at.known),
            of(at.tokens),
            of(at.slots),
            of(at.slot_starts),
            of(step),
            of(at.known),
            of(at.tokens),
            of(at.token_ids),
            of(at.positions),
            of(at.key_lens),
            of(at.token_slots),
            ring,
            ring + RING_VALUES,
            ring + RING_STEPS,
            of(step),
        ];
        // SAFETY: the table and the ring have all of these for these extents, and a thread reads what it overwrites before.
        unsafe {
            let stream = self.launcher.stream.cu_stream();
            advance.launch(stream, extents, &args, "the next step's batch", start)
        }
    }

    /// Tells the device how many steps there were.
    fn step_from_host(&self) -> Result<(), CudaError> {
        let Some(table) = &self.table else {
            return Ok(());
        };
        let step = (self.enqueued as i32).to_le_bytes();
        // SAFETY: the table has a step number.
        unsafe { result::memcpy_htod_sync(table.memory.start() + table.at.step, &step) }
            .during(|| "upload a step's number".to_owned())
    }
}

impl Drop for DecodeLoop {
    fn drop(&mut self) {
        // Memory must not be freed under a running kernel; there is nobody to return an error to.
        let _ = self.launcher.stream.synchronize();
    }
}

/// A stream whose work goes before that of others.
fn first_stream(device: &Device) -> Result<Arc<CudaStream>, CudaError> {
    let context = device.context();
    let stream = context.bind_to_thread().and_then(|()| {
        let (_, first) = result::stream::get_priority_range()?;
        context.new_stream_with_priority(first)
    });
    stream.during(|| "make a stream".to_owned())
}

/// Rows of the steps that so many rows are rounded up to, so that few graphs serve all: by at most a quarter.
fn rounded_rows(rows: usize) -> usize {
    let step = 1 << (rows / 4).max(1).ilog2();
    rows.next_multiple_of(step)
}
