mod timing;

use std::{sync::Arc, time::Instant};

use cudarc::driver::{CudaStream, result};

pub use timing::Part;

use super::{
    error::{CudaError, During},
    graphs::Graphs,
    memory::{Buffer, Chunks, Pinned},
    model::{CudaModel, SharedModel, Start},
    watch::Watch,
};
use crate::{
    kernels::{KernelSpec, Meta},
    plan::{ALIGNMENT, Plan},
    program::{Place, Program, SizeOverflow},
    runtime::{
        AllocatorChoice, MemoryUse, MemoryWork, Output, Planner,
        batch::Batch,
        weights::decode,
        workspace::{ChunkOwner, NoRoom, Workspace},
    },
    tensor::Extents,
};

/// What one caller needs to run a [`CudaModel`]: a stream, chunks, and room for batch data.
pub struct CudaSession {
    model: SharedModel,
    stream: Arc<CudaStream>,
    workspace: Workspace<Chunks>,
    /// Batch data on the host and on the device, in one piece; grows with the largest batch.
    staging: Option<(Pinned, Buffer)>,
    graphs: Graphs,
    /// How a kernel begins that comes after another one of the program.
    start: Start,
    /// For each output of the program, in their order, its index among the planned tensors.
    output_slots: Vec<usize>,
}

/// Several runs: milliseconds between CUDA events around each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timing {
    pub ms: Vec<f32>,
    /// Microseconds that the host took for each, from the batch to the last launch enqueued; empty
    /// where that is not told apart.
    pub host_us: Vec<f32>,
}

impl Timing {
    /// The median, or NaN without runs.
    pub fn median(&self) -> f32 {
        median(&self.ms)
    }

    /// The median of the host's share, where it is known.
    pub fn host_median(&self) -> Option<f32> {
        (!self.host_us.is_empty()).then(|| median(&self.host_us))
    }
}

fn median(of: &[f32]) -> f32 {
    let mut sorted = of.to_vec();
    sorted.sort_by(f32::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f32::NAN)
}

/// Where the data of a batch lie on the device.
#[derive(Clone, Copy, Default)]
struct BatchData {
    token_ids: u64,
    type_ids: u64,
    positions: u64,
    cu_lens: u64,
    pair_offsets: u64,
    valid_lens: u64,
    /// Mask, padded ids and padded segment ids, where the batch came padded.
    padded: Option<[u64; 3]>,
}

impl BatchData {
    fn at(&self, meta: Meta) -> u64 {
        match meta {
            Meta::TokenIds => self.token_ids,
            Meta::TypeIds => self.type_ids,
            Meta::Positions => self.positions,
            Meta::CuLens => self.cu_lens,
            Meta::PairOffsets => self.pair_offsets,
            Meta::ValidLens => self.valid_lens,
            Meta::Mask => self.padded.map_or(0, |[mask, ..]| mask),
        }
    }
}

/// A batch that is ready to launch: plan, addresses, extents.
struct Ready {
    plan: Arc<Plan>,
    data: BatchData,
    extents: Extents,
}

impl CudaSession {
    /// A session with a stream of its own that holds nothing yet. With `plain_launches` each
    /// kernel begins when the one before is done, also where the card could start it early.
    pub fn new(
        model: Arc<CudaModel>,
        allocator: &AllocatorChoice,
        plain_launches: bool,
    ) -> Result<Self, CudaError> {
        let start = match model.device.target()?.has_dependent_launch() && !plain_launches {
            true => Start::Early,
            false => Start::Plain,
        };
        let stream = model
            .device
            .context()
            .new_stream()
            .during(|| "make a stream".to_owned())?;
        let planner = Planner::new(&model.program, allocator)?;
        Ok(Self {
            stream,
            workspace: Workspace::new(planner, Chunks::new(model.device.clone())),
            staging: None,
            graphs: Graphs::default(),
            start,
            output_slots: output_slots(&model.program),
            model,
        })
    }

    /// Runs a batch that was checked against the model's limits.
    pub fn run(&mut self, batch: &Batch) -> Result<Vec<Output>, CudaError> {
        let ready = self.prepare(batch)?;
        self.upload(&ready.data, batch)?;
        self.enqueue(&ready)?;
        self.download(&ready)
    }

    /// Times ids → outputs on the device: `warm_up` runs, then `runs` between events each. The
    /// ids are uploaded inside the timed region; the outputs stay on the device.
    pub fn time(
        &mut self,
        batch: &Batch,
        warm_up: usize,
        runs: usize,
    ) -> Result<Timing, CudaError> {
        let watch = Watch::new(&self.model.device, &self.stream)?;
        let mut timing = Timing::default();
        for i in 0..warm_up + runs {
            let began = Instant::now();
            let ready = self.prepare(batch)?;
            let mut host = began.elapsed();
            let ms = watch.lap(|| {
                let began = Instant::now();
                self.upload(&ready.data, batch)?;
                self.enqueue(&ready)?;
                host += began.elapsed();
                Ok(())
            })?;
            if i >= warm_up {
                timing.ms.push(ms);
                timing.host_us.push(host.as_secs_f32() * 1e6);
            }
        }
        Ok(timing)
    }

