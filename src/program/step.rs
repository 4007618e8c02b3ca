//! One launch: its kernels, and the batches that each is for.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{SizeOverflow, TensorIndex};
use crate::tensor::{Extents, Shape, Size};

/// One launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Name of the value that it computes.
    pub name: String,
    /// Batches that it is launched for; `None` for all.
    pub when: Option<BatchRange>,
    /// Kernels that compute it, the first whose limit holds is launched. All take the same
    /// arguments. The last has no limit, or one on the longest sequence: longer ones are then an
    /// error.
    pub variants: Vec<Variant>,
    /// Tensors of the kernel's `Read` and `Write` parameters, in the order of the signature.
    pub operands: Vec<TensorIndex>,
    /// What the kernel's `rows` is.
    pub rows: Size,
}

/// A kernel with the batches it is for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Variant {
    /// Index into [`Program::kernels`](super::Program::kernels).
    pub kernel: usize,
    pub limit: Option<Limit>,
}

/// Largest batch that a variant is for, inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Limit {
    Rows(u64),
    Longest(u64),
}

impl Limit {
    fn holds(self, extents: &Extents) -> bool {
        match self {
            Limit::Rows(most) => extents.rows <= most,
            Limit::Longest(most) => extents.longest <= most,
        }
    }
}

/// What of a batch a range goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Measure {
    /// Tokens of the longest sequence.
    Longest,
    /// Tokens of all sequences.
    Tokens,
}

impl Measure {
    fn of(self, batch: &Extents) -> u64 {
        match self {
            Measure::Longest => batch.longest,
            Measure::Tokens => batch.tokens,
        }
    }
}

/// Batches by their size: more than `above`, at most `up_to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchRange {
    pub by: Measure,
    pub above: u64,
    /// `None` for any that is left.
    pub up_to: Option<u64>,
}

impl BatchRange {
    /// Every batch.
    pub const ALL: BatchRange = BatchRange {
        by: Measure::Longest,
        above: 0,
        up_to: None,
    };

    pub fn holds(self, batch: &Extents) -> bool {
        self.contains(self.by.of(batch))
    }

    /// Whether it has a batch that is nowhere larger than this one.
    pub fn begins_within(self, batch: &Extents) -> bool {
        self.above < self.by.of(batch)
    }

    /// Whether some batch may be in both. Ranges by different measures meet.
    pub fn meets(self, other: Self) -> bool {
        self.by != other.by || self.above.max(other.above) < self.end().min(other.end())
    }

    /// Whether every batch of this range is in one of `others`: in those by its own measure, or in
    /// those by another one that leave no batch out.
    pub fn is_covered_by(self, others: &[Self]) -> bool {
        [Measure::Longest, Measure::Tokens].into_iter().any(|by| {
            let whole = BatchRange { by, ..Self::ALL };
            let wanted = if by == self.by { self } else { whole };
            wanted.is_reached_by(others)
        })
    }

    /// As [`BatchRange::is_covered_by`], for those of `others` by the same measure.
    fn is_reached_by(self, others: &[Self]) -> bool {
        let mut reached = self.above;
        while reached < self.end() {
            let next = |o: &&Self| o.by == self.by && o.contains(reached + 1);
            match others.iter().find(next) {
                Some(next) => reached = next.end(),
                None => return false,
            }
        }
        true
    }

    fn contains(self, size: u64) -> bool {
        size > self.above && size <= self.end()
    }

    /// The largest of its sizes.
    fn end(self) -> u64 {
        self.up_to.unwrap_or(u64::MAX)
    }
}

/// As `longest 257 to 1024`.
impl fmt::Display for BatchRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = match self.by {
            Measure::Longest => "longest",
            Measure::Tokens => "tokens",
        };
        match (self.above, self.up_to) {
            (above, None) => write!(f, "{by} above {above}"),
            (0, Some(up_to)) => write!(f, "{by} up to {up_to}"),
            (above, Some(up_to)) => {
                write!(f, "{by} {} to {up_to}", above.saturating_add(1))
            }
        }
    }
}

/// Why a step cannot be launched for a batch.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error(transparent)]
    Size(#[from] SizeOverflow),
    #[error(
        "the longest sequence of the batch has {longest} tokens, but the kernels of `{step}` take at most {limit}; send shorter sequences, or compile with --attention auto, online or grouped"
    )]
    TooLong {
        step: String,
        longest: u64,
        limit: u64,
    },
    #[error(
        "`{step}` runs over {rows} rows, but its kernels take at most {limit}; compile the model again"
    )]
    TooManyRows { step: String, rows: u64, limit: u64 },
}

