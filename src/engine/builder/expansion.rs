//! Batch layout for late-interaction models that pad queries with tokens to which no token attends.

use super::Builder;
use crate::{
    ops::BatchInput,
    program::{Padding, Program},
};

impl Builder {
    /// Returns the padding with which `program` runs. Unless padding is kept, a program that reads the valid lengths of sequences runs with
    /// [`Padding::Expanded`]. This is decided by the inputs of the program, not by the options of this builder, because the program of an
    /// artifact was compiled with other options.
    pub(super) fn padding_of(&self, program: &Program) -> Padding {
        match self.padding {
            Padding::Removed if program.reads(BatchInput::ValidLens) => Padding::Expanded,
            padding => padding,
        }
    }
}
