//! The user's choice of the kernel for fused attention.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Kernels for fused attention. If a kernel is chosen by name, no other kernel replaces it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttentionChoice {
    /// Selects the kernel by card, head size and batch: the online kernel, unless a faster kernel applies.
    #[default]
    Auto,
    /// One kernel with all keys of a sequence in shared memory (ByteTransformer III.E.1). A longer sequence is an error.
    Short,
    /// Two grouped GEMMs, with the softmax split between them (ByteTransformer III.E.2). The scores are stored in global memory, and their
    /// size is quadratic in the sequence lengths.
    Grouped,
    /// One kernel with online softmax, for any length.
    Online,
    /// One kernel with warpgroup MMA (FlashAttention-3), for any length, on Hopper.
    Wgmma,
}

/// Error for a name that is not an attention kernel.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a kind of attention; expected auto, short, grouped, online or wgmma")]
pub struct UnknownAttention(String);

impl AttentionChoice {
    const ALL: [Self; 5] = [
        Self::Auto,
        Self::Short,
        Self::Grouped,
        Self::Online,
        Self::Wgmma,
    ];

    /// Returns the name used on the command line.
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
