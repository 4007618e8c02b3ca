//! Which kernels compute fused attention.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Which kernels compute fused attention. What is asked for by name is never replaced by another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttentionChoice {
    /// By the longest sequence of the batch: as measured, else the short kernel as far as it goes
    /// and the online one beyond. On Hopper few tokens have a kernel of their own.
    #[default]
    Auto,
    /// All of a sequence's keys on the chip (ByteTransformer III.E.1). A longer sequence than it
    /// takes is an error.
    Short,
    /// Two grouped GEMMs with the softmax taken apart between them (ByteTransformer III.E.2). The
    /// scores are in memory, so that this grows with the square of the lengths.
    Grouped,
    /// One kernel with online softmax, for any length.
    Online,
    /// One kernel of warpgroup products (FlashAttention-3), for any length, on Hopper.
    Wgmma,
}

/// A name of no choice.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no kind of attention; expected auto, short, grouped, online or wgmma")]
pub struct UnknownAttention(String);

impl AttentionChoice {
    const ALL: [Self; 5] = [
        Self::Auto,
        Self::Short,
        Self::Grouped,
        Self::Online,
        Self::Wgmma,
    ];

    /// As on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Short => "short",
            Self::Grouped => "grouped",
            Self::Online => "online",
            Self::Wgmma => "wgmma",
        }
    }
}

impl fmt::Display for AttentionChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for AttentionChoice {
    type Err = UnknownAttention;

    fn from_str(text: &str) -> Result<Self, UnknownAttention> {
        Self::ALL
            .into_iter()
            .find(|choice| choice.name() == text)
            .ok_or_else(|| UnknownAttention(text.to_owned()))
    }
}
