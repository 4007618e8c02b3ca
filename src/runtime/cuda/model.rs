use std::{
    collections::HashMap,
    ffi::c_void,
    iter,
    panic::resume_unwind,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use cudarc::{
    driver::{CudaFunction, DriverError, result, sys},
    nvrtc::Ptx,
};

use super::{
    device::Device,
    error::{CudaError, During},
    matrix::Matrix,
    memory::{Buffer, Uploads},
};
use crate::{
    graph::WeightExpr,
    jit::{Cubin, Target},
    kernels::{KernelSpec, Launch, Role, max_sim::MaxSim},
    machine::Machine,
    plan::ALIGNMENT,
    program::{Program, Storage},
    runtime::weights::{
        Scales, WeightSource, encode, evaluate_as, evaluate_packed, evaluate_scaled,
    },
    tensor::{DType, Element, Extents, Size},
};

/// Number of loader threads. Each thread loads one weight at a time, and all threads of rayon's pool convert the values of this weight.
const LOADERS: usize = 8;

/// Maximum bytes of shared memory per CTA without an opt-in.
const DEFAULT_SHARED: u32 = 48 * 1024;

/// A kernel on a device, ready to launch.
pub(super) struct Loaded {
    function: CudaFunction,
    kernel: KernelSpec,
    symbol: String,
    args: Vec<Arg>,
    max_shared: u32,
    /// The card on which the kernel is launched.
    machine: Machine,
}

enum Arg {
    Pointer,
    /// A matrix that the kernel copies by TMA. The argument is a tensor map, not an address.
    Matrix(Matrix),
    Count(Size),
}

/// When a kernel may start, relative to earlier work on its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// The kernel starts when all earlier work on the stream is done.
    Plain,
    /// The kernel may start while the previous kernel still runs (programmatic dependent launch). It waits for that kernel with
    /// `griddepcontrol.wait`. The target must have [`Target::has_dependent_launch`], and the previous kernel must belong to the same
    /// program.
    Dependent,
}

impl Loaded {
    pub(super) fn new(
        device: &Device,
        kernel: &KernelSpec,
        cubin: &Cubin,
    ) -> Result<Self, CudaError> {
        let spec = kernel.as_kernel();
        let symbol = spec.symbol();
        let module = device
            .context()
            .load_module(Ptx::from_binary(cubin.bytes.clone()))
            .during(|| format!("load the module of `{symbol}`"))?;
        let function = module
            .load_function(&symbol)
            .during(|| format!("find `{symbol}` in its module"))?;
        let shared = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let max_shared = device
            .context()
            .attribute(shared)
            .during(|| "query the shared memory".into())? as u32;
        let maps = spec.tensor_maps();
        let args = spec
            .params()
            .into_iter()
            .map(|p| match p.role {
                Role::Count(size) => Arg::Count(size),
                Role::Read { element, shape, .. } | Role::Write { element, shape } => {
                    let map = maps.iter().find(|map| map.param == p.name);
                    match (map, shape.0.as_slice()) {
                        (Some(&map), [rows, columns]) => Arg::Matrix(Matrix {
                            map,
                            element,
                            rows: rows.clone(),
                            columns: columns.as_constant().unwrap_or(0),
                        }),
                        _ => Arg::Pointer,
                    }
                }
            })
            .collect();
        // The opt-in for dynamic shared memory is set once, to the maximum of the device, so that it holds for all launches.
        let opt_in =
            sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let fixed = function
            .shared_size_bytes()
            .during(|| format!("describe `{symbol}`"))? as u32;
        if max_shared > DEFAULT_SHARED {
            function
                .set_attribute(opt_in, max_shared.saturating_sub(fixed) as i32)
                .during(|| format!("give `{symbol}` more shared memory"))?;
        }
        let max_shared = max_shared.saturating_sub(fixed);
        Ok(Self {
            function,
            kernel: kernel.clone(),
            symbol,
            args,
            max_shared,
            machine: device.info().machine()?.0,
        })
    }

    pub(super) fn kernel(&self) -> &KernelSpec {
        &self.kernel
    }

