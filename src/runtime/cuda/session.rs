mod decode_loop;
mod fence;
mod launcher;
mod on_device;
mod scoring;
mod slot;
mod staging;
mod timing;

use std::sync::Arc;

use cudarc::driver::{CudaEvent, result};

pub use decode_loop::{ChosenRows, DecodeLoop, Entry, LoopRoom, TokenSelection};
pub use fence::Fence;
use launcher::{Bound, Launcher, address_of};
pub use slot::CudaTicket;
use slot::{Piece, Slot};
use staging::{BatchData, Extra};
pub use timing::{Part, Timing};

use super::{
    error::{CudaError, During},
    graphs::{GraphBinding, Graphs, Key, THREAD, capture},
    memory::{Buffer, Chunks},
    model::{CudaModel, Start},
    scorer::Scorer,
};
use crate::{
    kernels::{KernelSpec, upload::Upload},
    plan::{ALIGNMENT, Plan},
    program::{Buckets, Program, SizeOverflow, TensorIndex},
    runtime::{
        AllocatorChoice, GraphChoice, GraphUse, MemoryUse, MemoryWork, Output, Planner,
        batch::Batch,
        replay::extents_of,
        workspace::{ChunkOwner, NoRoom, Workspace},
    },
    tensor::Extents,
};

/// Maximum number of batches in flight: one running and one queued on the stream.
const IN_FLIGHT: usize = 2;

/// If the outputs of a run have at most this total size in bytes, a kernel copies them to the host. Otherwise, a copy engine copies them.
/// The copy engine is faster than the kernel, but it delays the kernels before and after the copy more.
const FEW_BYTES: u64 = 256 << 10;

/// Resources of one caller that runs a [`CudaModel`]: a stream, memory for activations and batch data, and CUDA graphs.
pub struct CudaSession {
    launcher: Launcher,
    workspace: Workspace<Chunks>,
    slots: [Slot; IN_FLIGHT],
    /// Number of batches submitted so far.
    submitted: u64,
    graphs: Graphs,
    replay: GraphChoice,
    buckets: Buckets,
    /// Index of each output of the program among the planned tensors.
    output_slots: Vec<usize>,
    /// Memory of the scores of late interaction, after the first use.
    scorer: Option<Scorer>,
}

/// Device memory of a KV cache: the blocks of all caches of a program, and one spare block that belongs to no sequence.
pub struct CudaCache {
    memory: Buffer,
    /// Number of blocks, including the spare block.
    blocks: u64,
}

impl CudaCache {
    /// Allocates a cache of `blocks` blocks for the program of a model.
    ///
    /// # Errors
    /// Returns an error if the allocation fails.
    pub fn new(model: &CudaModel, blocks: u64) -> Result<Self, CudaError> {
        let blocks = blocks.saturating_add(1);
        let bytes = blocks.saturating_mul(model.program.block_bytes());
        let memory = Buffer::new(&model.device, bytes, "the KV cache")?;
        Ok(Self { memory, blocks })
    }
}

/// A batch that is ready to launch: plan, addresses, extents.
struct Ready {
    /// Index of the session's slot that holds the batch's data and receives its results.
    slot: usize,
    site: GraphBinding,
    data: BatchData,
    /// Extents of the batch itself.
    own: Extents,
    /// Extents of the batch's [bucket](Buckets), for which the batch is planned and launched. They are at least as large as the extents of
    /// the batch.
    extents: Extents,
    /// Address of the KV cache, or 0 without one.
    cache: u64,
}

impl Ready {
    fn key(&self) -> Key {
        (self.extents, self.data.padded.is_some(), self.slot)
    }
}

/// How a run was enqueued.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Enqueued {
    Replayed,
    Launched,
}

impl CudaSession {
    /// Creates a session with its own stream. It has no memory yet: each run allocates what it needs, and [`reserve`](Self::reserve)
    /// allocates memory for a batch in advance. `plain_launches` disables programmatic dependent launch.
    pub fn new(
        model: Arc<CudaModel>,
        allocator: &AllocatorChoice,
        plain_launches: bool,
        replay: GraphChoice,
    ) -> Result<Self, CudaError> {
        let start = match model.device.target()?.has_dependent_launch() && !plain_launches {
            true => Start::Dependent,
            false => Start::Plain,
        };
        let stream = model
            .device
            .context()
            .new_stream()
            .during(|| "make a stream".to_owned())?;
        let planner = Planner::new(&model.program, allocator)?;
        Ok(Self {
            slots: std::array::from_fn(|_| Slot::new(model.device.clone(), Arc::clone(&stream))),
            submitted: 0,
            workspace: Workspace::new(
                planner,
                Chunks::new(model.device.clone(), Arc::clone(&stream)),
            ),
            graphs: Graphs::default(),
            replay,
            buckets: replay.buckets(&model.program, allocator),
            output_slots: output_slots(&model.program),
            scorer: None,
            launcher: Launcher::new(model, stream, start),
        })
    }

