//! Steps of a program: their kernels, and the batches that each kernel serves.

use serde::{Deserialize, Serialize};

use super::{SizeOverflow, TensorIndex};
use crate::{
    select::{Batches, Dispatch},
    tensor::{Extents, Shape, Size, Symbol},
};

/// One launch, whose kernel depends on the batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Name of the computed value.
    pub name: String,
    /// Index into [`Program::kernels`](super::Program::kernels) for each range of batches. All kernels of a step have the same parameters.
    /// For batches outside all ranges, another step computes the value.
    pub dispatch: Dispatch<usize>,
    /// Length of the longest sequence that this step or an alternative step for the same value supports. A longer sequence is an error.
    pub max_longest: Option<u64>,
    /// Tensors of the kernel's `Read` and `Write` parameters, in signature order.
    pub operands: Vec<TensorIndex>,
    /// Value of [`Symbol::Rows`] for the step's kernels.
    pub rows: Size,
    /// Whether the kernels, which normally compute a row per sequence, compute a row per token instead. [`Symbol::Batch`] is then the
    /// number of tokens.
    pub by_token: bool,
    /// Index of the part of the model that the step belongs to. Only batches of this part launch
    /// it.
    pub part: u32,
}

/// Error in launching a step for a batch.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error(transparent)]
    Size(#[from] SizeOverflow),
    #[error(
        "the longest sequence of the batch has {longest} tokens, but the kernels of `{step}` take at most {limit}; send shorter sequences, or compile the model with attention auto, online or grouped"
    )]
    TooLong {
        step: String,
        longest: u64,
        limit: u64,
    },
}

impl Step {
    /// Returns the launch for a batch: the kernel's index, and the extents with this step's `rows`. Returns `None` if the step belongs to
    /// another part than the batch, or has no kernel for it.
    ///
    /// # Errors
    /// Returns an error if the number of rows does not fit in 64 bits, or if a sequence is too long for every kernel.
    pub fn launch(&self, batch: &Extents) -> Result<Option<(usize, Extents)>, LaunchError> {
        if self.part != batch.part {
            return Ok(None);
        }
        if let Some(limit) = self.max_longest.filter(|&most| batch.longest > most) {
            return Err(LaunchError::TooLong {
                step: self.name.clone(),
                longest: batch.longest,
                limit,
            });
        }
        let rows = self.rows.eval(batch).ok_or_else(|| SizeOverflow {
            tensor: self.name.clone(),
            shape: Shape(vec![self.rows.clone()]),
        })?;
        let mut extents = batch.with_rows(rows);
        if self.by_token {
            extents.batch = extents.tokens;
        }
        let kernel = self.dispatch.at(&extents);
        Ok(kernel.map(|&kernel| (kernel, extents)))
    }

    /// Returns the distinct indices of the kernels that the step may launch.
    pub fn kernels(&self) -> Vec<usize> {
        let mut kernels: Vec<usize> = self.dispatch.choices().copied().collect();
        kernels.sort_unstable();
        kernels.dedup();
        kernels
    }

    /// Converts a size that a kernel declares for a parameter to a size that depends only on the batch: replaces [`Symbol::Rows`] with the
    /// step's `rows`, and also [`Symbol::Batch`] with the number of tokens if `by_token` is true.
    pub(super) fn bind(&self, size: &Size) -> Size {
        let size = size.bind(Symbol::Rows, &self.rows);
        match self.by_token {
            true => size.bind(Symbol::Batch, &Symbol::Tokens.into()),
            false => size,
        }
    }

    /// Returns whether the step's rows are the tokens of the batch.
    pub(super) fn is_over_tokens(&self) -> bool {
        self.rows.as_symbol() == Some(Symbol::Tokens)
    }

    /// Returns the batches for which the step is launched, with rows counted in tokens. If the step's rows are not tokens, its dispatch
    /// supports any number of rows ([`Program::validate`](super::Program::validate)), and thus any number of tokens.
    pub(super) fn batches(&self) -> Vec<Batches> {
        let covered = self.dispatch.covered();
        match self.is_over_tokens() || !Batches::ALL.is_covered_by(&covered) {
            true => covered,
            false => vec![Batches::ALL],
        }
    }

    /// Returns whether at least one batch with extents up to `batch` launches the step.
    pub(super) fn begins_within(&self, batch: &Extents) -> bool {
        let rows = match self.is_over_tokens() {
            true => batch.tokens,
            false => u64::MAX,
        };
        let mut all = self.dispatch.covered().into_iter();
        self.part == batch.part
            && all.any(|part| {
                part.rows.above < rows
                    && part.longest.above < batch.longest
                    && part.keys.above < batch.max_keys()
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::{Entry, Interval};

    fn step(dispatch: Dispatch<usize>) -> Step {
        Step {
            name: "context".to_owned(),
            dispatch,
            max_longest: None,
            operands: Vec::new(),
            rows: Symbol::Tokens.into(),
            by_token: false,
            part: 0,
        }
    }

    #[test]
    fn the_kernel_for_the_range_of_a_batch_is_launched() {
        let part = |rows: (u64, Option<u64>), longest: (u64, Option<u64>), choice| Entry {
            batches: Batches {
                rows: Interval::new(rows.0, rows.1),
                longest: Interval::new(longest.0, longest.1),
                keys: Interval::ALL,
            },
            choice,
        };
        let step = step(Dispatch::of(vec![
            part((0, None), (4, Some(8)), 0),
            part((0, Some(20)), (8, None), 1),
            part((20, None), (8, None), 2),
        ]));
        let kernel = |lens: &[u32]| {
            let batch = Extents::of(lens).expect("a batch");
            let launch = step.launch(&batch).expect("a launch");
            launch.map(|(kernel, extents)| (kernel, extents.rows))
        };
        assert_eq!(kernel(&[4, 4, 4]), None);
        assert_eq!(kernel(&[5, 8]), Some((0, 13)));
        assert_eq!(kernel(&[9]), Some((1, 9)));
        assert_eq!(kernel(&[9, 12]), Some((2, 21)));
        assert_eq!(step.kernels(), [0, 1, 2]);
        let begins = |lens: &[u32]| step.begins_within(&Extents::of(lens).expect("a batch"));
        assert!(!begins(&[4, 4, 4]) && begins(&[5]));
    }

    #[test]
    fn a_sequence_beyond_the_limit_is_an_error_that_names_it() {
        let step = Step {
            max_longest: Some(256),
            ..step(Dispatch::always(0))
        };
        let batch = Extents::of(&[3, 257]).expect("a batch");
        insta::assert_snapshot!(
            step.launch(&batch).expect_err("an error"),
            @"the longest sequence of the batch has 257 tokens, but the kernels of `context` take at most 256; send shorter sequences, or compile the model with attention auto, online or grouped"
        );
    }
}
