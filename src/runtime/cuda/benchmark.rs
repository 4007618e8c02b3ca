//! Benchmark that compares GEMM kernels with cuBLASLt on one device, in one process.

use cudarc::driver::{CudaStream, result, sys};
use rayon::prelude::*;

use super::{
    cublaslt::{CublasLt, Matmul, MatmulShape},
    device::Device,
    error::{CudaError, During},
    memory::Buffer,
    model::{Loaded, Start},
    stopwatch::{REPLAYS, Stopwatch, download, of_two_results, random, rotated_sets},
};
use crate::{
    jit::Cubin,
    kernels::{Kernel, KernelSpec, Tolerance, gemm::Gemm, trial::Difference},
    ops::{Epilogue, activate_f64},
    plan::ALIGNMENT,
    runtime::weights::{decode, encode},
    tensor::{DType, Extents},
};

/// Number of replays per algorithm to determine the fastest algorithm of cuBLASLt.
const TRIAL_REPLAYS: usize = 3;
const MOST_ALGORITHMS: usize = 16;

/// Times GEMMs on a device with CUDA events around a CUDA graph of launches.
pub struct GemmBenchmark {
    stopwatch: Stopwatch,
    lt: Option<CublasLt>,
}

/// Implementation of a timed GEMM.
#[derive(Clone, Debug, PartialEq)]
pub enum Provider {
    Kernel(KernelSpec),
    /// The fastest of `n_algorithms` algorithms, without an epilogue.
    CublasLt {
        n_algorithms: usize,
    },
}

/// Time and accuracy of one GEMM.
#[derive(Clone, Debug)]
pub struct Measurement {
    pub provider: Provider,
    /// Time of one launch in microseconds: the median time of a replay of the graph, divided by the number of its launches.
    pub us: f64,
    /// Difference from the reference: cuBLASLt's product in f32, to which the host applies the epilogue if the provider is a kernel. `None`
    /// if there is no reference, because cuBLASLt is not installed or does not support the shape. The tolerance is twice that of the
    /// kernel, and wider for cuBLASLt.
    pub difference: Option<Difference>,
}

