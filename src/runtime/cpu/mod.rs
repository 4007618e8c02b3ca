//! CPU executor. It computes in f32 on all cores. It places tensors in memory with the same planner as a device, so tests on the CPU also
//! detect wrong tensor lifetimes.

mod chunks;
pub mod ops;
mod threads;
mod weights;

pub use threads::{Threads, ThreadsError};

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use chunks::Chunks;
use ops::{MatmulPrecision, OpError, Read};
use weights::Weights;

use super::{
    AllocatorChoice, MemoryUse, MemoryWork, Output, Planner, PlannerError,
    batch::Batch,
    weights::{CheckpointError, WeightSource},
    workspace::{ChunkOwner, NoRoom, Workspace},
};
use crate::{
    kernels::KernelSpec,
    ops::BatchInput,
    plan::Plan,
    program::{LaunchError, Program, SizeOverflow, Step, Storage, TensorIndex},
    tensor::{DType, Element, Extents, Format},
};

#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    #[error(
        "the CPU executor computes in f32, but the program stores {0}; use f32, or a CUDA device"
    )]
    DType(DType),
    #[error(
        "this CPU has no instructions for products in {0} (expected AVX-512 BF16); compute in f32 or int8"
    )]
    MatmulPrecision(MatmulPrecision),
    #[error(
        "a linear layer has a weight in {0}, which the CPU executor does not compute with; expected f32, bf16 or int8"
    )]
    WeightFormat(Element),
    #[error(transparent)]
    Weights(#[from] CheckpointError),
    #[error(transparent)]
    Plan(#[from] PlannerError),
    #[error(transparent)]
    Size(#[from] SizeOverflow),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error("the step `{step}` failed")]
    Step { step: String, source: OpError },
    #[error(
        "the {bytes} bytes of host memory that the intermediate tensors need could not be allocated; send fewer tokens at once"
    )]
    OutOfMemory { bytes: u64 },
    #[error(
        "the {bytes} bytes of host memory that the KV cache needs could not be allocated; request fewer or shorter sequences"
    )]
    CacheMemory { bytes: u64 },
    #[error(
        "the {bytes} bytes of host memory that the output `{output}` needs could not be allocated; send fewer tokens at once, or request other outputs"
    )]
    OutputMemory { output: String, bytes: u64 },
}

/// Copies the values of an output into a new allocation.
fn copied(output: &str, values: &[f32]) -> Result<Vec<f32>, CpuError> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(values.len())
        .map_err(|_| CpuError::OutputMemory {
            output: output.to_owned(),
            bytes: size_of_val(values) as u64,
        })?;
    copy.extend_from_slice(values);
    Ok(copy)
}

/// Returns whether the executor supports weights of linear layers in this format on this CPU.
pub fn computes_with(format: Format) -> bool {
    weights::precision(format.into()).is_ok()
}

/// A program, and its weights in host memory.
pub struct CpuModel {
    program: Program,
    weights: Weights,
    threads: Threads,
    /// Roles of the operands of each kernel of the program.
    operands: Vec<OperandRoles>,
}

/// Roles of a kernel's operands by position.
#[derive(Clone, Copy)]
struct OperandRoles {
    /// Number of operands that the kernel writes. These are the last operands.
    n_writes: usize,
    /// Index of the operand that is the weight of a linear layer.
    weight: Option<usize>,
}

impl OperandRoles {
    fn new(kernel: &KernelSpec) -> Self {
        let kernel = kernel.as_kernel();
        Self {
            n_writes: kernel.n_writes(),
            weight: kernel.weight_operand(),
        }
    }
}

