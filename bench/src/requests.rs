//! A sequence of requests of random lengths, for the benchmarks of allocators and CUDA graphs.

use gemmule::{
    Batch, EngineError,
    kernels::trial::uniform,
    runtime::batch::{BatchError, Limits},
};
use miette::{Report, miette};

#[derive(clap::Args)]
pub(crate) struct Requests {
    /// Number of requests in the stream
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) requests: u16,
    /// Sequences per request
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) batch: u16,
    /// Minimum sequence length
    #[arg(long, value_name = "TOKENS", default_value_t = 5)]
    pub(crate) shortest: u32,
    /// Maximum sequence length
    #[arg(long, value_name = "TOKENS", default_value_t = 500)]
    pub(crate) longest: u32,
    /// Seed of all random values: lengths, ids, and weights unless they are given
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

impl Requests {
    /// Checks that the range of lengths is valid, and that `--longest` does not exceed `limit`, the number of rows in the position table of
    /// `model`.
    pub(crate) fn check(&self, model: &str, limit: Option<u32>) -> Result<(), Report> {
        let (shortest, longest) = (self.shortest, self.longest);
        if shortest == 0 || shortest > longest {
            return Err(miette!(
                "the range of lengths from {shortest} to {longest} tokens is invalid; expected 1 ≤ --shortest ≤ --longest"
            ));
        }
        match limit.filter(|&limit| longest > limit) {
            Some(limit) => Err(miette!(
                "--longest is {longest}, but the position table of `{model}` has only {limit} rows; use a smaller --longest"
            )),
            None => Ok(()),
        }
    }

    /// Returns the sequence lengths of each request.
    pub(crate) fn lens(&self) -> Vec<Vec<u32>> {
        let mut state = self.seed;
        let n_lengths = u64::from(self.longest - self.shortest) + 1;
        let mut length = || self.shortest + (uniform(&mut state) % n_lengths) as u32;
        (0..self.requests)
            .map(|_| (0..self.batch).map(|_| length()).collect())
            .collect()
    }

    /// Returns requests with the sequence lengths `lens` and random token ids.
    pub(crate) fn batches(
        &self,
        lens: &[Vec<u32>],
        limits: &Limits,
    ) -> Result<Vec<Batch>, EngineError> {
        let mut state = self.seed;
        let batches = lens.iter().map(|lens| {
            let n_tokens: u32 = lens.iter().sum();
            let ids = (0..n_tokens).map(|_| limits.token_id(uniform(&mut state)));
            let batch = Batch::from_packed(ids.collect(), lens)?;
            Ok(batch.with_required_ends(limits))
        });
        Ok(batches.collect::<Result<_, BatchError>>()?)
    }

    /// Describes the stream.
    pub(crate) fn in_words(&self) -> String {
        format!(
            "seed {}; requests: {}; sequences in each: {}; tokens of each: {} to {}",
            self.seed, self.requests, self.batch, self.shortest, self.longest
        )
    }
}
