//! Checks a kernel on a device against its reference.

use cudarc::driver::{result, sys};

use super::{
    device::Device,
    error::{CudaError, During},
    memory::Buffer,
    model::{Loaded, Start},
};
use crate::{
    jit::Cubin,
    kernels::{
        Case, HostTensor, Kernel, KernelSpec, Role,
        trial::{Difference, Trial},
    },
    runtime::{decode_indices, decode_values, encode_tensor},
    tensor::Size,
};

/// Accuracy of a kernel on one batch.
#[derive(Clone, Debug)]
pub struct CheckResult {
    pub case: Case,
    /// Largest difference over the tensors that the kernel writes.
    pub difference: Difference,
    /// Name of the tensor with the largest difference.
    pub tensor: &'static str,
}

impl CheckResult {
    pub fn passed(&self) -> bool {
        self.difference.worst <= 1.0
    }
}

/// Runs `kernel` on every trial and compares the results with the reference.
///
/// Outputs are first filled with all bits set, which is NaN in every floating-point type, so elements that the kernel does not
/// write are detected.
pub fn check_kernel(
    device: &Device,
    kernel: &KernelSpec,
    cubin: &Cubin,
    trials: &[(Case, Trial)],
) -> Result<Vec<CheckResult>, CudaError> {
    let loaded = Loaded::new(device, kernel, cubin)?;
    let spec = kernel.as_kernel();
    trials
        .iter()
        .map(|(case, trial)| run(device, &loaded, spec, case.clone(), trial))
        .collect()
}

fn run(
    device: &Device,
    loaded: &Loaded,
    kernel: &dyn Kernel,
    case: Case,
    trial: &Trial,
) -> Result<CheckResult, CudaError> {
    let during = || format!("check `{}` on `{}`", kernel.symbol(), case.name);
    device.context().bind_to_thread().during(during)?;
    let mut buffers = Vec::new();
    let params = kernel.params().into_iter();
    let shapes = params.filter_map(|param| match param.role {
        Role::Read { shape, .. } => Some(shape),
        Role::Write { .. } | Role::Count(_) => None,
    });
    for ((element, tensor), shape) in trial.reads.iter().zip(shapes) {
        let columns = shape.0.last().and_then(Size::as_constant);
        let bytes = encode_tensor(tensor, *element, columns.unwrap_or(1) as usize);
        let buffer = Buffer::new(device, bytes.len() as u64, "an operand")?;
        // SAFETY: the buffer has the size of the bytes.
        unsafe { result::memcpy_htod_sync(buffer.start(), &bytes) }.during(during)?;
        buffers.push(buffer);
    }
    let n_reads = buffers.len();
    for (element, _, tensor) in &trial.writes {
        let bytes = len(tensor) as u64 * element.bytes();
        let buffer = Buffer::new(device, bytes, "a result")?;
        // SAFETY: the buffer has this size.
        unsafe { result::memset_d8_sync(buffer.start(), 0xff, bytes as usize) }.during(during)?;
        buffers.push(buffer);
    }
    let pointers: Vec<sys::CUdeviceptr> = in_signature_order(kernel, &buffers, n_reads);
    let stream = device.context().default_stream();
    // SAFETY: the buffers have the sizes that the parameters require for these extents.
    unsafe {
        let (stream, extents) = (stream.cu_stream(), &trial.extents);
        loaded.launch(stream, extents, &pointers, case.name, Start::Plain)?;
    }
    stream.synchronize().during(during)?;
    let mut worst = CheckResult {
        case,
        difference: Difference::default(),
        tensor: "",
    };
    for ((element, name, want), buffer) in trial.writes.iter().zip(&buffers[n_reads..]) {
        let mut raw = vec![0u8; buffer.bytes() as usize];
        // SAFETY: `raw` has the size of the buffer.
        unsafe { result::memcpy_dtoh_sync(&mut raw, buffer.start()) }
            .during(|| "download".into())?;
        let difference = match want {
            HostTensor::Real(want) => {
                let got = decode_values(&raw, *element);
                kernel.tolerance().compare(&got, want)
            }
            HostTensor::Index(want) => integers(&decode_indices(&raw, *element), want),
        };
        if worst.tensor.is_empty() || difference.worst > worst.difference.worst {
            worst = CheckResult {
                difference,
                tensor: name,
                ..worst
            };
        }
    }
    Ok(worst)
}

/// Returns the addresses in the order of the signature, which may mix tensors that are read and tensors that are written.
fn in_signature_order(
    kernel: &dyn Kernel,
    buffers: &[Buffer],
    n_reads: usize,
) -> Vec<sys::CUdeviceptr> {
    use crate::kernels::Role;
    let (mut reads, mut writes) = (buffers[..n_reads].iter(), buffers[n_reads..].iter());
    kernel
        .params()
        .iter()
        .filter_map(|p| match p.role {
            Role::Read { .. } => reads.next(),
            Role::Write { .. } => writes.next(),
            Role::Count(_) => None,
        })
        .map(Buffer::start)
        .collect()
}

/// Compares integers, which must be equal.
fn integers(got: &[i64], want: &[i64]) -> Difference {
    match got.iter().zip(want).position(|(g, w)| g != w) {
        None => Difference::default(),
        Some(at) => Difference {
            max: (got[at] - want[at]).abs() as f32,
            worst: f32::INFINITY,
            at,
            got: got[at] as f32,
            want: want[at] as f32,
            mean: f32::INFINITY,
        },
    }
}

fn len(tensor: &HostTensor) -> usize {
    match tensor {
        HostTensor::Real(v) => v.len(),
        HostTensor::Index(v) => v.len(),
    }
}
