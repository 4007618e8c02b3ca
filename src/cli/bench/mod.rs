//! What a user measures: a model on sets of lengths, and the steps before its first run. The package
//! `gemmule-bench` has the rest, and builds on [`encoder`] and [`sets`].

pub mod encoder;
mod generate;
mod load;
pub mod scan;
pub mod sets;

use super::Outcome;

#[derive(clap::Subcommand)]
pub(super) enum Command {
    /// Token ids to last hidden state, on sets of lengths
    Encoder(Box<encoder::Args>),
    /// The steps before the first run: program, source, NVRTC, cache, plan
    Load(Box<load::Args>),
    /// A step of a model that writes, by the number of sequences
    Generate(Box<generate::Args>),
}

pub(super) fn run(command: Command) -> Outcome {
    match command {
        Command::Encoder(args) => encoder::run(*args),
        Command::Load(args) => load::run(*args),
        Command::Generate(args) => generate::run(*args),
    }
}
