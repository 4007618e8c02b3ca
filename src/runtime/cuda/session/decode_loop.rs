//! Runs decode steps of one token per sequence. The steps follow one another on the device, without waiting for the host.
//!
//! The inputs of a step are in device memory, and the last kernel of a step writes the inputs of the next step ([`Advance`]). A step is
//! therefore one CUDA graph, and several steps can be enqueued before the host knows the tokens of the first step. The host polls a ring
//! buffer in host memory to which the device writes the tokens.
//!
//! Steps run on their own stream with the highest priority. A step over few sequences is bound by latency and leaves most of the
//! device idle, so prompts are processed concurrently ([`CudaSession::fill`]). [`Fence`]s order the two streams where they use
//! the same cache blocks.

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
    launcher::{Bound, Launcher, address_of},
};
use crate::{
    kernels::decoding::{Advance, Chosen},
    program::{Buckets, TensorIndex},
    runtime::{
        AllocatorChoice, GraphChoice, Planner,
        cuda::{
            device::Device,
            error::{CudaError, During},
            graphs::{GraphBinding, Graphs, THREAD, capture},
            memory::{Chunks, Pinned},
            model::Start,
        },
        workspace::{NoRoom, Workspace},
    },
    search::Hypothesis,
    tensor::Extents,
};

/// Decode loop of one generator.
pub struct DecodeLoop {
    launcher: Launcher,
    /// A separate workspace. In the session's workspace, batches of other shapes could move memory that a graph of the loop refers to.
    workspace: Workspace<Chunks>,
    /// Graphs, indexed by [`TokenSelection`].
    graphs: [Graphs; 3],
    buckets: Buckets,
    replays: bool,
    logits: TensorIndex,
    /// Bytes of a row of logits.
    logit_bytes: u64,
    /// The part of the model that generates text.
    part: u32,
    /// Address and number of blocks of the KV cache, including the spare block.
    cache: (u64, u64),
    table: Option<Table>,
    ring: Ring,
    uploads: Vec<Upload>,
    enqueued: u64,
    received: u64,
    /// Number of rows of each step in flight.
    in_flight: std::collections::VecDeque<usize>,
}

// SAFETY: the handles and the memory belong to one device. Any thread may use them, one thread at a time.
unsafe impl Send for DecodeLoop {}

/// Kind of token selection that runs after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSelection {
    /// Sampling only: no sequence uses beam search.
    Choice,
    /// Beam search only.
    Search,
    Both,
}

impl TokenSelection {
    /// Returns the kind of token selection for a set of sequences. `has_singles` is whether any sequence has no beam search, and
    /// `has_beams` is whether any sequence has a beam search. At least one argument must be true.
    pub fn of(has_singles: bool, has_beams: bool) -> Self {
        match (has_singles, has_beams) {
            (true, true) => Self::Both,
            (false, true) => Self::Search,
            _ => Self::Choice,
        }
    }
}

