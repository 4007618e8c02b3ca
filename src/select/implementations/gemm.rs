//! A linear layer in one GEMM with a fused epilogue.

use super::{Bindings, Candidate, Implementation, Operand, Unfit};
use crate::{
    kernels::{
        Kernel,
        gemm::{Gemm, GemmProblem, GemmSplitK, GemmStream, GemmWgmma, Tile},
    },
    machine::Machine,
    select::site::{Link, Site},
    tensor::Format,
};

/// If a streaming GEMM also supports a packed weight, `mma.sync` kernels are candidates only with tiles of at least this number of rows.
const MMA_ROWS: u32 = 64;

pub(super) fn implement(chain: &[Link], machine: &Machine) -> Result<Implementation, Unfit> {
    let Some(Site::Linear(problem)) = chain.first().map(|link| &link.site) else {
        return Err(Unfit::Sites);
    };
    let on = machine.instructions;
    let persistent = GemmWgmma::kernels(problem, on);
    let streams = GemmStream::of(problem.clone()).tiles(on);
    let candidates = match problem.weight {
        Format::Plain(_) => plain(problem, persistent, streams, machine),
        Format::Scaled(_) => packed(problem, streams, machine),
        Format::E4m3 => {
            let any = any_gpu(problem, machine).into_iter().map(Candidate::new);
            let persistent = persistent.into_iter().map(Candidate::new);
            let streams = streams.into_iter().map(Candidate::new);
            any.chain(persistent).chain(streams).collect()
        }
    };
    let bindings = Bindings::to_operands_of(&[0]).with("out", Operand::Value(0));
    Implementation::one_launch(1, bindings, candidates)
}

/// Returns candidates for a weight in the type of the activations. `persistent` and `streams` are the kernels for Hopper.
fn plain(
    problem: &GemmProblem,
    persistent: Vec<GemmWgmma>,
    streams: Vec<GemmStream>,
    machine: &Machine,
) -> Vec<Candidate> {
    let GemmProblem { n, k, .. } = *problem;
    // `mma.sync` has about half the throughput of `wgmma`, so on Hopper it is used only if `wgmma` does not support the shape.
    let any = match persistent.is_empty() {
        true => any_gpu(problem, machine),
        false => Vec::new(),
    };
    let split_k = GemmSplitK::kernels(problem, machine.instructions);
    let at_once = |kernel: &GemmSplitK| kernel.tile.max_rows_at_once(n, k, machine);
    // The ring buffer of the streaming GEMM makes MMAs wait for each other. If all operands of a CTA fit in shared memory even without a
    // split of k, the split-K GEMM replaces the streaming GEMMs whose tiles have more than 32 rows and do not split k.
    let has_room = split_k
        .iter()
        .any(|kernel| kernel.tile.splits == 1 && at_once(kernel) > 0);
    let is_needed =
        |GemmStream { tile, .. }: &GemmStream| !has_room || tile.splits > 1 || tile.rows <= 32;
    let split_k = split_k.into_iter().filter_map(|kernel| {
        let most = at_once(&kernel);
        (most > 0).then(|| Candidate {
            kernel: kernel.into(),
            max_rows: Some(most),
        })
    });
    let streams = streams.into_iter().filter(is_needed);
    let any = any.into_iter().map(Candidate::new);
    any.chain(persistent.into_iter().map(Candidate::new))
        .chain(split_k)
        .chain(streams.map(Candidate::new))
        .collect()
}

/// Returns candidates for a packed weight.
fn packed(problem: &GemmProblem, streams: Vec<GemmStream>, machine: &Machine) -> Vec<Candidate> {
    // For few rows, the streaming GEMM is faster, because it has more loads of the weight in flight.
    let mut any = any_gpu(problem, machine);
    any.retain(|kernel| streams.is_empty() || kernel.tile.m >= MMA_ROWS);
    let streams = streams.into_iter().map(Candidate::new);
    any.into_iter().map(Candidate::new).chain(streams).collect()
}

/// Returns the kernels that do not need Hopper. For operands in E4M3 or int8, returns kernels only if the card's `mma.sync` multiplies them
/// faster than 16-bit operands.
pub(super) fn any_gpu(problem: &GemmProblem, machine: &Machine) -> Vec<Gemm> {
    let cost = &machine.costs.mma_sync;
    let lacks_e4m3 = problem.is_fp8() && cost.tensor_e4m3.is_none();
    if lacks_e4m3 || problem.multiplies_int8() && cost.tensor_int8.is_none() {
        return Vec::new();
    }
    let tiles = Tile::fitting(problem).into_iter();
    let kernels = tiles.map(|tile| Gemm {
        problem: problem.clone(),
        tile,
    });
    kernels.filter(|kernel| kernel.validate().is_ok()).collect()
}