    /// Enqueues a batch and returns before the batch has run. The caller must have checked the batch against the model's limits. A second
    /// batch can be submitted while the first batch runs, so that the device continues with it immediately.
    ///
    /// # Errors
    /// Returns [`CudaError::InFlight`] if two batches are in flight, an error if an allocation fails, and driver errors.
    pub fn submit(&mut self, batch: &Batch) -> Result<CudaTicket, CudaError> {
        self.submit_at(batch, 0, None)
    }

    /// If two batches are in flight, waits for the first of them to finish. The ticket of that batch keeps the results.
    pub fn make_place(&mut self) {
        if self.slots.iter().all(Slot::is_taken) {
            let first = self.slots.iter_mut().min_by_key(|slot| slot.nth());
            if let Some(first) = first {
                first.clear();
            }
        }
    }

    /// Allocates memory for batches of up to `extents`, so that these batches do not wait for an allocation.
    ///
    /// # Errors
    /// Returns an error if an allocation fails.
    pub fn reserve(&mut self, extents: &Extents) -> Result<(), CudaError> {
        let model = Arc::clone(&self.launcher.model);
        let extents = self.buckets.of_batch(extents);
        let room = self.make_room(&model.program, &extents);
        room.map_err(|error| match error {
            NoRoom::Plan(error) => error.into(),
            NoRoom::Memory { bytes, source } => {
                advise(source, &model, self.workspace.planner(), bytes, &extents)
            }
        })?;
        for slot in &mut self.slots {
            slot.clear();
            let extra = Extra::of(&model.program);
            slot.staging.place(None, extra, &extents)?;
            let (pieces, bytes) = pieces(&model.program, &extents)?;
            slot.reserve(&model.device, bytes, &pieces)?;
        }
        Ok(())
    }

    /// Runs a batch. The caller must have checked the batch against the model's limits.
    pub fn run(&mut self, batch: &Batch) -> Result<Vec<Output>, CudaError> {
        self.run_at(batch, 0)
    }

    /// Runs the next tokens of sequences in `cache`, and appends their keys and values to the cache.
    pub fn run_cached(
        &mut self,
        batch: &Batch,
        cache: &mut CudaCache,
    ) -> Result<Vec<Output>, CudaError> {
        self.run_at(batch, cache.memory.start())
    }

    /// Enqueues work that appends the keys and values of the next tokens of sequences to `cache`, without computing outputs. Returns a
    /// fence after this work, without waiting for it.
    pub fn fill(&mut self, batch: &Batch, cache: &mut CudaCache) -> Result<Fence, CudaError> {
        let n_steps = self.launcher.model.program.steps_to_fill_caches();
        let (fence, _) = self.fill_by(batch, cache, n_steps)?;
        Ok(fence)
    }

    /// Does the same as [`fill`](Self::fill), and computes the logits of each sequence's next token. Returns the address of the logits,
    /// one row per sequence, which is valid until the next batch on the stream.
    pub fn fill_to_logits(
        &mut self,
        batch: &Batch,
        cache: &mut CudaCache,
    ) -> Result<(Fence, u64), CudaError> {
        let (fence, ready) = self.fill_by(batch, cache, usize::MAX)?;
        let program = self.launcher.model.program();
        let chunks = self.workspace.chunks();
        let logits = program.next_logits();
        let logits = logits.map_or(0, |(tensor, _)| {
            address_of(program, tensor, &ready.site.plan, chunks)
        });
        Ok((fence, logits))
    }

    /// Enqueues the first `n_steps` steps of the program.
    fn fill_by(
        &mut self,
        batch: &Batch,
        cache: &mut CudaCache,
        n_steps: usize,
    ) -> Result<(Fence, Ready), CudaError> {
        let ready = self.prepare(batch, cache.memory.start())?;
        let staging = &mut self.slots[ready.slot].staging;
        staging.fill(&ready.data, batch, &ready.extents)?;
        let [upload, ..] = &*self.launcher.model.before;
        staging.upload(&ready.data, upload)?;
        staging.note_upload()?;
        self.launch(&ready, n_steps, &|_| true)?;
        Ok((Fence::after(&self.launcher.stream)?, ready))
    }