impl CpuModel {
    /// Loads the weights of `program` for execution on `threads`. `progress` receives the number of finished tensors and the
    /// total.
    pub fn load(
        program: Program,
        threads: Threads,
        source: &dyn WeightSource,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Self, CpuError> {
        if program.dtype != DType::F32 {
            return Err(CpuError::DType(program.dtype));
        }
        let weights = Weights::load(&program, &threads, source, progress)?;
        let operands = program.kernels.iter().map(OperandRoles::new).collect();
        Ok(Self {
            program,
            weights,
            threads,
            operands,
        })
    }

    /// Total bytes of the packed and the unpacked weights.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.bytes()
    }

    /// Returns the threads on which sessions of this model run.
    pub fn threads(&self) -> &Threads {
        &self.threads
    }

    pub fn program(&self) -> &Program {
        &self.program
    }
}

/// Mutable state of one caller that runs a [`CpuModel`].
pub struct CpuSession {
    model: Arc<CpuModel>,
    workspace: Workspace<Chunks>,
    batch_data: u64,
}

/// Arrays of a batch that a program reads, by kind.
struct BatchData {
    ints: Vec<(BatchInput, Vec<i32>)>,
    pair_offsets: Vec<i64>,
}

impl BatchData {
    fn of(program: &Program, batch: &Batch) -> Self {
        let e = batch.extents();
        let (tokens, sequences) = (e.tokens as usize, e.batch as usize);
        let mut ints = Vec::new();
        let mut add = |meta: BatchInput, n: usize, write: &dyn Fn(&mut [i32])| {
            if program.reads(meta) {
                let mut values = vec![0; n];
                write(&mut values);
                ints.push((meta, values));
            }
        };
        add(BatchInput::TokenIds, tokens, &|to| {
            batch.write_token_ids(to)
        });
        add(BatchInput::TypeIds, tokens, &|to| batch.write_type_ids(to));
        add(BatchInput::Positions, tokens, &|to| {
            batch.write_positions(to)
        });
        add(BatchInput::TokenSlots, tokens, &|to| {
            batch.write_token_slots(to)
        });
        add(BatchInput::CuLens, sequences + 1, &|to| {
            batch.write_cu_lens(to)
        });
        add(BatchInput::ValidLens, sequences, &|to| {
            batch.write_valid_lens(to)
        });
        add(BatchInput::Slots, e.slots as usize, &|to| {
            batch.write_slots(to)
        });
        add(BatchInput::SlotStarts, sequences, &|to| {
            batch.write_slot_starts(to);
        });
        add(BatchInput::KeyLens, sequences, &|to| {
            batch.write_key_lens(to)
        });
        add(BatchInput::SourceSlots, e.source_slots as usize, &|to| {
            batch.write_source_slots(to);
        });
        add(BatchInput::SourceStarts, sequences, &|to| {
            batch.write_source_starts(to);
        });
        add(BatchInput::Seeds, 2 * sequences, &|to| {
            batch.write_seeds(to)
        });
        add(BatchInput::SourceLens, sequences, &|to| {
            batch.write_source_lens(to);
        });
        add(BatchInput::PooledTokens, tokens + 1, &|to| {
            batch.write_pooled_tokens(to);
        });
        add(BatchInput::PooledCuLens, sequences + 1, &|to| {
            batch.write_pooled_cu_lens(to);
        });
        for first in program.first_ids() {
            add(BatchInput::PreviousIds { first }, tokens, &|to| {
                batch.write_previous_ids(first, to);
            });
        }
        Self {
            ints,
            pair_offsets: match program.reads(BatchInput::PairOffsets) {
                true => batch.pair_offsets(),
                false => Vec::new(),
            },
        }
    }

    fn read(&self, meta: BatchInput) -> Read<'_> {
        if meta == BatchInput::PairOffsets {
            return Read::I64(&self.pair_offsets);
        }
        let found = self.ints.iter().find(|(kind, _)| *kind == meta);
        Read::I32(found.map_or(&[], |(_, values)| values))
    }

    fn bytes(&self) -> u64 {
        let ints: usize = self.ints.iter().map(|(_, values)| values.len()).sum();
        (4 * ints + 8 * self.pair_offsets.len()) as u64
    }
}

