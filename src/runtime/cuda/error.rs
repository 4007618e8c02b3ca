use cudarc::{cublaslt::result::CublasError, driver::DriverError};

use crate::{
    graph::TOKEN_VECTORS,
    jit::JitError,
    kernels::max_sim::MaxSim,
    machine::MachineError,
    program::{LaunchError, SizeOverflow},
    runtime::{PlannerError, weights::CheckpointError},
    tensor::LengthsError,
};

#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error(
        "no CUDA driver: libcuda is not in the loader's path; install the NVIDIA driver, or use the CPU"
    )]
    NoDriver,
    #[error(
        "libcuda is not loaded: {why}. The loader could run code that others put there; the CPU works \
         without it"
    )]
    LoaderPath {
        /// The offending entry of the loader path, and how to fix it.
        why: String,
    },
    #[error(
        "the CUDA driver finds no device; is a GPU visible to this process (CUDA_VISIBLE_DEVICES)? use the CPU otherwise"
    )]
    NoDevice,
    #[error("CUDA device {wanted} does not exist; the driver reports {found}, counted from 0")]
    NoSuchDevice { wanted: usize, found: usize },
    #[error("the driver failed to {action}")]
    Driver { action: String, source: DriverError },
    #[error(transparent)]
    Machine(#[from] MachineError),
    #[error(transparent)]
    Jit(#[from] JitError),
    #[error(transparent)]
    Weights(#[from] CheckpointError),
    #[error(transparent)]
    Plan(#[from] PlannerError),
    #[error(transparent)]
    Size(#[from] SizeOverflow),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Lengths(#[from] LengthsError),
    #[error(
        "`{symbol}` needs {needed} bytes of shared memory in a block, but the device offers {offered}"
    )]
    SharedMemory {
        symbol: String,
        needed: u32,
        offered: u32,
    },
    #[error(
        "the {bytes} bytes of host memory that the output `{output}` needs could not be allocated; send fewer tokens at once, or request other outputs"
    )]
    OutputMemory { output: String, bytes: u64 },
    #[error(
        "the device has no {bytes} bytes left for {what}: {free} of {total} bytes are free; {advice}"
    )]
    OutOfMemory {
        what: &'static str,
        bytes: u64,
        free: u64,
        total: u64,
        advice: String,
    },
    #[error(
        "the step `{step}` is too large for one launch: {what} is {value}, at most {limit} fit; send fewer tokens at once"
    )]
    TooLarge {
        step: String,
        what: String,
        value: u64,
        limit: u64,
    },
    #[error(
        "the session already has two batches in flight; wait for the ticket of one of them first"
    )]
    InFlight,
    #[error(
        "the model has no token vectors that a device can score; expected the output `{TOKEN_VECTORS}` with at most {} values per token",
        MaxSim::MAX_WIDTH
    )]
    NoTokenVectors,
    #[error("no cubin was given for the kernel `{symbol}`; compile the model for {target}")]
    MissingCubin { symbol: String, target: String },
    #[error("the program's weight `{name}` was not loaded; load the program as a separate model")]
    NoWeight { name: String },
    #[error(
        "no cuBLASLt: libcublasLt is not in the loader's path; install the CUDA toolkit's cuBLAS, or add its folder to LD_LIBRARY_PATH"
    )]
    NoCublasLt,
    #[error("cuBLASLt failed to {action}: {source}")]
    CublasLt { action: String, source: CublasError },
}

impl CudaError {
    /// Returns whether the device context is broken. If it is, every later call fails, too.
    pub fn is_sticky(&self) -> bool {
        use cudarc::driver::sys::CUresult as Code;
        let Self::Driver { source, .. } = self else {
            return false;
        };
        matches!(
            source.0,
            Code::CUDA_ERROR_DEINITIALIZED
                | Code::CUDA_ERROR_DEVICE_UNAVAILABLE
                | Code::CUDA_ERROR_ECC_UNCORRECTABLE
                | Code::CUDA_ERROR_NVLINK_UNCORRECTABLE
                | Code::CUDA_ERROR_ILLEGAL_ADDRESS
                | Code::CUDA_ERROR_LAUNCH_TIMEOUT
                | Code::CUDA_ERROR_CONTEXT_IS_DESTROYED
                | Code::CUDA_ERROR_ASSERT
                | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
                | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
                | Code::CUDA_ERROR_MISALIGNED_ADDRESS
                | Code::CUDA_ERROR_INVALID_ADDRESS_SPACE
                | Code::CUDA_ERROR_INVALID_PC
                | Code::CUDA_ERROR_LAUNCH_FAILED
                | Code::CUDA_ERROR_UNKNOWN
        )
    }
}

/// Adds the name of the failed action to an error.
pub(super) trait During<T> {
    fn during(self, action: impl FnOnce() -> String) -> Result<T, CudaError>;
}

impl<T> During<T> for Result<T, DriverError> {
    fn during(self, action: impl FnOnce() -> String) -> Result<T, CudaError> {
        self.map_err(|source| CudaError::Driver {
            action: action(),
            source,
        })
    }
}

impl<T> During<T> for Result<T, CublasError> {
    fn during(self, action: impl FnOnce() -> String) -> Result<T, CudaError> {
        self.map_err(|source| CudaError::CublasLt {
            action: action(),
            source,
        })
    }
}
