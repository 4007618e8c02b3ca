//! Batch layout for late-interaction models that pad queries with tokens to which no token attends.

use super::Builder;
use crate::{
    ops::BatchInput,
    program::{Padding, Program},
};

impl Builder {
    /// Returns the padding with which `program` runs. The inputs of the program determine whether its batches are laid out as
    /// [`Padding::Expanded`], because the program of an artifact was not compiled with the options of this builder.
    pub(super) fn padding_of(&self, program: &Program) -> Padding {
        match self.padding {
            Padding::Removed if program.reads(BatchInput::ValidLens) => Padding::Expanded,
            padding => padding,
        }
    }
}
