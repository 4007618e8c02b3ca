mod allocators;
mod breakdown;
mod encoder;
pub(in crate::cli) mod figure;
mod gemm;
mod kernels;
mod ladder;
mod load;
mod peers;
mod requests;
mod sets;
mod stream;
mod subject;

use super::Outcome;

#[derive(clap::Subcommand)]
pub(super) enum Command {
    /// Each allocator on one stream of requests of random lengths (TurboTransformers, figure 7)
    Allocators(allocators::Args),
    /// Where a run's time goes, fused and unfused: GEMM, attention, softmax, LayerNorm, other
    Breakdown(subject::Args),
    /// Token ids to last hidden state, on sets of lengths
    Encoder(Box<encoder::Args>),
    /// The GEMM kernels that any card runs against cuBLASLt; `bench kernels` times those of a card's own
    Gemm(gemm::Args),
    /// Softmax, LayerNorm, attention and GEMM by shape: our variants, and PyTorch's kernels
    Kernels(kernels::Args),
    /// The passes switched on one after another, from padded and unfused to all of them
    Ladder(subject::Args),
    /// The steps before the first run: program, source, NVRTC, cache, plan
    Load(load::Args),
    /// A stream of requests of random lengths with the CUDA graphs of buckets, of exact shapes, and without
    Stream(Box<stream::Args>),
}

pub(super) fn run(command: Command) -> Outcome {
    match command {
        Command::Allocators(args) => allocators::run(args),
        Command::Breakdown(args) => breakdown::run(args),
        Command::Encoder(args) => encoder::run(*args),
        Command::Gemm(args) => gemm::run(args),
        Command::Kernels(args) => kernels::run(args),
        Command::Ladder(args) => ladder::run(args),
        Command::Load(args) => load::run(args),
        Command::Stream(args) => stream::run(*args),
    }
}