impl GemmBenchmark {
    /// Creates a benchmark and opens cuBLASLt. If cuBLASLt is not installed, only the kernels are timed.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let library = match CublasLt::open(device) {
            Ok(library) => Some(library),
            Err(CudaError::NoCublasLt) => None,
            Err(error) => return Err(error),
        };
        Ok(Self {
            stopwatch: Stopwatch::new(device)?,
            lt: library,
        })
    }

    pub fn has_cublas_lt(&self) -> bool {
        self.lt.is_some()
    }

    /// Times `kernels` and cuBLASLt's plain GEMM on `rows` rows. All kernels must compute the same function as `gemm` from the same
    /// arguments. If cuBLASLt supports the shape, its measurement is the first.
    pub fn run(
        &self,
        rows: u64,
        gemm: &Gemm,
        kernels: &[(KernelSpec, &Cubin)],
    ) -> Result<Vec<Measurement>, CudaError> {
        let sets = Sets::new(self.stopwatch.device(), self.stopwatch.stream(), rows, gemm)?;
        let mut timed = Vec::new();
        let mut want = None;
        if let Some(library) = &self.lt {
            let shape = MatmulShape {
                rows,
                n: gemm.problem.n.into(),
                k: gemm.problem.k.into(),
                dtype: gemm.problem.dtype,
                out: gemm.problem.dtype,
            };
            let reference = self.reference(library, &sets, shape)?;
            let matmul = library.matmul(shape, MOST_ALGORITHMS)?;
            if matmul.n_algorithms() > 0 {
                let us = self.fastest(&sets, &matmul)?;
                let difference = reference.as_ref().map(|want| {
                    let tolerance = with_split_k(gemm.tolerance(), gemm.problem.dtype);
                    sets.download().map(|got| tolerance.compare(&got, want))
                });
                timed.push(Measurement {
                    provider: Provider::CublasLt {
                        n_algorithms: matmul.n_algorithms(),
                    },
                    us,
                    difference: difference.transpose()?,
                });
            }
            want =
                reference.map(|product| apply_epilogue(product, &sets.bias, gemm.problem.epilogue));
        }
        for (kernel, cubin) in kernels {
            let loaded = Loaded::new(self.stopwatch.device(), kernel, cubin)?;
            let extents = Extents::default().with_rows(rows);
            let launch = |set: u64| {
                let [x, weight, bias, out] = sets.addresses(set);
                let all = [x, weight, bias, out];
                let without_bias = [x, weight, out];
                let pointers = if gemm.problem.epilogue.bias {
                    &all[..]
                } else {
                    &without_bias[..]
                };
                // SAFETY: every set has room for the operands of this shape.
                unsafe {
                    loaded.launch(
                        self.stopwatch.stream().cu_stream(),
                        &extents,
                        pointers,
                        "benchmark",
                        Start::Plain,
                    )
                }
            };
            sets.poison_result(self.stopwatch.stream())?;
            let us = self.stopwatch.time(sets.n, REPLAYS, launch)?;
            let difference = want.as_ref().map(|want| {
                let tolerance = of_two_results(gemm.tolerance());
                sets.download().map(|got| tolerance.compare(&got, want))
            });
            timed.push(Measurement {
                provider: Provider::Kernel(kernel.clone()),
                us,
                difference: difference.transpose()?,
            });
        }
        Ok(timed)
    }

    /// Computes `x · weightᵀ` with cuBLASLt in f32, as the reference for all results.
    fn reference(
        &self,
        lt: &CublasLt,
        sets: &Sets,
        shape: MatmulShape,
    ) -> Result<Option<Vec<f32>>, CudaError> {
        let shape = MatmulShape {
            out: DType::F32,
            ..shape
        };
        let matmul = lt.matmul(shape, 1)?;
        if matmul.n_algorithms() == 0 {
            return Ok(None);
        }
        let bytes = shape.rows * shape.n * DType::F32.bytes();
        let out = Buffer::new(self.stopwatch.device(), bytes, "the result to compare with")?;
        let [x, weight, ..] = sets.addresses(0);
        // SAFETY: the operands have this shape, and their addresses are multiples of 256.
        unsafe {
            matmul.launch(
                self.stopwatch.stream().cu_stream(),
                0,
                x,
                weight,
                out.start(),
            )?
        };
        self.stopwatch.synchronize()?;
        download(out.start(), bytes, DType::F32.into()).map(Some)
    }

    /// Returns the time of the fastest algorithm in microseconds. Algorithms that fail are ignored, unless all fail.
    fn fastest(&self, sets: &Sets, matmul: &Matmul) -> Result<f64, CudaError> {
        let time = |algorithm: usize, replays: usize| {
            self.stopwatch.time(sets.n, replays, |set| {
                let [x, weight, _, out] = sets.addresses(set);
                // SAFETY: every set has room for the operands of this shape, at addresses that are multiples of 256.
                unsafe {
                    matmul.launch(
                        self.stopwatch.stream().cu_stream(),
                        algorithm,
                        x,
                        weight,
                        out,
                    )
                }
            })
        };
        let mut best: Result<(f64, usize), CudaError> = Err(CudaError::NoCublasLt);
        for algorithm in 0..matmul.n_algorithms() {
            match (time(algorithm, TRIAL_REPLAYS), &best) {
                (Ok(us), Ok((least, _))) if us >= *least => {}
                (Ok(us), _) => best = Ok((us, algorithm)),
                (Err(error @ CudaError::CublasLt { .. }), Err(_)) => best = Err(error),
                (Err(CudaError::CublasLt { .. }), Ok(_)) => {}
                (Err(error), _) => return Err(error),
            }
        }
        let (_, algorithm) = best?;
        sets.poison_result(self.stopwatch.stream())?;
        time(algorithm, REPLAYS)
    }
}

/// Sets of operands and results of one shape. All sets hold the same values. Successive launches use different sets, so that operands are
/// not in L2.
struct Sets {
    arena: Buffer,
    n: u64,
    bytes: u64,
    /// Byte offsets of x, weight, bias and out in a set.
    offsets: [u64; 4],
    out_bytes: u64,
    dtype: DType,
    /// Bias, rounded to the storage type.
    bias: Vec<f32>,
}

