use std::sync::Arc;

use super::{
    cpu::{CpuModel, Threads, ThreadsError},
    cuda::CudaModel,
};
use crate::program::Program;

/// A program and its weights on one device, shared by sessions and generators.
#[derive(Clone)]
pub(crate) enum LoadedModel {
    Cpu(Arc<CpuModel>),
    Cuda(Arc<CudaModel>),
}

impl LoadedModel {
    pub(crate) fn program(&self) -> &Program {
        match self {
            Self::Cpu(model) => model.program(),
            Self::Cuda(model) => model.program(),
        }
    }

    /// Calls `work` on the threads of the CPU executor, or on [`Threads::usual`] for a model on a GPU.
    pub(crate) fn on_threads<T: Send>(
        &self,
        work: impl FnOnce() -> T + Send,
    ) -> Result<T, ThreadsError> {
        Ok(match self {
            Self::Cpu(model) => model.threads().run(work),
            Self::Cuda(_) => Threads::usual()?.run(work),
        })
    }

    /// Bytes of the weights. On a CPU, this includes the packed weights of linear layers and the unpacked weights that other steps read.
    pub(crate) fn weight_bytes(&self) -> u64 {
        match self {
            Self::Cpu(model) => model.weight_bytes(),
            Self::Cuda(model) => model.weight_bytes(),
        }
    }
}
