//! Which kernels compute fused attention.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{
    kernels::{
        Instructions,
        attention::{AttentionError, MhaShort, MhaTile},
    },
    tune::{Choice, Problem, Range},
};

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

    /// What a problem of attention is computed with; `None` where that is left open.
    ///
    /// # Errors
    /// Where these kernels cannot be made for its sizes.
    pub(super) fn ranges(self, problem: &Problem) -> Result<Option<Vec<Range>>, AttentionError> {
        let Problem::Attention {
            head,
            dtype,
            instructions,
            ..
        } = *problem
        else {
            return Ok(None);
        };
        let (up_to, choice) = match self {
            Self::Auto => return Ok(None),
            Self::Short => {
                let max_len = MhaShort::max_len_for(head, dtype);
                (Some(max_len.into()), Choice::MhaShort { max_len })
            }
            Self::Grouped => (None, Choice::MhaGrouped),
            Self::Online => (None, Choice::MhaOnline),
            Self::Wgmma if instructions != Instructions::Hopper => {
                return Err(AttentionError::WarpgroupInstructions);
            }
            Self::Wgmma => {
                let ranges: Vec<Range> = MhaTile::by_length(head)
                    .into_iter()
                    .map(|(up_to, tile)| Range {
                        up_to,
                        choice: Choice::MhaWgmma(tile),
                    })
                    .collect();
                if ranges.is_empty() {
                    return Err(AttentionError::WarpgroupHead { head });
                }
                ranges.iter().try_for_each(|r| problem.check(r.choice))?;
                return Ok(Some(ranges));
            }
        };
        problem.check(choice)?;
        Ok(Some(vec![Range { up_to, choice }]))
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