impl Step {
    /// What is launched for a batch: the kernel's index, and the extents with this step's `rows`.
    /// `None` where the step is for other batches.
    ///
    /// # Errors
    /// Rows that do not fit 64 bits, and a batch that is beyond the limit of every kernel.
    pub fn launch(&self, batch: &Extents) -> Result<Option<(usize, Extents)>, LaunchError> {
        if self.when.is_some_and(|range| !range.holds(batch)) {
            return Ok(None);
        }
        let rows = self.rows.eval(batch).ok_or_else(|| SizeOverflow {
            tensor: self.name.clone(),
            shape: Shape(vec![self.rows.clone()]),
        })?;
        let extents = batch.with_rows(rows);
        let fits = |v: &&Variant| v.limit.is_none_or(|limit| limit.holds(&extents));
        if let Some(variant) = self.variants.iter().find(fits) {
            return Ok(Some((variant.kernel, extents)));
        }
        let step = self.name.clone();
        Err(match self.variants.last().and_then(|v| v.limit) {
            Some(Limit::Rows(limit)) => LaunchError::TooManyRows { step, rows, limit },
            Some(Limit::Longest(limit)) => LaunchError::TooLong {
                step,
                longest: batch.longest,
                limit,
            },
            // Only a step without kernels gets here.
            None => LaunchError::TooManyRows {
                step,
                rows,
                limit: 0,
            },
        })
    }

    /// The batches that it is launched for.
    pub fn range(&self) -> BatchRange {
        self.when.unwrap_or(BatchRange::ALL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Symbol;

    fn range(above: u64, up_to: Option<u64>) -> BatchRange {
        let by = Measure::Longest;
        BatchRange { by, above, up_to }
    }

    fn tokens(above: u64, up_to: Option<u64>) -> BatchRange {
        let by = Measure::Tokens;
        BatchRange { by, above, up_to }
    }

    fn step(when: Option<BatchRange>, limits: &[Option<Limit>]) -> Step {
        let variant = |(kernel, &limit): (usize, &Option<Limit>)| Variant { kernel, limit };
        Step {
            name: "context".to_owned(),
            when,
            variants: limits.iter().enumerate().map(variant).collect(),
            operands: Vec::new(),
            rows: Symbol::Tokens.into(),
        }
    }

    #[test]
    fn ranges_meet_where_a_batch_is_in_both_and_cover_what_leaves_no_gap() {
        let (short, middle, long) = (
            range(0, Some(256)),
            range(256, Some(1024)),
            range(1024, None),
        );
        assert!(short.contains(1) && short.contains(256) && !short.contains(257));
        assert!(!short.meets(middle) && !middle.meets(long) && !short.meets(long));
        assert!(range(255, Some(257)).meets(short) && range(255, Some(257)).meets(middle));
        assert!(BatchRange::ALL.is_covered_by(&[long, short, middle]));
        assert!(!BatchRange::ALL.is_covered_by(&[long, short]));
        assert!(range(300, Some(900)).is_covered_by(&[middle]));
        assert!(!range(300, Some(1025)).is_covered_by(&[middle]));
        let shown = [short, middle, long].map(|r| r.to_string());
        assert_eq!(
            shown,
            [
                "longest up to 256",
                "longest 257 to 1024",
                "longest above 1024"
            ]
        );
    }

    #[test]
    fn ranges_by_different_measures_meet_and_cover_each_other_only_where_nothing_is_left_out() {
        let (few, many) = (tokens(0, Some(600)), tokens(600, None));
        assert!(!few.meets(many) && few.meets(range(900, None)));
        assert!(BatchRange::ALL.is_covered_by(&[many, few]) && many.is_covered_by(&[many]));
        assert!(many.is_covered_by(&[range(0, Some(64)), range(64, None)]));
        assert!(!many.is_covered_by(&[range(64, None), few]));
        let batch = Extents::of(&[300, 301]).expect("a batch");
        assert!(many.holds(&batch) && !few.holds(&batch) && !range(600, None).holds(&batch));
        assert!(many.begins_within(&batch) && !range(301, None).begins_within(&batch));
        assert_eq!(many.to_string(), "tokens above 600");
    }

    #[test]
    fn the_first_kernel_whose_limit_holds_is_launched() {
        let step = step(
            Some(range(4, None)),
            &[Some(Limit::Longest(8)), Some(Limit::Rows(20)), None],
        );
        let kernel = |lens: &[u32]| {
            let batch = Extents::of(lens).expect("a batch");
            let launch = step.launch(&batch).expect("a launch");
            launch.map(|(kernel, extents)| (kernel, extents.rows))
        };
        assert_eq!(kernel(&[4, 4, 4]), None);
        assert_eq!(kernel(&[5, 8]), Some((0, 13)));
        assert_eq!(kernel(&[9]), Some((1, 9)));
        assert_eq!(kernel(&[9, 12]), Some((2, 21)));
    }

    #[test]
    fn a_sequence_beyond_all_limits_is_an_error_that_names_them() {
        let step = step(None, &[Some(Limit::Longest(64)), Some(Limit::Longest(256))]);
        let batch = Extents::of(&[3, 257]).expect("a batch");
        insta::assert_snapshot!(
            step.launch(&batch).expect_err("an error"),
            @"the longest sequence of the batch has 257 tokens, but the kernels of `context` take at most 256; send shorter sequences, or compile with --attention auto, online or grouped"
        );
    }
}
