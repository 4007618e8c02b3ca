//! Arguments that select the allocator of intermediate tensors.

use std::str::FromStr;

use miette::{Report, miette};

use crate::{AllocatorChoice, ChunkPolicy, tensor::Extents};

/// Allocator of intermediate tensors.
#[derive(clap::Args, Clone)]
pub(super) struct Memory {
    /// Allocator of intermediate tensors
    #[arg(long, value_enum, value_name = "NAME", default_value_t = AllocatorName::Chunk)]
    allocator: AllocatorName,
    /// With `maximum`: the largest batch, as sequence length x number of sequences, e.g. 512x8
    #[arg(long, value_name = "LENxN")]
    maximum: Option<MaximumBatch>,
    /// With `chunk`: free a chunk after N requests that did not need it
    #[arg(long, value_name = "N")]
    release_after: Option<u32>,
    /// With `chunk`: max idle bytes; beyond this, chunks are freed at once
    #[arg(long, value_name = "BYTES")]
    idle_limit: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum AllocatorName {
    /// Chunks of memory that persist between requests (TurboTransformers 4.2, improved)
    Chunk,
    /// One arena per request; the largest tensors are placed first (greedy by size)
    Gsoc,
    /// Two pools with best fit, reused in operator order, as in PyTorch
    Caching,
    /// One plan for the largest batch, which --maximum gives (LightSeq 2.3)
    Maximum,
    /// TurboTransformers 4.2 exactly as published
    Turbo,
}

impl Memory {
    /// Returns the allocator that the arguments specify.
    pub(super) fn choice(&self) -> Result<AllocatorChoice, Report> {
        let policy = ChunkPolicy::default();
        let policy = ChunkPolicy {
            release_after: self.release_after.unwrap_or(policy.release_after),
            keep_limit: self.idle_limit.unwrap_or(policy.keep_limit),
            ..policy
        };
        let has_policy = self.release_after.is_some() || self.idle_limit.is_some();
        if has_policy && self.allocator != AllocatorName::Chunk {
            return Err(miette!(
                "--release-after and --idle-limit are settings of the chunk allocator; leave them out, or give --allocator chunk"
            ));
        }
        match (self.allocator, self.maximum) {
            (AllocatorName::Maximum, Some(maximum)) => Ok(AllocatorChoice::Maximum(maximum.0)),
            (AllocatorName::Maximum, None) => Err(miette!(
                "--allocator maximum needs the size of the largest batch; give --maximum, such as 512x8 for 8 sequences of 512 tokens"
            )),
            (_, Some(_)) => Err(miette!(
                "--maximum has an effect only with --allocator maximum; leave it out, or give --allocator maximum"
            )),
            (AllocatorName::Chunk, None) => Ok(AllocatorChoice::Chunk(policy)),
            (AllocatorName::Gsoc, None) => Ok(AllocatorChoice::Gsoc),
            (AllocatorName::Caching, None) => Ok(AllocatorChoice::Caching),
            (AllocatorName::Turbo, None) => Ok(AllocatorChoice::Turbo),
        }
    }
}

/// A batch of sequences of equal length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MaximumBatch(pub(super) Extents);

#[derive(Debug, thiserror::Error)]
#[error(
    "`{text}` is not a batch size; expected length x sequences, each at least 1 and together at most {} tokens, such as 512x8 for 8 sequences of 512 tokens",
    Extents::MAX_TOKENS
)]
pub(super) struct NoMaximum {
    text: String,
}

impl FromStr for MaximumBatch {
    type Err = NoMaximum;

    fn from_str(text: &str) -> Result<Self, NoMaximum> {
        let sides = text.split_once('x').and_then(|(length, n)| {
            let (length, n): (u32, u32) = (length.parse().ok()?, n.parse().ok()?);
            let fits = u64::from(length) * u64::from(n) <= Extents::MAX_TOKENS;
            fits.then_some((length, n))
        });
        sides
            .and_then(|(length, n)| Extents::of(&vec![length; n as usize]).ok())
            .map(Self)
            .ok_or_else(|| NoMaximum {
                text: text.to_owned(),
            })
    }
}