    /// Launches the kernel on a stream. `pointers` are the kernel's tensors in the order of the signature.
    ///
    /// # Safety
    /// Each pointer must refer to device memory with the contents that the kernel's parameter requires for `extents`. Nothing else may
    /// write to it until the launch is done.
    pub(super) unsafe fn launch(
        &self,
        stream: sys::CUstream,
        extents: &Extents,
        pointers: &[sys::CUdeviceptr],
        step: &str,
        start: Start,
    ) -> Result<(), CudaError> {
        let geometry = self.kernel.as_kernel().launch(extents, &self.machine);
        if geometry.shared_bytes > self.max_shared {
            return Err(CudaError::SharedMemory {
                symbol: self.symbol.clone(),
                needed: geometry.shared_bytes,
                offered: self.max_shared,
            });
        }
        let too_large = |what: &str, value: u64, limit: u64| CudaError::TooLarge {
            step: step.to_owned(),
            what: what.to_owned(),
            value,
            limit,
        };
        // Grid limits of the CUDA programming guide, "Technical Specifications".
        for (value, limit) in geometry.grid.into_iter().zip([0x7fff_ffff, 0xffff, 0xffff]) {
            if value > limit {
                return Err(too_large("the grid", value.into(), limit.into()));
            }
        }
        let mut counts = [0u32; 8];
        let mut n_counts = 0;
        for arg in &self.args {
            if let Arg::Count(size) = arg {
                let value = size.eval(extents).unwrap_or(u64::MAX);
                counts[n_counts] = u32::try_from(value)
                    .map_err(|_| too_large(&size.to_string(), value, u32::MAX.into()))?;
                n_counts += 1;
            }
        }
        let mut maps = Vec::new();
        let mut pointer = pointers.iter();
        for arg in &self.args {
            match arg {
                Arg::Count(_) => {}
                Arg::Pointer => _ = pointer.next(),
                Arg::Matrix(matrix) => {
                    let at = pointer.next().copied().unwrap_or(0);
                    matrix.encode(at, extents, &mut maps).during(|| {
                        format!("describe `{}` to `{}`", matrix.map.param, self.symbol)
                    })?;
                }
            }
        }
        let (mut pointer, mut count, mut map) = (pointers.iter(), counts.iter(), maps.iter());
        let mut params: Vec<*mut c_void> = Vec::with_capacity(self.args.len() + 1);
        for arg in &self.args {
            let mut address = || pointer.next().map(|p| std::ptr::from_ref(p).cast());
            let value: Option<*const c_void> = match arg {
                Arg::Pointer => address(),
                Arg::Count(_) => count.next().map(|c| std::ptr::from_ref(c).cast()),
                Arg::Matrix(matrix) => {
                    let maps = map.by_ref().take(matrix.n_maps());
                    params.extend(maps.map(|map| std::ptr::from_ref(map).cast_mut().cast()));
                    address().filter(|_| matrix.is_packed())
                }
            };
            params.extend(value.map(<*const c_void>::cast_mut));
        }
        assert!(
            pointers.len() + n_counts == self.args.len(),
            "`{}` takes {} arguments, the program binds {}",
            self.symbol,
            self.args.len(),
            pointers.len() + n_counts
        );
        // SAFETY: `params` points to one value per parameter.
        unsafe { self.enqueue(stream, geometry, &mut params, start) }
            .during(|| format!("launch `{}` for `{step}`", self.symbol))
    }

    /// # Safety
    /// `params` must point to one value for each of the kernel's parameters.
    unsafe fn enqueue(
        &self,
        stream: sys::CUstream,
        geometry: Launch,
        params: &mut [*mut c_void],
        start: Start,
    ) -> Result<(), DriverError> {
        let function = self.function.cu_function();
        let ([x, y, z], threads) = (geometry.grid, geometry.threads);
        if start == Start::Plain {
            let (grid, block) = ((x, y, z), (threads, 1, 1));
            // SAFETY: the function is loaded, and the caller guarantees `params`.
            return unsafe {
                result::launch_kernel(function, grid, block, geometry.shared_bytes, stream, params)
            };
        }
        let mut dependent = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                programmaticStreamSerializationAllowed: 1,
            },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: geometry.shared_bytes,
            hStream: stream,
            attrs: &mut dependent,
            numAttrs: 1,
        };
        let none = std::ptr::null_mut();
        // SAFETY: the function is loaded, and the caller guarantees `params`. The driver copies the configuration and its one attribute.
        unsafe { sys::cuLaunchKernelEx(&config, function, params.as_mut_ptr(), none) }.result()
    }
}

