//! Runs programs on CUDA devices.

mod benchmark;
mod check;
mod cublaslt;
mod device;
mod error;
mod graphs;
mod matrix;
mod memory;
mod model;
mod output_memory;
mod scorer;
mod session;
mod stopwatch;
mod watch;

pub use benchmark::{GemmBenchmark, Measurement, Provider};
pub use check::{CheckResult, check_kernel};
pub use device::{Device, DeviceInfo, Presence, probe};
pub use error::CudaError;
pub use model::{Code, CudaModel};
pub use output_memory::CudaMemory;
pub use scorer::{HostScorer, TakenRows};
pub use session::{
    ChosenRows, CudaCache, CudaSession, CudaTicket, DecodeLoop, Entry, Fence, LoopRoom, Part,
    Timing, TokenSelection,
};
pub use stopwatch::{Lap, Stopwatch};