/// Host memory of a KV cache: the blocks of all caches of a program.
pub struct CpuCache {
    memory: CacheMemory,
}

/// Elements of a KV cache.
enum CacheMemory {
    Real(Vec<f32>),
    /// Elements encoded in E4M3.
    E4m3(Vec<u8>),
}

/// Start address and number of elements of a KV cache.
#[derive(Clone, Copy)]
enum CachePointer {
    Real(*mut f32, usize),
    E4m3(*mut u8, usize),
}

impl CacheMemory {
    /// Returns an empty cache.
    fn none() -> Self {
        Self::Real(Vec::new())
    }

    fn pointer(&mut self) -> CachePointer {
        match self {
            Self::Real(values) => CachePointer::Real(values.as_mut_ptr(), values.len()),
            Self::E4m3(codes) => CachePointer::E4m3(codes.as_mut_ptr(), codes.len()),
        }
    }
}

fn allocated<T: Clone>(n: u64, zero: T) -> Result<Vec<T>, CpuError> {
    let bytes = n.saturating_mul(size_of::<T>() as u64);
    let error = || CpuError::CacheMemory { bytes };
    let room = usize::try_from(n).map_err(|_| error())?;
    let mut memory = Vec::new();
    memory.try_reserve_exact(room).map_err(|_| error())?;
    memory.resize(room, zero);
    Ok(memory)
}

impl CpuCache {
    /// Allocates a cache of `blocks` blocks for `program`.
    ///
    /// # Errors
    /// Returns an error if the allocation fails.
    pub fn new(program: &Program, blocks: u64) -> Result<Self, CpuError> {
        let elements = blocks.saturating_mul(program.block_elements());
        let memory = match program.pool().is_e4m3() {
            true => CacheMemory::E4m3(allocated(elements, 0)?),
            false => CacheMemory::Real(allocated(elements, 0.0)?),
        };
        Ok(Self { memory })
    }
}

impl CpuSession {
    /// Creates a session. Memory for activations is allocated by its runs.
    pub fn new(model: Arc<CpuModel>, allocator: &AllocatorChoice) -> Result<Self, CpuError> {
        let planner = Planner::new(model.program(), allocator)?;
        Ok(Self {
            model,
            workspace: Workspace::new(planner, Chunks::default()),
            batch_data: 0,
        })
    }

    /// Runs a batch. The caller must have checked it against the model's limits.
    pub fn run(&mut self, batch: &Batch) -> Result<Vec<Output>, CpuError> {
        self.run_on(batch, &mut CacheMemory::none(), |_, _| ())
    }

    /// Runs the next tokens of sequences in `cache`, and appends their keys and values to the cache.
    pub fn run_cached(
        &mut self,
        batch: &Batch,
        cache: &mut CpuCache,
    ) -> Result<Vec<Output>, CpuError> {
        self.run_on(batch, &mut cache.memory, |_, _| ())
    }

    /// Runs a batch like [`run`](Self::run), or like [`run_cached`](Self::run_cached) if there is a cache. Calls `observe` with the kernel
    /// and the duration of each step, in order.
    pub fn run_observed(
        &mut self,
        batch: &Batch,
        cache: Option<&mut CpuCache>,
        observe: impl FnMut(&KernelSpec, Duration) + Send,
    ) -> Result<Vec<Output>, CpuError> {
        match cache {
            Some(cache) => self.run_on(batch, &mut cache.memory, observe),
            None => self.run_on(batch, &mut CacheMemory::none(), observe),
        }
    }

    fn run_on(
        &mut self,
        batch: &Batch,
        cache: &mut CacheMemory,
        observe: impl FnMut(&KernelSpec, Duration) + Send,
    ) -> Result<Vec<Output>, CpuError> {
        let threads = self.model.threads.clone();
        threads.run(|| self.run_here(batch, cache, observe))
    }

