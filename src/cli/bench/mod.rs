//! What a user measures: a model on sets of lengths, and the steps before its first run. The package
//! `gemmule-bench` has the rest, and builds on [`encoder`] and [`sets`].

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
    /// Token ids to last hidden state, on sets of lengths
    Encoder(Box<encoder::Args>),
    /// The steps before the first run: program, source, NVRTC, cache, plan
    Load(Box<load::Args>),
    /// Write what batches cost on a card that need not be there, for `gemmule simulate`
    Costs(Box<costs::Args>),
    /// A step of a model that writes, by the number of sequences
    Generate(Box<generate::Args>),
    /// Load on a server, and how long its answers take
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
