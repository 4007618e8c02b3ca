//! Query expansion of late-interaction models whose tokens are not attended to.

use std::collections::BTreeSet;

use super::Builder;
use crate::{
    model::TOKEN_VECTORS,
    ops::BatchInput,
    program::{Padding, Program},
    text::Folder,
};

impl Builder {
    /// Returns the layout of runs, and the passes that are disabled. If queries of a late-interaction model are expanded by tokens that no
    /// token attends to, sequences may end with such tokens. Only attention with stored scores has a mask for them.
    pub(super) fn layout(&self, folder: Option<&Folder>) -> (Padding, BTreeSet<String>) {
        let late = folder.and_then(Folder::late_interaction);
        let asked = self.outputs.as_ref();
        let computes = asked.is_none_or(|all| all.iter().any(|name| name == TOKEN_VECTORS));
        let hides = computes && late.is_some_and(|late| late.hides_expansion());
        let mut without = self.without.clone();
        match self.padding {
            Padding::Removed if hides => {
                without.insert("fuse_attention".to_owned());
                (Padding::Expanded, without)
            }
            padding => (padding, without),
        }
    }

    /// Returns the layout of the runs of a program, which may be from an artifact.
    pub(super) fn padding_of(&self, program: &Program) -> Padding {
        match self.padding {
            Padding::Removed if program.reads(BatchInput::ValidLens) => Padding::Expanded,
            padding => padding,
        }
    }
}