/// A program on a device, with its modules and weights. Several sessions can share a model.
pub struct CudaModel {
    pub(super) device: Device,
    pub(super) program: Program,
    /// Kernels by index. In a [`CudaModel::sibling`], the entry is `None` for a kernel that its batches do not launch.
    loaded: Vec<Option<Arc<Loaded>>>,
    /// Addresses by tensor index; 0 if the tensor is not a weight.
    pub(super) weights: Vec<sys::CUdeviceptr>,
    /// Kernels that run before the program's kernels: the upload of a batch, and the two kernels that pack a padded batch.
    pub(super) before: Arc<[Loaded; 3]>,
    /// Kernels that run after and between the decode steps of a text-generating program ([`KernelSpec::decoding`]).
    pub(super) decoding: Option<Arc<[Loaded; 5]>>,
    scoring: Option<Arc<Scoring>>,
    arena: Arc<Buffer>,
}

/// Kernels that score the token vectors of late interaction.
pub(super) struct Scoring {
    /// Number of values of a token vector.
    pub(super) width: u32,
    /// Kernel for vectors in the model's storage type.
    pub(super) stored: Loaded,
    /// Kernel for vectors in f32; `None` if the storage type is f32.
    of_f32: Option<Loaded>,
}

impl Scoring {
    /// Returns the kernel for vectors in f32.
    pub(super) fn of_f32(&self) -> &Loaded {
        self.of_f32.as_ref().unwrap_or(&self.stored)
    }
}

impl CudaModel {
    /// Returns all kernels that a program needs on a device: its own kernels, the kernels that upload and pack a batch, and the kernels
    /// that select tokens or score token vectors.
    pub fn kernels(program: &Program) -> Vec<KernelSpec> {
        program
            .kernels
            .iter()
            .cloned()
            .chain(KernelSpec::runtime())
            .chain(decoding(program).into_iter().flatten())
            .chain(scoring(program).into_iter().flatten().map(KernelSpec::from))
            .collect()
    }

