//! Batch layout for late-interaction models that pad queries with tokens to which no token attends.

use super::Builder;
use crate::{
    ops::BatchInput,
    program::{Padding, Program},
};

impl Builder {
    /// Returns the padding with which `program` runs: [`Padding::Expanded`] if the builder removes padding and the program reads the valid
    /// lengths of sequences, and otherwise the setting of the builder. The inputs of the program decide, because the program of an artifact
    /// was compiled with other options than those of this builder.
    pub(super) fn padding_of(&self, program: &Program) -> Padding {
        match self.padding {
            Padding::Removed if program.reads(BatchInput::ValidLens) => Padding::Expanded,
            padding => padding,
        }
    }
}
