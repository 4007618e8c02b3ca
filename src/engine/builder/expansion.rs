//! Batch layout for late-interaction models that pad queries with tokens to which no token attends.

use super::Builder;
use crate::{
    ops::BatchInput,
    program::{Padding, Program},
};

impl Builder {
    /// Returns the padding with which a program runs. An artifact's program was compiled with other options, so this examines the inputs of
    /// the program instead of the options.
    pub(super) fn padding_of(&self, program: &Program) -> Padding {
        match self.padding {
            Padding::Removed if program.reads(BatchInput::ValidLens) => Padding::Expanded,
            padding => padding,
        }
    }
}