    /// Runs a batch on the calling thread, which distributes work to the other threads of its pool.
    fn run_here(
        &mut self,
        batch: &Batch,
        cache: &mut CacheMemory,
        mut observe: impl FnMut(&KernelSpec, Duration),
    ) -> Result<Vec<Output>, CpuError> {
        let model = Arc::clone(&self.model);
        let program = &model.program;
        let extents = batch.extents();
        let room = self.workspace.make_room(program, &extents);
        let (plan, _) = room.map_err(|error| match error {
            NoRoom::Plan(error) => error.into(),
            NoRoom::Memory { bytes, .. } => CpuError::OutOfMemory { bytes },
        })?;
        let data = BatchData::of(program, batch);
        self.batch_data = self.batch_data.max(data.bytes());
        let run = Run::new(
            &model,
            self.workspace.chunks(),
            &plan,
            extents,
            &data,
            cache.pointer(),
        )?;
        for step in &program.steps {
            let began = Instant::now();
            if let Some(kernel) = run.step(step)? {
                observe(kernel, began.elapsed());
            }
        }
        program
            .outputs_of(extents.part)
            .map(|(name, tensor)| {
                let shape = &program.tensors[*tensor].shape;
                let overflow = || SizeOverflow {
                    tensor: name.clone(),
                    shape: shape.clone(),
                };
                let dims: Option<Vec<u64>> = shape.0.iter().map(|d| d.eval(&extents)).collect();
                let dims = dims.ok_or_else(overflow)?;
                // SAFETY: all steps are done, and the memory of an output is not reused within the plan.
                let computed = unsafe { run.slice(*tensor) };
                let values = copied(name, computed)?;
                Ok(Output {
                    name: name.clone(),
                    shape: dims,
                    values,
                })
            })
            .collect()
    }

    pub fn program(&self) -> &Program {
        &self.model.program
    }

    /// Memory that is currently held.
    pub fn memory(&self) -> MemoryUse {
        MemoryUse {
            weights: self.model.weight_bytes(),
            activations: self.workspace.chunks().bytes(),
            batch_data: self.batch_data,
        }
    }

    /// Returns the cost of memory management in the last run.
    pub fn memory_work(&self) -> MemoryWork {
        self.workspace.work()
    }
}

/// The state of one run: its inputs and the locations of all planned tensors.
struct Run<'a> {
    model: &'a CpuModel,
    extents: Extents,
    data: &'a BatchData,
    /// For each planned tensor and each cache in f32, by tensor index: the address of the first element, and the number of elements.
    planned: Vec<Option<(*mut f32, usize)>>,
    /// For each cache in E4M3, by tensor index: the address of the first element, and the number of elements.
    codes: Vec<Option<(*mut u8, usize)>>,
}

impl<'a> Run<'a> {
    fn new(
        model: &'a CpuModel,
        chunks: &Chunks,
        plan: &Plan,
        extents: Extents,
        data: &'a BatchData,
        cache: CachePointer,
    ) -> Result<Self, CpuError> {
        let mut planned = vec![None; model.program.tensors.len()];
        for ((index, tensor), place) in model.program.planned().zip(&plan.placements) {
            let n = model.program.bytes(tensor, &extents)? / DType::F32.bytes();
            planned[index] = Some((chunks.at(place.chunk as usize, place.offset), n as usize));
        }
        let mut codes = vec![None; planned.len()];
        for (index, tensor) in model.program.tensors.iter().enumerate() {
            let Storage::Cached(of) = tensor.place else {
                continue;
            };
            // If the pool (the memory of all caches) has no blocks, the offset of a cache may be past its end. The offset is then reduced
            // to the end.
            let offset = model.program.cache_offset(of) as usize;
            // SAFETY: the reduced offsets are within the pool or at its end.
            match cache {
                CachePointer::Real(start, n) => {
                    let offset = offset.min(n);
                    planned[index] = Some((unsafe { start.add(offset) }, n - offset));
                }
                CachePointer::E4m3(start, n) => {
                    let offset = offset.min(n);
                    codes[index] = Some((unsafe { start.add(offset) }, n - offset));
                }
            }
        }
        Ok(Self {
            model,
            extents,
            data,
            planned,
            codes,
        })
    }