    pub fn program(&self) -> &Program {
        self.model.program()
    }

    /// Bytes held now.
    pub fn memory(&self) -> MemoryUse {
        MemoryUse {
            weights: self.model.weight_bytes(),
            activations: self.workspace.chunks().bytes(),
            batch_data: self
                .staging
                .as_ref()
                .map_or(0, |(_, device)| device.bytes()),
        }
    }

    /// What managing the memory of the last run took. Batch data are not part of it.
    pub fn memory_work(&self) -> MemoryWork {
        self.workspace.work()
    }

    /// Plans, and makes room. A failed allocation leaves the session with nothing held and usable.
    fn prepare(&mut self, batch: &Batch) -> Result<Ready, CudaError> {
        let model = Arc::clone(&self.model);
        model
            .device
            .context()
            .bind_to_thread()
            .during(|| "use the device on this thread".into())?;
        let extents = batch.extents();
        let room = self.workspace.make_room(&model.program, &extents);
        // Chunks that have moved, or that a failure has freed.
        if !matches!(room, Ok((_, false)) | Err(NoRoom::Plan(_))) {
            self.graphs.clear();
        }
        let (plan, _) = room.map_err(|error| match error {
            NoRoom::Plan(error) => error.into(),
            NoRoom::Memory { bytes, source } => {
                advise(source, &model, self.workspace.planner(), bytes, &extents)
            }
        })?;
        let data = self.layout(batch).inspect_err(|_| self.release())?;
        Ok(Ready {
            plan,
            data,
            extents,
        })
    }

    fn release(&mut self) {
        self.graphs.clear();
        self.staging = None;
        self.workspace.release();
    }

    /// Gives every piece of batch data its place, and grows the staging memory to hold them.
    fn layout(&mut self, batch: &Batch) -> Result<BatchData, CudaError> {
        let e = batch.extents();
        let mut end = 0u64;
        let mut place = |bytes: u64| {
            let at = end;
            end += bytes.next_multiple_of(ALIGNMENT);
            at
        };
        let per_token = [
            place(4 * e.tokens),
            place(4 * e.tokens),
            place(4 * e.tokens),
        ];
        let cu_lens = place(4 * (e.batch + 1));
        let pair_offsets = place(8 * (e.batch + 1));
        let valid_lens = place(4 * e.batch);
        let padded = batch
            .padded()
            .map(|p| [(); 3].map(|()| place(4 * p.mask.len() as u64)));
        if self
            .staging
            .as_ref()
            .is_none_or(|(_, device)| device.bytes() < end)
        {
            self.staging = None;
            self.graphs.clear();
            let bytes = end.next_power_of_two();
            let device = Buffer::new(&self.model.device, bytes, "the batch data")?;
            self.staging = Some((Pinned::new(&self.model.device, bytes as usize)?, device));
        }
        let start = self
            .staging
            .as_ref()
            .map_or(0, |(_, device)| device.start());
        Ok(BatchData {
            token_ids: start + per_token[0],
            type_ids: start + per_token[1],
            positions: start + per_token[2],
            cu_lens: start + cu_lens,
            pair_offsets: start + pair_offsets,
            valid_lens: start + valid_lens,
            padded: padded.map(|p| p.map(|at| start + at)),
        })
    }

    /// Copies the batch data to the device; a padded batch is packed there.
    fn upload(&mut self, data: &BatchData, batch: &Batch) -> Result<(), CudaError> {
        // The staging memory may still be read by the copy of the run before.
        self.stream
            .synchronize()
            .during(|| "wait for the stream".to_owned())?;
        let Some((pinned, device)) = &mut self.staging else {
            return Ok(());
        };
        let start = device.start();
        let host = pinned.as_mut_slice();
        let mut last = 0;
        let mut write = |at: u64, bytes: &[u8]| {
            let from = (at - start) as usize;
            host[from..from + bytes.len()].copy_from_slice(bytes);
            last = last.max(from + bytes.len());
        };
        write(data.valid_lens, bytemuck::cast_slice(&batch.valid_lens()));
        let as_i32 = |values: &[u32]| values.iter().map(|&v| v as i32).collect::<Vec<i32>>();
        if let (Some(places), Some(batch)) = (data.padded, batch.padded()) {
            for (at, values) in
                places
                    .into_iter()
                    .zip([&batch.mask, &batch.token_ids, &batch.type_ids])
            {
                write(at, bytemuck::cast_slice(&as_i32(values)));
            }
        } else {
            write(data.token_ids, bytemuck::cast_slice(&batch.token_ids()));
            write(data.type_ids, bytemuck::cast_slice(&batch.type_ids()));
            write(data.positions, bytemuck::cast_slice(&batch.positions()));
            write(data.cu_lens, bytemuck::cast_slice(&batch.cu_lens()));
            write(
                data.pair_offsets,
                bytemuck::cast_slice(&batch.pair_offsets()),
            );
        }
        // SAFETY: the device buffer is as large as the pinned one, which outlives the copy: it is
        // written or freed only after the stream was waited for.
        unsafe {
            result::memcpy_htod_async(start, &pinned.as_slice()[..last], self.stream.cu_stream())
        }
        .during(|| "upload the batch".to_owned())
    }

