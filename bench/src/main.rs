//! Benchmarks for developers of gemmule: comparisons with PyTorch and cuBLASLt, measurements of single kernels, and the papers' figures.
//! The measurements use the library; `gemmule bench` has the benchmarks for users.

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

/// Measures gemmule against PyTorch and cuBLASLt, and draws the papers' figures.
#[derive(clap::Parser)]
#[command(name = "gemmule-bench", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Also log decisions, such as selected kernels, and unused tensors of a checkpoint
    #[arg(short, long, global = true)]
    verbose: bool,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Compare allocators on a stream of requests of random lengths (TurboTransformers, figure 7)
    Allocators(allocators::Args),
    /// Break down a run's time, fused and unfused: GEMM, attention, softmax, LayerNorm, other
    Breakdown(subject::Args),
    /// Measure the KV cache during generation, with memory freed per sequence or per batch (TCB
    /// 4.2.2)
    Cleaning(cleaning::Args),
    /// Time an encoder on sets of sequence lengths like `gemmule bench encoder`, and compare it
    /// with PyTorch
    Encoder(Box<encoder::Args>),
    /// Compare GEMM kernels with cuBLASLt, by number of rows and size of the weight
    Gemm(gemm::Args),
    /// Time softmax, LayerNorm, attention and GEMM by shape: our variants and PyTorch's kernels
    Kernels(kernels::Args),
    /// Time an encoder with the passes enabled one after another, from padded and unfused to all
    /// passes
    Ladder(subject::Args),
    /// Compare generation and translation with other implementations, from files of results
    /// (LightSeq, figures 4 to 6)
    Lightseq(lightseq::Args),
    /// Simulate the papers' serving figures with cost tables (TurboTransformers 8, 9, 12, table 4;
    /// TCB 9 to 16)
    Serving(serving::Args),
    /// Time a stream of requests of random lengths with CUDA graphs of buckets, with graphs of
    /// exact shapes, and without graphs
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
