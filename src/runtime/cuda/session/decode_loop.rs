//! Steps of one token of each sequence, which follow one another on the device without the host.
//!
//! What a step reads of its sequences lies in device memory, and its last kernel writes it for the next one
//! ([`Advance`]). So a step is one CUDA graph, and several are on the stream before the host knows what the first has chosen.
//! The tokens come by a ring in the host's memory, which the host polls.

use std::sync::Arc;

use cudarc::driver::result;

use super::{
    CudaCache, CudaSession, advise,
    launcher::{Bound, Launcher},
    staging::BatchData,
};
use crate::{
    kernels::decoding::{Advance, Choice, ChooseToken, Chosen},
    plan::ALIGNMENT,
    program::TensorIndex,
    runtime::{
        AllocatorChoice, GraphChoice, Planner,
        cuda::{
            error::{CudaError, During},
            graphs::{Graphs, Site, THREAD, capture},
            memory::{Buffer, Chunks, Pinned},
            model::Start,
        },
        workspace::{NoRoom, Workspace},
    },
    tensor::Extents,
};

/// The loop of one generator.
pub struct DecodeLoop {
    launcher: Launcher,
    /// Memory of its own, so that batches of other shapes in between move nothing that a graph names.
    workspace: Workspace<Chunks>,
    graphs: Graphs,
    replays: bool,
    logits: TensorIndex,
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

/// What a row holds from the next step on.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// All tokens of the sequence; the last is not in the cache yet.
    pub tokens: &'a [u32],
    /// The slots of all positions that it can come to have.
    pub slots: &'a [u32],
    /// [`Choice::encode`]
    pub choice: &'a [i32],
}

/// State of `rows` sequences of up to `width` tokens on the device.
struct Table {
    rows: usize,
    width: usize,
    memory: Buffer,
    at: Places,
}

/// Offsets in a table's memory.
#[derive(Clone, Copy)]
struct Places {
    zeros: u64,
    ones: u64,
    idle: u64,
    cu_lens: u64,
    pair_offsets: u64,
    slot_starts: u64,
    known: u64,
    token_ids: u64,
    positions: u64,
    key_lens: u64,
    token_slots: u64,
    best_of_group: u64,
    sum_of_group: u64,
    raw_of_group: u64,
    n_arrived: u64,
    chosen: u64,
    log_probability: u64,
    requests: u64,
    slots: u64,
    tokens: u64,
    step: u64,
    /// A ring that nobody reads.
    unread: u64,
    end: u64,
}

/// Pinned memory that the device writes results to: ids, values and step numbers of [`Advance::RING`] steps.
struct Ring {
    memory: Pinned,
    address: u64,
}

/// Offsets of the ring's three arrays.
const RING_VALUES: u64 = 4 * (Advance::RING * Advance::ROWS) as u64;
const RING_STEPS: u64 = 2 * RING_VALUES;
const RING_BYTES: u64 = RING_STEPS + 4 * Advance::RING as u64;

/// Pinned memory that is being uploaded until a step is received.
struct Upload {
    memory: Pinned,
    /// The step that is received after the upload is done.
    until: u64,
}

/// What a step chose, by row.
pub type ChosenRows = Vec<(Chosen, f32)>;

