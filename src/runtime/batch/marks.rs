//! Marks for tokens of a batch that are excluded from attention or from pooling.

use super::{Batch, BatchError};

impl Batch {
    /// Sets the number of leading tokens of each sequence that tokens may attend to. The remaining tokens also have outputs, but no token
    /// attends to them, and they do not attend to themselves. Late-interaction models expand queries with such tokens. Only an engine for a
    /// model with this query expansion accepts the batch.
    ///
    /// # Errors
    /// Returns an error unless there is one number per sequence, from 1 to the length of the sequence.
    pub fn with_attended(mut self, attended: Vec<u32>) -> Result<Self, BatchError> {
        let (expected, found) = (self.lens.len(), attended.len());
        if expected != found {
            return Err(BatchError::Past {
                what: "numbers of attended tokens",
                expected,
                found,
            });
        }
        let mut both = attended.iter().zip(&self.lens).enumerate();
        if let Some((sequence, (&attended, &len))) =
            both.find(|(_, (n, len))| !(1..=**len).contains(n))
        {
            return Err(BatchError::Attended {
                sequence,
                attended,
                len,
            });
        }
        self.attended = Some(attended);
        Ok(self)
    }

    /// Returns the number of leading tokens of each sequence that tokens may attend to; `None` if tokens may attend to all tokens.
    pub fn attended(&self) -> Option<&[u32]> {
        self.attended.as_deref()
    }

    /// Sets the number of leading tokens of each sequence that pooling leaves out, such as the tokens of a prompt. Other tokens still
    /// attend to these tokens. If outputs are pooled, only an engine for a checkpoint that leaves out prompts (`include_prompt`) accepts
    /// the batch.
    ///
    /// # Errors
    /// Returns an error unless there is one number per sequence, less than the length of the sequence.
    pub fn with_left_out(mut self, left_out: Vec<u32>) -> Result<Self, BatchError> {
        let (expected, found) = (self.lens.len(), left_out.len());
        if expected != found {
            return Err(BatchError::Past {
                what: "numbers of tokens that pooling leaves out",
                expected,
                found,
            });
        }
        let mut both = left_out.iter().zip(&self.lens).enumerate();
        if let Some((sequence, (&left_out, &len))) = both.find(|(_, (n, len))| n >= len) {
            return Err(BatchError::LeftOut {
                sequence,
                left_out,
                len,
            });
        }
        self.left_out = Some(left_out).filter(|all| all.iter().any(|&n| n > 0));
        Ok(self)
    }

    /// Returns the number of leading tokens of each sequence that pooling leaves out; `None` if pooling includes all tokens.
    pub fn left_out(&self) -> Option<&[u32]> {
        self.left_out.as_deref()
    }

    /// Returns an error if [`with_attended`](Self::with_attended) has excluded tokens from attention.
    pub(crate) fn check_attended(&self) -> Result<(), BatchError> {
        let attended = self.attended.iter().flatten();
        let mut both = attended.zip(&self.lens).enumerate();
        match both.find(|(_, (attended, len))| attended != len) {
            Some((sequence, (&attended, &len))) => Err(BatchError::NotAttended {
                sequence,
                attended,
                len,
            }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{runtime::batch::Limits, tensor::SequenceEnd};

    #[test]
    fn arrays_of_previous_ids_and_of_pooled_tokens_follow_the_sequences() {
        let batch = Batch::from_packed(vec![7, 8, 9, 5, 6], &[3, 2]).expect("a batch");
        let mut previous = [0; 5];
        batch.write_previous_ids(2, &mut previous);
        assert_eq!(previous, [2, 7, 8, 2, 5]);
        let pooled = |batch: &Batch| {
            let (mut tokens, mut bounds) = ([9; 6], [9; 3]);
            batch.write_pooled_tokens(&mut tokens);
            batch.write_pooled_cu_lens(&mut bounds);
            (tokens, bounds)
        };
        assert_eq!(pooled(&batch), ([0, 1, 2, 3, 4, 0], [0, 3, 5]));
        let left = batch
            .clone()
            .with_left_out(vec![2, 1])
            .expect("tokens remain");
        assert_eq!(pooled(&left), ([2, 4, 0, 0, 0, 0], [0, 1, 2]));
        let none = batch
            .clone()
            .with_left_out(vec![0, 0])
            .expect("none are left out");
        assert_eq!(none.left_out(), None);
        let wrong = batch
            .with_left_out(vec![1])
            .expect_err("one number is missing");
        assert_eq!(
            wrong.to_string(),
            "numbers of tokens that pooling leaves out: expected 2, found 1"
        );
    }

    #[test]
    fn a_required_last_token_is_checked_in_every_sequence() {
        let limits = Limits {
            vocabulary: 10,
            segments: None,
            skipped: None,
            longest: None,
            extended: None,
            end: Some(SequenceEnd::Required(2)),
        };
        let batch = Batch::from_packed(vec![7, 2, 9, 5], &[2, 2]).expect("a batch");
        let told = batch.check(&limits).expect_err("the second ends with 5");
        assert_eq!(
            told.to_string(),
            "the last token of sequence 1 has the id 5, but the model computes its outputs at the end-of-sequence token 2; end the sequence with 2"
        );
        let ended = batch.with_required_ends(&limits);
        assert_eq!(ended.token_ids(), [7, 2, 9, 2]);
        assert_eq!(ended.check(&limits), Ok(()));
        assert_eq!(ended.ended(limits.end).expect("it is whole").lens(), [2, 2]);
    }

    #[test]
    fn an_end_token_must_be_in_every_sequence_and_padding_may_not_end_one() {
        let limits = |end| Limits {
            vocabulary: 10,
            segments: None,
            skipped: None,
            longest: None,
            extended: None,
            end: Some(end),
        };
        let batch = Batch::from_packed(vec![7, 2, 9, 5], &[2, 2]).expect("a batch");
        let told = batch.check(&limits(SequenceEnd::Token(2)));
        assert_eq!(
            told.expect_err("the second has no 2").to_string(),
            "sequence 1 lacks the end-of-sequence token 2, at which the model computes its outputs; end the sequence with 2"
        );
        let ended = batch
            .clone()
            .with_required_ends(&limits(SequenceEnd::Token(2)));
        assert_eq!(ended.check(&limits(SequenceEnd::Token(2))), Ok(()));
        assert_eq!(batch.check(&limits(SequenceEnd::NotPadding(9))), Ok(()));
        let told = batch.check(&limits(SequenceEnd::NotPadding(5)));
        assert_eq!(
            told.expect_err("the second ends with 5").to_string(),
            "sequence 1 ends with the padding token 5, but the model computes its outputs at the last token, which must not be padding; remove the padding tokens from the end of the sequence"
        );
        // Hugging Face transformers uses the only token of a sequence even if it is the padding token, so such a sequence is valid.
        let one = Batch::from_packed(vec![5], &[1]).expect("a batch");
        assert_eq!(one.check(&limits(SequenceEnd::NotPadding(5))), Ok(()));
    }

    #[test]
    fn padding_is_removed_only_after_the_last_other_token() {
        let ids = vec![7, 2, 9, 2, 2, 7, 2, 2, 5];
        let batch = Batch::from_packed(ids, &[5, 1, 2, 1]).expect("a batch");
        let ended = batch.ended(Some(SequenceEnd::BeforePadding(2)));
        let ended = ended.expect("it is whole");
        assert_eq!(ended.lens(), [3, 1, 1, 1]);
        assert_eq!(ended.token_ids(), [7, 2, 9, 7, 2, 5]);
    }
}
