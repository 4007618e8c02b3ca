//! Batch layout for late-interaction models that pad queries with tokens to which no token attends.

use super::Builder;
use crate::{
    ops::BatchInput,
    program::{Padding, Program},
};

impl Builder {
    /// Returns the padding with which a program runs. An artifact's program may have been compiled with other options than those of this
    /// builder, so the inputs of the program determine whether its sequences are expanded.
    pub(super) fn padding_of(&self, program: &Program) -> Padding {
        match self.padding {
            Padding::Removed if program.reads(BatchInput::ValidLens) => Padding::Expanded,
            padding => padding,
        }
    }
}
