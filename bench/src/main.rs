//! Measures gemmule for those who develop it: against PyTorch and cuBLASLt, kernel by kernel, and as the
//! papers' figures have it. What is measured is the library's; `gemmule bench` has what a user needs of it.

mod allocators;
mod breakdown;
mod cleaning;
mod encoder;
mod figure;
mod gemm;
mod kernels;
mod ladder;
mod launched;
mod lightseq;
mod peers;
mod requests;
mod serving;
mod stream;
mod subject;

use std::process::ExitCode;

use gemmule::cli::{self, Outcome};

/// Measures gemmule beside PyTorch and cuBLASLt, and draws the papers' figures.
#[derive(clap::Parser)]
#[command(name = "gemmule-bench", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Say more: what was chosen, and which tensors of a checkpoint are not used
    #[arg(short, long, global = true)]
    verbose: bool,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Each allocator on one stream of requests of random lengths (TurboTransformers, figure 7)
    Allocators(allocators::Args),
    /// Where a run's time goes, fused and unfused: GEMM, attention, softmax, LayerNorm, other
    Breakdown(subject::Args),
    /// The KV cache while requests are written, freed sequence by sequence and batch by batch (TCB 4.2.2)
    Cleaning(cleaning::Args),
    /// Token ids to last hidden state, on sets of lengths, beside PyTorch: `gemmule bench encoder` with peers
    Encoder(Box<encoder::Args>),
    /// The GEMM kernels that any card runs against cuBLASLt; `kernels` times those of a card's own
    Gemm(gemm::Args),
    /// Softmax, LayerNorm, attention and GEMM by shape: our variants, and PyTorch's kernels
    Kernels(kernels::Args),
    /// The passes switched on one after another, from padded and unfused to all of them
    Ladder(subject::Args),
    /// Writing and translating beside others, from files of what was measured (LightSeq, figures 4 to 6)
    Lightseq(lightseq::Args),
    /// The papers' figures of serving, simulated with tables of costs (TurboTransformers 8, 9, 12, table 4; TCB 9 to 16)
    Serving(serving::Args),
    /// A stream of requests of random lengths with the CUDA graphs of buckets, of exact shapes, and without
    Stream(Box<stream::Args>),
}

fn main() -> ExitCode {
    cli::start(|cli: &Cli| cli.verbose, |cli| run(cli.command))
}

fn run(command: Command) -> Outcome {
    match command {
        Command::Allocators(args) => allocators::run(args),
        Command::Breakdown(args) => breakdown::run(args),
        Command::Cleaning(args) => cleaning::run(args),
        Command::Encoder(args) => encoder::run(*args),
        Command::Gemm(args) => gemm::run(args),
        Command::Kernels(args) => kernels::run(args),
        Command::Ladder(args) => ladder::run(args),
        Command::Lightseq(args) => lightseq::run(args),
        Command::Serving(args) => serving::run(args),
        Command::Stream(args) => stream::run(*args),
    }
}