    /// Returns the elements of a planned tensor.
    ///
    /// # Safety
    /// Nothing may write the tensor's bytes while the slice exists. The plan assigns disjoint memory to tensors that are live at the same
    /// time, so this holds for the operands of one step.
    unsafe fn slice(&self, tensor: usize) -> &[f32] {
        match self.planned[tensor] {
            // SAFETY: the plan puts the tensor inside its chunk, aligned to 256 bytes.
            Some((start, n)) => unsafe { std::slice::from_raw_parts(start, n) },
            None => &[],
        }
    }

    /// Runs one step if it applies to this batch. Returns the kernel, or `None` if the step does not apply.
    fn step(&self, step: &Step) -> Result<Option<&KernelSpec>, CpuError> {
        let program = &self.model.program;
        let Some((kernel, extents)) = step.launch(&self.extents)? else {
            return Ok(None);
        };
        let roles = self.model.operands[kernel];
        let kernel = &program.kernels[kernel];
        let done = match kernel {
            // `MhaDecodeAppend` reads the part of the cache that it writes. Operands of a CPU kernel must not share bytes, so two kernels
            // replace it.
            KernelSpec::MhaDecodeAppend(both) => {
                both.in_turn(&step.operands)
                    .iter()
                    .try_for_each(|(kernel, operands)| {
                        self.launch(kernel, OperandRoles::new(kernel), operands, &extents)
                    })
            }
            _ => self.launch(kernel, roles, &step.operands, &extents),
        };
        done.map_err(|source| CpuError::Step {
            step: step.name.clone(),
            source,
        })?;
        Ok(Some(kernel))
    }

    fn launch(
        &self,
        kernel: &KernelSpec,
        roles: OperandRoles,
        operands: &[TensorIndex],
        extents: &Extents,
    ) -> Result<(), OpError> {
        let program = &self.model.program;
        let (reads, writes) = operands.split_at(operands.len().saturating_sub(roles.n_writes));
        let reads: Vec<Read<'_>> = reads
            .iter()
            .enumerate()
            .map(|(at, &operand)| match &program.tensors[operand].place {
                Storage::Batch(meta) => self.data.read(*meta),
                Storage::Weight(_) => self.model.weights.read(operand, roles.weight == Some(at)),
                // SAFETY: the kernel writes only `writes`, whose bytes no other operand shares. A kernel reads the cache or
                // appends to it, never both.
                Storage::Planned { .. } | Storage::Cached(_) => match self.codes[operand] {
                    Some((start, n)) => Read::E4m3(unsafe { std::slice::from_raw_parts(start, n) }),
                    None => Read::Real(unsafe { self.slice(operand) }),
                },
            })
            .collect();
        // A kernel writes at most one cache.
        let codes = writes.iter().find_map(|&operand| self.codes[operand]);
        let mut writes: Vec<&mut [f32]> = writes
            .iter()
            .filter_map(|&operand| self.planned[operand])
            // SAFETY: the plan puts the tensor at an aligned address inside its chunk, and no other operand shares its bytes.
            .map(|(start, n)| unsafe { std::slice::from_raw_parts_mut(start, n) })
            .collect();
        if let Some((start, n)) = codes {
            // SAFETY: the range is within the pool, and no other operand shares its bytes.
            let codes = unsafe { std::slice::from_raw_parts_mut(start, n) };
            return ops::run_appending(kernel, extents, &reads, &mut writes, codes);
        }
        let run = match program.invariant {
            true => ops::run_invariant,
            false => ops::run,
        };
        run(kernel, extents, &reads, &mut writes)
    }
}
