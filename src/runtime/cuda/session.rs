mod staging;
mod timing;

use std::{sync::Arc, time::Instant};

use cudarc::driver::{CudaStream, result};

use staging::{BatchData, Staging};
pub use timing::Part;

use super::{
    error::{CudaError, During},
    graphs::Graphs,
    memory::Chunks,
    model::{CudaModel, SharedModel, Start},
    watch::Watch,
};
use crate::{
    kernels::KernelSpec,
    plan::Plan,
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
    staging: Staging,
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
            staging: Staging::new(model.device.clone(), Arc::clone(&stream)),
            stream,
            workspace: Workspace::new(planner, Chunks::new(model.device.clone())),
            graphs: Graphs::default(),
            start,
            output_slots: output_slots(&model.program),
            model,
        })
    }

    /// Runs a batch that was checked against the model's limits.
    pub fn run(&mut self, batch: &Batch) -> Result<Vec<Output>, CudaError> {
        let ready = self.prepare(batch)?;
        self.enqueue(&ready, batch)?;
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
                self.enqueue(&ready, batch)?;
                host += began.elapsed();
                Ok(())
            })?;
            self.staging.copied();
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
            batch_data: self.staging.bytes(),
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
        let (data, moved) = self.staging.place(batch).inspect_err(|_| self.release())?;
        if moved {
            self.graphs.clear();
        }
        Ok(Ready {
            plan,
            data,
            extents,
        })
    }

    fn release(&mut self) {
        self.graphs.clear();
        self.staging.release();
        self.workspace.release();
    }

    /// Enqueues a run, from the upload of the batch to the last launch: by a graph where the shape
    /// was seen before.
    fn enqueue(&mut self, ready: &Ready, batch: &Batch) -> Result<(), CudaError> {
        self.staging.fill(&ready.data, batch)?;
        let mut graphs = std::mem::take(&mut self.graphs);
        let key = (ready.extents, ready.data.padded.is_some());
        let result = graphs.run(key, &ready.plan, &self.stream, || {
            self.staging.copy(&ready.data)?;
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

    fn download(&mut self, ready: &Ready) -> Result<Vec<Output>, CudaError> {
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
            self.staging.copied();
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