    /// Enqueues all launches, by a graph where the shape was seen before.
    fn enqueue(&mut self, ready: &Ready) -> Result<(), CudaError> {
        let mut graphs = std::mem::take(&mut self.graphs);
        let key = (ready.extents, ready.data.padded.is_some());
        let result = graphs.run(key, &ready.plan, &self.stream, || {
            self.launch(ready, &|_| true)
        });
        self.graphs = graphs;
        result
    }

    /// Launches, in order, those steps of a run whose kernel is wanted. Kernels read batch data
    /// without waiting for earlier ones, so the kernels that pack them, and the first step, which
    /// comes after those and the upload, begin when all before them is done.
    fn launch(&self, ready: &Ready, wanted: &dyn Fn(&KernelSpec) -> bool) -> Result<(), CudaError> {
        let (program, stream) = (&self.model.program, self.stream.cu_stream());
        let data = &ready.data;
        let [scan, scatter] = &self.model.packing;
        if let Some([mask, ids, types]) = data.padded
            && wanted(scan.kernel())
        {
            let extents = ready.extents.with_rows(ready.extents.batch);
            // SAFETY: the staging memory has room for all of these at these extents.
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
        let mut places = vec![0; program.tensors.len()];
        for ((index, _), at) in program.planned().zip(&ready.plan.placements) {
            places[index] = self.workspace.chunks().at(at.chunk as usize, at.offset);
        }
        let mut pointers = Vec::with_capacity(16);
        let mut start = Start::Plain;
        for step in &program.steps {
            let Some((kernel, extents)) = step.launch(&ready.extents)? else {
                continue;
            };
            pointers.clear();
            pointers.extend(step.operands.iter().map(|&operand| {
                match &program.tensors[operand].place {
                    Place::Batch(meta) => data.at(*meta),
                    Place::Weight(_) => self.model.weights[operand],
                    Place::Planned { .. } => places[operand],
                }
            }));
            if !wanted(self.model.loaded[kernel].kernel()) {
                continue;
            }
            // SAFETY: the program binds tensors of the shapes that the kernel's parameters say,
            // and the plan gives those that are alive together memory of their own.
            unsafe {
                let loaded = &self.model.loaded[kernel];
                loaded.launch(stream, &extents, &pointers, &step.name, start)?;
            }
            start = self.start;
        }
        Ok(())
    }

    fn download(&self, ready: &Ready) -> Result<Vec<Output>, CudaError> {
        let program = &self.model.program;
        let mut outputs = Vec::with_capacity(program.outputs.len());
        for ((name, tensor), &slot) in program.outputs.iter().zip(&self.output_slots) {
            let record = &program.tensors[*tensor];
            let bytes = program.bytes(record, &ready.extents)? as usize;
            let mut raw = vec![0u8; bytes];
            let at = ready.plan.placements[slot];
            let from = self.workspace.chunks().at(at.chunk as usize, at.offset);
            // SAFETY: the output lives at `from` until the session plans again; `raw` is not
            // touched before the stream was waited for.
            unsafe { result::memcpy_dtoh_async(&mut raw, from, self.stream.cu_stream()) }
                .during(|| format!("download `{name}`"))?;
            self.stream
                .synchronize()
                .during(|| "wait for the run".to_owned())?;
            let dims: Option<Vec<u64>> = record
                .shape
                .0
                .iter()
                .map(|d| d.eval(&ready.extents))
                .collect();
            let shape = dims.ok_or_else(|| SizeOverflow {
                tensor: name.clone(),
                shape: record.shape.clone(),
            })?;
            outputs.push(Output {
                name: name.clone(),
                shape,
                values: decode(&raw, record.dtype),
            });
        }
        Ok(outputs)
    }
}

impl Drop for CudaSession {
    fn drop(&mut self) {
        // Memory must not be freed under a running kernel; an error here has no one to go to.
        let _ = self.stream.synchronize();
    }
}

/// For each output, its index among the planned tensors.
fn output_slots(program: &Program) -> Vec<usize> {
    let slot = |output: usize| program.planned().position(|(index, _)| index == output);
    let slots = program.outputs.iter().map(|&(_, tensor)| slot(tensor));
    slots
        .map(|slot| slot.expect("a step writes each output, so the planner places it"))
        .collect()
}

/// Adds to an out-of-memory error what the plan needs, the `bytes` of all its chunks, and about how
/// much would fit. Nothing is held any more, so what is free now is what the next run can have.
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
