//! Launches the steps of a program, for runs of batches and for consecutive decode steps on the device.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::staging::BatchData;
use crate::{
    kernels::KernelSpec,
    plan::Plan,
    program::{Program, Storage, TensorIndex},
    runtime::cuda::{
        error::CudaError,
        memory::Chunks,
        model::{SharedModel, Start},
    },
    tensor::Extents,
};

/// Enqueues the steps of a model's program on a stream.
pub(super) struct Launcher {
    pub(super) model: SharedModel,
    pub(super) stream: Arc<CudaStream>,
    /// Whether kernels of the program, except the first, may start before the previous kernel ends.
    pub(super) start: Start,
    /// For each step, whether an earlier step computes its weight ([`Program::computes_weight_of`]).
    computes_weight: Vec<bool>,
}

/// Values to which the parameters of a run's kernels are bound.
pub(super) struct Bound<'a> {
    pub(super) extents: &'a Extents,
    pub(super) data: &'a BatchData,
    pub(super) plan: &'a Plan,
    pub(super) chunks: &'a Chunks,
    /// Address of the KV cache, or 0 without one.
    pub(super) cache: u64,
}

/// Returns the address of a tensor that the plan places; 0 for other tensors.
pub(super) fn address_of(
    program: &Program,
    tensor: TensorIndex,
    plan: &Plan,
    chunks: &Chunks,
) -> u64 {
    let mut planned = program.planned();
    let slot = planned.position(|(index, _)| index == tensor);
    let at = slot.map(|slot| plan.placements[slot]);
    at.map_or(0, |at| chunks.at(at.chunk as usize, at.offset))
}

impl Launcher {
    pub(super) fn new(model: SharedModel, stream: Arc<CudaStream>, start: Start) -> Self {
        let program = model.program();
        let steps = program.steps.iter();
        let computes_weight = steps.map(|step| program.computes_weight_of(step));
        Self {
            computes_weight: computes_weight.collect(),
            model,
            stream,
            start,
        }
    }

    /// Launches, in order, the steps among the first `n_steps` whose kernel satisfies `wanted`. Before `griddepcontrol.wait`, kernels read
    /// batch data and load weights. Two kinds of kernels are therefore launched with [`Start::Plain`]: the first kernel, which waits for
    /// the batch data, and kernels whose weight an earlier step computes.
    pub(super) fn steps(
        &self,
        bound: &Bound,
        n_steps: usize,
        wanted: &dyn Fn(&KernelSpec) -> bool,
    ) -> Result<(), CudaError> {
        let program = self.model.program();
        let mut places = vec![0; program.tensors.len()];
        for ((index, _), at) in program.planned().zip(&bound.plan.placements) {
            places[index] = bound.chunks.at(at.chunk as usize, at.offset);
        }
        let mut pointers = Vec::with_capacity(16);
        let mut start = Start::Plain;
        let steps = program.steps.iter().zip(&self.computes_weight);
        for (step, &computes_weight) in steps.take(n_steps) {
            let Some((kernel, extents)) = step.launch(bound.extents)? else {
                continue;
            };
            pointers.clear();
            pointers.extend(step.operands.iter().map(|&operand| {
                match &program.tensors[operand].place {
                    Storage::Batch(meta) => bound.data.at(*meta),
                    Storage::Weight(_) => self.model.weights[operand],
                    Storage::Planned { .. } => places[operand],
                    Storage::Cached(cache) => bound.cache + program.cache_offset_bytes(*cache),
                }
            }));
            if !wanted(&program.kernels[kernel]) {
                continue;
            }
            if computes_weight {
                start = Start::Plain;
            }
            // SAFETY: the program binds tensors of the shapes that the kernel's parameters require. The plan assigns disjoint memory to
            // tensors with overlapping lifetimes.
            unsafe {
                let loaded = self.model.loaded(kernel)?;
                let stream = self.stream.cu_stream();
                loaded.launch(stream, &extents, &pointers, &step.name, start)?;
            }
            start = self.start;
        }
        Ok(())
    }
}
