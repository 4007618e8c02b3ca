mod breakdown;
mod encoder;
pub(in crate::cli) mod figure;
mod gemm;
mod ladder;
mod load;
mod sets;
mod subject;

use super::Outcome;

#[derive(clap::Subcommand)]
pub(super) enum Command {
    /// Where a run's time goes, fused and unfused: GEMM, attention, softmax, LayerNorm, other
    Breakdown(breakdown::Args),
    /// Token ids to last hidden state, on sets of lengths
    Encoder(encoder::Args),
    /// Our GEMM kernels against cuBLASLt on a CUDA device
    Gemm(gemm::Args),
    /// The passes switched on one after another, from padded and unfused to all of them
    Ladder(ladder::Args),
    /// The steps before the first run: program, source, NVRTC, cache, plan
    Load(load::Args),
}

pub(super) fn run(command: Command) -> Outcome {
    match command {
        Command::Breakdown(args) => breakdown::run(args),
        Command::Encoder(args) => encoder::run(args),
        Command::Gemm(args) => gemm::run(args),
        Command::Ladder(args) => ladder::run(args),
        Command::Load(args) => load::run(args),
    }
}