    /// Makes later runs wait for a fence in another stream.
    ///
    /// # Errors
    /// Returns driver errors.
    pub fn wait_behind(&self, fence: &Fence) -> Result<(), CudaError> {
        fence.hold(&self.launcher.stream)
    }

    fn run_at(&mut self, batch: &Batch, cache: u64) -> Result<Vec<Output>, CudaError> {
        self.submit_at(batch, cache, None)?.wait()
    }

    /// Submits a batch like [`submit`](Self::submit), with the KV cache at address `cache` (0 without one). If `lap` is given, its events
    /// record the start and the end of the run.
    fn submit_at(
        &mut self,
        batch: &Batch,
        cache: u64,
        lap: Option<&[CudaEvent; 2]>,
    ) -> Result<CudaTicket, CudaError> {
        let ready = self.prepare(batch, cache)?;
        let (pieces, bytes) = pieces(&self.launcher.model.program, &ready.own)?;
        self.slots[ready.slot].reserve(&self.launcher.model.device, bytes, &pieces)?;
        let enqueued = self.enqueue_between(&ready, batch, (&pieces, bytes), lap);
        let enqueued = enqueued.inspect_err(|_| {
            // Wait, because enqueued work may still write to the slot's memory, which the next batch would reuse.
            let _ = self.launcher.stream.synchronize();
        })?;
        self.submitted += 1;
        let ticket = self.slots[ready.slot].detach(pieces, self.submitted);
        let ticket = ticket.expect("there is room for its results, as was just made");
        self.learn(&ready, enqueued)?;
        Ok(ticket)
    }

    /// Enqueues a run and the copies of its results.
    fn enqueue_between(
        &mut self,
        ready: &Ready,
        batch: &Batch,
        (pieces, bytes): (&[Piece], usize),
        lap: Option<&[CudaEvent; 2]>,
    ) -> Result<Enqueued, CudaError> {
        let stream = Arc::clone(&self.launcher.stream);
        let note = |nth: usize| match lap {
            Some(lap) => lap[nth]
                .record(&stream)
                .during(|| "record an event".to_owned()),
            None => Ok(()),
        };
        note(0)?;
        let enqueued = self.enqueue(ready, batch)?;
        self.download(ready, pieces, bytes)?;
        note(1)?;
        Ok(enqueued)
    }

    pub fn program(&self) -> &Program {
        self.launcher.model.program()
    }

    /// Memory that the session and its model currently hold.
    pub fn memory(&self) -> MemoryUse {
        MemoryUse {
            weights: self.launcher.model.weight_bytes(),
            activations: self.workspace.chunks().bytes(),
            batch_data: self.slots.iter().map(|slot| slot.staging.bytes()).sum(),
        }
    }

    /// Statistics of graph replays.
    pub fn graph_use(&self) -> GraphUse {
        self.graphs.used()
    }

    /// Returns the cost of memory management in the last run, excluding batch data.
    pub fn memory_work(&self) -> MemoryWork {
        self.workspace.work()
    }

    /// Plans a batch and allocates its memory. If an allocation fails, the session releases all memory and stays usable.
    fn prepare(&mut self, batch: &Batch, cache: u64) -> Result<Ready, CudaError> {
        let model = Arc::clone(&self.launcher.model);
        model
            .device
            .context()
            .bind_to_thread()
            .during(|| "use the device on this thread".into())?;
        let slot = self.free_slot()?;
        let own = batch.extents();
        let mut extents = extents_of(&self.buckets, batch);
        let mut room = self.make_room(&model.program, &extents);
        if matches!(room, Err(NoRoom::Memory { .. })) && extents != own {
            // Try without the bucket: the batch itself takes slightly less memory.
            extents = own;
            room = self.make_room(&model.program, &own);
        }
        let plan = room.map_err(|error| match error {
            NoRoom::Plan(error) => error.into(),
            NoRoom::Memory { bytes, source } => {
                advise(source, &model, self.workspace.planner(), bytes, &own)
            }
        })?;
        let extra = Extra::of(&model.program);
        let padded = batch.padded().filter(|_| !extra.is_read());
        let n_padded = padded.map(|padded| padded.mask.len());
        let staging = &mut self.slots[slot].staging;
        let placed = staging.place(n_padded, extra, &extents);
        let data = placed.inspect_err(|_| self.release())?;
        let chunks = self.workspace.chunks();
        let used = (0..plan.chunks.len()).filter(|&chunk| plan.chunks[chunk] > 0);
        let mut addresses: Vec<_> = used.map(|chunk| chunks.at(chunk, 0)).collect();
        addresses.extend(self.slots[slot].staging.addresses());
        addresses.push(cache);
        Ok(Ready {
            slot,
            site: GraphBinding { plan, addresses },
            data,
            own,
            extents,
            cache,
        })
    }

