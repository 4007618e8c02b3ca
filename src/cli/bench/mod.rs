mod encoder;
pub(in crate::cli) mod figure;
mod gemm;
mod load;

use super::Outcome;

#[derive(clap::Subcommand)]
pub(super) enum Command {
    /// Token ids to last hidden state, on sets of lengths
    Encoder(encoder::Args),
    /// Our GEMM kernels against cuBLASLt on a CUDA device
    Gemm(gemm::Args),
    /// The steps before the first run: program, source, NVRTC, cache, plan
    Load(load::Args),
}

pub(super) fn run(command: Command) -> Outcome {
    match command {
        Command::Encoder(args) => encoder::run(args),
        Command::Gemm(args) => gemm::run(args),
        Command::Load(args) => load::run(args),
    }
}