impl DecodeLoop {
    /// Creates a loop over the sequences in `cache`. `part` is the index of the part of the model that generates text, such as the decoder.
    /// The loop has its own stream, in addition to the session's stream. Returns `None` if the program does not generate text.
    ///
    /// # Errors
    /// Returns an error if an allocation fails.
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
            launcher: Launcher::new(
                Arc::clone(model),
                Arc::clone(&stream),
                session.launcher.start,
            ),
            workspace: Workspace::new(
                Planner::new(program, &allocator)?,
                Chunks::new(model.device.clone(), stream),
            ),
            graphs: Default::default(),
            buckets: Buckets::of(program),
            part,
            replays: session.replay != GraphChoice::Off,
            logits: logits.0,
            logit_bytes: u64::from(logits.1) * program.tensors[logits.0].element.bytes(),
            cache: (cache.memory.start(), cache.blocks),
            table: None,
            ring: Ring { memory, address },
            uploads: Vec::new(),
            enqueued: 0,
            received: 0,
            in_flight: Default::default(),
        }))
    }

    /// Creates a fence after all steps and edits enqueued so far.
    ///
    /// # Errors
    /// Returns driver errors.
    pub fn fence(&self) -> Result<Fence, CudaError> {
        Fence::after(&self.launcher.stream)
    }

    /// Makes later edits and steps wait for a fence in another stream.
    ///
    /// # Errors
    /// Returns driver errors.
    pub fn wait_behind(&self, fence: &Fence) -> Result<(), CudaError> {
        fence.hold(&self.launcher.stream)
    }

    /// Number of steps in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Returns whether the table has at least the room `wanted`.
    pub fn has_room(&self, wanted: LoopRoom) -> bool {
        self.table.as_ref().is_some_and(|Table { room, .. }| {
            room.rows >= wanted.rows
                && room.width >= wanted.width
                && room.source_width >= wanted.source_width
        })
    }

    /// Moves sequences to other rows of the table, and grows the table if its capacity is less than `wanted`. `moves` lists pairs (old row,
    /// new row) in row order. A new row must not be after its old row. All rows except the new rows become empty. No step may be in flight.
    ///
    /// # Errors
    /// Returns an error if an allocation or a driver call fails. If the allocation fails, the sequences keep their rows.
    pub fn relocate(
        &mut self,
        wanted: LoopRoom,
        moves: &[(usize, usize)],
    ) -> Result<(), CudaError> {
        let grown = match self.has_room(wanted) {
            true => None,
            false => Some(self.larger(wanted)?),
        };
        // Earlier edits of the rows may still be in flight.
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

    /// Allocates a table with at least the capacity `wanted` and at least the capacity of the current table.
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

    /// Enqueues a step over the first `rows` rows, followed by the token selection `selection`. The kernels are chosen for sequences and
    /// source texts of at most `keys` tokens, but are also correct for longer ones.
    ///
    /// # Errors
    /// Returns an error if an allocation or a driver call fails. The step is then not enqueued.
    pub fn enqueue(
        &mut self,
        rows: usize,
        keys: usize,
        selection: TokenSelection,
    ) -> Result<(), CudaError> {
        let Some(table) = &self.table else {
            return Ok(());
        };
        let rows = rounded_rows(rows).min(table.room.rows);
        let extents = Extents {
            cached_keys: self.buckets.max_keys(rows as u64, keys as u64),
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
        let site = GraphBinding {
            addresses: used
                .map(|chunk| chunks.at(chunk, 0))
                .chain([table.memory.start()])
                .collect(),
            plan,
        };
        let key = (extents, false, 0);
        if !self.replays {
            self.launch(table, &extents, &site, selection)?;
        } else if !self.graphs[selection as usize].replay(&key, &site)? {
            let launch = || self.launch(table, &extents, &site, selection);
            let graph = capture(&self.launcher.stream, THREAD, launch)?;
            graph.upload().during(|| "upload a graph".to_owned())?;
            graph.launch().during(|| "launch a graph".to_owned())?;
            self.graphs[selection as usize].keep(key, &site, graph);
        }
        self.enqueued += 1;
        self.in_flight.push_back(rows);
        Ok(())
    }

    /// Returns the tokens that the oldest step in flight selected. Waits for that step if `wait`. Returns `None` if there is no
    /// such step, or if it has not finished and `wait` is false.
    ///
    /// # Errors
    /// If `wait`, returns an error if the step failed on the device.
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
                // A failed step never writes its number to the ring, so check for errors.
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

    /// Returns the hypotheses that the beam search over the rows `first..first + beams` has found, best first. The search must have
    /// reported that it is done.
    pub fn found(&self, first: usize, beams: usize) -> Vec<Hypothesis> {
        let Some(table) = &self.table else {
            return Vec::new();
        };
        let LoopRoom { rows, width, .. } = table.room;
        let ints: &[i32] = bytemuck::cast_slice(&table.found.as_slice()[..found_bytes(table.room)]);
        // SAFETY: as in `Ring::step`.
        let read = |at: usize| unsafe { std::ptr::read_volatile(&ints[at]) };
        let column = |array: usize, row: usize| read(rows * width + array * rows + row);
        let all = (first..first + beams).map(|row| {
            let n = (column(1, row).max(0) as usize).min(width);
            let from = (first + column(2, row).max(0) as usize).min(rows - 1) * width;
            Hypothesis {
                tokens: (from..from + n).map(|at| read(at) as u32).collect(),
                score: f32::from_bits(column(0, row) as u32),
            }
        });
        Hypothesis::sorted(all.collect())
    }

    /// Returns the index of the beam that has a NaN logit, after the beam search over the rows `first..first + beams` has reported a NaN.
    /// The candidate counts of the rows identify the beam. These counts are not overwritten until the rows get other sequences.
    ///
    /// # Errors
    /// Returns driver errors.
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

    /// Returns an error if work on the stream has failed.
    fn check(&self) -> Result<(), CudaError> {
        use cudarc::driver::{DriverError, sys::CUresult};
        // SAFETY: the stream lives.
        let state = unsafe { cudarc::driver::sys::cuStreamQuery(self.launcher.stream.cu_stream()) };
        match state {
            CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            error => Err(DriverError(error)).during(|| "compute a step".to_owned()),
        }
    }

    /// Launches a step: the program, the token selection, and the update of the batch data for the next step.
    fn launch(
        &self,
        table: &Table,
        extents: &Extents,
        site: &GraphBinding,
        selection: TokenSelection,
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
        let logits = address_of(program, self.logits, &site.plan, bound.chunks);
        let (memory, at) = (table.memory.start(), table.at);
        let of = |offset: u64| memory + offset;
        let begin = table.choice_operands(logits, 0);
        let stream = self.launcher.stream.cu_stream();
        let start = self.launcher.start;
        if selection != TokenSelection::Search {
            let end = [of(at.chosen), of(at.log_probability)];
            let args = [&begin[..], &end].concat();
            // SAFETY: the table has all operands for these extents.
            unsafe { choose.launch(stream, extents, &args, "the choice", start) }?;
        }
        if selection != TokenSelection::Choice {
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
            // SAFETY: the table has all operands for these extents. The search step reads each value before it overwrites the value.
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

    /// Enqueues the token selection of sequences whose logits a prefill run has computed. For each of them, `rows` contains a pair: its row
    /// of `logits` and its row of the loop. All other sequences keep their tokens. [`receive`](Self::receive) returns the result like that
    /// of a step.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn enqueue_choice(
        &mut self,
        logits: u64,
        rows: &[(usize, usize)],
    ) -> Result<(), CudaError> {
        let (Some(table), Some([choose, ..])) =
            (&self.table, self.launcher.model.decoding.as_deref())
        else {
            return Ok(());
        };
        let Some(end) = rows.iter().map(|&(_, row)| row + 1).max() else {
            return Ok(());
        };
        let (memory, at) = (table.memory.start(), table.at);
        let stream = self.launcher.stream.cu_stream();
        // SAFETY: both arrays have an entry for each row of the table.
        unsafe { result::memcpy_dtod_async(memory + at.chosen, memory + at.idle, 4 * end, stream) }
            .during(|| "reset the chosen tokens".to_owned())?;
        for group in rows.chunk_by(|a, b| (a.0 + 1, a.1 + 1) == *b) {
            let (from, first) = group[0];
            let extents = table.room.extents(group.len(), self.cache.1, self.part);
            let begin = table.choice_operands(logits + from as u64 * self.logit_bytes, first);
            let of_row = |array: u64| memory + array + 4 * first as u64;
            let end = [of_row(at.chosen), of_row(at.log_probability)];
            let args = [&begin[..], &end].concat();
            // SAFETY: the table has all operands for these extents, and `logits` has a row for each sequence of the group.
            unsafe { choose.launch(stream, &extents, &args, "the choice", Start::Plain) }?;
        }
        let extents = table.room.extents(end, self.cache.1, self.part);
        let ring = self.ring.address;
        self.advance(
            table,
            &extents,
            at.chosen,
            at.step,
            ring,
            self.launcher.start,
        )?;
        self.enqueued += 1;
        self.in_flight.push_back(end);
        Ok(())
    }

    /// Rewrites the batch data of all rows after rows were edited.
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
        // SAFETY: the table and the ring have all operands for these extents. A thread reads each value before it overwrites the value.
        unsafe {
            let stream = self.launcher.stream.cu_stream();
            advance.launch(stream, extents, &args, "the next step's batch", start)
        }
    }

    /// Uploads the number of steps so far to the device.
    fn step_from_host(&self) -> Result<(), CudaError> {
        let Some(table) = &self.table else {
            return Ok(());
        };
        let step = (self.enqueued as i32).to_le_bytes();
        // SAFETY: the table has room for a step number.
        unsafe { result::memcpy_htod_sync(table.memory.start() + table.at.step, &step) }
            .during(|| "upload a step's number".to_owned())
    }
}

impl Drop for DecodeLoop {
    fn drop(&mut self) {
        // Memory must not be freed while a kernel may use it. A drop cannot return an error.
        let _ = self.launcher.stream.synchronize();
    }
}

/// Creates a stream with the highest priority.
fn first_stream(device: &Device) -> Result<Arc<CudaStream>, CudaError> {
    let context = device.context();
    let stream = context.bind_to_thread().and_then(|()| {
        let (_, first) = result::stream::get_priority_range()?;
        context.new_stream_with_priority(first)
    });
    stream.during(|| "make a stream".to_owned())
}

/// Rounds up a number of rows, by at most a quarter, so that few graphs serve all row counts.
fn rounded_rows(rows: usize) -> usize {
    let step = 1 << (rows / 4).max(1).ilog2();
    rows.next_multiple_of(step)
}