    /// Returns a slot for the next batch. Prefers a free slot to a slot whose batch still runs after its ticket was dropped.
    fn free_slot(&mut self) -> Result<usize, CudaError> {
        let slots = self.slots.iter().enumerate();
        let free = slots.filter(|(_, slot)| !slot.is_taken());
        let first = free.min_by_key(|(_, slot)| slot.nth());
        let (at, _) = first.ok_or(CudaError::InFlight)?;
        self.slots[at].clear();
        Ok(at)
    }

    fn make_room(
        &mut self,
        program: &Program,
        extents: &Extents,
    ) -> Result<Arc<Plan>, NoRoom<CudaError>> {
        let room = self.workspace.make_room(program, extents);
        // The workspace has released the memory to which the graphs refer.
        if matches!(room, Err(NoRoom::Memory { .. })) {
            self.graphs.clear();
        }
        room.map(|(plan, _)| plan)
    }

    fn release(&mut self) {
        self.graphs.clear();
        for slot in &mut self.slots {
            slot.release();
        }
        self.workspace.release();
    }

    /// Enqueues a run, from the upload of the batch to the last launch. Replays a graph if the session has one for this run.
    fn enqueue(&mut self, ready: &Ready, batch: &Batch) -> Result<Enqueued, CudaError> {
        let staging = &mut self.slots[ready.slot].staging;
        staging.fill(&ready.data, batch, &ready.extents)?;
        if self.graphs.replay(&ready.key(), &ready.site)? {
            return Ok(Enqueued::Replayed);
        }
        self.launch_all(ready)?;
        Ok(Enqueued::Launched)
    }

    /// Captures a graph of a run that was just launched, if [`Graphs::is_due`] returns true. Meanwhile, the device executes the run.
    fn learn(&mut self, ready: &Ready, enqueued: Enqueued) -> Result<(), CudaError> {
        let key = ready.key();
        let is_bucket = ready.extents != ready.own;
        if enqueued == Enqueued::Replayed
            || self.replay == GraphChoice::Off
            || !self.graphs.is_due(&key, &ready.site, is_bucket)
        {
            return Ok(());
        }
        let graph = capture(&self.launcher.stream, THREAD, || self.launch_all(ready))?;
        // Upload the graph now, so that its first replay does not wait for the upload.
        graph.upload().during(|| "upload a graph".to_owned())?;
        self.graphs.keep(key, &ready.site, graph);
        Ok(())
    }

    /// Launches the upload of a batch and then its run.
    fn launch_all(&self, ready: &Ready) -> Result<(), CudaError> {
        let [upload, ..] = &*self.launcher.model.before;
        self.slots[ready.slot].staging.upload(&ready.data, upload)?;
        self.launch(ready, usize::MAX, &|_| true)
    }

    /// Launches, in order, the steps among the first `n_steps` whose kernel satisfies `wanted`. A padded batch is packed first.
    fn launch(
        &self,
        ready: &Ready,
        n_steps: usize,
        wanted: &dyn Fn(&KernelSpec) -> bool,
    ) -> Result<(), CudaError> {
        let stream = self.launcher.stream.cu_stream();
        let data = &ready.data;
        let [_, scan, scatter] = &*self.launcher.model.before;
        if let Some([mask, ids, types]) = data.padded
            && wanted(scan.kernel())
        {
            let extents = ready.extents.with_rows(ready.extents.batch);
            // SAFETY: the staging memory has room for all operands of these extents.
            unsafe {
                scan.launch(
                    stream,
                    &extents,
                    &[mask, data.cu_lens, data.pair_offsets],
                    "pack",
                    Start::Plain,
                )?;
                let out = [data.token_ids, data.type_ids, data.positions];
                let args = [mask, ids, types, data.cu_lens, out[0], out[1], out[2]];
                scatter.launch(stream, &extents, &args, "pack", Start::Plain)?;
            }
        }
        let bound = Bound {
            extents: &ready.extents,
            data,
            plan: &ready.site.plan,
            chunks: self.workspace.chunks(),
            cache: ready.cache,
        };
        self.launcher.steps(&bound, n_steps, wanted)
    }

