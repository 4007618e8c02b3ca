//! Layout for late-interaction models whose expansion tokens are not attended to.

use super::Builder;
use crate::{
    ops::BatchInput,
    program::{Padding, Program},
};

impl Builder {
    /// Returns the padding of a program's runs. The program may be from an artifact, so its inputs are examined instead of the options.
    pub(super) fn padding_of(&self, program: &Program) -> Padding {
        match self.padding {
            Padding::Removed if program.reads(BatchInput::ValidLens) => Padding::Expanded,
            padding => padding,
        }
    }
}