impl DecodeLoop {
    /// A loop on a session's stream, over the sequences in `cache`. `None` where the program writes no tokens.
    ///
    /// # Errors
    /// Memory that could not be had.
    pub fn new(session: &CudaSession, cache: &CudaCache) -> Result<Option<Self>, CudaError> {
        let model = &session.launcher.model;
        let program = model.program();
        let (Some(logits), true) = (program.next_logits(), model.decoding.is_some()) else {
            return Ok(None);
        };
        let allocator = AllocatorChoice::default();
        let memory = Pinned::new(&model.device, RING_BYTES as usize)?;
        let address = memory.device_address()?;
        Ok(Some(Self {
            launcher: Launcher {
                model: Arc::clone(model),
                stream: Arc::clone(&session.launcher.stream),
                start: session.launcher.start,
            },
            workspace: Workspace::new(
                Planner::new(program, &allocator)?,
                Chunks::new(model.device.clone()),
            ),
            graphs: Graphs::default(),
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

    /// Steps that are on their way.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether so many rows of sequences of so many tokens have room.
    pub fn has_room(&self, rows: usize, width: usize) -> bool {
        self.table
            .as_ref()
            .is_some_and(|table| table.rows >= rows && table.width >= width)
    }

    /// Makes room, of which all rows are then empty. No step may be on its way.
    ///
    /// # Errors
    /// Memory that could not be had; there is no room then.
    pub fn make_room(&mut self, rows: usize, width: usize) -> Result<(), CudaError> {
        self.graphs.clear();
        self.table = None;
        let table = Table::new(&self.launcher, rows, width)?;
        self.table = Some(table);
        // Uploads of the constructor were synchronous; this one says the steps so far.
        self.step_from_host()?;
        self.refresh()
    }

    /// Changes rows before the next step: each gets a sequence, or has none any more.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn edit(&mut self, edits: &[(usize, Option<Entry>)]) -> Result<(), CudaError> {
        let Some(table) = &self.table else {
            return Ok(());
        };
        if edits.is_empty() {
            return Ok(());
        }
        let width = Choice::WIDTH as usize;
        let ints =
            |entry: &Option<Entry>| 1 + entry.map_or(0, |e| width + e.slots.len() + e.tokens.len());
        let bytes = 4 * edits.iter().map(|(_, entry)| ints(entry)).sum::<usize>();
        let (start, at) = (table.memory.start(), table.at);
        let row_bytes = 4 * table.width as u64;
        let upload = self.upload_area(bytes)?;
        let (stream, until) = (self.launcher.stream.cu_stream(), self.enqueued + 1);
        let upload = &mut self.uploads[upload];
        upload.until = until;
        let host: &mut [i32] = bytemuck::cast_slice_mut(&mut upload.memory.as_mut_slice()[..bytes]);
        let mut next = 0;
        let mut copy = |to: u64, values: &mut dyn Iterator<Item = i32>| {
            let from = next;
            for value in values {
                host[next] = value;
                next += 1;
            }
            let piece: &[u8] = bytemuck::cast_slice(&host[from..next]);
            // SAFETY: the table has room at `to`, as the offsets say; the pinned memory is not written again before a
            // later step was received.
            unsafe { result::memcpy_htod_async(start + to, piece, stream) }
                .during(|| "upload a sequence".to_owned())
        };
        for &(row, entry) in edits {
            let row = row as u64;
            let n_known = entry.map_or(0, |e| e.tokens.len() as i32);
            copy(at.known + 4 * row, &mut [n_known].into_iter())?;
            let Some(entry) = entry else { continue };
            let of_row = |first: u64| first + row * row_bytes;
            let request = at.requests + row * u64::from(Choice::WIDTH) * 4;
            copy(request, &mut entry.choice.iter().copied())?;
            let slots = entry.slots.iter().map(|&slot| slot as i32);
            copy(of_row(at.slots), &mut { slots })?;
            let tokens = entry.tokens.iter().map(|&id| id as i32);
            copy(of_row(at.tokens), &mut { tokens })?;
        }
        self.refresh()
    }

    /// Puts a step of the first `rows` rows on the stream.
    ///
    /// # Errors
    /// Memory that could not be had, and failures of the driver; the step is not on its way then.
    pub fn enqueue(&mut self, rows: usize) -> Result<(), CudaError> {
        let Some(table) = &self.table else {
            return Ok(());
        };
        let rows = rounded_rows(rows).min(table.rows);
        let extents = table.extents(rows, self.cache.1);
        let (model, chunks) = (&self.launcher.model, &mut self.workspace);
        let room = chunks.make_room(model.program(), &extents);
        let (plan, _) = match room {
            Ok(room) => room,
            Err(NoRoom::Plan(error)) => return Err(error.into()),
            Err(NoRoom::Memory { bytes, source }) => {
                self.graphs.clear();
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
        let key = (extents, false);
        if !self.replays {
            self.launch(table, &extents, &site)?;
        } else if !self.graphs.replay(&key, &site)? {
            let launch = || self.launch(table, &extents, &site);
            let graph = capture(&self.launcher.stream, THREAD, launch)?;
            graph.upload().during(|| "upload a graph".to_owned())?;
            graph.launch().during(|| "launch a graph".to_owned())?;
            self.graphs.keep(key, &site, graph);
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
    fn launch(&self, table: &Table, extents: &Extents, site: &Site) -> Result<(), CudaError> {
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
        let Some([choose, _]) = model.decoding.as_deref() else {
            return Ok(());
        };
        let slot = program
            .planned()
            .position(|(index, _)| index == self.logits);
        let at = slot.map(|slot| site.plan.placements[slot]);
        let logits = at.map_or(0, |at| bound.chunks.at(at.chunk as usize, at.offset));
        let (start, at) = (table.memory.start(), table.at);
        let of = |offset: u64| start + offset;
        let args = [
            logits,
            of(at.requests),
            of(at.known),
            of(at.tokens),
            of(at.slot_starts),
            of(at.best_of_group),
            of(at.sum_of_group),
            of(at.raw_of_group),
            of(at.n_arrived),
            of(at.chosen),
            of(at.log_probability),
        ];
        let stream = self.launcher.stream.cu_stream();
        // SAFETY: the table has all of these for these extents.
        unsafe {
            choose.launch(stream, extents, &args, "the choice", self.launcher.start)?;
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
        let extents = table.extents(table.rows, self.cache.1);
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
        let Some([_, advance]) = self.launcher.model.decoding.as_deref() else {
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

    /// Index of pinned memory of at least so many bytes that no copy reads any more.
    fn upload_area(&mut self, bytes: usize) -> Result<usize, CudaError> {
        let received = self.received;
        let is_free =
            |upload: &Upload| upload.until <= received && upload.memory.as_slice().len() >= bytes;
        if let Some(at) = self.uploads.iter().position(is_free) {
            return Ok(at);
        }
        let memory = Pinned::new(&self.launcher.model.device, bytes.next_power_of_two())?;
        self.uploads.push(Upload { memory, until: 0 });
        Ok(self.uploads.len() - 1)
    }
}

impl Drop for DecodeLoop {
    fn drop(&mut self) {
        // Memory must not be freed under a running kernel; there is nobody to return an error to.
        let _ = self.launcher.stream.synchronize();
    }
}

impl Ring {
    fn ints(&self) -> &[i32] {
        bytemuck::cast_slice(&self.memory.as_slice()[..RING_BYTES as usize])
    }

    /// The number of the last step that is complete in an entry.
    fn step(&self, entry: usize) -> i32 {
        let at = &self.ints()[(RING_STEPS / 4) as usize + entry];
        // SAFETY: the address is valid and aligned; the device writes it, so it is read anew each time.
        let step = unsafe { std::ptr::read_volatile(at) };
        // What the device wrote before the number is read after it.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        step
    }

    fn rows(&self, entry: usize, n: usize) -> ChosenRows {
        let ints = self.ints();
        let from = entry * Advance::ROWS;
        let values = &ints[(RING_VALUES / 4) as usize + from..];
        ints[from..from + n]
            .iter()
            .zip(values)
            .map(|(id, value)| {
                // SAFETY: as in `step`.
                let read = |at: &i32| unsafe { std::ptr::read_volatile(at) };
                let value = f32::from_bits(read(value) as u32);
                (Chosen::of_code(read(id)), value)
            })
            .collect()
    }
}

impl Table {
    fn new(launcher: &Launcher, rows: usize, width: usize) -> Result<Self, CudaError> {
        let mut end = 0u64;
        let mut place = |ints: usize| {
            let at = end;
            end += (4 * ints as u64).next_multiple_of(ALIGNMENT);
            at
        };
        let at = Places {
            zeros: place(rows),
            ones: place(rows),
            idle: place(rows),
            cu_lens: place(rows + 1),
            pair_offsets: place(2 * (rows + 1)),
            slot_starts: place(rows),
            known: place(rows),
            token_ids: place(rows),
            positions: place(rows),
            key_lens: place(rows),
            token_slots: place(rows),
            best_of_group: place(2 * rows * ChooseToken::GROUPS),
            sum_of_group: place(rows * ChooseToken::GROUPS),
            raw_of_group: place(2 * rows * ChooseToken::GROUPS),
            n_arrived: place(rows),
            chosen: place(rows),
            log_probability: place(rows),
            requests: place(rows * Choice::WIDTH as usize),
            slots: place(rows * width),
            tokens: place(rows * width),
            step: place(1),
            // A step's number in front of it.
            unread: place(64 + RING_BYTES as usize / 4),
            end: 0,
        };
        let at = Places { end, ..at };
        let device = &launcher.model.device;
        let memory = Buffer::new(device, end, "the sequences of a generator")?;
        // SAFETY: the memory has this size.
        unsafe { result::memset_d8_sync(memory.start(), 0, at.end as usize) }
            .during(|| "clear the sequences of a generator".to_owned())?;
        let upload = |offset: u64, bytes: &[u8]| {
            // SAFETY: the table has room for so many there.
            unsafe { result::memcpy_htod_sync(memory.start() + offset, bytes) }
                .during(|| "upload the sequences of a generator".to_owned())
        };
        let numbers =
            |of: &dyn Fn(usize) -> i32, n: usize| -> Vec<i32> { (0..n).map(of).collect() };
        let ones = numbers(&|_| 1, rows);
        let idle = numbers(&|_| Chosen::Idle.code(), rows);
        let cu_lens = numbers(&|row| row as i32, rows + 1);
        let starts = numbers(&|row| (row * width) as i32, rows);
        let pairs: Vec<i64> = (0..=rows as i64).collect();
        upload(at.ones, bytemuck::cast_slice(&ones))?;
        upload(at.idle, bytemuck::cast_slice(&idle))?;
        // No CTA has arrived: −1.
        upload(at.n_arrived, bytemuck::cast_slice(&vec![-1i32; rows]))?;
        upload(at.cu_lens, bytemuck::cast_slice(&cu_lens))?;
        upload(at.slot_starts, bytemuck::cast_slice(&starts))?;
        upload(at.pair_offsets, bytemuck::cast_slice(&pairs))?;
        device
            .context()
            .synchronize()
            .during(|| "wait for the sequences of a generator".to_owned())?;
        Ok(Self {
            rows,
            width,
            memory,
            at,
        })
    }

    /// The extents of a step: as if each sequence had as many keys as it may.
    fn extents(&self, rows: usize, blocks: u64) -> Extents {
        let (n, keys) = (rows as u64, (rows * self.width) as u64);
        Extents {
            tokens: n,
            batch: n,
            longest: 1,
            pairs: keys,
            slots: keys,
            blocks,
            rows: n,
            ..Extents::default()
        }
    }

    fn data(&self) -> BatchData {
        let of = |offset: u64| self.memory.start() + offset;
        let at = self.at;
        BatchData {
            token_ids: of(at.token_ids),
            type_ids: of(at.zeros),
            positions: of(at.positions),
            cu_lens: of(at.cu_lens),
            pair_offsets: of(at.pair_offsets),
            valid_lens: of(at.ones),
            token_slots: of(at.token_slots),
            slots: of(at.slots),
            slot_starts: of(at.slot_starts),
            key_lens: of(at.key_lens),
            ..BatchData::default()
        }
    }
}

/// Rows of the steps that so many rows are rounded up to, so that few graphs serve all: by at most a quarter.
fn rounded_rows(rows: usize) -> usize {
    let step = 1 << (rows / 4).max(1).ilog2();
    rows.next_multiple_of(step)
}
