//! One kernel for every size, so that what is computed for a sequence does not depend on its
//! batch-mates, not by a bit.

use super::{Choice, Problem, Range, choice_at};

/// Why a problem's results would depend on the batch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotInvariant {
    #[error(
        "`{problem}` has kernels for {n} ranges of sizes, so that a result would depend on the size of its batch; an invariant program has one kernel for all"
    )]
    Ranges { problem: String, n: usize },
    #[error("{choice} of `{problem}` {why}")]
    Choice {
        problem: String,
        choice: Choice,
        why: &'static str,
    },
    #[error(
        "every kernel of `{problem}` sums in an order that depends on where a row begins in memory, and so on the sequences before it"
    )]
    NoChoice { problem: String },
}

impl Choice {
    /// Whether the operations that make a row, and their order, depend on nothing but the row's own
    /// sequence: not on its place in a tile or a block, nor on how many rows there are.
    pub fn is_invariant(self) -> bool {
        self.varies().is_none()
    }

    /// What else they depend on.
    fn varies(self) -> Option<&'static str> {
        match self {
            // Every output is a sum over k in steps of one size, from the first to the last, whichever
            // row of whichever tile it is; nothing is split by the number of tiles.
            Choice::Tile(_) | Choice::Wgmma(_) => None,
            // The parts of k are the tile's, and are added in one order.
            Choice::OneTile(_) | Choice::SplitK(_) | Choice::Skinny(_) => None,
            // Tiles of queries and keys are counted from a sequence's own start; masked and skipped are
            // keys beyond its own end.
            Choice::MhaShort { .. } | Choice::MhaOnline | Choice::MhaGrouped => None,
            // The maximum that weights are rounded by is raised for 16 queries at once, counted from the
            // start, too; those beyond the end have no say in it.
            Choice::MhaWgmma(_) => None,
            // A row is its team's own, and starts at a multiple of its width.
            Choice::Teams(_) => None,
            // Two launches are as the choices of their own problems are.
            Choice::Apart => None,
            Choice::Joined(_) => {
                Some("has one kernel with LayerNorm, which invariant programs launch by itself")
            }
            // Rows of scores are read by the aligned packs that cover them, and lanes sum packs: which
            // elements share a pack depends on where the row begins.
            Choice::Softmax(_) => Some(
                "sums in an order that depends on where a row begins in memory, and so on the sequences before it",
            ),
        }
    }
}

impl Problem {
    /// The choice that an invariant program launches for every size: the first guess for the largest
    /// batches, as little time is lost there, and where batches are small there is little to lose.
    ///
    /// # Errors
    /// [`NotInvariant::NoChoice`].
    pub fn for_all_sizes(&self) -> Result<Choice, NotInvariant> {
        let serves_all = |choice: &Choice| choice.is_invariant() && choice.most().is_none();
        let guess = choice_at(&self.guess(), u64::MAX).filter(serves_all);
        let any = || self.candidates().into_iter().find(serves_all);
        let none = || NotInvariant::NoChoice {
            problem: self.key(),
        };
        guess.or_else(any).ok_or_else(none)
    }

    /// Whether a program that launches these ranges computes every row in one way.
    pub fn check_invariant(&self, ranges: &[Range]) -> Result<(), NotInvariant> {
        let problem = self.key();
        for range in ranges {
            if let Some(why) = range.choice.varies() {
                let choice = range.choice;
                return Err(NotInvariant::Choice {
                    problem,
                    choice,
                    why,
                });
            }
        }
        match ranges.len() {
            1 => Ok(()),
            n => Err(NotInvariant::Ranges { problem, n }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::problem::tests::{attention, gemm, hopper_attention, layernorm, softmax};

    #[test]
    fn one_candidate_serves_every_size() {
        for problem in [gemm(), layernorm(), attention(64), attention(128)] {
            let choice = problem.for_all_sizes().expect("there is one");
            assert!(problem.candidates().contains(&choice), "{choice}");
            assert_eq!(choice.most(), None);
            let all = Range {
                up_to: None,
                choice,
            };
            assert_eq!(problem.check_invariant(&[all]), Ok(()));
        }
        assert_eq!(attention(64).for_all_sizes(), Ok(Choice::MhaOnline));
        let on_hopper = hopper_attention(64);
        let longest = on_hopper.guess().last().map(|r| r.choice);
        assert!(matches!(longest, Some(Choice::MhaWgmma(_))));
        assert_eq!(on_hopper.for_all_sizes().ok(), longest);
    }

    #[test]
    fn the_one_tile_of_a_gemm_is_the_one_for_large_batches() {
        let problem = gemm();
        let chosen = problem.for_all_sizes().expect("there is one");
        assert_eq!(Some(chosen), problem.guess().last().map(|r| r.choice));
    }

    #[test]
    fn ranges_and_sums_by_address_are_refused_with_the_reason() {
        let refused = |problem: &Problem, ranges: &[Range]| {
            let error = problem.check_invariant(ranges).expect_err("it is refused");
            error.to_string()
        };
        let problem = gemm();
        let ranges = problem.guess();
        assert!(ranges.len() > 1);
        let text = refused(&problem, &ranges);
        assert!(text.contains("ranges of sizes"), "{text}");
        let problem = softmax();
        let choice = choice_at(&problem.guess(), u64::MAX).expect("it serves all");
        let streamed = Range {
            up_to: None,
            choice,
        };
        let text = refused(&problem, &[streamed]);
        assert!(text.contains("where a row begins in memory"), "{text}");
        assert!(problem.for_all_sizes().is_err());
    }
}