impl Sets {
    fn new(
        device: &Device,
        stream: &CudaStream,
        rows: u64,
        gemm: &Gemm,
    ) -> Result<Self, CudaError> {
        let (n, k, dtype) = (
            u64::from(gemm.problem.n),
            u64::from(gemm.problem.k),
            gemm.problem.dtype,
        );
        let elements = [rows * k, n * k, n, rows * n];
        let mut offsets = [0; 4];
        let mut bytes = 0;
        for (offset, elements) in offsets.iter_mut().zip(elements) {
            *offset = bytes;
            bytes += (elements * dtype.bytes()).next_multiple_of(ALIGNMENT);
        }
        let n_sets = rotated_sets(bytes);
        let arena = Buffer::new(device, n_sets * bytes, "the operands of the benchmark")?;
        // Standard deviations of the input, the weight and the bias. The kernel's tolerance assumes these deviations. The values are
        // random, because with zeros as operands, the device would draw less power and raise its clock.
        let deviations = [1.0, 1.0 / (k as f32).sqrt(), 1.0];
        let during = || "upload the operands".to_owned();
        let mut bias = Vec::new();
        for (i, deviation) in deviations.into_iter().enumerate() {
            let values = random(elements[i] as usize, deviation, i as u64);
            let encoded = encode(&values, dtype);
            for set in 0..n_sets {
                let at = arena.start() + set * bytes + offsets[i];
                // SAFETY: the set has room for the operand. `encoded` outlives the copy, because the stream is synchronized below.
                unsafe { result::memcpy_htod_async(at, &encoded, stream.cu_stream()) }
                    .during(during)?;
            }
            stream.synchronize().during(during)?;
            if i == 2 {
                bias = decode(&encoded, dtype);
            }
        }
        Ok(Self {
            arena,
            n: n_sets,
            bytes,
            offsets,
            out_bytes: elements[3] * dtype.bytes(),
            dtype,
            bias,
        })
    }

    fn addresses(&self, set: u64) -> [sys::CUdeviceptr; 4] {
        self.offsets
            .map(|offset| self.arena.start() + set * self.bytes + offset)
    }

    /// Fills the last set's result with NaN (all bits set), so that elements that a kernel does not write are detected.
    fn poison_result(&self, stream: &CudaStream) -> Result<(), CudaError> {
        let [.., out] = self.addresses(self.n - 1);
        // SAFETY: the result has this size.
        unsafe { result::memset_d8_async(out, 0xff, self.out_bytes as usize, stream.cu_stream()) }
            .during(|| "overwrite a result".into())
    }

    /// Downloads the last set's result, which a timed launch wrote. The stream must be idle.
    fn download(&self) -> Result<Vec<f32>, CudaError> {
        let [.., out] = self.addresses(self.n - 1);
        download(out, self.out_bytes, self.dtype.into())
    }
}

/// Applies the epilogue on the host to a matrix product. Rows are as long as the bias.
fn apply_epilogue(mut product: Vec<f32>, bias: &[f32], epilogue: Epilogue) -> Vec<f32> {
    product.par_chunks_mut(bias.len()).for_each(|row| {
        for (value, bias) in row.iter_mut().zip(bias) {
            let sum = f64::from(*value) + if epilogue.bias { f64::from(*bias) } else { 0.0 };
            *value = epilogue.activation.map_or(sum, |a| activate_f64(a, sum)) as f32;
        }
    });
    product
}

/// Widens a tolerance for cuBLASLt, whose split-K may add partial sums in the storage type. The partial sums have magnitudes of at most 1.
fn with_split_k(tolerance: Tolerance, dtype: DType) -> Tolerance {
    let rounding = match dtype {
        DType::F16 | DType::BF16 => dtype.epsilon() / 2.0,
        DType::F32 => dtype.epsilon(),
    };
    let tolerance = of_two_results(tolerance);
    Tolerance {
        absolute: tolerance.absolute + 8.0 * rounding,
        ..tolerance
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Activation;

    #[test]
    fn the_epilogue_on_the_host_adds_bias_by_column_then_activates() {
        let relu = Epilogue::new(true, Some(Activation::Relu));
        let product = vec![1.0, -2.0, 3.0, 4.0];
        assert_eq!(
            apply_epilogue(product.clone(), &[0.5, -10.0], relu),
            [1.5, 0.0, 3.5, 0.0]
        );
        let plain = apply_epilogue(product.clone(), &[0.5, -10.0], Epilogue::default());
        assert_eq!(plain, product);
    }
}