    /// Enqueues the copies of a run's results to the host, in their storage type.
    fn download(&mut self, ready: &Ready, pieces: &[Piece], bytes: usize) -> Result<(), CudaError> {
        let addresses = self.output_addresses(ready);
        let Launcher { model, stream, .. } = &self.launcher;
        let output = self.slots[ready.slot].output();
        let output = output.expect("there is room for the results, as was just made");
        let to = output.address()?;
        for (piece, from) in pieces.iter().zip(addresses) {
            let name = &piece.name;
            if piece.bytes == 0 {
                continue;
            }
            if bytes as u64 <= FEW_BYTES {
                let [copy, ..] = &*model.before;
                let rows = (piece.bytes as u64).div_ceil(Upload::PIECE);
                let extents = Extents::default().with_rows(rows);
                let args = [from, to + piece.at as u64];
                // SAFETY: the kernel copies 16 bytes at a time. Tensors and pieces start at multiples of `ALIGNMENT`, so the last 16 bytes
                // that it copies contain no other tensor or piece. The output stays valid at `from` until the next batch on the stream. The
                // memory at `to` is freed or reused only after the event that is recorded below.
                unsafe { copy.launch(stream.cu_stream(), &extents, &args, name, Start::Plain) }?;
            } else {
                let to = &mut output.memory_mut()[piece.at..piece.at + piece.bytes];
                // SAFETY: `from` and `to` stay valid as above, and nothing reads the pinned memory before the event.
                unsafe { result::memcpy_dtoh_async(to, from, stream.cu_stream()) }
                    .during(|| format!("download `{name}`"))?;
            }
        }
        output.note(stream)
    }

    /// Returns the address of each output of a run, which is valid until the next batch on the stream.
    fn output_addresses(&self, ready: &Ready) -> Vec<u64> {
        let program = &self.launcher.model.program;
        let outputs = program.outputs_of(ready.own.part);
        let address = |(_, tensor): &(String, TensorIndex)| {
            let nth = program.outputs.iter().position(|(_, of)| of == tensor);
            let slot = self.output_slots[nth.unwrap_or_default()];
            let at = ready.site.plan.placements[slot];
            self.workspace.chunks().at(at.chunk as usize, at.offset)
        };
        outputs.map(address).collect()
    }
}

/// Returns the layout of a batch's outputs in the memory of its slot, and their total size in bytes. A bucket's additional rows come after
/// the rows of the batch and are omitted.
fn pieces(program: &Program, own: &Extents) -> Result<(Vec<Piece>, usize), CudaError> {
    let mut end = 0;
    let mut pieces = Vec::with_capacity(program.outputs.len());
    for (name, tensor) in program.outputs_of(own.part) {
        let record = &program.tensors[*tensor];
        let bytes = program.bytes(record, own)? as usize;
        let dims: Option<Vec<u64>> = record.shape.0.iter().map(|d| d.eval(own)).collect();
        let shape = dims.ok_or_else(|| SizeOverflow {
            tensor: name.clone(),
            shape: record.shape.clone(),
        })?;
        pieces.push(Piece {
            name: name.clone(),
            shape,
            element: record.element,
            at: end,
            bytes,
        });
        end += bytes.next_multiple_of(ALIGNMENT as usize);
    }
    Ok((pieces, end))
}

impl Drop for CudaSession {
    fn drop(&mut self) {
        // Memory must not be freed while a kernel may use it. A drop cannot return an error.
        let _ = self.launcher.stream.synchronize();
    }
}

/// Index of each output among the planned tensors.
fn output_slots(program: &Program) -> Vec<usize> {
    let slot = |output: usize| program.planned().position(|(index, _)| index == output);
    let slots = program.outputs.iter().map(|&(_, tensor)| slot(tensor));
    slots
        .map(|slot| slot.expect("a step writes each output, so the planner places it"))
        .collect()
}

/// Adds two facts to an out-of-memory error: the size of the plan's chunks (`bytes`), and an estimate of the number of tokens that fit. The
/// estimate uses the memory that is free now. The session has already released its own memory, so the next run can use all of it.
fn advise(
    error: CudaError,
    model: &CudaModel,
    planner: &Planner,
    bytes: u64,
    extents: &Extents,
) -> CudaError {
    let CudaError::OutOfMemory { what, .. } = error else {
        return error;
    };
    let (free, total) = match model.device.memory() {
        Ok(memory) => memory,
        Err(error) => return error,
    };
    let fit = |tokens: u64| u128::from(tokens) * u128::from(free) / u128::from(bytes.max(1));
    let advice = match planner.choice().maximum() {
        Some(&Extents { tokens, .. }) => format!(
            "the declared maximum of {tokens} tokens needs {bytes} bytes; about {} would fit, declare a smaller maximum",
            fit(tokens)
        ),
        None => format!(
            "{} tokens need {bytes} bytes; about {} tokens of such a batch would fit",
            extents.tokens,
            fit(extents.tokens)
        ),
    };
    CudaError::OutOfMemory {
        what,
        bytes,
        free,
        total,
        advice,
    }
}