    /// Loads modules and weights. `cubins` must contain all [`CudaModel::kernels`]. `progress(done, total)` receives numbers of weights.
    pub fn load(
        device: Device,
        program: Program,
        cubins: &[Cubin],
        source: &dyn WeightSource,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Self, CudaError> {
        let target = device.target()?;
        let by_symbol: HashMap<&str, &Cubin> = cubins
            .iter()
            .filter(|c| c.target == target)
            .map(|c| (c.symbol.as_str(), c))
            .collect();
        let load = |kernel: &KernelSpec| load_one(&device, kernel, &by_symbol, target);
        let loaded = program
            .kernels
            .iter()
            .map(|kernel| Ok(Some(load(kernel)?.into())))
            .collect::<Result<Vec<_>, CudaError>>()?;
        let [upload_batch, scan, pack] = KernelSpec::runtime();
        let before = [load(&upload_batch)?, load(&scan)?, load(&pack)?];
        let decoding = decoding(&program)
            .map(|[choose, candidates, beams, advance, scatter]| {
                let selecting = [
                    load(&choose)?,
                    load(&candidates)?,
                    load(&beams)?,
                    load(&advance)?,
                    load(&scatter)?,
                ];
                Ok::<_, CudaError>(selecting.into())
            })
            .transpose()?;
        let scoring = scoring(&program)
            .map(|[stored, of_f32]| {
                let other = (stored != of_f32).then(|| load(&of_f32.into()));
                let scoring = Scoring {
                    width: stored.width,
                    stored: load(&stored.into())?,
                    of_f32: other.transpose()?,
                };
                Ok::<_, CudaError>(scoring.into())
            })
            .transpose()?;
        let (arena, weights) = upload(&device, &program, source, progress)?;
        Ok(Self {
            device,
            program,
            loaded,
            weights,
            before: before.into(),
            decoding,
            scoring,
            arena: arena.into(),
        })
    }

    /// Creates a model for another program of the same graph. It shares this model's weights, and accepts only batches of `extents`.
    /// Kernels are taken from `code`. Missing kernels are loaded from `cubins` and added to `code`.
    ///
    /// # Errors
    /// Returns an error if this model lacks a weight, or if a kernel has no code.
    pub fn sibling(
        &self,
        program: Program,
        extents: &Extents,
        cubins: &HashMap<String, Cubin>,
        code: &mut Code,
    ) -> Result<Self, CudaError> {
        let of = |program: &Program| -> Vec<(usize, String)> {
            let tensors = program.tensors.iter().enumerate();
            let weights = tensors.filter(|(_, t)| matches!(t.place, Storage::Weight(_)));
            weights.map(|(at, t)| (at, t.name.clone())).collect()
        };
        let (own, other) = (of(&self.program), of(&program));
        let mut weights = vec![0; program.tensors.len()];
        for (at, name) in &other {
            let known = own.iter().find(|(_, known)| known == name);
            let (known, _) = known.ok_or_else(|| CudaError::NoWeight { name: name.clone() })?;
            weights[*at] = self.weights[*known];
        }
        let mut loaded: Vec<Option<Arc<Loaded>>> = vec![None; program.kernels.len()];
        for (_, kernel) in program.launched(extents)? {
            if loaded[kernel].is_some() {
                continue;
            }
            let symbol = program.kernels[kernel].as_kernel().symbol();
            let ready = match code.0.get(&symbol) {
                Some(ready) => Arc::clone(ready),
                None => {
                    let cubin = cubins
                        .get(&symbol)
                        .ok_or_else(|| missing(&symbol, &self.device))?;
                    let ready =
                        Arc::new(Loaded::new(&self.device, &program.kernels[kernel], cubin)?);
                    code.0.insert(symbol, Arc::clone(&ready));
                    ready
                }
            };
            loaded[kernel] = Some(ready);
        }
        Ok(Self {
            device: self.device.clone(),
            program,
            loaded,
            weights,
            before: Arc::clone(&self.before),
            decoding: None,
            scoring: None,
            arena: Arc::clone(&self.arena),
        })
    }

    /// Returns the loaded kernel with index `kernel` in the program.
    pub(super) fn loaded(&self, kernel: usize) -> Result<&Loaded, CudaError> {
        let loaded = self.loaded[kernel].as_deref();
        loaded.ok_or_else(|| {
            missing(
                &self.program.kernels[kernel].as_kernel().symbol(),
                &self.device,
            )
        })
    }

    /// Returns the kernels that score token vectors.
    pub(super) fn scoring(&self) -> Option<&Scoring> {
        self.scoring.as_deref()
    }

    pub fn program(&self) -> &Program {
        &self.program
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the size of the weights on the device in bytes.
    pub fn weight_bytes(&self) -> u64 {
        self.arena.bytes()
    }
}

/// Returns the kernels that select tokens, if the program generates text.
fn decoding(program: &Program) -> Option<[KernelSpec; 5]> {
    let (_, vocabulary) = program.next_logits()?;
    Some(KernelSpec::decoding(vocabulary, program.dtype))
}

/// Returns the kernels that score token vectors in their storage type and in f32, if the program has token vectors of a supported width.
fn scoring(program: &Program) -> Option<[MaxSim; 2]> {
    let (tensor, width) = program.token_vectors()?;
    let Element::Value(dtype) = program.tensors[tensor].element else {
        return None;
    };
    let of = |dtype| MaxSim { width, dtype };
    (width <= MaxSim::MAX_WIDTH).then(|| [of(dtype), of(DType::F32)])
}

/// Loaded kernels by symbol, shared by several programs.
#[derive(Default)]
pub struct Code(HashMap<String, Arc<Loaded>>);

fn missing(symbol: &str, device: &Device) -> CudaError {
    CudaError::MissingCubin {
        symbol: symbol.to_owned(),
        target: device
            .target()
            .map_or_else(|_| "this card".to_owned(), |t| t.to_string()),
    }
}

fn load_one(
    device: &Device,
    kernel: &KernelSpec,
    cubins: &HashMap<&str, &Cubin>,
    target: Target,
) -> Result<Loaded, CudaError> {
    let symbol = kernel.as_kernel().symbol();
    match cubins.get(symbol.as_str()) {
        Some(cubin) => Loaded::new(device, kernel, cubin),
        None => Err(CudaError::MissingCubin {
            symbol,
            target: target.to_string(),
        }),
    }
}

/// Waits for a thread and returns its result. If the thread panicked, the panic continues in the calling thread.
fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// Uploads all weights into one allocation. Returns the allocation, and the addresses of the weights by tensor index.
fn upload(
    device: &Device,
    program: &Program,
    source: &dyn WeightSource,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<(Buffer, Vec<sys::CUdeviceptr>), CudaError> {
    let none = Extents::default();
    let mut offsets = vec![None; program.tensors.len()];
    let mut end = 0u64;
    for (offset, tensor) in offsets.iter_mut().zip(&program.tensors) {
        if matches!(tensor.place, Storage::Weight(_)) {
            *offset = Some(end);
            end += program.bytes(tensor, &none)?.next_multiple_of(ALIGNMENT);
        }
    }
    let arena = Buffer::new(device, end, "the weights")?;
    let uploads = Uploads::new(device)?;
    let wanted: Vec<(usize, u64)> = offsets
        .iter()
        .enumerate()
        .filter_map(|(i, o)| o.map(|o| (i, o)))
        .collect();
    // Each loader thread holds one tensor, which limits the host memory. Some loaders read tensors while others upload.
    let done = AtomicUsize::new(0);
    let start = arena.start();
    let scales = Scales::default();
    let upload = |&(index, offset): &(usize, u64)| {
        let tensor = &program.tensors[index];
        let Storage::Weight(expr) = &tensor.place else {
            return Ok(());
        };
        let bytes = match tensor.element {
            Element::Scaled(scaled) => evaluate_packed(expr, source, scaled)?,
            Element::Value(dtype) if expr.bound().is_some() => {
                encode(&scales.evaluate(expr, source)?, dtype)
            }
            Element::Value(dtype) => evaluate_as(expr, source, dtype)?,
            Element::E4m3 => {
                let matrix = evaluate_scaled(expr, source)?;
                scales.add_rows(expr, &matrix);
                matrix.into_codes()
            }
            Element::I8 | Element::I32 | Element::I64 => evaluate_as(expr, source, program.dtype)?,
        };
        device
            .context()
            .bind_to_thread()
            .during(|| "use the device on this thread".to_owned())?;
        // SAFETY: the arena has room for every weight at its offset. When the call returns, the copy no longer reads the pageable memory.
        unsafe { uploads.copy(start + offset, &bytes) }
            .during(|| format!("upload `{}`", tensor.name))?;
        progress(done.fetch_add(1, Ordering::Relaxed) + 1, wanted.len());
        Ok::<(), CudaError>(())
    };
    // Scales of E4M3 products are uploaded last, because they are computed from bounds of the inputs and from the rows of other weights.
    let expr = |&(index, _): &(usize, u64)| match &program.tensors[index].place {
        Storage::Weight(expr) => Some(expr),
        Storage::Batch(_) | Storage::Planned { .. } | Storage::Cached(_) => None,
    };
    let bounds = Scales::bounds(wanted.iter().filter_map(expr));
    let is_scale = |wanted: &(usize, u64)| expr(wanted).and_then(WeightExpr::bound).is_some();
    let (last, first): (Vec<_>, Vec<_>) = wanted.iter().copied().partition(is_scale);
    // The bounds come first, because they take longest: most of them are computed from a whole matrix.
    let n_tasks = bounds.len() + first.len();
    let next = AtomicUsize::new(0);
    let task = |task: usize| match bounds.get(task) {
        Some(bound) => Ok(scales.add_input(bound, source)?),
        None => upload(&first[task - bounds.len()]),
    };
    let work = || {
        let numbers = iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        // After an error, the other loaders stop, too.
        let run = |number| task(number).inspect_err(|_| next.store(n_tasks, Ordering::Relaxed));
        numbers.take_while(|&n| n < n_tasks).try_for_each(run)
    };
    // The loaders are not threads of rayon's pool: a pool thread might begin a second tensor while it waits for the parts of the first one.
    thread::scope(|scope| {
        let loaders: Vec<_> = (0..LOADERS).map(|_| scope.spawn(work)).collect();
        loaders.into_iter().try_for_each(joined)
    })?;
    last.iter().try_for_each(upload)?;
    uploads
        .finish()
        .during(|| "wait for the uploads".to_owned())?;
    Ok((
        arena,
        offsets
            .into_iter()
            .map(|o| o.map_or(0, |o| start + o))
            .collect(),
    ))
}

pub(super) type SharedModel = Arc<CudaModel>;
