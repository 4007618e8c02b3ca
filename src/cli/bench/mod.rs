//! Benchmarks for users: a model on sets of sequence lengths, generation, a server under load, and the steps before the first run. The
//! package `gemmule-bench` contains other benchmarks and uses [`encoder`] and [`sets`].

mod costs;
pub mod encoder;
mod generate;
mod load;
pub mod scan;
#[cfg(feature = "server")]
mod serve;
pub mod sets;

use super::Outcome;

#[derive(clap::Subcommand)]
pub(super) enum Command {
    /// Time from token ids to last hidden state, on sets of sequence lengths
    Encoder(Box<encoder::Args>),
    /// Time the steps before the first run: program, source, NVRTC, cache, plan
    Load(Box<load::Args>),
    /// Write a cost table for `gemmule simulate`, even for a card that is not in this machine
    Costs(Box<costs::Args>),
    /// Time decode steps for several numbers of sequences
    Generate(Box<generate::Args>),
    /// Measure the latencies of a server under load
    #[cfg(feature = "server")]
    Serve(Box<serve::Args>),
}

pub(super) fn run(command: Command) -> Outcome {
    match command {
        Command::Encoder(args) => encoder::run(*args),
        Command::Load(args) => load::run(*args),
        Command::Costs(args) => costs::run(*args),
        Command::Generate(args) => generate::run(*args),
        #[cfg(feature = "server")]
        Command::Serve(args) => serve::run(*args),
    }
}
